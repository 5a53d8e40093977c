r"""Tunes the float hyper-parameters of an experiment.

    fedcodist tune digits_codist:merged_codistillation --study digits_merged --storage runs/tuning.db \
        --trials 32 --config.rounds=40

A trial's value is the accuracy after the last round, averaged over models and seeds. It is measured on
held-out clients, or on held-out examples of the clients (`data.partition.validation`), never on test
data. `fedcodist.tuning.search_space` explains what is searched. The same command continues a study that
was stopped. On a CPU there is one worker per core; each compiles once for all of its trials. On an
accelerator `--at_once 16 --processes 1` trains as many trials in one program; none of them is pruned.

`--output FILE` writes the complete study as JSON, and `--summary` writes its present state at any time:

    fedcodist tune --summary --study digits_merged --storage runs/tuning.db

`python -m fedcodist.tuning.tune --config FILE` is the same.
"""

import collections
import copy
import functools
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from fedcodist.config import command_line
from fedcodist.core import child_processes
from fedcodist.core.checks import LARGEST_INTEGER, check_integer
from fedcodist.core.extras import check_installed
from fedcodist.run import compilation_cache, launch
from fedcodist.tuning import search_space

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import TrialState

    from fedcodist.core.method import FederatedAlgorithm
    from fedcodist.run.experiment import Experiment
    from fedcodist.run.programs import Programs
    from fedcodist.tuning.study import Plan, Worker

PyTree = Any
HyperOf = Callable[[ConfigDict], PyTree]  # a trial's config -> its algorithm's traced floats
# File descriptor on which the first worker reports that the study is open.
_READY = "FEDCODIST_TUNE_READY"
# A trial's value is measured on the first of these splits that the data have.
_HELD_OUT = ("held_out", "validation")
# Settings on which a trial's result does not depend, so that a study may go on with other ones.
_NOT_SETTINGS = (
    "execution.",
    "tuning.",
    "evaluation.splits",
    "evaluation.final_splits",
    "evaluation.client_splits",
    "evaluation.final_client_splits",
)


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status, 2 for a mistake of the user's."""
    values = _flags(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{values.get_help()}")
        return 0
    try:
        command_line.parse(arguments, values, required=("study", "storage"))
        _check(values)
        if values.summary:
            return _summarise(values)
    except command_line.PARSE_ERRORS as error:
        return command_line.refuse(error)
    if launch.is_child():
        return _work(values)
    processes = values.processes or launch.default_processes()
    program = [sys.executable, "-m", "fedcodist.tuning.tune", *arguments[1:]]
    status = child_processes.until_interrupted(
        lambda: _supervise(program, processes),
        "interrupted: the same command goes on with the study.",
    )
    return status or _conclude(values)


def _flags(arguments: list[str]) -> flags.FlagValues:
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "The experiment's config file.", flag_values=values, sys_argv=arguments
    )
    for name, default, text in (
        ("study", None, "Name of the study; the same one continues it."),
        ("storage", None, "SQLite file of studies; made where it does not exist."),
        ("output", None, "JSON file for the study's summary."),
    ):
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, default, text in (
        ("trials", 32, "Finished and pruned trials that the study is to have in all."),
        ("processes", None, "Workers on this machine; chosen by the machine where not given."),
        (
            "at_once",
            1,
            "Trials that a worker trains in one program; more than one is never pruned.",
        ),
        ("seed", 0, "Of the tuner's draws; the experiment's is --config.seed."),
    ):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    flags.DEFINE_enum(
        "pruner", "median", ("median", "hyperband", "none"), "Stops bad trials.", flag_values=values
    )
    flags.DEFINE_bool("summary", False, "Only write the study's summary.", flag_values=values)
    return values


