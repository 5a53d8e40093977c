"""The training before FedMD's first round, in phases. Each phase is a run with its own folder.

Other methods of parties may begin in the same way.

public: every party's model learns the public examples. This takes longest and can be stored for other
  runs.
private: every party's model learns the party's examples. The result is the baseline without
  collaboration.
centralised: from the models after `public`, every model learns all parties' examples. The result is the
  upper bound; the collaboration does not start from it.

Their run folders are `phases/<phase>` of the collaboration's; `fedcodist.report.tables_parties` makes
a table of them.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.parties import local_only
from fedcodist.algorithms.parties.groups import stacked
from fedcodist.algorithms.parties.local_only import SHARED, LocalOnlyHyper, LocalOnlyParty
from fedcodist.algorithms.parties.party import init_models
from fedcodist.algorithms.parties.patience import Patience
from fedcodist.config import party_methods
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data import Data
from fedcodist.config.execution import execution_of
from fedcodist.config.metrics import with_metrics
from fedcodist.config.normalisation import normalisation
from fedcodist.config.party_methods import (
    embedding_width,
    output_penalty_of,
    party_groups,
    party_optimizer,
    party_shapes,
    public_of,
)
from fedcodist.config.referenced_code import described_references
from fedcodist.config.registry import method_of, run_title
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.devices import from_all_processes
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.validation import VALIDATION, ValidationData
from fedcodist.run.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from fedcodist.run.experiment import Experiment, Outcome, check_experiment, run_experiment
from fedcodist.run.folder_check import PHASES, RunFolderError
from fedcodist.run.sources import StreamedData, resident_data

PyTree = Any
Models = dict[str, Any]  # architecture -> Variables, leaves [seeds, group, ...]
# Data on which early stopping evaluates: none ("fixed"); held-out public examples, in the public phase
# only; test data, in all phases, as in the released code.
STOPPING = ("fixed", "held_out", "test_data")
_COLLABORATION = "collaboration"
_CACHE_VERSION = 3  # to be raised when public training gives other results for the same settings


def run_phases(
    config: ConfigDict,
    data: Data,
    workdir: str | Path,
    plan: Mapping[str, Any] | None = None,
    change_plan: bool = False,
    show_progress: bool = True,
    prepared: Mapping[str, str] | None = None,
) -> PyTree:
    """Runs the phases, or continues where they were stopped, and prints the name of each.

    Args:
      config, data: of the collaboration.
      workdir: the collaboration's run folder.
      plan, change_plan, show_progress, prepared: as `run_experiment` gets them.

    Returns:
      The collaboration's state before its first round, leaves [seeds, ...].

    Raises:
      RunFolderError: one line; a phase in `workdir` is of other settings or models.
    """
    groups, key = party_groups(config, data), _pretraining_key(config, data)
    _check_pretraining(Path(workdir) / PHASES, key)
    common: dict[str, Any] = dict(
        plan=plan, change_plan=change_plan, show_progress=show_progress, prepared=prepared
    )

    announce = _announcer(config, show_progress and jax.process_index() == 0)

    def run(phase: str, start: Models | None) -> Outcome:
        experiment = phase_experiment(config, data, phase, start)
        return run_experiment(
            experiment,
            Path(workdir) / PHASES / phase,
            config={"phase": phase, "pretraining": key, **_determinants(config, phase)},
            name=f"{run_title(config.to_dict())} · {phase} training",
            **common,
        )

    trained = lambda: stacked(groups, run("public", None).variables)
    announce("public")
    public = _cached(config, groups, key, trained)
    announce("private")
    private = run("private", public).state
    if config.phases.centralised_bound:
        announce("centralised")
        run("centralised", public)
    announce(_COLLABORATION)
    seeds = np.arange(config.seed, config.seed + config.seeds, dtype=np.uint32)

    def start(seed: jax.Array, trained: dict[str, LocalOnlyParty]) -> PyTree:
        return party_methods.start(config, data, trained, jax.random.key(seed))

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(start))(seeds, private))


def check_phases(config: ConfigDict, data: Data) -> None:
    """Raises ValueError or TypeError that names the setting if a phase cannot be run."""
    for phase in _phases(config):
        phase_experiment(config, data, phase)


def _phases(config: ConfigDict) -> tuple[str, ...]:
    """The phases before the collaboration, in their order."""
    bound = ("centralised",) if config.phases.centralised_bound else ()
    return ("public", "private", *bound)


def _announcer(config: ConfigDict, is_shown: bool) -> Callable[[str], None]:
    """Returns a function that prints 'phase 2 of 4: private training'; the collaboration is the last."""
    phases = (*_phases(config), _COLLABORATION)

    def announce(phase: str) -> None:
        if is_shown:
            what = method_of(config.to_dict())
            what = what if phase == _COLLABORATION else f"{phase} training"
            print(f"phase {phases.index(phase) + 1} of {len(phases)}: {what}", flush=True)

    return announce


def phase_experiment(
    config: ConfigDict, data: Data, phase: str, start: Models | None = None
) -> Experiment:
    """The experiment of one phase; `start` are the models after the previous phase."""
    settings, public = config.phases[phase], public_of(data)
    choice("phases.stopping", config.phases.stopping, dict.fromkeys(STOPPING))
    check_integer(f"phases.{phase}.epochs", settings.epochs, low=1)
    preprocess, evaluation_preprocess = data.preprocess, data.evaluation_preprocess
    if phase == "public":
        preprocess = public.preprocess
        evaluation_preprocess = public.evaluation_preprocess or preprocess
    training = LocalTraining(party_optimizer(config.algorithm), settings.batch_size, 1, preprocess)
    data_sets: dict[str, Any] = {}
    if "test" not in data.splits:
        raise ValueError(f"data must have a split 'test' for phases, got {sorted(data.splits)}.")
    private, test = data.splits["train"], data.splits["test"]
    splits, final_splits, stopped_on = {"test": test}, {}, None
    if config.phases.stopping == "test_data":
        stopped_on = "test data"
    elif "held_out" in data.splits:
        splits, final_splits = {"held_out": data.splits["held_out"]}, splits
    if phase == "centralised":
        data_sets[SHARED] = private.all_examples()
    if phase == "public":
        shared, splits, final_splits = public.train, {"public_test": public.test}, {}
        if config.phases.stopping == "held_out":
            shared, held_out = _held_out(
                public.train, config.phases.held_out_share, config.data.seed
            )
            splits, final_splits = {"held_out": held_out}, splits
            stopped_on = "held-out public data"
        data_sets[SHARED] = shared.all_examples()
    patience = None
    if stopped_on:
        validation = next(iter(splits.values()))
        data_sets[VALIDATION] = validation.all_examples()
        patience = Patience(
            ValidationData(validation.num_examples, preprocess=evaluation_preprocess),
            settings.patience,
            settings.min_delta,
            stopped_on,
        )
    groups = party_groups(config, data)
    with named(f"phases.{phase}: "):
        algorithm = local_only.local_only(
            groups,
            training,
            len(data_sets[SHARED]["label"]) if SHARED in data_sets else None,
            patience,
            output_penalty_of(config),
            LocalOnlyHyper(config.algorithm.learning_rate),
            execution_of(config),
            name=f"{phase} training",
        )
    state = None
    if start is not None:
        fresh = jax.jit(jax.vmap(lambda models: local_only.start(models, training)))
        state = jax.tree.map(np.asarray, fresh(start))
    source = StreamedData if config.execution.stream else resident_data
    experiment = Experiment(
        with_metrics(algorithm, config.get("metrics") or {}),
        source(private, data_sets),
        splits,
        settings.epochs,
        final_splits,
        evaluate_every=min(config.phases.evaluate_every, settings.epochs),
        seed=config.seed,
        seeds=config.seeds,
        seeds_loop=config.execution.seeds_loop,
        evaluation_batch_size=config.evaluation.batch_size,
        evaluation_preprocess=evaluation_preprocess,
        start=state,
    )
    check_experiment(experiment)
    return experiment


def _held_out(data: FederatedData, share: float, seed: int) -> tuple[FederatedData, FederatedData]:
    check_number("phases.held_out_share", share, low=0, high=1)
    count = round(share * data.num_examples)
    if not 0 < count < data.num_examples:
        raise ValueError(
            f"phases.held_out_share must leave examples on both sides, got {share} of "
            f"{data.num_examples}."
        )
    order = np.random.default_rng(seed).permutation(data.num_examples)
    parts = (np.sort(order[count:]), np.sort(order[:count]))
    train, held_out = (
        FederatedData.of_one_client(
            {name: column[indices] for name, column in data.columns.items()}, "public"
        )
        for indices in parts
    )
    return train, held_out


def _check_pretraining(folder: Path, key: str) -> None:
    """Raises RunFolderError, before any training, if later phases started from other public models."""
    for phase in ("private", "centralised"):
        path = folder / phase / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot read {path}: {error}.") from error
        if not isinstance(config, dict) or config.get("pretraining") != key:
            raise RunFolderError(
                f"run folder {folder / phase} went on from other public training: its settings "
                "(phases.public), images or version were others. Use another --workdir."
            )


def _determinants(config: ConfigDict, phase: str) -> dict[str, Any]:
    """The settings on which a phase's result depends."""
    algorithm, shapes = config.algorithm, party_shapes(config)
    networks: dict[str, Any] = {
        "networks": [shape if isinstance(shape, str) else list(shape) for shape in shapes]
    }
    if width := embedding_width(config):
        networks["embedding_width"] = width
    if optimizer := algorithm.get("optimizer"):
        networks["optimizer"] = optimizer
    code = described_references(config)
    of_models = ("parties.", "data.", "algorithm.optimizer")
    if of_networks := {name: code[name] for name in code if name.startswith(of_models)}:
        networks["code"] = of_networks  # after an edit no phase that was kept for other runs fits
    return {
        "data": config.data.to_dict(),
        **networks,
        "settings": config.phases[phase].to_dict(),
        "stopping": config.phases.stopping,
        "held_out_share": config.phases.held_out_share,
        "learning_rate": algorithm.learning_rate,
        "epsilon": algorithm.get("epsilon"),
        "output_penalty": algorithm.output_penalty,
        "seed": config.seed,
        "seeds": config.seeds,
    }


