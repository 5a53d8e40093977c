"""Ensembles of models of one architecture: mean predictions, sampled members, weights of teachers.

Members are Variables whose leaves have a leading axis. They are evaluated one after another. Trailing
members with weight 0 are not evaluated.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.method import Predictor
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.core.shape_checks import described
from fedcodist.distillation.divergences import check_classes
from fedcodist.distillation.loop import Teacher

PyTree = Any
ENSEMBLE = "ensemble"  # its name among teachers, and among the models of results


class Ensemble(NamedTuple):
    """Members, leaves [members, ...], and their weights, float [members]; means are NaN if all are 0."""

    members: Variables
    weights: jax.Array


def equal_weights(members: Variables) -> Ensemble:
    """An ensemble whose members have the same weight."""
    count = jax.tree.leaves(members.params)[0].shape[0]
    return Ensemble(members, jnp.ones(count))


def concatenated(*ensembles: Ensemble) -> Ensemble:
    """One ensemble with the members of several ensembles."""
    members = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), *(ensemble.members for ensemble in ensembles)
    )
    return Ensemble(members, jnp.concatenate([ensemble.weights for ensemble in ensembles]))


def mean_logits(model: Model, ensemble: Ensemble) -> Teacher:
    """The weighted mean of the members' logits [batch, classes], before any softmax."""
    return _mean(model, ensemble, _teaching_logits)


def mean_probabilities(model: Model, ensemble: Ensemble) -> Teacher:
    """The weighted mean of the members' probabilities [batch, classes]."""
    return _mean(model, ensemble, lambda outputs: jax.nn.softmax(_teaching_logits(outputs)))


def ensemble_predictor(model: Model, ensemble: Callable[[PyTree], Ensemble]) -> Predictor:
    """A Predictor of the mean outputs of an ensemble in an algorithm's state.

    Args:
      model: the members' network. Its outputs are an array: logits, or predicted numbers.
      ensemble: algorithm state -> Ensemble.
    """

    def variables(state: PyTree) -> Variables:
        members, weights = ensemble(state)
        return Variables(members.params, (members.mutable, weights))

    def predict(variables: Variables, batch: Batch) -> jax.Array:
        mutable, weights = variables.mutable
        ensemble = Ensemble(Variables(variables.params, mutable), weights)
        return _mean(model, ensemble, _outputs)(batch)

    return Predictor(model, variables, predict)


def mean_logits_of_all(models: Mapping[str, Model], ensembles: Mapping[str, Ensemble]) -> Teacher:
    """The weighted mean of all members' logits, over several ensembles of one architecture each."""
    return _mean_of_all(models, ensembles, _teaching_logits)


def ensembles_predictor(
    models: Mapping[str, Model], ensembles: Callable[[PyTree], Mapping[str, Ensemble]]
) -> Predictor:
    """Like `ensemble_predictor`, for several ensembles, by the names of their networks."""

    def variables(state: PyTree) -> Variables:
        of_state = ensembles(state)
        params = {name: ensemble.members.params for name, ensemble in of_state.items()}
        others = {n: (e.members.mutable, e.weights) for n, e in of_state.items()}
        return Variables(params, others)

    def predict(variables: Variables, batch: Batch) -> jax.Array:
        of_state = {
            name: Ensemble(Variables(variables.params[name], mutable), weights)
            for name, (mutable, weights) in variables.mutable.items()
        }
        return _mean_of_all(models, of_state, _outputs)(batch)

    return Predictor(next(iter(models.values())), variables, predict)


def gaussian_samples(
    key: jax.Array, received: Variables, members: Variables, count: int
) -> Variables:
    """Draws models from a diagonal normal distribution around the clients' models, as FedBE's code does.

    FedBE: Chen and Chao 2021, https://arxiv.org/abs/2009.01974. Per tensor, with
    u_i = (w_i - x) / ||w_i - x||, a sample is x + mean_i ||w_i - x|| (m + 0.1 sqrt(v) e). Here m and v
    are the mean and variance of u over clients, v is at least 1e-5, and e is standard normal. Batch
    statistics are the members' mean.

    Args:
      key: of the draws.
      received: the model x that clients started from.
      members: the clients' models, leaves [clients, ...].
      count: number of samples.

    Returns:
      Variables with leaves [count, ...].
    """
    leaves, structure = jax.tree.flatten(members.params)
    starts = jax.tree.leaves(received.params)
    samples = []
    for index, (leaf, start) in enumerate(zip(leaves, starts, strict=True)):
        updates = (leaf - start).reshape(leaf.shape[0], -1)
        norms = jnp.linalg.norm(updates, axis=1, keepdims=True)
        unit = updates / jnp.where(norms > 0, norms, 1)
        spread = jnp.sqrt(jnp.maximum(jnp.var(unit, axis=0), 1e-5))
        noise = jax.random.normal(jax.random.fold_in(key, index), (count, updates.shape[1]))
        drawn = jnp.mean(norms) * (jnp.mean(unit, axis=0) + 0.1 * spread * noise)
        samples.append(start + drawn.reshape(count, *start.shape))
    mutable = jax.tree.map(
        lambda leaf: jnp.broadcast_to(jnp.mean(leaf, axis=0), (count, *leaf.shape[1:])),
        members.mutable,
    )
    return Variables(jax.tree.unflatten(structure, samples), mutable)


