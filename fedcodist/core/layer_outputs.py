"""Networks that return their layers' outputs beside logits, for distillation of more than logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.module import InterceptorContext
from jax.extend.core import Literal

from fedcodist.core import keys
from fedcodist.core.checks import check_function, shown
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.metrics import Statistic, accuracy, label_column, with_label_column
from fedcodist.core.model import Batch, Model, Variables, in_float32
from fedcodist.core.shape_checks import described
from fedcodist.core.summed_metrics import SummedMetric

PyTree = Any


class LayerOutputs(NamedTuple):
    """Logits and layers' outputs of a network.

    Attributes:
      logits: [batch, classes].
      hidden: an array [batch, ..., width] per layer, from the inputs to the outputs. Where a layer reads
        several inputs, a tuple of arrays of one width, one per input.
      attention: an array [batch, heads, ..., queries, keys] per attention layer; a tuple of them where
        a layer reads several inputs.
      is_real: for text, bool [batch, ..., positions], false for padding; a tuple where layers read
        several inputs. None if a network has no padding or does not return it.
    """

    logits: jax.Array
    hidden: tuple[Any, ...] = ()
    attention: tuple[Any, ...] = ()
    is_real: Any = None


def with_layers(module: Any, example: Any, layers: Sequence[str], **options: Any) -> Model:
    """Makes a Model from a Flax linen module. Its `hidden` are the outputs of some submodules.

    Feature maps [batch, height, width, channels] are averaged over positions. Parameters and their
    initial values are those of `from_flax_linen`.

    Args:
      module: a `flax.linen.Module` that returns logits.
      example: inputs with a leading batch axis; several columns as a dictionary.
      layers: submodules' names in the network's order, such as 'Dense_0' or 'block1/Conv_0'.
      options: as in `from_flax_linen`.

    Raises:
      ValueError: names `layers`, if no submodule has such a name, or if it does not return an array.
    """
    plain = from_flax_linen(module, example, **options)

    def called(
        variables: Variables, batch: Batch, arguments: Mapping[str, Any]
    ) -> tuple[jax.Array, dict[str, jax.Array], PyTree]:
        outputs = {}

        def keep(
            method: Callable[..., Any],
            inputs: tuple[Any, ...],
            named: dict[str, Any],
            context: InterceptorContext,
        ) -> Any:
            output = method(*inputs, **named)
            if context.method_name == "__call__":
                outputs["/".join(context.module.path)] = output
            return output

        with nn.intercept_methods(keep):
            logits, mutable = plain.apply(variables, batch, **arguments)
        return logits, outputs, mutable

    def apply(variables: Variables, batch: Batch, **arguments: Any) -> tuple[LayerOutputs, PyTree]:
        logits, outputs, mutable = called(variables, batch, arguments)
        return LayerOutputs(logits, tuple(pooled(outputs[name]) for name in layers)), mutable

    def of_example(key: jax.Array) -> dict[str, jax.Array]:
        inputs = options.get("inputs", "image")
        columns = {inputs: example} if isinstance(inputs, str) else example
        return called(plain.init(key), columns, {})[1]

    outputs: dict[str, Any] = {}
    jax.eval_shape(lambda key: outputs.update(of_example(key)), keys.key_shape())
    known = [name for name in outputs if name]
    for name in layers:
        if name not in known:
            raise ValueError(f"layers must be of {known}, got {name!r}.")
        if not hasattr(outputs[name], "ndim"):
            raise ValueError(
                f"layers must be submodules that return an array, {name!r} returns "
                f"{described(outputs[name])}."
            )
    _check_not_lifted(layers, lambda key: [of_example(key)[name] for name in layers])
    return plain._replace(
        apply=apply,
        loss=of_logits(plain.loss),
        metrics=metrics_of_logits(plain.metrics),
    )


def _check_not_lifted(
    layers: Sequence[str], outputs_of: Callable[[jax.Array], list[jax.Array]]
) -> None:
    """Raises ValueError for a layer that `nn.remat`, `nn.scan` or `nn.jit` traces by itself.

    Its output is a tracer of that inner trace, which the outer one takes for a constant.
    """
    closed = jax.make_jaxpr(outputs_of)(keys.key_shape())
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for name, output in zip(layers, closed.jaxpr.outvars, strict=True):
        constant = None if isinstance(output, Literal) else constants.get(output)
        if isinstance(constant, jax.core.Tracer):
            raise ValueError(
                f"layers must not be under nn.remat, nn.scan or nn.jit, where {name!r} is: its output "
                "cannot leave it. fedcodist.rematerialised recomputes a whole model."
            )


def metrics_of_logits(
    metrics: Mapping[str, Statistic | SummedMetric] | None,
    logits: Callable[[Any], Any] | None = None,
) -> dict[str, Statistic | SummedMetric]:
    """Makes metrics of logits accept a network's whole outputs.

    Args:
      metrics: name -> statistic or SummedMetric; by default accuracy.
      logits: the logits of the network's outputs; by default `logits_of`.

    Raises:
      TypeError: `metrics` is no mapping.
    """

    def of_outputs(metric: Statistic | SummedMetric) -> Statistic | SummedMetric:
        if isinstance(metric, SummedMetric):
            return metric._replace(sums=of_logits(metric.sums, logits))
        return of_logits(metric, logits)

    if metrics is None:
        metrics = {"accuracy": accuracy()}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be statistics by name, got {shown(metrics)}.")
    return {name: of_outputs(metric) for name, metric in metrics.items()}


def loss_of_logits(
    loss: Callable[[jax.Array, Batch], jax.Array],
    logits: Callable[[Any], Any] | None = None,
) -> Callable[[Any, Batch], jax.Array]:
    """Makes a loss of logits accept a network's whole outputs. Raises TypeError if it is no function."""
    check_function("loss", loss, ("logits", "batch"), "losses [batch]")
    return of_logits(loss, logits)


def of_logits(
    function: Callable[[jax.Array, Any], Any], logits: Callable[[Any], Any] | None = None
) -> Callable[[Any, Any], Any]:
    """Makes a loss or statistic of logits accept `LayerOutputs` too; `logits` reads other outputs."""
    read = logits or logits_of
    of_outputs = lambda outputs, batch: function(read(outputs), batch)
    return with_label_column(of_outputs, label_column(function))


def pooled(hidden: jax.Array) -> jax.Array:
    """Averages feature maps over positions; other outputs are returned unchanged."""
    return jnp.mean(hidden, axis=(1, 2)) if hidden.ndim == 4 else hidden


def logits_of(outputs: Any) -> Any:
    """The logits of a network's outputs, with or without layers; those of 16 bits become float32.

    A softmax of 16 bits rounds small differences between models away.
    """
    logits = outputs.logits if isinstance(outputs, LayerOutputs) else outputs
    return in_float32(logits) if isinstance(logits, jax.Array) else logits


def checked_logits(outputs: Any) -> jax.Array:
    """As `logits_of`, for methods of one class per example; raises TypeError for other outputs."""
    logits = logits_of(outputs)
    if getattr(logits, "ndim", 0) != 2:
        raise TypeError(
            f"networks of this method must return logits [batch, classes], got {described(logits)}."
        )
    return logits


def as_layers(outputs: Any) -> LayerOutputs:
    """A network's outputs as `LayerOutputs`; plain logits get no layers."""
    return outputs if isinstance(outputs, LayerOutputs) else LayerOutputs(outputs)
