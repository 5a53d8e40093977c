"""Finds layers, such as dropout, that are in the same mode in training and in evaluation."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from fedcodist.core import keys
from fedcodist.core.model import Variables
from fedcodist.core.training_flag import (
    TRAIN,
    check_layers_train,
    given_arguments,
    part_arguments,
    says_evaluation,
)

PyTree = Any
MODES = ("deterministic", "use_running_average")  # attributes of Flax's layers
# `init` and `apply` of a Model: key -> Variables, and
# (variables, batch, *, train=False, key=None) -> (outputs, mutable).
Init = Callable[[jax.Array], Variables]
Apply = Callable[..., tuple[Any, PyTree]]


def check_part_trains(
    argument: str, name: str, part: Any, init: Init, apply: Apply, batch: Mapping[str, Any]
) -> None:
    """Raises ValueError if layers of a network's part stay in evaluation mode during training.

    Args:
      argument: the part's name in errors.
      name: the part's name in the network.
      part: a Flax linen module. If it has a parameter `train`, it is not checked.
      init, apply: of the whole network's Model, made by `from_flax_linen`.
      batch: an example of the columns that the network reads, with a leading batch axis.
    """
    if TRAIN in part_arguments(part, **{TRAIN: True}):
        return
    off = linen_layers_off(init, apply, batch)
    inside = [layer for layer in off if layer.split("/")[0] in (name, "batch_stats")]
    check_layers_train(argument, part, inside)


def linen_layers_off(init: Init, apply: Apply, batch: Mapping[str, Any]) -> list[str]:
    """Names of dropout and normalisation layers that stay in evaluation mode during training.

    Raises:
      ValueError: a layer is in training mode in evaluation too.
    """
    import flax.linen as nn
    from flax.linen.module import InterceptorContext

    off: list[str] = []

    def watch(
        method: Callable[..., Any],
        placed: tuple[Any, ...],
        named: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        layer = context.module
        if context.method_name == "__call__" and _drops_or_normalises(layer):
            given = given_arguments(layer, placed, named)
            if says_evaluation({**_modes(layer), **given}):
                off.append("/".join(layer.path))
        return method(*placed, **named)

    def train(variables: Any, batch: Mapping[str, Any], key: jax.Array) -> None:
        _, mutable = apply(variables, batch, train=True, key=key)
        before, after = (
            jax.tree.leaves(dict(state.get("batch_stats", {})))
            for state in (variables.mutable, mutable)
        )
        if before and all(new is old for new, old in zip(after, before, strict=True)):
            off.append("batch_stats")

    variables = jax.eval_shape(init, keys.key_shape())
    with nn.intercept_methods(watch):
        jax.eval_shape(train, variables, batch, keys.key_shape())
    with in_evaluation():
        jax.eval_shape(lambda v, b: apply(v, b)[0], variables, batch)
    return off


@contextlib.contextmanager
def in_evaluation() -> Iterator[None]:
    """Turns errors of a linen layer that is in training mode in evaluation too into a ValueError."""
    from flax.errors import InvalidRngError, ModifyScopeVariableError

    try:
        yield
    except (InvalidRngError, ModifyScopeVariableError) as error:
        raise ValueError(
            f"module must have a parameter `{TRAIN}` and pass it to its layers: one layer is in the "
            f"same mode in training and in evaluation. {str(error).splitlines()[0]}"
        ) from error


@contextlib.contextmanager
def without_keys() -> Iterator[None]:
    """Turns the error of a Haiku network that draws a key where it has none into a ValueError."""
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "MissingRNGError":  # Haiku does not export it
            raise
        raise ValueError(
            f"network must have a parameter `{TRAIN}` and draw keys in training only, such as "
            f"`hk.dropout(hk.next_rng_key(), 0.5, x) if {TRAIN} else x`: evaluation has no key."
        ) from error


def nnx_layers_off(
    modules: Iterable[Any], init: Init, apply: Apply, batch: Mapping[str, Any]
) -> list[str]:
    """Names of dropout and normalisation layers, if a network is the same in training and evaluation.

    Args:
      modules: all modules of the NNX network.
      init, apply, batch: as in `check_part_trains`, of a Model made by `from_flax_nnx`.
    """
    layers = [type(module).__name__ for module in modules if _drops_or_normalises(module)]
    return layers if layers and _is_the_same_in_training(init, apply, batch) else []


def haiku_layers_off(init: Init) -> list[str]:
    """Names of layers that are in evaluation mode although the network is initialised for training."""
    import haiku as hk

    off: list[str] = []

    def watch(
        method: Callable[..., Any],
        placed: tuple[Any, ...],
        named: dict[str, Any],
        context: hk.MethodContext,
    ) -> Any:
        if context.method_name == "__call__":
            given = given_arguments(context.module, placed, named)
            if says_evaluation(given):
                off.append(context.module.name)
        return method(*placed, **named)

    with hk.intercept_methods(watch):
        # JAX would not trace the same function again.
        jax.eval_shape(lambda key: init(key), keys.key_shape())
    return off


def _drops_or_normalises(layer: Any) -> bool:
    """Whether a Flax layer depends on the mode: dropout, attention with dropout, batch statistics."""
    if hasattr(layer, "use_running_average"):
        return True
    rates = (getattr(layer, name, 0) for name in ("rate", "dropout_rate"))
    return hasattr(layer, "deterministic") and any(
        isinstance(rate, int | float) and rate > 0 for rate in rates
    )


def _modes(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name, None) for name in MODES}


def _is_the_same_in_training(init: Init, apply: Apply, batch: Mapping[str, Any]) -> bool:
    """Whether a network compiles to the same program in training and in evaluation."""
    variables = jax.eval_shape(init, keys.key_shape())
    programs = [
        str(
            jax.make_jaxpr(lambda v, b, k, t=train: apply(v, b, train=t, key=k))(
                variables, batch, keys.key_shape()
            )
        )
        for train in (True, False)
    ]
    return programs[0] == programs[1]
