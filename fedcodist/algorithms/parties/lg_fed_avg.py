"""LG-FedAvg: parties keep their representations and share the mean of their heads.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov and Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020, https://arxiv.org/abs/2001.01523.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.algorithms.parties.shared_heads import (
    check_shared_heads,
    head_bytes,
    with_first_head,
    with_same_head,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.models.headed import split_head

PyTree = Any


class LGFedAvgHyper(NamedTuple):
    """The learning rate of representations and head, traced; the optimizer is fresh in every round."""

    learning_rate: Any = 0.1


def lg_fed_avg(
    groups: Mapping[str, PartyGroup],
    training: LocalTraining = LocalTraining(),
    weighted: bool = True,
    hyper: LGFedAvgHyper = LGFedAvgHyper(),
    execution: Execution = Execution(),
    name: str = "lg_fed_avg",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Local training of whole networks, then FedAvg of their heads alone.

    The layers before the head, the local representation, never leave a party and may have any
    architecture. All parties start with the same head, and end each round with the mean of their heads.

    The paper's global model may have several layers, and one representation per modality. Here it is the
    linear head, as in HtFLlib. The authors' code starts from networks trained by FedAvg, uses an
    unweighted mean (`weighted=False`), and also reports the best models of all rounds. Here only the
    last models are evaluated.

    Args:
      groups: architecture -> its parties, with models made by `headed` whose heads have one shape.
      training: of the whole network, on private examples.
      weighted: whether the mean is weighted by parties' numbers of examples, or unweighted.
      hyper: the learning rate.
      execution, name: as in `fed_md`.
      reduce: how heads are averaged; by default their weighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(lg_fed_avg, locals())
    groups = check_groups(groups)
    reduce = checked_mean(reduce)
    check_shared_heads(groups)
    check_training("training", training)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)

    def round_(
        state: dict[str, Variables], client_states: PyTree, round: Round, hyper: LGFedAvgHyper
    ) -> AfterRound:
        def update(
            model: Model, message: None, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # Each device trains its local parameters and its copy of the global ones together.
            trained = train_client(model, training, variables, data, key, hyper.learning_rate)
            metrics = training_metrics(trained)
            # Only the global parameters are sent.
            _, head = split_head(trained.variables.params)
            weight = data.size if weighted else 1.0
            return PartyResult(trained.variables, metrics, sends=head, weight=weight)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(groups, update, None, state, round, key, execution, reduce)
        # The server averages the global parameters, by numbers of examples: sum of N_m / N theta_m.
        # Every device continues with the mean and its own local parameters.
        models = with_same_head(result.states, result.combined)
        return models, client_states, result.metrics

    size = head_bytes(groups)
    return assemble(
        name,
        groups,
        hyper,
        lambda key: with_first_head(groups, init_models(groups, key)),
        round_,
        lambda state, name: state[name],
        same_for_all(groups, Communication(down=size, up=size)),
    )
