"""`Readout`: logits over many classes that the loss computes chunk by chunk, and losses of them.

The logits of a cohort's sentences over a vocabulary of 10,000 words take more memory than everything
else together. A network that returns a `Readout` does not compute them. Its loss does, and keeps one
chunk of them at a time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
# Positions whose logits exist at the same time, at most: 10 MB of float32 for 10,000 classes.
CHUNK = 256
# A small batch has at least this many chunks, so that little is wasted when the last one is not full.
# For example, two thirds of the positions in a client's 20 Stack Overflow sentences count, so 3 of 4
# chunks are computed. More chunks would mean more additions to the whole gradient of the kernel.
FEWEST_CHUNKS = 4
_Gradients = tuple[jax.Array, jax.Array, jax.Array]  # with respect to features, kernel and bias


class Readout(NamedTuple):
    """Logits that have not been computed: features times kernel plus bias.

    Attributes:
      features: float [..., width], usually [batch, positions, width].
      kernel: float [width, classes].
      bias: float [classes].
      weights: float [...], 1 where a position counts and 0 where it is padding.
      samples: int32 [samples], classes drawn by `sampled_softmax.draw_classes`; None where the loss is
        that of all classes.
    """

    features: jax.Array
    kernel: jax.Array
    bias: jax.Array
    weights: jax.Array
    samples: jax.Array | None = None


def cross_entropy(readout: Readout, labels: jax.Array, chunk: int | None = None) -> jax.Array:
    """Softmax cross-entropy with integer labels, 0 where `readout.weights` is 0.

    Positions that count come first, `chunk` at a time. Chunks of padding are skipped, so padding costs
    next to nothing. Under `jax.vmap` every element computes as many chunks as the longest one. Only the
    log-sum-exp of a chunk's logits is kept; the backward pass computes the logits again. This costs one
    more matrix product, and memory does not grow with the batch. Only reverse mode is defined.

    Args:
      readout: of positions [...].
      labels: int [...].
      chunk: positions whose logits exist at the same time; by default a quarter, at most CHUNK.

    Returns:
      float [...], float32 or wider.
    """
    order, gather, chunk = _those_that_count_first(readout, chunk)
    losses = _ordered_cross_entropy(
        chunk,
        gather(readout.features),
        readout.kernel,
        readout.bias,
        gather(labels),
        jnp.sum(readout.weights != 0),
    )
    losses = jnp.zeros(labels.size, losses.dtype).at[order].set(losses, mode="drop")
    return losses.reshape(labels.shape) * readout.weights


def most_probable(readout: Readout, allowed: jax.Array, chunk: int | None = None) -> jax.Array:
    """The class of the largest logit, 0 where `readout.weights` is 0. No gradient is defined.

    Positions that do not count are skipped, as in `cross_entropy`.

    Args:
      readout: of positions [...].
      allowed: bool [classes], true for classes that may be chosen.
      chunk: positions whose logits exist at the same time; by default as for `cross_entropy`.

    Returns:
      int32 [...].
    """
    order, gather, chunk = _those_that_count_first(readout, chunk)
    features = gather(readout.features)

    def one_chunk(index: jax.Array, best: jax.Array) -> jax.Array:
        logits = logits_of(_part(index, chunk, features), readout.kernel, readout.bias)
        classes = jnp.argmax(jnp.where(allowed, logits, -jnp.inf), axis=-1).astype(jnp.int32)
        return jax.lax.dynamic_update_slice(best, classes, (index * chunk,))

    chunks = _chunks(jnp.sum(readout.weights != 0), chunk)
    best = jax.lax.fori_loop(0, chunks, one_chunk, jnp.zeros(len(order), jnp.int32))
    best = jnp.zeros(readout.weights.size, jnp.int32).at[order].set(best, mode="drop")
    return jnp.where(readout.weights != 0, best.reshape(readout.weights.shape), 0)


def total_in_chunks(
    function: Callable[..., jax.Array],
    readout: Readout,
    constants: PyTree,
    chunk: int | None = None,
) -> jax.Array:
    """The sum over positions of their weight times a function of their logits, such as a divergence.

    Positions that do not count are skipped, as in `cross_entropy`. The gradient is computed in the same
    pass, even if it is not used, so logits are computed only once.

    Args:
      function: (logits [n, classes], constants of these positions) -> [n].
      readout: of positions [...]; gradients go to its features, kernel and bias.
      constants: a pytree of arrays [..., *] and of Readouts of the same positions, which the function
        gets as logits; no gradients go there.
      chunk: positions whose logits exist at the same time; by default as in `cross_entropy`.

    Returns:
      A scalar, float32 or wider.
    """
    order, gather, chunk = _those_that_count_first(readout, chunk)
    is_readout = lambda node: isinstance(node, Readout)
    leaves, structure = jax.tree.flatten(jax.lax.stop_gradient(constants), is_leaf=is_readout)
    parts = [gather(leaf.features if is_readout(leaf) else leaf) for leaf in leaves]
    weights = gather(jax.lax.stop_gradient(readout.weights))
    trained = readout.features, readout.kernel, readout.bias
    features, kernel, bias = jax.lax.stop_gradient(trained)
    features = gather(features)

    def total_of(
        features: jax.Array,
        kernel: jax.Array,
        bias: jax.Array,
        parts: list[jax.Array],
        weights: jax.Array,
    ) -> jax.Array:
        known = [
            logits_of(part, leaf.kernel, leaf.bias) if is_readout(leaf) else part
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        values = function(logits_of(features, kernel, bias), jax.tree.unflatten(structure, known))
        # A weight of 0 is not enough: positions past the end may give NaN.
        return jnp.sum(jnp.where(weights != 0, weights * values, 0))

    def one_chunk(
        index: jax.Array, carry: tuple[jax.Array, _Gradients]
    ) -> tuple[jax.Array, _Gradients]:
        total, (features_bar, kernel_bar, bias_bar) = carry
        of_chunk = functools.partial(_part, index, chunk)
        value, bars = jax.value_and_grad(total_of, argnums=(0, 1, 2))(
            of_chunk(features), kernel, bias, list(map(of_chunk, parts)), of_chunk(weights)
        )
        features_bar = jax.lax.dynamic_update_slice(features_bar, bars[0], (index * chunk, 0))
        return total + value, (features_bar, kernel_bar + bars[1], bias_bar + bars[2])

    shape = jax.eval_shape(
        total_of, features[:chunk], kernel, bias, [part[:chunk] for part in parts], weights[:chunk]
    )
    start = jnp.zeros((), shape.dtype), jax.tree.map(jnp.zeros_like, (features, kernel, bias))
    chunks = _chunks(jnp.sum(weights != 0), chunk)
    total, (features_bar, *bars) = jax.lax.fori_loop(0, chunks, one_chunk, start)
    positions = math.prod(readout.weights.shape)
    features_bar = (
        jnp.zeros((positions, features.shape[1]), features.dtype)
        .at[order]
        .set(features_bar, mode="drop")
    )
    return _with_gradient(total, trained, (features_bar.reshape(trained[0].shape), *bars))


def label_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy [n] of logits [n, classes], for `total_in_chunks`."""
    is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_label, logits, 0), axis=-1)


