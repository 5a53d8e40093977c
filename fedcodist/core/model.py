"""`Model`: a network with its loss and metrics as pure functions, made from Flax or Haiku networks."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.core import keys
from fedcodist.core import metrics as metrics_lib
from fedcodist.core.checks import check_function, shown
from fedcodist.core.example_losses import WrongShape, cases_by_shape, check_by_shape, described
from fedcodist.core.extras import check_installed
from fedcodist.core.labels import class_labels
from fedcodist.core.layers_in_training import (
    MODES,
    haiku_layers_off,
    linen_layers_off,
    nnx_layers_off,
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
from fedcodist.core.trees import named_leaves

PyTree = Any
Batch = Mapping[str, jax.Array]
_REMAT_PREFIXES = ("Checkpoint", "Remat")  # how Flax names the classes of `nn.remat`
# (method in place of `__call__`, positional arguments, keyword arguments)
_LinenArguments = tuple[Callable[..., Any] | None, list[Any], dict[str, Any]]


class Variables(NamedTuple):
    """A model's parameters and its mutable state (such as BatchNorm statistics; often empty)."""

    params: PyTree
    mutable: PyTree


class Model(NamedTuple):
    """A network with its loss and metrics, as pure functions.

    Attributes:
      init: key -> Variables.
      apply: (variables, batch, *, train=False, key=None, mask=None, axis_name=None)
        -> (outputs, mutable). `key` drives dropout. `mask` float [batch] is 1 for real examples and 0
        for padding, which batch statistics leave out. `axis_name` is a mesh axis over which the batch
        is sharded and batch statistics are synchronised. In evaluation `mutable` is returned unchanged.
      loss: (outputs, batch) -> per-example loss [batch]; `fedcodist.per_example` makes one from a mean
        over a batch.
      metrics: name -> statistic or SummedMetric, see `fedcodist.core.metrics`.
      num_classes: width of the outputs.
      mean_loss: (outputs, batch, mask) -> mean of `loss` over the mask's examples, for losses with a
        cheaper way to compute it; else None.
      inputs: the columns that the network reads; empty if they are not known.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[Any, PyTree]]
    loss: Callable[[Any, Batch], jax.Array]
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric]
    num_classes: int
    mean_loss: Callable[[Any, Batch, jax.Array], jax.Array] | None = None
    inputs: tuple[str, ...] = ()

    def outputs(self, variables: Variables, batch: Batch) -> Any:
        """The network's outputs for a batch, in evaluation mode."""
        return self.apply(variables, batch)[0]


def cross_entropy(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Softmax cross-entropy [batch] of logits [batch, classes], with the column 'label' as labels.

    Raises:
      ValueError: names the loss, if the outputs are no array, or if there is only one class, whose
        probability is always 1.
    """
    if not hasattr(outputs, "ndim"):
        raise WrongShape(
            f"loss cross_entropy needs logits [batch, classes], got {described(outputs)}: for a network "
            "that returns more than logits give loss= and metrics= that read them."
        )
    if outputs.shape[-1] < 2:
        raise WrongShape(
            "loss cross_entropy needs logits [batch, classes] of at least two classes, got "
            f"{list(outputs.shape)}: for one logit per example give a loss, such as "
            "optax.sigmoid_binary_cross_entropy(outputs[:, 0], batch['label'])."
        )
    labels = class_labels(batch["label"], outputs.shape[-1], outputs.ndim - 1)
    return optax.softmax_cross_entropy_with_integer_labels(in_float32(outputs), labels)


def in_float32(outputs: jax.Array) -> jax.Array:
    """Floats of 16 bits as float32, in which losses are computed; other arrays unchanged."""
    if jnp.issubdtype(outputs.dtype, jnp.floating):
        return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    return outputs


def from_flax_linen(
    module: Any,
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric] | None = None,
) -> Model:
    """Makes a Model from a Flax linen module.

    The module is called as `module(x)`. If its `__call__` has parameters named `train` or `mask`, they
    are passed, also through `nn.remat`. If the module, or a module in its attributes, has an attribute
    `axis_name`, that attribute is set when the batch is sharded.

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
    example = _checked_example(example)
    _check_inputs(inputs, example)
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
                collections, _read(batch, inputs), *placed, **named, method=method
            )
            return outputs, variables.mutable
        outputs, mutable = network.apply(
            collections,
            _read(batch, inputs),
            *placed,
            **named,
            method=method,
            rngs=rngs,
            mutable=list(variables.mutable),
        )
        _check_no_additions("module", "'intermediates'", variables.mutable, dict(mutable))
        return outputs, dict(mutable)

    example_batch = _as_batch(example, inputs)
    if TRAIN not in call.accepted:
        check_layers_train("module", module, linen_layers_off(init, apply, example_batch))
    return _finish(init, apply, loss, metrics, example_batch)


