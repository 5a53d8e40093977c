"""Centralised training: one model of each architecture on the examples of all clients, an upper bound.

It is "Supervised" in table 1 of Zhmoginov et al., Decentralized Learning with Multi-Headed
Distillation, CVPR 2023, https://arxiv.org/abs/2211.15774.
"""

from collections.abc import Mapping

import jax

from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_only_steps
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, num_clients
from fedcodist.core.arguments import check_arguments
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.method import PARTIES, ClientModels, FederatedAlgorithm, Predictor


def centralised(
    groups: Mapping[str, PartyGroup],
    num_shared: int,
    num_rounds: int,
    training: StepTraining = StepTraining(),
    hyper: LocalOnlyStepsHyper = LocalOnlyStepsHyper(),
    execution: Execution = Execution(),
    name: str = "centralised",
) -> FederatedAlgorithm:
    """The first client of each architecture trains on the data set `shared`, for a client's usual steps.

    On client splits the model of an architecture is measured for all of its clients.

    Args:
      groups: architecture -> its clients.
      num_shared: number of examples of `shared`: all clients' labelled examples; for MHD the public
        examples too.
      num_rounds, training, hyper, execution, name: as in `local_only_steps`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(centralised, locals())
    groups = check_groups(groups)
    first = {n: group._replace(clients=group.clients[:1]) for n, group in groups.items()}
    algorithm = local_only_steps(first, num_rounds, training, num_shared, hyper, execution, name)
    # A model belongs to all clients of its architecture, not to the one that trains it.
    return algorithm._replace(
        predictors={
            n: predictor._replace(clients=()) for n, predictor in algorithm.predictors.items()
        },
        client_models={
            n: _of_all_clients(group, algorithm.predictors[n]) for n, group in groups.items()
        },
        num_clients=num_clients(groups),
    )


def _of_all_clients(group: PartyGroup, predictor: Predictor) -> ClientModels:
    """What the clients of an architecture would use: the first and only member of `predictor`."""
    only = lambda state: jax.tree.map(lambda leaf: leaf[0], predictor.variables(state))
    return ClientModels(
        group.clients,
        {PARTIES: predictor},
        lambda state, _: {PARTIES: only(state)},
        client_states=lambda state: (),  # clients keep nothing
    )
