"""Makes a `Model` from a Flax NNX module."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedcodist.core import keys
from fedcodist.core.checks import shown
from fedcodist.core.layers_in_training import MODES, nnx_layers_off
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
from fedcodist.core.training_flag import TRAIN, check_attributes, check_layers_train, read_call
from fedcodist.core.used_arguments import used_arguments

PyTree = Any


def from_flax_nnx(
    create: Callable[[Any], Any],
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """Makes a Model from a Flax NNX module.

    Training and evaluation are the module's modes `train()` and `eval()`. Parameters of its `__call__`
    that are named `train`, `mask` or `axis_name` are passed.

    Args:
      create: `nnx.Rngs -> nnx.Module`, such as `lambda rngs: MyNetwork(rngs=rngs)`.
      example: inputs with a leading batch axis, for the width of the outputs.
      inputs: the column that the network reads. With several columns, the network gets a dictionary.
      loss: per-example loss of outputs and batch; see `fedcodist.per_example` for a mean over a batch.
      metrics: name -> statistic or SummedMetric; by default accuracy.

    Raises:
      TypeError, ValueError: as `from_flax_linen`; also if `create` is a module that is made already.
    """
    from flax import nnx

    if isinstance(create, nnx.Module):
        raise TypeError(
            "create must be a function of nnx.Rngs, such as lambda rngs: "
            f"{type(create).__name__}(rngs=rngs), got a module that is made already."
        )
    create = _of_rngs(create)
    example = checked_example(example, inputs)
    template: Any = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    call = read_call(
        "create's module", template, template.__call__, (TRAIN, "mask", "axis_name"), has_modes=True
    )
    modules = [module for _, module in nnx.iter_modules(template)]
    if TRAIN not in call.accepted:
        for module in modules:
            # The attributes in MODES are set by NNX's `train()` and `eval()`.
            attributes = {n: v for n, v in vars(module).items() if n not in MODES}
            check_attributes("create's module", module, attributes)
    graphs: dict[bool, Any] = {}
    for train in (True, False):
        template.train() if train else template.eval()
        graphs[train] = _nnx_split(template)[0]

    def init(key: jax.Array) -> Variables:
        _, params, _, _, mutable = _nnx_split(create(nnx.Rngs(key)))
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(mutable))

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        mask: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> tuple[Any, PyTree]:
        # The random state comes from `key`: it must not be among the model's variables.
        rngs = nnx.Rngs(jax.random.key(0) if key is None else key)
        _, params, random_state, sown, mutable = _nnx_split(create(rngs))
        nnx.replace_by_pure_dict(params, variables.params)
        nnx.replace_by_pure_dict(mutable, variables.mutable)
        network = nnx.merge(graphs[train], params, random_state, sown, mutable)
        placed, named = call.arguments(train=train, mask=mask, axis_name=axis_name)
        outputs = network(network_inputs(batch, inputs), *placed, **named)
        if not train:
            return outputs, variables.mutable
        new = nnx.to_pure_dict(_nnx_split(network)[-1])
        check_no_additions("create", "nnx.Intermediate", variables.mutable, new)
        return outputs, new

    _check_reads_rngs(create)
    example_batch = as_batch(example, inputs)
    start = lambda key: apply(init(key), example_batch)[0]
    check_takes_example(start, example, inputs)
    if TRAIN not in call.accepted:
        check_layers_train(
            "create's module", template, nnx_layers_off(modules, init, apply, example_batch)
        )
    return checked_model(init, apply, loss, metrics, example_batch)


def _check_reads_rngs(create: Callable[[Any], Any]) -> None:
    """Raises ValueError if a layer's random numbers, such as a dropout's, are the same for all keys."""
    from flax import nnx

    def random_state(key: jax.Array) -> list[jax.Array]:
        keys_of_layers = jax.tree.leaves(nnx.state(create(nnx.Rngs(key)), nnx.RngKey))
        return [jax.random.key_data(leaf) for leaf in keys_of_layers]

    jaxpr = jax.make_jaxpr(random_state)(keys.key_shape())
    count = len(jaxpr.jaxpr.outvars)
    if not all(
        any(used_arguments(jaxpr, [i == place for i in range(count)])) for place in range(count)
    ):
        raise ValueError(
            "create must make all of the module with the nnx.Rngs that it gets: with another one, "
            "dropout would be the same in every step."
        )


def _of_rngs(create: Any) -> Callable[[Any], Any]:
    """The function of nnx.Rngs, by name where `create` has an argument `rngs`."""
    if not callable(create):
        raise TypeError(f"create must be a function of nnx.Rngs, got {shown(create)}.")
    try:
        rngs = inspect.signature(_making(create)).parameters.get("rngs")
    except ValueError:  # it has no signature
        return create
    if rngs is not None and rngs.kind in (rngs.POSITIONAL_OR_KEYWORD, rngs.KEYWORD_ONLY):
        return lambda of_rngs: create(rngs=of_rngs)
    return create


def _making(create: Any) -> Any:
    """The function whose signature says how `create` is called."""
    while isinstance(create, functools.partial):
        create = create.func
    # The class of NNX's modules hides the signature of `__init__`.
    return inspect.getattr_static(create, "__init__") if isinstance(create, type) else create


def _nnx_split(module: Any) -> Any:
    """Returns (graph, parameters, random state, intermediate values of `sow`, everything else)."""
    from flax import nnx

    return nnx.split(module, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