def dirichlet_samples(key: jax.Array, members: Variables, count: int) -> Variables:
    """Random convex combinations of the clients' models: shares ~ Dirichlet(1, ..., 1) (FedBE).

    Returns:
      Variables with leaves [count, ...], batch statistics combined by the same shares.
    """
    clients = jax.tree.leaves(members.params)[0].shape[0]
    shares = jax.random.dirichlet(key, jnp.ones(clients), (count,))
    mixed = functools.partial(jnp.tensordot, shares, axes=1, precision="highest")
    return jax.tree.map(mixed, members)


def is_guessing(accuracy: jax.Array, num_classes: int) -> jax.Array:
    """Whether accuracies are below 1.2 times that of random guessing, bool of their shape."""
    return accuracy < 1.2 / num_classes


def without_worst(accuracy: jax.Array, num_classes: int) -> jax.Array:
    """FedDF's drop-worst: weights 0 or 1 of teachers by their accuracy on validation data.

    Teachers that are only guessing (`is_guessing`) are dropped. If there are none, teachers more than
    1.5 standard deviations below the mean of all but the best are dropped. The best is always kept.
    FedDF: Lin et al. 2020, https://arxiv.org/abs/2006.07242.

    Args:
      accuracy: float [teachers], shares between 0 and 1.
      num_classes: number of classes.

    Returns:
      float [teachers].
    """
    best = jnp.argmax(accuracy)
    is_best = jnp.arange(accuracy.size) == best
    poor = is_guessing(accuracy, num_classes)
    others = jnp.maximum(accuracy.size - 1, 1)
    mean = jnp.sum(jnp.where(is_best, 0, accuracy)) / others
    variance = jnp.sum(jnp.where(is_best, 0, (accuracy - mean) ** 2)) / others
    outlying = accuracy < mean - 1.5 * jnp.sqrt(variance)
    dropped = jnp.where(jnp.any(poor), poor, outlying)
    return jnp.where(dropped & ~is_best, 0.0, 1.0)


def _teaching_logits(outputs: Any) -> jax.Array:
    logits = logits_of(outputs)
    check_classes(logits)
    return logits


def _outputs(outputs: Any) -> jax.Array:
    """The array that an ensemble averages to predict; of one logit, or in regression, too."""
    array = logits_of(outputs)
    if not hasattr(array, "ndim"):
        raise TypeError(
            "models of an ensemble must return logits [batch, classes] or another array, got "
            f"{described(array)}."
        )
    return array


def _mean(model: Model, ensemble: Ensemble, read: Callable[[Any], jax.Array]) -> Teacher:
    total, weighted_sum = jnp.sum(ensemble.weights), _sum(model, ensemble, read)
    return lambda batch: weighted_sum(batch) / total


def _mean_of_all(
    models: Mapping[str, Model],
    ensembles: Mapping[str, Ensemble],
    read: Callable[[Any], jax.Array],
) -> Teacher:
    total = sum(jnp.sum(ensemble.weights) for ensemble in ensembles.values())
    sums = [_sum(models[name], ensemble, read) for name, ensemble in ensembles.items()]
    return lambda batch: sum(weighted_sum(batch) for weighted_sum in sums) / total


def _sum(model: Model, ensemble: Ensemble, read: Callable[[Any], jax.Array]) -> Teacher:
    """The sum of what `read` takes of the members' outputs, times their weights."""
    members, weights = jax.tree.map(jnp.asarray, ensemble)
    count = jnp.max(jnp.where(weights > 0, jnp.arange(1, weights.size + 1), 0))

    def outputs(batch: Batch, index: Any) -> jax.Array:
        member = jax.tree.map(lambda leaf: leaf[index], members)
        return read(model.apply(member, batch)[0])

    def weighted_sum(batch: Batch) -> jax.Array:
        shape = jax.eval_shape(lambda: outputs(batch, 0))

        def add(index: Any, total: jax.Array) -> jax.Array:
            weight = weights[index]
            # A member without weight may have diverged; 0 times infinity is not a number.
            return total + jnp.where(weight > 0, weight * outputs(batch, index), 0)

        dtype = jnp.promote_types(shape.dtype, weights.dtype)
        return jax.lax.fori_loop(0, count, add, jnp.zeros(shape.shape, dtype))

    return weighted_sum
