"""Runs the trials of a study, one after another or several in one program."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optuna
from ml_collections import ConfigDict
from optuna import Study, Trial
from optuna.trial import TrialState

from fedcodist.run.divergence import TrainingDiverged
from fedcodist.run.experiment import Experiment, experiment_programs, run_experiment
from fedcodist.run.programs import Programs
from fedcodist.tuning import search_space
from fedcodist.tuning import study as studies
from fedcodist.tuning.at_once import accuracies_at_once
from fedcodist.tuning.held_out import HyperOf, PyTree, held_out_accuracy
from fedcodist.tuning.study import Plan, Worker


class TrialEnd(NamedTuple):
    """How a trial ended: its accuracy if it finished, otherwise the reason why it did not."""

    value: float | None
    state: TrialState
    reason: str | None


_FAILED = TrialEnd(None, TrialState.FAIL, "stopped by an error")


def run_trials(
    config: ConfigDict,
    experiment: Experiment,
    hyper_of: HyperOf,
    plan: Plan,
    study: Study,
    worker: Worker,
) -> tuple[collections.Counter, int]:
    """Runs trials until the study is complete. All run the same programs, with different floats.

    Args:
      config: ConfigDict, whose floats trials replace.
      experiment, hyper_of: of that config, see held_out.held_out_experiment.
      plan, study, worker: see fedcodist.tuning.study.

    Returns:
      (this worker's trials by 'finished' and 'pruned', training programs that it compiled).
    """
    programs = experiment_programs(experiment)
    counts: collections.Counter = collections.Counter()
    device = jax.devices()[0].device_kind
    while trial := studies.next_trial(study, plan, worker, device):
        values = search_space.with_values(config, plan.space, trial.params)
        end = _FAILED
        try:
            of_trial = _with_floats(experiment, hyper_of(values))
            end = _run_trial(trial, of_trial, programs, worker)
        finally:
            studies.finish(study, trial, worker, *end, _compilations(programs))
        counts[studies.STATES[end.state]] += 1
        _print_end(trial, end)
    return counts, _compilations(programs)


def _run_trial(
    trial: Trial, experiment: Experiment, programs: Programs, worker: Worker
) -> TrialEnd:
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
        return TrialEnd(None, TrialState.PRUNED, str(error))
    return TrialEnd(value, TrialState.COMPLETE, None)


def run_trials_at_once(
    programs: Programs,
    at_once: int,
    config: ConfigDict,
    experiment: Experiment,
    hyper_of: HyperOf,
    plan: Plan,
    study: Study,
    worker: Worker,
) -> tuple[collections.Counter, int]:
    """As `run_trials`, with `at_once` trials in one program, `at_once.programs_at_once(experiment)`.

    If fewer trials are left, the last ones are trained several times, since a program for fewer trials
    would have to be compiled.
    """
    counts: collections.Counter = collections.Counter()
    device = jax.devices()[0].device_kind
    while trials := studies.next_trials(study, plan, worker, device, at_once):
        points = [search_space.with_values(config, plan.space, trial.params) for trial in trials]
        hypers = [hyper_of(point) for point in points]
        hypers += hypers[-1:] * (at_once - len(hypers))
        ends = [_FAILED] * len(trials)
        try:
            accuracies = accuracies_at_once(experiment, programs, hypers)[: len(trials)].tolist()
            ends = [_end_of(accuracy) for accuracy in accuracies]
        finally:
            for trial, end in zip(trials, ends, strict=True):
                studies.finish(study, trial, worker, *end, _compilations(programs))
                counts[studies.STATES[end.state]] += 1
                _print_end(trial, end)
    return counts, _compilations(programs)


def _end_of(accuracy: float) -> TrialEnd:
    """The end of a trial that was trained with others: it is pruned if its accuracy is not finite."""
    if math.isfinite(accuracy):
        return TrialEnd(accuracy, TrialState.COMPLETE, None)
    return TrialEnd(None, TrialState.PRUNED, "a non-finite update")


def _with_floats(experiment: Experiment, hyper: PyTree) -> Experiment:
    """The experiment with a trial's floats; its programs stay the same."""
    expected = experiment.algorithm.hyper
    structures: list[Any] = [jax.tree.structure(floats) for floats in (hyper, expected)]
    assert structures[0] == structures[1], (hyper, expected)
    return experiment._replace(algorithm=experiment.algorithm._replace(hyper=hyper))


def _compilations(programs: Programs) -> int:
    jitted: tuple[Any, ...] = (programs.train, programs.train_streamed)
    return sum(program._cache_size() for program in jitted)


def _print_end(trial: Trial, end: TrialEnd) -> None:
    text = f"accuracy {end.value:.4f}" if end.value is not None else end.reason
    print(f"trial {trial.number} {studies.STATES[end.state]}: {text}", flush=True)