def _check(values: flags.FlagValues) -> None:
    if values.config is None and not values.summary:
        raise ValueError("--config must be given.")
    check_installed("tuning", "optuna", "tune")
    if importlib.util.find_spec("fcntl") is None:
        raise ImportError("tuning needs the file locks of Unix.")
    if values.processes is not None:
        launch.check_processes("--processes", values.processes)
    for name, low in (("trials", 1), ("at_once", 1), ("seed", 0)):
        if values[name].value is not None:
            check_integer(f"--{name}", values[name].value, low, LARGEST_INTEGER)
    for name in ("storage", "output"):
        path = values[name].value
        if path is not None and Path(path).is_dir():
            raise ValueError(f"--{name} must be a file, {path!r} is a folder.")
    if "://" in values.storage:
        raise ValueError(f"--storage must be the path of an SQLite file, got {values.storage!r}.")


# The process that starts the workers.


def _supervise(program: Sequence[str], processes: int) -> int:
    """Runs the workers to their end; returns 0, or the status of a failure.

    The first worker is started alone, so that a mistake is reported once. Workers do not depend on each
    other: where one dies, the others take over its trial.
    """
    workers: list[subprocess.Popen] = []
    try:
        is_ready, ready = os.pipe()
        workers.append(_start(program, 0, processes, ready))
        os.close(ready)
        if os.read(is_ready, 1):
            workers += [_start(program, rank, processes) for rank in range(1, processes)]
        os.close(is_ready)
        statuses = [worker.wait() for worker in workers]
    finally:
        child_processes.stop(workers, seconds=0)
    for rank, status in enumerate(statuses):
        if status < 0:
            name = signal.Signals(-status).name
            print(f"worker {rank} was stopped by {name}: the same command goes on.", flush=True)
    return next((1 if status < 0 else status for status in statuses if status), 0)


def _start(
    program: Sequence[str], rank: int, processes: int, ready: int | None = None
) -> subprocess.Popen:
    environment = os.environ | {launch.RANK: str(rank), launch.COUNT: str(processes)}
    if ready is not None:
        environment[_READY] = str(ready)
    return child_processes.start(
        program,
        env=environment,
        # Nothing is written to this pipe. A worker notices by its end that this process has ended.
        stdin=subprocess.PIPE,
        pass_fds=() if ready is None else (ready,),
    )


def _conclude(values: flags.FlagValues) -> int:
    """Prints the study's best trial as settings of `fedcodist run`."""
    from fedcodist.tuning import study as studies

    try:
        study = studies.load_study(Path(values.storage), values.study)
        best = studies.best_trial(study)
        if values.output:
            _write(values.output, studies.summary(study))
    except (ValueError, *studies.ERRORS) as error:
        return command_line.refuse(error)
    if best is None:
        print("no trial finished: all were pruned.")
        return 0
    space = search_space.search_space(values.config)
    print(f"best trial: {best.number}, held-out accuracy {best.value:.4f}, by")
    print("    " + " \\\n    ".join(search_space.overrides(space, best.params)), flush=True)
    return 0


def _summarise(values: flags.FlagValues) -> int:
    from fedcodist.tuning import study as studies

    try:
        summary = studies.summary(studies.load_study(Path(values.storage), values.study))
        _write(values.output, summary)
    except (ValueError, *studies.ERRORS) as error:
        return command_line.refuse(error)
    return 0


