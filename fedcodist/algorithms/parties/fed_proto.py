"""FedProto: parties exchange mean embeddings per class, and are drawn to the means of all.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
https://arxiv.org/abs/2105.00243.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    sums,
    training_metrics,
)
from fedcodist.algorithms.parties.prototypes import (
    PREDICT_BY,
    PROTOTYPE_PREDICTS,
    ClassSums,
    Prototypes,
    check_choice,
    check_prototype_groups,
    class_sums,
    no_prototypes,
    prototype_bytes,
    prototype_predictors,
    prototypes_of,
    pulled,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables

PyTree = Any
BY_EXAMPLES, BY_PARTIES = WEIGHTINGS = ("examples", "parties")


class FedProtoState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], and the prototypes of all."""

    models: dict[str, Variables]
    prototypes: Prototypes


class FedProtoHyper(NamedTuple):
    """Floats of FedProto; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      weight: lambda, of the distance to the prototypes.
    """

    learning_rate: Any = 0.01
    weight: Any = 1.0


def half_momentum(learning_rate: Any) -> optax.GradientTransformation:
    """SGD with momentum 0.5, as in the authors' code."""
    return optax.sgd(learning_rate, momentum=0.5)


def fed_proto(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(half_momentum, batch_size=4),
    weighting: str = BY_EXAMPLES,
    predict_by: str = "head",
    hyper: FedProtoHyper = FedProtoHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "fed_proto",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Local training whose embeddings are drawn, class by class, to the mean embeddings of all parties.

    The loss is CE + lambda MSE(embedding, the global prototype of the example's label), without the
    second term for labels that have none, as all have in the first round. Prototypes are taken after
    local training, in inference mode. The authors' code takes them while training goes on, and means
    them over parties with equal weights. The paper weighs by examples, divides once more by the
    number of parties, and measures the distance of a party's prototypes (not verified); here each
    example's is measured, as in the code.

    Args:
      groups: architecture -> its parties, of `headed` models with embeddings of one width.
      num_classes: labels, and outputs of every model.
      training: on private examples. The default is the authors' code's, which drops an incomplete batch.
      weighting: how a class's prototypes are averaged: by 'examples' of the class, or over the
        'parties' that have it, as in the authors' code.
      predict_by: what is evaluated: a party's 'head', or the nearest global 'prototype'. The authors'
        code reports both.
      hyper: learning rate and lambda.
      inference_batch_size: examples per step while prototypes are taken.
      execution, name: as in `fed_md`.
      reduce: how what parties send is summed; `sums` where not given. It must give sums.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_proto, locals())
    groups = check_groups(groups)
    width = check_prototype_groups(groups, num_classes)
    check_training("training", training)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_choice("predict_by", predict_by, PREDICT_BY)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("weight", hyper.weight, low=0)
    reduce = sums() if reduce is None else reduce

    def init(key: jax.Array) -> FedProtoState:
        return FedProtoState(init_models(groups, key), no_prototypes(num_classes, width))

    def round_(
        state: FedProtoState, client_states: PyTree, round: Round, hyper: FedProtoHyper
    ) -> AfterRound:
        def update(
            model: Model,
            prototypes: Prototypes,
            variables: Variables,
            data: ClientData,
            key: jax.Array,
        ) -> PartyResult:
            # LocalUpdate of Algorithm 1: the loss of labels, and lambda times the distance.
            loss = pulled(model, prototypes, hyper.weight, num_classes)
            trained = train_client(
                model, training, variables, data, key, hyper.learning_rate, loss_hook=loss
            )
            # It returns the party's prototypes, the mean embeddings of its classes.
            own = class_sums(
                model, trained.variables, data, num_classes, training, inference_batch_size
            )
            metrics = training_metrics(trained)
            return PartyResult(trained.variables, metrics, sends=sent(own, weighting))

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.prototypes, state.models, round, key, execution, reduce
        )
        # The server's line of Algorithm 1: global prototypes are means over parties.
        prototypes = prototypes_of(result.aggregate.pseudo_gradient)
        return FedProtoState(result.states, prototypes), client_states, result.metrics

    models = lambda state, name: state.models[name]
    nearest = prototype_predictors(groups, models, lambda state: state.prototypes)
    payload = prototype_bytes(num_classes, width)
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        models,
        same_for_all(groups, Communication(down=payload, up=payload)),
        other_predictors=nearest if predict_by == PROTOTYPE_PREDICTS else {},
    )


def sent(own: ClassSums, weighting: str) -> ClassSums:
    """What a party adds to the sums: its own, or its prototypes where every party counts as one."""
    if weighting == BY_EXAMPLES:
        return own
    prototypes = prototypes_of(own)
    return ClassSums(prototypes.vectors, prototypes.has_class)
