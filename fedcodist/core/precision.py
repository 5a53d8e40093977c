"""Mixed precision: a model computes in bfloat16 and keeps its parameters and sums in float32.

Losses need no scaling, since bfloat16 has float32's exponents (Kalamkar et al. 2019, A Study of BFLOAT16
for Deep Learning Training, https://arxiv.org/abs/1905.12322).
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.model import Batch, Model, Variables

PyTree = Any


def in_bfloat16(model: Model) -> Model:
    """Makes a model's network compute in bfloat16.

    Parameters and floating inputs are cast when the network is applied. The parameters themselves stay
    float32, and so do gradients, updates and what clients send. Mutable state (batch statistics),
    outputs, losses and metrics are float32 too. A language model's output layer, which its loss applies,
    multiplies bfloat16 values in float32. Layers that compute their statistics in float32 or wider, such
    as `fedcodist.models.normalization.BatchNorm` and Flax's, still do.

    Args:
      model: a model whose network computes in the type of its parameters and inputs. Layers that
        set `dtype` keep it.

    Returns:
      The model with another `apply`.
    """

    def apply(variables: Variables, batch: Batch, **options: Any) -> tuple[Any, PyTree]:
        outputs, mutable = model.apply(
            Variables(_cast(variables.params, jnp.bfloat16), variables.mutable),
            _cast(dict(batch), jnp.bfloat16),
            **options,
        )
        mutable = jax.tree.map(lambda new, old: new.astype(old.dtype), mutable, variables.mutable)
        return _cast(outputs, jnp.float32), mutable

    return model._replace(apply=apply)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts floating arrays; labels, tokens and keys are not changed."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )
