"""Places of batches, reading and passes over all examples, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core import batches


@given(step=st.integers(0, 5), size=st.integers(1, 6), count=st.integers(0, 20))
@settings(max_examples=50)
def test_places_are_those_of_a_slice(step, size, count):
    positions, rows, is_real = batches.places(step, size, count)
    expected = np.arange(step * size, (step + 1) * size)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(is_real, expected < count)
    np.testing.assert_array_equal(rows, np.clip(expected, 0, max(count - 1, 0)))


def test_all_passes_have_one_view_of_an_example():
    def preprocess(batch, key, positions):
        assert set(batch) == {"x"}
        draws = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n)))(positions)
        return {"x": batch["x"], "draw": draws}

    key = jax.random.key(3)
    columns, of_view = batches.one_view({"x": jnp.arange(5)}, preprocess, key)
    whole = batches.read(columns, jnp.arange(5), of_view, jax.random.key(0), jnp.arange(5))
    indices = jnp.array([4, 0, 4])
    part = batches.read(columns, indices, of_view, jax.random.key(1), jnp.arange(7, 10))
    expected = preprocess({"x": jnp.arange(5)}, key, jnp.arange(5))["draw"]
    assert whole["draw"].tolist() == expected.tolist()
    assert part["draw"].tolist() == expected[indices].tolist() and set(part) == {"x", "draw"}


def test_examples_are_read_with_their_places_and_a_key():
    columns = {"x": jnp.arange(10.0), "label": jnp.arange(10)}

    def preprocess(batch, key, positions):
        return batch | {"x": batch["x"] * 2 + positions, "draw": jax.random.uniform(key)}

    key = jax.random.key(3)
    batch = batches.read(columns, jnp.array([7, 7, 0]), preprocess, key, jnp.array([4, 5, 6]))
    assert batch["x"].tolist() == [18, 19, 6] and batch["label"].tolist() == [7, 7, 0]
    assert batch["draw"] == jax.random.uniform(key)


@pytest.mark.parametrize(
    ("preprocess", "message"),
    [
        (
            lambda batch, key, positions: batch["img"],
            r"^preprocess looks up 'img', .* are \['x'\]\.$",
        ),
        (
            lambda batch, key, positions: batch["x"],
            "^preprocess must return a batch, arrays by name",
        ),
        (
            lambda batch, key, positions: {"x": batch["x"][:1]},
            r"^preprocess must return as many .* column 'x' has shape \[1\] for 2 examples\.$",
        ),
    ],
)
def test_mistakes_in_preprocessing_are_one_line(preprocess, message):
    with pytest.raises((TypeError, ValueError), match=message):
        batches.read({"x": jnp.arange(3)}, jnp.arange(2), preprocess, None, jnp.arange(2))


@pytest.mark.parametrize("preprocess", [lambda batch: batch, lambda batch, key: batch, 3])
def test_preprocessing_has_three_arguments(preprocess):
    with pytest.raises(
        TypeError,
        match=r"^training.preprocess must be a function \(batch, key, positions\) -> batch, got",
    ):
        batches.check_preprocess("training.preprocess", preprocess)


@given(
    capacity=st.integers(1, 13),
    size=st.integers(1, 5),
    share=st.integers(0, 13),
    devices=st.integers(1, 3),
)
@settings(max_examples=30)
def test_every_example_is_asked_once(capacity, size, share, devices):
    """The outputs of devices add up; beyond the last batch there are zeros."""
    bound = min(share, capacity)
    parts = [
        batches.on_all(lambda p: jnp.stack([p + 1, p], -1), capacity, size, bound, devices, device)
        for device in range(devices)
    ]
    asked = min(capacity, -(-bound // (size * devices)) * size * devices)
    expected = np.zeros((capacity, 2))
    expected[:asked] = np.stack([np.arange(asked) + 1, np.arange(asked)], -1)
    np.testing.assert_array_equal(sum(parts), expected)
