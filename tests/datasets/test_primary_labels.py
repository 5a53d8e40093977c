"""Primary-label skew: which clients get which labels, how often, and accuracies on a client's labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.primary_labels import (
    accuracy_on_labels,
    client_shares,
    even_primary_labels,
    label_frequencies,
    primary_label_skew,
    random_primary_labels,
)

MANY = np.random.default_rng(0).integers(0, 20, 40_000)


@settings(max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from((0, 0.5, 100, 1e9, np.inf)),
    st.integers(0, 99),
)
def test_every_row_is_dealt_once_and_never_to_the_wrong_client(labels, clients, own, skew, seed):
    own = min(own, labels)
    primary = random_primary_labels(labels, clients, own, seed)
    assert primary.shape == (clients, labels) and (primary.sum(axis=1) == own).all()
    rows = np.random.default_rng(seed).integers(0, labels, 300)
    try:
        parts = primary_label_skew(rows, primary, skew, seed)
    except ValueError as error:
        assert "gets no example" in str(error)
        return
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(300))
    again = primary_label_skew(rows, primary, skew, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if skew >= 1e9:
        for client, part in enumerate(parts):
            for label in np.unique(rows[part]):
                assert primary[client, label] or not primary[:, label].any()


@settings(max_examples=60)
@given(st.integers(1, 10), st.integers(1, 8), st.integers(0, 99), st.data())
def test_even_assignment_gives_every_label_as_many_clients(labels, clients, seed, data):
    fitting = [n for n in range(1, labels + 1) if clients * n % labels == 0]
    if not fitting:
        return
    own = data.draw(st.sampled_from(fitting))
    primary = even_primary_labels(labels, clients, own, seed)
    assert (primary.sum(axis=1) == own).all()
    assert (primary.sum(axis=0) == clients * own // labels).all()


def test_random_assignment_has_binomial_counts():
    primary = np.stack([random_primary_labels(1000, 8, 250, seed) for seed in range(20)])
    counts = np.bincount(primary.sum(axis=1).reshape(-1), minlength=9) / 20
    # Binomial(8, 1/4): about 100, 267, 311, 208 labels with none to three clients, 114 with more.
    expected = np.array([100.1, 267.0, 311.5, 207.6, 86.5, 23.1, 3.8, 0.4, 0.0])
    deviation = np.sqrt(expected * (1 - expected / 1000) / 20)
    assert (np.abs(counts - expected) < 4 * deviation + 0.3).all()


def test_without_skew_examples_are_dealt_uniformly():
    primary = random_primary_labels(20, 8, 5, seed=0)
    parts = primary_label_skew(MANY, primary, 0, seed=1)
    counts = np.stack([np.bincount(MANY[part], minlength=20) for part in parts])
    expected = np.bincount(MANY) / 8
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = 7 * 20
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_shares_are_those_of_the_weights():
    primary = random_primary_labels(20, 8, 5, seed=0)
    skew = 100
    parts = primary_label_skew(MANY, primary, skew, seed=1)
    counts = np.stack([np.bincount(MANY[part], minlength=20) for part in parts])
    own = primary.sum(axis=0)
    assert (own == 0).any() and (own > 1).any()
    for client, label in np.ndindex(8, 20):
        weight = 1 + skew if primary[client, label] else 1
        share = weight / (own[label] * (1 + skew) + 8 - own[label])
        total = counts[:, label].sum()
        assert abs(counts[client, label] - share * total) < 5 * np.sqrt(share * total) + 3
        assert client_shares(primary, skew)[client, label] == pytest.approx(share)
    # Of a label of two clients the six others together get 2.9 %.
    two = np.array([[True]] * 2 + [[False]] * 6)
    assert client_shares(two, 100)[2:].sum() == pytest.approx(0.029, abs=5e-4)


def test_private_accuracy_is_that_on_the_clients_own_labels():
    label = np.array([0, 0, 0, 1, 2, 2])
    data = FederatedData.from_arrays({"label": label}, offsets=[0, 4, 6])
    frequencies = label_frequencies(data, 4)
    np.testing.assert_allclose(frequencies, [[0.75, 0.25, 0, 0], [0, 0, 1, 0]])
    per_label = np.array([[0.8, 0.4, 0.1, np.nan], [0.0, 0.2, 0.5, np.nan]])  # of two heads
    np.testing.assert_allclose(accuracy_on_labels(per_label, frequencies[0]), [0.7, 0.05])
    np.testing.assert_allclose(accuracy_on_labels(per_label[:, None], frequencies)[0], [0.7, 0.1])
    with pytest.raises(ValueError, match="accuracy of label 3, which clients have"):
        accuracy_on_labels(per_label, [0.5, 0, 0, 0.5])


PRIMARY = random_primary_labels(3, 2, 1, seed=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random_primary_labels(0, 2, 1, 0), "num_labels must be at least 1, got 0"),
        (lambda: random_primary_labels(3, 2, 1, None), "seed must be an integer"),
        (lambda: even_primary_labels(3, 3, 1, -1), "seed must be at least 0, got -1"),
        (lambda: primary_label_skew([0, 1], PRIMARY, 1, None), "seed must be an integer"),
        (lambda: random_primary_labels(3, 2, 0, 0), "per_client must be at least 1, got 0"),
        (lambda: even_primary_labels(3, 2, 4, 0), "per_client must be at most the 3 labels, got 4"),
        (
            lambda: even_primary_labels(10, 4, 3, 0),
            "each of the 10 labels the same number of the 4",
        ),
        (lambda: primary_label_skew([0, 3], PRIMARY, 1, 0), "labels must be 0 to 2, .* got 0 to 3"),
        (
            lambda: primary_label_skew([0, 1], PRIMARY[:, :0], 1, 0),
            r"\[clients, labels\], got bool \[2, 0\]",
        ),
        (lambda: primary_label_skew([], PRIMARY, 1, 0), "not empty, got float64"),
        (
            lambda: primary_label_skew(np.ma.masked_equal([0, 1], 1), PRIMARY, 1, 0),
            "labels must not be masked",
        ),
        (
            lambda: primary_label_skew([0, 1], np.ma.masked_equal(PRIMARY, False), 1, 0),
            "primary must not be masked",
        ),
        (
            lambda: accuracy_on_labels(np.ma.masked_equal([0.5, 0], 0), [0.5, 0.5]),
            "per_label must not be masked",
        ),
        (
            lambda: accuracy_on_labels([0.5, 0], np.ma.masked_equal([0.5, 0], 0)),
            "frequencies must not be masked",
        ),
        (lambda: primary_label_skew([0, 1], PRIMARY, -1, 0), "skew must be a number of at least 0"),
        (
            lambda: primary_label_skew([0, 1], PRIMARY, "s", 0),
            "skew must be a number of at least 0",
        ),
        (
            lambda: primary_label_skew([0] * 9, np.array([[True], [False]]), 1e12, 0),
            "client 1 gets no example: its private set would be empty",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_frequencies_of_a_client_without_examples_are_refused():
    data = FederatedData.from_arrays(
        {"label": np.array([0, 1])}, offsets=[0, 1, 1, 2], allow_empty=True
    )
    with pytest.raises(ValueError, match="client 1 has none"):
        label_frequencies(data, 2)
