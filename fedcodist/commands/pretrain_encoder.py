r"""Pre-trains BERT's encoder on the tokens of a prepared folder, for the teachers and students of FedKD.

    python -m fedcodist.commands.pretrain_encoder --data data/ade --workdir runs/ade_encoder \
        --output runs/ade_encoder.safetensors

The encoder learns to guess hidden tokens, on one machine and without a federation. It replaces published
weights where they are not available; its quality depends on the amount of text. The same command
continues a run that was stopped. The setting `data.encoder` names the file from which networks start.
The file has BERT's names: `fedcodist.text.bert_weights.load_encoder` and `transformers` read it, and
`first_layers` makes a student's start from it. It has the checksum of the folder's vocabulary, so that
`data.encoder` refuses it for data with other word pieces.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcodist.config import command_line
from fedcodist.run import compilation_cache

if TYPE_CHECKING:
    from fedcodist.data.bert_tokens import BertVocabulary
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.run.experiment import Experiment

HELD_OUT = 0.05  # share of the texts on which guesses are counted
WARM_UP = 0.1  # share of the steps in which the learning rate grows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    parser = command_line.Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, type=Path, help="prepared folder with word pieces")
    parser.add_argument("--split", default="train", help="split of texts; 'news' of MIND")
    parser.add_argument("--workdir", required=True, type=Path, help="run folder")
    parser.add_argument("--output", required=True, type=Path, help="safetensors file to write")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="the largest one")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    compilation_cache.cache_compilations()
    import jax

    from fedcodist.run.checkpoint import CheckpointError
    from fedcodist.run.divergence import TrainingDiverged
    from fedcodist.run.experiment import check_experiment, run_experiment
    from fedcodist.run.folder_check import RunFolderError
    from fedcodist.text.bert_weights import VOCABULARY, save_encoder, vocabulary_checksum

    try:
        experiment, vocabulary = _experiment(settings)
        check_experiment(experiment)
    except Exception as error:
        if not command_line.is_mistake(error):
            raise
        return command_line.refuse(error)
    # A folder may be written in another way, or have been moved, when the run is started again.
    folders = ("output", "workdir")
    config = {name: str(value) for name, value in vars(settings).items() if name not in folders}
    try:
        outcome = run_experiment(
            experiment, settings.workdir, config={"name": "pretrain_encoder", **config}
        )
    except (TrainingDiverged, CheckpointError, RunFolderError) as error:
        return command_line.refuse(error)
    (variables,) = outcome.variables.values()
    params = jax.tree.map(lambda leaf: leaf[0], variables.params["encoder"])
    metadata = {
        "heads": str(settings.heads),
        VOCABULARY: vocabulary_checksum(vocabulary.pieces),
    }
    try:
        save_encoder(settings.output, params, metadata)
    except OSError as error:
        return command_line.refuse(error)
    print(f"encoder: {settings.output}")
    return 0


def _experiment(settings: argparse.Namespace) -> "tuple[Experiment, BertVocabulary]":
    """One party with all texts, and their vocabulary. Raises ValueError for a setting out of range."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedcodist.algorithms.parties.groups import PartyGroup
    from fedcodist.algorithms.parties.local_only import LocalOnlyHyper, local_only
    from fedcodist.core.checks import check_integer, check_number
    from fedcodist.core.local_training import LocalTraining
    from fedcodist.run.experiment import Experiment
    from fedcodist.run.sources import resident_data
    from fedcodist.text.bert import Encoder
    from fedcodist.text.masked_tokens import hidden_tokens, masked_language_model

    for name in ("layers", "width", "heads", "epochs", "batch_size"):
        check_integer(f"--{name.replace('_', '-')}", getattr(settings, name), low=1)
    check_integer("--seed", settings.seed, low=0)
    check_number("--learning-rate", settings.learning_rate, above=0)
    if settings.output.is_dir():
        raise ValueError(f"--output must be a file, {settings.output} is a folder.")
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    texts, vocabulary = _texts(settings)
    steps = settings.epochs * -(-texts["train"].num_examples // settings.batch_size)

    # Run folders hold the name of this function, so it stays here.
    def optimizer(rate: jax.Array | float) -> optax.GradientTransformation:
        rises = max(1.0, WARM_UP * steps)
        rate_at = lambda step: (
            rate * jnp.minimum((step + 1) / rises, (steps - step) / max(1.0, steps - rises))
        )
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate_at, weight_decay=0.01))

    encoder = Encoder(
        vocabulary.size,
        settings.width,
        settings.layers,
        settings.heads,
        positions=max(128, texts["train"].columns["tokens"].shape[1]),
    )
    preprocess = hidden_tokens(vocabulary)
    training = LocalTraining(optimizer, settings.batch_size, preprocess=preprocess)
    party = PartyGroup(masked_language_model(encoder), np.array([0]))
    experiment = Experiment(
        algorithm=local_only(
            {"encoder": party},
            training,
            hyper=LocalOnlyHyper(settings.learning_rate),
            name="pre-training by hidden tokens",
        ),
        data=resident_data(texts["train"]),
        splits={"held_out": texts["held_out"]},
        rounds=settings.epochs,
        evaluate_every=1,
        seed=settings.seed,
        evaluation_batch_size=settings.batch_size,
        evaluation_preprocess=preprocess,
    )
    return experiment, vocabulary


def _texts(settings: argparse.Namespace) -> "tuple[dict[str, FederatedData], BertVocabulary]":
    """The folder's texts in random order, `train` and `held_out`, and their vocabulary.

    Raises:
      ValueError: the folder has no texts of word pieces, or too few.
    """
    import numpy as np

    from fedcodist.data.bert_tokens import BertVocabulary
    from fedcodist.data.federated_data import FederatedData
    from fedcodist.data.prepared import load_prepared

    prepared = load_prepared(settings.data)
    for split, column in ((settings.split, "tokens"), ("vocabulary", "piece")):
        if split not in prepared or column not in prepared[split].columns:
            raise ValueError(f"--data {settings.data} has no split {split!r} with {column!r}.")
    vocabulary = BertVocabulary(tuple(prepared["vocabulary"].columns["piece"].tolist()))
    tokens = np.asarray(prepared[settings.split].columns["tokens"])
    tokens = np.random.default_rng(settings.seed).permutation(tokens[tokens.any(axis=1)])
    held_out = max(1, round(HELD_OUT * len(tokens)))
    if len(tokens) <= held_out:
        raise ValueError(f"--split {settings.split} must have at least 2 texts.")
    texts = {
        name: FederatedData.of_one_client({"tokens": part})
        for name, part in (("train", tokens[held_out:]), ("held_out", tokens[:held_out]))
    }
    return texts, vocabulary


if __name__ == "__main__":
    sys.exit(main())
