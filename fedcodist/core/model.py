"""`Model`: a network with its loss and metrics as pure functions.

The modules `from_linen`, `from_nnx` and `from_haiku` make a Model from a network of Flax or Haiku.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.core import keys
from fedcodist.core import metrics as metrics_lib
from fedcodist.core.checks import check_function, shown
from fedcodist.core.guessed_columns import cases_by_shape, check_by_shape
from fedcodist.core.labels import class_labels
from fedcodist.core.shape_checks import WrongShape, described, kind_of
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.trees import named_leaves
from fedcodist.core.user_functions import traced

PyTree = Any
Batch = Mapping[str, jax.Array]


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
        return applied(self, variables, batch)[0]

    def check(self, name: str) -> None:
        """Raises TypeError or ValueError that names `init`, unless it returns Variables. Only traces."""
        variables = traced(f"{name}.init", self.init, keys.key_shape())
        if not (hasattr(variables, "params") and hasattr(variables, "mutable")):
            raise TypeError(
                f"{name}.init must return fedcodist.Variables(params, mutable), got "
                f"{kind_of(variables)}."
            )


def applied(model: Model, variables: Variables, batch: Batch, **options: Any) -> tuple[Any, PyTree]:
    """The result of `model.apply`. Raises TypeError unless it is (outputs, mutable)."""
    result = model.apply(variables, batch, **options)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"model.apply must return (outputs, mutable), got {described(result)}.")
    return result[0], result[1]


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
    if outputs.ndim < 2 or outputs.shape[-1] < 2:
        raise WrongShape(
            "loss cross_entropy needs logits [batch, classes] of at least two classes, got "
            f"{list(outputs.shape)}: for one logit per example give a loss, such as "
            f"optax.sigmoid_binary_cross_entropy(outputs{'[:, 0]' if outputs.ndim > 1 else ''}, "
            "batch['label'])."
        )
    labels = class_labels(batch["label"], outputs.shape[-1], outputs.ndim - 1)
    return optax.softmax_cross_entropy_with_integer_labels(in_float32(outputs), labels)


def in_float32(outputs: jax.Array) -> jax.Array:
    """Floats of 16 bits as float32, in which losses are computed; other arrays unchanged."""
    if jnp.issubdtype(outputs.dtype, jnp.floating):
        return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    return outputs


def checked_model(
    init: Callable[[jax.Array], Variables],
    apply: Callable[..., tuple[Any, PyTree]],
    loss: Callable[[Any, Batch], jax.Array],
    metrics: Mapping[str, metrics_lib.Statistic | SummedMetric] | None,
    example_batch: Mapping[str, Any],
) -> Model:
    """A Model of a network's functions, with a loss and metrics that are checked as far as possible.

    Nothing is compiled: the network, the loss and the metrics are traced with shapes.

    Args:
      init, apply: of the Model.
      loss, metrics: as the user gave them to `from_flax_linen`; None: accuracy.
      example_batch: the columns that the network reads, with a leading batch axis.

    Raises:
      TypeError, ValueError: as `from_flax_linen`.
    """
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
    # Accuracy needs at least two classes. Cross-entropy needs them too, and says so below.
    if metrics is None and are_logits and loss is not cross_entropy:
        jax.eval_shape(metrics_lib.predicted_label, outputs)
    # What cross-entropy reads is known. The columns of another loss must be guessed.
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


def _number_of_classes(outputs: Any) -> int:
    """The last axis of the logits, 1 for a number per example.

    Raises TypeError that names what a network returns otherwise.
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if leaf.ndim]
    if not leaves:
        raise TypeError(
            "the network must return outputs with a leading batch axis, [batch, ...], got "
            f"{'None' if outputs is None else jax.tree.map(lambda leaf: leaf.dtype.name, outputs)}."
        )
    widths = [leaf.shape[-1] for leaf in leaves if leaf.ndim > 1]
    return widths[0] if widths else 1


def variable_shapes(model: Model) -> Variables:
    """The shapes of a model's variables, computed without the variables."""
    return jax.eval_shape(model.init, keys.key_shape())


def check_stateless(name: str, model: Model) -> None:
    """Raises ValueError that names the model if it has mutable state, such as batch statistics."""
    if jax.tree.leaves(variable_shapes(model).mutable):
        raise ValueError(f"{name} must have no mutable state, such as batch statistics.")


def check_no_additions(argument: str, ignored: str, before: PyTree, after: PyTree) -> None:
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
