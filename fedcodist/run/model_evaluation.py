"""Evaluation of all models on the splits: those of the algorithm, and the personal ones of clients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.blocks import Trained
from fedcodist.run.evaluation import EvaluationSplit, evaluation_split
from fedcodist.run.metrics_lines import over_clients
from fedcodist.run.placement import on_host, replicate, replicate_data
from fedcodist.run.programs import Programs

PyTree = Any
_OfSplits = dict[str, dict[str, dict[str, np.ndarray]]]  # split -> model -> metric -> [seeds, ...]
EvaluateModels = Callable[[Trained, Mapping[str, EvaluationSplit]], _OfSplits]


def model_evaluation(
    programs: Programs,
    experiment: Any,
    mesh: Mesh | None,
    host_client_states: HostClientStates | None,
) -> EvaluateModels:
    """Returns (Trained, splits) -> split -> model -> metric -> [seeds, ...] on the host.

    Metrics of personal models are means over clients; `<metric>_per_client` has all clients.
    """
    algorithm = experiment.algorithm
    sampled = {
        pool: _evenly(len(algorithm.client_states[pool].clients), experiment.evaluate_clients)
        for pool, models in algorithm.personal_models.items()
        if models
    }
    selection = jax.eval_shape(lambda: algorithm.select(jnp.asarray(0), jax.random.key(0)))

    def personal_on_device(trained: Trained, splits: Mapping[str, EvaluationSplit]) -> PyTree:
        client_states = {pool: trained.client_states[pool] for pool in sampled}
        return programs.evaluate_personal(
            trained.state, client_states, replicate(sampled, mesh), splits
        )

    def personal_on_host(trained: Trained, splits: Mapping[str, EvaluationSplit]) -> PyTree:
        """Evaluates as many clients at once as there are in a round, which fit on the device."""
        assert host_client_states is not None
        evaluation: dict[str, dict[str, Any]] = {}
        for pool, places in sampled.items():
            size = selection.clients[pool].shape[-1]
            all_gathered = {pool: replicate(np.arange(size), mesh)}
            parts = []
            for start in range(0, len(places), size):
                # The last client fills up the last part.
                part_places = places[np.minimum(start + np.arange(size), len(places) - 1)]
                clients = algorithm.client_states[pool].clients[part_places]
                clients = np.tile(clients, (experiment.seeds, 1))
                client_states = {pool: host_client_states.gather({pool: clients})[pool]}
                part = programs.evaluate_personal(
                    trained.state, replicate(client_states, mesh), all_gathered, splits
                )
                parts.append(on_host(part))
            joined = lambda *leaves, most=len(places): np.concatenate(leaves, axis=1)[:, :most]
            for split, models in jax.tree.map(joined, *parts).items():
                evaluation.setdefault(split, {}).update(models)
        return evaluation

    def evaluate(trained: Trained, splits: Mapping[str, EvaluationSplit]) -> _OfSplits:
        evaluation = on_host(programs.evaluate(trained.state, splits)).unstacked
        if sampled:
            of_clients = personal_on_host if host_client_states else personal_on_device
            for split, models in on_host(of_clients(trained, splits)).items():
                evaluation[split] |= {
                    name: over_clients(metrics) for name, metrics in models.items()
                }
        return evaluation

    return evaluate


def on_devices(
    splits: Mapping[str, FederatedData], mesh: Mesh | None
) -> dict[str, EvaluationSplit]:
    """Puts the examples of every split on the devices."""
    return replicate_data({name: evaluation_split(data) for name, data in splits.items()}, mesh)


def _evenly(count: int, most: int) -> np.ndarray:
    """Indices of all of `count` clients, or of `most` of them, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.int32)
