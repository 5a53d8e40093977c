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

from fedcodist.core.checks import check_boolean, check_not_masked, check_several, shown

_COLUMN_KINDS = "biufcSU"  # bool, integers, floats, complex, byte strings and text


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
        columns = _checked_columns(self.columns)
        num_examples = len(next(iter(columns.values())))
        offsets = _checked_offsets(self.offsets, num_examples)
        client_ids = _checked_client_ids(self.client_ids, len(offsets) - 1)
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
        columns = _checked_columns(columns)
        num_examples = len(next(iter(columns.values())))
        if offsets is not None:
            order = None
        elif partition is not None:
            if isinstance(partition, Mapping):
                if client_ids is not None:
                    raise ValueError(
                        "client_ids cannot be given when partition is a mapping, whose keys they are"
                    )
                client_ids = _ids_of_keys(partition)
                partition = list(partition.values())
            order, offsets = _order_of_partition(partition, num_examples)
        else:
            order, offsets, natural_ids = _order_of_client_of_row(
                client_of_row, num_examples, client_ids, allow_empty
            )
            client_ids = natural_ids if client_ids is None else client_ids
        if client_ids is None:
            client_ids = default_client_ids(len(offsets) - 1)
        if order is not None:
            columns = {name: _take_examples(column, order) for name, column in columns.items()}
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
            _check_same_columns(client_id, table, first_id, first)
        sizes = [len(next(iter(table.values()))) for table in tables.values()]
        columns = {
            name: np.concatenate([table[name] for table in tables.values()]) for name in first
        }
        client_ids = client_id_array(_ids_of_keys(tables, "the ids of clients"))
        return cls(columns, _offsets_of_sizes(sizes), client_ids, allow_empty)

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
        columns = _checked_columns(columns)
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
            columns, _offsets_of_sizes(sizes), self.client_ids[indices], self.allow_empty
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


def default_client_ids(num_clients: int) -> np.ndarray:
    """The ids of clients that have no natural ones: their indices, str `[num_clients]`."""
    return np.arange(num_clients).astype(str)


def client_id_array(client_ids: Iterable[str] | np.ndarray, name: str = "client_ids") -> np.ndarray:
    """Natural ids as an array of text. Raises TypeError or ValueError for anything else.

    `name` is the argument's, for messages.
    """
    check_not_masked(name, client_ids)
    if isinstance(client_ids, np.ndarray) and client_ids.dtype.kind == "U":
        return np.asarray(client_ids)
    check_several(name, client_ids)
    ids = [_as_text(name, client_id) for client_id in client_ids]
    array = np.array(ids, dtype=np.str_)
    check_fixed_width(name, array, ids)
    return array


def array_of(name: str, column: Any, where: str = "") -> np.ndarray:
    """A column as an array. Raises TypeError or ValueError if it is no array or hides entries."""
    of = f" of {where}" if where else ""
    check_not_masked(f"column {name!r}{of}", column)
    try:
        array = column if isinstance(column, np.ndarray) else np.asarray(column)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"column {name!r}{of} must be an array [examples, ...] of one shape: {reason:.120}"
        ) from None
    if isinstance(column, list | tuple):
        check_fixed_width(f"column {name!r}{of}", array, column)
    return array.data if isinstance(array, np.ma.MaskedArray) else array