def _cached(config: ConfigDict, groups: Any, key: str, train: Callable[[], Models]) -> Models:
    """The public phase's models, read from `phases.cache`, or else trained and stored there.

    Raises:
      CheckpointError: the folder cannot be written, or holds other arrays under this name.
    """
    if config.phases.cache is None:
        return train()
    folder = Path(config.phases.cache) / key
    shapes = jax.eval_shape(
        jax.vmap(lambda seed: init_models(groups, jax.random.key(seed))),
        jax.ShapeDtypeStruct((config.seeds,), np.uint32),
    )
    saved = load_checkpoint(folder, shapes)
    if saved is None and any(folder.glob("*.msgpack")):
        print(f"pre-training kept in {folder} is corrupt: it is done again.", file=sys.stderr)
    if all(from_all_processes(int(saved is not None))):
        assert saved is not None
        print(f"pre-training: kept in {folder}", flush=True)
        return saved.state
    try:  # before training, so that a folder that cannot be written is noticed at once
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror}.") from error
    models = train()
    if jax.process_index() == 0:
        save_checkpoint(folder, config.phases.public.epochs, models, {})
    return models


def _pretraining_key(config: ConfigDict, data: Data) -> str:
    """A name of the public phase's result: a hash of networks, data, settings and seeds."""
    digest = hashlib.sha256()
    about = {"version": _CACHE_VERSION, **_determinants(config, "public")}
    # Images, and the choice of held-out ones, are hashed by content instead of by the settings `data`.
    of_images = ("mean", "deviation", "crop", "padding", "augmentation", "preprocess")
    about |= {f"data.{name}": about["data"][name] for name in of_images if about["data"].get(name)}
    if config.data.name == "prepared_primary":  # its manifest may say how images are normalised
        about["normalisation"] = normalisation(config.data, data.unlabelled.shape[1:])
    del about["data"]
    if config.phases.stopping == "held_out":
        about["held_out_seed"] = config.data.seed
    digest.update(json.dumps(about, sort_keys=True).encode())
    public = public_of(data)
    for split in (public.train, public.test):
        for name, column in sorted(split.columns.items()):
            digest.update(f"{name} {column.dtype} {column.shape}".encode())
            digest.update(np.ascontiguousarray(column).data)
    return f"public_{digest.hexdigest()[:24]}"
