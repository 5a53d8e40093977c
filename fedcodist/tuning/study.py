"""A tuning study in an SQLite file that workers on one machine share.

Concurrent writers of SQLite may fail instead of waiting, so workers take turns: a worker that uses the
study locks byte 0 of a lock file beside it. Every worker also locks its own byte of that file as long as
it lives. The operating system releases this lock however the process ends. So other workers notice the
end of a worker at once, whereas Optuna's heartbeats need a grace period.
"""

import contextlib
import datetime
import fcntl
import json
import operator
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import sqlalchemy.exc
from ml_collections import ConfigDict
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from fedcodist.report.points import thin
from fedcodist.run.commit import running_commit
from fedcodist.run.identity import first_difference
from fedcodist.tuning.search_space import Space, flat, method_name, own_values

ERRORS = (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, OSError)
STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
_COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
# Settings on which a trial's result does not depend, so that a study may go on with other ones.
_NOT_SETTINGS = (
    "execution.",
    "tuning.",
    "evaluation.splits",
    "evaluation.final_splits",
    "evaluation.client_splits",
    "evaluation.final_client_splits",
)
_SECONDS_BETWEEN_LOOKS = 0.5
_MOST_INTERMEDIATE_VALUES = 10

optuna.logging.set_verbosity(optuna.logging.ERROR)


class Worker:
    """This process as one of several that share a study; make one object per process and study file.

    It has the only handle of the lock file: closing any other would release all locks of the process.
    """

    def __init__(self, storage: Path):
        storage.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(storage.with_name(f"{storage.name}.lock"), "ab")  # noqa: SIM115
        self.number = 1 + secrets.randbelow(2**40)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self.number)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A context with exclusive use of the study; waits for the other workers."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def is_alive(self, number: int) -> bool:
        """Whether the worker with this number is still running."""
        if number == self.number:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)
        return False


class Plan(NamedTuple):
    """The settings of a study.

    Attributes:
      storage: the SQLite file.
      name: the study's name in it.
      settings: flat settings of the experiment without the tuned ones; the same for the whole study.
      space: the search space; the same for the whole study.
      determined_by: other things on which the trials' results depend, as JSON: a user's data and code.
      first: values of the first trial by dimension; missing ones are drawn.
      trials: finished and pruned trials that the study is to have.
      seed: of the sampler.
      pruner: 'median', 'hyperband' or 'none'.
      rounds, every: rounds of a trial, and between evaluations.
      command: the command that reproduces the study, for its summary.
    """

    storage: Path
    name: str
    settings: Mapping[str, Any]
    space: Space
    determined_by: Mapping[str, Any]
    first: Mapping[str, float]
    trials: int
    seed: int
    pruner: str
    rounds: int
    every: int
    command: str


def make_plan(config: ConfigDict, space: Space, **options: Any) -> Plan:
    """A config's Plan; `options` are the fields that a config does not have."""
    tuned = {setting for dimension in space.values() for setting in dimension.settings}
    values = flat(config)
    settings = {
        name: value
        for name, value in values.items()
        if name not in tuned and not name.startswith(_NOT_SETTINGS)
    }
    # Alone of the execution, the precision changes a trial's value. Earlier studies, which do not have
    # it among their settings, go on with float32.
    precision = values.get("execution.precision")
    if precision not in (None, "float32"):
        settings["execution.precision"] = precision
    return Plan(
        settings=settings,
        space=space,
        first=own_values(config, space),
        rounds=config.rounds,
        every=config.evaluation.every,
        **options,
    )