def _over_axis(module: Any, axis_name: str) -> Any:
    """A linen module with the attribute `axis_name` set, also in the modules that it holds."""
    import flax.linen as nn

    made: dict[int, Any] = {}  # a module that is in two places stays one module

    def changed(value: Any) -> Any:
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(map(changed, value))
        if not isinstance(value, nn.Module):
            return value
        if id(value) not in made:
            fields = [name for name in value.__dataclass_fields__ if name not in ("parent", "name")]
            before = {name: getattr(value, name) for name in fields}
            after = {name: changed(held) for name, held in before.items()}
            if "axis_name" in before:
                after["axis_name"] = axis_name
            new = {name: held for name, held in after.items() if held is not before[name]}
            made[id(value)] = value.clone(**new) if new else value
        return made[id(value)]

    return changed(module)


def from_flax_nnx(
    create: Callable[[Any], Any],
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric] | None = None,
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
    example = _checked_example(example)
    _check_inputs(inputs, example)
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
        outputs = network(_read(batch, inputs), *placed, **named)
        if not train:
            return outputs, variables.mutable
        new = nnx.to_pure_dict(_nnx_split(network)[-1])
        _check_no_additions("create", "nnx.Intermediate", variables.mutable, new)
        return outputs, new

    example_batch = _as_batch(example, inputs)
    if TRAIN not in call.accepted:
        check_layers_train(
            "create's module", template, nnx_layers_off(modules, init, apply, example_batch)
        )
    return _finish(init, apply, loss, metrics, example_batch)


def from_haiku(
    network: Callable[..., Any],
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric] | None = None,
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
        transformed already.
      ImportError: Haiku is not installed.
    """
    check_installed("from_haiku", "haiku", "haiku")
    import haiku as hk

    example = _checked_example(example)
    _check_inputs(inputs, example)
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
        outputs, mutable = transformed.apply(
            variables.params, variables.mutable, key, _read(batch, inputs), *placed, **named
        )
        return outputs, mutable if train else variables.mutable

    if call.accepted.isdisjoint(flags):
        check_layers_train("network", network, haiku_layers_off(init))
    return _finish(init, apply, loss, metrics, _as_batch(example, inputs))


def variable_shapes(model: Model) -> Variables:
    """The shapes of a model's variables, computed without the variables."""
    return jax.eval_shape(model.init, keys.key_shape())


def check_stateless(name: str, model: Model) -> None:
    """Raises ValueError that names the model if it has mutable state, such as batch statistics."""
    if jax.tree.leaves(variable_shapes(model).mutable):
        raise ValueError(f"{name} must have no mutable state, such as batch statistics.")


def _checked_example(example: Any) -> Any:
    """The inputs, as JAX has them. Raises TypeError unless they are arrays with a batch axis."""
    for leaf in example.values() if isinstance(example, Mapping) else [example]:
        if not len(getattr(leaf, "shape", ())) or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"example must be an array [batch, ...], such as jnp.zeros((1, 28, 28, 1)), got "
                f"{shown(leaf)}."
            )
    # JAX warns where it initialises with NumPy's float64.
    to_jax = lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    return jax.tree.map(to_jax, example)


def _check_inputs(inputs: str | tuple[str, ...], example: Any) -> None:
    """Raises TypeError or ValueError unless `example` has the columns that `inputs` names."""
    if isinstance(inputs, str):
        if isinstance(example, Mapping):
            raise TypeError(
                f"inputs must name all columns of example, {tuple(example)}, got {inputs!r}."
            )
        return
    if not isinstance(example, Mapping):
        raise TypeError(
            f"example must be a dictionary of the columns that inputs={inputs!r} names, got an array "
            f"{list(example.shape)}."
        )
    if set(inputs) != set(example):
        raise ValueError(
            f"inputs must name the columns of example, {tuple(example)}, got {tuple(inputs)}."
        )


