"""Teachers whose outputs are computed once: what preprocessing may do to their examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from linear_model import linear_model

from fedcodist.core.batches import TARGET
from fedcodist.core.inputs import Examples
from fedcodist.distillation.cached_teacher import _check_not_random, cached_answers
from fedcodist.distillation.divergences import softened_target
from fedcodist.distillation.loop import distill, frozen
from fedcodist.distillation.settings import Distillation

MODEL = linear_model(4, 3)
IMAGES = np.random.default_rng(0).uniform(1, 2, size=(10, 4)).astype(np.float32)
ROWS = jnp.arange(10).reshape(2, 5)
SETTINGS = Distillation(steps=2, batch_size=5, mixup_beta=0)


def students(preprocess, is_cached, **others):
    """The student after two steps of learning from another model."""
    columns = jax.tree.map(jnp.asarray, {"image": IMAGES, **others})
    unlabelled = Examples(columns, ROWS)
    settings = SETTINGS._replace(preprocess=preprocess)
    teacher = frozen(MODEL, MODEL.init(jax.random.key(1)))
    if is_cached:
        unlabelled, teacher, settings = cached_answers(teacher, unlabelled, settings)
    return distill(
        {"student": MODEL},
        {"student": MODEL.init(jax.random.key(2))},
        {"teacher": teacher},
        lambda name, outputs: softened_target(outputs["teacher"], 1.0),
        unlabelled,
        jax.random.key(3),
        {"student": 0.1},
        settings,
    ).students


def test_answers_do_not_pass_through_preprocessing():
    """It returns the columns that it knows, and these may have any names."""

    def known(batch, key, positions):
        assert batch.keys() == {"image", "teacher"}
        return {"image": batch["image"] / 2, "teacher": batch["teacher"] + 1}

    found, expected = (students(known, cached, teacher=np.zeros(10)) for cached in (True, False))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)  # two programs
    jax.tree.map(close, found, expected)


def test_a_preprocessing_that_reads_positions_is_not_random():
    """Values are known if they are made while constants are computed; in a round they are traced."""

    def by_place(batch, key, positions):
        return {**batch, "image": batch["image"] + positions[:, None]}

    unlabelled = Examples({"image": jnp.asarray(IMAGES)}, ROWS)
    settings = SETTINGS._replace(preprocess=by_place)
    answered = lambda: cached_answers(lambda batch: batch["image"], unlabelled, settings)[0].columns
    assert jax.eval_shape(answered)[TARGET].shape == IMAGES.shape


def test_a_shard_map_that_is_not_compiled_tells_no_values():
    def check():
        _check_not_random(SETTINGS, {"image": jnp.zeros((2, 4))})
        return jnp.zeros(1)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    options = dict(mesh=mesh, in_specs=(), out_specs=PartitionSpec("devices"), check_vma=False)
    jax.shard_map(check, **options)()


def test_devices_share_their_answers():
    """Each answers every second batch: the last of three is not full, and no device has a fourth."""
    unlabelled = Examples({"image": jnp.asarray(IMAGES)}, ROWS)
    settings = SETTINGS._replace(batch_size=4)

    def answers(axis_name=None):
        teacher = lambda batch: batch["image"] ** 2
        examples, _, _ = cached_answers(teacher, unlabelled, settings, axis_name)
        return examples.columns[TARGET]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    shared = jax.shard_map(
        lambda: answers("devices")[None],
        mesh=mesh,
        in_specs=(),
        out_specs=PartitionSpec("devices"),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(shared)(), np.stack([IMAGES**2] * 2), rtol=1e-6)
    np.testing.assert_allclose(answers(), IMAGES**2, rtol=1e-6)


def test_a_preprocessing_that_is_seldom_random_is_noticed():
    """The whole batch is flipped with one key in twenty."""

    def seldom_flipped(batch, key, positions):
        sign = jnp.where(jax.random.bernoulli(key, 0.05), -1, 1)
        return {**batch, "image": batch["image"] * sign}

    unlabelled = Examples({"image": jnp.asarray(IMAGES)}, ROWS)
    with pytest.raises(ValueError, match="preprocess must not be random where answers are cached"):
        cached_answers(
            lambda batch: batch["image"],
            unlabelled,
            SETTINGS._replace(preprocess=seldom_flipped),
        )


@pytest.mark.parametrize("width", [1, 2, 3])
def test_examples_that_are_normalised_are_not_random(width):
    """Of the numbers 0 and 1 some rows have no deviation, and become NaN."""

    def normalised(batch, key, positions):
        centred = batch["image"] - batch["image"].mean(-1, keepdims=True)
        return {**batch, "image": centred / batch["image"].std(-1, keepdims=True)}

    unlabelled = Examples({"image": jnp.asarray(IMAGES[:, :width])}, ROWS)
    settings = SETTINGS._replace(preprocess=normalised)
    cached_answers(lambda batch: batch["image"], unlabelled, settings)

    def flipped(batch, key, positions):
        image = batch["image"] * jax.random.rademacher(key, ())
        return {**batch, "image": image}

    with pytest.raises(ValueError, match="preprocess must not be random where answers are cached"):
        cached_answers(
            lambda batch: batch["image"], unlabelled, SETTINGS._replace(preprocess=flipped)
        )
