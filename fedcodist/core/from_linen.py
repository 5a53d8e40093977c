"""Makes a `Model` from a Flax linen module."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core import keys
from fedcodist.core.layers_in_training import in_evaluation, linen_layers_off
from fedcodist.core.metrics import Statistic
from fedcodist.core.model import (
    Batch,
    Model,
    Variables,
    check_no_additions,
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
from fedcodist.core.training_flag import (
    TRAIN,
    Call,
    check_attributes,
    check_layers_train,
    check_linen_module,
    first_line,
    is_lifted,
    read_call,
)

PyTree = Any
_REMAT_PREFIXES = ("Checkpoint", "Remat")  # how Flax names the classes of `nn.remat`
# (method in place of `__call__`, positional arguments, keyword arguments)
_LinenArguments = tuple[Callable[..., Any] | None, list[Any], dict[str, Any]]


def from_flax_linen(
    module: Any,
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """Makes a Model from a Flax linen module.

    The module is called as `module(x)`. If its `__call__` has parameters named `train` or `mask`, they
    are passed, also through `nn.remat`. If the module, or a module in its attributes, has an attribute
    `axis_name`, that attribute is set when the batch is sharded, except for Flax's normalisations of
    single examples.

    Args:
      module: a `flax.linen.Module`.
      example: inputs with a leading batch axis, for initialisation.
      inputs: the column that the network reads. With several columns, the network gets a dictionary.
      loss: per-example loss of outputs and batch; see `fedcodist.per_example` for a mean over a batch.
      metrics: name -> statistic or SummedMetric; by default accuracy.

    Raises:
      TypeError: `module` is no linen module, `example` no array, `loss` no function of outputs and
        batch, or `metrics` no mapping; or the network returns nothing.
      ValueError: names the module, if its training mode is set in another way than by `train`, or if its
        dropout or batch statistics are never on; names a loss or metric that is not one number per
        example. When training is traced: names a value that `sow` adds to the mutable state;
        "intermediates" are ignored.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = from_flax_linen(nn.Dense(10), jnp.zeros((1, 64)))
    >>> variables = model.init(jax.random.key(0))
    >>> outputs, _ = model.apply(variables, {'image': jnp.zeros((2, 64))})
    >>> outputs.shape
    (2, 10)
    """
    check_linen_module("module", module)
    example = checked_example(example, inputs)
    call = read_call("module", module, module.__call__, (TRAIN, "mask"))
    if TRAIN not in call.accepted:
        flags = {name: getattr(module, name, ...) for name in module.__dataclass_fields__}
        check_attributes("module", module, flags)
    arguments = _linen_arguments(module, call, example)

    def init(key: jax.Array) -> Variables:
        method, placed, named = arguments(train=False, mask=None)
        variables = dict(module.init(key, example, *placed, **named, method=method))
        return Variables(variables.pop("params", {}), variables)

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> tuple[Any, PyTree]:
        network = module if axis_name is None else _over_axis(module, axis_name)
        method, placed, named = arguments(train=train, mask=mask)
        collections = {"params": variables.params, **variables.mutable}
        # Streams of other names, such as a layer's own noise, are made of "params", as Flax does.
        others = lambda key: keys.derive(key, "others")
        rngs = {"dropout": key, "params": others(key)} if train and key is not None else None
        if not train:
            outputs = network.apply(
                collections, network_inputs(batch, inputs), *placed, **named, method=method
            )
            return outputs, variables.mutable
        outputs, mutable = network.apply(
            collections,
            network_inputs(batch, inputs),
            *placed,
            **named,
            method=method,
            rngs=rngs,
            mutable=list(variables.mutable),
        )
        check_no_additions("module", "'intermediates'", variables.mutable, dict(mutable))
        return outputs, dict(mutable)

    example_batch = as_batch(example, inputs)
    check_takes_example(init, example, inputs)
    if TRAIN not in call.accepted:
        check_layers_train("module", module, linen_layers_off(init, apply, example_batch))
    with in_evaluation():
        return checked_model(init, apply, loss, metrics, example_batch)


def _over_axis(module: Any, axis_name: str) -> Any:
    """A linen module with the attribute `axis_name` set, also in the modules that it holds."""
    import flax.linen as nn
    from flax.core import FrozenDict

    made: dict[int, Any] = {}  # a module that is in two places stays one module
    # Their attribute would average the statistics of an example with those of other devices' examples.
    per_example = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)

    def changed(value: Any) -> Any:
        """The value itself if no module in it is changed."""
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [changed(item) for item in value]
            return type(value)(items) if any(map(operator.is_not, items, value)) else value
        if type(value) in (dict, FrozenDict):
            new = {name: changed(held) for name, held in value.items()}
            return type(value)(new) if any(new[name] is not value[name] for name in new) else value
        if not isinstance(value, nn.Module):
            return value
        if id(value) not in made:
            given = [field.name for field in dataclasses.fields(value) if field.init]
            before = {n: getattr(value, n) for n in given if n not in ("parent", "name")}
            after = {name: changed(held) for name, held in before.items()}
            if "axis_name" in before and not isinstance(value, per_example):
                after["axis_name"] = axis_name
            new = {name: held for name, held in after.items() if held is not before[name]}
            made[id(value)] = value.clone(**new) if new else value
        return made[id(value)]

    return changed(module)


def _linen_arguments(module: Any, call: Call, example: Any) -> Callable[..., _LinenArguments]:
    """Returns (train, mask) -> (method, positional arguments, keyword arguments) of a linen module.

    A module under `nn.remat` or `nn.jit` traces its arguments, `train` too, except those that are
    declared static by position. Three ways to pass `train` are tried; the first that works is used.
    """

    def by_name(**available: Any) -> _LinenArguments:
        return None, *call.arguments(**available)

    def by_place(**available: Any) -> _LinenArguments:
        return None, *call.with_train_by_place().arguments(**available)

    def closed_over(**available: Any) -> _LinenArguments:
        network: Any = type(module).__bases__[0]  # the class given to `nn.remat`

        def method(module: Any, x: Any, mask: jax.Array | None) -> Any:
            placed, named = call.arguments(**{**available, "mask": mask})
            return network.__call__(module, x, *placed, **named)

        return nn.remat(method), [available["mask"]], {}

    if TRAIN not in call.accepted or not is_lifted(module):
        return by_name
    import flax.linen as nn

    reason: Exception | None = None
    ways = [by_name, by_place]
    if type(module).__name__.startswith(_REMAT_PREFIXES):
        ways.append(closed_over)
    for way in ways:

        def start(key: jax.Array, way: Callable[..., _LinenArguments] = way) -> PyTree:
            method, placed, named = way(train=False, mask=None)
            return module.init(key, example, *placed, **named, method=method)

        try:
            jax.eval_shape(start, keys.key_shape())
            return way
        except Exception as error:
            reason = error
    raise ValueError(
        f"module {type(module).__name__} must have `{TRAIN}` among its static arguments: "
        f"{first_line(reason)}"
    ) from reason
