"""`Model`: pure functions, whatever library the network is written in."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist import metrics as metrics_lib
from fedcodist.labels import class_labels

PyTree = Any
Batch = Mapping[str, jax.Array]
# Other names of a parameter that tells of training.
_OTHER_FLAGS = ("training", "is_training", "deterministic", "use_running_average")


class Variables(NamedTuple):
    """A model's parameters and its mutable state (such as BatchNorm statistics; often empty)."""

    params: PyTree
    mutable: PyTree


class Model(NamedTuple):
    """A network with its loss and metrics, as pure functions.

    Attributes:
      init: key -> Variables.
      apply: (variables, batch, *, train=False, key=None, mask=None, axis_name=None)
        -> (outputs, mutable). `key` drives dropout; `mask` float [batch] marks real examples with 1
        and padding with 0, which batch statistics leave out; `axis_name` is a mesh axis over which
        the batch is sharded and batch statistics are synchronised. In evaluation mutable comes back
        unchanged.
      loss: (outputs, batch) -> per-example loss [batch].
      metrics: name -> statistic, see `fedcodist.metrics`.
      num_classes: width of the outputs.
      mean_loss: (outputs, batch, mask) -> mean of `loss` over the mask's examples, where there is a
        cheaper way; None elsewhere.
    """

    init: Callable[[jax.Array], Variables]
    apply: Callable[..., tuple[Any, PyTree]]
    loss: Callable[[Any, Batch], jax.Array]
    metrics: Mapping[str, metrics_lib.Statistic]
    num_classes: int
    mean_loss: Callable[[Any, Batch, jax.Array], jax.Array] | None = None


