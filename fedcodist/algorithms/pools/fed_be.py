"""FedBE: clients' models, their average and models sampled around them teach the averaged model.

"FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning" (Chen, Chao, 2021).
https://arxiv.org/abs/2009.01974
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.pool import (
    Pool,
    check_class_counts,
    check_no_methods,
    check_pools,
    check_sends_models,
)
from fedcodist.algorithms.pools.pool_rounds import set_models, train_pools, update_servers
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.distillation.cached_teacher import cached_answers
from fedcodist.distillation.ensembles import (
    ENSEMBLE,
    Ensemble,
    concatenated,
    dirichlet_samples,
    equal_weights,
    gaussian_samples,
    mean_probabilities,
)
from fedcodist.distillation.loop import distill
from fedcodist.distillation.settings import Distillation, check_distillation, divergence_of
from fedcodist.distillation.unlabelled_batches import UNLABELLED, unlabelled_indices
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged

PyTree = Any
SAMPLINGS = ("gaussian", "dirichlet")


class FedBEHyper(NamedTuple):
    """Floats of FedBE; traced.

    Attributes:
      learning_rate: of the distillation's optimizer.
      temperature: T; the mean probabilities p become p^(1/T), normalised. Below 1 this sharpens them.
      methods: pool -> the hyper-parameters of its method; `fed_be` puts the pools' own here.
    """

    learning_rate: Any = 1e-3
    temperature: Any = 0.5
    methods: Mapping[str, PyTree] = {}


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
    hyper: FedBEHyper = FedBEHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """In every round a Bayesian ensemble of all pools' models teaches the pools' averaged models.

    A pool's teachers are its average, its clients' models and models sampled around them. The target is
    the mean of the probabilities of all pools' teachers, sharpened: p^(1/T), normalised. Students start
    from their pool's average. The mean of a student's parameters over steps (SWA) replaces the model. As
    in the authors' code, the loss is KL divided by the number of classes.

    Args:
      pools: name -> Pool, one architecture each; the paper has one.
      columns: the federated data's columns, for counting bytes.
      num_unlabelled: number of examples of the data set `unlabelled`, see `resident_data`.
      distillation: steps (20 epochs of 10,000 images; 0: no distillation), batch size, optimizer. No
        augmentation is possible, since the ensemble predicts only once per round: all unlabelled images
        that are on the device, or the round's images if they are streamed.
      sampling: 'gaussian' or 'dirichlet', see `fedcodist.distillation.ensembles`.
      samples: S, models sampled for each pool.
      with_clients: whether clients' models are among the teachers.
      averaging: at which steps the student's parameters are averaged; None: only the last is used.
      hyper: learning rate and temperature T > 0 of the distillation.
      execution: how clients are executed.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_be, locals())
    pools = check_pools(pools)
    check_class_counts(pools)
    check_sends_models(pools)
    check_distillation(distillation, num_unlabelled)
    _check_fed_be(distillation, sampling, samples, averaging, hyper)
    check_no_methods("methods", hyper.methods)
    if len(pools) == 1 and not samples and not with_clients:
        raise ValueError(
            "samples must be at least 1 with one pool and with_clients=False: its average would be its "
            "own only teacher."
        )
    teach = distill
    if averaging is not None:
        teach = functools.partial(distill_averaged, averaging, num_unlabelled)
    models = {name: pool.method.model for name, pool in pools.items()}
    classes = next(iter(models.values())).num_classes
    divergence = divergence_of(distillation)

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {UNLABELLED: unlabelled_indices(key, round, distillation, num_unlabelled)}

    def round_(
        state: dict[str, PyTree], client_states: PyTree, round: Round, hyper: FedBEHyper
    ) -> tuple[dict[str, PyTree], PyTree, dict[str, jax.Array]]:
        # Clients train, and each pool's server averages their models.
        received = {name: pool.method.variables(state[name]) for name, pool in pools.items()}
        trained = train_pools(
            pools, state, client_states, round, hyper.methods, execution, members=True
        )
        state = update_servers(pools, state, trained.aggregates, round.index, hyper.methods)
        if distillation.steps == 0:
            return state, trained.client_states, trained.metrics
        averages = {name: pool.method.variables(state[name]) for name, pool in pools.items()}

        # The teachers: sampled models, the average and the clients' models.
        draw = keys.derive(round.key, "samples", round.index)
        ensembles = {
            name: _ensemble(
                averages[name],
                trained.members[name] if with_clients else None,
                _sampled(
                    keys.derive(draw, name),
                    received[name],
                    trained.members[name],
                    sampling,
                    samples,
                ),
            )
            for name in pools
        }

        # The ensemble's target, the sharpened mean probabilities, is computed once per round.
        unlabelled, answers, settings = cached_answers(
            lambda batch: sharpened(mean_of_all(models, ensembles, batch), hyper.temperature),
            round.inputs.examples[UNLABELLED],
            distillation,
            round.axis_name,
        )

        # Students start from the averages; their mean over steps (SWA) replaces the models.
        students = teach(
            models=models,
            students=averages,
            teachers={ENSEMBLE: answers},
            targets=lambda _, outputs: outputs[ENSEMBLE],
            unlabelled=unlabelled,
            key=keys.derive(round.key, "distillation", round.index),
            learning_rates=dict.fromkeys(pools, hyper.learning_rate),
            settings=settings,
            axis_name=round.axis_name,
            divergence=lambda logits, target: divergence(logits, target) / classes,
        ).students
        return set_models(pools, state, students), trained.client_states, trained.metrics

    hyper = hyper._replace(methods={name: pool.method.hyper for name, pool in pools.items()})
    data_set_sizes = {UNLABELLED: num_unlabelled}
    return assemble("fed_be", pools, columns, hyper, round_, select_examples, data_set_sizes)


