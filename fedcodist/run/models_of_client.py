"""The trained models that one client would use, of a finished run."""

from typing import Any

import jax
import numpy as np

from fedcodist.core.checks import check_integer, shown
from fedcodist.core.client_states import HostClientStates
from fedcodist.core.method import (
    PARTIES,
    ClientModels,
    FederatedAlgorithm,
    Predictor,
    all_client_models,
)
from fedcodist.core.model import Variables
from fedcodist.run.experiment import Experiment, Outcome
from fedcodist.run.placement import on_host

PyTree = Any


def models_of_client(experiment: Experiment, outcome: Outcome, client: int) -> dict[str, Variables]:
    """The models that one client would use after the last round.

    These are the shared models of the client's pools, under the pools' names, and its personal models,
    such as FedKD's teacher, as `<pool>_<name>`. A client who has never taken part has the personal
    models of a start. In methods of parties and on a graph, it is the client's own model, under its
    name in results.

    Args:
      experiment: the run's.
      outcome: what `run_experiment` returned for it. Of a run that was finished before, it is returned
        by the same call again.
      client: its index in the data.

    Returns:
      model -> Variables on the host, with a leading axis of seeds.

    Raises:
      TypeError: `experiment` is no Experiment, `outcome` no Outcome, or `client` no integer.
      ValueError: the data have no such client, or none of the models is this client's.

    >>> import flax.linen as nn, jax.numpy as jnp, numpy as np, fedcodist as fc
    >>> data = fc.load_digits_federated(num_clients=3)
    >>> model = fc.from_flax_linen(nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(10)]),
    ...                            jnp.zeros((1, 8, 8, 1)))
    >>> pools = {"all": fc.Pool(fc.ditto(model), np.arange(3), cohort_size=3)}
    >>> experiment = fc.Experiment(fc.independent_pools(pools, data["train"].columns),
    ...                            fc.resident_data(data["train"]),
    ...                            {"held_out": data["held_out"]}, rounds=1)
    >>> outcome = fc.run_experiment(experiment, show_progress=False)
    >>> sorted(fc.models_of_client(experiment, outcome, client=2))
    ['all', 'all_personal']
    """
    for argument, value, kind in (
        ("experiment", experiment, Experiment),
        ("outcome", outcome, Outcome),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{argument} must be an {kind.__name__}, got {shown(value)}.")
    check_integer("client", client, low=0)
    algorithm, models = experiment.algorithm, dict[str, Variables]()
    for group, of_group in all_client_models(algorithm).items():
        if client not in of_group.clients:
            continue
        if of_group.client_states is None:
            states = _kept_by(algorithm, outcome, group, client)
            found = jax.vmap(of_group.variables)(outcome.state, states)
        else:
            found = _in_state(of_group, outcome.state, client)
        if PARTIES in found:
            found = {_name_of_party(algorithm.predictors[group], group, client): found[PARTIES]}
        models |= on_host(found)
    if not models:
        raise ValueError(
            f"client must be one of those who train in {algorithm.name}, of 0 to "
            f"{experiment.data.num_clients - 1}, got {client}."
        )
    return models


def _kept_by(algorithm: FederatedAlgorithm, outcome: Outcome, group: str, client: int) -> PyTree:
    """The client's state, leaves [seeds, ...]."""
    if isinstance(outcome.client_states, HostClientStates):
        seeds = len(jax.tree.leaves(outcome.state)[0])
        states = outcome.client_states.gather({group: np.full((seeds, 1), client)})[group]
        return jax.tree.map(lambda leaf: leaf[:, 0], states)
    place = int(np.searchsorted(algorithm.client_states[group].clients, client))
    return jax.tree.map(lambda leaf: leaf[:, place], outcome.client_states[group])


def _in_state(models: ClientModels, state: PyTree, client: int) -> dict[str, PyTree]:
    """The client's models where they lie in the algorithm's state, leaves [seeds, ...]."""
    place, states_of = int(np.searchsorted(models.clients, client)), models.client_states
    assert states_of is not None

    def of_one_seed(state: PyTree) -> dict[str, PyTree]:
        own = jax.tree.map(lambda leaf: leaf[place], states_of(state))
        return models.variables(state, own)

    return jax.vmap(of_one_seed)(state)


def _name_of_party(predictor: Predictor, architecture: str, client: int) -> str:
    """The name of the client's model in results."""
    if client not in predictor.clients or not predictor.members:
        return architecture  # one model of all clients with this architecture
    return predictor.members[predictor.clients.index(client)]
