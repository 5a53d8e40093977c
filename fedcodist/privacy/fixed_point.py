"""Numbers as integers modulo 2^b, which secure sums add up."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST_BITS = 32


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """Integers modulo 2^b, uint32, and the dtype of the numbers that they represent."""

    values: jax.Array
    dtype: Any


def encoded(
    leaf: jax.Array, step: float, most: int, bits: int, towards_zero: bool = False
) -> FixedPoint:
    """A leaf's numbers as multiples of the step, clipped to +-`most`; 0 in place of NaN.

    Numbers are rounded to the nearest multiple or, so that no norm becomes larger, towards zero. (Then
    a number within a thousandth of a step from a multiple is this multiple.)
    """
    limit = np.float32(most)
    if int(limit) > most:  # float32 has rounded up
        limit = np.nextafter(limit, np.float32(0))
    exact = leaf.astype(jnp.float32) * (1 / step)
    multiples = jnp.round(exact)
    if towards_zero:
        multiples = jnp.where(jnp.abs(exact - multiples) < 1e-3, multiples, jnp.trunc(exact))
    multiples = jnp.clip(multiples, -limit, limit)
    finite = jnp.where(jnp.isfinite(leaf), multiples, 0)
    values = modulo(finite.astype(jnp.int32).astype(jnp.uint32), bits)
    return FixedPoint(values, np.dtype(leaf.dtype).name)


def decoded(number: FixedPoint, step: float, bits: int, is_broken: jax.Array) -> jax.Array:
    """The inverse of `encoded` for a sum; NaN where a client's numbers were not finite."""
    dtype = jnp.dtype(number.dtype)
    shifted = number.values.astype(jnp.uint32) << (MOST_BITS - bits)
    signed = shifted.astype(jnp.int32) >> (MOST_BITS - bits)  # copies the sign's bit
    values = signed.astype(jnp.float32) * step
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.round(values).astype(dtype)
    return jnp.where(is_broken, jnp.nan, values).astype(dtype)


def modulo(values: jax.Array, bits: int) -> jax.Array:
    """Integers modulo 2^bits, uint32."""
    return values & jnp.uint32(2**bits - 1)
