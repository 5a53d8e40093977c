"""MHD's distillation losses, for auxiliary heads and for embeddings (equations 2 to 5).

Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR 2023,
https://arxiv.org/abs/2211.15774.

All functions are for one client and one batch. Targets get no gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange
from fedcodist.core import keys
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import LARGEST_BATCH, check_choice, check_integer
from fedcodist.core.model import Batch, Model, Variables, in_float32
from fedcodist.models.multi_headed import BACKBONE, HeadedOutputs

PyTree = Any
DISTILLATION_LOSSES = ("embedding_loss", "head_loss")  # metrics

# Candidates for the target of head k are the heads k - 1 of neighbours and of the client. The flags add
# (the neighbours' heads k, "same level"; the own head k, "self").
CANDIDATES = {
    "base": (False, False),
    "same_level": (True, False),
    "self": (False, True),
    "same_level_and_self": (True, True),
}
CHOICES = ("most_confident", "random")
EMBEDDING_DISTANCES = ("squared", "norm")
# Purposes of the keys for random choices in each level's loss term.
_CHOICE_KEYS = ("choice", "choice_of_same_level")
# A squared length below this counts as 0.
_TINY = 1e-12


class HeadDistillation(NamedTuple):
    """How clients learn from each other.

    Attributes:
      batch_size: public examples per step and client; every client has its own stream of them.
      teachers: Delta, checkpoints drawn from the buffer in each step, without replacement. With 0 no
        client learns from others: head k learns from the client's own head k - 1.
      candidates: whose predictions compete as a head's target, see `CANDIDATES`. We take the paper's
        "All" to be "same_level_and_self" with two teachers; the paper does not define it. With "base"
        and "self", and without gradients to the backbone, head k gets knowledge from at most k hops
        away. With the other values, and through the backbone, knowledge travels further.
      separate_levels: whether candidates of the same level have their own loss term, with the most
        confident of them as target, or compete with those of the previous level. The paper's text
        allows both; the first fits its results better (docs/results/mhd.md). It changes nothing without
        teachers' heads of the same level: with "base", and with "self", which is always the skip rule.
      choice: of the target among the candidates, "most_confident" or "random".
      top_predictions: how many of the largest probabilities a teacher sends per head (section 3.2). The
        rest is spread evenly over the other classes. None: all; then bytes are those of checkpoints.
        Otherwise bytes are those that a live exchange of predictions would send.
      embedding_distance: "squared" or "norm", of normalised embeddings.
      reaches_backbone: whether the losses of heads and embeddings change the backbone.
      updates_statistics: whether public batches also update batch normalisation's running averages.
      preprocess: (batch, key, positions) -> batch, of public examples.
      exchange: how clients get the checkpoints that teach them.
    """

    batch_size: int = 512
    teachers: int = 1
    candidates: str = "base"
    separate_levels: bool = True
    choice: str = "most_confident"
    top_predictions: int | None = None
    embedding_distance: str = "squared"
    reaches_backbone: bool = True
    updates_statistics: bool = False
    preprocess: Preprocess = lambda batch, key, positions: batch
    exchange: CheckpointExchange = CheckpointExchange()

    def check(self, name: str) -> None:
        """Raises ValueError or TypeError that names the field which is not allowed."""
        check_integer(f"{name}.batch_size", self.batch_size, low=1, high=LARGEST_BATCH)
        check_integer(f"{name}.teachers", self.teachers, low=0)
        if self.top_predictions is not None:
            check_integer(f"{name}.top_predictions", self.top_predictions, low=1)
        for field, value, allowed in (
            ("candidates", self.candidates, tuple(CANDIDATES)),
            ("choice", self.choice, CHOICES),
            ("embedding_distance", self.embedding_distance, EMBEDDING_DISTANCES),
        ):
            check_choice(f"{name}.{field}", value, allowed)


def distillation_gradient(
    model: Model,
    variables: Variables,
    batch: Batch,
    teachers: HeadedOutputs,
    distillation: HeadDistillation,
    weights: tuple[Any, Any],
    key: jax.Array,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """(gradient, mutable state, losses) of the distillation losses on one public batch.

    Outputs of 16 bits are compared in float32.

    Args:
      model, variables: the client's model.
      batch: public examples.
      teachers: checkpoints' outputs on the batch, leaves [teachers, batch, ...].
      distillation: how the client learns.
      weights: nu_emb and nu_aux.
      key: of dropout and of random choices.
    """

    teachers = jax.tree.map(in_float32, teachers)

    def loss(params: PyTree) -> tuple[jax.Array, tuple[PyTree, dict[str, jax.Array]]]:
        outputs, mutable = model.apply(
            Variables(params, variables.mutable),
            batch,
            train=True,
            key=keys.derive(key, "dropout"),
        )
        outputs = jax.tree.map(in_float32, outputs)
        # Equation 2: the distance of normalised embeddings.
        of_embeddings = embedding_loss(outputs, teachers, distillation.embedding_distance)
        of_heads = jnp.zeros(())
        if outputs.logits.shape[1] > 1:
            # Equation 5: a sum over auxiliary heads k, which heads k - 1 teach.
            competing = candidates(
                outputs, teachers, distillation.candidates, distillation.top_predictions
            )
            levels = by_level(
                competing,
                distillation.candidates,
                len(teachers.logits),
                distillation.separate_levels,
            )
            for of_level, purpose in zip(levels, _CHOICE_KEYS, strict=False):
                # Equation 4: Q selects the candidate with the largest confidence Lambda.
                choice = chosen(of_level, distillation.choice, keys.derive(key, purpose))
                # Equation 3: cross-entropy with this target.
                of_heads += head_loss(outputs, of_level, choice)
        total = weights[0] * of_embeddings + weights[1] * of_heads
        losses = dict(zip(DISTILLATION_LOSSES, (of_embeddings, of_heads), strict=True))
        return total, (mutable, losses)

    gradient, (mutable, losses) = jax.grad(loss, has_aux=True)(variables.params)
    if not distillation.reaches_backbone:
        gradient = {**gradient, BACKBONE: jax.tree.map(jnp.zeros_like, gradient[BACKBONE])}
    if not distillation.updates_statistics:
        mutable = variables.mutable
    return gradient, mutable, losses


def candidates(
    outputs: HeadedOutputs, teachers: HeadedOutputs, kind: str, top_predictions: int | None = None
) -> jax.Array:
    """The candidates for the targets of all auxiliary heads.

    "self" implements the paper's rule to skip an example on which the head is more confident than its
    target: the cross-entropy with a head's own prediction has no gradient. So it must compete with the
    other candidates.

    Args:
      outputs: the client's outputs on the batch, logits [batch, 1 + heads, classes].
      teachers: logits [teachers, batch, 1 + heads, classes].
      kind: one of CANDIDATES.
      top_predictions: how many predictions teachers send per head; None: all.

    Returns:
      Probabilities [candidates, batch, heads, classes]. In this order: each teacher's head k - 1,
      the own head k - 1, each teacher's head k, the own head k.
    """
    same_level, own_head = CANDIDATES[kind]
    client = jax.nn.softmax(jax.lax.stop_gradient(outputs.logits))[None]
    others = jax.nn.softmax(jax.lax.stop_gradient(teachers.logits))
    if top_predictions is not None:
        others = top_few(others, top_predictions)
    competing = [others[:, :, :-1], client[:, :, :-1]]
    if same_level:
        competing.append(others[:, :, 1:])
    if own_head:
        competing.append(client[:, :, 1:])
    return jnp.concatenate(competing)


def top_few(probabilities: jax.Array, count: int) -> jax.Array:
    """The distribution that a receiver restores from the `count` largest probabilities.

    Among equal probabilities the first ones are sent. The rest is spread evenly over the other classes,
    so the confidence does not change. With all classes but one, nothing is lost.

    Args:
      probabilities: [..., classes].
      count: 1 to classes.
    """
    classes = probabilities.shape[-1]
    if count >= classes:
        return probabilities
    largest, indices = jax.lax.top_k(probabilities, count)
    is_sent = jax.nn.one_hot(indices, classes, dtype=bool).any(axis=-2)
    left = jnp.maximum(1 - jnp.sum(largest, axis=-1, keepdims=True), 0) / (classes - count)
    return jnp.where(is_sent, probabilities, left)


def by_level(competing: jax.Array, kind: str, teachers: int, is_separate: bool) -> list[jax.Array]:
    """The candidates of each loss term: all in one term, or heads k - 1 and heads k in two.

    Two terms need teachers' heads k. An own head k that is alone would be its own target, without a
    gradient, and would skip no example.

    Args:
      competing: as returned by `candidates`.
      kind: one of CANDIDATES.
      teachers: their number.
      is_separate: whether there are two terms, where teachers' heads k compete.
    """
    same_level, _ = CANDIDATES[kind]
    if not (is_separate and same_level and teachers):
        return [competing]
    before = teachers + 1  # with the own head
    return [competing[:before], competing[before:]]


def chosen(competing: jax.Array, choice: str, key: jax.Array) -> jax.Array:
    """The target of each example and head (Q of equation 4), a candidate's index [batch, heads].

    Args:
      competing: probabilities [candidates, batch, heads, classes].
      choice: "most_confident", the candidate with the largest probability of any class (the first among
        ties), or "random".
      key: of random choices.
    """
    if choice == "random":
        count, *shape, _ = competing.shape
        return jax.random.randint(key, shape, 0, count)
    return jnp.argmax(jnp.max(competing, axis=-1), axis=0)


def head_loss(outputs: HeadedOutputs, competing: jax.Array, choice: jax.Array) -> jax.Array:
    """Cross-entropy of auxiliary heads with their targets, a mean over the batch, summed over heads."""
    target = jnp.take_along_axis(competing, choice[None, ..., None], axis=0)[0]
    return jnp.sum(jnp.mean(optax.softmax_cross_entropy(outputs.logits[:, 1:], target), axis=0))


def embedding_loss(outputs: HeadedOutputs, teachers: HeadedOutputs, distance: str) -> jax.Array:
    """The distance of normalised embeddings, a mean over the batch, summed over teachers (equation 2).

    Args:
      outputs: the client's outputs, embedding [batch, width].
      teachers: embedding [teachers, batch, width].
      distance: "squared", 2 - 2 cos, or "norm", its square root.
    """
    difference = _normalised(outputs.embedding) - _normalised(
        jax.lax.stop_gradient(teachers.embedding)
    )
    squared = jnp.sum(difference**2, axis=-1)
    if distance == "norm":
        # The root's gradient at 0 is infinite, and its product with a difference of 0 would be NaN.
        is_zero = squared <= _TINY
        squared = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squared)))
    return jnp.sum(jnp.mean(squared, axis=-1))


def _normalised(embedding: jax.Array) -> jax.Array:
    # Embeddings after a ReLU may be 0. They have no direction, and get no gradient.
    squared = jnp.sum(embedding**2, axis=-1, keepdims=True)
    is_zero = squared <= _TINY
    return jnp.where(is_zero, 0, embedding * jax.lax.rsqrt(jnp.where(is_zero, 1, squared)))
