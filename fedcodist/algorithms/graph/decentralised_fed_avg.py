"""FedAvg among clients of a graph: after every so many steps each takes the mean of its neighbours."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_round
from fedcodist.algorithms.parties.party import (
    PARTIES,
    PartyGroup,
    check_groups,
    check_no_gap,
    everybody,
    init_models,
    party_names,
    party_predictors,
)
from fedcodist.core.aggregation import as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import StepTraining, check_step_training, start_learners
from fedcodist.core.method import FederatedAlgorithm


def decentralised_fed_avg(
    groups: Mapping[str, PartyGroup],
    num_rounds: int,
    graph: Any = None,
    training: StepTraining = StepTraining(),
    hyper: LocalOnlyStepsHyper = LocalOnlyStepsHyper(),
    execution: Execution = Execution(),
    name: str = "decentralised_fed_avg",
    same_start: bool = True,
) -> FederatedAlgorithm:
    """Clients train apart for u = `training.steps` steps, then average with those they learn from.

    Means are weighted by private examples and taken over clients of the same architecture, the client
    itself among them: one whose neighbours all have another architecture trains alone. On a complete
    graph that is FedAvg. Bytes are one model for every edge, or one each way as with a server where no
    graph is given. Optimizers go on.

    Args:
      groups: architecture -> its clients.
      num_rounds: of the whole run.
      graph: see `fedcodist.algorithms.graph.graphs`; where not given, everybody with everybody,
        through a server.
      training, hyper, execution, name: as in `local_only_steps`.
      same_start: whether clients of one architecture start from the same values, as FedAvg's do. The
        mean of networks with unrelated first values is hardly better than a first value.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(decentralised_fed_avg, locals())
    groups = check_groups(groups)
    check_step_training(training, num_rounds)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    count = check_no_gap(groups)
    edges = graphs.complete(count)
    if graph is not None:
        edges = graphs.adjacency(graph, count)
        graphs.check_neighbours(edges, name)
    edges = graphs.cut(edges, num_rounds)

    train = local_round(groups, num_rounds, training, execution)

    def round_(state, client_states, round, hyper):
        inputs = round.inputs
        result = train(state, round, hyper.learning_rate)
        sizes = inputs.cohorts[PARTIES].sizes
        now = graphs.at_round(edges, round.index) | jnp.eye(count, dtype=bool)

        def averaged(name, learner):
            own = groups[name].clients
            weights = now[np.ix_(own, own)] * sizes[own]
            weights = weights / jnp.sum(weights, axis=1, keepdims=True)
            mean = lambda leaf: as_stored(jnp.tensordot(weights, leaf, axes=1), leaf)
            return learner._replace(variables=jax.tree.map(mean, learner.variables))

        state = {name: averaged(name, learner) for name, learner in result.own.items()}
        return state, client_states, result.metrics

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=lambda key: start_learners(training, init_models(groups, key, same_start)),
        client_states={},
        select=lambda round, key: everybody(groups, {}),
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state[name].variables),
        communication=_communication(groups, None if graph is None else edges),
        num_clients=count,
    )


def _communication(groups, edges) -> dict[str, Communication]:
    """A mean over rounds: a server's one model each way, or one for each edge in the architecture."""
    found = {}
    for name, names in party_names(groups).items():
        group = groups[name]
        size = tree_bytes(jax.eval_shape(group.model.init, jax.random.key(0)))
        for place, party in enumerate(names):
            down = up = 1.0
            if edges is not None:
                over_rounds = edges.reshape(-1, *edges.shape[-2:])
                within = over_rounds[:, group.clients][:, :, group.clients].mean(axis=0)
                down, up = within[place].sum(), within[:, place].sum()
            found[party] = Communication(round(size * down), round(size * up))
    return found
