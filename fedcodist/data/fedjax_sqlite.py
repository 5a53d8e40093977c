"""FedJAX's SQLite files: one row per client, its arrays packed by msgpack and compressed by zlib.

The table `federated_data` has the columns `client_id`, `data` and `num_examples`. FedJAX extends msgpack
by four types, of which columns are two: arrays of numbers, and arrays of byte strings.
"""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from fedcodist.data.columns import check_fixed_width
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.sqlite_file import CLIENT_ID, SqliteFile, sqlite_file
from fedcodist.data.unpacking import check_unpacked, largest_unpacked

_TABLE = "federated_data"
_NUMBERS, _BYTE_STRINGS = 1, 4  # FedJAX's codes of extension types
_MALFORMED = (ValueError, TypeError, OverflowError, zlib.error, msgpack.UnpackException)


def from_fedjax_sqlite(path: str | os.PathLike[str]) -> FederatedData:
    """Reads a file that FedJAX's `SQLiteFederatedDataBuilder` wrote, such as those of its data sets.

    FedJAX itself is not needed.

    Args:
      path: the file, plain or LZMA-compressed.

    Returns:
      The clients in the order of the file, which is FedJAX's. Columns have the names and dtypes of the
      file, and byte strings become fixed-width.

    Raises:
      ValueError: names file and client. The file is damaged or no such database, a client's columns,
        shapes or dtypes differ from the first client's, or its number of examples from `num_examples`.
    """
    path = Path(path)
    clients: dict[str, dict[str, np.ndarray]] = {}
    with sqlite_file(path, "FedJAX's clients") as file:
        for client_id, row, num_examples in _rows(file):
            where = f"{path}: client {client_id!r}"
            if client_id in clients:
                raise ValueError(f"{where} is there twice")
            try:
                clients[client_id] = _client(_data(file, row), num_examples)
            except _MALFORMED as error:
                raise ValueError(f"{where}: {_reason(error)}") from None
    if not clients:
        raise ValueError(f"{path} has no clients")
    try:
        return FederatedData.from_client_dict(clients, allow_empty=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _rows(file: SqliteFile) -> list[tuple[str, int, Any]]:
    """(client, number of the row, examples that it should have), in the order of the file."""
    file.check_table(_TABLE)
    rows = file.query(f"SELECT {CLIENT_ID}, rowid, num_examples FROM {_TABLE} ORDER BY rowid")
    return [(file.checked_id(client_id), row, count) for client_id, row, count in rows]


def _data(file: SqliteFile, row: int) -> bytes:
    cursor = file.connection.execute(f"SELECT data FROM {_TABLE} WHERE rowid = ?", (row,))
    (data,) = cursor.fetchone()
    if not isinstance(data, bytes):
        raise ValueError(f"data must be bytes, got {type(data).__name__}")
    return data


def _client(compressed: bytes, num_examples: Any) -> dict[str, np.ndarray]:
    stream = zlib.decompressobj()
    packed = stream.decompress(compressed, largest_unpacked(len(compressed)) + 1)
    check_unpacked("data", len(packed), len(compressed))
    if not stream.eof:
        raise ValueError("data is cut off")
    columns = msgpack.unpackb(packed, raw=False, ext_hook=_extension)
    if not isinstance(columns, dict) or not columns:
        raise ValueError(f"data must be a mapping to arrays, got {type(columns).__name__}")
    for name, column in columns.items():
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise ValueError(f"{name!r} must be an array [examples, ...], got {column!r:.60}")
        if len(column) != num_examples:
            raise ValueError(
                f"{name!r} has {len(column)} examples, the column num_examples says {num_examples}"
            )
    return columns


def _extension(code: int, packed: bytes) -> np.ndarray:
    if code == _NUMBERS:
        shape, name, values = msgpack.unpackb(packed, raw=True)
        dtype = np.dtype(name.decode("ascii"))
        if dtype.kind not in "biufc":
            raise ValueError(f"arrays must be numbers, got dtype {dtype}")
        return np.frombuffer(values, dtype).reshape(shape)
    if code == _BYTE_STRINGS:
        shape, texts = msgpack.unpackb(packed, raw=True)
        if not all(isinstance(text, bytes) for text in texts) or math.prod(shape) != len(texts):
            raise ValueError(f"an array of byte strings is malformed, shape {shape!r:.60}")
        array = np.array(texts, dtype=np.bytes_)
        check_fixed_width("an array", array, texts)
        return array.reshape(shape)
    raise ValueError(f"columns must be arrays, got FedJAX's type {code}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or f"data cannot be unpacked ({type(error).__name__})"
