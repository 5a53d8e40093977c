"""Builds an Experiment from a config."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.config_errors import as_settings, choice
from fedcodist.config.data import Data, load_data
from fedcodist.config.data_bert import ENCODED
from fedcodist.config.division import divided
from fedcodist.config.graph_methods import centralised_examples
from fedcodist.config.metrics import with_metrics
from fedcodist.config.privacy import budget_of
from fedcodist.config.references import is_reference
from fedcodist.config.registry import algorithm_entry
from fedcodist.config.schedules import with_schedules
from fedcodist.config.settings import check_settings
from fedcodist.core.checks import check_integer
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.validation import VALIDATION
from fedcodist.run import launch
from fedcodist.run.chunk_size import ChunkSize, choose_chunk_size
from fedcodist.run.client_splits import ClientSplit
from fedcodist.run.experiment import Experiment, check_experiment
from fedcodist.run.sources import StreamedData, resident_data

_MOST_AROUND = 10**6


def build_experiment(config: ConfigDict, data: Data | None = None) -> Experiment:
    """Builds the experiment that a config describes.

    Args:
      config: see fedcodist/configs.
      data: the config's data, where they are loaded already.

    Raises:
      ValueError, TypeError: one line that names the setting and what is allowed.
    """
    check_settings(config)
    with as_settings(config):
        config = divided(config)
        data = load_data(config.data) if data is None else data
        return _assemble(with_chunk_size(config, data)[0], data)


def with_chunk_size(config: ConfigDict, data: Data) -> tuple[ConfigDict, ChunkSize | None]:
    """The config with `execution.chunk_size`, which is chosen for the devices where it is not set.

    Returns:
      The config, and how its chunk size was chosen, or None where that was not needed.

    Raises:
      ValueError, TypeError: as `build_experiment`, or not even one client fits into memory.
    """
    execution = config.execution
    if execution.chunk_size is not None:
        return config, None

    def with_size(chunk_size: int) -> ConfigDict:
        chunked = config.copy_and_resolve_references()
        chunked.execution.chunk_size = chunk_size
        return chunked

    if execution.loop != "vmap":
        return with_size(1), None
    check_experiment(_assemble(with_size(1), data))  # reports mistakes before anything compiles
    chosen = choose_chunk_size(
        lambda size: _assemble(with_size(size), data), launch.processes_here()
    )
    return with_size(chosen.clients), chosen


def _assemble(config: ConfigDict, data: Data) -> Experiment:
    check_integer("rounds", config.rounds, low=1)
    for name in ("every", "batch_size", "checkpoint_every", "clients"):
        if config.evaluation.get(name) is not None:
            check_integer(f"evaluation.{name}", config.evaluation[name], low=1)
    _check_samples(config, data)
    data_sets, reads = {}, algorithm_entry(config).reads
    if "unlabelled" in reads:
        if is_reference(config.data.name) and not len(data.unlabelled):
            raise ValueError(
                f"data.name {config.data.name!r} must return a split 'distillation', the unlabelled "
                f"examples of algorithm.name={config.algorithm.name!r}."
            )
        if not len(data.unlabelled) and config.data.name in ENCODED:
            raise ValueError(
                f"algorithm.name={config.algorithm.name!r} cannot be used with "
                f"data.name={config.data.name!r}, which has no unlabelled examples."
            )
        if not len(data.unlabelled):
            raise ValueError(
                f"data.unlabelled_folder must be set for algorithm.name={config.algorithm.name!r}: "
                "data.folder has no 'distillation'."
            )
        data_sets["unlabelled"] = {data.inputs: data.unlabelled} | _labels_read(config, data)
    if "public" in reads and data.public is not None:
        data_sets[PUBLIC] = {"image": data.public.train.columns["image"]}
    if "shared" in reads:
        data_sets[SHARED] = centralised_examples(data)
    if config.algorithm.get("validation") is not None:
        split = choice("algorithm.validation.split", config.algorithm.validation.split, data.splits)
        data_sets[VALIDATION] = dict(split.columns)
    source = StreamedData if config.execution.stream else resident_data
    in_every_evaluation = config.evaluation.get("client_splits") or ()
    return Experiment(
        algorithm=with_metrics(
            with_schedules(build_algorithm(config, data), config), config.get("metrics") or {}
        ),
        data=source(data.splits["train"], data_sets),
        splits=_splits("evaluation.splits", config.evaluation.splits, data.splits),
        final_splits=_splits(
            "evaluation.final_splits", config.evaluation.final_splits, data.splits
        ),
        client_splits=_client_splits("client_splits", (), config, data),
        final_client_splits=_client_splits(
            "final_client_splits",
            [name for name in data.client_splits if name not in in_every_evaluation],
            config,
            data,
        ),
        rounds=config.rounds,
        evaluate_every=config.evaluation.every,
        evaluate_also=_around_codistillations(config),
        evaluate_clients=config.evaluation.get("clients", 100),
        checkpoint_every=config.evaluation.checkpoint_every,
        seed=config.seed,
        seeds=config.seeds,
        seeds_loop=config.execution.seeds_loop,
        evaluation_batch_size=config.evaluation.batch_size,
        evaluation_preprocess=data.evaluation_preprocess,
        privacy=budget_of(config),
    )


def _check_samples(config: ConfigDict, data: Data) -> None:
    """Raises ValueError for a sampled softmax of networks that predict no words."""
    training = config.get("training") or {}  # parties have none
    is_own = is_reference(config.data.name) or is_reference(training.get("method"))
    if (samples := training.get("samples")) and data.text is None and not is_own:
        raise ValueError(
            f"training.samples must be 0 with data.name={config.data.name!r}, got {samples}: only "
            "language models have a softmax over all words."
        )


def _labels_read(config: ConfigDict, data: Data) -> dict[str, Any]:
    """The column of the unlabelled images' labels, where a pool's targets use them too."""
    shares = {
        f"pools.{name}.teaching.label_interpolation": pool.get("teaching", {}).get(
            "label_interpolation"
        )
        for name, pool in config.get("pools", {}).items()
    }
    given = [setting for setting, share in shares.items() if share is not None]
    if not given or data.text is not None:
        return {}
    if data.unlabelled_labels is None:
        raise ValueError(
            f"{given[0]} must be None: the server's images of data.name {config.data.name!r} have no "
            "labels of the clients' classes."
        )
    return {"label": data.unlabelled_labels}


def _around_codistillations(config: ConfigDict) -> list[int]:
    """The rounds near a codistillation; `evaluation.around` has their numbers before and after it."""
    around = config.evaluation.get("around")
    if around is None:
        return []
    for name in ("before", "after"):
        check_integer(f"evaluation.around.{name}", around[name], low=0)
    period = config.algorithm.period
    check_integer("algorithm.period", period, low=1)
    if (count := config.rounds // period * (around.before + around.after + 1)) > _MOST_AROUND:
        raise ValueError(
            f"evaluation.around must be at most {_MOST_AROUND:,} evaluations in a run, got {count:,}."
        )
    rounds = {
        round
        for middle in range(period, config.rounds + 1, period)
        for round in range(middle - around.before, middle + around.after + 1)
    }
    return sorted(round for round in rounds if 0 <= round <= config.rounds)


def _client_splits(
    setting: str, default: Iterable[str], config: ConfigDict, data: Data
) -> dict[str, ClientSplit]:
    names = config.evaluation.get(setting)
    names = default if names is None else names
    for name in names:
        if name not in data.client_splits:
            made = "data.client_test_share and data.unseen_clients make them"
            raise ValueError(
                f"evaluation.{setting} must be of {sorted(data.client_splits)}, got {name!r}: {made}."
            )
    return {name: data.client_splits[name] for name in names}


def _splits(
    setting: str, names: Sequence[str], splits: Mapping[str, FederatedData]
) -> dict[str, FederatedData]:
    return {name: choice(setting, name, splits) for name in names}
