"""FD (federated distillation): parties exchange their mean outputs per label, but no models.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, https://arxiv.org/abs/1811.11479.

Other papers call it FedDistill. `FDVariant` has the differences of their versions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_widths, same_for_all
from fedcodist.algorithms.parties.own_examples import label_sums
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_sums
from fedcodist.algorithms.parties.training_outputs import train_summing_outputs
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import (
    LocalTraining,
    check_plain_gradients,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.distillation.divergences import Divergence, kl_divergence, softened, softened_target

PyTree = Any


class LabelMeans(NamedTuple):
    """Each label's mean logits [labels, classes], and whether the label has examples, 1 or 0 [labels].

    Summed over parties, these are sums of means, and numbers of parties.
    """

    logits: jax.Array
    has_label: jax.Array


class FDParty(NamedTuple):
    """A party's model, and the means that it sent last."""

    variables: Variables
    sent: LabelMeans


class FDState(NamedTuple):
    """Parties by architecture, leaves [group, ...], and the sum of the means that they sent last."""

    models: dict[str, FDParty]
    total: LabelMeans


class FDHyper(NamedTuple):
    """Floats of FD; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      weight: gamma, of the regulariser.
      temperature: T, of both softmaxes.
    """

    learning_rate: Any = 0.1
    weight: Any = 1.0
    temperature: Any = 1.0


class FDVariant(NamedTuple):
    """What differs between versions of the method.

    Attributes:
      averaged: when a party's means are computed: 'after_training', in evaluation mode, or
        'in_training', over the training outputs of all steps, as HtFLlib and Jeong et al. (not verified)
        do.
      own_share: whether a party's target includes its own mean, as in HtFLlib, or only other parties'.
      divergence: 'kl', with a temperature, or 'mse', the mean squared difference of logits.
    """

    averaged: str = "after_training"
    own_share: bool = False
    divergence: str = "kl"

    def check(self, name: str) -> None:
        """Raises ValueError that names the field which is not allowed."""
        allowed = {"averaged": ("after_training", "in_training"), "divergence": ("kl", "mse")}
        for field, values in allowed.items():
            if (value := getattr(self, field)) not in values:
                raise ValueError(
                    f"{name}.{field} must be {values[0]!r} or {values[1]!r}, got {value!r}."
                )


