"""Drawing candidates: which, how often, by which key, and titles in place of numbers."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.text.candidates import all_candidates, sampled_candidates

pytestmark = pytest.mark.usefixtures("compile_quickly")
TITLES = np.arange(40)[:, None] * np.ones(3, np.int32)  # title n is [n, n, n]
WIDTH, NEGATIVES = 7, 4
DRAW = jax.jit(sampled_candidates(TITLES, NEGATIVES))


def batch_of(others):
    padded = np.zeros((len(others), WIDTH), np.uint16)
    for row, own in zip(padded, others, strict=True):
        row[: len(own)] = own
    clicked = np.arange(31, 31 + len(others), dtype=np.uint16)
    history = np.tile(np.array([5, 0], np.uint16), (len(others), 1))
    return {"clicked": clicked, "others": padded, "history": history, "client": clicked}


@settings(max_examples=40)
@given(
    st.lists(st.sets(st.integers(1, 30), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_the_clicked_one_and_others_without_replacement(others, seed):
    others = [sorted(own) for own in others]
    batch = DRAW(batch_of(others), jax.random.key(seed), jnp.arange(3))
    assert batch["candidates"].shape == (3, 1 + NEGATIVES, 3)
    assert set(batch) == {"candidates", "history", "label", "client"}
    for row, own in enumerate(others):
        candidates = batch["candidates"][row, :, 0].tolist()
        assert candidates.pop(batch["label"][row]) == 31 + row
        times = Counter(candidates)
        assert set(times) <= set(own) and len(times) == min(len(own), NEGATIVES)
        assert max(times.values()) - min(times.values()) <= 1
    np.testing.assert_array_equal(batch["history"][..., 0], [[5, 0]] * 3)


def test_every_place_and_every_other_is_as_likely():
    batch = batch_of([range(1, 7)] * 2000)
    batch["clicked"][:] = 31
    drawn = DRAW(batch, jax.random.key(0), jnp.arange(2000))
    places = np.bincount(drawn["label"], minlength=5) / 2000
    np.testing.assert_allclose(places, 1 / 5, atol=0.04)
    times = np.bincount(np.asarray(drawn["candidates"][..., 0]).reshape(-1), minlength=32)[1:7]
    np.testing.assert_allclose(times / 2000, NEGATIVES / 6, atol=0.04)


def test_draws_depend_on_key_and_position_alone():
    """A batch that is sharded over devices has the same candidates as on one."""
    batch = batch_of([range(1, 8)] * 6)
    whole = DRAW(batch, jax.random.key(3), jnp.arange(6))
    half = {name: column[3:] for name, column in batch.items()}
    for name, column in DRAW(half, jax.random.key(3), jnp.arange(3, 6)).items():
        np.testing.assert_array_equal(column, whole[name][3:])
    other = DRAW(batch, jax.random.key(4), jnp.arange(6))
    assert (other["candidates"] != whole["candidates"]).any()


def test_evaluation_has_all_candidates():
    batch = {
        "candidates": np.array([[4, 2, 0]]),
        "history": np.array([[7, 0]]),
        "label": np.array([[0, 1, -1]], np.int8),
    }
    found = all_candidates(TITLES)(batch, jax.random.key(0), jnp.arange(1))
    np.testing.assert_array_equal(found["candidates"], TITLES[[[4, 2, 0]]])
    np.testing.assert_array_equal(found["history"], TITLES[[[7, 0]]])
    assert found["candidates"].dtype == jnp.int32 and found["label"] is batch["label"]


def test_a_number_of_negatives_below_one_is_one_line():
    with pytest.raises(ValueError, match="negatives must be at least 1, got 0"):
        sampled_candidates(TITLES, 0)
