"""Differential privacy for methods of parties: parties clip their messages, and the sum gets noise.

Parties keep their models and send scores, mean logits or prototypes, which they clip. The server adds
noise to their sum. With `secure_sum_reduce` around it the server sees only the sum. Everything that
parties learn from the noised sum is post-processing. Each round is one Gaussian mechanism with the given
`noise_multiplier`, without sampling, since all parties take part. Neighbouring data differ in one party,
whose message is zeros in one of the two.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.method import PARTIES, FederatedAlgorithm, PrivateCohorts
from fedcodist.privacy.clipping import clipped_weight, noised

PyTree = Any


def private_scores(clip: float, noise_multiplier: float, max_weight: float = 1.0) -> Reduce:
    """The weighted mean of scores of shared examples, for FedMD and DS-FL: `fed_md(..., reduce=...)`.

    A party clips the scores of each example at the norm `clip`, and its weight at `max_weight`. With m
    examples in a round its message has a norm of at most max_weight clip sqrt(m), the sensitivity of
    the sum. The noise on every number of the sum has noise_multiplier times this standard deviation.
    Probabilities have a norm of at most 1, so clip=1 does not change them. Their noised mean is not a
    distribution; DS-FL's 'era' turns it into one.

    The guarantee protects all data on which a party trains, as they are given: if all parties' data were
    centred by a common mean, it does not protect the mean. The shared examples, the number of parties
    and their weights are public. Metrics of parties, such as losses and accuracies, are not protected.

    Args:
      clip: the largest norm of one example's scores, above 0.
      noise_multiplier: z; 0 only clips.
      max_weight: the largest weight of a party. FedMD divides `hyper.weights` by their sum, so it is
        then max(weights) / sum(weights).

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(private_scores, locals())
    _check_noise(clip, noise_multiplier)
    check_number("max_weight", max_weight, above=0)

    def bound(update: PyTree) -> PyTree:
        return jax.tree.map(lambda scores: clipped_rows(scores, clip), update)

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, jax.Array]:
        weight = clipped_weight(result.weight, max_weight)
        return jax.tree.map(lambda scores: scores * weight, bound(result.update)), weight

    def finalize(total: tuple[PyTree, jax.Array], message: PyTree, key: jax.Array) -> Aggregate:
        sums, weight = total
        deviation = noise_multiplier * max_weight * scores_sensitivity(sums, clip)
        noisy = _noised(sums, deviation, key)
        mean = jax.tree.map(lambda scores: scores / jnp.where(weight > 0, weight, 1), noisy)
        return Aggregate(mean, {}, weight)

    return Reduce(prepare, finalize, bound=bound)


def private_classes(clip: float, noise_multiplier: float, max_count: float = 1.0) -> Reduce:
    """Sums of one vector per class, for FD's mean logits and FedProto's prototypes.

    A party sends a pair: vectors [classes, width], and the count of each class [classes]. If a count is
    above `max_count`, count and vector are scaled down to it. Then the vector is clipped at the norm
    `clip` times the count. So classes with more examples do not reveal more. Counts reveal which classes
    a party has, so they get noise too. Vectors and `clip` times the counts together have a norm of at
    most clip max_count sqrt(2 classes), the sensitivity S of their sum. The standard deviation of the
    noise is noise_multiplier S for vectors and noise_multiplier S / clip for counts.

    The guarantee protects all data on which a party trains, and which classes it has. The list of
    classes and the number of parties are public. Metrics of parties are not protected. A party of FD
    subtracts its own clipped means from the noised sum locally.

    Args:
      clip: the largest norm of a class's mean, above 0.
      noise_multiplier: z; 0 only clips.
      max_count: the largest count of a class: 1 for FD, and for FedProto with weighting='parties'.

    Raises:
      ValueError, TypeError: names the argument and what is allowed. When the method is traced, also if
        the message is not such a pair.
    """
    check_arguments(private_classes, locals())
    _check_noise(clip, noise_multiplier)
    check_number("max_count", max_count, above=0)

    def bound(update: PyTree) -> PyTree:
        if not jax.tree.leaves(update):
            return update
        (vectors, counts), structure = _pair(update)
        kept = clipped_weight(counts, max_count)
        scaled = vectors * (kept / jnp.where(counts > 0, counts, 1))[:, None]
        return structure.unflatten([clipped_rows(scaled, clip * kept[:, None]), kept])

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, jax.Array]:
        weight = clipped_weight(result.weight, 1)
        return jax.tree.map(lambda leaf: leaf * weight, bound(result.update)), weight

    def finalize(total: tuple[PyTree, jax.Array], message: PyTree, key: jax.Array) -> Aggregate:
        sums, weight = total
        if not jax.tree.leaves(sums):
            return Aggregate(sums, {}, weight)
        (vectors, counts), structure = _pair(sums)
        deviation = noise_multiplier * classes_sensitivity(len(counts), clip, max_count)
        scaled = [vectors, clip * counts]
        noisy_vectors, noisy_counts = _noised(scaled, deviation, key)
        return Aggregate(structure.unflatten([noisy_vectors, noisy_counts / clip]), {}, weight)

    return Reduce(prepare, finalize, bound=bound, is_sum=True)


