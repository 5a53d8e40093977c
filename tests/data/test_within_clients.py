"""Training and test examples within every client."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.within_clients import train_test_within_clients, unseen_clients


def numbered(sizes):
    count = sum(sizes)
    return FederatedData.from_arrays(
        {"x": np.arange(count), "label": np.arange(count) % 3}, offsets=np.cumsum([0, *sizes])
    )


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(0.01, 0.99),
    st.integers(0, 2**20),
)
def test_every_example_is_dealt_once_and_every_client_has_both_kinds(sizes, share, seed):
    data = numbered(sizes)
    train, test = train_test_within_clients(data, share, seed)
    assert train.client_ids.tolist() == test.client_ids.tolist() == data.client_ids.tolist()
    for client, size in enumerate(sizes):
        trained, tested = train.client(client)["x"], test.client(client)["x"]
        assert sorted([*trained, *tested]) == data.client(client)["x"].tolist()
        assert sorted(trained) == trained.tolist() and sorted(tested) == tested.tolist()
        expected = 0 if size == 1 else min(max(round(share * size), 1), size - 1)
        assert len(tested) == expected and len(trained) == size - expected


def test_a_clients_draw_depends_on_the_seed_and_its_index_alone():
    first = train_test_within_clients(numbered([8, 9]), 0.5, seed=1)[1].client(1)["x"]
    after_another = train_test_within_clients(numbered([5, 9]), 0.5, seed=1)[1].client(1)["x"]
    assert (first - 8 == after_another - 5).all()
    other_seed = train_test_within_clients(numbered([8, 9]), 0.5, seed=2)[1].client(1)["x"]
    assert first.tolist() != other_seed.tolist()


def test_unseen_clients_take_no_part():
    data = numbered([2, 3, 4, 5])
    seen, unseen = unseen_clients(data, 1, seed=3)
    assert seen.num_clients == 3 and unseen.num_clients == 1
    everyone = [*seen.columns["x"], *unseen.columns["x"]]
    assert sorted(everyone) == data.columns["x"].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(share=0.0), "share must be a"),
        (dict(share=1), "share must be below 1"),
        (dict(share=float("nan")), "share must be"),
        (dict(seed=-1), "seed must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_test_within_clients(numbered([4]), **arguments)


def test_other_bad_arguments_are_named():
    with pytest.raises(TypeError, match="data must be FederatedData"):
        train_test_within_clients({"x": np.arange(3)})
    with pytest.raises(ValueError, match="count must leave a client of the data's 2"):
        unseen_clients(numbered([2, 2]), 2)
