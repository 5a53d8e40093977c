"""A model that computes in bfloat16, with everything that is kept or summed in float32.

Mixed precision without loss scaling, since bfloat16 has float32's exponents (Kalamkar et al. 2019, A
Study of BFLOAT16 for Deep Learning Training).
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.model import Model, Variables

PyTree = Any


def in_bfloat16(model: Model) -> Model:
    """Makes a model's network compute in bfloat16.

    Parameters and floating inputs are cast where the network is applied. Parameters themselves, and so
    gradients, updates and what clients send, stay float32, as do mutable state (batch statistics),
    outputs, and with them losses and metrics. A language model's output layer, which its loss applies,
    computes in float32. Layers that compute their statistics in float32 or wider, such as
    `fedcodist.models.normalization.BatchNorm` and Flax's, go on doing so.

    Args:
      model: any model whose network computes in the type of its parameters and inputs: one that
        names a `dtype` of its own keeps it.

    Returns:
      The same model but for `apply`.
    """

    def apply(variables, batch, **options):
        outputs, mutable = model.apply(
            Variables(_cast(variables.params, jnp.bfloat16), variables.mutable),
            _cast(dict(batch), jnp.bfloat16),
            **options,
        )
        mutable = jax.tree.map(lambda new, old: new.astype(old.dtype), mutable, variables.mutable)
        return _cast(outputs, jnp.float32), mutable

    return model._replace(apply=apply)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts floating arrays; labels, tokens and keys stay what they are."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )
