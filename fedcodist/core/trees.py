"""Trees of arrays: leaves by name, and values as one vector, counted, and checked to be finite."""

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


def parameter_count(tree: PyTree) -> int:
    """The number of scalars in a pytree of arrays or shapes."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))


def is_finite(tree: PyTree) -> jax.Array:
    """Whether all values of a pytree are finite, a bool scalar."""
    # Small arrays are joined first, since XLA compiles the same for each shape again.
    leaves = jax.tree.leaves(tree)
    small = [jnp.ravel(leaf) for leaf in leaves if jnp.size(leaf) <= 2**16]
    large = [leaf for leaf in leaves if jnp.size(leaf) > 2**16]
    arrays = [*large, jnp.concatenate(small)] if small else large
    each = [jnp.all(jnp.isfinite(array)) for array in arrays]
    return jnp.all(jnp.stack(each)) if each else jnp.ones((), bool)
