r"""Runs one experiment from a config file.

    fedcodist run digits_codist --workdir runs/digits --config.rounds=40 --config.algorithm.alpha=0.5

--config is a file, or the name of a config that comes with the package; :RUN after it is one of its
runs. The same command continues a run that was stopped. On a CPU it starts one process per core. On
several machines, each runs the command with --distributed or --coordinator (see docs/running.md).
`python -m fedcodist.commands.run --config FILE --workdir FOLDER` is the same.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.run import compilation_cache, launch
from fedcodist.run.cluster import ClusterError, check_cluster, join_cluster, supervise_host
from fedcodist.run.folder_check import RunFolderError, check_folder

if TYPE_CHECKING:
    from fedcodist.config.data import Data
    from fedcodist.run.experiment import Experiment, Outcome
    from fedcodist.run.profile import Callback


_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment's config file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; the same one continues a stopped run.")
_PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes on this machine; chosen by the machine where not given."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One process of a run on a TPU pod, Slurm or Kubernetes, found by JAX."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "One process of a run on any machines: HOST:PORT of the first one."
)
_NUM_HOSTS = flags.DEFINE_integer("num_hosts", None, "Machines, with --coordinator.")
_HOST = flags.DEFINE_integer("host", None, "This machine's number from 0, with --coordinator.")
_CHANGE_PLAN = flags.DEFINE_bool(
    "change_plan", False, "Resume a run that was started under another execution plan."
)
_LOGGERS = flags.DEFINE_list(
    "loggers",
    None,
    "What watches the run, in place of config.loggers, as in csv,wandb; nothing: ''.",
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "Folder for jax.profiler's trace of the rounds before the third evaluation."
)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{flags.FLAGS.module_help(__name__)}")
        return 0
    try:
        command_line.parse(arguments, flags.FLAGS, required=("config", "workdir"))
        if "name" not in _CONFIG.value:
            raise ValueError("the config lacks 'name'.")
        cluster = check_cluster(_COORDINATOR.value, _NUM_HOSTS.value, _HOST.value)
        is_distributed = _DISTRIBUTED.value or cluster is not None
        processes = _processes(is_distributed)
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    assert _WORKDIR.value is not None  # `parse` requires it
    workdir = Path(_WORKDIR.value)
    try:
        check_folder(workdir)  # before the logs of processes are written into it
    except RunFolderError as error:
        return command_line.refuse(error)
    if launch.is_child():
        # The import of JAX comes after parsing, so that a mistyped flag is reported at once.
        try:
            if is_distributed:
                join_cluster(cluster, workdir / "logs")
            else:
                launch.join()
            return _run(workdir)
        except ClusterError as error:
            return command_line.refuse(error)
        except RuntimeError as error:
            if not launch.is_disconnection(error):
                raise
            return launch.DISCONNECTED
    program = [sys.executable, "-m", "fedcodist.commands.run", *arguments[1:]]
    if is_distributed:
        return supervise_host(program)
    try:
        return launch.supervise(
            program, processes, lambda: _newest_checkpoint(workdir), logs=workdir / "logs"
        )
    except OSError as error:
        return command_line.refuse(OSError(f"cannot write {workdir}: {error.strerror}."))


def _processes(is_distributed: bool) -> int:
    """The number of processes: the flag's, else the config's, else what suits the machine."""
    for name, value in (
        ("--processes", _PROCESSES.value),
        ("execution.processes", _CONFIG.value.execution.processes),
    ):
        if value is not None:
            launch.check_processes(name, value)
            if value > 1 and is_distributed:
                raise ValueError(
                    f"{name} must be 1 with --distributed or --coordinator, where every command "
                    f"is one process, got {value}."
                )
            return value
    return launch.default_processes()


def _run(workdir: Path) -> int:
    """Does one process's part of the run; returns the exit status."""
    compilation_cache.cache_compilations()
    import jax

    from fedcodist.run.checkpoint import CheckpointError
    from fedcodist.run.divergence import TrainingDiverged
    from fedcodist.run.tracked_runs import LoggerError

    is_first = jax.process_index() == 0
    command_line.show_warnings(is_first)
    loggers = _CONFIG.value.get("loggers") if _LOGGERS.value is None else _LOGGERS.value
    try:
        prepared = _prepared_run(workdir, loggers, is_first)
    except Exception as error:
        if not command_line.is_mistake(error):
            raise
        return command_line.refuse(error)
    evaluations: list[Any] = []
    prepared.callbacks.append(evaluations.append)
    try:
        outcome = _trained(prepared, workdir, is_first)
    except (TrainingDiverged, CheckpointError, RunFolderError, LoggerError) as error:
        return command_line.refuse(error)
    if is_first:
        try:
            _save(prepared, outcome, workdir)
        except OSError as error:
            return command_line.refuse(error)
        _tell_of_loggers(loggers, evaluations)
        print(f"run folder: {workdir}")
    return 0


