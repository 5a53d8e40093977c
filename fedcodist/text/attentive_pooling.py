"""Additive attention with one learnt query, which pools many vectors, as in NAML (Wu et al., 2019)."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class AttentivePooling(nn.Module):
    """The mean of vectors, weighted by the softmax of query tanh(W x + b).

    https://arxiv.org/abs/1907.05576. Called with x [..., vectors, width] and is_real bool [...,
    vectors]; returns [..., width], zeros where no vector is real.

    Attributes:
      queries: width of the query.
    """

    queries: int = 200

    @nn.compact
    def __call__(self, x: jax.Array, is_real: jax.Array) -> jax.Array:
        projected = jnp.tanh(nn.Dense(self.queries, name="projection")(x))
        draw = nn.initializers.normal(self.queries**-0.5)
        query = self.param("query", draw, (self.queries,))
        # A finite number: without a real vector the softmax must be finite.
        scores = jnp.where(is_real, projected @ query, jnp.finfo(x.dtype).min)
        shares = jnp.where(is_real, jax.nn.softmax(scores), 0)
        return jnp.einsum("...v,...vw->...w", shares, x)
