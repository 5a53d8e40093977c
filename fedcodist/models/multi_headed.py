"""The networks of Multi-Headed Distillation: several linear heads share the embedding of a backbone."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import metrics as metrics_lib
from fedcodist.core.model import (
    Batch,
    Model,
    Variables,
    check_part_trains,
    cross_entropy,
    from_flax_linen,
)
from fedcodist.core.training_flag import check_part, part_arguments

PyTree = Any
BACKBONE = "backbone"  # the name of its parameters within a multi-headed model's


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
) -> Model:
    """A model with a main head and auxiliary heads; its loss is the main head's.

    Its metrics are `accuracy`, that of the main head, and `accuracy_head_1` and so on. Initial values of
    backbone and main head do not depend on the number of auxiliary heads.

    Args:
      backbone: module that returns embeddings [batch, width], such as `ResNet(blocks=3, classes=None)`;
        `train` and `mask` are passed where its `__call__` has them.
      example: inputs with a leading batch axis.
      classes: width of every head.
      heads: m, the number of auxiliary heads.
      projection: width of a linear map of the embedding; its result replaces `embedding` in the outputs.
        Models with embeddings of different widths need it to compare them. Heads read the embedding
        itself.

    Raises:
      ValueError: numbers out of range, or a backbone that returns something else.
    """
    check_part("backbone", backbone)
    network = MultiHeaded(backbone, classes, heads, projection)
    model = from_flax_linen(
        network,
        example,
        loss=main_head_loss,
        metrics=head_accuracies(heads),
    )
    check_part_trains("backbone", "backbone", backbone, model, example)
    return model


def main_head_only(model: Model) -> Model:
    """A multi-headed model that returns only its main head's logits, for methods without other heads.

    Parameters and their initial values are those of the multi-headed model.
    """

    def apply(variables: Variables, batch: Batch, **arguments: Any) -> tuple[jax.Array, PyTree]:
        outputs, mutable = model.apply(variables, batch, **arguments)
        return outputs.logits[:, 0], mutable

    accuracy = {accuracy_name(0): metrics_lib.accuracy()}
    return model._replace(apply=apply, loss=cross_entropy, metrics=accuracy)


def main_head_loss(outputs: HeadedOutputs, batch: Batch) -> jax.Array:
    """The main head's cross-entropy per example, [batch]."""
    return cross_entropy(outputs.logits[:, 0], batch)


def head_accuracies(heads: int) -> dict[str, metrics_lib.Statistic]:
    """Accuracy of the main head and of each auxiliary one."""

    def of(head: int) -> metrics_lib.Statistic:
        accuracy = metrics_lib.accuracy()
        return lambda outputs, batch: accuracy(outputs.logits[:, head], batch)

    return {accuracy_name(head): of(head) for head in range(heads + 1)}


def accuracy_name(head: int) -> str:
    """The name of a head's accuracy; 0 is the main head."""
    return "accuracy" if head == 0 else f"accuracy_head_{head}"


class MultiHeaded(nn.Module):
    """The module of `multi_headed`. Parameters: backbone, main, and, where used, aux and projection.

    The auxiliary heads are one kernel [heads, width, classes] and bias [heads, classes].
    """

    backbone: nn.Module
    classes: int
    heads: int = 0
    projection: int | None = None

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes!r}.")
        if self.heads < 0:
            raise ValueError(f"heads must be at least 0, got {self.heads!r}.")
        if self.projection is not None and self.projection < 1:
            raise ValueError(f"projection must be None or at least 1, got {self.projection!r}.")
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> HeadedOutputs:
        embedding = self.backbone(x, **part_arguments(self.backbone, train=train, mask=mask))
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
