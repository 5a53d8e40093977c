"""Partitions: which client has which example.

Every partitioner returns a list with one int64 array per client: the indices of its examples, for
`FederatedData.from_arrays(columns, partition=...)`. No example is used twice. All are used, except by
`pachinko` when it is asked for fewer. The same integer seed gives the same partition.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fedcodist.core.checks import (
    check_boolean,
    check_integer,
    check_not_masked,
    check_number,
    shown,
)
from fedcodist.data.client_ids import natural_ids_as_text

_LARGEST_SEED = 2**64 - 1


def iid(num_examples: int, num_clients: int, seed: int) -> list[np.ndarray]:
    """Deals shuffled examples evenly; client sizes differ by at most one.

    Raises:
      ValueError, TypeError: unless 1 <= num_clients <= num_examples.
    """
    check_integer("num_examples", num_examples, low=1)
    _check_num_clients(num_clients, num_examples)
    return np.array_split(checked_generator(seed).permutation(num_examples), num_clients)


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
        the division of the released code of Yurochkin et al., and of NIID-Bench, FedLab,
        [PFLlib](https://github.com/TsingZ0/PFLlib) and HtFLlib, but for `min_size`.

    Raises:
      ValueError, TypeError: concentration <= 0, fewer than `num_clients * min_size` examples, or
        `balanced` that is not bool.
    """
    labels = _checked_labels("labels", labels)
    _check_num_clients(num_clients, len(labels))
    _check_positive("concentration", concentration)
    _check_per_client("min_size", min_size, num_clients, len(labels))
    check_boolean("balanced", balanced)
    rng = checked_generator(seed)
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
    _check_per_client("examples_per_client", examples_per_client, num_clients, len(fine))
    _check_positive("root_concentration", root_concentration)
    _check_positive("leaf_concentration", leaf_concentration)
    tree = _label_tree(fine, coarse)
    rng = checked_generator(seed)
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
    check_integer("together", together, low=1)
    rng = checked_generator(seed)
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
    _check_per_client("shards_per_client", shards_per_client, num_clients, len(labels))
    num_shards = num_clients * shards_per_client
    rng = checked_generator(seed)
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
    why = f"for {num_clients} clients and {len(values)} labels, each of which needs a client"
    check_within("labels_per_client", labels_per_client, len(values), why, low=least)
    rng = checked_generator(seed)
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
    _check_per_client("min_size", min_size, num_clients, num_examples)
    rng = checked_generator(seed)
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
    check_number("sigma", sigma, low=0, high=100)
    _check_per_client("min_size", min_size, num_clients, num_examples)
    rng = checked_generator(seed)
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


def checked_generator(seed: int) -> np.random.Generator:
    """A generator of random numbers. Raises ValueError or TypeError for a bad seed."""
    check_integer("seed", seed, low=0, high=_LARGEST_SEED)
    return np.random.default_rng(int(seed))


def check_within(name: str, value: Any, high: int, why: str, low: int = 1) -> None:
    """Raises ValueError unless the value is an integer from `low` to `high`; `why` explains `high`."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in {low}..{high}, {why}, got {shown(value)}")


def _check_num_clients(num_clients: int, num_examples: int) -> None:
    check_within("num_clients", num_clients, num_examples, "the number of examples")


def _check_per_client(name: str, value: int, num_clients: int, num_examples: int) -> None:
    why = f"for {num_clients} clients and {num_examples} examples"
    check_within(name, value, num_examples // num_clients, why)


def _check_positive(name: str, value: float) -> None:
    is_number = isinstance(value, int | float | np.integer | np.floating)
    # Python's integers may be beyond any float.
    if isinstance(value, bool) or not is_number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number above 0, got {shown(value)}")


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
