"""Networks in two parts, an embedding and a linear head, for methods that share one of the parts.

Methods of prototypes send mean embeddings. LG-FedAvg, FedPer and FedGH send or train heads. All of these
methods need to know the head's parameters and its input.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from fedcodist.core import keys
from fedcodist.core.checks import check_integer
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs, loss_of_logits, metrics_of_logits
from fedcodist.core.layers_in_training import check_part_trains
from fedcodist.core.metrics import Statistic
from fedcodist.core.model import Batch, Model, cross_entropy
from fedcodist.core.network_inputs import Inputs, as_batch
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.training_flag import call_part, check_part

PyTree = Any
HEAD = "head"  # the name of its parameters, {"kernel": [width, classes], "bias": [classes]}
BACKBONE, EMBEDDING = "backbone", "embedding"


def headed(
    backbone: nn.Module,
    example: jax.Array,
    classes: int,
    width: int | None = None,
    *,
    inputs: Inputs = "image",
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """A model of a backbone and a linear head; its outputs are `LayerOutputs`.

    `outputs.hidden[-1]`, or `embedding_of(outputs)`, is what the head reads, [batch, width]. Parties of
    different networks have embeddings of one width by `width`, which adds a linear layer.

    Args:
      backbone: module that returns embeddings [batch, ...], such as `ResNet(blocks=3, classes=None)`;
        `train` and `mask` are passed where its `__call__` has them. Its batch statistics are of all of a
        batch that several devices share if it, or a module in its attributes, has an attribute
        `axis_name`, and otherwise of each device's part.
      example: inputs with a leading batch axis.
      classes: outputs of the head.
      width: of the embedding; that of the backbone where not given.
      inputs: the column that the network reads. With several columns, the backbone gets a dictionary.
      loss: (logits [batch, classes], batch) -> losses [batch].
      metrics: name -> statistic or SummedMetric of logits and batch; by default accuracy.

    Raises:
      TypeError: `backbone` is no linen module, sizes that are no integers, `loss` is no function of
        logits and batch, or `metrics` no mapping.
      ValueError: numbers out of range, or a backbone that returns something else than [batch, width],
        whose training mode is set in another way than by `train`, or that `train` does not reach through
        `nn.remat` or `nn.jit`.

    >>> import jax.numpy as jnp
    >>> model = headed(nn.Dense(8), jnp.zeros((1, 4)), classes=3, width=2)
    >>> params = model.init(jax.random.key(0)).params
    >>> jax.tree.map(jnp.shape, params[HEAD])
    {'bias': (3,), 'kernel': (2, 3)}
    """
    check_part("backbone", backbone)
    model = from_flax_linen(
        Headed(backbone, classes, width),
        example,
        inputs=inputs,
        loss=loss_of_logits(loss),
        metrics=metrics_of_logits(metrics),
    )
    batch = as_batch(example, inputs)
    check_part_trains("backbone", BACKBONE, backbone, model.init, model.apply, batch)
    return model


class NoHead(ValueError):
    """A network lacks the linear head that a method needs."""


class Headed(nn.Module):
    """The module of `headed`. Parameters: backbone, head and, where a width is given, embedding."""

    backbone: nn.Module
    classes: int
    width: int | None = None

    def __post_init__(self) -> None:
        check_integer("classes", self.classes, low=2)
        if self.width is not None:
            check_integer("width", self.width, low=1)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> LayerOutputs:
        embedding = call_part("backbone", self.backbone, x, train=train, mask=mask)
        if self.width is not None:
            embedding = embedding.reshape(embedding.shape[0], -1)
            embedding = nn.Dense(self.width, name=EMBEDDING)(embedding)
        if embedding.ndim != 2:
            raise ValueError(f"backbone must return [batch, width], got {embedding.shape}.")
        return LayerOutputs(nn.Dense(self.classes, name=HEAD)(embedding), (embedding,))


def embedding_of(outputs: LayerOutputs, argument: str = "groups or pools") -> jax.Array:
    """The head's input, [batch, width].

    Args:
      outputs: of a network made by `headed`.
      argument: which holds the network, for the message.

    Raises:
      ValueError: the network returns logits alone.
    """
    if not isinstance(outputs, LayerOutputs) or not outputs.hidden:
        raise ValueError(
            f"{argument} must have models with a linear head, as `headed` makes them, whose outputs are "
            "logits and the embedding that the head reads, got a network that returns logits alone."
        )
    return outputs.hidden[-1]


def apply_head(head: PyTree, embedding: jax.Array) -> jax.Array:
    """Logits [..., classes] of embeddings [..., width]."""
    return embedding @ head["kernel"] + head["bias"]


def split_head(params: PyTree) -> tuple[PyTree, PyTree]:
    """(the parameters without the head, the head)."""
    return {name: part for name, part in params.items() if name != HEAD}, params[HEAD]


def with_head(params: PyTree, head: PyTree) -> PyTree:
    """The parameters with another head."""
    return {**params, HEAD: head}


def check_heads(argument: str, models: dict[str, Model]) -> tuple[int, int]:
    """Returns (width, classes) of the models' heads, which are equal.

    Args:
      argument: which holds the models, for the message.
      models: name -> Model.

    Raises:
      NoHead: names a model that is not made by `headed`.
      ValueError: heads have several shapes.
    """
    shapes = {}
    for name, model in models.items():
        params = jax.eval_shape(model.init, keys.key_shape()).params
        head = params.get(HEAD) if hasattr(params, "get") else None
        if head is None or getattr(head, "keys", dict)() != {"kernel", "bias"}:
            raise NoHead(
                f"{argument} must have models with a linear head, as `headed` makes them, "
                f"{name!r} has the parameters {sorted(params)}."
            )
        shapes[name] = head["kernel"].shape
    if len(set(shapes.values())) > 1:
        raise ValueError(
            f"{argument} must have models whose heads have one shape (width, classes), got {shapes}: "
            "`headed` makes embeddings of one width."
        )
    return next(iter(shapes.values()))
