"""Students that are compared by more than their logits, such as by an embedding."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from quick_compilation import QUICK

from fedcodist.core.inputs import Examples
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.readout import Readout
from fedcodist.distillation.divergences import kl_divergence
from fedcodist.distillation.early_stopping import EarlyStopping, distill_until
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.weight_averaging import WeightAveraging, distill_averaged
from fedcodist.models.headed import embedding_of, headed

INPUTS, WIDTH, CLASSES = 4, 2, 3
STEPS, BATCH, EXAMPLES = 3, 5, 9
RATE, WEIGHT = 0.3, 0.7
STUDENT = headed(nn.Dense(WIDTH), jnp.zeros((1, INPUTS)), CLASSES)
TEACHER = headed(nn.Sequential([nn.Dense(5), nn.relu]), jnp.zeros((1, INPUTS)), CLASSES, WIDTH)
SETTINGS = Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0)
IMAGES = np.random.default_rng(0).normal(size=(EXAMPLES, INPUTS)).astype(np.float32)
INDICES = np.arange(STEPS * BATCH).reshape(STEPS, BATCH) % EXAMPLES
KL = kl_divergence("forward")


def start():
    return STUDENT.init(jax.random.key(1))


def embedding_and_logits(outputs):
    return {"embedding": embedding_of(outputs), "logits": outputs.logits}


def target_of_both(student, outputs):
    (of_teacher,) = outputs.values()
    return of_teacher | {"logits": jax.nn.softmax(of_teacher["logits"])}


def divergence_of_both(student, target):
    distance = jnp.mean((student["embedding"] - target["embedding"]) ** 2, axis=-1)
    return KL(student["logits"], target["logits"]) + WEIGHT * distance


def lesson(**options):
    """Arguments of `distill` with which the student learns the teacher's embedding and logits."""
    outputs_of = options.get("outputs_of", embedding_and_logits)
    return {
        "models": {"student": STUDENT},
        "students": {"student": start()},
        "teachers": {"teacher": frozen(TEACHER, TEACHER.init(jax.random.key(2)), outputs_of)},
        "targets": target_of_both,
        "unlabelled": Examples({"image": jnp.asarray(IMAGES)}, jnp.asarray(INDICES)),
        "key": jax.random.key(0),
        "learning_rates": {"student": RATE},
        "settings": SETTINGS,
        "divergence": divergence_of_both,
        "outputs_of": outputs_of,
        **options,
    }


@functools.cache
def reference():
    """(parameters, losses of steps) of a plain loop, with gradients by hand."""
    params = jax.tree.map(np.float64, start().params)
    teacher = TEACHER.apply(TEACHER.init(jax.random.key(2)), {"image": IMAGES})[0]
    wanted, losses = np.float64(embedding_of(teacher)), []
    probabilities = np.float64(jax.nn.softmax(teacher.logits))
    for indices in INDICES:
        images, target = np.float64(IMAGES[indices]), probabilities[indices]
        body, head = params["backbone"], params["head"]
        embedding = images @ body["kernel"] + body["bias"]
        logits = embedding @ head["kernel"] + head["bias"]
        log_student = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        gap = embedding - wanted[indices]
        kl = (target * (np.log(target) - log_student)).sum(-1)
        losses.append((kl + WEIGHT * (gap**2).mean(-1)).mean())
        of_logits = (np.exp(log_student) - target) / BATCH
        of_embedding = of_logits @ head["kernel"].T + WEIGHT * 2 * gap / WIDTH / BATCH
        gradient = {
            "backbone": {"kernel": images.T @ of_embedding, "bias": of_embedding.sum(0)},
            "head": {"kernel": embedding.T @ of_logits, "bias": of_logits.sum(0)},
        }
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
    return params, losses


def assert_close(found, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, found, expected)


