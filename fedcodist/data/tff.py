"""Adapters from TensorFlow Federated: its ClientData objects and its published SQLite files.

Neither TFF nor TensorFlow is imported. The SQLite files hold one serialised `tf.train.Example` a
row, whose few message types are decoded here.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedcodist.data.federated_data import FederatedData

_SQLITE_MAGIC = b"SQLite format 3\0"
_LZMA_MAGICS = (b"\xfd7zXZ\0", b"]\0\0")  # the .xz container and the older .lzma


def from_client_data(
    client_data: Any, columns: Iterable[str] | None = None, allow_empty: bool = False
) -> FederatedData:
    """Reads every client of an object with TFF's ClientData interface, in its order of ids.

    `client_data` has `client_ids` and `create_tf_dataset_for_client(id)`, an iterable of single
    examples, each a mapping from name to array or eager tensor (or a data set that has
    `as_numpy_iterator`). `columns` names those to keep; all by default.

    Raises TypeError for an object without that interface, and ValueError or TypeError naming the
    client and example whose columns, shapes or dtypes differ from the first example's.
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
        before = table.num_rows
        dataset = client_data.create_tf_dataset_for_client(client_id)
        for row, example in enumerate(numpy_examples(dataset)):
            where = f"client {client_id!r}, example {row}"
            if not isinstance(example, Mapping):
                raise TypeError(
                    f"{where} must be a mapping from column to array, got {type(example).__name__}"
                )
            arrays = {name: np.asarray(to_numpy(value)) for name, value in example.items()}
            try:
                table.append(arrays)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        client_ids.append(client_id)
        sizes.append(table.num_rows - before)
    return _federated("client_data", table, client_ids, sizes, allow_empty)


def from_sqlite(
    path: str | os.PathLike[str],
    split: str,
    features: Mapping[str, tuple[Any, tuple[int, ...]]],
) -> FederatedData:
    """Reads one split of a TFF SQLite file, plain or LZMA-compressed, clients sorted by id.

    `features`: column name -> (dtype, shape of one example), for the features wanted, e.g. TFF's
    CIFAR-100: `{"image": (np.uint8, (32, 32, 3)), "label": (np.int32, ())}`. An int64_list fills
    integer or bool dtypes (its values must fit), a float_list floating ones, a bytes_list `bytes`.

    Raises ValueError naming file, client and example for an unknown split, a file that is damaged
    or is not such a database, a missing feature, one of another type or size, a malformed record,
    and a number of examples other than the file's own `client_metadata` says.
    """
    path = Path(path)
    checked_features = _checked_features(features)
    table = _Table(list(checked_features))
    sizes: dict[str, int] = {}
    with sqlite_connection(path) as connection:
        rows = connection.execute(
            "SELECT CAST(client_id AS TEXT), IFNULL(CAST(serialized_example_proto AS BLOB), x'') "
            "FROM examples WHERE split_name = ? ORDER BY client_id, rowid",
            (split,),
        )
        for client_id, blob in rows:
            row = sizes.get(client_id, 0)
            where = f"{path}: client {client_id!r}, example {row}"
            try:
                table.append(_typed_example(decode_example(blob), checked_features))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            sizes[client_id] = row + 1
        if not sizes:
            found = [
                name for (name,) in connection.execute("SELECT DISTINCT split_name FROM examples")
            ]
            raise ValueError(f"{path} has no split {split!r}; its splits are {sorted(found)}")
        _check_client_metadata(connection, path, split, sizes)
    return _federated(str(path), table, list(sizes), list(sizes.values()), False)


def decode_example(blob: bytes) -> dict[str, list[bytes] | np.ndarray]:
    """Decodes a serialised `tf.train.Example`: feature -> bytes list, or float32 or int64 vector.

    Packed and unpacked lists are read; unknown fields are skipped, as protocol buffers ask; a
    feature without any list is an empty list. Raises ValueError where the blob is malformed.
    """
    # Example { features = 1 }, Features { map feature = 1 }, an entry { key = 1, value = 2 }.
    result: dict[str, list[bytes] | np.ndarray] = {}
    for features in _messages(blob, 1):
        for entry in _messages(features, 1):
            name, value = "", b""
            for field, wire_type, content in _fields(entry):
                if field == 1 and wire_type == 2:
                    try:
                        name = content.decode()
                    except UnicodeDecodeError:
                        raise ValueError(
                            "malformed tf.train.Example: a name is not UTF-8"
                        ) from None
                elif field == 2 and wire_type == 2:
                    value += content  # a message in pieces is merged by concatenation
            result[name] = _decode_feature(value)
    return result


