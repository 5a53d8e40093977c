"""Primary-label skew (MHD): every client has some primary labels and fewer examples of others.

Functions that assign labels return bool [clients, labels], true for a client's primary labels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedcodist.core.checks import check_integer, check_not_masked
from fedcodist.data.partition import whole_labels


def random_primary_labels(
    num_labels: int, num_clients: int, per_client: int, seed: int
) -> np.ndarray:
    """Every client draws `per_client` labels, independently of the others.

    A label may be primary for no client, or for several.

    Raises:
      ValueError, TypeError: no label, no client, or more labels per client than there are.
    """
    _check_counts(num_labels, num_clients, per_client)
    check_integer("seed", seed, low=0)
    generator = np.random.default_rng(seed)
    primary = np.zeros((num_clients, num_labels), bool)
    for labels_of_client in primary:
        labels_of_client[generator.choice(num_labels, per_client, replace=False)] = True
    return primary


def even_primary_labels(
    num_labels: int, num_clients: int, per_client: int, seed: int
) -> np.ndarray:
    """Every label is primary for the same number of clients, num_clients * per_client / num_labels.

    Labels in random order, repeated that often, are cut into the clients' parts. With one client per
    label the parts are disjoint.

    Raises:
      ValueError, TypeError: no label, no client, more labels per client than there are, or that number
        is no integer.
    """
    _check_counts(num_labels, num_clients, per_client)
    if num_clients * per_client % num_labels:
        raise ValueError(
            f"per_client must give each of the {num_labels} labels the same number of the "
            f"{num_clients} clients, got {per_client}."
        )
    check_integer("seed", seed, low=0)
    generator = np.random.default_rng(seed)
    order, clients = generator.permutation(num_labels), generator.permutation(num_clients)
    primary = np.zeros((num_clients, num_labels), bool)
    for place, client in enumerate(clients):
        primary[client, order[(place * per_client + np.arange(per_client)) % num_labels]] = True
    return primary


def primary_label_skew(
    labels: Any, primary: np.ndarray, skew: float, seed: int
) -> list[np.ndarray]:
    """Deals examples to clients, with weight 1 + s where the label is primary for a client, else 1.

    The weight 1 + s is from memory of MHD's paper, and we could not check it there. With s = 0 the data
    are iid; the larger s, the fewer examples of other labels a client has. Examples of a label that is
    primary for no client go to all clients with the same probability.

    Args:
      labels: int [examples], in 0 .. labels - 1.
      primary: bool [clients, labels].
      skew: s, at least 0; with infinity clients have only primary labels.
      seed: of the draws.

    Returns:
      Examples of each client, int64, ascending; for `FederatedData.from_arrays(..., partition=...)`.

    Raises:
      ValueError: an array or number out of range, or a client without examples.
    """
    check_not_masked("labels", labels)
    check_not_masked("primary", primary)
    labels, primary = whole_labels(labels), np.asarray(primary)
    if primary.ndim != 2 or primary.dtype != bool or 0 in primary.shape:
        raise ValueError(
            f"primary must be bool [clients, labels], got {primary.dtype} {list(primary.shape)}."
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(
            f"labels must be a vector of integers, not empty, got {labels.dtype} {list(labels.shape)}."
        )
    if labels.min() < 0 or labels.max() >= primary.shape[1]:
        raise ValueError(
            f"labels must be 0 to {primary.shape[1] - 1}, as primary has them, got "
            f"{labels.min()} to {labels.max()}."
        )
    shares = client_shares(primary, skew)
    check_integer("seed", seed, low=0)
    generator = np.random.default_rng(seed)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        examples = np.flatnonzero(labels == label)
        owner[examples] = generator.choice(len(primary), len(examples), p=shares[:, label])
    parts = [np.flatnonzero(owner == client) for client in range(len(primary))]
    for client, examples in enumerate(parts):
        if not len(examples):
            raise ValueError(
                f"client {client} gets no example: its private set would be empty. More primary labels "
                "or examples, or a smaller skew, would give it some."
            )
    return parts


def client_shares(primary: np.ndarray, skew: float) -> np.ndarray:
    """The probability that a client gets an example of a label, float64 [clients, labels]."""
    if isinstance(skew, bool) or not isinstance(skew, int | float | np.number) or not skew >= 0:
        raise ValueError(f"skew must be a number of at least 0, got {skew!r}.")
    weights = primary.astype(float) if math.isinf(skew) else 1 + skew * primary
    total = weights.sum(axis=0)
    return np.where(total > 0, weights, 1.0) / np.where(total > 0, total, len(primary))


def label_frequencies(data: Any, num_labels: int) -> np.ndarray:
    """The share of each label in every client's examples, float64 [clients, labels].

    Args:
      data: `FederatedData` with a column `label`.
      num_labels: labels 0 to num_labels - 1.
    """
    check_integer("num_labels", num_labels, low=1)
    client_of_example = np.repeat(np.arange(data.num_clients), data.client_sizes)
    labels = whole_labels(data.columns["label"])
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"column 'label' must be whole numbers [examples], got {labels.dtype} {list(labels.shape)}."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_labels:
        raise ValueError(
            f"column 'label' must be 0 to {num_labels - 1}, got {labels.min()} to {labels.max()}."
        )
    if not data.client_sizes.all():
        empty = int(np.flatnonzero(data.client_sizes == 0)[0])
        raise ValueError(f"data must have examples of every client, client {empty} has none.")
    counts = np.zeros((data.num_clients, num_labels))
    np.add.at(counts, (client_of_example, labels), 1)
    return counts / counts.sum(axis=1, keepdims=True)


def accuracy_on_labels(per_label: Any, frequencies: Any) -> np.ndarray:
    """Accuracy on examples with other frequencies of labels than those it was measured on.

    With the frequencies of a client's own data, this is the private accuracy of its model. With those of
    another client, it is the model's accuracy on that client's data.

    Args:
      per_label: accuracy by label, [..., labels]; NaN where the test data have none.
      frequencies: [..., labels], each summing to 1; broadcast against per_label.

    Returns:
      float64 [...].

    Raises:
      ValueError: a label with a positive frequency has no test example.
    """
    check_not_masked("per_label", per_label)
    check_not_masked("frequencies", frequencies)
    per_label, frequencies = np.asarray(per_label, float), np.asarray(frequencies, float)
    per_label, frequencies = np.broadcast_arrays(per_label, frequencies)
    used = frequencies > 0
    if np.isnan(per_label[used]).any():
        label = int(np.argwhere(used & np.isnan(per_label))[0, -1])
        raise ValueError(f"per_label must have an accuracy of label {label}, which clients have.")
    return np.sum(np.where(used, per_label, 0) * frequencies, axis=-1)


def _check_counts(num_labels: int, num_clients: int, per_client: int) -> None:
    for name, value in (
        ("num_labels", num_labels),
        ("num_clients", num_clients),
        ("per_client", per_client),
    ):
        check_integer(name, value, low=1)
    if per_client > num_labels:
        raise ValueError(f"per_client must be at most the {num_labels} labels, got {per_client}.")