# Arguments of each are those of `distill`; each ends with the student after all steps.
WAYS = {
    "all steps": distill,
    "early stopping": functools.partial(
        distill_until, EarlyStopping(lambda models: dict.fromkeys(models, 1.0), STEPS, STEPS)
    ),
    "weight averaging": functools.partial(distill_averaged, WeightAveraging(STEPS, 1), EXAMPLES),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_embedding_and_logits_are_a_plain_loop(way):
    found = jax.jit(lambda: WAYS[way](**lesson()), compiler_options=QUICK)()
    params, losses = reference()
    assert_close(found.students["student"].params, params)
    if way != "early stopping":
        assert_close(
            [found.first_loss["student"], found.last_loss["student"]], losses[:: STEPS - 1]
        )


def test_devices_that_share_a_batch_learn_the_same():
    """Three examples on one and two on the other, so that their parts have one of padding."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    on_devices = jax.shard_map(
        lambda: distill(**lesson(axis_name="clients")).students["student"].params,
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert_close(jax.jit(on_devices, compiler_options=QUICK)(), reference()[0])


@functools.cache
def _by_logits(**options):
    teacher = frozen(TEACHER, TEACHER.init(jax.random.key(2)))
    soft = lambda student, outputs: jax.nn.softmax(outputs["teacher"])
    common = {"teachers": {"teacher": teacher}, "targets": soft, "divergence": None}

    def run(key):
        learner = {"student": STUDENT.init(key)}
        return distill(**lesson(students=learner, outputs_of=logits_of) | common | options)

    return jax.jit(run, compiler_options=QUICK)


def _keep_logits(outputs):
    return outputs.logits


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_logits_are_the_default_to_the_bit(seed):
    key = jax.random.key(seed)
    expected = _default()(key)
    for found in (_by_logits()(key), _by_logits(outputs_of=_keep_logits, divergence=KL)(key)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.cache
def _default():
    """Without the argument, in `distill` and in `frozen`."""
    teacher = frozen(TEACHER, TEACHER.init(jax.random.key(2)))
    soft = lambda student, outputs: jax.nn.softmax(outputs["teacher"])

    def run(key):
        learner = {"student": STUDENT.init(key)}
        options = lesson(students=learner, teachers={"teacher": teacher}, targets=soft)
        del options["outputs_of"], options["divergence"]
        return distill(**options)

    return jax.jit(run, compiler_options=QUICK)


def _readout(outputs):
    return Readout(embedding_of(outputs), jnp.eye(WIDTH), jnp.zeros(WIDTH), jnp.ones(BATCH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"divergence": None},
            r"divergence must be given with outputs_of, got None: .* compare logits\.",
        ),
        (
            {"divergence": lambda student, target: (student["logits"] - target["logits"]) ** 2},
            r"divergence must return one number per example, \[5\], got \[5, 3\]\.",
        ),
        (
            {"divergence": lambda student, target: jnp.mean(student["logits"])},
            r"divergence must return one number per example, \[5\], got \[\]\.",
        ),
        (
            {"outputs_of": _readout},
            r"teacher 'teacher' must return arrays with outputs_of, got .*Readout: .*\.",
        ),
        (
            {"outputs_of": _readout, "teachers": {"teacher": lambda batch: batch["image"]}},
            r"outputs_of must return arrays for student 'student', got .*Readout: .*\.",
        ),
        # Of logits too: it would be summed over classes, or fit by chance.
        (
            {
                "outputs_of": logits_of,
                "targets": lambda student, outputs: outputs["teacher"],
                "divergence": lambda logits, target: (logits - target) ** 2,
            },
            r"divergence must return one number per example, \[5\], got \[5, 3\]\.",
        ),
    ],
)
def test_mistakes_are_one_line(options, message):
    if "teachers" in options:
        options = options | {"targets": lambda student, outputs: outputs["teacher"]}
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(lambda: distill(**lesson(**options)))
    assert re.fullmatch(message, str(raised.value))


def test_outputs_of_is_a_function():
    with pytest.raises(TypeError, match=r"outputs_of must be a function \(outputs\) -> .*'logits'"):
        distill(**lesson() | {"outputs_of": "logits"})
