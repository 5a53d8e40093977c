"""Crops, flips, normalisation and mixup; and that a part of a batch is augmented as in the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedcodist.core import keys
from fedcodist.core.inputs import Examples
from fedcodist.data import augmentation
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import batch_of_step

KEY = jax.random.key(9)


def _distinct_images(count, height=4, width=5, channels=2):
    """Every pixel of every image has its own value."""
    return np.arange(count * height * width * channels, dtype=np.float32).reshape(
        count, height, width, channels
    )


TRANSFORMS = {
    "crop": augmentation.random_crop(3, 4),
    "pad": augmentation.pad(1),
    "crop per batch": augmentation.per_batch(augmentation.random_crop(3, 4)),
    "centre crop": augmentation.centre_crop(2, 3),
    "horizontal flip": augmentation.random_horizontal_flip,
    "axis flip": augmentation.random_axis_flip,
    "normalise": augmentation.normalise([0.1, 0.2], [0.5, 2.0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_a_part_is_augmented_as_in_the_whole(transform):
    images, positions = _distinct_images(8), jnp.arange(8)
    whole = transform(images, KEY, positions)
    for part in (slice(0, 3), slice(3, 8)):
        np.testing.assert_array_equal(transform(images[part], KEY, positions[part]), whole[part])


def test_normalise():
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 2), np.uint8)
    result = augmentation.normalise([0.25, 0.5], [0.1, 2.0])(images, KEY, jnp.arange(3))
    expected = (images / 255 - np.array([0.25, 0.5])) / np.array([0.1, 2.0])
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    scaled = augmentation.normalise([0.0], [1.0], scale=16.0)(images, KEY, jnp.arange(3))
    np.testing.assert_allclose(scaled, images / 16, rtol=1e-6)


@pytest.mark.parametrize(
    ("mean", "deviation", "named"),
    [
        ((0.5,) * 3, (1.0,) * 3, "mean"),
        ((0.5,), (1.0,) * 3, "standard_deviation"),
        ((0.5,) * 2, (1.0,), "mean"),
        (np.zeros((4, 4, 3)), (1.0,), "mean"),
    ],
)
def test_normalising_never_changes_the_number_of_channels(mean, deviation, named):
    grey = jax.ShapeDtypeStruct((3, 4, 4, 1), np.uint8)
    transform = augmentation.normalise(mean, deviation)
    with pytest.raises(ValueError, match=rf"{named} must have .* of images \[4, 4, 1\]") as error:
        jax.eval_shape(transform, grey, KEY, jnp.arange(3))
    assert "\n" not in str(error.value)


def test_crops_are_windows_at_every_offset():
    count = 600
    image = _distinct_images(1)
    crops = np.asarray(
        augmentation.random_crop(3, 3)(np.repeat(image, count, 0), KEY, jnp.arange(count))
    )
    windows = {
        image[0, top : top + 3, left : left + 3].tobytes(): (top, left)
        for top in range(2)
        for left in range(3)
    }
    seen = [windows[crop.tobytes()] for crop in crops]
    counts = [seen.count(offset) for offset in windows.values()]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_crop_of_the_whole_image_changes_nothing():
    images = _distinct_images(3)
    np.testing.assert_array_equal(
        augmentation.random_crop(4, 5)(images, KEY, jnp.arange(3)), images
    )


def test_padding_is_a_black_border():
    images = _distinct_images(2) + 1
    result = np.asarray(augmentation.pad(2)(images, KEY, jnp.arange(2)))
    assert result.shape == (2, 8, 9, 2)
    np.testing.assert_array_equal(result[:, 2:-2, 2:-2], images)
    assert np.count_nonzero(result) == images.size


def test_a_batch_drawn_at_once_is_cropped_alike_and_each_batch_anew():
    images = np.repeat(_distinct_images(1), 20, 0)
    crop = augmentation.per_batch(augmentation.random_crop(3, 3))
    batches = [np.asarray(crop(images, jax.random.key(k), jnp.arange(20))) for k in range(10)]
    assert all((batch == batch[0]).all() for batch in batches)
    assert len({batch[0].tobytes() for batch in batches}) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: augmentation.normalise([0.5], [0.0]),
            "standard_deviation must be above 0, got 0.0",
        ),
        (lambda: augmentation.normalise([0.5], [-1]), "standard_deviation must be above 0, got -1"),
        (
            lambda: augmentation.normalise([0.5], ["1"]),
            "standard_deviation must be a number above 0",
        ),
        (lambda: augmentation.normalise([np.nan], [1.0]), "mean must be finite"),
        (lambda: augmentation.normalise([0.5], [1.0], scale=0), "scale must be above 0, got 0"),
        (lambda: augmentation.pad(-1), "amount must be at least 0, got -1"),
        (lambda: augmentation.random_crop(-1, 2), "height must be at least 1, got -1"),
        (lambda: augmentation.random_crop(2, 0), "width must be at least 1, got 0"),
        (lambda: augmentation.centre_crop(0, 2), "height must be at least 1, got 0"),
        (
            lambda: augmentation.centre_crop(2, 2.0),
            "width must be an integer of at least 1, got 2.0",
        ),
    ],
)
def test_numbers_are_checked_when_a_transform_is_made(make, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        make()


def test_centre_crop():
    images = _distinct_images(2, 6, 6, 1)
    result = augmentation.centre_crop(2, 4)(images, KEY, jnp.arange(2))
    np.testing.assert_array_equal(result, images[:, 2:4, 1:5])


@pytest.mark.parametrize(
    "transform",
    [
        augmentation.pad(1),
        augmentation.random_crop(2, 2),
        augmentation.centre_crop(2, 2),
        augmentation.random_horizontal_flip,
        augmentation.random_axis_flip,
    ],
)
def test_images_without_channels_are_refused(transform):
    with pytest.raises(ValueError, match=r"^images must be \[batch, .*, got \[4, 3, 3\]"):
        transform(jnp.zeros((4, 3, 3)), jax.random.key(0), jnp.arange(4))


@pytest.mark.parametrize("crop", [augmentation.centre_crop, augmentation.random_crop])
def test_a_window_that_is_too_large_is_refused(crop):
    with pytest.raises(ValueError, match=r"^images must be at least 4 x 3 .*, got 3 x 3"):
        crop(4, 3)(jnp.zeros((1, 3, 3, 1)), jax.random.key(0), jnp.arange(1))


def test_horizontal_flips_half_of_the_images():
    images = np.repeat(_distinct_images(1), 400, 0)
    result = np.asarray(augmentation.random_horizontal_flip(images, KEY, jnp.arange(400)))
    same = np.all(result == images, axis=(1, 2, 3))
    mirrored = np.all(result == images[:, :, ::-1], axis=(1, 2, 3))
    assert np.all(same ^ mirrored)
    assert 150 < same.sum() < 250


def test_axis_flips_are_none_horizontal_or_vertical():
    images = np.repeat(_distinct_images(1), 800, 0)
    result = np.asarray(augmentation.random_axis_flip(images, KEY, jnp.arange(800)))
    kinds = [
        np.all(result == version, axis=(1, 2, 3))
        for version in (images, images[:, :, ::-1], images[:, ::-1])
    ]
    counts = [int(kind.sum()) for kind in kinds]
    assert sum(counts) == 800
    assert stats.chisquare(counts, [400, 200, 200]).pvalue > 1e-4


def test_chains_give_each_transform_its_own_key():
    seen = []

    def record(images, key, positions):
        seen.append(jax.random.key_data(key).tolist())
        return images + 1

    preprocess = augmentation.image_preprocess(record, record, image="picture")
    batch = {"picture": jnp.zeros((2, 1, 1, 1)), "label": jnp.array([0, 1])}
    result = preprocess(batch, KEY, jnp.arange(2))
    np.testing.assert_array_equal(result["picture"], np.full((2, 1, 1, 1), 2.0))
    np.testing.assert_array_equal(result["label"], [0, 1])
    assert seen[0] != seen[1]
    np.testing.assert_array_equal(batch["picture"], np.zeros((2, 1, 1, 1)))


@settings(max_examples=20)
@given(st.floats(0, 1, width=32), st.integers(0, 1000))
def test_mixup_is_between_the_two(coefficient, seed):
    inputs, partners = np.random.default_rng(seed).normal(size=(2, 3, 4)).astype(np.float32)
    mixed = augmentation.mixup(inputs, partners, coefficient)
    np.testing.assert_allclose(mixed - partners, coefficient * (inputs - partners), atol=1e-5)


def test_mixup_at_its_ends():
    inputs, partners = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_array_equal(augmentation.mixup(inputs, partners, 1.0), inputs)
    np.testing.assert_array_equal(augmentation.mixup(inputs, partners, 0.0), partners)


def test_mixup_coefficients_are_beta_distributed():
    draw = jax.jit(jax.vmap(lambda key: augmentation.mixup_coefficient(key, 2.0)))
    coefficients = np.asarray(draw(jax.random.split(KEY, 2000)))
    assert stats.kstest(coefficients, stats.beta(2, 2).cdf).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 7, pytest.param(16, marks=pytest.mark.slow)])
def test_partners_are_a_permutation_of_the_whole_batch(size):
    """Inputs are unit vectors, so a mixed input shows both of its parts."""
    unlabelled = Examples({"image": jnp.eye(size)}, jnp.arange(size)[None])
    settings_ = Distillation(steps=1, batch_size=size)
    batch, mask = batch_of_step(unlabelled, 0, KEY, settings_, None)
    coefficient = augmentation.mixup_coefficient(keys.derive(KEY, "mixup"), 2.0)
    permutation = (np.asarray(batch["image"]) - coefficient * np.eye(size)) / (1 - coefficient)
    np.testing.assert_allclose(permutation, np.round(permutation), atol=1e-5)
    np.testing.assert_allclose(permutation.sum(0), np.ones(size), atol=1e-4)
    np.testing.assert_allclose(permutation.sum(1), np.ones(size), atol=1e-4)
    np.testing.assert_array_equal(mask, np.ones(size))
    if size > 1:
        assert not np.allclose(permutation, np.eye(size))


def test_partners_are_augmented_as_in_their_own_place():
    """Flips are decided before mixing: a partner appears as it does unmixed."""
    images = jnp.asarray(_distinct_images(6))
    unlabelled = Examples({"image": images}, jnp.arange(6)[None])
    preprocess = augmentation.image_preprocess(augmentation.random_axis_flip)
    settings_ = Distillation(steps=1, batch_size=6, preprocess=preprocess)
    mixed = np.asarray(batch_of_step(unlabelled, 0, KEY, settings_, None)[0]["image"])
    plain = np.asarray(
        batch_of_step(unlabelled, 0, KEY, settings_._replace(mixup_beta=0), None)[0]["image"]
    )
    coefficient = float(augmentation.mixup_coefficient(keys.derive(KEY, "mixup"), 2.0))
    partners = (mixed - coefficient * plain) / (1 - coefficient)
    matches = np.abs(partners[:, None] - plain[None]).max((2, 3, 4)) < 1e-2
    np.testing.assert_array_equal(matches.sum(0), np.ones(6))
    np.testing.assert_array_equal(matches.sum(1), np.ones(6))
    assert not np.allclose(plain, images)