class _Table:
    """Rows under construction: every row must have the columns, shapes and dtypes of the first."""

    def __init__(self, names: list[str] | None) -> None:
        self.names = names
        self.num_rows = 0
        self.columns: dict[str, list[np.ndarray]] = {}

    def append(self, example: Mapping[str, np.ndarray]) -> None:
        names = list(example) if self.names is None else self.names
        for name in names:
            if name not in example:
                raise ValueError(f"no column {name!r}; it has {sorted(example)}")
        if self.num_rows == 0:
            self.columns = {name: [] for name in names}
        if set(names) != set(self.columns):
            raise ValueError(
                f"it has columns {sorted(names)}, the first example {sorted(self.columns)}"
            )
        for name in names:
            value = example[name]
            if value.dtype.kind == "O" and all(isinstance(item, bytes) for item in value.flat):
                value = value.astype(np.bytes_)
            rows = self.columns[name]
            if rows and (value.shape != rows[0].shape or not _same_kind(value, rows[0])):
                raise ValueError(
                    f"column {name!r} is {value.dtype} {list(value.shape)}, "
                    f"but {rows[0].dtype} {list(rows[0].shape)} in the first example"
                )
            rows.append(value)
        self.num_rows += 1


def _same_kind(value: np.ndarray, first: np.ndarray) -> bool:
    if first.dtype.kind in "SU":  # text differs in width; stacking takes the widest
        return value.dtype.kind == first.dtype.kind
    return value.dtype == first.dtype


def _federated(
    source: str, table: _Table, client_ids: list[str], sizes: list[int], allow_empty: bool
) -> FederatedData:
    if table.num_rows == 0:
        raise ValueError(f"{source} has no examples")
    columns = {name: np.stack(rows) for name, rows in table.columns.items()}
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return FederatedData.from_arrays(
        columns, offsets=offsets, client_ids=client_ids, allow_empty=allow_empty
    )


def numpy_examples(dataset: Any) -> Iterable[Any]:
    """A client's examples, of arrays where its data set can give them."""
    return dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else dataset


def to_numpy(value: Any) -> Any:
    """What an eager tensor holds; anything else as it is."""
    return value.numpy() if hasattr(value, "numpy") else value


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
    example: Mapping[str, list[bytes] | np.ndarray],
    features: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
) -> dict[str, np.ndarray]:
    typed = {}
    for name, (dtype, shape) in features.items():
        if name not in example:
            raise ValueError(f"no feature {name!r}; it has {sorted(example)}")
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
    # Fixed-width bytes are padded with NUL, so a trailing one would be lost.
    if any(value.endswith(b"\0") for value in values):
        raise ValueError(f"feature {name!r} has bytes that end in NUL")
    return np.array(values, dtype=dtype)