def check_fixed_width(name: str, array: np.ndarray, values: Any) -> None:
    """Raises ValueError unless an array of text or bytes has the values of which NumPy made it.

    NumPy pads text with NUL, so one at its end is lost. It also makes text of numbers beside text.
    """
    if array is values or array.dtype.kind not in "SU":
        return
    kind = str if array.dtype.kind == "U" else bytes
    for kept, value in zip(array.flat, np.asarray(values, object).flat, strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be all text where some is, got {value!r:.40}")
        if kept != value:
            raise ValueError(
                f"{name} must not have text that ends in NUL, which fixed width loses, got {value!r:.40}"
            )


def federated_splits(name: str, splits: Mapping[str, Any]) -> dict[str, FederatedData]:
    """Splits as federated data. Plain columns become the data of one client, named as the split.

    Raises:
      TypeError, ValueError: names the split that is neither.
    """
    if not isinstance(splits, Mapping):
        raise TypeError(f"{name} must be a mapping from names to data, got {type(splits).__name__}")
    federated = {
        split: federated_split(f"{name}[{split!r}]", split, data) for split, data in splits.items()
    }
    for split, data in federated.items():
        check_numbers(f"{name}[{split!r}]", data.columns)
    return federated


def federated_split(where: str, split: Any, data: Any) -> FederatedData:
    """A split as federated data; plain columns become the data of one client, named as the split.

    Args:
      where: what messages call the split.
      split: its name.
      data: FederatedData, or columns by name.

    Raises:
      TypeError, ValueError: data that are neither.
    """
    if isinstance(data, FederatedData):
        return data
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{where} must be FederatedData, or columns as a mapping from name to array, "
            f"got {type(data).__name__}"
        )
    try:
        return FederatedData.of_one_client(data, str(split))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_numbers(where: str, columns: Mapping[str, Any]) -> None:
    """Checks that columns hold numbers; raises TypeError that names one of text, objects or times."""
    for name, column in columns.items():
        if column.dtype.kind in "OSUMm":
            raise TypeError(
                f"{where} must have columns of numbers, {name!r} is {column.dtype}: leave it out or "
                "encode it."
            )


def _as_text(name: str, client_id: Any) -> str:
    """A natural id as text. TFDS and HDF5 store ids as bytes."""
    if isinstance(client_id, bytes):
        try:
            return client_id.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name} must be text in UTF-8, got {client_id!r:.60}") from None
    if not isinstance(client_id, str):
        raise TypeError(f"{name} must be strings, got {client_id!r:.60}")
    return str(client_id)


def _checked_columns(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not isinstance(columns, Mapping):
        raise TypeError(
            f"columns must be a mapping from name to array, got {type(columns).__name__}"
        )
    if not columns:
        raise ValueError("columns must not be empty")
    checked = {}
    for name, column in columns.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"column names must be non-empty strings, got {name!r}")
        array = array_of(name, column)
        if array.ndim == 0:
            raise ValueError(
                f"column {name!r} must have examples on its leading axis, got a scalar"
            )
        if array.dtype.kind not in _COLUMN_KINDS or not array.dtype.isnative:
            raise ValueError(
                f"column {name!r} must be numeric, bool or fixed-width strings in native byte "
                f"order, got dtype {array.dtype}"
            )
        checked[name] = array
    sizes = {name: len(array) for name, array in checked.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"columns must have equal numbers of examples, got {sizes}")
    return checked


def _checked_offsets(offsets: Any, num_examples: int) -> np.ndarray:
    array = _one_array("offsets", offsets)
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


def _checked_client_ids(client_ids: Any, num_clients: int) -> np.ndarray:
    array = client_id_array(client_ids).copy()
    if array.shape != (num_clients,):
        raise ValueError(
            f"client_ids must name each of the {num_clients} clients once, "
            f"got shape {list(array.shape)}"
        )
    values, counts = np.unique(array, return_counts=True)
    if len(values) < num_clients:
        raise ValueError(f"client_ids must be unique, got {str(values[counts > 1][0])!r} twice")
    if num_clients and not values[0]:
        raise ValueError("client_ids must not contain an empty string")
    array.setflags(write=False)
    return array


def _check_every_client_has_examples(offsets: np.ndarray, client_ids: np.ndarray) -> None:
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise ValueError(
            f"client {str(client_ids[empty[0]])!r} has no examples "
            f"({len(empty)} of {len(client_ids)} clients; in Python, allow_empty=True keeps them)"
        )


