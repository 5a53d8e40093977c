"""Clients with noise of another level, or with rotated images."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import FederatedData, feature_noise, feature_rotation
from fedcodist.data.client_pools import capacity_pools


def clients_of(images, count=4):
    labels = np.arange(len(images))
    offsets = np.linspace(0, len(images), count + 1).astype(int)
    return FederatedData.from_arrays({"image": images, "label": labels}, offsets=offsets)


def greys(value=128, dtype=np.uint8, shape=(400, 5, 5, 1)):
    return np.full(shape, value, dtype)


@pytest.mark.parametrize(("dtype", "value", "scale"), [(np.float32, 0.5, 1), (np.uint8, 128, 255)])
def test_the_noise_of_client_i_has_the_deviation_sigma_i_over_n(dtype, value, scale):
    data = clients_of(greys(value, dtype))
    noised = feature_noise(data, 0.1, seed=0)
    assert noised.columns["image"].dtype == dtype
    for index in range(4):
        noise = (noised.client(index)["image"].astype(float) - value) / scale
        # 2,500 values: the deviation's standard error is 1.4 %, the mean's 2 % of the deviation.
        np.testing.assert_allclose(noise.std(), 0.1 * (index + 1) / 4, rtol=0.08)
        np.testing.assert_allclose(noise.mean(), 0, atol=0.01)
    np.testing.assert_array_equal(noised.columns["label"], data.columns["label"])
    np.testing.assert_array_equal(data.columns["image"], greys(value, dtype))


def test_integers_stay_within_the_scale():
    noised = feature_noise(clients_of(greys(16)), 5.0, seed=0, scale=16.0).columns["image"]
    assert noised.min() == 0 and noised.max() == 16


def test_noise_depends_on_the_seed_and_the_client_alone():
    data = clients_of(greys())
    first, again, other = (feature_noise(data, 0.1, seed).columns["image"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(feature_noise(data, 0, 0).columns["image"], greys())
    levels = [feature_noise(data, 0.1, 0).client(index)["image"] for index in (2, 3)]
    assert (levels[0] != levels[1]).any()


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_each_client_has_one_rotation_and_groups_are_even(num_clients, rotations, seed):
    images = np.random.default_rng(0).integers(0, 256, (num_clients * 2, 3, 3, 2), np.uint8)
    data = clients_of(images, num_clients)
    rotated = feature_rotation(data, rotations, seed)
    angles = (0, 2) if rotations == 2 else range(rotations)
    members = dict.fromkeys(angles, 0)
    for index in range(num_clients):
        before, after = data.client(index)["image"], rotated.client(index)["image"]
        fits = [a for a in angles if np.array_equal(np.rot90(before, a, (1, 2)), after)]
        assert len(fits) == 1
        members[fits[0]] += 1
    assert max(members.values()) - min(members.values()) <= 1
    again = feature_rotation(data, rotations, seed)
    np.testing.assert_array_equal(again.columns["image"], rotated.columns["image"])


def test_groups_of_rotations_are_drawn():
    data = clients_of(np.random.default_rng(0).integers(0, 256, (40, 3, 3, 1), np.uint8), 40)
    drawn = {feature_rotation(data, 4, seed).columns["image"].tobytes() for seed in range(5)}
    assert len(drawn) == 5


def test_rotations_do_not_depend_on_a_pool_of_the_same_seed():
    """Of 20 clients, 5 have each rotation. A pool of two has any of the four."""
    upright = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    data = clients_of(np.repeat(upright, 20, axis=0), 20)
    found = set()
    for seed in range(40):
        images = feature_rotation(data, 4, seed).columns["image"]
        large = capacity_pools(20, 0.1, seed)["large"]
        found |= {images[data.offsets[client]].tobytes() for client in large}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("integers", "scale"),
    [
        (np.array([0, 1000], np.int32), 255),
        (np.array([-5, 7], np.int16), 255),
        (np.array([3, 128], np.uint8), 16),
    ],
)
def test_integers_that_would_be_clipped_without_noise_are_refused(integers, scale):
    """However small sigma is, 1000 would become 255."""
    data = clients_of(integers, count=2)
    message = (
        rf"^scale must be .*, got scale {scale} and integers from {integers[0]} to {integers[1]}$"
    )
    with pytest.raises(ValueError, match=message):
        feature_noise(data, 1e-6, 0, scale=scale)
    kept = feature_noise(data, 0, 0, scale=scale)
    np.testing.assert_array_equal(kept.columns["image"], integers)


WIDE = clients_of(greys(shape=(8, 4, 5, 1)))
FLAT = FederatedData.from_arrays(
    {"image": np.zeros((4, 3)), "text": np.array(list("abcd"))}, offsets=[0, 4]
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: feature_noise(WIDE, -0.1, 0), "sigma must be at least 0, got -0.1"),
        (
            lambda: feature_noise(WIDE, 0.1, 0, "pixels"),
            r"column must be one of \['image', 'label'\]",
        ),
        (lambda: feature_noise(FLAT, 0.1, 0, "text"), "column 'text' must be numbers, got <U1"),
        (
            lambda: feature_noise(WIDE, 0.1, 0, scale=300),
            "scale must be a value that uint8 can hold",
        ),
        (lambda: feature_noise({"image": 1}, 0.1, 0), "data must be FederatedData, got dict"),
        (lambda: feature_rotation(WIDE, 5, 0), "rotations must be at most 4, got 5"),
        (
            lambda: feature_rotation(WIDE, 4, 0),
            r"rotations must be at most 2 for images .* \[4, 5, 1\]",
        ),
        (lambda: feature_rotation(FLAT, 2, 0), r"column 'image' must be images .* got \[4, 3\]"),
    ],
)
def test_bad_arguments_are_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
    assert feature_rotation(WIDE, 2, 0).num_examples == 8  # half turns need no square
