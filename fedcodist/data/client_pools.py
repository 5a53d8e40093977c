"""Groups of whole clients: splits, larger clients, and pools, the clients who train one model.

With the same seed and number of clients, `split_clients`, `merge_clients` and `capacity_pools` draw the
same order of clients, so that their groups depend on each other. Give them different seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fedcodist.core.checks import check_boolean, check_integer, check_number, shown
from fedcodist.data.client_ids import default_client_ids
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import check_within, checked_generator

_MOST_CLIENTS = 10**8  # a random order of this many still fits in memory


def split_clients(num_clients: int, counts: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draws disjoint groups of whole clients.

    For the paper's CIFAR-100: `split_clients(500, {"distillation": 135, "train": 315,
    "held_out": 50}, seed)`, then `data.select(groups["train"])`.

    Args:
      num_clients: number of clients.
      counts: group -> number of clients. Clients beyond their sum are in no group.
      seed: of the draw.

    Returns:
      group -> sorted int32 client indices.

    Raises:
      ValueError: a count below 1 or a sum above `num_clients`.
    """
    check_integer("num_clients", num_clients, low=1, high=_MOST_CLIENTS)
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts must be a mapping from group to clients, got {shown(counts)}")
    if not counts:
        raise ValueError("counts must name at least one group")
    for name, count in counts.items():
        check_integer(f"counts[{name!r}]", count, low=1)
    if sum(counts.values()) > num_clients:
        raise ValueError(
            f"counts must sum to at most the {num_clients} clients, got {sum(counts.values())}"
        )
    order = checked_generator(seed).permutation(num_clients).astype(np.int32)
    ends = np.cumsum(list(counts.values()))
    return {
        name: np.sort(order[end - count : end])
        for (name, count), end in zip(counts.items(), ends, strict=True)
    }


def split_users(num_users: int, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Deals all users to splits, as `split_clients` does.

    Args:
      num_users: number of users.
      shares: split -> share of the users; they sum to 1. The first split also gets the users that
        rounding down leaves.
      seed: of the deal.

    Raises:
      ValueError: too few users.
    """
    counts = {name: rounded_down(share, num_users) for name, share in shares.items()}
    counts[next(iter(shares))] += num_users - sum(counts.values())
    if min(counts.values()) < 1:
        raise ValueError(f"there must be a user for each split, got {counts} of {num_users} users")
    return split_clients(num_users, counts, seed)


def merge_clients(data: FederatedData, num_clients: int, seed: int) -> FederatedData:
    """Deals whole clients, such as users, to `num_clients` larger ones, named "0", "1", ...

    The numbers of old clients in the new ones differ by at most one.

    Raises:
      ValueError: unless 1 <= num_clients <= the number of old clients.
    """
    check_within("num_clients", num_clients, data.num_clients, "the number of clients to deal")
    hands = np.array_split(checked_generator(seed).permutation(data.num_clients), num_clients)
    dealt = data.select(np.concatenate([np.sort(hand) for hand in hands]))
    ends = np.cumsum([0, *map(len, hands)])
    return FederatedData(
        dealt.columns, dealt.offsets[ends], default_client_ids(num_clients), data.allow_empty
    )


def capacity_pools(
    num_clients: int, fraction: float | Mapping[str, float], seed: int, nested: bool = True
) -> dict[str, np.ndarray]:
    """Draws pools of clients by capacity.

    Args:
      num_clients: number of clients.
      fraction: a number is the share of high-capacity clients, rounded down (0.1 of 315 is 31): the pool
        "large" has that many random clients, the pool "small" all clients or all others. A mapping gives
        the share of each pool, rounded down too. Where the shares of disjoint pools sum to 1, every
        client is in a pool: those lost by rounding go one each to the pools that lost the largest part
        of a client, the first ones among equals.
      seed: of the draw.
      nested: whether "small" has all clients, as in the paper. With a mapping, nested pools are prefixes
        of one random order, so every pool contains those of smaller fractions.

    Returns:
      pool -> sorted int32 client indices.

    Raises:
      ValueError: a fraction outside (0, 1], an empty pool, or disjoint pools that need more clients than
        there are.
    """
    check_integer("num_clients", num_clients, low=1, high=_MOST_CLIENTS)
    check_boolean("nested", nested)
    if isinstance(fraction, Mapping):
        if not fraction:
            raise ValueError("fraction must name at least one pool")
        sizes = {
            name: _clients_of_share(f"fraction[{name!r}]", share, num_clients)
            for name, share in fraction.items()
        }
        if not nested and abs(sum(fraction.values()) - 1) <= 1e-9:
            sizes = _with_the_rest(sizes, fraction, num_clients)
    else:
        large = _clients_of_share("fraction", fraction, num_clients)
        sizes = {"small": num_clients if nested else num_clients - large, "large": large}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"pool {name!r} is empty: fraction={fraction!r} of {num_clients} clients"
            )
    if not nested:
        if (needed := sum(sizes.values())) > num_clients:
            raise ValueError(
                f"fraction must leave room for disjoint pools, which need {needed} of {num_clients} "
                "clients; nested ones share clients"
            )
        return split_clients(num_clients, sizes, seed)
    order = checked_generator(seed).permutation(num_clients).astype(np.int32)
    return {name: np.sort(order[:size]) for name, size in sizes.items()}


def pools_from_ids(
    pools: Mapping[str, Iterable[str]], data: FederatedData
) -> dict[str, np.ndarray]:
    """Turns pools of natural ids into pools of sorted int32 client indices of `data`.

    Pools may be nested, disjoint or overlap.

    Raises:
      ValueError: no pool, an empty pool, an unknown id, or one that is repeated within a pool.
    """
    if not pools:
        raise ValueError("pools must name at least one pool")
    result = {}
    for name, ids in pools.items():
        if isinstance(ids, str):
            raise TypeError(f"pools[{name!r}] must be a collection of client ids, got {ids!r}")
        ids = [str(client_id) for client_id in ids]
        if not ids:
            raise ValueError(f"pool {name!r} is empty")
        try:
            indices = [data.client_index(client_id) for client_id in ids]
        except ValueError as error:
            raise ValueError(f"pool {name!r}: {error}") from None
        unique = np.unique(np.asarray(indices, np.int32))
        if len(unique) < len(indices):
            raise ValueError(f"pool {name!r} names a client twice")
        result[name] = unique
    return result


def rounded_down(share: float, count: int) -> int:
    """A share of a count as a whole number."""
    # 0.29 * 100 is 28.999999999999996: the margin keeps what the user wrote.
    return math.floor(share * count + 1e-9)


def _clients_of_share(name: str, fraction: float, num_clients: int) -> int:
    check_number(name, fraction, above=0, high=1)
    return rounded_down(fraction, num_clients)


def _with_the_rest(
    sizes: Mapping[str, int], fraction: Mapping[str, float], num_clients: int
) -> dict[str, int]:
    """Sizes that sum to all clients, by the method of largest remainders."""
    rest = num_clients - sum(sizes.values())
    lost = {name: share * num_clients - sizes[name] for name, share in fraction.items()}
    # Equal ones keep their order.
    largest = sorted(lost, key=lost.__getitem__, reverse=True)[:rest]
    return {name: size + (name in largest) for name, size in sizes.items()}
