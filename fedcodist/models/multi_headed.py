"""The networks of Multi-Headed Distillation: several linear heads share the embedding of a backbone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import loss_of_logits, metrics_of_logits, of_logits
from fedcodist.core.layers_in_training import check_part_trains
from fedcodist.core.metrics import Statistic, accuracy
from fedcodist.core.model import Batch, Model, Variables, cross_entropy
from fedcodist.core.network_inputs import Inputs, as_batch
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.core.training_flag import call_part, check_part

PyTree = Any
BACKBONE = "backbone"  # the name of its parameters within a multi-headed model's
AUXILIARY = "accuracy_head_"  # how the names of auxiliary heads' accuracies begin


class HeadedOutputs(NamedTuple):
    """What a multi-headed model returns.

    Attributes:
      logits: [batch, 1 + heads, classes], the main head first.
      embedding: [batch, width], what embedding distillation compares, not normalised.
    """

    logits: jax.Array
    embedding: jax.Array


def multi_headed(
    backbone: nn.Module,
    example: jax.Array,
    classes: int,
    heads: int = 0,
    projection: int | None = None,
    *,
    inputs: Inputs = "image",
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    metrics: Mapping[str, Statistic | SummedMetric] | None = None,
) -> Model:
    """A model with a main head and auxiliary heads; its loss is the main head's.

    Its metrics are those of the main head, by default `accuracy`. `accuracy_head_1` and so on are the
    metric `accuracy` of the auxiliary heads. Initial values of backbone and main head do not depend on
    the number of auxiliary heads.

    Args:
      backbone: module that returns embeddings [batch, width], such as `ResNet(blocks=3, classes=None)`;
        `train` and `mask` are passed where its `__call__` has them.
      example: inputs with a leading batch axis.
      classes: width of every head.
      heads: m, the number of auxiliary heads.
      projection: width of a linear map of the embedding; its result replaces `embedding` in the outputs.
        Models with embeddings of different widths need it to compare them. Heads read the embedding
        itself.
      inputs: the column that the network reads. With several columns, the backbone gets a dictionary.
      loss: (logits [batch, classes], batch) -> losses [batch], of the main head.
      metrics: name -> statistic or SummedMetric of the main head's logits and the batch; by default
        accuracy. Without an `accuracy` among them, that of the auxiliary heads reads the column
        'label'.

    Raises:
      TypeError: `backbone` is no linen module, sizes that are no integers, `loss` is no function of
        logits and batch, or `metrics` no mapping.
      ValueError: numbers out of range, or a backbone as `headed` refuses it.
    """
    check_part("backbone", backbone)
    network = MultiHeaded(backbone, classes, heads, projection)
    model = from_flax_linen(
        network,
        example,
        inputs=inputs,
        loss=loss_of_logits(loss, main_logits),
        metrics=metrics_of_logits(metrics, main_logits) | auxiliary_accuracies(heads, metrics),
    )
    batch = as_batch(example, inputs)
    check_part_trains("backbone", BACKBONE, backbone, model.init, model.apply, batch)
    return model


def main_head_only(model: Model) -> Model:
    """A multi-headed model that returns only its main head's logits, for methods without other heads.

    Parameters, their initial values, the loss and the main head's metrics are the multi-headed model's.
    """
    only_head = lambda logits: HeadedOutputs(logits[:, None], logits)

    def apply(variables: Variables, batch: Batch, **arguments: Any) -> tuple[jax.Array, PyTree]:
        outputs, mutable = model.apply(variables, batch, **arguments)
        return outputs.logits[:, 0], mutable

    metrics = {n: metric for n, metric in model.metrics.items() if not n.startswith(AUXILIARY)}
    return model._replace(
        apply=apply,
        loss=of_logits(model.loss, only_head),
        metrics=metrics_of_logits(metrics, only_head),
    )


def main_logits(outputs: HeadedOutputs) -> jax.Array:
    """The main head's logits, [batch, classes]."""
    return outputs.logits[:, 0]


def auxiliary_accuracies(
    heads: int, metrics: Mapping[str, Statistic | SummedMetric] | None = None
) -> dict[str, Statistic | SummedMetric]:
    """The accuracy of each auxiliary head.

    Args:
      heads: number of auxiliary heads.
      metrics: the main head's metrics of logits. Without an `accuracy` among them it is that of the
        column 'label'.
    """

    def of(head: int) -> Statistic | SummedMetric:
        of_main = {"accuracy": (metrics or {}).get("accuracy", accuracy())}
        return metrics_of_logits(of_main, lambda outputs: outputs.logits[:, head])["accuracy"]

    return {accuracy_name(head): of(head) for head in range(1, heads + 1)}


def accuracy_name(head: int) -> str:
    """The name of a head's accuracy; 0 is the main head."""
    return "accuracy" if head == 0 else f"{AUXILIARY}{head}"


class MultiHeaded(nn.Module):
    """The module of `multi_headed`. Parameters: backbone, main, and, where used, aux and projection.

    The auxiliary heads are one kernel [heads, width, classes] and bias [heads, classes].
    """

    backbone: nn.Module
    classes: int
    heads: int = 0
    projection: int | None = None

    def __post_init__(self) -> None:
        check_integer("classes", self.classes, low=2)
        check_integer("heads", self.heads, low=0)
        if self.projection is not None:
            check_integer("projection", self.projection, low=1)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> HeadedOutputs:
        embedding = call_part("backbone", self.backbone, x, train=train, mask=mask)
        if embedding.ndim != 2:
            raise ValueError(f"backbone must return [batch, width], got {embedding.shape}.")
        logits = nn.Dense(self.classes, name="main")(embedding)[:, None]
        if self.heads:
            auxiliary = _Heads(self.heads, self.classes, name="aux")(embedding)
            logits = jnp.concatenate([logits, auxiliary], axis=1)
        if self.projection is not None:
            embedding = nn.Dense(self.projection, use_bias=False, name="projection")(embedding)
        return HeadedOutputs(logits, embedding)


class _Heads(nn.Module):
    heads: int
    classes: int

    @nn.compact
    def __call__(self, embedding: jax.Array) -> jax.Array:
        shape = (self.heads, embedding.shape[-1], self.classes)
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(batch_axis=0), shape, jnp.float32
        )
        bias = self.param("bias", nn.initializers.zeros_init(), shape[::2], jnp.float32)
        embedding, kernel, bias = nn.dtypes.promote_dtype(embedding, kernel, bias)
        return jnp.einsum("be,hec->bhc", embedding, kernel) + bias
