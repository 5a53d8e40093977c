"""Example-level privacy: clients clip each example's gradient and add noise.

DP-SGD, Abadi et al., 2016, Deep Learning with Differential Privacy,
https://arxiv.org/abs/1607.00133
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import keys
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.extras import check_installed
from fedcodist.core.local_training import BatchLoss
from fedcodist.core.model import Batch
from fedcodist.privacy.accounting import LEAST_NOISE, check_delta
from fedcodist.privacy.clipping import noised

PyTree = Any


def example_private(
    clip: float, noise_multiplier: float, microbatch: int | None = None
) -> Callable[[BatchLoss], Callable[..., Any]]:
    """Private gradients for `LocalTraining(differentiate=...)`.

    A step's gradient is the sum of the examples' gradients, each scaled to a norm of at most `clip`,
    plus Gaussian noise with standard deviation noise_multiplier x clip, divided by the batch size. (A
    batch size far above the largest client's examples counts as their number.) The client itself draws
    the noise, so it need not trust anyone. `example_epsilon` computes the cost. A column whose first
    axis is as long as the batch has one entry per example. So preprocessing must not add a table of
    this length.

    Args:
      clip: the bound of an example's gradient.
      noise_multiplier: z; 0 only clips.
      microbatch: examples whose gradients are in memory at once, a divisor of the batch size; None: all.

    Raises:
      ValueError, TypeError: names the argument. In training, also for a model with mutable state, since
        batch statistics mix examples.
    """
    check_number("clip", clip, above=0)
    check_number("noise_multiplier", noise_multiplier, low=0)
    if microbatch is not None:
        check_integer("microbatch", microbatch, low=1)

    def differentiate(loss: BatchLoss) -> Callable[..., Any]:
        gradient_of_one = jax.value_and_grad(lambda *one: loss(*one)[0])

        def private_gradient(
            params: PyTree, mutable: PyTree, batch: Batch, mask: jax.Array, key: jax.Array
        ) -> tuple[tuple[jax.Array, PyTree], PyTree]:
            if jax.tree.leaves(mutable):
                raise ValueError(
                    "training.differentiate must not be example_private for a model with mutable state, "
                    "whose batch statistics mix examples."
                )
            size = len(mask)
            at_once = size if microbatch is None else min(microbatch, size)
            if size % at_once:
                raise ValueError(f"microbatch must divide the batch size {size}, got {microbatch}.")

            def of_example(place: jax.Array) -> tuple[jax.Array, PyTree]:
                # A method may give its loss more than columns of examples.
                row = lambda leaf: leaf[place][None] if leaf.shape[:1] == mask.shape else leaf
                one = jax.tree.map(row, (batch, mask))
                return gradient_of_one(params, mutable, *one, jax.random.fold_in(key, place))

            def add(total: tuple[jax.Array, PyTree], places: jax.Array) -> tuple[PyTree, None]:
                # Abadi et al., algorithm 1: compute each gradient, clip it, and sum.
                values, gradients = jax.vmap(of_example)(places)
                leaves, structure = jax.tree.flatten(_finite(gradients))
                clipped_sum, _ = optax.per_example_global_norm_clip(leaves, clip)
                new = (jnp.sum(values * mask[places]), jax.tree.unflatten(structure, clipped_sum))
                return jax.tree.map(jnp.add, total, new), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            places = jnp.arange(size).reshape(-1, at_once)
            (value, total), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), places)
            # Algorithm 1: add noise. The divisor must not depend on which examples are present.
            total = noised(total, noise_multiplier * clip, keys.derive(key, "example_noise"))
            gradient = jax.tree.map(lambda leaf: leaf / size, total)
            return (value / jnp.maximum(jnp.sum(mask), 1), mutable), gradient

        return private_gradient

    return differentiate


def example_epsilon(
    noise_multiplier: float, epochs: int, participations: int, delta: float
) -> float:
    """Epsilon of one example for everything that its client sends, computed by dp-accounting.

    An example is in one step of each epoch, so the cost is that of epochs x participations Gaussian
    mechanisms. In neighbouring data an example is present or has no effect; the number of a client's
    examples is public. No amplification is assumed, neither by shuffling nor by sampling of clients.

    Args:
      noise_multiplier: that of `example_private`. Below 0.001, epsilon is infinite.
      epochs: of local training in a round.
      participations: rounds in which the client takes part, at most those of the run.
      delta: in (0, 1).

    Raises:
      ValueError, TypeError, ImportError: names the argument, or the missing package.
    """
    check_number("noise_multiplier", noise_multiplier, low=0)
    check_integer("epochs", epochs, low=1)
    check_integer("participations", participations, low=0)
    check_delta("delta", delta)
    check_installed("the accounting of privacy", "dp_accounting", "privacy")
    if participations == 0:
        return 0.0
    if noise_multiplier < LEAST_NOISE:
        return math.inf
    import dp_accounting

    # Gaussian mechanisms compose to one with a smaller noise multiplier, without any discretisation.
    composed = noise_multiplier / math.sqrt(epochs * participations)
    return float(dp_accounting.get_epsilon_gaussian(composed, delta))


def _finite(gradients: Any) -> Any:
    """The gradients, leaves [examples, ...], with zeros for examples whose gradient is not finite."""
    is_good = jnp.isfinite(jax.vmap(optax.tree.norm)(gradients))
    expanded = lambda leaf: is_good.reshape(-1, *(1,) * (leaf.ndim - 1))
    return jax.tree.map(lambda leaf: jnp.where(expanded(leaf), leaf, 0), gradients)
