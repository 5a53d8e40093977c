r"""Runs one experiment from a config file.

    python -m experiments.main --config experiments/configs/digits_codist.py --workdir runs/digits \
        --config.rounds=40 --config.algorithm.alpha=0.5

The same command continues a run that was stopped. On a CPU it starts one process per core. On several
machines, each runs the command with --distributed or --coordinator (see BUILD.md).
"""

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments import command
from fedcodist import compilation_cache, launch

if TYPE_CHECKING:
    from experiments.tracing import Callback
    from fedcodist.experiment import Outcome


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
_PROFILE = flags.DEFINE_string(
    "profile", None, "Folder for jax.profiler's trace of the rounds before the third evaluation."
)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status. A mistake of the user's is one line and status 2."""
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{flags.FLAGS.module_help(__name__)}")
        return 0
    try:
        command.parse(arguments, flags.FLAGS, required=("config", "workdir"))
        if "name" not in _CONFIG.value:
            raise ValueError("the config lacks 'name'.")
        cluster = launch.check_cluster(_COORDINATOR.value, _NUM_HOSTS.value, _HOST.value)
        is_distributed = _DISTRIBUTED.value or cluster is not None
        processes = _processes(is_distributed)
    except command.PARSE_ERRORS as error:
        return command.refuse(error)
    workdir = Path(_WORKDIR.value)
    if launch.is_child():
        # JAX is imported from here on, so that a mistyped flag is answered at once.
        try:
            if is_distributed:
                launch.join_cluster(cluster, workdir / "logs")
            else:
                launch.join()
            return _run()
        except launch.ClusterError as error:
            return command.refuse(error)
        except RuntimeError as error:
            if not launch.is_disconnection(error):
                raise
            return launch.DISCONNECTED
    program = [sys.executable, "-m", "experiments.main", *arguments[1:]]
    if is_distributed:
        return launch.supervise_host(program)
    return launch.supervise(
        program, processes, lambda: _newest_checkpoint(workdir), logs=workdir / "logs"
    )


def _processes(is_distributed: bool) -> int:
    """The flag's number of processes, else the config's, else what suits the machine."""
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


def _run() -> int:
    """One process's part of the run."""
    compilation_cache.cache_compilations()
    import jax

    from experiments.assembly import build_experiment, with_chunk_size
    from experiments.data import load_data
    from experiments.division import divided
    from experiments.messages import as_settings
    from experiments.methods import run_title
    from experiments.phases import check_phases, run_phases
    from experiments.tracing import check_folder, tracing
    from fedcodist.checkpoint import CheckpointError
    from fedcodist.experiment import TrainingDiverged, check_experiment, run_experiment
    from fedcodist.run_folder import RunFolderError

    config, workdir = _CONFIG.value, Path(_WORKDIR.value)
    is_first = jax.process_index() == 0
    command.show_warnings(is_first)
    try:
        if _PROFILE.value is not None:
            check_folder(_PROFILE.value)
        with as_settings(config):
            config = divided(config)
            data, prepared = load_data(config.data), data_checksums(config.data)
            config, chosen = with_chunk_size(config, data)
            if chosen and is_first:
                print(f"chunk_size: {chosen}", flush=True)
            experiment = build_experiment(config, data)
            check_experiment(experiment)
            if config.get("phases") is not None:
                check_phases(config, data)
        for note in experiment.algorithm.notes if is_first else ():
            print(note, flush=True)
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
        if config.get("phases") is not None:
            start = run_phases(config, data, workdir, plan, _CHANGE_PLAN.value, prepared=prepared)
            experiment = experiment._replace(start=start)
        with tracing(_PROFILE.value if is_first else None) as traced:
            outcome = run_experiment(
                experiment,
                workdir,
                config={
                    key: value
                    for key, value in _CONFIG.value.to_dict().items()
                    if key != "execution"
                },
                plan=plan,
                change_plan=_CHANGE_PLAN.value,
                prepared=prepared,
                callbacks=[*_callbacks(config, workdir), *traced] if is_first else [],
                name=run_title(config.to_dict()),
            )
    except (TrainingDiverged, CheckpointError, RunFolderError) as error:
        return command.refuse(error)
    if is_first:
        try:
            save_models(workdir, outcome, config.seed)
        except OSError as error:
            return command.refuse(error)
        print(f"run folder: {workdir}")
    return 0


