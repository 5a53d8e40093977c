"""Networks with exits: a classifier after every block, so that the first blocks are a network too."""

from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax

from fedcodist.core.checks import check_integer, check_several, shown
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs, loss_of_logits, metrics_of_logits, pooled
from fedcodist.core.layers_in_training import check_part_trains
from fedcodist.core.metrics import Statistic
from fedcodist.core.model import Batch, Model, cross_entropy
from fedcodist.core.network_inputs import Inputs, as_batch
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.training_flag import call_part, check_part


def digits_exits(depth: int | None = None) -> "Exits":
    """Three dense blocks for 8x8 images of digits, with 10,318 parameters at full depth."""
    return Exits([DenseBlock(64), DenseBlock(48), DenseBlock(32)], depth=depth)


def with_exits(
    module: "Exits",
    example: jax.Array,
    *,
    inputs: Inputs = "image",
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """A model of a network with exits; its outputs are `LayerOutputs`.

    `outputs.logits` are the mean of all exits' logits, and `outputs.hidden` the exits' logits, from the
    first to the last, [batch, classes] each.

    Args:
      module: the network.
      example: inputs with a leading batch axis.
      inputs: the column that the network reads. With several columns, the first block gets a dictionary.
      loss: (logits [batch, classes], batch) -> losses [batch], of an exit's and of the mean logits.
      metrics: name -> statistic or SummedMetric of logits and batch; by default accuracy.

    Raises:
      TypeError: `module` is no `Exits`, a block no linen module, `loss` no function of logits and batch,
        or `metrics` no mapping.
      ValueError: names a block that does not return an array, whose training mode is set in another way
        than by `train`, or that `train` does not reach through `nn.remat` or `nn.jit`.

    >>> import jax.numpy as jnp
    >>> model = with_exits(Exits([nn.Dense(4), nn.Dense(4)], classes=3, depth=1), jnp.zeros((1, 2)))
    >>> sorted(model.init(jax.random.key(0)).params)
    ['blocks_0', 'exit_0']
    """
    if not isinstance(module, Exits):
        raise TypeError(
            "module must be Exits of blocks, such as Exits([nn.Dense(8)], classes=10), got "
            f"{shown(module)}."
        )
    for index, block in enumerate(module.blocks):
        check_part(f"module.blocks[{index}]", block)
    model = from_flax_linen(
        module,
        example,
        inputs=inputs,
        loss=loss_of_logits(loss),
        metrics=metrics_of_logits(metrics),
    )
    for index, block in enumerate(module.blocks[: module.depth]):
        check_part_trains(
            f"module.blocks[{index}]",
            f"blocks_{index}",
            block,
            model.init,
            model.apply,
            as_batch(example, inputs),
        )
    return model


class Exits(nn.Module):
    """Blocks in a row, each followed by an exit: a linear classifier of what the block returns.

    Images between blocks are averaged over positions for an exit. Parameters are blocks_0, exit_0 and so
    on; those of a shallower network are the first of a deeper one's.

    Attributes:
      blocks: modules; `train` and `mask` are passed where their `__call__` has them.
      classes: outputs of an exit.
      depth: how many of the blocks there are; all where not given.

    Raises:
      ValueError, TypeError: no blocks, or numbers out of range.
    """

    blocks: Sequence[nn.Module]
    classes: int = 10
    depth: int | None = None

    def __post_init__(self) -> None:
        check_several("blocks", self.blocks)
        if not len(self.blocks):
            raise ValueError("blocks must not be empty.")
        check_integer("classes", self.classes, low=2)
        if self.depth is not None:
            check_integer("depth", self.depth, low=1)
            if self.depth > len(self.blocks):
                raise ValueError(
                    f"depth must be at most the network's {len(self.blocks)} blocks, got {self.depth}."
                )
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> LayerOutputs:
        exits = []
        for index, block in enumerate(self.blocks[: self.depth]):
            x = call_part(f"module.blocks[{index}]", block, x, train=train, mask=mask)
            exits.append(nn.Dense(self.classes, name=f"exit_{index}")(pooled(x)))
        return LayerOutputs(sum(exits[1:], exits[0]) / len(exits), tuple(exits))


class DenseBlock(nn.Module):
    """A dense layer and ReLU; inputs are flattened."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(nn.Dense(self.features)(x.reshape(x.shape[0], -1)))
