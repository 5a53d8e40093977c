"""Trees of arrays: their leaves by name, and all their values as one vector."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """A tree's leaves by their paths, such as `Dense_0/kernel`, in the tree's order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def flat(tree: PyTree) -> jax.Array:
    """All values of a tree in one float32 vector."""
    return jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def unflat(vector: jax.Array, like: PyTree) -> PyTree:
    """The inverse of `flat`; `like` is a tree of arrays or shapes."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = jnp.split(vector, ends.tolist())
    shaped = [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)
