"""Divides every client's examples into training and test examples, for personalised methods."""

from typing import Any

import numpy as np

from fedcodist.core.checks import check_integer, check_number, shown
from fedcodist.data.federated_data import FederatedData


def train_test_within_clients(
    data: FederatedData, share: float = 0.25, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """Deals every client's examples into training and test examples, at random.

    Both have the same clients in the same order, and examples keep their order. Of a client's n
    examples, `share` n are for tests, rounded, with at least one test and one training example. A client
    with one example trains on it and has no test example: its `test.client_sizes` is 0, and it is not
    evaluated.

    HtFLlib (https://arxiv.org/abs/2506.03954) takes a quarter, the default.

    Args:
      data: the clients' examples.
      share: share of each client's examples for tests, above 0 and below 1.
      seed: of the draw. A client's draw depends only on the seed and the client's index.

    Returns:
      (training examples, test examples).

    Raises:
      ValueError, TypeError: names the argument and what is allowed.

    >>> data = FederatedData.from_arrays({"x": np.arange(9.0)}, offsets=[0, 8, 9])
    >>> train, test = train_test_within_clients(data, share=0.25)
    >>> train.client_sizes.tolist(), test.client_sizes.tolist()
    ([6, 1], [2, 0])
    """
    if not isinstance(data, FederatedData):
        raise TypeError(f"data must be FederatedData, got {shown(data)}.")
    check_number("share", share, above=0, high=1)
    if share == 1:
        raise ValueError("share must be below 1, so that every client trains on something, got 1.")
    check_integer("seed", seed, low=0)
    is_test = np.zeros(data.num_examples, bool)
    for client, (start, size) in enumerate(zip(data.offsets[:-1], data.client_sizes, strict=True)):
        if size > 1:
            count = int(np.clip(round(share * size), 1, size - 1))
            draw = np.random.default_rng([seed, client])
            is_test[start + draw.choice(size, count, replace=False)] = True
    return _those(data, ~is_test), _those(data, is_test)


def unseen_clients(
    data: FederatedData, count: int, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """Draws clients who take no part in training.

    Returns:
      (the clients who take part, the clients who do not), each in the order of `data`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    if not isinstance(data, FederatedData):
        raise TypeError(f"data must be FederatedData, got {shown(data)}.")
    check_integer("seed", seed, low=0)
    check_integer("count", count, low=1)
    if count >= data.num_clients:
        raise ValueError(
            f"count must leave a client of the data's {data.num_clients} to train, got {count}."
        )
    chosen = np.random.default_rng(seed).choice(data.num_clients, count, replace=False)
    others = np.setdiff1d(np.arange(data.num_clients), chosen)
    return data.select(others), data.select(np.sort(chosen))


def _those(data: FederatedData, is_kept: Any) -> FederatedData:
    """The same clients with only the chosen examples."""
    kept = np.concatenate([[0], np.cumsum(is_kept)])
    columns = {name: np.asarray(column)[is_kept] for name, column in data.columns.items()}
    return FederatedData(columns, kept[data.offsets], data.client_ids, allow_empty=True)
