"""Clipping: a tree of arrays is scaled so that its norm is at most a bound."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def clipped(tree: PyTree, bound: jax.Array | float, per_layer: bool = False) -> PyTree:
    """The tree, scaled so that the Euclidean norm of all its values is at most the bound.

    A tree with a value that is not finite becomes 0, so that no client can break the bound or the sum.

    Args:
      tree: arrays of floats.
      bound: above 0.
      per_layer: clip each of the m arrays at bound / sqrt(m) in place of the whole, so that a large
        layer does not shrink the others (McMahan et al., 2018, https://arxiv.org/abs/1710.06963).
    """
    tree = _finite(tree)
    if not per_layer:
        scale = _scale(optax.tree.norm(tree), bound)
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), tree)
    of_each = bound / max(len(jax.tree.leaves(tree)), 1) ** 0.5
    return jax.tree.map(
        lambda leaf: leaf * _scale(jnp.linalg.norm(leaf.reshape(-1)), of_each).astype(leaf.dtype),
        tree,
    )


def is_within(tree: PyTree, bound: jax.Array | float) -> jax.Array:
    """Whether clipping at the bound would not change the tree; bool scalar."""
    return optax.tree.norm(_finite(tree)) <= bound


def noised(tree: PyTree, deviation: jax.Array | float, key: jax.Array) -> PyTree:
    """The tree with independent Gaussian noise of this standard deviation on every value."""
    return plus_noise(tree, deviation, standard_normal(tree, key))


def standard_normal(tree: PyTree, key: jax.Array) -> PyTree:
    """Independent draws of deviation 1, float32, of the shapes of the tree."""
    leaves, structure = jax.tree.flatten(tree)
    draws = [
        jax.random.normal(jax.random.fold_in(key, place), leaf.shape, jnp.float32)
        for place, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, draws)


def plus_noise(tree: PyTree, deviation: jax.Array | float, draws: PyTree) -> PyTree:
    """The tree plus `deviation` times the draws."""
    return jax.tree.map(
        lambda leaf, draw: leaf + (deviation * draw).astype(leaf.dtype), tree, draws
    )


def _finite(tree: PyTree) -> PyTree:
    """The tree, or zeros if any of its values is not finite."""
    is_good = jnp.isfinite(optax.tree.norm(tree))
    return jax.tree.map(lambda leaf: jnp.where(is_good, leaf, jnp.zeros_like(leaf)), tree)


def _scale(norm: jax.Array, bound: jax.Array | float) -> jax.Array:
    return jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
