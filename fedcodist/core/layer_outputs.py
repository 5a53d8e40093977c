"""Networks that show what is between their layers, for distillation of more than logits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import metrics as metrics_lib
from fedcodist.core.model import Model, cross_entropy, from_flax_linen


class LayerOutputs(NamedTuple):
    """What such a network returns.

    Attributes:
      logits: [batch, classes].
      hidden: one [batch, ..., width] per layer, from the inputs to the outputs; a tuple of them, of
        one width, where a layer reads several inputs.
      attention: one [batch, heads, ..., queries, keys] per layer of those that attend, or such a tuple.
      is_real: of text, bool [batch, ..., positions], false for padding, or a tuple of one for each input
        that the layers read; None where a network has no padding or does not tell.
    """

    logits: jax.Array
    hidden: tuple[Any, ...] = ()
    attention: tuple[Any, ...] = ()
    is_real: Any = None


def with_layers(module: Any, example: jax.Array, layers: Sequence[str], **options: Any) -> Model:
    """A Model of any Flax linen module that returns logits: some submodules' outputs are `hidden`.

    Images [batch, height, width, channels] between layers are pooled to their mean over positions.
    Parameters and their first values are those of `from_flax_linen`.

    Args:
      module: a `flax.linen.Module`.
      example: inputs with a leading batch axis.
      layers: submodules' names in the network's order, such as 'Dense_0' or 'block1/Conv_0'.
      options: as in `from_flax_linen`.

    Raises:
      ValueError: one line; a name that no submodule has.
    """
    plain = from_flax_linen(module, example, **options)

    def called(variables, batch, arguments):
        outputs = {}

        def keep(method, inputs, named, context):
            output = method(*inputs, **named)
            if context.method_name == "__call__":
                outputs["/".join(context.module.path)] = output
            return output

        with nn.intercept_methods(keep):
            logits, mutable = plain.apply(variables, batch, **arguments)
        return logits, outputs, mutable

    def apply(variables, batch, **arguments):
        logits, outputs, mutable = called(variables, batch, arguments)
        return LayerOutputs(logits, tuple(pooled(outputs[name]) for name in layers)), mutable

    def names(key):
        found.extend(called(plain.init(key), {options.get("inputs", "image"): example}, {})[1])

    found: list[str] = []
    jax.eval_shape(names, jax.eval_shape(lambda: jax.random.key(0)))
    known = [name for name in found if name]
    for name in layers:
        if name not in known:
            raise ValueError(f"layers must be of {known}, got {name!r}.")
    return plain._replace(
        apply=apply,
        loss=of_logits(cross_entropy),
        metrics={"accuracy": of_logits(metrics_lib.accuracy())},
    )


def of_logits(function: Callable[[jax.Array, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss or statistic of (logits, batch) as one of (`LayerOutputs`, batch), or of logits still."""
    return lambda outputs, batch: function(logits_of(outputs), batch)


def pooled(hidden: jax.Array) -> jax.Array:
    """The mean over positions of images; anything else as it is."""
    return jnp.mean(hidden, axis=(1, 2)) if hidden.ndim == 4 else hidden


def logits_of(outputs: Any) -> Any:
    """A network's outputs without its layers, if it shows any: what other models learn from."""
    return outputs.logits if isinstance(outputs, LayerOutputs) else outputs


def as_layers(outputs: Any) -> LayerOutputs:
    """A network's outputs, where plain logits are those of a network that shows no layers."""
    return outputs if isinstance(outputs, LayerOutputs) else LayerOutputs(outputs)
