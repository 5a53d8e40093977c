"""Adapters from TensorFlow Federated: objects with its ClientData interface, and its SQLite files.

Neither TFF nor TensorFlow is imported: TFF cannot be installed beside current versions of JAX. The
SQLite files hold one serialised `tf.train.Example` per row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.core.checks import check_not_masked
from fedcodist.data.columns import check_fixed_width
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.tf_example import decode_example
from fedcodist.data.tff_sqlite import Database, sqlite_database


def from_client_data(
    client_data: Any, columns: Iterable[str] | None = None, allow_empty: bool = False
) -> FederatedData:
    """Reads every client of an object with TFF's ClientData interface, in its order of ids.

    Args:
      client_data: has `client_ids` and `create_tf_dataset_for_client(id)`, an iterable of single
        examples (or a data set that has `as_numpy_iterator`). An example is a mapping from name to array
        or eager tensor, or a tuple of them.
      columns: names of the columns to keep, all by default. For plain tuples, names in the tuple's
        order, by default x and y of a pair.
      allow_empty: whether clients without examples are allowed.

    Raises:
      TypeError: an object without that interface.
      ValueError, TypeError: names the client and example whose columns, shapes or dtypes differ from the
        first example's, or whose text ends in NUL.
    """
    for attribute in ("client_ids", "create_tf_dataset_for_client"):
        if not hasattr(client_data, attribute):
            raise TypeError(
                f"client_data must have TFF's ClientData interface, "
                f"but {type(client_data).__name__} has no {attribute}"
            )
    names = None if columns is None else [columns] if isinstance(columns, str) else list(columns)
    table = _Table(names)
    client_ids, sizes = [], []
    for client_id in client_data.client_ids:
        before = table.num_examples
        dataset = client_data.create_tf_dataset_for_client(client_id)
        for row, example in enumerate(_numpy_examples(dataset)):
            where = f"client {client_id!r}, example {row}"
            try:
                named = _named(example, names)
                table.append({name: _to_numpy(value) for name, value in named.items()})
            except TypeError as error:
                raise TypeError(f"{where} {error}") from None
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        client_ids.append(client_id)
        sizes.append(table.num_examples - before)
    return _federated("client_data", table, client_ids, sizes, allow_empty)


def from_sqlite(
    path: str | os.PathLike[str],
    split: str,
    features: Mapping[str, tuple[Any, tuple[int, ...]]],
) -> FederatedData:
    """Reads one split of a TFF SQLite file, plain or LZMA-compressed, clients sorted by id.

    Args:
      path: the file.
      split: the split to read.
      features: column -> (dtype, shape of one example), for the features to read. For TFF's CIFAR-100:
        `{"image": (np.uint8, (32, 32, 3)), "label": (np.int32, ())}`. An int64_list fills integer or
        bool dtypes (its values must fit), a float_list floating ones, a bytes_list `bytes`.

    Raises:
      ValueError: names file, client and example. The split is unknown; the file is damaged or not such a
        database; a feature is missing or has another type or size; a record is malformed; or the number
        of examples is not the one in the file's `client_metadata`.
    """
    path = Path(path)
    checked_features = _checked_features(features)
    table = _Table(list(checked_features))
    sizes: dict[str, int] = {}
    with sqlite_database(path) as database:
        for client_id, blob in database.examples(split):
            row = sizes.get(client_id, 0)
            where = f"{path}: client {client_id!r}, example {row}"
            try:
                table.append(_typed_example(blob, checked_features))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            sizes[client_id] = row + 1
        if not sizes:
            raise ValueError(
                f"{path} has no split {split!r}; its splits are {database.splits('examples')}"
            )
        _check_client_metadata(database, split, sizes)
    return _federated(str(path), table, list(sizes), list(sizes.values()), False)


class _Table:
    """Examples under construction: all must have the columns, shapes and dtypes of the first."""

    def __init__(self, names: list[str] | None) -> None:
        self.names = names
        self.num_examples = 0
        self.columns: dict[str, list[np.ndarray]] = {}

    def append(self, example: Mapping[str, Any]) -> None:
        names = list(example) if self.names is None else self.names
        for name in names:
            if name not in example:
                raise ValueError(f"no column {name!r}; it has {sorted(example)}")
        if self.num_examples == 0:
            self.columns = {name: [] for name in names}
        if set(names) != set(self.columns):
            raise ValueError(
                f"it has columns {sorted(names)}, the first example {sorted(self.columns)}"
            )
        for name in names:
            value = _array(name, example[name])
            examples = self.columns[name]
            if examples and (
                value.shape != examples[0].shape or not _same_kind(value, examples[0])
            ):
                raise ValueError(
                    f"column {name!r} is {value.dtype} {list(value.shape)}, "
                    f"but {examples[0].dtype} {list(examples[0].shape)} in the first example"
                )
            examples.append(value)
        self.num_examples += 1


def _same_kind(value: np.ndarray, first: np.ndarray) -> bool:
    if first.dtype.kind in "SU":  # text differs in width; stacking takes the widest
        return value.dtype.kind == first.dtype.kind
    return value.dtype == first.dtype


def _federated(
    source: str, table: _Table, client_ids: list[str], sizes: list[int], allow_empty: bool
) -> FederatedData:
    if table.num_examples == 0:
        raise ValueError(f"{source} has no examples")
    columns = {name: np.stack(rows) for name, rows in table.columns.items()}
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return FederatedData.from_arrays(
        columns, offsets=offsets, client_ids=client_ids, allow_empty=allow_empty
    )


def _named(example: Any, names: Sequence[str] | None) -> Mapping[str, Any]:
    """An example's columns by name."""
    if isinstance(example, Mapping):
        return example
    if not isinstance(example, tuple):
        raise TypeError(
            "must be a mapping from column to array, or a tuple of arrays, got "
            f"{type(example).__name__}"
        )
    if hasattr(example, "_asdict"):
        return example._asdict()
    if names is None:
        if len(example) != 2:
            raise ValueError(f"columns must name the {len(example)} arrays of a tuple")
        return dict(zip(("x", "y"), example, strict=True))
    if len(names) != len(example):
        raise ValueError(
            f"columns must name all {len(example)} arrays of a tuple, it names {len(names)}"
        )
    return dict(zip(names, example, strict=True))


