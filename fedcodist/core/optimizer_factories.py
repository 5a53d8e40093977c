"""Optimizers are given as functions of their learning rate, since rates are traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
OptimizerFactory = Callable[[Any], optax.GradientTransformation]
# Errors of JAX where code needs the value of a traced array.
_UNKNOWN_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_factory(name: str, factory: Any, learning_rate: PyTree = 0.1) -> None:
    """Raises TypeError that names the argument unless `factory` maps a rate to an optax optimizer."""
    promise = (
        f"{name} must be a function of the learning rate, such as optax.sgd itself or "
        "lambda rate: optax.adam(rate, eps=1e-5)"
    )
    if isinstance(factory, optax.GradientTransformation):
        raise TypeError(f"{promise}, got an optimizer already made.")
    if not callable(factory):
        raise TypeError(f"{promise}, got {factory!r}.")
    try:
        made = factory(jax.tree.map(lambda _: 0.1, learning_rate))
    except TypeError as error:
        raise TypeError(f"{promise}, got one that fails with it: {error}.") from error
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(f"{promise}, got one that returns {type(made).__name__}.")
    if _needs_the_rates_value(factory, learning_rate):
        raise TypeError(
            f"{promise}, got one that uses the rate as a Python number, as `if rate > 0` does: the rate "
            "is traced. Make a schedule of optax for rate 1, and multiply it by the rate."
        )
    if _keeps_a_key(made):
        raise TypeError(
            f"{promise}, got one that keeps a random key, as optax.add_noise does: every training "
            "would begin with the same one."
        )
    if _needs_more_than_gradients(made):
        raise TypeError(
            f"{promise}, got one that also needs values of the loss, as a line search does."
        )


def lasting_state(name: str, factory: OptimizerFactory, params: PyTree) -> PyTree:
    """The initial state of an optimizer that continues over rounds, each with its own learning rate.

    Raises:
      ValueError: names the optimizer, if its state holds the learning rate: the first rate would stay.
    """
    state = factory(0.0).init(params)
    keeps_rate = lambda node: hasattr(node, "hyperparams")
    if any(keeps_rate(node) for node in jax.tree.leaves(state, is_leaf=keeps_rate)):
        raise ValueError(
            f"{name} must not keep its learning rate in its state, as optax.inject_hyperparams does: "
            "the rate is given anew in every round."
        )
    return state


def _needs_the_rates_value(factory: OptimizerFactory, learning_rate: PyTree) -> bool:
    """Whether the factory, or the optimizer that it makes, cannot be traced with a traced rate."""

    def step(rate: PyTree, w: jax.Array) -> Any:
        made = factory(rate)
        return made.update(w, made.init(w), w)

    rate = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), learning_rate)
    try:
        jax.eval_shape(step, rate, jax.ShapeDtypeStruct((1,), jnp.float32))
    except _UNKNOWN_VALUE:
        return True
    except Exception:  # it may be made for parameters of certain names
        return False
    return False


def _keeps_a_key(optimizer: optax.GradientTransformation) -> bool:
    params = jax.ShapeDtypeStruct((1,), jnp.float32)
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Exception:  # it may be made for parameters of certain names
        return False
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    is_raw_key = lambda leaf: leaf.dtype == jnp.uint32 and leaf.shape[-1:] == (2,)
    return any(is_key(leaf) or is_raw_key(leaf) for leaf in jax.tree.leaves(state))


def _needs_more_than_gradients(optimizer: optax.GradientTransformation) -> bool:
    params = jax.ShapeDtypeStruct((1,), jnp.float32)
    try:
        jax.eval_shape(lambda w: optimizer.update(w, optimizer.init(w), w), params)
    except TypeError as error:
        return "required keyword-only argument" in str(error)
    except Exception:  # it may be made for parameters of certain names
        return False
    return False
