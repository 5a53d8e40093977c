"""Clients from a partitioner of flwr-datasets, Flower's package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcodist.core.checks import check_boolean, check_integer
from fedcodist.data.column_choice import column_choice
from fedcodist.data.columns import array_of
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.hugging_face import from_hugging_face, is_hugging_face


def from_flower(
    partitioner: Any,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> FederatedData:
    """Reads all partitions of a partitioner of flwr-datasets; a partition is a client.

        partitioner = DirichletPartitioner(num_partitions=100, partition_by="label", alpha=0.3)
        partitioner.dataset = datasets.load_dataset("cifar10", split="train")
        train = fc.from_flower(partitioner, {"image": "img", "label": "label"})

    For Flower's `FederatedDataset`, load any partition first and pass `federated.partitioners["train"]`.

    Args:
      partitioner: has `num_partitions` and `load_partition(index)`, which returns a `datasets.Dataset`
        or a mapping from column to array `[examples, ...]`.
      columns: the features to read, or a mapping from column to feature; all by default.
      allow_empty: whether partitions without examples are allowed.

    Returns:
      The clients in the order of partitions, named "0", "1", ... or by the natural ids of a
      `NaturalIdPartitioner`.

    Raises:
      TypeError: an object without that interface, or partitions of another type.
      ValueError: names the partition that is empty, or that has other columns than the first.
    """
    check_boolean("allow_empty", allow_empty)
    if not callable(getattr(partitioner, "load_partition", None)):
        raise TypeError(
            "partitioner must have num_partitions and load_partition(index), got "
            f"{type(partitioner).__name__}"
        )
    try:
        count = partitioner.num_partitions
    except AttributeError as error:
        reason = " ".join(str(error).split())
        raise TypeError(
            f"partitioner must have num_partitions and a data set assigned: {reason:.160}"
        ) from None
    check_integer("partitioner.num_partitions", count, low=1)
    # The columns must be known before a partition that has no examples, and so no arrays.
    tables = [_columns(partitioner, index, columns) for index in range(count)]
    full = next((table for table in tables if table), None)
    if full is None:
        raise ValueError("partitioner has no examples in any partition")
    empty = {name: column[:0] for name, column in full.items()}
    named = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    ids = [str(named.get(index, index)) for index in range(count)]
    clients = {client_id: table or empty for client_id, table in zip(ids, tables, strict=True)}
    if len(clients) < count:
        raise ValueError(
            "partitioner.partition_id_to_natural_id must name each partition differently"
        )
    return FederatedData.from_client_dict(clients, allow_empty=allow_empty)


def _columns(
    partitioner: Any, index: int, columns: Iterable[str] | Mapping[str, str] | None
) -> dict[str, np.ndarray] | None:
    """A partition's columns; None where it has no examples."""
    partition = partitioner.load_partition(index)
    try:
        if is_hugging_face(partition):
            return from_hugging_face(partition, columns=columns) if len(partition) else None
        if not isinstance(partition, Mapping):
            raise TypeError(
                f"must be a datasets.Dataset or a mapping to arrays, got {type(partition).__name__}"
            )
        choice = column_choice(columns, list(partition), "column")
        table = {name: array_of(name, partition[column]) for name, column in choice.items()}
    except (TypeError, ValueError) as error:
        raise type(error)(f"partition {index}: {error}") from None
    return table if any(map(len, table.values())) else None
