"""Divergences besides the Kullback-Leibler divergence, one's own, and the loop that minimises them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_compilation import QUICK

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples
from fedcodist.distillation.divergences import (
    check_classes,
    jensen_shannon,
    kl_divergence,
    mean_squared_logits,
    softened,
    softened_target,
)
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation, check_distillation, divergence_of
from fedcodist.models.digits import MLP

SEEDS = st.integers(0, 2**31 - 1)
OURS = {"jensen_shannon": jensen_shannon, "mean_squared_logits": mean_squared_logits}
BOTH = pytest.mark.parametrize("name", OURS)


@functools.cache
def compiled(name):
    return jax.jit(OURS[name])


def random_logits(seed, scale=3.0):
    return (scale * np.random.default_rng(seed).normal(size=(4, 3))).astype(np.float32)


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    return shares / shares.sum(-1, keepdims=True)


@settings(max_examples=50)
@given(SEEDS, SEEDS, st.floats(0.1, 5))
def test_jensen_shannon_is_the_formula(seed, other, scale):
    logits, target = random_logits(seed, scale), softmax(random_logits(other))
    p, q = softmax(logits), target
    middle = (p + q) / 2
    expected = (np.sum(p * np.log(p / middle), -1) + np.sum(q * np.log(q / middle), -1)) / 2
    found = np.asarray(compiled("jensen_shannon")(logits, q.astype(np.float32)))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    assert np.all((found >= -1e-6) & (found <= np.log(2) + 1e-6))


@settings(max_examples=50)
@given(SEEDS, SEEDS, st.floats(0.1, 5))
def test_jensen_shannon_does_not_know_who_teaches(seed, other, scale):
    first, second = random_logits(seed, scale), random_logits(other)
    swap = compiled("jensen_shannon")
    np.testing.assert_allclose(
        swap(first, jax.nn.softmax(second)), swap(second, jax.nn.softmax(first)), atol=1e-5
    )


@settings(max_examples=50)
@given(SEEDS, SEEDS, st.floats(0.1, 5))
def test_mean_squared_logits_is_the_formula(seed, other, scale):
    """Of one teacher's softmax: the mean squared difference of centred logits."""
    student, teacher = random_logits(seed, scale), random_logits(other)
    centred = lambda z: z - z.mean(-1, keepdims=True)
    expected = np.mean((centred(student) - centred(teacher)) ** 2, -1)
    found = compiled("mean_squared_logits")(student, jax.nn.softmax(teacher))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_scaled_by_the_temperature_squared_the_temperature_does_not_matter():
    student, teacher = random_logits(0), random_logits(1)
    at = lambda t: softened(mean_squared_logits, t, True)(student, softened_target(teacher, t))
    np.testing.assert_allclose(at(5.0), at(1.0), rtol=1e-4)


@BOTH
@settings(max_examples=30)
@given(SEEDS, st.floats(-50, 50, width=32))
def test_zero_between_equals_and_blind_to_a_constant(name, seed, constant):
    logits = np.clip(random_logits(seed), -3, 3)
    divergence, target = compiled(name), jax.nn.softmax(logits)
    np.testing.assert_allclose(divergence(logits, target), 0, atol=1e-6)
    np.testing.assert_allclose(divergence(logits + constant, target), 0, atol=1e-4)
    assert np.all(divergence(logits + np.array([0.5, 0, 0], np.float32), target) > 1e-7)


@BOTH
@pytest.mark.parametrize("gap", [50.0, 110.0, 1000.0])
def test_exact_zeros_are_finite(name, gap):
    """Where a student, or a target, is so sure that its other probabilities are 0 in float32."""
    for logits, target in (
        ([0.0, gap, -3.0], [0.2, 0.5, 0.3]),
        ([0.5, -1.0, 2.0], [1.0, 0.0, 0.0]),
    ):
        value, gradient = jax.value_and_grad(
            lambda z, t=target: jnp.sum(OURS[name](z, jnp.array(t)))
        )(jnp.array(logits))
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))


# In the loop.

MODEL = from_flax_linen(MLP(hidden=(5,), classes=3), np.zeros((1, 6), np.float32))
STEPS, BATCH, RATE = 3, 4, 0.1
IMAGES = np.random.default_rng(3).normal(size=(STEPS * BATCH, 6)).astype(np.float32)


def own(logits, target):
    """One's own: the squared distance of probabilities, Brier's score."""
    return jnp.sum((jax.nn.softmax(logits) - target) ** 2, axis=-1)


def distilled(divergence):
    init = jax.jit(MODEL.init, compiler_options=QUICK)
    student, teacher = init(jax.random.key(0)), init(jax.random.key(1))
    indices = jnp.arange(STEPS * BATCH).reshape(STEPS, BATCH)
    result = jax.jit(
        lambda: distill(
            {"a": MODEL},
            {"a": student},
            {"b": frozen(MODEL, teacher)},
            lambda _, logits: softened_target(logits["b"], 1.0),
            Examples({"image": jnp.asarray(IMAGES)}, indices),
            jax.random.key(2),
            {"a": RATE},
            Distillation(STEPS, BATCH, optax.sgd, mixup_beta=0, divergence=divergence),
        ),
        compiler_options=QUICK,
    )()
    return student, teacher, result


@pytest.mark.parametrize("divergence", [*OURS, own], ids=lambda one: getattr(one, "__name__", one))
def test_the_loop_is_plain_gradient_descent(divergence):
    student, teacher, result = distilled(divergence)
    function = OURS.get(divergence, divergence)
    logits_of = lambda params, x: MODEL.apply(student._replace(params=params), {"image": x})[0]
    params = student.params
    for images in IMAGES.reshape(STEPS, BATCH, 6):
        target = jax.nn.softmax(logits_of(teacher.params, images))
        loss = lambda p, x=images, t=target: jnp.mean(function(logits_of(p, x), t))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(loss)(params))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, result.students["a"].params, params)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, student.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_kl_is_what_there_was():
    logits, target = random_logits(0), softmax(random_logits(1)).astype(np.float32)
    for direction in ("forward", "reverse"):
        found = divergence_of(Distillation(1, direction=direction))(logits, target)
        np.testing.assert_array_equal(found, kl_divergence(direction)(logits, target))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(divergence="l1"), r"distillation\.divergence must be one of .*, got 'l1'"),
        (dict(divergence=3), r"distillation\.divergence must be one of .*, got 3"),
        (
            dict(divergence="jensen_shannon", direction="reverse"),
            r"direction must be 'forward' where",
        ),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        check_distillation(Distillation(1, 1, optax.sgd, **options), 5)


def test_ones_own_must_return_a_number_per_example():
    with pytest.raises(
        ValueError, match=r"one number per example, \[4\] for logits \[4, 3\], got \[\]"
    ):
        distilled(lambda logits, target: jnp.mean((logits - target) ** 2))


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_numbers_per_example_teach_nothing(shape):
    with pytest.raises(ValueError, match=r"must return logits \[\.\.\., classes\] of at least two"):
        check_classes(jnp.zeros(shape))
    check_classes(jnp.zeros((4, 2)))
