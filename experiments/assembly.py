"""From a config to an Experiment."""

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from experiments.algorithms import build_algorithm, reads_unlabelled
from experiments.data import Data, choice, load_data
from fedcodist.checks import check_integer
from fedcodist.data.federated_data import FederatedData
from fedcodist.experiment import Experiment
from fedcodist.sources import StreamedData, resident_data
from fedcodist.validation import VALIDATION


def build_experiment(config: ConfigDict, data: Data | None = None) -> Experiment:
    """Assembles the experiment that a config describes.

    Args:
      config: see experiments/configs.
      data: the config's, where they were loaded before.

    Raises:
      ValueError, TypeError: one line that names the setting and what is allowed.
    """
    check_integer("rounds", config.rounds, low=1)
    data = load_data(config.data) if data is None else data
    rows = {}
    if reads_unlabelled(config):
        rows["unlabelled"] = {"image": data.unlabelled}
    if config.algorithm.get("validation") is not None:
        split = choice("algorithm.validation.split", config.algorithm.validation.split, data.splits)
        rows[VALIDATION] = dict(split.columns)
    source = StreamedData if config.execution.stream else resident_data
    return Experiment(
        algorithm=build_algorithm(config, data),
        data=source(data.splits["train"], rows),
        splits=_splits("evaluation.splits", config.evaluation.splits, data.splits),
        final_splits=_splits(
            "evaluation.final_splits", config.evaluation.final_splits, data.splits
        ),
        rounds=config.rounds,
        evaluate_every=config.evaluation.every,
        checkpoint_every=config.evaluation.checkpoint_every,
        seed=config.seed,
        seeds=config.seeds,
        seeds_loop=config.execution.seeds_loop,
        evaluation_batch_size=config.evaluation.batch_size,
        evaluation_preprocess=data.evaluation_preprocess,
    )


def _splits(
    setting: str, names: Sequence[str], splits: Mapping[str, FederatedData]
) -> dict[str, FederatedData]:
    return {name: choice(setting, name, splits) for name in names}
