"""Evaluation of the models that every client would use, on the client's own examples."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates
from fedcodist.core.inputs import Cohort, Selection
from fedcodist.core.method import all_client_models
from fedcodist.run.blocks import Trained
from fedcodist.run.client_metrics import (
    ClientEvaluation,
    ClientMetrics,
    load_clients,
    save_clients,
)
from fedcodist.run.client_splits import ClientSplit, measured_clients
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.placement import replicate, replicate_data
from fedcodist.run.programs import Programs
from fedcodist.run.sources import ResidentData, StreamedData, resident_data

PyTree = Any
Source = ResidentData | StreamedData
# (state, client states, splits by name, fine_tuned) -> ClientEvaluation
EvaluateClients = Callable[[PyTree, PyTree, Mapping[str, ClientSplit], bool], ClientEvaluation]
_COHORT = "clients"


def client_evaluation(
    programs: Programs,
    experiment: Any,
    data: Source,
    mesh: Mesh | None,
    seeds: jax.Array,
    hyper: PyTree,
    host_client_states: HostClientStates | None,
) -> EvaluateClients:
    """Returns a function that measures clients: (state, client states, splits, fine_tuned) -> result.

    With `fine_tuned`, models are also measured after every client has trained them once more on its own
    training examples. Nothing of that training is kept.

    Args:
      programs, experiment: the run's.
      data: the clients' training examples, resident ones on the devices.
      mesh, seeds, hyper: as `in_blocks` gets them.
      host_client_states: the client states of streamed data; None for resident data.
    """
    algorithm = experiment.algorithm
    is_streamed = isinstance(data, StreamedData)
    # Test examples of all evaluations are on the devices from now on. Those of final splits are moved
    # there for the last evaluation.
    readers = {name: _Reader(split, data, mesh) for name, split in experiment.client_splits.items()}
    sizes = {
        name: cohort.shape[-1]
        for name, cohort in jax.eval_shape(
            lambda: algorithm.select(jnp.asarray(0), jax.random.key(0))
        ).clients.items()
    }

    def states_of(
        group: str, split: ClientSplit, clients: np.ndarray, client_states: PyTree
    ) -> tuple[PyTree, np.ndarray]:
        """(client states, leaves [seeds, some, ...], the place of each client among them)."""
        models = all_client_models(algorithm)[group]
        if models.client_states is not None:
            return (), np.searchsorted(models.clients, clients)
        definition = algorithm.client_states[group]
        if split.train is not None:
            first = jax.tree.map(
                lambda leaf: np.broadcast_to(leaf, (experiment.seeds, 1, *np.shape(leaf))),
                definition.first,
            )
            return replicate(first, mesh), np.zeros(len(clients))
        if host_client_states is None:
            return client_states[group], np.searchsorted(definition.clients, clients)
        wanted = np.tile(clients, (experiment.seeds, 1))
        states = host_client_states.gather({group: wanted})[group]
        return replicate(states, mesh), np.arange(len(clients))

    def measure(
        state: PyTree,
        client_states: PyTree,
        group: str,
        split: ClientSplit,
        reader: _Reader,
        fine_tuned: bool,
    ) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
        """model -> metric -> [seeds, clients] of one pool or architecture on one split."""
        measured = measured_clients(split, algorithm, group)
        count = len(measured)
        # As many streamed clients at once as take part in a round, since these fit on the devices.
        at_once = min(sizes.get(group, count), count) if is_streamed else count
        parts = []
        for done in range(0, count, at_once):
            # All parts have one shape: the last one begins with clients that are measured already.
            start = min(done, count - at_once)
            part = measured[start : start + at_once]
            tested, trained = reader.cohorts(part, fine_tuned)
            states, places = states_of(group, split, part, client_states)
            values = programs.evaluate_clients[group](
                state,
                states,
                replicate(places.astype(np.int32), mesh),
                seeds,
                hyper,
                tested,
                trained,
            )
            is_new = slice(done - start, None)
            parts.append(jax.tree.map(lambda leaf, new=is_new: np.asarray(leaf)[:, new], values))
        return measured, jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)

    def evaluate(
        state: PyTree, client_states: PyTree, splits: Mapping[str, ClientSplit], fine_tuned: bool
    ) -> ClientEvaluation:
        evaluation: dict[str, dict[str, ClientMetrics]] = {}
        for name, split in splits.items():
            reader = readers.get(name) or _Reader(split, data, mesh)
            found: dict[str, list[tuple[np.ndarray, Mapping[str, np.ndarray]]]] = {}
            for group, models in all_client_models(algorithm).items():
                trains = fine_tuned and models.fine_tuned is not None
                clients, by_model = measure(state, client_states, group, split, reader, trains)
                for model, metrics in by_model.items():
                    found.setdefault(model, []).append((clients, metrics))
            evaluation[name] = {
                model: _joined_metrics(parts, split.test.client_sizes)
                for model, parts in found.items()
            }
        return evaluation

    return evaluate


class ClientEvaluator:
    """Evaluates clients when a run is evaluated, and keeps the newest result, also in a file.

    Args:
      evaluate: as `client_evaluation` returns it.
      experiment: the run's.
      path: the file; None keeps the result in memory alone.
    """

    def __init__(self, evaluate: EvaluateClients, experiment: Any, path: Path | None):
        self._evaluate, self._experiment, self._path = evaluate, experiment, path
        self._newest: ClientEvaluation | None = None

    def evaluate(self, trained: Trained, round: int, is_last: bool) -> ClientEvaluation:
        """The result of a round. That of the last round includes final splits and fine-tuned models."""
        splits: Any = dict(self._experiment.client_splits)
        if is_last:
            splits |= self._experiment.final_client_splits
        if not splits:
            return {}
        self._newest = self._evaluate(trained.state, trained.client_states, splits, is_last)
        if self._path is not None and jax.process_index() == 0:
            try:
                save_clients(self._path, round, self._newest)
            except OSError as error:
                raise RunFolderError(f"cannot write {self._path}: {error.strerror}.") from error
        return self._newest

    def newest(self) -> ClientEvaluation:
        """The newest result; of a run that was finished already, the one in its file."""
        if self._newest is None and self._path is not None:
            try:
                self._newest = load_clients(self._path)
            except ValueError as error:
                raise RunFolderError(str(error)) from None
        return self._newest or {}


class _Reader:
    """Reads the test and the training examples of some clients of a split."""

    def __init__(self, split: ClientSplit, data: Source, mesh: Mesh | None):
        # `Source` cannot hold clients without examples.
        self._tested = np.flatnonzero(split.test.client_sizes)
        test = split.test.select(self._tested)
        self._split, self._data, self._mesh = split, data, mesh
        self._test: Source = StreamedData(test)
        if isinstance(data, ResidentData):
            self._test = replicate_data(resident_data(test), mesh)

    def cohorts(self, clients: np.ndarray, with_training: bool) -> tuple[Cohort, Cohort | None]:
        """(the clients' test examples, their training examples where asked for), on the devices."""
        places = np.searchsorted(self._tested, clients)
        tested = dataclasses.replace(
            self._cohort(self._test, places), clients=replicate(clients, self._mesh)
        )
        if not with_training:
            return tested, None
        train = self._split.train
        return tested, self._cohort(self._data if train is None else StreamedData(train), clients)

    def _cohort(self, data: Source, clients: Any) -> Cohort:
        selection = Selection({_COHORT: clients}, {})
        cohort = data.read(selection).cohorts[_COHORT]
        return cohort if isinstance(data, ResidentData) else replicate(cohort, self._mesh)


def _joined_metrics(parts: list[Any], sizes: np.ndarray) -> ClientMetrics:
    """The metrics of a model's clients, such as parties of all architectures, in their order."""
    clients = np.concatenate([clients for clients, _ in parts])
    order = np.argsort(clients, kind="stable")
    shared = [name for name in parts[0][1] if all(name in metrics for _, metrics in parts)]
    metrics = {
        name: np.concatenate([metrics[name] for _, metrics in parts], axis=1)[:, order]
        for name in shared
    }
    return ClientMetrics(clients[order], sizes[clients[order]], metrics)
