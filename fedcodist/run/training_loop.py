"""The training loop of all algorithms: compiled blocks of rounds, evaluation, checkpoints, logging."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates
from fedcodist.core.method import FederatedAlgorithm, by_member
from fedcodist.core.model import Variables
from fedcodist.run.blocks import Trained, in_blocks
from fedcodist.run.callbacks import Callback, Decision, call_callbacks
from fedcodist.run.checkpoint import save_checkpoint
from fedcodist.run.client_evaluation import ClientEvaluator, client_evaluation
from fedcodist.run.client_metrics import CLIENTS, client_records
from fedcodist.run.divergence import check_finite, check_finite_models
from fedcodist.run.evaluation import EvaluationSplit
from fedcodist.run.kept import KeptState
from fedcodist.run.metrics_lines import (
    WHAT_IS_MEASURED,
    Record,
    evaluation_records,
    final_metrics,
    summary_of,
    training_records,
)
from fedcodist.run.metrics_text import current_text
from fedcodist.run.model_evaluation import model_evaluation, on_devices
from fedcodist.run.placement import on_host, replicate, replicate_data
from fedcodist.run.privacy_spent import PrivacyMeter
from fedcodist.run.programs import Programs
from fedcodist.run.progress import Show
from fedcodist.run.resume import start_or_resume, whole_state, whole_state_shapes
from fedcodist.run.run_folder import RunFolder
from fedcodist.run.sources import ResidentData, StreamedData

PyTree = Any


class KeptStates(NamedTuple):
    """The round that a callback has kept, and the algorithm's and the clients' states after it."""

    round: int
    state: PyTree
    client_states: PyTree


class TrainingLoop:
    """A run, from its newest checkpoint or its beginning to its last round.

    Args:
      experiment: an `Experiment`, checked.
      programs: its programs.
      mesh: the programs'.
      checkpoint_every: rounds from one checkpoint to the next.
      folder: the run's; None keeps everything in memory.
      callbacks: empty in all processes but the first.

    Attributes:
      round: rounds that are done.
      stopped: why the run ends before its last round; empty if it goes on.
      trained: the states after these rounds.
      records: all metrics lines.
      evaluator: what evaluates clients; it has the newest result.
    """

    def __init__(
        self,
        experiment: Any,
        programs: Programs,
        mesh: Mesh | None,
        checkpoint_every: int,
        folder: RunFolder | None,
        callbacks: Sequence[Callback],
    ):
        self._experiment, self._algorithm = experiment, experiment.algorithm
        self._programs, self._mesh = programs, mesh
        self._checkpoint_every, self._folder, self._callbacks = checkpoint_every, folder, callbacks
        self._is_writer = jax.process_index() == 0
        self._seeds = np.arange(experiment.seeds, dtype=np.uint32) + np.uint32(experiment.seed)
        device_seeds = replicate(self._seeds, mesh)
        self._splits = on_devices(experiment.splits, mesh)
        data, self._host_client_states = _placed(experiment, mesh)
        self.trained, self.round, self._notes = start_or_resume(
            programs, device_seeds, mesh, folder, experiment, self._host_client_states
        )
        self._first_round = self.round
        self.stopped: str = self._notes.get("stopped", "")

        hyper = replicate(jax.tree.map(_as_float, self._algorithm.hyper), mesh)
        of_run = (mesh, device_seeds, hyper, self._host_client_states)
        self._train = in_blocks(programs, data, experiment.rounds, *of_run)
        self.evaluator = ClientEvaluator(
            client_evaluation(programs, experiment, data, *of_run),
            experiment,
            folder.path / CLIENTS if folder else None,
        )
        self._evaluate = model_evaluation(programs, experiment, mesh, self._host_client_states)
        self.records: list[Record] = []
        if folder and self._is_writer:
            self.records = folder.records(WHAT_IS_MEASURED)
        self._history: list[dict[str, np.ndarray]] = []  # blocks since the last evaluation
        self._started, self._seconds_before = time.monotonic(), self._notes["seconds"]
        checkpoints = folder.checkpoints if folder else None
        self._kept = KeptState(checkpoints, self._notes.get("kept"), self._is_writer)
        self._meter = PrivacyMeter(self._algorithm.privacy, experiment.rounds, experiment.privacy)

    def is_finished(self) -> bool:
        """Whether no round is left to train."""
        return self.round >= self._experiment.rounds or bool(self.stopped)

    def run(self, show: Show) -> None:
        """Trains, evaluates and saves until the last round, or until something stops the run."""
        self._begin(show)
        while not self.is_finished():
            until = self._next_evaluation()
            self._train_block(until)
            if self.round < until:
                show(self.round)
                continue
            self._report(show)
            if self.round % self._checkpoint_every == 0 or self.is_finished():
                self._save()

    def _begin(self, show: Show) -> None:
        """Evaluates a new run's models; stops a run that has grown beyond its privacy budget."""
        if self.stopped:
            return
        if self.round == 0:
            self._report(show)
            if self.stopped:
                self._save()
        elif self._meter.last_round <= self.round < self._experiment.rounds:
            # The run has grown, but it had spent its budget in what was its last round.
            self.stopped = self._meter.why_stopped(self.round)
            self._save()

    def _next_evaluation(self) -> int:
        """The first round after this one that is evaluated."""
        every = self._experiment.evaluate_every
        further = (also for also in self._experiment.evaluate_also if also > self.round)
        planned = min((self.round // every + 1) * every, self._experiment.rounds, *further)
        return min(planned, self._meter.last_round)

    def _train_block(self, until: int) -> None:
        """Trains some of the rounds before round `until`."""
        began = time.monotonic()
        self.trained, block = self._train(self.trained, self.round, until - self.round)
        count = next(iter(block.values())).shape[1]
        if self.round > self._first_round:  # the first block was compiled
            self._notes["timed_rounds"] += count
            self._notes["timed_seconds"] += time.monotonic() - began
        check_finite(self.round, block, self._seeds, self._algorithm)
        self._history.append(block)
        self.round += count

    def _report(self, show: Show) -> None:
        """Evaluates, logs and shows; callbacks and the budget may stop the run."""
        check_finite_models(self.round, self._programs.finite(self.trained.state), self._seeds)
        is_last = self.round == self._experiment.rounds
        evaluation = self._evaluate(self.trained, self._splits)
        if is_last and self._experiment.final_splits:
            evaluation |= self._evaluate(self.trained, self._final_splits())
        new = self._measured(evaluation)
        text = current_text(new)
        new += self._measured_on_clients(is_last)
        decision = self._log(new + training_records(self.round, self._history, self._seeds))
        self._history = []
        if decision.keep:
            self._kept.keep(self.round, self._whole_state)
        why = "; ".join(filter(None, (decision.stop, self._meter.why_stopped(self.round))))
        if why and not is_last:
            self.stopped = why
            final = self._measured(self._evaluate(self.trained, self._final_splits()))
            final += self._measured_on_clients(is_last=True)
            place = lambda record: (record["model"], record["split"])
            logged = set(map(place, new))
            self._log([record for record in final if place(record) not in logged])
        show(self.round, text)

    def _final_splits(self) -> dict[str, EvaluationSplit]:
        return on_devices(self._experiment.final_splits, self._mesh)

    def _measured(self, evaluation: Any) -> list[Record]:
        """The metrics lines of models on splits."""
        lines = evaluation_records(self.round, evaluation, self._seeds)
        personal_models = self._algorithm.personal_models.values()
        is_personal = {name for models in personal_models for name in models}
        # Personal models stay with their clients, who see their own examples anyway.
        sent = {line["model"] for line in lines} - is_personal
        return self._meter.with_epsilon(self.round, lines, sent)

    def _measured_on_clients(self, is_last: bool) -> list[Record]:
        """The metrics lines of models on their clients' own examples."""
        evaluation = self.evaluator.evaluate(self.trained, self.round, is_last)
        lines = client_records(self.round, evaluation, self._seeds)
        return self._meter.with_epsilon(self.round, lines, self._algorithm.predictors)

    def _log(self, new: list[Record]) -> Decision:
        """Passes metrics lines to the run folder and to callbacks; returns what these decide."""
        self.records.extend(new)
        if self._folder:
            self._notes["metrics_length"] = self._folder.append_metrics(new)
        models = lambda: models_on_host(self._algorithm, on_host(self.trained.state))
        # Callbacks are not called with nothing, as they may look at the first line.
        return call_callbacks(self._callbacks, new, models, self.records) if new else Decision()

    def _save(self) -> None:
        """Writes a checkpoint, if there is a folder."""
        if self._folder is None:
            return
        self._notes["seconds"] = self._seconds()
        self._notes["rounds"] = self._experiment.rounds
        self._notes.update({"stopped": self.stopped} if self.stopped else {})
        self._notes.update({} if self._kept.round is None else {"kept": self._kept.round})
        if self._is_writer:
            self._kept.save()
            state = on_host(self._whole_state())
            save_checkpoint(self._folder.checkpoints, self.round, state, self._notes)

    def _whole_state(self) -> PyTree:
        return whole_state(self._algorithm, self.trained, self._host_client_states)

    def _seconds(self) -> float:
        """The run's time so far, summed over all its starts."""
        return self._seconds_before + time.monotonic() - self._started

    def client_states(self) -> Any:
        """What clients keep: all clients' states, or the HostClientStates of streamed data."""
        if self._host_client_states is None:
            return self.trained.client_states
        return self._host_client_states

    def summary(self, variables: Mapping[str, Variables]) -> dict[str, Any]:
        """The content of summary.json without kept models.

        Args:
          variables: `models_on_host` of the trained state.
        """
        timed_rounds, timed_seconds = self._notes["timed_rounds"], self._notes["timed_seconds"]
        return summary_of(
            self._experiment,
            self.records,
            variables,
            self._seconds(),
            timed_seconds / timed_rounds if timed_rounds else None,
            self.round,
            self.stopped,
        ) | self._meter.summary(self.round)

    def kept_states(self) -> KeptStates | None:
        """What a callback has kept; None where none did."""
        like = whole_state_shapes(
            self.trained.state,
            self.trained.client_states,
            self._host_client_states,
            self._algorithm.host_state,
        )
        whole = self._kept.whole(like)
        if whole is None or self._kept.round is None:
            return None
        return KeptStates(self._kept.round, *whole[:2])

    def kept_metrics(self, kept: KeptStates) -> dict[str, Any]:
        """The metrics of the kept models, also on final splits, as in the summary."""
        records = [record for record in self.records if record["round"] == kept.round]
        if kept.round == self.round:
            return final_metrics(records, kept.round)
        # A run that has grown since was evaluated on them in this round, its last one then.
        final = {*self._experiment.final_splits, *self._experiment.final_client_splits}
        records = [record for record in records if record["split"] not in final]
        if self._experiment.final_splits:
            records += evaluation_records(kept.round, self._final_evaluation(kept), self._seeds)
        return final_metrics(records, kept.round)

    def _final_evaluation(self, kept: KeptStates) -> Any:
        """The evaluation of the kept models on the final splits."""
        splits = self._final_splits()
        if self._host_client_states is None:
            best = Trained(*replicate((kept.state, kept.client_states), self._mesh))
            return self._evaluate(best, splits)
        newest = self._host_client_states.state()
        self._host_client_states.restore(kept.client_states)
        evaluation = self._evaluate(Trained(replicate(kept.state, self._mesh), None), splits)
        self._host_client_states.restore(newest)
        return evaluation


def models_on_host(algorithm: FederatedAlgorithm, state: PyTree) -> dict[str, Variables]:
    """Every model's name and Variables, leaves [seeds, ...] on the host."""
    models: dict[str, Variables] = {}
    for name, predictor in algorithm.predictors.items():
        variables = on_host(jax.vmap(predictor.variables)(state))
        models |= by_member(name, predictor, variables, axis=1)
    return models


def _placed(
    experiment: Any, mesh: Mesh | None
) -> tuple[ResidentData | StreamedData, HostClientStates | None]:
    """(clients' data, on the devices if resident; client states on the host if data are streamed)."""
    if isinstance(experiment.data, StreamedData):
        states = HostClientStates(experiment.algorithm.client_states, experiment.seeds)
        return experiment.data, states
    return replicate_data(experiment.data, mesh), None


def _as_float(value: Any) -> np.ndarray:
    return np.asarray(value, jax.dtypes.canonicalize_dtype(float))
