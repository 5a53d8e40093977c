"""FedProto: parties exchange mean embeddings per class, and pull their embeddings towards global means.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
https://arxiv.org/abs/2105.00243.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
from fedcodist.algorithms.parties.nearest_prototype import (
    PREDICT_BY,
    PROTOTYPE_PREDICTS,
    prototype_predictors,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.prototypes import (
    ClassSums,
    Prototypes,
    check_prototype_groups,
    class_sums,
    no_prototypes,
    prototype_bytes,
    prototype_loss,
    prototypes_of,
)
from fedcodist.algorithms.parties.reductions import checked_sums
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import (
    LocalTraining,
    check_plain_gradients,
    check_training,
    train_client,
)
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
    """Local training that pulls embeddings towards the mean embedding of all parties for their class.

    The loss is CE + lambda MSE(embedding, the global prototype of the example's label). The second term
    is left out for labels without a prototype, so for all labels in the first round. Prototypes are
    computed after local training, in evaluation mode. The authors' code computes them during training
    and averages them over parties with equal weights. The paper weights by examples, divides once more
    by the number of parties, and uses the distance of a party's prototypes (not verified). Here the
    distance of each example's embedding is used, as in the code.

    Args:
      groups: architecture -> its parties, of `headed` models with embeddings of one width.
      num_classes: labels, and outputs of every model.
      training: on private examples. The default is from the authors' code, which drops the last batch
        if it is incomplete.
      weighting: how a class's prototypes are averaged: by 'examples' of the class, or over the
        'parties' that have it, as in the authors' code.
      predict_by: a party predicts with its 'head', or with the nearest global 'prototype'. The authors'
        code reports both.
      hyper: learning rate and lambda.
      inference_batch_size: examples per step, at most, when prototypes are computed.
      execution, name: as in `fed_md`.
      reduce: how the parties' messages are summed; by default `sums`. It must return sums.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_proto, locals())
    groups = check_groups(groups)
    width = check_prototype_groups(groups, num_classes)
    check_training("training", training)
    check_plain_gradients("fed_proto", training)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_choice("predict_by", predict_by, PREDICT_BY)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.weight", hyper.weight, low=0)
    reduce = checked_sums(reduce)

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
            # Algorithm 1, LocalUpdate: the loss of labels, plus lambda times the distance.
            loss = prototype_loss(model, prototypes, hyper.weight, num_classes)
            trained = train_client(
                model, training, variables, data, key, hyper.learning_rate, loss_hook=loss
            )
            # LocalUpdate returns the party's prototypes, the mean embeddings of its classes.
            preprocess, size = training.preprocess, inference_batch_size
            sums = class_sums(model, trained.variables, data, num_classes, preprocess, size)
            metrics = training_metrics(trained)
            return PartyResult(
                trained.variables, metrics, sends=message_of_prototypes(sums, weighting)
            )

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.prototypes, state.models, round, key, execution, reduce
        )
        # Algorithm 1, the server: global prototypes are means over parties.
        prototypes = prototypes_of(result.combined)
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


def message_of_prototypes(sums: ClassSums, weighting: str) -> ClassSums:
    """A party's message: its sums, or its prototypes if all parties have equal weights."""
    if weighting == BY_EXAMPLES:
        return sums
    prototypes = prototypes_of(sums)
    return ClassSums(prototypes.vectors, prototypes.has_class)
