"""Centralised training: one model of each architecture on the examples of all clients, an upper bound.

It is "Supervised" in table 1 of Zhmoginov et al., Decentralized Learning with Multi-Headed
Distillation, CVPR 2023, https://arxiv.org/abs/2211.15774.
"""

from collections.abc import Mapping

from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_only_steps
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups
from fedcodist.core.arguments import check_arguments
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.method import FederatedAlgorithm


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
    return local_only_steps(first, num_rounds, training, num_shared, hyper, execution, name)
