"""FedAvg among clients of a graph: after every u steps each averages its model with its neighbours'.

FedAvg is algorithm 1 of McMahan et al., Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, https://arxiv.org/abs/1602.05629. With u steps between two means it is
a baseline in table 1 of Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR
2023, https://arxiv.org/abs/2211.15774.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, train_alone
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_no_gap, party_names
from fedcodist.algorithms.parties.party import AfterRound, assemble, init_models
from fedcodist.core.aggregation import as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.local_steps import Learner, StepTraining, check_step_training, start_learners
from fedcodist.core.method import PARTIES, FederatedAlgorithm

PyTree = Any


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
    """Clients train alone for u = `training.steps` steps, then average with their neighbours.

    Means are weighted by private examples. They are over the client itself and its neighbours with the
    same architecture; a client without such neighbours trains alone. On a complete graph this is FedAvg.
    Bytes are one model per edge, or, if no graph is given, one in each direction as with a server.
    Optimizers continue.

    Args:
      groups: architecture -> its clients.
      num_rounds: of the whole run.
      graph: see `fedcodist.algorithms.graph.graphs`; None: the complete graph, through a server.
      training, hyper, execution, name: as in `local_only_steps`.
      same_start: whether clients of one architecture start from the same values, as in FedAvg. The mean
        of networks with unrelated initial values is hardly better than an untrained network.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
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

    def init(key: jax.Array) -> dict[str, Learner]:
        return start_learners(training, init_models(groups, key, same_start))

    def round_(
        state: dict[str, Learner], client_states: PyTree, round: Round, hyper: LocalOnlyStepsHyper
    ) -> AfterRound:
        # Algorithm 1, ClientUpdate: u steps of each client.
        trained = train_alone(
            groups, training, num_rounds, state, round, hyper.learning_rate, execution
        )
        # Algorithm 1, the sum of n_k / n times w_k: here for each client, over itself and its
        # neighbours in this round.
        sizes = round.inputs.cohorts[PARTIES].sizes
        learns_from = graphs.at_round(edges, round.index) | jnp.eye(count, dtype=bool)

        def averaged(name: str, learner: Learner) -> Learner:
            clients = groups[name].clients
            weights = learns_from[np.ix_(clients, clients)] * sizes[clients]
            weights = weights / jnp.sum(weights, axis=1, keepdims=True)
            # An accelerator's default precision would round all models in every round.
            weighted_sum = functools.partial(jnp.tensordot, weights, axes=1, precision="highest")
            mean = lambda leaf: as_stored(weighted_sum(leaf), leaf)
            return learner._replace(variables=jax.tree.map(mean, learner.variables))

        state = {name: averaged(name, learner) for name, learner in trained.states.items()}
        return state, client_states, trained.metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, architecture: state[architecture].variables,
        _communication(groups, None if graph is None else edges),
        num_rounds=num_rounds,
    )


def _communication(
    groups: Mapping[str, PartyGroup], edges: np.ndarray | None
) -> dict[str, Communication]:
    """Bytes, a mean over rounds: one model in each direction, or one per edge within an architecture."""
    communication = {}
    for name, names in party_names(groups).items():
        group = groups[name]
        size = tree_bytes(jax.eval_shape(group.model.init, jax.random.key(0)))
        for place, party in enumerate(names):
            down = up = float(len(names) > 1)  # the mean over one client needs no message
            if edges is not None:
                over_rounds = edges.reshape(-1, *edges.shape[-2:])
                within = over_rounds[:, group.clients][:, :, group.clients].mean(axis=0)
                down, up = within[place].sum(), within[:, place].sum()
            communication[party] = Communication(round(size * down), round(size * up))
    return communication