class _PreparedRun(NamedTuple):
    """What a process has checked and made before the training.

    Attributes:
      config: with the settings that the library chose.
      data: of the config.
      checksums: of prepared data and of a user's code.
      experiment: of the config and the data.
      callbacks: the config's and, in the first process, the loggers.
    """

    config: ConfigDict
    data: "Data"
    checksums: dict[str, Any]
    experiment: "Experiment"
    callbacks: "list[Callback]"


def _prepared_run(workdir: Path, loggers: Sequence[str] | None, is_first: bool) -> _PreparedRun:
    """Loads the data and builds the experiment; the first process prints notes on them.

    Raises errors of which `command_line.is_mistake` is true for mistakes of the user's.
    """
    from fedcodist.config.config_errors import as_settings
    from fedcodist.config.data import load_data
    from fedcodist.config.data_prepared import data_checksums
    from fedcodist.config.division import divided
    from fedcodist.config.experiment import build_experiment, with_chunk_size
    from fedcodist.config.loggers import checked_callbacks, loggers_of
    from fedcodist.config.phases import check_phases
    from fedcodist.config.referenced_code import described_references
    from fedcodist.run.callbacks import check_callbacks
    from fedcodist.run.experiment import check_experiment
    from fedcodist.run.profile import check_trace_folder

    config = _CONFIG.value
    if _PROFILE.value is not None and is_first:
        check_trace_folder(_PROFILE.value)
    callbacks = loggers_of(loggers, workdir) if is_first else []
    with as_settings(config):
        config = divided(config)
        data, checksums = load_data(config.data), data_checksums(config.data)
        checksums |= described_references(config)
        config, chosen = with_chunk_size(config, data)
        if chosen and is_first:
            print(f"chunk_size: {chosen}", flush=True)
        experiment = build_experiment(config, data)
        check_experiment(experiment)
        callbacks += checked_callbacks(config.get("callbacks") or {}, experiment)
        check_callbacks(callbacks, experiment)
        if config.get("phases") is not None:
            check_phases(config, data)
    for note in experiment.algorithm.notes if is_first else ():
        print(note, flush=True)
    return _PreparedRun(config, data, checksums, experiment, callbacks)


def _trained(run: _PreparedRun, workdir: Path, is_first: bool) -> "Outcome":
    """Runs the phases before the rounds, and the rounds. Raises as `run_experiment` does."""
    from fedcodist.config.phases import run_phases
    from fedcodist.config.registry import run_title
    from fedcodist.run.experiment import run_experiment
    from fedcodist.run.profile import tracing

    config, experiment, change_plan = run.config, run.experiment, _CHANGE_PLAN.value
    plan = {key: value for key, value in config.execution.items() if key != "processes"}
    if config.get("phases") is not None:
        start = run_phases(config, run.data, workdir, plan, change_plan, prepared=run.checksums)
        experiment = experiment._replace(start=start)
    with tracing(_PROFILE.value if is_first else None) as traced:
        return run_experiment(
            experiment,
            workdir,
            config={
                key: value
                for key, value in _CONFIG.value.to_dict().items()
                if key not in ("execution", "loggers")
            },
            plan=plan,
            change_plan=change_plan,
            prepared=run.checksums,
            callbacks=[*run.callbacks, *_data_note(config, workdir), *traced] if is_first else [],
            name=run_title(config.to_dict()),
        )


def _data_note(config: ConfigDict, workdir: Path) -> "list[Callback]":
    from fedcodist.config.data_prepared import data_manifests
    from fedcodist.run.environment import data_note

    about = data_manifests(config.data)
    return [data_note(workdir, about)] if about else []


def _save(run: _PreparedRun, outcome: "Outcome", workdir: Path) -> None:
    """Writes the models, and those that a callback kept. Raises OSError."""
    from fedcodist.run.export import save_models, single_models

    models = single_models(run.experiment.algorithm, outcome.variables)
    save_models(workdir, outcome.variables, models, run.config.seed)
    if outcome.kept is not None:
        save_models(workdir / "kept", outcome.kept.variables, models, run.config.seed)


def _tell_of_loggers(loggers: Sequence[str] | None, evaluations: Sequence[Any]) -> None:
    """Says so if loggers were named for a run that was finished already: they get none of its rounds."""
    if loggers and not evaluations:
        print(
            f"the run was finished already: loggers ({', '.join(loggers)}) get none of its rounds"
        )


def _newest_checkpoint(workdir: Path) -> str | None:
    """The run's newest checkpoint; before the first round, the newest of its phases."""
    # The checkpoint module imports JAX, which the supervising process does not need.
    phases = (f"phases/{phase}/" for phase in ("centralised", "private", "public"))
    for part in ("", *phases):
        checkpoints = (workdir / part / "checkpoints").glob("round_*.msgpack")
        if newest := max((path.name for path in checkpoints), default=None):
            return part + newest
    return None


def run_and_exit() -> None:
    """Runs the whole program. A child process exits at once, without waiting for other threads."""
    try:
        status = main(sys.argv)
    except Exception:
        if not launch.is_child():
            raise
        traceback.print_exc()
        status = 1
    if status and launch.is_child():
        launch.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    run_and_exit()
