"""FedJAX's SQLite files, written here as its builder writes them."""

import sqlite3
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import fedjax_sqlite, from_fedjax_sqlite, unpacking

TABLE = """CREATE TABLE federated_data (
    client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER NOT NULL
)"""


def packed(array):
    if array.dtype.kind == "O":
        return msgpack.ExtType(4, msgpack.packb((array.shape, list(array.flat)), use_bin_type=True))
    content = (array.shape, array.dtype.name, array.tobytes("C"))
    return msgpack.ExtType(1, msgpack.packb(content, use_bin_type=True))


def blob(columns):
    return zlib.compress(msgpack.packb({name: packed(array) for name, array in columns.items()}))


def write(path, rows, table=TABLE):
    with sqlite3.connect(path) as connection:
        connection.execute(table)
        connection.executemany("INSERT INTO federated_data VALUES (?, ?, ?)", rows)
    connection.close()
    return path


def client(count, seed=0):
    draws = np.random.default_rng(seed)
    return {
        "pixels": draws.random((count, 3, 2)).astype(np.float32),
        "label": draws.integers(0, 9, count).astype(np.int32),
    }


def test_clients_come_in_the_order_of_the_file(tmp_path):
    clients = {b"b:2": client(3), b"a:1": client(1, 1), b"c": client(2, 2)}
    rows = [(name, blob(table), len(table["label"])) for name, table in clients.items()]
    data = from_fedjax_sqlite(write(tmp_path / "a.sqlite", rows))
    assert data.client_ids.tolist() == ["b:2", "a:1", "c"]
    for name, table in clients.items():
        read = data.get_client(name.decode())
        for column, expected in table.items():
            np.testing.assert_array_equal(read[column], expected)
            assert read[column].dtype == expected.dtype


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=5).filter(lambda text: not text.endswith(b"\0")), min_size=1))
def test_byte_strings(texts):
    array = np.empty(len(texts), object)
    array[:] = texts
    read = fedjax_sqlite._client(blob({"text": array}), len(texts))["text"]
    assert read.tolist() == texts


def test_files_of_fedjax_itself(tmp_path):
    fedjax = pytest.importorskip("fedjax")
    path = str(tmp_path / "a.sqlite")
    clients = {b"x": client(2), b"y": client(4, 1)}
    with fedjax.SQLiteFederatedDataBuilder(path) as builder:
        builder.add_many(clients.items())
    data = from_fedjax_sqlite(path)
    np.testing.assert_array_equal(data.get_client("y")["pixels"], clients[b"y"]["pixels"])


GOOD = blob(client(2))
SCALAR = zlib.compress(msgpack.packb({"x": msgpack.ExtType(3, b"")}))
SHAPE = zlib.compress(
    msgpack.packb({"x": msgpack.ExtType(1, msgpack.packb(((2, 2), "int32", b"1234")))})
)
OBJECTS = zlib.compress(
    msgpack.packb({"x": msgpack.ExtType(1, msgpack.packb(((1,), "object", b"12345678")))})
)


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (GOOD, 3, "'pixels' has 2 examples, the column num_examples says 3"),
        (GOOD[:-9], 2, "data is cut off"),
        (b"nothing", 2, "incorrect header check"),
        ("text", 2, "data must be bytes, got str"),
        (zlib.compress(b"\xc1"), 2, "cannot be unpacked|Unpack failed|format"),
        (zlib.compress(msgpack.packb([1])), 2, "data must be a mapping to arrays, got list"),
        (zlib.compress(msgpack.packb({"x": 3})), 2, "'x' must be an array"),
        (SCALAR, 2, "columns must be arrays, got FedJAX's type 3"),
        (SHAPE, 2, "cannot reshape"),
        (OBJECTS, 1, "arrays must be numbers, got dtype object"),
        (blob(client(2) | {"label": np.zeros((2, 2))}), 2, "column 'label' is float64"),
    ],
)
def test_damaged_files_are_one_line(data, count, message, tmp_path):
    rows = [(b"good", GOOD, 2), (b"bad", data, count)]
    path = write(tmp_path / "a.sqlite", rows)
    with pytest.raises(ValueError, match=message) as error:
        from_fedjax_sqlite(path)
    assert str(error.value).startswith(f"{path}: client 'bad'") and "\n" not in str(error.value)


def test_what_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "_ALWAYS_ALLOWED", 1000)
    path = write(tmp_path / "a", [(b"a", blob({"x": np.zeros(1 << 20)}), 1 << 20)])
    with pytest.raises(
        ValueError, match=r"client 'a': data unpacks from .* to more than .* refused"
    ):
        from_fedjax_sqlite(path)


def test_other_databases_are_one_line(tmp_path):
    (tmp_path / "text").write_text("no database at all")
    with pytest.raises(ValueError, match="is neither an SQLite database"):
        from_fedjax_sqlite(tmp_path / "text")
    with sqlite3.connect(tmp_path / "other") as connection:
        connection.execute("CREATE TABLE examples (client_id TEXT)")
    with pytest.raises(ValueError, match="cannot be read as FedJAX's clients: no such table"):
        from_fedjax_sqlite(tmp_path / "other")
    with pytest.raises(ValueError, match="has no clients"):
        from_fedjax_sqlite(write(tmp_path / "empty", []))
    twice = write(
        tmp_path / "twice", [(b"a", GOOD, 2), ("a", GOOD, 2)]
    )  # bytes and text are different keys, but one client
    with pytest.raises(ValueError, match="client 'a' is there twice"):
        from_fedjax_sqlite(twice)
