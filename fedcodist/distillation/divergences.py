"""Divergences of a student from its target, their temperature, and custom ones.

All are functions (student logits [batch, classes], target probabilities [batch, classes]) -> [batch],
smallest where softmax(logits) is the target.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedcodist.core.shape_checks import described

# (student logits, target probabilities) -> divergence per example
Divergence = Callable[[jax.Array, jax.Array], jax.Array]


def kl_divergence(direction: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the loss (student logits, target probabilities) -> KL divergence per example.

    'forward' is KL(target || student), the soft cross-entropy up to a constant. 'reverse' is
    KL(student || target). Raises ValueError that names `direction` otherwise.
    """
    if direction == "forward":
        return lambda logits, target: optax.kl_divergence(jax.nn.log_softmax(logits), target)
    if direction == "reverse":

        def reverse(logits: jax.Array, target: jax.Array) -> jax.Array:
            # Targets may underflow to 0, where the divergence would be infinite.
            log_target = jnp.log(jnp.maximum(target, jnp.finfo(target.dtype).tiny))
            # Not log(softmax): where a student's probability underflows, log(0) has no gradient.
            log_student = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(log_student) * (log_student - log_target), axis=-1)

        return reverse
    raise ValueError(f"direction must be 'forward' or 'reverse', got {direction!r}.")


def jensen_shannon(logits: jax.Array, target: jax.Array) -> jax.Array:
    """The Jensen-Shannon divergence, in [0, log 2]: the mean of both KL divergences from their mean.

    Lin 1991, Divergence Measures Based on the Shannon Entropy, https://doi.org/10.1109/18.61115.
    """
    log_student, log_target = jax.nn.log_softmax(logits), _log(target)
    log_mean = jnp.logaddexp(log_student, log_target) - jnp.log(2.0)
    of_student = jnp.exp(log_student) * (log_student - log_mean)
    return jnp.sum(of_student + target * (log_target - log_mean), axis=-1) / 2


def mean_squared_logits(logits: jax.Array, target: jax.Array) -> jax.Array:
    """The mean over classes of squared differences between the student's logits and the target's.

    Both are centred over classes, since softmax does not depend on a constant added to all logits. A
    target's logits are its log-probabilities. If the target is one teacher's softmax, they are the
    teacher's logits; if it is a mixture, they are those of the mixture. Probabilities below the smallest
    float are replaced by it. Kim et al. 2021, Comparing Kullback-Leibler Divergence and Mean Squared
    Error Loss in Knowledge Distillation, https://arxiv.org/abs/2105.08919, do not centre.
    """
    centred = lambda values: values - jnp.mean(values, axis=-1, keepdims=True)
    return jnp.mean((centred(logits) - centred(_log(target))) ** 2, axis=-1)


# By name, besides the Kullback-Leibler divergence, which has a direction.
KL = "kl"
DIVERGENCES = {"jensen_shannon": jensen_shannon, "mean_squared_logits": mean_squared_logits}


def softened_target(logits: jax.Array, temperature: Any) -> jax.Array:
    """softmax(z / T) of teacher logits [batch, classes]."""
    check_classes(logits)
    return jax.nn.softmax(logits / temperature)


def softened(divergence: Divergence, temperature: Any, scaled: bool) -> Divergence:
    """The divergence with the student's logits at a temperature.

    Hinton et al. 2015, Distilling the Knowledge in a Neural Network, https://arxiv.org/abs/1503.02531.

    Args:
      divergence: of logits from target probabilities, per example.
      temperature: T > 0, which divides the student's logits. See `softened_target` for the teacher.
      scaled: whether to multiply by T squared, so that gradients are as large as at T = 1.
    """
    factor = temperature**2 if scaled else 1.0
    return lambda logits, target: factor * divergence(logits / temperature, target)


def own_divergence(name: str, function: Divergence) -> Divergence:
    """A user's divergence, with a check of its results' shape.

    Raises:
      ValueError: names `name` unless the function returns one number per example.
    """

    def divergence(logits: jax.Array, target: jax.Array) -> jax.Array:
        values = jnp.asarray(function(logits, target))
        if values.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name} must return one number per example, {list(logits.shape[:-1])} for logits "
                f"{list(logits.shape)}, got {list(values.shape)}."
            )
        return values

    return divergence


def check_classes(logits: jax.Array) -> None:
    """Raises ValueError for logits of a single class: its probability is 1, which teaches nothing.

    Raises TypeError for outputs that are no array.
    """
    if not hasattr(logits, "ndim"):
        raise TypeError(
            f"models that teach must return logits [..., classes], got {described(logits)}."
        )
    if logits.ndim < 2 or logits.shape[-1] < 2:
        raise ValueError(
            "models that teach must return logits [..., classes] of at least two classes, got "
            f"{list(logits.shape)}: give a network of one logit a second one."
        )


def _log(target: jax.Array) -> jax.Array:
    """log(p), finite where a probability underflows to 0."""
    return jnp.log(jnp.maximum(target, jnp.finfo(target.dtype).tiny))
