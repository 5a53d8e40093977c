"""Divergences of a student from its target besides the Kullback-Leibler divergence, and custom ones.

All are functions (student logits [batch, classes], target probabilities [batch, classes]) -> [batch],
smallest where softmax(logits) is the target. See `fedcodist.distillation.loop.kl_divergence` for both
directions of the Kullback-Leibler divergence.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (student logits, target probabilities) -> divergence per example
Divergence = Callable[[jax.Array, jax.Array], jax.Array]


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


def _log(target: jax.Array) -> jax.Array:
    """log(p), finite where a probability underflows to 0."""
    return jnp.log(jnp.maximum(target, jnp.finfo(target.dtype).tiny))