def _check_same_columns(
    client_id: str,
    table: dict[str, np.ndarray],
    first_id: str,
    first: dict[str, np.ndarray],
) -> None:
    if not table:
        raise ValueError(f"client {client_id!r} has no columns")
    if set(table) != set(first):
        raise ValueError(
            f"client {client_id!r} has columns {sorted(table)}, client {first_id!r} {sorted(first)}"
        )
    sizes = set()
    for name, column in table.items():
        if column.ndim == 0:
            raise ValueError(
                f"client {client_id!r}: column {name!r} must have examples, got a scalar"
            )
        sizes.add(len(column))
        expected = first[name]
        # Strings of different widths are one dtype to the user; concatenating takes the widest.
        same_dtype = column.dtype == expected.dtype or (
            column.dtype.kind == expected.dtype.kind and column.dtype.kind in "SU"
        )
        if column.shape[1:] != expected.shape[1:] or not same_dtype:
            raise ValueError(
                f"client {client_id!r}: column {name!r} is {column.dtype} "
                f"{list(column.shape[1:])} per example, but {expected.dtype} "
                f"{list(expected.shape[1:])} for client {first_id!r}"
            )
    if len(sizes) > 1:
        raise ValueError(
            f"client {client_id!r}: columns must have equal numbers of examples, "
            f"got { {name: len(column) for name, column in table.items()} }"
        )


def _ids_of_keys(partition: Mapping[Any, Any], name: str = "partition's keys") -> list[str]:
    """The keys of {client: examples}, text or integers, as natural ids in the order given.

    `name` is what messages call them.
    """
    ids = [
        str(int(key))
        if isinstance(key, int | np.integer) and not isinstance(key, bool)
        else _as_text(name, key)
        for key in partition
    ]
    if len(set(ids)) < len(ids):
        repeated = next(client_id for client_id in ids if ids.count(client_id) > 1)
        raise ValueError(f"{name} must be different clients, got {repeated!r} twice")
    return ids


def _order_of_partition(
    partition: Sequence[Any], num_examples: int
) -> tuple[np.ndarray, np.ndarray]:
    if not hasattr(partition, "__len__") or isinstance(partition, str | bytes):
        raise TypeError(
            f"partition must hold an array of examples for each client, got {type(partition).__name__}"
        )
    if len(partition) == 0:
        raise ValueError("partition must hold the examples of at least one client")
    # A set has no order, and NumPy would make a single object of it.
    parts = [
        _one_array(
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
    return order, _offsets_of_sizes([len(examples) for examples in parts])


def _order_of_client_of_row(
    client_of_row: Any,
    num_examples: int,
    client_ids: Sequence[str] | np.ndarray | None,
    allow_empty: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    return order, _offsets_of_sizes(np.bincount(owners, minlength=num_clients)), natural_ids


def _one_array(name: str, value: Any) -> np.ndarray:
    check_not_masked(name, value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be one array, got lists of different lengths") from None


def natural_ids_as_text(name: str, ids: Any) -> np.ndarray:
    """Natural ids, also in bytes or objects as in pandas, as an array of text; numbers as they are.

    The same text in bytes is the same id. Objects that are all integers are indices. `name` is the
    argument's, for messages.
    """
    if isinstance(ids, list | tuple):
        is_text = [isinstance(owner, str | bytes) for owner in ids]
        if any(is_text) and not all(is_text):
            # NumPy would make text of the others, such as 'nan'.
            other = ids[is_text.index(False)]
            raise ValueError(f"{name} must be all text where some are, got {other!r:.40}")
        if any(is_text):
            return client_id_array(ids, name)
    owners = _one_array(name, ids)
    if owners.dtype.kind not in "OS" or owners.ndim != 1:
        return owners
    if owners.dtype.kind == "O":
        is_whole = lambda owner: isinstance(owner, int | np.integer) and not isinstance(owner, bool)
        if len(owners) and all(map(is_whole, owners)):
            try:
                return owners.astype(np.int64)
            except OverflowError:
                raise ValueError(f"{name} must be integers that 64 bits hold") from None
    return client_id_array(owners.tolist(), name)


def _offsets_of_sizes(sizes: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _take_examples(column: np.ndarray, order: np.ndarray) -> np.ndarray:
    # Examples that are in order already stay a view: a memory-mapped column is then not read.
    if np.array_equal(order, np.arange(len(order))):
        return column[: len(order)]
    return column[order]


def _checked_indices(name: str, indices: Any, num_clients: int) -> np.ndarray:
    array = _one_array(name, indices)
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
