"""What an auxiliary head learns from whom, and how embeddings attract each other (MHD, eq. 2 to 5).

Everything here is of one client and one batch; targets get no gradient.
"""

import jax
import jax.numpy as jnp
import optax

from fedcodist.models.multi_headed import HeadedOutputs

# Whose predictions compete for head k, beside the neighbours' and the own heads k - 1: the neighbours'
# heads k ("same level"), the own head k ("self").
CANDIDATES = {
    "base": (False, False),
    "same_level": (True, False),
    "self": (False, True),
    "same_level_and_self": (True, True),
}
CHOICES = ("most_confident", "random")
EMBEDDING_DISTANCES = ("squared", "norm")
# Below this squared length a direction is not told from 0.
_TINY = 1e-12


def candidates(own: HeadedOutputs, teachers: HeadedOutputs, kind: str) -> jax.Array:
    """Predictions that compete, for all auxiliary heads at once.

    "self" is the paper's rule to skip an example on which the head is surer than its target: the
    cross-entropy from a head's own prediction has no gradient.

    Args:
      own: the client's outputs on the batch, logits [batch, 1 + heads, classes].
      teachers: logits [teachers, batch, 1 + heads, classes].
      kind: one of CANDIDATES.

    Returns:
      Probabilities [candidates, batch, heads, classes]. In this order: each teacher's head k - 1,
      the own head k - 1, each teacher's head k, the own head k.
    """
    same_level, own_head = CANDIDATES[kind]
    mine = jax.nn.softmax(jax.lax.stop_gradient(own.logits))[None]
    theirs = jax.nn.softmax(jax.lax.stop_gradient(teachers.logits))
    found = [theirs[:, :, :-1], mine[:, :, :-1]]
    found += [theirs[:, :, 1:]] * same_level
    found += [mine[:, :, 1:]] * own_head
    return jnp.concatenate(found)


def chosen(competing: jax.Array, choice: str, key: jax.Array) -> jax.Array:
    """Each example's and head's one target (Q of equation 4), the candidate's index [batch, heads].

    Args:
      competing: probabilities [candidates, batch, heads, classes].
      choice: "most_confident", the largest of the largest probabilities, the first of equals; "random".
      key: of random choices.
    """
    if choice == "random":
        count, *shape, _ = competing.shape
        return jax.random.randint(key, shape, 0, count)
    return jnp.argmax(jnp.max(competing, axis=-1), axis=0)


def head_loss(own: HeadedOutputs, competing: jax.Array, choice: jax.Array) -> jax.Array:
    """Cross-entropy of auxiliary heads from their targets, a batch's mean, summed over heads."""
    target = jnp.take_along_axis(competing, choice[None, ..., None], axis=0)[0]
    return jnp.sum(jnp.mean(optax.softmax_cross_entropy(own.logits[:, 1:], target), axis=0))


def embedding_loss(own: HeadedOutputs, teachers: HeadedOutputs, distance: str) -> jax.Array:
    """The distance of normalised embeddings, a mean over the batch, summed over teachers (equation 2).

    Args:
      own: embedding [batch, width].
      teachers: embedding [teachers, batch, width].
      distance: "squared", 2 - 2 cos, or "norm", its square root.
    """
    difference = _normalised(own.embedding) - _normalised(jax.lax.stop_gradient(teachers.embedding))
    squared = jnp.sum(difference**2, axis=-1)
    if distance == "norm":
        # The root's gradient at 0 is infinite, and its product with a difference of 0 no number.
        is_zero = squared <= _TINY
        squared = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squared)))
    return jnp.sum(jnp.mean(squared, axis=-1))


def _normalised(embedding: jax.Array) -> jax.Array:
    # Rectified embeddings may be all zeros: these have no direction, and no gradient.
    squared = jnp.sum(embedding**2, axis=-1, keepdims=True)
    is_zero = squared <= _TINY
    return jnp.where(is_zero, 0, embedding * jax.lax.rsqrt(jnp.where(is_zero, 1, squared)))
