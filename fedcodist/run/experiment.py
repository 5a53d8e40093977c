"""`run_experiment`: what determines a run's results, its checks, its run folder and its outcome."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_boolean, check_text, shown
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Variables
from fedcodist.core.padding_checks import collected_padding
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.splits import federated_splits
from fedcodist.privacy.accounting import PrivacyBudget
from fedcodist.run.callbacks import (
    Callback,
    check_callbacks,
    finish_callbacks,
    keeper_of,
    start_callbacks,
)
from fedcodist.run.client_metrics import ClientMetrics
from fedcodist.run.client_splits import ClientSplit, checked_client_splits
from fedcodist.run.experiment_checks import (
    check_programs,
    check_settings,
    check_storable,
    checked_start,
)
from fedcodist.run.identity import hyper_of, identity_of, start_of
from fedcodist.run.metrics_lines import Record
from fedcodist.run.metrics_text import final_text
from fedcodist.run.placement import all_devices
from fedcodist.run.programs import MadeOf, Programs, build_programs
from fedcodist.run.progress import progress
from fedcodist.run.resume import check_same_run
from fedcodist.run.run_folder import RunFolder
from fedcodist.run.sources import ResidentData, StreamedData
from fedcodist.run.training_loop import TrainingLoop, models_on_host

PyTree = Any
_LEAST_METRICS_ROOM = 1000  # rounds; a program's buffer of metrics is never smaller


class Experiment(NamedTuple):
    """Everything that determines a run's results.

    Attributes:
      algorithm: what is run.
      data: clients' examples and unlabelled data, on the device or streamed.
      splits: name -> examples of every evaluation, FederatedData or plain columns.
      final_splits: name -> examples that are evaluated after the last round only: the test data.
      rounds: number of rounds.
      evaluate_every: rounds from one evaluation to the next; the last round is always evaluated.
      checkpoint_every: rounds from one checkpoint to the next, a multiple of evaluate_every.
      seed: the first seed.
      seeds: number of seeds, trained as one more axis of the same program.
      seeds_loop: 'map' for one seed after another inside the program, 'vmap' for all at once.
      evaluation_batch_size: examples per device and step in evaluation.
      evaluation_preprocess: (batch, key, positions) -> batch for evaluation.
      start: the state before the first round, leaves [seeds, ...], such as the last state of an earlier
        phase; by default that of `algorithm.init`. It must be None for private pools.
      evaluate_also: further rounds that are evaluated, such as those around a codistillation.
      evaluate_clients: how many clients of a pool, evenly spread over it, have their personal models,
        such as FedKD's teachers, evaluated on `splits`; all if the pool has fewer.
      client_splits: name -> ClientSplit, or FederatedData of each client's own examples. Every
        evaluation measures on them the models that clients would use. The last one also measures models
        after further local training, where the method has such fine-tuned models.
      final_client_splits: the same, but measured after the last round only: clients' test examples.
      privacy: the delta at which private methods' epsilon is counted, and the largest epsilon; the
        defaults of PrivacyBudget where not given.
    """

    algorithm: FederatedAlgorithm
    data: ResidentData | StreamedData
    splits: Mapping[str, Any]
    rounds: int
    final_splits: Mapping[str, Any] = {}
    evaluate_every: int = 10
    checkpoint_every: int | None = None
    seed: int = 0
    seeds: int = 1
    seeds_loop: str = "map"
    evaluation_batch_size: int = 500
    evaluation_preprocess: Preprocess = lambda batch, key, positions: batch
    start: PyTree = None
    evaluate_also: Collection[int] = ()
    evaluate_clients: int = 100
    client_splits: Mapping[str, ClientSplit | FederatedData] = {}
    final_client_splits: Mapping[str, ClientSplit | FederatedData] = {}
    privacy: PrivacyBudget | None = None


class Kept(NamedTuple):
    """The round that a callback has kept, and its models as in `Outcome.variables`."""

    round: int
    variables: dict[str, Variables]


class Outcome(NamedTuple):
    """The results of a run.

    Attributes:
      records: metrics lines, a dictionary per evaluation, model, split and seed, as in metrics.jsonl.
      variables: model -> trained Variables with a leading axis of seeds, on the host.
      summary: as in summary.json.
      state: the algorithm's last state, leaves [seeds, ...], for a later phase's `start`.
      kept: what a callback such as `KeepBest` has kept; None where none did.
      clients: split -> model -> ClientMetrics of the last evaluation of `client_splits`.
      client_states: what clients keep, such as personal models; `models_of_client` reads it.
    """

    records: list[Record]
    variables: dict[str, Variables]
    summary: dict[str, Any]
    state: PyTree = None
    kept: Kept | None = None
    clients: Mapping[str, Mapping[str, ClientMetrics]] = {}
    client_states: PyTree = None


def run_experiment(
    experiment: Experiment,
    workdir: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    change_plan: bool = False,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = True,
    name: str = "",
    programs: Programs | None = None,
    prepared: Mapping[str, Any] | None = None,
) -> Outcome:
    """Trains, evaluates and logs; continues where a killed run with the same workdir stopped.

    Args:
      experiment: what to run.
      workdir: run folder; None keeps everything in memory.
      config: written to config.json. A run continues only with the same config and data. Without a
        config or `prepared`, all settings and functions of the experiment are compared too, as far as
        they can be named.
      plan: how the run is executed. A run continues under another plan, or with another jaxlib,
        precision or kind of device, only with `change_plan`.
      change_plan: see plan.
      callbacks: called with the metrics lines of every evaluation, such as loggers; they may stop the
        run or keep its best models: see `fedcodist.run.callbacks`. A run that a callback stopped is
        finished and does not continue when it is started again.
      show_progress: whether to show a live bar in a terminal, or plain lines elsewhere.
      name: shown beside the progress.
      programs: `experiment_programs` of an experiment with the same algorithm, except for the floats of
        `algorithm.hyper`, with the same settings of evaluation, and with as many rounds between
        evaluations, or more; built and compiled where not given.
      prepared: checksums of the data's prepared folders, and descriptions of code that a config refers
        to. A run continues only if they are the same.

    Raises:
      ValueError, TypeError: names a setting or argument that is not allowed, before anything compiles.
      TrainingDiverged: a non-finite update; the last good checkpoint stays.
      CheckpointError, RunFolderError: the folder cannot be written, belongs to another run, or is in
        use by another process.
    """
    _check_kinds(experiment)
    _check_run(workdir, programs)
    for argument, value in (("config", config), ("plan", plan), ("prepared", prepared)):
        check_storable(argument, value)
    for argument, flag in (("change_plan", change_plan), ("show_progress", show_progress)):
        check_boolean(argument, flag)
    check_text("name", name)
    experiment = _with_federated_splits(experiment)
    checkpoint_every = check_experiment(experiment)
    if experiment.start is not None:
        experiment = experiment._replace(start=checked_start(experiment))
    if programs is not None:
        check_programs(programs.made_of, _program_arguments(experiment))
    check_callbacks(callbacks, experiment)
    is_writer = jax.process_index() == 0
    opened: contextlib.AbstractContextManager[RunFolder | None] = contextlib.nullcontext()
    if workdir is not None:
        opened = RunFolder(workdir, writes=is_writer)
    # `check_experiment` has checked padding in batch statistics, so warnings of it are only collected.
    with opened as folder, collected_padding():
        identity = None
        if folder:
            # Without `prepared`, only the experiment shows the code that a config refers to.
            is_described = config is not None and prepared is not None
            identity = identity_of(experiment, is_described, prepared)
            # The plan of a command has the config's settings of execution.
            execution = {} if is_described else identity.execution
            machine = {
                "processes": jax.process_count(),
                "devices": jax.device_count(),
                "platform": jax.default_backend(),
            }
            whole_plan = {**machine, **execution, **(plan or {})}
            if is_writer:
                settings = _described(experiment) if config is None else config
                folder.claim(settings, whole_plan, change_plan, identity, keeper_of(callbacks))
        check_same_run(config, plan, identity and identity.content)
        callbacks = callbacks if is_writer else ()
        start_callbacks(callbacks, config)
        outcome = _run(
            experiment, checkpoint_every, folder, callbacks, show_progress, name, programs
        )
        finish_callbacks(callbacks, outcome.summary)
        return outcome


def check_experiment(experiment: Experiment) -> int:
    """Raises ValueError or TypeError that names the setting or function which is not allowed.

    The algorithm's round is traced by shape. Training uses the same trace.

    Returns:
      Rounds between checkpoints.
    """
    _check_kinds(experiment)
    return check_settings(_with_federated_splits(experiment))


def experiment_programs(experiment: Experiment) -> Programs:
    """The programs that `run_experiment` runs, over all devices; nothing compiles yet."""
    arguments = _program_arguments(experiment)
    return build_programs(
        arguments.algorithm,
        arguments.interval,
        all_devices(),
        arguments.seeds_loop,
        arguments.evaluation_batch_size,
        arguments.evaluation_preprocess,
    )


def _program_arguments(experiment: Experiment) -> MadeOf:
    return MadeOf(
        experiment.algorithm,
        longest_block(experiment),
        experiment.seeds_loop,
        experiment.evaluation_batch_size,
        experiment.evaluation_preprocess,
        hyper_per_seed=False,
    )


def longest_block(experiment: Experiment) -> int:
    """The largest number of rounds of one call of `Programs.train`, which has room for their metrics.

    Some write 10**9 in `evaluate_every` for a run that is evaluated at its end.
    """
    return min(experiment.evaluate_every, max(experiment.rounds, _LEAST_METRICS_ROOM))


def _check_kinds(experiment: Experiment) -> None:
    """Raises TypeError that names the experiment, or the part of it, that is of another type."""
    if not isinstance(experiment, Experiment):
        raise TypeError(f"experiment must be an Experiment, got {shown(experiment)}.")
    if not isinstance(experiment.algorithm, FederatedAlgorithm):
        raise TypeError(
            "algorithm must be what a method of pools, parties or a graph returns, such as "
            f"independent_pools, got {shown(experiment.algorithm)}."
        )
    if not isinstance(experiment.data, ResidentData | StreamedData):
        raise TypeError(
            f"data must be made by resident_data or StreamedData, got {shown(experiment.data)}."
        )


def _check_run(workdir: Any, programs: Any) -> None:
    if not isinstance(workdir, str | os.PathLike | None) or "\0" in str(workdir):
        raise TypeError(f"workdir must be the path of a run folder, got {shown(workdir)}.")
    if not isinstance(programs, Programs | None):
        raise TypeError(f"programs must be made by experiment_programs, got {shown(programs)}.")


def _with_federated_splits(experiment: Experiment) -> Experiment:
    # JSON holds no NumPy integers.
    whole: dict[str, Any] = {
        n: int(v) for n, v in experiment._asdict().items() if isinstance(v, np.integer)
    }
    return experiment._replace(
        **whole,
        client_splits=checked_client_splits("client_splits", experiment.client_splits),
        final_client_splits=checked_client_splits(
            "final_client_splits", experiment.final_client_splits
        ),
        splits=federated_splits("splits", experiment.splits),
        final_splits=federated_splits("final_splits", experiment.final_splits),
    )


def _described(experiment: Experiment) -> dict[str, Any]:
    """The settings of an experiment that JSON can hold, for a run folder without a config.

    The number of rounds is not among them, since it may grow later.
    """
    return {
        "algorithm": experiment.algorithm.name,
        "hyper": hyper_of(experiment),
        "clients": experiment.data.num_clients,
        "splits": sorted([*experiment.splits, *experiment.final_splits]),
        "evaluate_every": experiment.evaluate_every,
        "seed": experiment.seed,
        "seeds": experiment.seeds,
        "start": start_of(experiment),
    }


def _run(
    experiment: Experiment,
    checkpoint_every: int,
    folder: RunFolder | None,
    callbacks: Sequence[Callback],
    show_progress: bool,
    name: str,
    programs: Programs | None,
) -> Outcome:
    is_shown = show_progress and jax.process_index() == 0
    name = name or experiment.algorithm.name
    programs = programs or experiment_programs(experiment)
    loop = TrainingLoop(experiment, programs, all_devices(), checkpoint_every, folder, callbacks)
    was_finished = loop.is_finished()
    with progress(name, experiment.rounds, loop.round, is_shown and not was_finished) as show:
        loop.run(show)

    variables = models_on_host(experiment.algorithm, loop.trained.state)
    kept, kept_metrics = None, {}
    if kept_states := loop.kept_states():
        kept = Kept(kept_states.round, models_on_host(experiment.algorithm, kept_states.state))
        # Those of a finished run were computed as the run was, which this start may not be.
        measured = folder.kept_metrics(kept_states.round) if folder and was_finished else None
        kept_metrics = loop.kept_metrics(kept_states) if measured is None else measured
    summary = loop.summary(variables)
    if kept:
        summary["kept"] = {"round": kept.round, "final": kept_metrics}
    if folder:
        folder.write_summary(summary)
    if is_shown:
        _print_final(name, experiment, summary, was_finished)
    return Outcome(
        loop.records,
        variables,
        summary,
        loop.trained.state,
        kept,
        loop.evaluator.newest(),
        loop.client_states(),
    )


def _print_final(
    name: str, experiment: Experiment, summary: Mapping[str, Any], was_finished: bool
) -> None:
    """Prints the final metrics on the test data or, without any, on the split of all evaluations."""
    splits = list(experiment.final_splits) or list(experiment.splits)[:1]
    rounds = summary["rounds"]
    state = f"finished{' already' if was_finished else ''}, {rounds} round{'s' * (rounds != 1)}"
    if "stopped" in summary:
        state += f" of {experiment.rounds}: {summary['stopped']['why']}"
    print("  ".join(filter(None, (name, state, final_text(summary["final"], splits)))), flush=True)