def open_study(plan: Plan, worker: Worker) -> optuna.Study:
    """Makes the study, or continues it.

    Raises:
      ValueError: the study was made with another config, search space, seed or pruner, other data or
        other code.
      One of ERRORS: the file cannot be used.
    """
    guarded = json.loads(
        json.dumps(
            {
                "space": plan.space,
                "config": dict(plan.settings),
                "determined_by": dict(plan.determined_by),
                "sampling": {"--seed": plan.seed, "--pruner": plan.pruner},
            },
            default=str,
        )
    )
    with worker.turn():
        study = optuna.create_study(
            storage=_storage(plan.storage),
            study_name=plan.name,
            direction="maximize",
            pruner=_pruner(plan),
            load_if_exists=True,
        )
        made_of = study.user_attrs.get("made_of")
        if made_of is None:
            if any(trial.state != TrialState.WAITING for trial in study.trials):
                raise ValueError(
                    f"study {plan.name!r} in {plan.storage} was not made by this command."
                )
            study.enqueue_trial(**_queued(plan.first), skip_if_exists=True)
            study.set_user_attr("first", dict(plan.first))
            # Set last, so that a study whose creation was interrupted is made again.
            study.set_user_attr("made_of", guarded)
        elif difference := _difference(made_of, guarded):
            raise ValueError(
                f"study {plan.name!r} in {plan.storage} was made with {difference}. "
                "Use another --study, or the same settings."
            )
        # A command with other tuned values would begin with another trial.
        if study.user_attrs.get("first", dict(plan.first)) == dict(plan.first):
            study.set_user_attr("command", plan.command)
        study.set_user_attr("commit", running_commit())
    return study


def load_study(storage: Path, name: str) -> optuna.Study:
    """An existing study, to read. Raises ValueError where there is none."""
    if not storage.is_file():
        raise ValueError(f"--storage must be an existing file, got '{storage}'.")
    try:
        study = optuna.load_study(study_name=name, storage=_storage(storage))
    except KeyError:
        raise ValueError(f"--study must be a study in {storage}, got {name!r}.") from None
    if "made_of" not in study.user_attrs:
        raise ValueError(f"study {name!r} in {storage} was not made by this command.")
    return study


def next_trial(study: optuna.Study, plan: Plan, worker: Worker, device: str) -> optuna.Trial | None:
    """The next trial to run; None when the study is complete.

    While other workers run the last trials, it waits: if one of them is killed, this worker takes over.
    """
    return next(iter(next_trials(study, plan, worker, device, at_most=1)), None)


def next_trials(
    study: optuna.Study, plan: Plan, worker: Worker, device: str, at_most: int
) -> list[optuna.Trial]:
    """The next trials to run at once; none when the study is complete. It waits as `next_trial` does."""
    distributions: dict[str, BaseDistribution] = {
        name: FloatDistribution(dimension.low, dimension.high, log=dimension.scale == "log")
        for name, dimension in plan.space.items()
    }
    while True:
        with worker.turn():
            _fail_abandoned(study, worker)
            states = [trial.state for trial in study.trials]
            done = sum(map(states.count, _COUNTED))
            if done >= plan.trials:
                return []
            free = plan.trials - done - states.count(TrialState.RUNNING)
            trials = []
            for _ in range(min(free, at_most)):
                study.sampler = _sampler(study, plan)
                trial = study.ask(distributions)
                trial.set_user_attr("worker", {"number": worker.number, "device": device})
                trials.append(trial)
            if trials:
                return trials
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def report(trial: optuna.Trial, worker: Worker, round: int, value: float) -> bool:
    """Records an intermediate value; returns whether the trial is to be pruned."""
    with worker.turn():
        trial.report(value, round)
        return trial.should_prune()


