"""Which client owns each example: the order that puts a client's examples side by side, and offsets."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcodist.data.client_ids import default_client_ids, natural_ids_as_text
from fedcodist.data.columns import one_array


def order_of_client_of_row(
    client_of_row: Any,
    num_examples: int,
    client_ids: Sequence[str] | np.ndarray | None,
    allow_empty: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(order of the examples, offsets, natural ids) if each example names its client.

    Args are those of `FederatedData.from_arrays`.
    """
    owners = natural_ids_as_text("client_of_row", client_of_row)
    if owners.shape != (num_examples,):
        raise ValueError(
            f"client_of_row must name a client for each of the {num_examples} examples, "
            f"got shape {list(owners.shape)}"
        )
    if owners.dtype.kind == "U":
        if client_ids is not None:
            raise ValueError("client_ids cannot be given when client_of_row holds natural ids")
        natural_ids, owners = np.unique(owners, return_inverse=True)
        num_clients = len(natural_ids)
    elif owners.dtype.kind in "iu":
        if num_examples and owners.min() < 0:
            raise ValueError(f"client_of_row must not be negative, got {owners.min()}")
        largest = int(owners.max()) if num_examples else -1
        if client_ids is not None:
            num_clients = len(client_ids)
            if largest >= num_clients:
                raise ValueError(
                    f"client_of_row must be below the number of client_ids, {num_clients}, "
                    f"got {largest}"
                )
        elif allow_empty:
            raise ValueError(
                "client_ids must be given with integer client_of_row and allow_empty=True: "
                "they say how many clients there are"
            )
        else:
            num_clients = largest + 1
            if num_clients > num_examples:
                raise ValueError(
                    f"client_of_row holds client index {largest} but there are only {num_examples} "
                    "examples, so some client has none; pass natural ids as strings"
                )
        natural_ids = default_client_ids(num_clients)
    else:
        raise TypeError(f"client_of_row must be integers, text or bytes, got {owners.dtype}")
    order = np.argsort(owners, kind="stable")
    return order, offsets_of_sizes(np.bincount(owners, minlength=num_clients)), natural_ids


def order_of_partition(
    partition: Sequence[Any], num_examples: int
) -> tuple[np.ndarray, np.ndarray]:
    """(order of the examples, offsets) if each client names its examples."""
    if not hasattr(partition, "__len__") or isinstance(partition, str | bytes):
        raise TypeError(
            f"partition must hold an array of examples for each client, got {type(partition).__name__}"
        )
    if len(partition) == 0:
        raise ValueError("partition must hold the examples of at least one client")
    # A set has no order, and NumPy would make a single object of it.
    parts = [
        one_array(
            f"partition[{index}]", sorted(examples) if isinstance(examples, set) else examples
        )
        for index, examples in enumerate(partition)
    ]
    for index, examples in enumerate(parts):
        if examples.ndim != 1 or (len(examples) and examples.dtype.kind not in "iu"):
            raise ValueError(
                f"partition[{index}] must be a vector of indices of examples, "
                f"got {examples.dtype} {list(examples.shape)}"
            )
    order = np.concatenate(parts).astype(np.int64)
    outside = order[(order < 0) | (order >= num_examples)]
    if len(outside):
        raise ValueError(f"partition must hold examples in 0..{num_examples - 1}, got {outside[0]}")
    repeated = np.flatnonzero(np.bincount(order, minlength=1) > 1)
    if len(repeated):
        raise ValueError(f"partition must use every example at most once, got {repeated[0]} twice")
    return order, offsets_of_sizes([len(examples) for examples in parts])


def checked_offsets(offsets: Any, num_examples: int) -> np.ndarray:
    """Offsets as read-only int64. Raises ValueError unless they rise from 0 to `num_examples`."""
    array = one_array("offsets", offsets)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2:
        raise ValueError(
            "offsets must be integers [num_clients + 1] with at least one client, "
            f"got {array.dtype} {list(array.shape)}"
        )
    array = array.astype(np.int64)
    if array[0] != 0 or array[-1] != num_examples:
        raise ValueError(
            f"offsets must run from 0 to the number of examples, {num_examples}, "
            f"got {array[0]} to {array[-1]}"
        )
    decreasing = np.flatnonzero(np.diff(array) < 0)
    if len(decreasing):
        index = int(decreasing[0])
        raise ValueError(
            f"offsets must not decrease, got {array[index]} then {array[index + 1]} "
            f"at client index {index}"
        )
    array.setflags(write=False)
    return array


def offsets_of_sizes(sizes: Any) -> np.ndarray:
    """int64 `[num_clients + 1]`: where each client's examples begin, from their numbers."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def take_examples(column: np.ndarray, order: np.ndarray) -> np.ndarray:
    """A column's examples in this order, copied unless they are in order already."""
    # A view of a memory-mapped column is not read.
    if np.array_equal(order, np.arange(len(order))):
        return column[: len(order)]
    return column[order]