def counted(algorithm: FederatedAlgorithm, noise_multiplier: float) -> FederatedAlgorithm:
    """The algorithm of parties with privacy accounting: a run reports epsilon, as for private pools.

    Args:
      algorithm: of parties who send once per round, through `private_scores` or `private_classes`.
      noise_multiplier: that of its reduction.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(counted, locals())
    check_number("noise_multiplier", noise_multiplier, low=0)
    everyone = np.arange(algorithm.num_clients, dtype=np.int32)
    # All parties take part: Poisson cohorts with probability 1 and a slot for every party.
    cohorts = PrivateCohorts(
        everyone, noise_multiplier, len(everyone), len(everyone), select=algorithm.select
    )
    return algorithm._replace(privacy={PARTIES: cohorts})


def scores_sensitivity(scores: PyTree, clip: float) -> float:
    """The norm of a party's scores [..., classes] of weight 1: clip sqrt(examples)."""
    examples = sum(int(np.prod(leaf.shape[:-1])) for leaf in jax.tree.leaves(scores))
    return clip * float(np.sqrt(examples))


def classes_sensitivity(num_classes: int, clip: float, max_count: float = 1.0) -> float:
    """The norm of a party's vectors and `clip` times its counts: clip max_count sqrt(2 classes)."""
    return clip * max_count * float(np.sqrt(2 * num_classes))


def clipped_rows(rows: jax.Array, clip: Any) -> jax.Array:
    """Vectors [..., width], each scaled to a norm of at most `clip`; zeros if one is not finite."""
    finite = jnp.where(jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True), rows, 0)
    largest = jnp.max(jnp.abs(finite), axis=-1, keepdims=True)
    shrunk = finite / jnp.maximum(largest, 1)  # squares of large logits would be infinite
    norm = jnp.linalg.norm(shrunk, axis=-1, keepdims=True) * jnp.maximum(largest, 1)
    return finite * jnp.minimum(1, clip / jnp.where(norm > 0, norm, 1))


def _noised(tree: PyTree, deviation: Any, key: jax.Array) -> PyTree:
    """The tree with Gaussian noise on every number, drawn on the server from the round's key."""
    return noised(tree, deviation, keys.derive(key, "noise"))


def _pair(update: PyTree) -> tuple[list[jax.Array], Any]:
    """((vectors [classes, width], counts [classes]), the tree structure of the pair)."""
    leaves, structure = jax.tree.flatten(update)
    shapes = [list(leaf.shape) for leaf in leaves]
    if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
        raise ValueError(
            "private_classes must be of a method whose parties send vectors [classes, width] and counts "
            f"[classes], got arrays of shapes {shapes}."
        )
    return leaves, structure


def _check_noise(clip: Any, noise_multiplier: Any) -> None:
    check_number("clip", clip, above=0)
    check_number("noise_multiplier", noise_multiplier, low=0)
