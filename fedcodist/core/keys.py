"""Random keys: every draw's key is derived from one root key by its purpose."""

import zlib
from typing import Any

import jax


def derive(key: jax.Array, *path: str | int | jax.Array) -> jax.Array:
    """Returns the key for one purpose, such as `derive(root, 'clients', round, pool, client)`.

    Keys depend on the root and the path alone: not on earlier draws, on the device, or on which other
    pools exist. So methods that share a root share their cohorts and batch orders, and a resumed run
    draws the same as an uninterrupted one.

    Args:
      key: a JAX random key.
      path: names (hashed with CRC-32, the same on every machine) and integers, traced or not.
    """
    for part in path:
        data = zlib.crc32(part.encode()) if isinstance(part, str) else part
        key = jax.random.fold_in(key, data)
    return key


def key_shape() -> Any:
    """The shape of a random key, for `jax.eval_shape`."""
    return jax.eval_shape(lambda: jax.random.key(0))
