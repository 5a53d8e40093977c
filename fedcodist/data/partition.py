"""Partitions: which client has which example, and which pool has which client.

Every partitioner returns a list with one int64 array per client: the indices of its examples, for
`FederatedData.from_arrays(columns, partition=...)`. No example is used twice. All are used, except by
`pachinko` when it is asked for fewer. The same integer seed gives the same partition.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcodist.core.checks import check_boolean, check_integer, check_not_masked, shown
from fedcodist.data.federated_data import FederatedData, default_client_ids, natural_ids_as_text

_MOST_CLIENTS = 10**8  # a random order of this many still fits in memory


def iid(num_examples: int, num_clients: int, seed: int) -> list[np.ndarray]:
    """Deals shuffled examples evenly; client sizes differ by at most one.

    Raises:
      ValueError, TypeError: unless 1 <= num_clients <= num_examples.
    """
    check_integer("num_examples", num_examples, low=1)
    _check_num_clients(num_clients, num_examples)
    return np.array_split(_generator(seed).permutation(num_examples), num_clients)


def dirichlet(
    labels: Any,
    num_clients: int,
    concentration: float,
    seed: int,
    min_size: int = 1,
    balanced: bool = False,
) -> list[np.ndarray]:
    """Splits the examples of each label in proportions drawn from a symmetric Dirichlet over clients.

    A client with fewer than `min_size` examples gets random examples of the client that is the largest
    at that time. (Drawing everything again until all clients are large enough may never end for many
    clients.)

    Args:
      labels: int `[examples]`.
      num_clients: number of clients.
      concentration: a large one gives every client the same mix of labels, a small one few labels each.
      seed: of the draws.
      min_size: the least number of examples of a client.
      balanced: whether a client that has reached the mean size gets no examples of further labels, in
        ascending order of labels. Sizes differ less then, and the last labels have fewer clients. It is
        the division of [PFLlib](https://github.com/TsingZ0/PFLlib) and HtFLlib, but for `min_size`.

    Raises:
      ValueError, TypeError: concentration <= 0, fewer than `num_clients * min_size` examples, or
        `balanced` that is not bool.
    """
    labels = _checked_labels("labels", labels)
    _check_num_clients(num_clients, len(labels))
    _check_positive("concentration", concentration)
    _check_min_size(min_size, num_clients, len(labels))
    check_boolean("balanced", balanced)
    rng = _generator(seed)
    owner = np.empty(len(labels), np.int64)
    sizes, mean = np.zeros(num_clients), len(labels) / num_clients
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        shares = _dirichlet_draw(rng, concentration, num_clients)
        if balanced:
            shares = _of_clients_below(mean, sizes, shares)
        cuts = np.rint(np.cumsum(shares)[:-1] * len(examples)).astype(np.int64)
        owner[examples] = np.searchsorted(cuts, np.arange(len(examples)), side="right")
        sizes += np.bincount(owner[examples], minlength=num_clients)
    return _with_min_size(_examples_of_owner(owner, num_clients), min_size, rng)


def pachinko(
    fine_labels: Any,
    coarse_labels: Any,
    num_clients: int,
    examples_per_client: int,
    seed: int,
    root_concentration: float = 0.1,
    leaf_concentration: float = 10.0,
) -> list[np.ndarray]:
    """Pachinko allocation over a two-level label tree, as in TFF's federated CIFAR-100.

    Each client draws a Dirichlet over coarse labels and, within each of them, a Dirichlet over its fine
    labels. Then it draws its examples without replacement, coarse label first. A label whose examples
    are used up leaves the tree, and the other probabilities are normalised again. So the last clients
    have fewer labels.

    Args:
      fine_labels: int `[examples]`.
      coarse_labels: int `[examples]`; every fine label belongs to one coarse label.
      num_clients: number of clients.
      examples_per_client: number of examples of each client.
      seed: of the draws.
      root_concentration: of the Dirichlet over coarse labels.
      leaf_concentration: of the Dirichlets over fine labels.

    Raises:
      ValueError: concentrations <= 0, too few examples, or labels that are not a tree.
    """
    fine = _checked_labels("fine_labels", fine_labels)
    coarse = _checked_labels("coarse_labels", coarse_labels)
    if len(fine) != len(coarse):
        raise ValueError(
            f"fine_labels and coarse_labels must have equal lengths, got {len(fine)} and "
            f"{len(coarse)}"
        )
    _check_num_clients(num_clients, len(fine))
    per_client_is_valid = _is_integer(examples_per_client) and examples_per_client >= 1
    if not per_client_is_valid or examples_per_client * num_clients > len(fine):
        raise ValueError(
            f"examples_per_client must be in 1..{len(fine) // num_clients} for {num_clients} "
            f"clients and {len(fine)} examples, got {examples_per_client}"
        )
    _check_positive("root_concentration", root_concentration)
    _check_positive("leaf_concentration", leaf_concentration)
    tree = _label_tree(fine, coarse)
    rng = _generator(seed)
    unused = {
        label: rng.permutation(np.flatnonzero(fine == label)).tolist() for label in np.unique(fine)
    }
    return [
        _draw_pachinko_client(
            tree, unused, examples_per_client, root_concentration, leaf_concentration, rng
        )
        for _ in range(num_clients)
    ]


def equal_dirichlet(
    labels: Any, num_clients: int, concentration: float, seed: int, together: int = 10
) -> list[np.ndarray]:
    """FedDF's partition: a Dirichlet split over labels, cut again into parts of equal size.

    Clients are taken in groups of `together`; each group gets a random share of the examples. Within a
    group, the examples of every label are split in Dirichlet proportions over the clients that are still
    smaller than the mean. This is repeated until no client is smaller than half of the mean. The
    examples, in the order of clients, are then cut into parts whose sizes differ by at most one.

    Args:
      labels: int `[examples]`.
      num_clients: number of clients.
      concentration: of the Dirichlet.
      seed: of the draws.
      together: clients in a group.

    Raises:
      ValueError: concentration <= 0, too few examples, or a client that is too small in each of a
        thousand draws.
    """
    labels = _checked_labels("labels", labels)
    _check_num_clients(num_clients, len(labels))
    _check_positive("concentration", concentration)
    if not _is_integer(together) or together < 1:
        raise ValueError(f"together must be an integer of at least 1, got {together!r}")
    rng = _generator(seed)
    cuts = np.arange(together, num_clients, together)
    batches = np.split(np.arange(num_clients), cuts)
    ends = np.rint(np.cumsum([len(b) for b in batches])[:-1] * len(labels) / num_clients)
    shares = np.split(rng.permutation(len(labels)), ends.astype(np.int64))
    in_a_row = [
        examples
        for batch, share in zip(batches, shares, strict=True)
        for examples in _half_even_dirichlet(labels, share, len(batch), concentration, rng)
    ]
    return np.array_split(np.concatenate(in_a_row), num_clients)


def shards(labels: Any, num_clients: int, shards_per_client: int, seed: int) -> list[np.ndarray]:
    """Sorts examples by label, cuts them into equal shards and deals some shards to each client.

    Shard sizes differ by at most one. The pathological partition of section 3 of
    [FedAvg's paper](https://arxiv.org/abs/1602.05629), with two shards per client.

    Args:
      labels: int `[examples]`.
      num_clients: number of clients.
      shards_per_client: shards of each client, about the number of labels that it has.
      seed: of the draws.

    Raises:
      ValueError: fewer examples than shards.
    """
    labels = _checked_labels("labels", labels)
    _check_num_clients(num_clients, len(labels))
    if (
        not _is_integer(shards_per_client)
        or not 1 <= shards_per_client <= len(labels) // num_clients
    ):
        raise ValueError(
            f"shards_per_client must be in 1..{len(labels) // num_clients} for {num_clients} "
            f"clients and {len(labels)} examples, got {shards_per_client!r}"
        )
    num_shards = num_clients * shards_per_client
    rng = _generator(seed)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_label, num_shards)
    dealt = rng.permutation(num_shards).reshape(num_clients, shards_per_client)
    return [np.concatenate([pieces[shard] for shard in hand]) for hand in dealt]


def pathological(
    labels: Any, num_clients: int, labels_per_client: int, seed: int
) -> list[np.ndarray]:
    """Gives each client the same number of labels, and the examples of a label to its clients evenly.

    "#C = k" of [NIID-Bench](https://arxiv.org/abs/2102.02079), section III-A; PFLlib and FedLab have it
    too. Labels are drawn at random, but the numbers of clients of two labels differ by at most one. A
    client has fewer labels only where a label has fewer examples than clients.

    The pathological partition of [FedAvg's paper](https://arxiv.org/abs/1602.05629), shards of equal
    size in the order of labels, is `shards`.

    Args:
      labels: int `[examples]`.
      num_clients: number of clients.
      labels_per_client: labels of each client, k.
      seed: of the draws.

    Raises:
      ValueError: more labels per client than there are; so few that a label would have no client; or
        labels so rare that a client gets no example.
    """
    labels = _checked_labels("labels", labels)
    _check_num_clients(num_clients, len(labels))
    values, index = np.unique(labels, return_inverse=True)
    least = -(-len(values) // num_clients)
    if not _is_integer(labels_per_client) or not least <= labels_per_client <= len(values):
        raise ValueError(
            f"labels_per_client must be in {least}..{len(values)} for {num_clients} clients and "
            f"{len(values)} labels, each of which needs a client, got {labels_per_client!r}"
        )
    rng = _generator(seed)
    num_owners = np.zeros(len(values), np.int64)
    owners: list[list[int]] = [[] for _ in values]
    for client in range(num_clients):
        # Labels with the fewest clients come first, in random order among equal ones.
        order = np.lexsort((rng.random(len(values)), num_owners))
        for label in order[:labels_per_client]:
            owners[label].append(client)
            num_owners[label] += 1
    owner = np.empty(len(labels), np.int64)
    for label, clients in enumerate(owners):
        examples = rng.permutation(np.flatnonzero(index == label))
        dealt_to = rng.permutation(np.asarray(clients))
        owner[examples] = dealt_to[np.arange(len(examples)) % len(dealt_to)]
    partition = _examples_of_owner(owner, num_clients)
    if empty := sum(len(examples) == 0 for examples in partition):
        raise ValueError(
            f"labels_per_client={labels_per_client} leaves {empty} of {num_clients} clients without "
            "examples, since some labels have fewer examples than clients; use a larger one, or fewer "
            "clients"
        )
    return partition


def quantity_dirichlet(
    num_examples: int, num_clients: int, concentration: float, seed: int, min_size: int = 1
) -> list[np.ndarray]:
    """Deals shuffled examples; client sizes follow one draw of a symmetric Dirichlet.

    "Quantity skew" of [NIID-Bench](https://arxiv.org/abs/2102.02079), section III-C: clients differ in
    their size and not in their labels. Every client has `min_size` examples, and the rest is dealt in
    the proportions drawn.

    Args:
      num_examples: number of examples.
      num_clients: number of clients.
      concentration: a small one makes sizes very different, a large one equal.
      seed: of the draws.
      min_size: the least number of examples of a client.

    Raises:
      ValueError: concentration <= 0, or fewer than `num_clients * min_size` examples.
    """
    check_integer("num_examples", num_examples, low=1)
    _check_num_clients(num_clients, num_examples)
    _check_positive("concentration", concentration)
    _check_min_size(min_size, num_clients, num_examples)
    rng = _generator(seed)
    shares = _dirichlet_draw(rng, concentration, num_clients)
    return _of_shares(shares, num_examples, min_size, rng)


def quantity_log_normal(
    num_examples: int, num_clients: int, sigma: float, seed: int, min_size: int = 1
) -> list[np.ndarray]:
    """Deals shuffled examples; client sizes are proportional to draws of a log-normal distribution.

    The unbalanced partition of [FedLab](https://arxiv.org/abs/2107.11621), after that of
    [FedDyn](https://arxiv.org/abs/2111.04263). Every client has `min_size` examples, and the rest is
    dealt in the proportions drawn.

    Args:
      num_examples: number of examples.
      num_clients: number of clients.
      sigma: standard deviation of the logarithm of a size; 0 makes sizes equal.
      seed: of the draws.
      min_size: the least number of examples of a client.

    Raises:
      ValueError: sigma outside 0..100, or fewer than `num_clients * min_size` examples.
    """
    check_integer("num_examples", num_examples, low=1)
    _check_num_clients(num_clients, num_examples)
    if not _is_number(sigma) or not 0 <= sigma <= 100:
        raise ValueError(f"sigma must be a number in 0..100, got {shown(sigma)}")
    _check_min_size(min_size, num_clients, num_examples)
    rng = _generator(seed)
    logarithms = sigma * rng.standard_normal(num_clients)
    sizes = np.exp(logarithms - logarithms.max())
    return _of_shares(sizes / sizes.sum(), num_examples, min_size, rng)


def by_id(ids: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Groups examples by their natural client.

    Args:
      ids: `[examples]` of str, bytes in UTF-8, or integers; also as objects, as in pandas.

    Returns:
      The sorted ids, str `[num_clients]`, and the examples of each client in their original order.

    Raises:
      ValueError, TypeError: ids that are not a non-empty vector of strings or integers.
    """
    array = natural_ids_as_text("ids", ids)
    if array.dtype.kind not in "Uiu":
        raise TypeError(f"ids must be strings or integers, got {array.dtype}")
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"ids must be a non-empty vector, got shape {list(array.shape)}")
    values, owner = np.unique(array, return_inverse=True)
    return values.astype(str), _examples_of_owner(owner, len(values))


def split_clients(num_clients: int, counts: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Draws disjoint groups of whole clients.

    For the paper's CIFAR-100: `split_clients(500, {"distillation": 135, "train": 315,
    "held_out": 50}, seed)`, then `data.select(groups["train"])`.

    Args:
      num_clients: number of clients.
      counts: group -> number of clients. Clients beyond their sum are in no group.
      seed: of the draw. With the same seed and number of clients, `merge_clients` and `capacity_pools`
        draw the same order of clients, so give them another seed.

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
        if not _is_integer(count) or count < 1:
            raise ValueError(f"counts[{name!r}] must be an integer of at least 1, got {count!r}")
    if sum(counts.values()) > num_clients:
        raise ValueError(
            f"counts must sum to at most the {num_clients} clients, got {sum(counts.values())}"
        )
    order = _generator(seed).permutation(num_clients).astype(np.int32)
    ends = np.cumsum(list(counts.values()))
    return {
        name: np.sort(order[end - count : end])
        for (name, count), end in zip(counts.items(), ends, strict=True)
    }


def merge_clients(data: FederatedData, num_clients: int, seed: int) -> FederatedData:
    """Deals whole clients, such as users, to `num_clients` larger ones, named "0", "1", ...

    The numbers of old clients in the new ones differ by at most one. With the same seed and number of
    old clients, `split_clients` and `capacity_pools` draw the same order, so give them another seed.

    Raises:
      ValueError: unless 1 <= num_clients <= the number of old clients.
    """
    if not _is_integer(num_clients) or not 1 <= num_clients <= data.num_clients:
        raise ValueError(
            f"num_clients must be an integer in 1..{data.num_clients}, the number of clients to deal, "
            f"got {num_clients!r}"
        )
    hands = np.array_split(_generator(seed).permutation(data.num_clients), num_clients)
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
      seed: of the draw. With the same seed and number of clients, `split_clients` and `merge_clients`
        draw the same order of clients, so give them another seed.
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
    order = _generator(seed).permutation(num_clients).astype(np.int32)
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


def _generator(seed: int) -> np.random.Generator:
    if not _is_integer(seed) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")
    return np.random.default_rng(int(seed))


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, (float, np.floating))


def _check_num_clients(num_clients: int, num_examples: int) -> None:
    if not _is_integer(num_clients) or not 1 <= num_clients <= num_examples:
        raise ValueError(
            f"num_clients must be an integer in 1..{num_examples}, the number of examples, "
            f"got {num_clients!r}"
        )


def _check_positive(name: str, value: float) -> None:
    # Python's integers may be beyond any float.
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number above 0, got {shown(value)}")


def _check_min_size(min_size: int, num_clients: int, num_examples: int) -> None:
    if not _is_integer(min_size) or min_size < 1 or min_size * num_clients > num_examples:
        raise ValueError(
            f"min_size must be in 1..{num_examples // num_clients} for {num_clients} clients and "
            f"{num_examples} examples, got {min_size}"
        )


def whole_labels(labels: Any) -> np.ndarray:
    """Labels as a vector, also from bool, `[examples, 1]` or one-hot `[examples, labels]`."""
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1 and array.dtype.kind in "biu":
        array = array[:, 0]
    if array.dtype.kind == "b" and array.ndim == 1:
        return array.astype(np.int32)
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf":
        return array
    is_one_hot = ((array == 0) | (array == 1)).all(axis=1) & (array.sum(axis=1) == 1)
    return array.argmax(axis=1).astype(np.int32) if is_one_hot.all() else array


def _checked_labels(name: str, labels: Any) -> np.ndarray:
    check_not_masked(name, labels)
    array = whole_labels(labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a vector of integers, got {array.dtype} {list(array.shape)}"
        )
    return array


def _clients_of_share(name: str, fraction: float, num_clients: int) -> int:
    if not _is_number(fraction) or not 0 < fraction <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {fraction!r}")
    # 0.29 * 100 is 28.999999999999996: the margin keeps what the user wrote.
    return math.floor(fraction * num_clients + 1e-9)


def _with_the_rest(
    sizes: Mapping[str, int], fraction: Mapping[str, float], num_clients: int
) -> dict[str, int]:
    """Sizes that sum to all clients, by the method of largest remainders."""
    rest = num_clients - sum(sizes.values())
    lost = {name: share * num_clients - sizes[name] for name, share in fraction.items()}
    # Equal ones keep their order.
    largest = sorted(lost, key=lost.__getitem__, reverse=True)[:rest]
    return {name: size + (name in largest) for name, size in sizes.items()}


def _half_even_dirichlet(
    labels: np.ndarray,
    examples: np.ndarray,
    count: int,
    concentration: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Splits examples over `count` clients, none smaller than half of the mean."""
    mean = len(examples) / count
    for _ in range(1000):
        parts: list[list[np.ndarray]] = [[] for _ in range(count)]
        sizes = np.zeros(count)
        for label in np.unique(labels[examples]):
            shuffled = rng.permutation(examples[labels[examples] == label])
            weights = _of_clients_below(mean, sizes, _dirichlet_draw(rng, concentration, count))
            cuts = np.rint(np.cumsum(weights)[:-1] * len(shuffled)).astype(np.int64)
            for client, part in enumerate(np.split(shuffled, cuts)):
                parts[client].append(part)
                sizes[client] += len(part)
        if sizes.min() >= 0.5 * mean:
            return [np.concatenate(part) for part in parts]
    raise ValueError(
        f"concentration={concentration:g} leaves a client with less than half of its "
        f"{mean:g} examples in each of 1000 draws; a larger one, or more labels, would not"
    )


def _of_clients_below(mean: float, sizes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The shares of clients that are smaller than the mean, which sum to 1; the others have none."""
    is_smaller = sizes < mean
    weights = shares * is_smaller
    total = weights.sum()
    return weights / total if total > 0 else is_smaller / is_smaller.sum()


def _dirichlet_draw(rng: np.random.Generator, concentration: float, size: int) -> np.ndarray:
    shares = rng.dirichlet(np.full(size, float(concentration)))
    if np.isfinite(shares).all() and shares.sum() > 0:
        return shares
    # Out of floating-point range: the limit is one winner for small concentrations and equal shares
    # for large ones.
    if concentration > 1:
        return np.full(size, 1 / size)
    return np.eye(size)[rng.integers(size)]


def _of_shares(
    shares: np.ndarray, num_examples: int, min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Shuffled examples, `min_size` for every client and the rest in proportion to the shares."""
    beyond = num_examples - min_size * len(shares)
    cuts = np.rint(np.cumsum(shares)[:-1] * beyond).astype(np.int64)
    cuts = np.clip(cuts, 0, beyond) + min_size * np.arange(1, len(shares))
    return np.split(rng.permutation(num_examples), cuts)


def _examples_of_owner(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=num_clients))[:-1])


def _with_min_size(
    partition: list[np.ndarray], min_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    sizes = np.array([len(examples) for examples in partition])
    for client in np.flatnonzero(sizes < min_size):
        while sizes[client] < min_size:
            donor = int(np.argmax(sizes))
            position = int(rng.integers(sizes[donor]))
            moved = partition[donor][position]
            partition[donor] = np.delete(partition[donor], position)
            partition[client] = np.append(partition[client], moved)
            sizes[donor] -= 1
            sizes[client] += 1
    return partition


def _label_tree(fine: np.ndarray, coarse: np.ndarray) -> dict[int, list[int]]:
    edges = np.unique(np.stack([fine, coarse]), axis=1)
    repeated = np.flatnonzero(np.diff(edges[0]) == 0)
    if len(repeated):
        label = edges[0, repeated[0]]
        parents = edges[1, edges[0] == label].tolist()
        raise ValueError(
            f"coarse_labels must be one for each fine label, but fine label {label} is under "
            f"{parents}"
        )
    tree: dict[int, list[int]] = {}
    for leaf, branch in edges.T.tolist():
        tree.setdefault(branch, []).append(leaf)
    return tree


def _draw_pachinko_client(
    tree: dict[int, list[int]],
    unused: dict[int, list[int]],
    examples_per_client: int,
    root_concentration: float,
    leaf_concentration: float,
    rng: np.random.Generator,
) -> np.ndarray:
    branches = list(tree)
    branch_shares = _dirichlet_draw(rng, root_concentration, len(branches))
    leaf_shares = {
        branch: _dirichlet_draw(rng, leaf_concentration, len(tree[branch])) for branch in branches
    }
    examples = []
    for _ in range(examples_per_client):
        position = _draw_index(rng, branch_shares)
        branch = branches[position]
        leaf_position = _draw_index(rng, leaf_shares[branch])
        leaf = tree[branch][leaf_position]
        examples.append(unused[leaf].pop())
        if not unused[leaf]:
            tree[branch].pop(leaf_position)
            leaf_shares[branch] = np.delete(leaf_shares[branch], leaf_position)
        if not tree[branch]:
            del tree[branch]
            branches.pop(position)
            branch_shares = np.delete(branch_shares, position)
    return np.asarray(examples, np.int64)


def _draw_index(rng: np.random.Generator, shares: np.ndarray) -> int:
    # Not normalised: scaling the uniform number by the total is the renormalisation.
    cumulative = np.cumsum(shares)
    if cumulative[-1] <= 0:  # the labels that had all the probability are used up
        return int(rng.integers(len(shares)))
    drawn = rng.random() * cumulative[-1]
    return min(int(np.searchsorted(cumulative, drawn, side="right")), len(shares) - 1)