def _sampled(
    key: jax.Array, received: Variables, members: Variables, sampling: str, samples: int
) -> Variables | None:
    """Models sampled around those of a pool's clients, leaves [samples, ...]; None for no samples."""
    if not samples:
        return None
    if sampling == "gaussian":
        return gaussian_samples(key, received, members, samples)
    return dirichlet_samples(key, members, samples)


def _ensemble(average: Variables, *others: Variables | None) -> Ensemble:
    """A pool's teachers: its average, and others of leaves [members, ...]."""
    models = [jax.tree.map(lambda leaf: leaf[None], average), *others]
    return concatenated(*(equal_weights(members) for members in models if members is not None))


def mean_of_all(
    models: Mapping[str, Model], ensembles: Mapping[str, Ensemble], batch: Mapping[str, jax.Array]
) -> jax.Array:
    """The unweighted mean probabilities [batch, classes] over the teachers of all pools."""
    count = sum(ensemble.weights.size for ensemble in ensembles.values())
    shares = [
        ensemble.weights.size / count * mean_probabilities(models[name], ensemble)(batch)
        for name, ensemble in ensembles.items()
    ]
    return jnp.sum(jnp.stack(shares), axis=0)


def sharpened(probabilities: jax.Array, temperature: Any) -> jax.Array:
    """p^(1/T), normalised over the last axis; p itself at T = 1."""
    tiny = jnp.finfo(probabilities.dtype).tiny
    return jax.nn.softmax(jnp.log(jnp.maximum(probabilities, tiny)) / temperature)


def _check_fed_be(
    distillation: Distillation,
    sampling: str,
    samples: int,
    averaging: WeightAveraging | None,
    hyper: FedBEHyper,
) -> None:
    check_integer("samples", samples, low=0)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    check_choice("sampling", sampling, SAMPLINGS)
    if distillation.mixup_beta > 0:
        raise ValueError("distillation.mixup_beta must be 0: mixed images differ every time.")
    if averaging is None:
        return
    check_integer("averaging.start", averaging.start, low=1)
    check_integer("averaging.every", averaging.every, low=1)
    if averaging.start > distillation.steps > 0:
        raise ValueError(
            f"averaging.start must be at most distillation.steps={distillation.steps}, got "
            f"{averaging.start}."
        )
