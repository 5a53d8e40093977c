"""Codistillation in which pools' models match embeddings beside logits, against a plain loop."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick_compilation import QUICK

from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.algorithms.pools.codistillation import (
    TeachingHyper,
    codistill,
    codistillation_targets,
)
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.inputs import Examples, Inputs, Round
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.model import Variables
from fedcodist.distillation.divergences import kl_divergence
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.headed import embedding_of, headed

INPUTS, WIDTH, CLASSES, STEPS, BATCH = 4, 2, 3, 3, 5
BACKBONES = {"small": nn.Dense(3), "large": nn.Sequential([nn.Dense(6), nn.relu])}
MODELS = {
    name: headed(backbone, jnp.zeros((1, INPUTS)), CLASSES, WIDTH)
    for name, backbone in BACKBONES.items()
}
POOLS = {name: Pool(fed_avg(model), np.arange(3), 2) for name, model in MODELS.items()}
TEACHING = {
    "small": TeachingHyper(0.3, 1.0, 0.2, 1.5, 2.0, label_interpolation=0.25),
    "large": TeachingHyper(0.2, 1.0, 0.1, 1.0, 0.5),
}
DRAWS = np.random.default_rng(0)
COLUMNS = {
    "image": DRAWS.normal(size=(9, INPUTS)).astype(np.float32),
    "label": DRAWS.integers(0, CLASSES, 9).astype(np.int32),
}
INDICES = DRAWS.integers(0, 9, (STEPS, BATCH)).astype(np.int32)
KL = kl_divergence("forward")


@functools.cache
def starts():
    return {name: model.init(jax.random.key(i)) for i, (name, model) in enumerate(MODELS.items())}


def codistilled(**options):
    examples = Examples(jax.tree.map(jnp.asarray, COLUMNS), jnp.asarray(INDICES))
    round = Round(0, jax.random.key(0), Inputs({}, {UNLABELLED: examples}))
    settings, begin = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0), starts()
    run = lambda: codistill(POOLS, begin, round, TEACHING, settings, 10, **options)
    return jax.jit(run, compiler_options=QUICK)()


def other(student):
    (name,) = set(POOLS) - {student}
    return name


def with_embedding(soft, student, outputs):
    """The target of codistillation, and the other model's embedding."""
    logits = {name: logits_of(each) for name, each in outputs.items()}  # and the labels
    return soft(student, logits), embedding_of(outputs[other(student)])


def divergence_of_both(outputs, target):
    probabilities, embedding = target
    distance = jnp.sum((embedding_of(outputs) - embedding) ** 2, axis=-1)
    return KL(outputs.logits, probabilities) + distance


def reference(name):
    """A pool's student after a plain loop."""
    params, hyper, of_other = starts()[name].params, TEACHING[name], TEACHING[other(name)]
    for indices in INDICES:
        batch = {"image": COLUMNS["image"][indices]}
        apply = lambda pool, params, batch=batch: MODELS[pool].apply(Variables(params, {}), batch)[
            0
        ]
        own, teacher = (apply(pool, starts()[pool].params) for pool in (name, other(name)))
        share, labels = hyper.interpolation, hyper.label_interpolation or 0
        target = (1 - share) * jax.nn.softmax(teacher.logits / of_other.temperature)
        target += share * jax.nn.softmax(own.logits / hyper.self_teacher_temperature)
        target = (1 - labels) * target + labels * np.eye(CLASSES)[COLUMNS["label"][indices]]

        def loss(params, target=target, wanted=teacher.hidden[-1], apply=apply):
            outputs = apply(name, params)
            entropy = -jnp.sum(target * jax.nn.log_softmax(outputs.logits), -1)
            return jnp.mean(entropy + jnp.sum((outputs.hidden[-1] - wanted) ** 2, -1))

        gradient = jax.grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - hyper.learning_rate * g, params, gradient)
    return params


def test_embeddings_beside_logits_are_a_plain_loop():
    found = codistilled(
        targets=functools.partial(with_embedding, codistillation_targets(POOLS, TEACHING)),
        divergence=divergence_of_both,
        outputs_of=lambda outputs: outputs,
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for name in POOLS:
        jax.tree.map(close, found.students[name].params, reference(name))


def test_targets_are_those_of_logits_by_default():
    given = codistilled(targets=codistillation_targets(POOLS, TEACHING))
    jax.tree.map(np.testing.assert_array_equal, given, codistilled())


def test_targets_must_be_given_with_outputs_of():
    with pytest.raises(ValueError, match=r"^targets must be given with outputs_of, got None: "):
        codistilled(outputs_of=lambda outputs: outputs, divergence=divergence_of_both)
