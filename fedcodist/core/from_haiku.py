"""Makes a `Model` from a Haiku network."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core.extras import check_installed
from fedcodist.core.layers_in_training import haiku_layers_off, without_keys
from fedcodist.core.metrics import Statistic
from fedcodist.core.model import (
    Batch,
    Model,
    Variables,
    checked_model,
    cross_entropy,
)
from fedcodist.core.network_inputs import (
    as_batch,
    check_takes_example,
    checked_example,
    network_inputs,
)
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.training_flag import TRAIN, check_layers_train, read_call

PyTree = Any


def from_haiku(
    network: Callable[..., Any],
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """Makes a Model from a Haiku network.

    Args:
      network: the function that `haiku.transform` takes, called as `network(x)`. Parameters named
        `train` (or `is_training`), `mask` or `axis_name` are passed.
      example: inputs with a leading batch axis, for initialisation.
      inputs: the column that the network reads. With several columns, the network gets a dictionary.
      loss: per-example loss of outputs and batch; see `fedcodist.per_example` for a mean over a batch.
      metrics: name -> statistic or SummedMetric; by default accuracy.

    Raises:
      TypeError, ValueError: as `from_flax_linen`; also if `network` is a class or is
        transformed already, or draws keys in evaluation.
      ImportError: Haiku is not installed.
    """
    check_installed("from_haiku", "haiku", "haiku")
    import haiku as hk

    example = checked_example(example, inputs)
    if isinstance(network, hk.Transformed | hk.TransformedWithState):
        raise TypeError(
            "network must be the function itself, and not what hk.transform makes of it."
        )
    if isinstance(network, type):
        raise TypeError(
            f"network must be a function that makes its modules, such as lambda x: "
            f"{network.__name__}(...)(x), got the class itself."
        )
    flags = (TRAIN, "is_training")
    call = read_call("network", network, network, (*flags, "mask", "axis_name"), flags)
    transformed = hk.transform_with_state(network)

    def arguments(
        train: bool, mask: jax.Array | None, axis_name: str | None
    ) -> tuple[list[Any], dict[str, Any]]:
        return call.arguments(train=train, is_training=train, mask=mask, axis_name=axis_name)

    def init(key: jax.Array) -> Variables:
        placed, named = arguments(True, None, None)
        return Variables(*transformed.init(key, example, *placed, **named))

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> tuple[Any, PyTree]:
        placed, named = arguments(train, mask, axis_name)
        with without_keys() if key is None else contextlib.nullcontext():
            outputs, mutable = transformed.apply(
                variables.params,
                variables.mutable,
                key,
                network_inputs(batch, inputs),
                *placed,
                **named,
            )
        return outputs, mutable if train else variables.mutable

    check_takes_example(init, example, inputs)
    if call.accepted.isdisjoint(flags):
        check_layers_train("network", network, haiku_layers_off(init))
    return checked_model(init, apply, loss, metrics, as_batch(example, inputs))