def finish(
    study: optuna.Study,
    trial: optuna.Trial,
    worker: Worker,
    value: float | None,
    state: TrialState,
    reason: str | None,
    compilations: int,
) -> None:
    """Records how and why a trial ended, and how often its worker has compiled so far."""
    with worker.turn():
        if reason is not None:
            trial.set_user_attr("reason", reason)
        trial.set_user_attr("compilations", compilations)
        study.tell(trial, value, state)


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The best finished trial, or None."""
    finished = study.get_trials(states=(TrialState.COMPLETE,))
    return max(finished, key=operator.attrgetter("value"), default=None)


def summary(study: optuna.Study) -> dict[str, Any]:
    """The results of a study, as JSON."""
    attributes, best = study.user_attrs, best_trial(study)
    config = attributes["made_of"]["config"]
    trials = [trial for trial in study.trials if trial.state in STATES]
    states = [trial.state for trial in trials]
    workers: dict[int, dict[str, Any]] = {}
    for trial in trials:
        if about := trial.user_attrs.get("worker"):
            entry = workers.setdefault(
                about["number"], {"device": about["device"], "trials": 0, "compilations": 0}
            )
            entry["trials"] += 1
            compilations = trial.user_attrs.get("compilations", 0)
            entry["compilations"] = max(entry["compilations"], compilations)
    return {
        "study": study.study_name,
        "algorithm": method_name(config),
        "objective": "mean accuracy of the models on held-out examples after the last round",
        "command": attributes["command"],
        "commit": attributes["commit"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rounds": config["rounds"],
        "states": {name: states.count(state) for state, name in STATES.items()},
        "workers": list(workers.values()),
        "space": {
            name: {"low": low, "high": high, "scale": scale}
            for name, (low, high, scale, _) in attributes["made_of"]["space"].items()
        },
        "best_trial": best and best.number,
        "best_value": best and best.value,
        "best_parameters": best and best.params,
        "trials": [_trial_summary(trial) for trial in trials],
    }


def _trial_summary(trial: FrozenTrial) -> dict[str, Any]:
    rounds = thin(sorted(trial.intermediate_values), _MOST_INTERMEDIATE_VALUES)
    return {
        "number": trial.number,
        "state": STATES[trial.state],
        **({"reason": trial.user_attrs["reason"]} if "reason" in trial.user_attrs else {}),
        "value": None if trial.value is None else _six_digits(trial.value),
        "parameters": {name: _six_digits(value) for name, value in trial.params.items()},
        "seconds": trial.duration and round(trial.duration.total_seconds(), 1),
        "by_round": {str(r): _six_digits(trial.intermediate_values[r]) for r in rounds},
    }


def _queued(values: Mapping[str, float], **attributes: Any) -> dict[str, Any]:
    """Arguments that queue a trial whose values stay among its attributes while it is drawn."""
    return {"params": dict(values), "user_attrs": {"queued": dict(values), **attributes}}


def _fail_abandoned(study: optuna.Study, worker: Worker) -> None:
    """Fails the trials of workers that have ended, and puts their values first in the queue."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        about = trial.user_attrs
        owner = about.get("worker")
        if owner is not None and worker.is_alive(owner["number"]):
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        if owner is not None:
            study.enqueue_trial(**_queued(trial.params, repeats=trial.number))
        elif "queued" in about:
            # Left by a worker that ended while it drew the trial, which may lack values. A trial that
            # was not queued is drawn again as it was, since the sampler does not count this one.
            study.enqueue_trial(about["queued"], user_attrs=about)


def _sampler(study: optuna.Study, plan: Plan) -> optuna.samplers.TPESampler:
    """A sampler for the next trial only.

    Its seed depends on the study's seed and the trial's number, not on the worker. So no two workers
    draw the same values, and an interrupted study continues with the draws it would have had. Trials
    without a worker were not drawn to their end.
    """
    drawn = [trial.user_attrs for trial in study.trials]
    place = sum("worker" in about and "repeats" not in about for about in drawn)
    seed = int(np.random.SeedSequence([plan.seed, place]).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _pruner(plan: Plan) -> optuna.pruners.BasePruner:
    if plan.pruner == "median":
        # Five whole trials come first, for comparison; slow starters get a quarter of the rounds.
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=plan.rounds // 4)
    if plan.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(plan.every, plan.rounds, reduction_factor=3)
    return optuna.pruners.NopPruner()


def _storage(path: Path) -> optuna.storages.RDBStorage:
    return optuna.storages.RDBStorage(
        f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
    )


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    # The space is compared first: a setting that only one study tunes is missing in the other's config.
    text_of_part = {
        "space": "another search space",
        "config": "another config",
        "sampling": "other options",
    }
    for part, text in text_of_part.items():
        if part not in theirs:  # in studies of an earlier release
            continue
        for name in [*theirs[part], *ours[part]]:
            left, right = (side[part].get(name, "nothing") for side in (theirs, ours))
            if left != right:
                return f"{text}: {name} is {left!r} there and {right!r} here"
    # Earlier releases did not describe all of these parts.
    before, now = theirs.get("determined_by", {}), ours["determined_by"]
    if before:
        now = {part: now[part] for part in now if part in before}
    if difference := first_difference(before, now):
        return f"other data or code: {difference}"
    return None


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