def _number_array(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    kind, accepted = ("float_list", "f") if values.dtype.kind == "f" else ("int64_list", "biu")
    if dtype.kind not in accepted:
        raise ValueError(f"feature {name!r} is a {kind}, which cannot fill dtype {dtype}")
    array = values.astype(dtype)
    if kind == "int64_list" and not np.array_equal(array.astype(np.int64), values):
        raise ValueError(f"feature {name!r} has values that do not fit {dtype}")
    return array


def _check_client_metadata(
    connection: sqlite3.Connection, path: Path, split: str, sizes: Mapping[str, int]
) -> None:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'client_metadata'")
    if tables.fetchone() is None:
        return
    expected = connection.execute(
        "SELECT CAST(client_id AS TEXT), num_examples FROM client_metadata WHERE split_name = ?",
        (split,),
    )
    for client_id, num_examples in expected:
        if sizes.get(client_id, 0) != num_examples:
            raise ValueError(
                f"{path}: client {client_id!r} has {sizes.get(client_id, 0)} examples, "
                f"client_metadata says {num_examples}"
            )


@contextlib.contextmanager
def sqlite_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """An SQLite file for reading; a compressed one is unpacked to a temporary file.

    Raises ValueError, here and for whatever SQLite raises within the block, naming the file.
    """
    with contextlib.ExitStack() as stack:
        plain = path
        if is_compressed(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            plain = Path(folder) / "examples.sqlite"
            decompress(path, plain)
        try:
            connection = sqlite3.connect(f"file:{quote(str(plain.resolve()))}?mode=ro", uri=True)
            stack.callback(connection.close)
            yield connection
        except sqlite3.Error as error:
            raise ValueError(f"{path} cannot be read as TFF's examples: {error}") from None


def is_compressed(path: Path) -> bool:
    """Whether a file is LZMA-compressed; raises ValueError where it is no SQLite database either."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not start.startswith(_LZMA_MAGICS) and start != _SQLITE_MAGIC:
        raise ValueError(f"{path} is neither an SQLite database nor LZMA-compressed")
    return start != _SQLITE_MAGIC


def decompress(path: Path, plain: Path) -> None:
    """Unpacks an LZMA-compressed file. Raises ValueError where it is damaged."""
    try:
        with lzma.open(path) as compressed, open(plain, "wb") as file:
            shutil.copyfileobj(compressed, file)
    except EOFError:
        size = path.stat().st_size
        raise ValueError(f"{path} is cut off: it ends at byte {size:,}, inside LZMA data") from None
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is damaged, it cannot be decompressed: {error}") from None


def _decode_feature(blob: bytes) -> list[bytes] | np.ndarray:
    # Feature { bytes_list = 1 | float_list = 2 | int64_list = 3 }, each { repeated value = 1 }.
    kind, lists = 0, b""
    for field, wire_type, content in _fields(blob):
        if field in (1, 2, 3) and wire_type == 2:
            lists = lists + content if field == kind else content  # the last kind set is the value
            kind = field
    if kind in (0, 1):
        return list(_messages(lists, 1))
    dtype = np.float32 if kind == 2 else np.int64
    parts = []
    for field, wire_type, content in _fields(lists):
        if field != 1:
            continue
        if kind == 2 and wire_type in (2, 5):
            if len(content) % 4:
                raise ValueError("malformed tf.train.Example: a float_list is cut off")
            parts.append(np.frombuffer(content, "<f4").astype(dtype))
        elif kind == 3 and wire_type == 2:
            parts.append(_packed_varints(content))
        elif kind == 3 and wire_type == 0:
            parts.append(np.array([content], np.uint64).view(dtype))
        else:
            raise ValueError(f"malformed tf.train.Example: wire type {wire_type} in a list")
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _messages(blob: bytes, number: int) -> Iterator[bytes]:
    for field, wire_type, content in _fields(blob):
        if field == number:
            if wire_type != 2:
                raise ValueError(f"malformed tf.train.Example: wire type {wire_type} for a message")
            yield content


def _fields(blob: bytes) -> Iterator[tuple[int, int, Any]]:
    position = 0
    while position < len(blob):
        tag, position = _varint(blob, position)
        field, wire_type = tag >> 3, tag & 7
        if field == 0:
            raise ValueError("malformed tf.train.Example: field number 0")
        if wire_type == 0:
            value, position = _varint(blob, position)
            yield field, wire_type, value
            continue
        if wire_type == 2:
            length, position = _varint(blob, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"malformed tf.train.Example: wire type {wire_type}")
        if position + length > len(blob):
            raise ValueError("malformed tf.train.Example: it is cut off")
        yield field, wire_type, blob[position : position + length]
        position += length


def _varint(blob: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(blob):
            raise ValueError("malformed tf.train.Example: it is cut off")
        byte = blob[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
    raise ValueError("malformed tf.train.Example: a number of more than 10 bytes")


def _packed_varints(content: bytes) -> np.ndarray:
    # All numbers at once: an image is thousands of them, too many for a Python loop.
    data = np.frombuffer(content, np.uint8)
    if len(data) == 0:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) == 0 or ends[-1] != len(data) - 1:
        raise ValueError("malformed tf.train.Example: an int64_list is cut off")
    if len(ends) == len(data):
        return data.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("malformed tf.train.Example: a number of more than 10 bytes")
    place = np.arange(len(data)) - np.repeat(starts, lengths)
    payload = (data & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(payload, starts).view(np.int64)
