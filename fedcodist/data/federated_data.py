"""Federated data sets as columns: one array per feature, with the examples of each client side by side.

The examples of client `i` are `offsets[i]:offsets[i + 1]` of every column. So a data set of a million
clients is a handful of arrays, in memory or memory-mapped, and reading a client copies nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcodist.core.checks import check_boolean, shown
from fedcodist.data.client_ids import (
    checked_client_ids,
    client_id_array,
    default_client_ids,
    ids_of_keys,
)
from fedcodist.data.columns import array_of, check_same_columns, checked_columns, one_array
from fedcodist.data.owners import (
    checked_offsets,
    offsets_of_sizes,
    order_of_client_of_row,
    order_of_partition,
    take_examples,
)


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """A fixed set of clients, each with a contiguous block of examples in every column.

    A client's *index*, which samplers and pools use, is its position in `client_ids`.

    Attributes:
      columns: name -> array `[num_examples, ...]` of numbers, bool or fixed-width strings. `np.memmap`
        is allowed. Values are kept as given; images stay uint8.
      offsets: int64 `[num_clients + 1]`, from 0 to `num_examples`.
      client_ids: the clients' natural ids, str `[num_clients]`.
      allow_empty: whether clients without examples are allowed.

    Raises:
      ValueError, TypeError: the arrays do not fit together, or a client has no examples and
        `allow_empty` is false.
    """

    columns: dict[str, np.ndarray]
    offsets: np.ndarray
    client_ids: np.ndarray
    allow_empty: bool = False

    def __post_init__(self) -> None:
        check_boolean("allow_empty", self.allow_empty)
        columns = checked_columns(self.columns)
        num_examples = len(next(iter(columns.values())))
        offsets = checked_offsets(self.offsets, num_examples)
        client_ids = checked_client_ids(self.client_ids, len(offsets) - 1)
        if not self.allow_empty:
            _check_every_client_has_examples(offsets, client_ids)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "client_ids", client_ids)

    @classmethod
    def from_arrays(
        cls,
        columns: Mapping[str, Any],
        *,
        client_of_row: Any = None,
        partition: Sequence[Any] | Mapping[Any, Any] | None = None,
        offsets: Any = None,
        client_ids: Sequence[str] | np.ndarray | None = None,
        allow_empty: bool = False,
    ) -> FederatedData:
        """Makes federated data from arrays `[examples, ...]` and the owner of each example.

        Exactly one of `client_of_row`, `partition` and `offsets` is given.

        Args:
          columns: name -> array `[examples, ...]`.
          client_of_row: `[examples]`, natural ids or client indices. Natural ids are text or UTF-8
            bytes, and clients are then sorted by id. Integers are indices from 0; pass integer ids as
            str.
          partition: for each client an integer array of its examples, as the functions of
            `fedcodist.data.partition` return them. Or `{client: examples}`, whose keys become ids.
            Examples of no client are left out.
          offsets: int `[num_clients + 1]`, for examples that are in the order of clients already.
          client_ids: names of the clients in index order; by default the natural ids, or "0", "1", ...
          allow_empty: whether clients without examples are allowed.

        Raises:
          ValueError, TypeError: arrays that do not fit together.
        """
        check_boolean("allow_empty", allow_empty)
        given = {"client_of_row": client_of_row, "partition": partition, "offsets": offsets}
        named = [name for name, value in given.items() if value is not None]
        if len(named) != 1:
            raise ValueError(
                "from_arrays needs exactly one of client_of_row, partition and offsets, "
                f"but got {' and '.join(named) if named else 'none of them'}; for examples "
                "without clients there is FederatedData.of_one_client"
            )
        columns = checked_columns(columns)
        num_examples = len(next(iter(columns.values())))
        if offsets is not None:
            order = None
        elif partition is not None:
            if isinstance(partition, Mapping):
                if client_ids is not None:
                    raise ValueError(
                        "client_ids cannot be given when partition is a mapping, whose keys they are"
                    )
                client_ids = ids_of_keys(partition)
                partition = list(partition.values())
            order, offsets = order_of_partition(partition, num_examples)
        else:
            order, offsets, natural_ids = order_of_client_of_row(
                client_of_row, num_examples, client_ids, allow_empty
            )
            client_ids = natural_ids if client_ids is None else client_ids
        if client_ids is None:
            client_ids = default_client_ids(len(offsets) - 1)
        if order is not None:
            columns = {name: take_examples(column, order) for name, column in columns.items()}
        return cls(columns, offsets, client_id_array(client_ids), allow_empty)

    @classmethod
    def from_client_dict(
        cls, clients: Mapping[str, Mapping[str, Any]], *, allow_empty: bool = False
    ) -> FederatedData:
        """Makes federated data from `{client id: {column: array [examples, ...]}}`, in that order.

        Raises:
          ValueError: there is no client, a column is masked, or a client's columns, shapes or dtypes
            differ from the first client's; names that client.
        """
        if not isinstance(clients, Mapping) or not clients:
            raise ValueError(
                f"clients must be a non-empty mapping from id to columns, got {clients!r:.60}"
            )
        tables = {
            client_id: {
                name: array_of(name, column, f"client {client_id!r}")
                for name, column in table.items()
            }
            for client_id, table in clients.items()
        }
        first_id, first = next(iter(tables.items()))
        for client_id, table in tables.items():
            check_same_columns(client_id, table, first_id, first)
        sizes = [len(next(iter(table.values()))) for table in tables.values()]
        columns = {
            name: np.concatenate([table[name] for table in tables.values()]) for name in first
        }
        client_ids = client_id_array(ids_of_keys(tables, "the ids of clients"))
        return cls(columns, offsets_of_sizes(sizes), client_ids, allow_empty)

    @classmethod
    def of_one_client(cls, columns: Mapping[str, Any], client_id: str = "0") -> FederatedData:
        """Makes federated data of all examples as one client's, such as a split for tests.

            test = fc.FederatedData.of_one_client({"image": images, "label": labels}, "test")

        Args:
          columns: name -> array `[examples, ...]`. They are not copied.
          client_id: the client's natural id.

        Raises:
          ValueError, TypeError: arrays that do not fit together, no examples, or an id that is no text.
        """
        columns = checked_columns(columns)
        num_examples = len(next(iter(columns.values())))
        return cls(columns, np.array([0, num_examples]), client_id_array([client_id]))

    @property
    def num_clients(self) -> int:
        """Number of clients, those without examples included."""
        return len(self.client_ids)

    @property
    def num_examples(self) -> int:
        """Number of examples of all clients."""
        return int(self.offsets[-1])

    @functools.cached_property
    def client_sizes(self) -> np.ndarray:
        """Number of examples of each client, int64 `[num_clients]`."""
        sizes = np.diff(self.offsets)
        sizes.setflags(write=False)
        return sizes

    @functools.cached_property
    def _index_of_id(self) -> dict[str, int]:
        return {client_id: index for index, client_id in enumerate(self.client_ids.tolist())}

    def client_index(self, client_id: str) -> int:
        """The index of the client with a natural id. Raises ValueError for an unknown id."""
        try:
            return self._index_of_id[client_id]
        except (KeyError, TypeError):
            raise ValueError(
                f"client_id {client_id!r} is not among the {self.num_clients} clients of this data "
                f"(the first is {str(self.client_ids[0])!r})"
            ) from None

    def client(self, index: int) -> dict[str, np.ndarray]:
        """Columns of the client at `index`, as views.

        Raises:
          ValueError, TypeError: an index out of range, or no integer.
        """
        allowed = f"0..{self.num_clients - 1}"
        try:
            place = operator.index(index)  # also of an array without dimensions
        except TypeError:
            raise TypeError(
                f"index must be an integer in {allowed}, got {shown(index)}; get_client takes ids"
            ) from None
        if not 0 <= place < self.num_clients:
            raise ValueError(f"index must be in {allowed}, got {place}")
        block = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        return {name: column[block] for name, column in self.columns.items()}

    def get_client(self, client_id: str) -> dict[str, np.ndarray]:
        """Columns of the client with this natural id, as views. Raises ValueError for an unknown id."""
        return self.client(self.client_index(client_id))

    def get_clients(self, client_ids: Iterable[str]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Iterates over `(id, columns)` of the named clients, in the order given."""
        for client_id in client_ids:
            yield client_id, self.get_client(client_id)

    def clients(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Iterates over `(id, columns)` of all clients, in index order."""
        for index, client_id in enumerate(self.client_ids.tolist()):
            yield client_id, self.client(index)

    def select(self, client_indices: Any) -> FederatedData:
        """The data of some clients only.

        Consecutive clients are a view; other selections are copied into memory.

        Args:
          client_indices: int `[n]`, distinct; the result has their order.

        Raises:
          ValueError: no index, an index outside 0..num_clients-1, or one that is repeated.
        """
        indices = _checked_indices("client_indices", client_indices, self.num_clients)
        starts, sizes = self.offsets[indices], self.client_sizes[indices]
        if np.all(np.diff(indices) == 1):
            examples: slice | np.ndarray = slice(int(starts[0]), int(self.offsets[indices[-1] + 1]))
        else:
            within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            examples = np.repeat(starts, sizes) + within
        columns = {name: column[examples] for name, column in self.columns.items()}
        return FederatedData(
            columns, offsets_of_sizes(sizes), self.client_ids[indices], self.allow_empty
        )

    def keep(self, names: str | Iterable[str]) -> FederatedData:
        """The same clients with the named columns only. Raises ValueError for an unknown column."""
        names = self._checked_names(names)
        columns = {name: column for name, column in self.columns.items() if name in names}
        return FederatedData(columns, self.offsets, self.client_ids, self.allow_empty)

    def drop(self, names: str | Iterable[str]) -> FederatedData:
        """The same clients without the named columns. Raises ValueError for an unknown column."""
        names = self._checked_names(names)
        return self.keep([name for name in self.columns if name not in names])

    def all_examples(self) -> dict[str, np.ndarray]:
        """The examples of all clients, `{column: [num_examples, ...]}`, not copied."""
        return dict(self.columns)

    def _checked_names(self, names: str | Iterable[str]) -> set[str]:
        wanted = {names} if isinstance(names, str) else set(names)
        unknown = sorted(wanted - set(self.columns))
        if unknown:
            raise ValueError(f"no column {unknown[0]!r}; the columns are {sorted(self.columns)}")
        return wanted

    def __repr__(self) -> str:
        columns = ", ".join(
            f"{name}: {column.dtype}{list(column.shape[1:])}"
            for name, column in self.columns.items()
        )
        return (
            f"FederatedData({self.num_clients} clients, {self.num_examples} examples, "
            f"columns {{{columns}}})"
        )


def _check_every_client_has_examples(offsets: np.ndarray, client_ids: np.ndarray) -> None:
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise ValueError(
            f"client {str(client_ids[empty[0]])!r} has no examples "
            f"({len(empty)} of {len(client_ids)} clients; in Python, allow_empty=True keeps them)"
        )


def _checked_indices(name: str, indices: Any, num_clients: int) -> np.ndarray:
    array = one_array(name, indices)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a non-empty vector of client indices, "
            f"got {array.dtype} {list(array.shape)}"
        )
    array = array.astype(np.int64)
    outside = array[(array < 0) | (array >= num_clients)]
    if len(outside):
        raise ValueError(f"{name} must be in 0..{num_clients - 1}, got {outside[0]}")
    if len(np.unique(array)) < len(array):
        raise ValueError(f"{name} must be distinct, got a repeated index")
    return array