def logits_of(features: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """features @ kernel + bias, float32 or wider."""
    wide = jnp.promote_types(features.dtype, jnp.float32)
    return jnp.matmul(features, kernel, preferred_element_type=wide) + bias


def mean_per_example(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean of an example's positions and their number: a metric in which all positions weigh alike.

    Args:
      values: [batch, positions], 0 where a position does not count.
      weights: [batch, positions], bool or float, 1 where a position counts.

    Returns:
      (mean [batch], number [batch]), float; the mean is 0 where no position counts.
    """
    number = jnp.sum(weights, axis=-1).astype(jnp.float32)
    return jnp.sum(values, axis=-1) / jnp.maximum(number, 1), number


def _those_that_count_first(
    readout: Readout, chunk: int | None
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array], int]:
    """(order [full chunks], values [...] -> values in that order, positions in a chunk).

    Where the last chunk is not full, the order has indices past the end. They read zeros and must not be
    written to.
    """
    weights = readout.weights.reshape(-1)
    positions = len(weights)
    if chunk is None:
        chunk = min(CHUNK, -(-positions // FEWEST_CHUNKS))
    chunk = min(chunk, positions)
    filled = jnp.full(-positions % chunk, positions, jnp.int32)
    order = jnp.concatenate([jnp.argsort(weights == 0, stable=True).astype(jnp.int32), filled])

    def gather(values: jax.Array) -> jax.Array:
        flat = values.reshape(positions, *values.shape[readout.weights.ndim :])
        return flat.at[order].get(mode="fill", fill_value=0)

    return order, gather, chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ordered_cross_entropy(
    chunk: int,
    features: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Losses of the first `count` positions, 0 for others; their number is a multiple of `chunk`."""
    return _forward(chunk, features, kernel, bias, labels, count)[0]


def _forward(
    chunk: int,
    features: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def one_chunk(
        index: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        losses, log_sums = carry
        of_chunk = functools.partial(_part, index, chunk)
        logits = logits_of(of_chunk(features), kernel, bias)
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        label_logits = jnp.take_along_axis(logits, of_chunk(labels)[:, None], axis=-1)[:, 0]
        put = lambda values, new: jax.lax.dynamic_update_slice(values, new, (index * chunk,))
        return put(losses, log_sum - label_logits), put(log_sums, log_sum)

    dtype = jax.eval_shape(logits_of, features, kernel, bias).dtype
    start = (jnp.zeros(len(labels), dtype),) * 2
    losses, log_sums = jax.lax.fori_loop(0, _chunks(count, chunk), one_chunk, start)
    return losses, (features, kernel, bias, labels, count, log_sums)


def _backward(
    chunk: int, saved: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    features, kernel, bias, labels, count, log_sums = saved

    def one_chunk(index: jax.Array, carry: _Gradients) -> _Gradients:
        features_bar, kernel_bar, bias_bar = carry
        of_chunk = functools.partial(_part, index, chunk)
        part = of_chunk(features)
        logits = logits_of(part, kernel, bias)
        is_label = jnp.arange(len(bias)) == of_chunk(labels)[:, None]
        residual = jnp.exp(logits - of_chunk(log_sums)[:, None]) - is_label
        residual = residual * of_chunk(cotangents)[:, None]
        new = (residual.astype(kernel.dtype) @ kernel.T).astype(features.dtype)
        features_bar = jax.lax.dynamic_update_slice(features_bar, new, (index * chunk, 0))
        kernel_bar += (part.T @ residual.astype(part.dtype)).astype(kernel.dtype)
        return features_bar, kernel_bar, bias_bar + residual.sum(axis=0).astype(bias.dtype)

    start = jax.tree.map(jnp.zeros_like, (features, kernel, bias))
    bars = jax.lax.fori_loop(0, _chunks(count, chunk), one_chunk, start)
    return *bars, None, None


_ordered_cross_entropy.defvjp(_forward, _backward)


def _chunks(count: jax.Array, chunk: int) -> jax.Array:
    return -(-count // chunk)


def _part(index: jax.Array, chunk: int, values: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(values, index * chunk, chunk)


@jax.custom_vjp
def _with_gradient(value: jax.Array, arguments: PyTree, gradient: PyTree) -> jax.Array:
    """A scalar function's value, with `gradient` as its gradient with respect to `arguments`."""
    return value


def _gradient_scaled(gradient: PyTree, cotangent: jax.Array) -> tuple[None, PyTree, None]:
    scaled = jax.tree.map(lambda leaf: (leaf * cotangent).astype(leaf.dtype), gradient)
    return None, scaled, None


_with_gradient.defvjp(lambda value, arguments, gradient: (value, gradient), _gradient_scaled)
