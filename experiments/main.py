r"""Runs one experiment from a config file.

    python -m experiments.main --config experiments/configs/digits_codist.py --workdir runs/digits \
        --config.rounds=40 --config.algorithm.alpha=0.5

The same command continues a run that was stopped. On a CPU it starts one process per core.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from experiments import command
from fedcodist import launch

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment's config file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; the same one continues a stopped run.")
_PROCESSES = flags.DEFINE_integer(
    "processes", None, "Processes on this machine; chosen by the machine where not given."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join a cluster (TPU pod, Slurm, ...) through jax.distributed."
)
_CHANGE_PLAN = flags.DEFINE_bool(
    "change_plan", False, "Resume a run that was started under another execution plan."
)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status. A mistake of the user's is one line and status 2."""
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{flags.FLAGS.module_help(__name__)}")
        return 0
    try:
        command.parse(arguments, flags.FLAGS, required=("config", "workdir"))
        processes = _processes()
    except command.PARSE_ERRORS as error:
        return command.refuse(error)
    if launch.is_child() or _DISTRIBUTED.value:
        return _run()
    program = [sys.executable, "-m", "experiments.main", *arguments[1:]]
    workdir = Path(_WORKDIR.value)
    return launch.supervise(
        program, processes, lambda: _newest_checkpoint(workdir), logs=workdir / "logs"
    )


def _processes() -> int:
    """The flag's number of processes, else the config's, else what suits the machine."""
    for name, value in (
        ("--processes", _PROCESSES.value),
        ("execution.processes", _CONFIG.value.execution.processes),
    ):
        if value is not None:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
            return value
    return launch.default_processes()


def _run() -> int:
    """One process's part of the run."""
    # JAX is imported here, so that a mistyped flag is answered at once.
    launch.join()
    launch.cache_compilations()
    import jax

    if _DISTRIBUTED.value:
        jax.distributed.initialize()
    from safetensors import SafetensorError

    from experiments.assembly import build_experiment
    from fedcodist.checkpoint import CheckpointError
    from fedcodist.experiment import TrainingDiverged, check_experiment, run_experiment
    from fedcodist.export import save_model
    from fedcodist.run_folder import RunFolderError

    config, workdir = _CONFIG.value, Path(_WORKDIR.value)
    is_first = jax.process_index() == 0
    command.show_warnings(is_first)
    try:
        experiment = build_experiment(config)
        check_experiment(experiment)
    except Exception as error:
        if not command.is_mistake(error):
            raise
        return command.refuse(error)
    plan = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "platform": jax.default_backend(),
        **{key: value for key, value in config.execution.items() if key != "processes"},
    }
    try:
        outcome = run_experiment(
            experiment,
            workdir,
            config={key: value for key, value in config.to_dict().items() if key != "execution"},
            plan=plan,
            change_plan=_CHANGE_PLAN.value,
            callbacks=[log] if is_first and (log := tensorboard(workdir / "tensorboard")) else [],
            name=f"{config.name} · {config.algorithm.name}",
        )
    except (TrainingDiverged, CheckpointError, RunFolderError) as error:
        return command.refuse(error)
    if is_first:
        try:
            for model, variables in outcome.variables.items():
                for index in range(config.seeds):
                    path = workdir / f"{model}_seed{config.seed + index}.safetensors"
                    save_model(path, jax.tree.map(lambda leaf, i=index: leaf[i], variables))
        except (OSError, SafetensorError) as error:
            return command.refuse(error)
        print(f"run folder: {workdir}")
    return 0


def tensorboard(folder: Path) -> Callable[[Sequence[Mapping[str, Any]]], None] | None:
    """A callback that logs every scalar to TensorBoard; None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    writer = None

    def log(records: Sequence[Mapping[str, Any]]) -> None:
        nonlocal writer
        # Made at the first record: a run that is refused must leave its folder alone.
        writer = writer or SummaryWriter(str(folder))
        for record in records:
            where = f"{record['model']}/{record['split']}/seed{record['seed']}"
            for name, value in record.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{where}/{name}", value, record["round"])
        writer.flush()

    return log


def _newest_checkpoint(workdir: Path) -> str | None:
    # The supervising process has no use for JAX, which the checkpoint module imports.
    checkpoints = (workdir / "checkpoints").glob("round_*.msgpack")
    return max((path.name for path in checkpoints), default=None)


if __name__ == "__main__":
    status = main(sys.argv)
    if status and launch.is_child():
        # A process that failed must not wait for the others at jax.distributed's exit barrier.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
