"""Callbacks that look at one metric: `StopEarly` ends a run, `KeepBest` keeps its best models.

Both decide by all metrics lines up to an evaluation, so an interrupted run makes the same decisions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedcodist.core.checks import check_integer, check_number, check_text
from fedcodist.core.metric_kinds import lower_is_better
from fedcodist.run.callbacks import Decision
from fedcodist.run.metrics_lines import Record


class _Scores:
    """The scores of a history that grows from one evaluation to the next; lines are read once."""

    def __init__(self) -> None:
        self._history: Sequence[Record] = ()
        self._count = 0
        self._values: dict[int, list[float]] = {}
        self._scores: dict[int, float] = {}

    def of(self, watched: "StopEarly | KeepBest", history: Sequence[Record]) -> dict[int, float]:
        """Round -> the metric, larger is better; minus infinity if undefined for a model or seed."""
        if history is not self._history or len(history) < self._count:
            self._history, self._count, self._values, self._scores = history, 0, {}, {}
        changed = set()
        for record in history[self._count :]:
            if record["split"] == watched.split and watched.model in (None, record["model"]):
                changed.add(record["round"])
                of_round = self._values.setdefault(record["round"], [])
                if watched.metric in record:
                    value = record[watched.metric]
                    of_round.append(math.nan if value is None else value)
        self._count = len(history)
        for round, values in self._values.items():
            if round in changed:
                mean = _sign(watched) * float(np.mean(values)) if values else math.nan
                self._scores[round] = mean if math.isfinite(mean) else -math.inf
        return self._scores


@dataclass(frozen=True)
class StopEarly:
    """Ends a run if a metric has not improved for several evaluations.

    The metric is a mean over seeds, and over all models that have it where `model` names none. Seeds are
    trained together, so they stop together.

    Attributes:
      split: one of the experiment's `splits`; final splits are not evaluated before the end.
      metric: as in metrics lines, such as "accuracy" or "loss".
      patience: number of evaluations without an improvement after which the run ends.
      min_delta: how much the metric must differ from the best value so far to count as an improvement.
      model: the model whose metric is used; None for the mean over all models.
      smaller_is_better: with None, of metrics whose name says so, such as a loss, error or distance.
    """

    split: str = "held_out"
    metric: str = "accuracy"
    patience: int = 5
    min_delta: float = 0.0
    model: str | None = None
    smaller_is_better: bool | None = None
    only_reads: ClassVar[bool] = True
    _scores: _Scores = field(default_factory=_Scores, init=False, repr=False, compare=False)

    def check(self, experiment: Any) -> None:
        """Raises ValueError or TypeError, one line, for a field that does not fit the experiment."""
        check_integer("patience", self.patience, low=1)
        check_number("min_delta", self.min_delta, low=0)
        _check_names(self, experiment)

    def __call__(self, records: Sequence[Record], history: Sequence[Record]) -> Decision:
        best_round, best, waited = 0, -math.inf, 0
        for round, score in self._scores.of(self, history).items():
            if score > best + (self.min_delta if math.isfinite(best) else 0):
                best_round, best, waited = round, score, 0
            else:
                waited += 1
        if waited < self.patience:
            return Decision()
        if not math.isfinite(best):
            return Decision(
                stop=f"{self.metric} on {self.split} was not defined in {waited} evaluations"
            )
        value = f"{_sign(self) * best:.4g}"
        return Decision(
            stop=f"{self.metric} on {self.split} has not improved for {waited} evaluations; it was best "
            f"in round {best_round}, {value}"
        )


@dataclass(frozen=True)
class KeepBest:
    """Keeps the models, and the whole state, of the round with the best metric, the first of equal ones.

    The final splits are evaluated with the kept models too, once, after the last round: see `kept` of
    `Outcome` and of summary.json. Final client splits are not: they are there only if the kept round is
    the last one.

    Attributes:
      split, metric, model, smaller_is_better: as those of `StopEarly`.
    """

    split: str = "held_out"
    metric: str = "accuracy"
    model: str | None = None
    smaller_is_better: bool | None = None
    only_reads: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    _scores: _Scores = field(default_factory=_Scores, init=False, repr=False, compare=False)

    def check(self, experiment: Any) -> None:
        """Raises ValueError or TypeError, one line, for a field that does not fit the experiment."""
        _check_names(self, experiment)

    def __call__(self, records: Sequence[Record], history: Sequence[Record]) -> Decision:
        *before, now = self._scores.of(self, history).values()
        return Decision(keep=now > max(before, default=-math.inf))


def _check_names(watched: StopEarly | KeepBest, experiment: Any) -> None:
    for name in ("split", "metric"):
        check_text(name, getattr(watched, name))
    if watched.split not in experiment.splits:
        raise ValueError(
            f"split must be one of {sorted(experiment.splits)}, which are evaluated during the run, got "
            f"{watched.split!r}."
        )
    algorithm, metrics = experiment.algorithm, {}
    for name, predictor in algorithm.predictors.items():
        for member in predictor.members or (name,):
            metrics[member] = {"loss", *predictor.model.metrics}
    for models in algorithm.personal_models.values():
        metrics |= {name: {"loss", *one.model.metrics} for name, one in models.items()}
    if watched.model is not None and watched.model not in metrics:
        raise ValueError(f"model must be one of {sorted(metrics)}, got {watched.model!r}.")
    known = set().union(*metrics.values()) if watched.model is None else metrics[watched.model]
    if watched.metric not in known:
        raise ValueError(f"metric must be one of {sorted(known)}, got {watched.metric!r}.")


def _sign(watched: StopEarly | KeepBest) -> int:
    smaller = watched.smaller_is_better
    return -1 if (lower_is_better(watched.metric) if smaller is None else smaller) else 1