def _read(batch: Batch, inputs: str | tuple[str, ...]) -> jax.Array | dict[str, jax.Array]:
    """What the network gets: a column, or a dictionary of several."""
    return batch[inputs] if isinstance(inputs, str) else {name: batch[name] for name in inputs}


def _as_batch(example: Any, inputs: str | tuple[str, ...]) -> Mapping[str, Any]:
    return {inputs: example} if isinstance(inputs, str) else example


def _of_rngs(create: Any) -> Callable[[Any], Any]:
    """The function of nnx.Rngs, also of a class whose argument `rngs` has no place."""
    if not callable(create):
        raise TypeError(f"create must be a function of nnx.Rngs, got {shown(create)}.")
    try:
        # The class of NNX's modules hides the signature of `__init__`.
        made_by: Any = vars(create).get("__init__", create) if isinstance(create, type) else create
        rngs = inspect.signature(made_by).parameters.get("rngs")
    except ValueError:  # it has no signature
        return create
    if rngs is not None and rngs.kind is inspect.Parameter.KEYWORD_ONLY:
        return lambda of_rngs: create(rngs=of_rngs)
    return create


def _check_no_additions(argument: str, ignored: str, before: PyTree, after: PyTree) -> None:
    """Raises ValueError if training adds to a network's mutable state, whose shapes must stay.

    Args:
      argument: the network's name in errors.
      ignored: where `sow` may put values.
      before, after: the mutable state.
    """
    known = named_leaves(before)
    for name in named_leaves(after):
        if name not in known:
            raise ValueError(
                f"{argument} must not add to its mutable state in training, as `sow` does: it adds "
                f"{name!r}. Sow into {ignored}, which is ignored, or return the values."
            )


def _number_of_classes(outputs: Any) -> int:
    """The last axis of the logits. Raises TypeError that names what a network returns otherwise."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    widths = [leaf.shape[-1] for leaf in jax.tree.leaves(outputs) if leaf.ndim]
    if not widths:
        raise TypeError(
            "the network must return outputs with a leading batch axis, [batch, ...], got "
            f"{'None' if outputs is None else jax.tree.map(lambda leaf: leaf.dtype.name, outputs)}."
        )
    return widths[0]


def _finish(
    init: Callable[[jax.Array], Variables],
    apply: Callable[..., tuple[Any, PyTree]],
    loss: Callable[[Any, Batch], jax.Array],
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric] | None,
    example_batch: Mapping[str, Any],
) -> Model:
    check_function("loss", loss, ("outputs", "batch"), "losses [batch]")
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"metrics must be statistics by name, got {shown(metrics)}.")
    for name, metric in (metrics or {}).items():
        if not callable(metric) and not isinstance(metric, SummedMetric):
            raise TypeError(
                f"metrics[{name!r}] must be a statistic, such as fedcodist.core.metrics.accuracy(), got "
                f"{shown(metric)}."
            )
    variables = jax.eval_shape(init, keys.key_shape())
    outputs_of = lambda batch: jax.eval_shape(lambda v, b: apply(v, b)[0], variables, batch)
    cases = cases_by_shape(example_batch, outputs_of)
    _, outputs = cases[0]
    num_classes = _number_of_classes(outputs)
    are_logits = isinstance(outputs, jax.ShapeDtypeStruct)
    if metrics is None and are_logits and loss is not cross_entropy:
        jax.eval_shape(metrics_lib.predicted_label, outputs)
    if loss is cross_entropy and are_logits and outputs.ndim == 2:
        labels = jax.ShapeDtypeStruct(outputs.shape[:1], jnp.int32)
        jax.eval_shape(loss, outputs, {"label": labels})
        check_by_shape(None, metrics or {}, cases)
    else:
        check_by_shape(loss, metrics or {}, cases)
    return Model(
        init=init,
        apply=apply,
        loss=loss,
        metrics={"accuracy": metrics_lib.accuracy()} if metrics is None else dict(metrics),
        num_classes=num_classes,
        inputs=tuple(example_batch),
    )


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


def _nnx_split(module: Any) -> Any:
    """Returns (graph, parameters, random state, intermediate values of `sow`, everything else)."""
    from flax import nnx

    return nnx.split(module, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