def fd(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(),
    hyper: FDHyper = FDHyper(),
    inference_batch_size: int = 500,
    variant: FDVariant = FDVariant(),
    execution: Execution = Execution(),
    name: str = "fd",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Local training that pulls outputs towards the other parties' mean outputs for the same label.

    The loss is CE + gamma T^2 KL(softmax(G / T) || softmax(z / T)). G are the mean logits of the
    example's label over the other parties that have this label. If there are none, as in the first
    round, the loss is CE alone. Means are computed after local training, in evaluation mode. (Jeong et
    al. average during training, see `variant`, and they average softened outputs.)

    HtFLlib's FD is `FDVariant("in_training", own_share=True)` except for its loss: it uses mean logits,
    which are not probabilities, as the target of a cross-entropy, which is then not bounded below.
    FedGen's repository sums outputs over all rounds, and counts parties without a label as zeros.

    Args:
      groups: architecture -> its parties.
      num_classes: labels, and outputs of every model.
      training: on private examples.
      hyper: learning rate, gamma and T.
      inference_batch_size: examples per step, at most, when means are computed.
      variant: when means are computed, over which parties, and the regulariser; 'mse' does not use T.
      execution, name: as in `fed_md`.
      reduce: how the parties' messages are summed; by default `sums`. It must return sums, since each
        party subtracts its own message.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fd, locals())
    groups = check_groups(groups)
    check_widths(groups, num_classes)
    check_training("training", training)
    check_plain_gradients("fd", training)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.weight", hyper.weight, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    reduce = checked_sums(reduce)

    def nothing(*leading: int) -> LabelMeans:
        return LabelMeans(
            jnp.zeros((*leading, num_classes, num_classes)), jnp.zeros((*leading, num_classes))
        )

    def init(key: jax.Array) -> FDState:
        parties = {
            architecture: FDParty(variables, nothing(len(groups[architecture].clients)))
            for architecture, variables in init_models(groups, key).items()
        }
        return FDState(parties, nothing())

    def round_(state: FDState, client_states: PyTree, round: Round, hyper: FDHyper) -> AfterRound:
        distance = distance_of(variant.divergence, hyper.temperature)

        def update(
            model: Model, total: LabelMeans, party: FDParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # G: the mean outputs of each label over the other parties that have it.
            zeros = jax.tree.map(jnp.zeros_like, party.sent)
            subtracted = zeros if variant.own_share else party.sent
            others = of_others(total, subtracted)

            # Local training: CE + gamma T^2 KL(softmax(G / T) || softmax(z / T)).
            def loss(outputs: Any, batch: Batch) -> jax.Array:
                labels = class_labels(batch["label"], num_classes)
                to_others = distance(checked_logits(outputs), others.logits[labels])
                regulariser = others.has_label[labels] * to_others
                return checked_loss(model.loss, outputs, batch) + hyper.weight * regulariser

            # The party sends its mean outputs per label, from training or after it.
            arguments = (model, training, party.variables, data, key, hyper.learning_rate)
            if variant.averaged == "in_training":
                trained, sums = train_summing_outputs(*arguments, loss)
                means = means_of(*sums)
            else:
                trained = train_client(*arguments, loss_hook=loss)
                preprocess, size = training.preprocess, inference_batch_size
                means = label_means(model, trained.variables, data, num_classes, preprocess, size)
            if reduce.bound is not None:  # the party must later subtract what was summed
                means = reduce.bound(means)
            metrics = training_metrics(trained)
            return PartyResult(FDParty(trained.variables, means), metrics, means)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.total, state.models, round, key, execution, reduce
        )
        # The server adds up the parties' means, for the next round.
        total = result.combined
        return FDState(result.states, total), client_states, result.metrics

    scalar = np.dtype(np.float32).itemsize
    # One more number per label: whether the party has it (up), or how many parties have it (down).
    payload = num_classes * (num_classes + 1) * scalar
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name].variables,
        same_for_all(groups, Communication(down=payload, up=payload)),
    )


def distance_of(divergence: str, temperature: Any) -> Divergence:
    """(logits, mean logits), both [batch, classes] -> the regulariser of each example."""
    if divergence == "mse":
        return lambda logits, means: jnp.mean((logits - means) ** 2, axis=-1)
    softly = softened(kl_divergence("forward"), temperature, scaled=True)
    return lambda logits, means: softly(logits, softened_target(means, temperature))


def of_others(total: LabelMeans, subtracted: LabelMeans) -> LabelMeans:
    """The means over the other parties that have a label; `has_label` is 0 if there are none."""
    count = total.has_label - subtracted.has_label
    has_label = (count > 0.5).astype(count.dtype)
    logits = (total.logits - subtracted.logits) / jnp.maximum(count, 1)[:, None]
    return LabelMeans(logits * has_label[:, None], has_label)


def label_means(
    model: Model,
    variables: Variables,
    data: ClientData,
    num_classes: int,
    preprocess: Preprocess,
    batch_size: int,
) -> LabelMeans:
    """A party's mean logits per label on its own examples; zeros for labels that it does not have."""
    return means_of(
        *label_sums(model, variables, data, num_classes, preprocess, batch_size, checked_logits)
    )


def means_of(sums: jax.Array, counts: jax.Array) -> LabelMeans:
    """Sums of logits [labels, classes] and numbers of examples [labels] as means."""
    means = sums / jnp.maximum(counts, 1)[:, None]
    return LabelMeans(means, (counts > 0).astype(means.dtype))
