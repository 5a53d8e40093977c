"""Clipping: a tree of arrays is scaled so that its norm is at most a bound."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


def clipped(tree: PyTree, bound: jax.Array | float, per_layer: bool = False) -> PyTree:
    """The tree, scaled so that the Euclidean norm of all its values is at most the bound.

    A tree with a value that is not finite, or whose norm float32 does not hold, becomes 0, so that no
    client can break the bound or the sum.

    Args:
      tree: arrays of floats.
      bound: above 0.
      per_layer: clip each of the m arrays at bound / sqrt(m) in place of the whole, so that a large
        layer does not shrink the others (McMahan et al., 2018, https://arxiv.org/abs/1710.06963).
    """
    norm = optax.tree.norm(tree)
    of_each = bound / max(len(jax.tree.leaves(tree)), 1) ** 0.5

    def clip(leaf: jax.Array) -> jax.Array:
        scale = (
            _scale(jnp.linalg.norm(leaf.reshape(-1)), of_each) if per_layer else _scale(norm, bound)
        )
        return jnp.where(jnp.isfinite(norm), leaf * scale.astype(leaf.dtype), jnp.zeros_like(leaf))

    return jax.tree.map(clip, tree)


def clipped_weight(weight: jax.Array, bound: jax.Array | float) -> jax.Array:
    """A weight or count in [0, bound]; 0 in place of one that is not a number."""
    return jnp.where(jnp.isnan(weight), 0, jnp.clip(weight, 0, bound))


def has_norm(tree: PyTree) -> jax.Array:
    """Whether float32 holds the norm of the tree, a bool scalar; else `clipped` makes zeros of it."""
    return jnp.isfinite(optax.tree.norm(tree))


def is_within(tree: PyTree, bound: jax.Array | float) -> jax.Array:
    """Whether what is sent of the tree is within the bound before clipping; bool scalar.

    A tree with a value that is not finite is sent as zeros, so it counts as within any bound.
    """
    return (optax.tree.norm(tree) <= bound) | ~has_norm(tree)


def noised(tree: PyTree, deviation: jax.Array | float, key: jax.Array) -> PyTree:
    """The tree with independent Gaussian noise of this standard deviation on every value."""
    return plus_noise(tree, deviation, standard_normal(tree, key))


def standard_normal(tree: PyTree, key: jax.Array) -> PyTree:
    """Independent draws of deviation 1, float32, of the shapes of the tree."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:  # a pass in which clients send nothing
        return tree
    sizes = [leaf.size for leaf in leaves]
    # One draw for all arrays: a generator for each takes seconds to compile.
    draws = jnp.split(jax.random.normal(key, (sum(sizes),), jnp.float32), np.cumsum(sizes)[:-1])
    shaped = [draw.reshape(leaf.shape) for draw, leaf in zip(draws, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def plus_noise(tree: PyTree, deviation: jax.Array | float, draws: PyTree) -> PyTree:
    """The tree plus `deviation` times the draws."""
    return jax.tree.map(
        lambda leaf, draw: leaf + (deviation * draw).astype(leaf.dtype), tree, draws
    )


def _scale(norm: jax.Array, bound: jax.Array | float) -> jax.Array:
    return jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