def _write(output: str | None, summary: Mapping[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")
    print(f"wrote {output}")


# A worker.


def _work(values: flags.FlagValues) -> int:
    """Does one worker's part of the study; returns the exit status."""
    rank, count = int(os.environ[launch.RANK]), int(os.environ[launch.COUNT])
    _end_with_the_supervisor()
    launch.take_cores(rank, count)
    compilation_cache.cache_compilations()
    from fedcodist.config.data_prepared import data_checksums
    from fedcodist.config.referenced_code import described_references
    from fedcodist.run.identity import identity_of
    from fedcodist.tuning import at_once
    from fedcodist.tuning import study as studies

    command_line.show_warnings(rank == 0)
    config = values.config
    try:
        if values.output:
            Path(values.output).parent.mkdir(parents=True, exist_ok=True)
        experiment, hyper_of = held_out_experiment(config)
        space = search_space.search_space(config)
        # The first worker has checked a space of the config's own for all.
        if rank == 0 or search_space.is_default(config):
            space = trial_space(config, hyper_of)
        plan = make_plan(
            config,
            space,
            storage=Path(values.storage),
            name=values.study,
            trials=values.trials,
            seed=values.seed,
            pruner=values.pruner,
            command=shlex.join(["python", "-m", "fedcodist.tuning.tune", *sys.argv[1:]]),
            determined_by={
                "data": identity_of(experiment, has_config=True).content["data"],
                "code": described_references(config),
                "prepared": data_checksums(config.data),
            },
        )
        programs = at_once.programs_at_once(experiment) if values.at_once > 1 else None
        worker = studies.Worker(plan.storage)
        study = studies.open_study(plan, worker)
    except Exception as error:
        if not command_line.is_mistake(error) and not isinstance(error, studies.ERRORS):
            raise
        return command_line.refuse(error)
    if rank == 0:
        if idle := sorted(set(search_space.search_space(config)) - set(space)):
            print(f"not searched, as they change nothing here: {', '.join(idle)}")
        if missing := sorted(set(space) - set(plan.first)):
            print(
                f"drawn in the first trial too, as the config's lie outside: {', '.join(missing)}"
            )
        os.write(int(os.environ[_READY]), b"1")
    run = run_trials
    if programs is not None:
        run = functools.partial(run_trials_at_once, programs, values.at_once)
    counts, compilations = run(config, experiment, hyper_of, plan, study, worker)
    print(
        f"worker {rank}: trials: {counts.total()} "
        f"(finished {counts['finished']}, pruned {counts['pruned']}); "
        f"compiled training programs: {compilations}",
        flush=True,
    )
    return 0


def held_out_experiment(config: ConfigDict) -> "tuple[Experiment, HyperOf]":
    """The config's experiment, evaluated on held-out examples only, and a function of a trial's config.

    Returns:
      (Experiment, hyper_of). `hyper_of` maps a trial's config to its algorithm's traced floats. It
      raises ValueError if the trial would also start from another state. The data are loaded once for
      all trials.
    """
    from fedcodist.config.algorithm import build_algorithm
    from fedcodist.config.config_errors import as_settings
    from fedcodist.config.data import load_data
    from fedcodist.config.division import divided
    from fedcodist.config.experiment import build_experiment
    from fedcodist.run.experiment import check_experiment

    for group in ("phases", "callbacks"):
        if config.get(group):
            raise ValueError(f"{group} must be None for tuning, which only runs the rounds.")
    with as_settings(config):
        config = divided(copy.deepcopy(config))
        data = load_data(config.data)
    split = next((name for name in _HELD_OUT if name in data.splits), None)
    if split is None:
        raise ValueError(
            f"data.name must be of data with a split {' or '.join(map(repr, _HELD_OUT))}, on which "
            f"tuning compares trials, got {config.data.name!r} with {sorted(data.splits)}."
        )
    with config.unlocked(), config.ignore_type():
        config.evaluation.update(splits=(split,), final_splits=())
        config.evaluation.update(client_splits=(), final_client_splits=())
    with as_settings(config):
        experiment = build_experiment(config, data)
        check_experiment(experiment)
    for name, predictor in experiment.algorithm.predictors.items():
        if "accuracy" not in predictor.model.metrics:
            raise ValueError(
                f"tuning needs models with the metric 'accuracy', model {name!r} has "
                f"{list(predictor.model.metrics)}."
            )

    shared = _first_states(experiment.algorithm)

    def hyper_of(trial: ConfigDict) -> PyTree:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown once already
            algorithm = build_algorithm(trial, data)
        if _first_states(algorithm) != shared:
            raise ValueError(
                "a tuned setting must only change floats of the method's hyper, got one that changes "
                "what init or init_client_state makes, which all trials share."
            )
        return algorithm.hyper

    return experiment, hyper_of


def _first_states(algorithm: "FederatedAlgorithm") -> tuple[str, Mapping[str, Any]]:
    """What `init` and `init_client_state` make, as a traced program and its constants."""
    import jax

    from fedcodist.core import keys
    from fedcodist.run.described_code import described

    def start(key: jax.Array) -> PyTree:
        first = {pool: states.first for pool, states in algorithm.client_states.items()}
        return algorithm.init(key), first

    traced = jax.make_jaxpr(start)(keys.key_shape())
    # Programs of functions with a derivative of their own have addresses of functions.
    text = re.sub("0x[0-9a-f]+", "", str(traced.jaxpr))
    return text, described("constants", traced.consts)


def trial_space(config: ConfigDict, hyper_of: HyperOf) -> search_space.Space:
    """The config's search space, as far as it changes what a compiled program takes.

    Raises:
      ValueError: see search_space.search_space and search_space.checked_space.
    """
    import jax
    import numpy as np

    def traced(trial: ConfigDict) -> tuple[Any, list[float]]:
        leaves, structure = jax.tree.flatten(hyper_of(trial))
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        return (structure, shapes), [float(x) for leaf in leaves for x in np.ravel(leaf)]

    return search_space.checked_space(config, search_space.search_space(config), traced)


def make_plan(config: ConfigDict, space: search_space.Space, **options: Any) -> "Plan":
    """A config's Plan; `options` are the fields that a config does not have."""
    from fedcodist.tuning.study import Plan

    tuned = {setting for dimension in space.values() for setting in dimension.settings}
    flat = search_space.flat(config)
    settings = {
        name: value
        for name, value in flat.items()
        if name not in tuned and not name.startswith(_NOT_SETTINGS)
    }
    # Alone of the execution, the precision changes a trial's value. Earlier studies, which do not have
    # it among their settings, go on with float32.
    precision = flat.get("execution.precision")
    if precision not in (None, "float32"):
        settings["execution.precision"] = precision
    return Plan(
        settings=settings,
        space=space,
        first=search_space.own_values(config, space),
        rounds=config.rounds,
        every=config.evaluation.every,
        **options,
    )


def run_trials(
    config: ConfigDict,
    experiment: "Experiment",
    hyper_of: HyperOf,
    plan: "Plan",
    study: "Study",
    worker: "Worker",
) -> tuple[collections.Counter, int]:
    """Runs trials until the study is complete. All run the same programs, with different floats.

    Args:
      config: ConfigDict, whose floats trials replace.
      experiment, hyper_of: of that config, see held_out_experiment.
      plan, study, worker: see fedcodist.tuning.study.

    Returns:
      (this worker's trials by 'finished' and 'pruned', training programs that it compiled).
    """
    import jax

    from fedcodist.run.experiment import experiment_programs
    from fedcodist.tuning import study as studies

    programs = experiment_programs(experiment)
    counts: collections.Counter = collections.Counter()
    device = jax.devices()[0].device_kind
    while trial := studies.next_trial(study, plan, worker, device):
        values = search_space.with_values(config, plan.space, trial.params)
        value, state = None, studies.TrialState.FAIL
        reason: str | None = "stopped by an error"
        try:
            value, state, reason = _run_trial(
                trial, _with_floats(experiment, hyper_of(values)), programs, worker
            )
        finally:
            compilations = _compilations(programs)
            studies.finish(study, trial, worker, value, state, reason, compilations)
        counts[studies.STATES[state]] += 1
        text = f"accuracy {value:.4f}" if value is not None else reason
        print(f"trial {trial.number} {studies.STATES[state]}: {text}", flush=True)
    return counts, _compilations(programs)


def run_trials_at_once(
    programs: "Programs",
    at_once: int,
    config: ConfigDict,
    experiment: "Experiment",
    hyper_of: HyperOf,
    plan: "Plan",
    study: "Study",
    worker: "Worker",
) -> tuple[collections.Counter, int]:
    """As `run_trials`, with `at_once` trials in one program, `at_once.programs_at_once(experiment)`.

    If fewer trials are left, the last ones are trained several times, since a program for fewer trials
    would have to be compiled.
    """
    import jax

    from fedcodist.tuning import study as studies
    from fedcodist.tuning.at_once import accuracies_at_once

    counts: collections.Counter = collections.Counter()
    device = jax.devices()[0].device_kind
    while trials := studies.next_trials(study, plan, worker, device, at_once):
        points = [search_space.with_values(config, plan.space, trial.params) for trial in trials]
        hypers = [hyper_of(point) for point in points]
        hypers += hypers[-1:] * (at_once - len(hypers))
        accuracies = [math.nan] * len(trials)
        reason = "stopped by an error"
        try:
            accuracies = accuracies_at_once(experiment, programs, hypers)[: len(trials)].tolist()
            reason = "a non-finite update"
        finally:
            for trial, accuracy in zip(trials, accuracies, strict=True):
                is_finite = math.isfinite(accuracy)
                state = studies.TrialState.COMPLETE if is_finite else studies.TrialState.PRUNED
                if reason == "stopped by an error":
                    state = studies.TrialState.FAIL
                value, why = (accuracy, None) if is_finite else (None, reason)
                studies.finish(study, trial, worker, value, state, why, _compilations(programs))
                counts[studies.STATES[state]] += 1
                text = f"accuracy {accuracy:.4f}" if is_finite else reason
                print(f"trial {trial.number} {studies.STATES[state]}: {text}", flush=True)
    return counts, _compilations(programs)


def _run_trial(
    trial: "Trial", experiment: "Experiment", programs: "Programs", worker: "Worker"
) -> "tuple[float | None, TrialState, str | None]":
    """Returns (value, state, reason)."""
    import optuna

    from fedcodist.run.divergence import TrainingDiverged
    from fedcodist.run.experiment import run_experiment
    from fedcodist.tuning import study as studies

    value: float | None = None

    def report(records: Sequence[Mapping[str, Any]]) -> None:
        nonlocal value
        round, value = records[0]["round"], held_out_accuracy(records)
        if not math.isfinite(value):
            # Neither the study's file nor its sampler accepts NaN.
            raise optuna.TrialPruned(f"accuracy undefined in round {round}")
        if studies.report(trial, worker, round, value) and round < experiment.rounds:
            raise optuna.TrialPruned(f"accuracy {value:.4f} in round {round}")

    try:
        run_experiment(experiment, programs=programs, callbacks=[report], show_progress=False)
    except (optuna.TrialPruned, TrainingDiverged) as error:
        # Marked as pruned, since the sampler learns from pruned trials but not from failed ones.
        return None, studies.TrialState.PRUNED, str(error)
    return value, studies.TrialState.COMPLETE, None


def held_out_accuracy(records: Sequence[Mapping[str, Any]]) -> float:
    """Mean over models and seeds of one evaluation's accuracies on held-out examples.

    NaN where one of them is undefined.
    """
    accuracies = [record["accuracy"] for record in records if record["split"] in _HELD_OUT]
    return math.nan if None in accuracies else sum(accuracies) / len(accuracies)


def _with_floats(experiment: "Experiment", hyper: PyTree) -> "Experiment":
    """The experiment with a trial's floats; its programs stay the same."""
    import jax

    expected = experiment.algorithm.hyper
    structures: list[Any] = [jax.tree.structure(floats) for floats in (hyper, expected)]
    assert structures[0] == structures[1], (hyper, expected)
    return experiment._replace(algorithm=experiment.algorithm._replace(hyper=hyper))


def _compilations(programs: "Programs") -> int:
    jitted: tuple[Any, ...] = (programs.train, programs.train_streamed)
    return sum(program._cache_size() for program in jitted)


def _end_with_the_supervisor() -> None:
    def wait() -> None:
        # Reads from the descriptor: sys.stdin's lock would still be held while the interpreter ends.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    status = main(sys.argv)
    sys.exit(status)