def _numpy_examples(dataset: Any) -> Iterable[Any]:
    """A client's examples, as arrays where its data set offers them."""
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else dataset


def _to_numpy(value: Any) -> Any:
    """The array of an eager tensor; anything else unchanged."""
    return value.numpy() if hasattr(value, "numpy") else value


def _array(name: str, value: Any) -> np.ndarray:
    """An array of a value, also of TensorFlow's bytes, which are objects."""
    check_not_masked(f"column {name!r}", value)
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(item, bytes) for item in array.flat):
        array = array.astype(np.bytes_)
    check_fixed_width(f"column {name!r}", array, value)
    return array


def _checked_features(
    features: Mapping[str, tuple[Any, tuple[int, ...]]],
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    if not isinstance(features, Mapping) or not features:
        raise ValueError(f"features must map names to (dtype, shape), got {features!r:.80}")
    checked = {}
    for name, described in features.items():
        try:
            dtype, shape = described
            checked[name] = (np.dtype(dtype), tuple(int(size) for size in shape))
        except (TypeError, ValueError):
            raise ValueError(
                f"features[{name!r}] must be (dtype, shape), got {described!r}"
            ) from None
        dtype = checked[name][0]
        if dtype.kind not in "biufS" or (dtype.kind == "S" and dtype.itemsize):
            raise ValueError(
                f"features[{name!r}]: dtype must be an integer, floating or bool type or bytes, "
                f"got {described[0]!r}"
            )
    return checked


def _typed_example(
    blob: bytes, features: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> dict[str, np.ndarray]:
    example = decode_example(blob, features)
    typed = {}
    for name, (dtype, shape) in features.items():
        if name not in example:
            raise ValueError(f"no feature {name!r}; it has {sorted(decode_example(blob))}")
        values = example[name]
        if len(values) != math.prod(shape):
            raise ValueError(
                f"feature {name!r} has {len(values)} values, but shape {list(shape)} asks for "
                f"{math.prod(shape)}"
            )
        if isinstance(values, list):
            array = _bytes_array(name, values, dtype)
        else:
            array = _number_array(name, values, dtype)
        typed[name] = array.reshape(shape)
    return typed


def _bytes_array(name: str, values: list[bytes], dtype: np.dtype) -> np.ndarray:
    if dtype.kind != "S" and values:
        raise ValueError(f"feature {name!r} is a bytes_list, which cannot fill dtype {dtype}")
    array = np.array(values, dtype=dtype)
    check_fixed_width(f"feature {name!r}", array, values)
    return array


def _number_array(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    kind, accepted = ("float_list", "f") if values.dtype.kind == "f" else ("int64_list", "biu")
    if dtype.kind not in accepted:
        raise ValueError(f"feature {name!r} is a {kind}, which cannot fill dtype {dtype}")
    with np.errstate(over="ignore"):
        array = values.astype(dtype)
    if kind == "float_list":
        fits = np.array_equal(np.isinf(array), np.isinf(values))
    else:
        is_negative = dtype.kind == "u" and (values < 0).any()  # it wraps, and would wrap back
        fits = not is_negative and np.array_equal(array.astype(np.int64), values)
    if not fits:
        raise ValueError(f"feature {name!r} has values that do not fit {dtype}")
    return array


def _check_client_metadata(database: Database, split: str, sizes: Mapping[str, int]) -> None:
    for client_id, num_examples in (database.client_sizes(split) or {}).items():
        if sizes.get(client_id, 0) != num_examples:
            raise ValueError(
                f"{database.file.path}: client {client_id!r} has {sizes.get(client_id, 0)} examples, "
                f"client_metadata says {num_examples}"
            )
