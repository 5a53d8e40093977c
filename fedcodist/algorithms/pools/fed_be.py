"""FedBE (Chen and Chao, 2021): models sampled around the clients', beside theirs, teach their mean."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.pools.pool import (
    Pool,
    assemble,
    check_class_counts,
    check_client_models,
    check_pools,
    train_pools,
    update_servers,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.distillation.cached_teacher import cached_answers
from fedcodist.distillation.ensembles import (
    Ensemble,
    concatenated,
    dirichlet_samples,
    equal_weights,
    gaussian_samples,
    mean_probabilities,
)
from fedcodist.distillation.loop import (
    UNLABELLED,
    Distillation,
    check_distillation,
    distill,
    kl_divergence,
    unlabelled_rows,
)
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged

PyTree = Any
ENSEMBLE = "ensemble"
SAMPLINGS = ("gaussian", "dirichlet")


class FedBEHyper(NamedTuple):
    """Floats of FedBE; traced.

    Attributes:
      methods: pool -> the hyper-parameters of its method.
      learning_rate: of the distillation's optimizer.
      temperature: T, to the inverse of which the mean of probabilities is raised; below 1 it sharpens.
    """

    methods: Mapping[str, PyTree]
    learning_rate: Any = 1e-3
    temperature: Any = 0.5


def momentum_with_decay(rate: Any) -> optax.GradientTransformation:
    """SGD with momentum 0.9 and weight decay 1e-5, FedBE's optimizer of the student."""
    return optax.chain(optax.add_decayed_weights(1e-5), optax.sgd(rate, momentum=0.9))


def fed_be(
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    num_unlabelled: int,
    distillation: Distillation = Distillation(1560, 128, momentum_with_decay, mixup_beta=0),
    sampling: str = "gaussian",
    samples: int = 10,
    with_clients: bool = True,
    averaging: WeightAveraging | None = WeightAveraging(),
    learning_rate: float = 1e-3,
    temperature: float = 0.5,
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """Every round a Bayesian ensemble around each pool's models teaches the pools' averaged models.

    The teachers are a pool's average, its clients' models and models sampled around them. The target is
    the mean of all pools' teachers' probabilities, sharpened: p^(1/T), normalised. Students start from
    their pool's average, and the mean of the students on their way (SWA) replaces the model. The loss
    is the authors' code's, KL divided by the number of classes.

    Args:
      pools: name -> Pool, one architecture each; the paper has one.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: rows of the data set `unlabelled`, see `resident_data`.
      distillation: steps (20 epochs of 10,000 images; 0 leave it out), batch size, optimizer; no
        augmentation, since the ensemble answers once a round: all unlabelled images that are on the
        device, or the round's own where they are streamed.
      sampling: 'gaussian' or 'dirichlet', see `fedcodist.distillation.ensembles`.
      samples: S, models sampled for each pool.
      with_clients: whether clients' models are among the teachers.
      averaging: which of the student's models are averaged; the last one alone for None.
      learning_rate: of the distillation's optimizer.
      temperature: T > 0.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(fed_be, locals())
    pools = check_pools(pools)
    models = {name: pool.method.model for name, pool in pools.items()}
    check_class_counts(pools)
    check_client_models(pools)
    check_distillation(distillation, num_unlabelled)
    check_integer("samples", samples, low=0)
    check_number("learning_rate", learning_rate, low=0)
    check_number("temperature", temperature, above=0)
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}.")
    if distillation.mixup_beta > 0:
        raise ValueError("distillation.mixup_beta must be 0: mixed images differ every time.")
    if averaging is not None:
        check_integer("averaging.start", averaging.start, low=1)
        check_integer("averaging.every", averaging.every, low=1)
        if averaging.start > distillation.steps > 0:
            raise ValueError(
                f"averaging.start must be at most distillation.steps={distillation.steps}, got "
                f"{averaging.start}."
            )
    teach = distill
    if averaging is not None:
        teach = functools.partial(distill_averaged, averaging, num_unlabelled)
    methods = {name: pool.method.hyper for name, pool in pools.items()}
    classes = next(iter(models.values())).num_classes
    divergence = kl_divergence(distillation.direction)

    def ensemble(key, received, average, members) -> Ensemble:
        parts = [equal_weights(jax.tree.map(lambda leaf: leaf[None], average))]
        if with_clients:
            parts.append(equal_weights(members))
        if samples and sampling == "gaussian":
            parts.append(equal_weights(gaussian_samples(key, received, members, samples)))
        elif samples:
            parts.append(equal_weights(dirichlet_samples(key, members, samples)))
        return concatenated(*parts)

    def select_examples(round, key):
        return {UNLABELLED: unlabelled_rows(key, round, distillation, num_unlabelled)}

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        received = {name: pool.method.variables(state[name]) for name, pool in pools.items()}
        trained = train_pools(
            pools,
            state,
            client_states,
            round,
            hyper.methods,
            execution,
            members=True,
        )
        state = update_servers(pools, state, trained.aggregates, round.index, hyper.methods)
        if distillation.steps == 0:
            return state, trained.client_states, trained.metrics
        averages = {name: pool.method.variables(state[name]) for name, pool in pools.items()}
        draw = keys.derive(key, "samples", round.index)
        found = {
            name: ensemble(
                keys.derive(draw, name), received[name], averages[name], trained.members[name]
            )
            for name in pools
        }

        def teacher(batch):
            count = sum(each.weights.size for each in found.values())
            shares = [
                each.weights.size / count * jnp.exp(mean_probabilities(models[name], each)(batch))
                for name, each in found.items()
            ]
            return sharpened(jnp.sum(jnp.stack(shares), axis=0), hyper.temperature)

        unlabelled, answers = cached_answers(
            teacher, inputs.examples[UNLABELLED], distillation, axis_name
        )
        students = teach(
            models=models,
            students=averages,
            teachers={ENSEMBLE: answers},
            targets=lambda _, outputs: outputs[ENSEMBLE],
            unlabelled=unlabelled,
            key=keys.derive(key, "distillation", round.index),
            learning_rates=dict.fromkeys(pools, hyper.learning_rate),
            settings=distillation,
            axis_name=axis_name,
            divergence=lambda logits, target: divergence(logits, target) / classes,
        ).students
        state = {
            name: pool.method.set_model(state[name], students[name], reset_optimizer=False)
            for name, pool in pools.items()
        }
        return state, trained.client_states, trained.metrics

    hyper = FedBEHyper(methods, learning_rate, temperature)
    data_set_sizes = {UNLABELLED: num_unlabelled}
    return assemble("fed_be", pools, columns, hyper, round_, select_examples, data_set_sizes)


def sharpened(probabilities: jax.Array, temperature: Any) -> jax.Array:
    """p^(1/T), normalised over the last axis; p itself at T = 1."""
    tiny = jnp.finfo(probabilities.dtype).tiny
    return jax.nn.softmax(jnp.log(jnp.maximum(probabilities, tiny)) / temperature)
