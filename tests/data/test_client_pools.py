import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import (
    FederatedData,
    capacity_pools,
    merge_clients,
    pools_from_ids,
    split_clients,
)


def test_capacity_pools_of_the_paper():
    for fraction, size in [(0.1, 31), (0.15, 47), (0.2, 63)]:
        pools = capacity_pools(315, fraction, seed=0)
        np.testing.assert_array_equal(pools["small"], np.arange(315))
        assert len(pools["large"]) == size and pools["large"].dtype == np.int32


def test_a_fraction_is_what_the_user_wrote():
    assert len(capacity_pools(100, 0.29, 0)["large"]) == 29


@settings(max_examples=50)
@given(st.integers(10, 200), st.floats(0.1, 0.9), st.integers(0, 1000))
def test_capacity_pools_are_nested_or_disjoint(num_clients, fraction, seed):
    nested = capacity_pools(num_clients, fraction, seed)
    assert set(nested["large"]) < set(nested["small"])
    disjoint = capacity_pools(num_clients, fraction, seed, nested=False)
    together = np.concatenate([disjoint["small"], disjoint["large"]])
    np.testing.assert_array_equal(np.sort(together), np.arange(num_clients))
    for pools in (nested, disjoint):
        for pool in pools.values():
            assert (np.diff(pool) > 0).all() and pool.dtype == np.int32


def test_three_pools():
    pools = capacity_pools(100, {"small": 1.0, "medium": 0.5, "large": 0.1}, seed=2)
    assert [len(pool) for pool in pools.values()] == [100, 50, 10]
    assert set(pools["large"]) < set(pools["medium"]) < set(pools["small"])
    pools = capacity_pools(100, {"a": 0.3, "b": 0.3, "c": 0.4}, seed=2, nested=False)
    np.testing.assert_array_equal(np.sort(np.concatenate(list(pools.values()))), np.arange(100))


@pytest.mark.parametrize(
    ("num_clients", "fraction", "sizes"),
    [
        (10, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, [4, 3, 3]),
        (315, {"a": 0.5, "b": 0.3, "c": 0.2}, [158, 94, 63]),  # 157.5, 94.5, 63
        (8, {"a": 0.3, "b": 0.6, "c": 0.1}, [2, 5, 1]),  # 2.4, 4.8, 0.8
        (10, {"a": 0.33, "b": 0.33, "c": 0.33}, [3, 3, 3]),  # no sum of 1
    ],
)
def test_disjoint_pools_of_all_clients_lose_none_by_rounding(num_clients, fraction, sizes):
    pools = capacity_pools(num_clients, fraction, seed=1, nested=False)
    assert [len(pool) for pool in pools.values()] == sizes
    assert len(np.unique(np.concatenate(list(pools.values())))) == sum(sizes)


def test_every_client_is_equally_likely_to_be_of_high_capacity():
    counts = np.zeros(20)
    for seed in range(400):
        counts[capacity_pools(20, 0.25, seed)["large"]] += 1
    assert np.abs(counts - 100).max() < 4.5 * np.sqrt(400 * 0.25 * 0.75)


def test_split_clients_of_the_paper():
    groups = split_clients(500, {"distillation": 135, "train": 315, "held_out": 50}, seed=0)
    assert {name: len(group) for name, group in groups.items()} == {
        "distillation": 135,
        "train": 315,
        "held_out": 50,
    }
    np.testing.assert_array_equal(np.sort(np.concatenate(list(groups.values()))), np.arange(500))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 99), st.data())
def test_merged_clients_are_whole_and_as_many(sizes, seed, data):
    count = data.draw(st.integers(1, len(sizes)))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    columns = {"owner": owner, "row": np.arange(len(owner))}
    merged = merge_clients(FederatedData.from_arrays(columns, client_of_row=owner), count, seed)
    assert merged.client_ids.tolist() == [str(index) for index in range(count)]
    np.testing.assert_array_equal(np.sort(merged.columns["row"]), columns["row"])
    np.testing.assert_array_equal(owner[merged.columns["row"]], merged.columns["owner"])
    of_each = [np.unique(own["owner"]) for _, own in merged.clients()]
    np.testing.assert_array_equal(np.sort(np.concatenate(of_each)), np.arange(len(sizes)))
    assert {len(each) for each in of_each} <= {len(sizes) // count, -(-len(sizes) // count)}


def three_clients():
    return FederatedData.from_arrays({"x": np.arange(3)}, client_of_row=np.array(["a", "b", "c"]))


def test_pools_from_ids():
    pools = pools_from_ids({"small": ["c", "a", "b"], "large": ["b"]}, three_clients())
    np.testing.assert_array_equal(pools["small"], [0, 1, 2])
    np.testing.assert_array_equal(pools["large"], [1])
    assert pools["large"].dtype == np.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_clients(None, {"a": 1}, 0), "num_clients must be an integer of at least 1"),
        (lambda: split_clients(10**9, {"a": 1}, 0), "num_clients must be at most 100,000,000"),
        (lambda: split_clients(10, [1], 0), r"counts must be a mapping .*, got \[1\]"),
        (lambda: capacity_pools(10, 0.0, 0), r"fraction must be at most 1 and above 0, got 0\.0"),
        (lambda: capacity_pools(10, 1.5, 0), r"fraction must be at most 1 and above 0, got 1\.5"),
        (lambda: capacity_pools(10, float("nan"), 0), "fraction"),
        (lambda: capacity_pools(10, 0.05, 0), "pool 'large' is empty"),
        (lambda: capacity_pools(10, 1.0, 0, nested=False), "pool 'small' is empty"),
        (lambda: capacity_pools(10, {"a": 2}, 0), r"fraction\['a'\]"),
        (
            lambda: capacity_pools(10, {"a": 0.6, "b": 0.6}, 0, nested=False),
            "need 12 of 10 clients",
        ),
        (lambda: capacity_pools(10, {}, 0), "at least one pool"),
        (lambda: merge_clients(three_clients(), 4, 0), r"num_clients must be an integer in 1\.\.3"),
        (lambda: merge_clients(three_clients(), 0, 0), "number of clients to deal, got 0"),
        (lambda: split_clients(10, {"a": 0}, 0), r"counts\['a'\]"),
        (lambda: split_clients(10, {"a": 11}, 0), "at most the 10 clients, got 11"),
        (lambda: pools_from_ids({}, three_clients()), "at least one pool"),
        (lambda: pools_from_ids({"large": []}, three_clients()), "pool 'large' is empty"),
        (lambda: pools_from_ids({"large": ["z"]}, three_clients()), "pool 'large': client_id 'z'"),
        (lambda: pools_from_ids({"large": ["a", "a"]}, three_clients()), "names a client twice"),
        (lambda: pools_from_ids({"large": "abc"}, three_clients()), "collection of client ids"),
    ],
)
def test_clear_errors(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)
