"""KT-pFL's knowledge coefficients: the weights of parties' soft predictions, trained by the server."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Coefficients(NamedTuple):
    """How the server trains the knowledge coefficients.

    Attributes:
      loss: the distance of a party's own predictions from its mixture: 'kl', or 'mse' as in the authors'
        code. See `updated_coefficients`.
      rows: how rows become weights after a step: 'simplex', the projection onto the simplex, or
        'softmax', as in the authors' code.
      first: whether the step comes before the round's mixtures, as in the authors' code, or after them.
    """

    loss: str = "kl"
    rows: str = "simplex"
    first: bool = False

    def check(self, name: str) -> None:
        """Raises ValueError that names the field which is not allowed."""
        for field, values in {"loss": ("kl", "mse"), "rows": ("simplex", "softmax")}.items():
            if (value := getattr(self, field)) not in values:
                raise ValueError(
                    f"{name}.{field} must be {values[0]!r} or {values[1]!r}, got {value!r}."
                )


def updated_coefficients(
    coefficients: jax.Array,
    predictions: jax.Array,
    sizes: jax.Array,
    settings: Coefficients,
    hyper: Any,
) -> jax.Array:
    """The knowledge coefficients after one gradient step; rows are turned into weights again.

    With 'kl' the objective is sum_n N_n/N KL(mixture_n || s_n) + rho ||c - 1/parties||^2. With 'mse' it
    is sum_n MSE(mixture_n, s_n) + rho MSE(c_n, equal weights).

    Args:
      coefficients: c, [parties, parties].
      predictions: s, probabilities [parties, examples, classes].
      sizes: int [parties], numbers of private examples.
      settings: loss and rows.
      hyper: KTpFLHyper.
    """
    shares = sizes / jnp.maximum(jnp.sum(sizes), 1)

    def objective(coefficients: jax.Array) -> jax.Array:
        mixtures = jnp.tensordot(coefficients, predictions, axes=1, precision="highest")
        off = (coefficients - 1 / len(sizes)) ** 2
        if settings.loss == "mse":
            fit = jnp.sum(jnp.mean((mixtures - predictions) ** 2, axis=(1, 2)))
            return fit + hyper.uniform_weight * jnp.sum(jnp.mean(off, axis=1))
        # Probabilities may underflow to 0, where logarithms have no gradient.
        log = lambda p: jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))
        divergences = jnp.sum(mixtures * (log(mixtures) - log(predictions)), axis=-1)
        fit = jnp.sum(shares * jnp.mean(divergences, axis=1))
        return fit + hyper.uniform_weight * jnp.sum(off)

    stepped = coefficients - hyper.coefficient_rate * jax.grad(objective)(coefficients)
    if settings.rows == "softmax":
        return jax.nn.softmax(hyper.sharpness * stepped, axis=1)
    return jax.vmap(optax.projections.projection_simplex)(stepped)