def save_models(workdir: Path, outcome: "Outcome", first_seed: int) -> None:
    """Writes `<model>_seed<n>.safetensors` of every model; ensembles are not models of their own.

    Raises:
      OSError: the folder cannot be written.
    """
    import jax

    from fedcodist.export import save_model

    for model in outcome.summary["models"]:
        variables = outcome.variables[model]
        for index in range(len(jax.tree.leaves(variables)[0])):
            path = workdir / f"{model}_seed{first_seed + index}.safetensors"
            save_model(path, jax.tree.map(lambda leaf, i=index: leaf[i], variables))


def _callbacks(config: ConfigDict, workdir: Path) -> "list[Callback]":
    log, about = tensorboard(workdir / "tensorboard"), data_manifests(config.data)
    return [*([log] if log else []), *([data_note(workdir, about)] if about else [])]


def data_manifests(settings: ConfigDict) -> dict[str, dict[str, Any]]:
    """What the manifests of a config's prepared folders say: by folder its source, whether that was
    left unverified, the seed that dealt its clients (None without), and each split's examples.

    Raises:
      PreparedDataError: a folder has no manifest, or one that was changed.
    """
    from fedcodist.data.prepared import manifest

    manifests = {folder: manifest(folder) for folder in _prepared_folders(settings)}
    return {
        folder: {
            "source": content["source"],
            "unverified": content["arguments"].get("unverified", False),
            "seed": content["arguments"].get("seed"),
            "num_examples": {
                split: entry["num_examples"] for split, entry in content["splits"].items()
            },
        }
        for folder, content in manifests.items()
    }


def data_checksums(settings: ConfigDict) -> dict[str, str]:
    """The checksums of the manifests of a config's prepared folders, which hold those of all files.

    Raises:
      PreparedDataError: a folder has no manifest, or one that was changed.
    """
    from fedcodist.data.prepared import manifest

    return {folder: manifest(folder)["sha256"] for folder in _prepared_folders(settings)}


def _prepared_folders(settings: ConfigDict) -> list[str]:
    folders = (settings.get(f"{kind}folder") for kind in ("", "unlabelled_", "public_"))
    return [folder for folder in folders if folder is not None]


def data_note(workdir: Path, about: Mapping[str, Any]) -> "Callback":
    """A callback that adds to environment.json, once, what a run's data are."""
    from fedcodist.checkpoint import write_atomically
    from fedcodist.run_folder import RunFolderError

    def note(records: Sequence[Mapping[str, Any]]) -> None:
        # At the first evaluation, when the folder is the run's; what a resumed run has stays.
        path = workdir / "environment.json"
        try:
            environment = json.loads(path.read_text(encoding="utf-8-sig"))
            if "data" not in environment:
                text = json.dumps({**environment, "data": about}, indent=2) + "\n"
                write_atomically(path, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}.") from error
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"cannot read {path}: {error}.") from error

    return note


def tensorboard(folder: Path) -> "Callback | None":
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
    """The run's newest checkpoint, before its first round the newest of its phases."""
    # The supervising process has no use for JAX, which the checkpoint module imports.
    phases = (f"phases/{phase}/" for phase in ("pooled", "private", "public"))
    for part in ("", *phases):
        checkpoints = (workdir / part / "checkpoints").glob("round_*.msgpack")
        if newest := max((path.name for path in checkpoints), default=None):
            return part + newest
    return None


if __name__ == "__main__":
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
