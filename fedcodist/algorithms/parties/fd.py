"""FD (Jeong et al., 2018): parties exchange mean outputs per label; no examples, no models."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.party import (
    PARTIES,
    PartyGroup,
    check_groups,
    check_widths,
    everybody,
    for_each_party,
    inference,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables, is_finite
from fedcodist.distillation.loop import kl_divergence, softened, softened_target

PyTree = Any


class LabelMeans(NamedTuple):
    """Mean logits of the examples of each label [labels, classes], and whether there are any [labels].

    Summed over parties: sums, and numbers of parties.
    """

    logits: jax.Array
    has_label: jax.Array


class FDParty(NamedTuple):
    """A party's model, and what it has sent."""

    variables: Variables
    sent: LabelMeans


class FDState(NamedTuple):
    """Parties by architecture, leaves [group, ...], and the sum of what they have sent."""

    models: dict[str, FDParty]
    total: LabelMeans


class FDHyper(NamedTuple):
    """Floats of FD; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      weight: gamma, of the regulariser.
      temperature: T of both sides.
    """

    learning_rate: Any = 0.1
    weight: Any = 1.0
    temperature: Any = 1.0


def fd(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(),
    hyper: FDHyper = FDHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "fd",
) -> FederatedAlgorithm:
    """Local training whose outputs are drawn, label by label, to the mean outputs of the others.

    The loss is CE + gamma T^2 KL(softmax(G / T) || softmax(z / T)), where G are the mean logits of an
    example's label over the other parties that have this label; where there are none, as in the
    first round, it is CE alone. Means are taken after local training, in inference mode. (Jeong et al.
    average while training goes on, and over softened outputs.)

    Args:
      groups: architecture -> its parties.
      num_classes: labels, and outputs of every model.
      training: on private examples.
      hyper: learning rate, gamma and T.
      inference_batch_size: examples per step while means are taken.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(fd, locals())
    groups = check_groups(groups)
    check_widths(groups, num_classes)
    check_training("training", training)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("weight", hyper.weight, low=0)
    check_number("temperature", hyper.temperature, above=0)
    divergence = kl_divergence("forward")

    def nothing(*leading):
        return LabelMeans(
            jnp.zeros((*leading, num_classes, num_classes)), jnp.zeros((*leading, num_classes))
        )

    def init(key):
        models = init_models(groups, key)
        own = {
            n: FDParty(variables, nothing(len(groups[n].clients)))
            for n, variables in models.items()
        }
        return FDState(own, nothing())

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        softly = softened(divergence, hyper.temperature, scaled=True)

        def update(model, total, party, data, key):
            others = of_others(total, party.sent)

            def loss(outputs, batch):
                labels = class_labels(batch["label"], num_classes)
                target = softened_target(others.logits[labels], hyper.temperature)
                drawn = others.has_label[labels] * softly(logits_of(outputs), target)
                return checked_loss(model.loss, outputs, batch) + hyper.weight * drawn

            trained = train_client(
                model, training, party.variables, data, key, hyper.learning_rate, loss_hook=loss
            )
            means = label_means(
                model, trained.variables, data, num_classes, training, inference_batch_size
            )
            metrics = {
                "loss": trained.loss,
                "num_steps": trained.num_steps,
                "client_examples": trained.num_examples,
                "finite": is_finite(trained.variables),
            }
            after = FDParty(trained.variables, means)
            return ClientResult(means, {}, jnp.ones(()), after, metrics)

        result = for_each_party(
            groups,
            update,
            state.total,
            state.models,
            inputs.cohorts[PARTIES],
            keys.derive(key, "client_update", round.index),
            execution,
            axis_name,
        )
        return FDState(result.own, result.update), client_states, result.metrics

    scalar = np.dtype(np.float32).itemsize
    # Which labels a party has, or how many parties have a label, is one more number per label.
    payload = num_classes * (num_classes + 1) * scalar
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=lambda round, key: everybody(groups, {}),
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state.models[name].variables),
        communication=same_for_all(groups, Communication(down=payload, up=payload)),
        num_clients=num_clients(groups),
    )


def of_others(total: LabelMeans, own: LabelMeans) -> LabelMeans:
    """The means over the other parties that have a label; `has_label` is 0 where there are none."""
    count = total.has_label - own.has_label
    has_label = (count > 0.5).astype(count.dtype)
    logits = (total.logits - own.logits) / jnp.maximum(count, 1)[:, None]
    return LabelMeans(logits * has_label[:, None], has_label)


def label_means(
    model: Model,
    variables: Variables,
    data: ClientData,
    num_classes: int,
    training: LocalTraining,
    batch_size: int,
) -> LabelMeans:
    """A party's mean logits per label on its own examples; zeros for labels that it does not have."""
    logits = inference(model, variables, data, training.preprocess, batch_size)
    positions = jnp.arange(data.capacity)
    rows = data.start + jnp.minimum(positions, jnp.maximum(data.size - 1, 0))
    labels = class_labels(data.columns["label"][rows], num_classes)
    own = jax.nn.one_hot(labels, num_classes)
    own *= (positions < data.size)[:, None]
    count = jnp.sum(own, axis=0)
    means = (own.T @ logits) / jnp.maximum(count, 1)[:, None]
    return LabelMeans(means, (count > 0).astype(means.dtype))
