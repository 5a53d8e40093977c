"""FedNTD (Lee et al., 2022): FedAvg with distillation of the received model on the not-true classes.

Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, Gihun Lee, Minchan
Jeong, Yongjin Shin, Sangmin Bae, Se-Young Yun. https://arxiv.org/abs/2106.03097
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.labels import class_labels
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedMethod
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.distillation.divergences import check_classes

PyTree = Any


class FedNTDHyper(NamedTuple):
    """Learning rates, beta (the weight of the divergence) and tau; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    not_true_weight: Any = 1.0
    temperature: Any = 1.0


def fed_ntd(
    model: Model,
    training: LocalTraining = LocalTraining(),
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FedNTDHyper = FedNTDHyper(),
) -> FederatedMethod:
    """FedAvg plus beta tau^2 KL(received || client) over the not-true classes: all but the label.

    Both softmaxes have a temperature tau and leave the true class out, so only the label teaches that
    class. The received model teaches in every round, in evaluation mode. The divergence is multiplied
    by tau squared, as in the released code; the paper's formula has no such factor (not verified: we
    know the paper from memory only). With beta = 0 this is FedAvg; also with two classes, because the
    softmax is then over one class.

    The defaults are those of the released code's configuration. (Its loss has a default tau of 3, which
    that configuration replaces.)

    Args:
      model, training, server_optimizer, schedule: as in `fed_avg`. Outputs are logits, and batches have
        the column 'label'.
      hyper: learning rates, beta at least 0 and tau above 0.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
      TypeError: a language model, which returns no logits.
    """
    check_arguments(fed_ntd, locals())
    check_number("hyper.not_true_weight", hyper.not_true_weight, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedNTDHyper,
    ) -> ClientResult:
        # The teacher is the model that the client received.
        received = Variables(message.params, message.mutable)

        # The loss of the labels, plus beta tau^2 KL(received || client) over the not-true classes.
        def loss(outputs: Any, batch: Batch) -> jax.Array:
            answers = checked_logits(model.apply(received, batch)[0])
            check_classes(answers)
            labels = class_labels(batch["label"], answers.shape[-1])
            divergence = not_true_divergence(
                checked_logits(outputs), answers, labels, hyper.temperature
            )
            return checked_loss(model.loss, outputs, batch) + hyper.not_true_weight * divergence

        trained = train_client(
            model, training, received, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        return client_result(message, trained, weight=data.size, client_state=client_state)

    # `gradient` stays FedAvg's: at the received model student and teacher agree, so the divergence adds
    # nothing to it, but for dropout and batch statistics.
    return averaging._replace(name="fed_ntd", hyper=hyper, client_update=client_update)


def not_true_divergence(
    logits: jax.Array, teacher: jax.Array, labels: jax.Array, temperature: Any
) -> jax.Array:
    """tau^2 KL(teacher || student) of softmaxes over all classes but each example's label, [batch].

    Args:
      logits, teacher: [batch, classes]; no gradient goes to the teacher.
      labels: whole numbers [batch].
      temperature: tau, which divides both logits.
    """
    not_true = jnp.arange(logits.shape[-1]) != labels[:, None]

    def log_probabilities(logits: jax.Array) -> jax.Array:
        tempered = logits / temperature
        total = jax.nn.logsumexp(tempered, axis=-1, where=not_true, keepdims=True)
        # For the true class both sides are 0 and cancel; its logit itself might overflow.
        return jnp.where(not_true, tempered - total, 0)

    target = log_probabilities(jax.lax.stop_gradient(teacher))
    divergence = jnp.sum(jnp.exp(target) * (target - log_probabilities(logits)), axis=-1)
    return temperature**2 * divergence