def cross_entropy(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Softmax cross-entropy of logits [batch, classes] with `class_labels` of 'label', per example."""
    labels = class_labels(batch["label"], outputs.shape[-1], outputs.ndim - 1)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)


def from_flax_linen(
    module: Any,
    example: Any,
    *,
    inputs: str | tuple[str, ...] = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic] | None = None,
) -> Model:
    """Makes a Model of a Flax linen module.

    The module is called as `module(x)`. If its `__call__` has parameters named `train` or `mask`
    they are passed; if it has an attribute `axis_name` it is set where the batch is sharded.

    Args:
      module: a `flax.linen.Module`.
      example: inputs with a leading batch axis, for initialisation.
      inputs: the batch's key of the network's inputs; of several, the network gets a dictionary.
      loss: per-example loss of outputs and batch.
      metrics: name -> statistic; accuracy where not given.

    Raises:
      ValueError: the module tells training from evaluation by a parameter of another name.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = from_flax_linen(nn.Dense(10), jnp.zeros((1, 64)))
    >>> variables = model.init(jax.random.key(0))
    >>> outputs, _ = model.apply(variables, {'image': jnp.zeros((2, 64))})
    >>> outputs.shape
    (2, 10)
    """
    accepted = set(inspect.signature(type(module).__call__).parameters)
    if "train" not in accepted and (flags := [name for name in _OTHER_FLAGS if name in accepted]):
        raise ValueError(
            f"module must be told of training by a parameter `train`: {type(module).__name__} has "
            f"{flags[0]!r}, which nobody would set."
        )

    def read(batch):
        return batch[inputs] if isinstance(inputs, str) else {name: batch[name] for name in inputs}

    def init(key):
        arguments = _accepted_arguments(accepted, train=False, mask=None)
        variables = dict(module.init(key, example, **arguments))
        return Variables(variables.pop("params", {}), variables)

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        network = module
        if axis_name is not None and hasattr(module, "axis_name"):
            network = module.clone(axis_name=axis_name)
        arguments = _accepted_arguments(accepted, train=train, mask=mask)
        collections = {"params": variables.params, **variables.mutable}
        rngs = {"dropout": key} if train and key is not None else None
        if not train:
            return network.apply(collections, read(batch), **arguments), variables.mutable
        outputs, mutable = network.apply(
            collections, read(batch), **arguments, rngs=rngs, mutable=list(variables.mutable)
        )
        return outputs, dict(mutable)

    example_batch = {inputs: example} if isinstance(inputs, str) else example
    return _finish(init, apply, loss, metrics, example_batch)


def from_flax_nnx(
    create: Callable[[Any], Any],
    example: jax.Array,
    *,
    inputs: str = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic] | None = None,
) -> Model:
    """Makes a Model of a Flax NNX module.

    Training and evaluation are the module's own `train()` and `eval()` modes; a `mask` or
    `axis_name` parameter of its `__call__` is passed.

    Args:
      create: `nnx.Rngs -> nnx.Module`, such as `lambda rngs: MyNetwork(rngs=rngs)`.
      example: inputs with a leading batch axis, for the width of the outputs.
      inputs: the batch's key of the network's inputs.
      loss: per-example loss of outputs and batch.
      metrics: name -> statistic; accuracy where not given.
    """
    from flax import nnx

    template: Any = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    accepted = set(inspect.signature(type(template).__call__).parameters)
    graphs: dict[bool, Any] = {}
    for train in (True, False):
        template.train() if train else template.eval()
        graphs[train] = _nnx_split(template)[0]

    def init(key):
        _, params, _, mutable = _nnx_split(create(nnx.Rngs(key)))
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(mutable))

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        # The generator's state is drawn anew from `key`: it must not live in the model's variables.
        rngs = nnx.Rngs(jax.random.key(0) if key is None else key)
        _, params, random_state, mutable = _nnx_split(create(rngs))
        nnx.replace_by_pure_dict(params, variables.params)
        nnx.replace_by_pure_dict(mutable, variables.mutable)
        network = nnx.merge(graphs[train], params, random_state, mutable)
        arguments = _accepted_arguments(accepted, mask=mask, axis_name=axis_name)
        outputs = network(batch[inputs], **arguments)
        if not train:
            return outputs, variables.mutable
        return outputs, nnx.to_pure_dict(_nnx_split(network)[3])

    return _finish(init, apply, loss, metrics, {inputs: example})


def from_haiku(
    network: Callable[..., Any],
    example: jax.Array,
    *,
    inputs: str = "image",
    loss: Callable[[Any, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, metrics_lib.Statistic] | None = None,
) -> Model:
    """Makes a Model of a Haiku network.

    Args:
      network: the function that `haiku.transform` takes, called as `network(x)`; parameters named
        `train` (or `is_training`), `mask` or `axis_name` are passed.
      example: inputs with a leading batch axis, for initialisation.
      inputs: the batch's key of the network's inputs.
      loss: per-example loss of outputs and batch.
      metrics: name -> statistic; accuracy where not given.
    """
    try:
        import haiku as hk
    except ImportError as error:
        raise ImportError("from_haiku needs dm-haiku: pip install 'fedcodist[haiku]'") from error

    accepted = set(inspect.signature(network).parameters)
    transformed = hk.transform_with_state(network)

    def arguments(train, mask, axis_name):
        return _accepted_arguments(
            accepted, train=train, is_training=train, mask=mask, axis_name=axis_name
        )

    def init(key):
        return Variables(*transformed.init(key, example, **arguments(True, None, None)))

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        outputs, mutable = transformed.apply(
            variables.params,
            variables.mutable,
            key,
            batch[inputs],
            **arguments(train, mask, axis_name),
        )
        return outputs, mutable if train else variables.mutable

    return _finish(init, apply, loss, metrics, {inputs: example})


def parameter_count(tree: PyTree) -> int:
    """The number of scalars in a pytree of arrays or shapes."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))


def variable_shapes(model: Model) -> Variables:
    """The shapes of a model's variables; nothing is computed."""
    return jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))


def is_finite(tree: PyTree) -> jax.Array:
    """Whether all numbers of a pytree are finite, a scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def check_stateless(name: str, model: Model) -> None:
    """Raises one line where a model has mutable state, such as batch statistics."""
    if jax.tree.leaves(variable_shapes(model).mutable):
        raise ValueError(f"{name} must have no mutable state, such as batch statistics.")


def _finish(init, apply, loss, metrics, example_batch) -> Model:
    outputs = jax.eval_shape(
        lambda key: apply(init(key), example_batch)[0], jax.eval_shape(lambda: jax.random.key(0))
    )
    return Model(
        init=init,
        apply=apply,
        loss=loss,
        metrics=dict(metrics) if metrics else {"accuracy": metrics_lib.accuracy()},
        num_classes=jax.tree.leaves(outputs)[0].shape[-1],
    )


def _accepted_arguments(accepted: set[str], **available) -> dict[str, Any]:
    return {name: value for name, value in available.items() if name in accepted}


def _nnx_split(module: Any) -> Any:
    """Returns (graph, parameters, random state, everything else)."""
    from flax import nnx

    return nnx.split(module, nnx.Param, nnx.RngState, ...)
