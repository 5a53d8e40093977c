import lzma
import sqlite3
import struct
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import from_client_data, from_sqlite, sqlite_file, unpacking
from fedcodist.data.tf_example import decode_example
from fedcodist.datasets.stackoverflow import sqlite_reader

# ClientData, as TFF has it, without TensorFlow


class Tensor:
    """An eager tensor: all that is known about it is `numpy()`; strings come as objects."""

    def __init__(self, value):
        self._value = np.asarray(value)

    def numpy(self):
        if self._value.dtype.kind == "S":
            value = self._value.astype(object)
            return value if value.ndim else value.item()
        return self._value if self._value.ndim else self._value[()]


class EagerDataset:
    """Iterating gives single examples as dicts of eager tensors."""

    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        for example in self.examples:
            yield {name: Tensor(value) for name, value in example.items()}


class NumpyDataset(EagerDataset):
    def as_numpy_iterator(self):
        for example in EagerDataset.__iter__(self):
            yield {name: tensor.numpy() for name, tensor in example.items()}

    def __iter__(self):
        raise AssertionError("as_numpy_iterator is there")


class ClientData:
    def __init__(self, clients, dataset=EagerDataset):
        self.clients, self.dataset = clients, dataset

    @property
    def client_ids(self):
        return list(self.clients)

    def create_tf_dataset_for_client(self, client_id):
        return self.dataset(self.clients[client_id])


def example(value, text=b"word"):
    return {
        "pixels": np.full((2, 3), value, np.float32),
        "label": np.int32(value),
        "text": text,
    }


CLIENTS = {"f2": [example(1), example(2, b"longer word")], "f1": [example(3, b"")]}


@pytest.mark.parametrize("dataset", [EagerDataset, NumpyDataset, list])
def test_client_data(dataset):
    data = from_client_data(ClientData(CLIENTS, dataset))
    assert data.client_ids.tolist() == ["f2", "f1"]
    np.testing.assert_array_equal(data.client_sizes, [2, 1])
    np.testing.assert_array_equal(data.columns["label"], [1, 2, 3])
    assert data.columns["label"].dtype == np.int32
    assert data.columns["pixels"].shape == (3, 2, 3)
    assert data.columns["pixels"].dtype == np.float32
    assert data.columns["text"].tolist() == [b"word", b"longer word", b""]


def test_client_data_columns():
    data = from_client_data(ClientData(CLIENTS), columns=["label"])
    assert list(data.columns) == ["label"]
    assert list(from_client_data(ClientData(CLIENTS), columns="text").columns) == ["text"]


def test_client_data_without_examples():
    client_data = ClientData({**CLIENTS, "f0": []})
    with pytest.raises(ValueError, match="client 'f0' has no examples"):
        from_client_data(client_data)
    assert from_client_data(client_data, allow_empty=True).num_clients == 3
    with pytest.raises(ValueError, match="client_data has no examples"):
        from_client_data(ClientData({"a": []}), allow_empty=True)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"label": np.int32(1)}, "it has columns"),
        ({**example(1), "pixels": np.zeros((3, 3), np.float32)}, "column 'pixels' is float32"),
        ({**example(1), "label": np.int64(1)}, "column 'label' is int64"),
        ({**example(1), "text": np.int64(1)}, "column 'text' is int64"),
    ],
)
def test_client_data_names_client_and_example(odd, message):
    with pytest.raises(ValueError, match=f"client 'f1', example 1: {message}"):
        from_client_data(ClientData({"f1": [example(1), odd]}))


@pytest.mark.parametrize("text", [b"word\0", [b"word\0", b"other"], "word\0", ["wörd\0", ""]])
def test_client_data_of_text_that_ends_in_nul(text):
    clients = ClientData({"a": [example(1, text)]}, list)
    message = "client 'a', example 0: column 'text' must not have text that ends in NUL"
    with pytest.raises(ValueError, match=message):
        from_client_data(clients)
    assert from_client_data(clients, columns="label").num_examples == 1


def test_client_data_of_plain_text():
    data = from_client_data(ClientData({"a": [example(1, "wörd"), example(2, "")]}, list))
    assert data.columns["text"].tolist() == ["wörd", ""]


def test_client_data_of_another_kind():
    with pytest.raises(TypeError, match="list has no client_ids"):
        from_client_data([])
    with pytest.raises(TypeError, match=r"client 'a', example 0 must be a mapping .*, got int"):
        from_client_data(ClientData({"a": [1]}, list))
    with pytest.raises(ValueError, match="no column 'z'"):
        from_client_data(ClientData(CLIENTS), columns=["z"])
    masked = {"x": np.ma.masked_equal([1, 2], 2)}
    with pytest.raises(ValueError, match=r"client 'a', example 0: column 'x' must not be masked"):
        from_client_data(ClientData({"a": [masked]}, list))


class Labelled(NamedTuple):
    pixels: np.ndarray
    label: np.int32


def test_tuples_are_columns():
    pairs = {
        "a": [(np.ones(3, np.float32), np.int32(1))],
        "b": [(np.zeros(3, np.float32), np.int32(2))],
    }
    data = from_client_data(ClientData(pairs, list))
    assert list(data.columns) == ["x", "y"] and data.columns["x"].shape == (2, 3)
    np.testing.assert_array_equal(data.columns["y"], [1, 2])
    data = from_client_data(ClientData(pairs, list), columns=["image", "label"])
    np.testing.assert_array_equal(data.columns["label"], [1, 2])
    named = {"a": [Labelled(np.ones(3), np.int32(1))]}
    assert list(from_client_data(ClientData(named, list)).columns) == ["pixels", "label"]
    assert list(from_client_data(ClientData(named, list), columns="label").columns) == ["label"]
    with pytest.raises(ValueError, match="client 'a', example 0: columns must name all 2 arrays"):
        from_client_data(ClientData(pairs, list), columns=["image"])
    with pytest.raises(ValueError, match="example 0: columns must name the 3 arrays of a tuple"):
        from_client_data(ClientData({"a": [(1, 2, 3)]}, list))


# tf.train.Example: a small encoder


def varint(value):
    value &= 2**64 - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def message(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def encode_list(values, packed):
    if isinstance(values, list):
        return message(1, b"".join(message(1, value) for value in values))
    floating = values.dtype.kind == "f"
    numbers = [struct.pack("<f", v) if floating else varint(int(v)) for v in values]
    if packed:
        content = message(1, b"".join(numbers)) if numbers else b""
    else:
        content = b"".join(varint(1 << 3 | (5 if floating else 0)) + n for n in numbers)
    return message(2 if floating else 3, content)


def encode_example(features, packed=True):
    entries = [
        message(1, message(1, name.encode()) + message(2, encode_list(values, packed)))
        for name, values in features.items()
    ]
    return message(1, b"".join(entries))


FEATURES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.lists(st.binary(max_size=8), max_size=4),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(
            lambda v: np.array(v, np.int64)
        ),
        st.lists(st.integers(0, 255), max_size=20).map(lambda v: np.array(v, np.int64)),
        st.lists(st.floats(width=32), max_size=5).map(lambda v: np.array(v, np.float32)),
    ),
    max_size=4,
)


def assert_same_features(decoded, features):
    assert set(decoded) == set(features)
    for name, values in features.items():
        if isinstance(values, list):
            assert decoded[name] == values
        else:
            assert decoded[name].dtype == values.dtype
            np.testing.assert_array_equal(decoded[name], values)


@settings(max_examples=60)
@given(FEATURES, st.booleans())
def test_decoder_inverts_encoder(features, packed):
    assert_same_features(decode_example(encode_example(features, packed)), features)


def protobuf_example_class():
    """tf.train.Example from Google's own protocol-buffer library, where that is installed."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")

    def add(owner, name, number, kind, label=field.LABEL_REPEATED, type_name=None, oneof=None):
        new = owner.field.add(name=name, number=number, type=kind, label=label)
        if type_name:
            new.type_name = type_name
        if oneof is not None:
            new.oneof_index = oneof

    for name, kind in [
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ]:
        add(file.message_type.add(name=name), "value", 1, kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    lists = [("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")]
    for number, (name, kind) in enumerate(lists, 1):
        add(feature, name, number, field.TYPE_MESSAGE, field.LABEL_OPTIONAL, f".t.{kind}", 0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING, field.LABEL_OPTIONAL)
    add(entry, "value", 2, field.TYPE_MESSAGE, field.LABEL_OPTIONAL, ".t.Feature")
    add(features, "feature", 1, field.TYPE_MESSAGE, type_name=".t.Features.FeatureEntry")
    whole = file.message_type.add(name="Example")
    add(whole, "features", 1, field.TYPE_MESSAGE, field.LABEL_OPTIONAL, ".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


@pytest.fixture(scope="module")
def protobuf_example():
    return protobuf_example_class()


@settings(max_examples=80)
@given(FEATURES)
def test_decoder_reads_what_protocol_buffers_write(protobuf_example, features):
    written = protobuf_example()
    for name, values in features.items():
        feature = written.features.feature[name]
        if isinstance(values, list):
            kind = feature.bytes_list
        else:
            kind = feature.float_list if values.dtype.kind == "f" else feature.int64_list
        kind.SetInParent()
        kind.value.extend(values)
    assert_same_features(decode_example(written.SerializeToString()), features)


def test_decoder_merges_and_skips_as_protocol_buffers_do(protobuf_example):
    ints = encode_list(np.array([1, 300]), True)
    more = encode_list(np.array([-5]), False)
    floats = encode_list(np.array([0.5], np.float32), True)
    unknown = (
        varint(9 << 3) + varint(7) + varint(10 << 3 | 1) + bytes(8) + varint(11 << 3 | 5) + bytes(4)
    )
    blob = b"".join(
        [
            unknown,
            message(1, message(1, message(1, b"a") + message(2, ints) + message(2, more))),
            message(1, message(1, message(1, b"b") + message(2, floats + unknown + ints))),
            message(1, message(1, message(1, b"c") + message(2, b""))),
            message(1, message(1, message(1, b"d") + message(2, ints))),
            message(1, message(1, message(1, b"d") + message(2, floats))),
        ]
    )
    decoded = decode_example(blob)
    reference = protobuf_example.FromString(blob).features.feature
    for name, values in reference.items():
        kind = values.WhichOneof("kind")
        expected = list(getattr(values, kind).value) if kind else []
        assert list(decoded[name]) == expected
    assert list(decoded["a"]) == [1, 300, -5] and list(decoded["d"]) == [0.5]
    assert set(decoded) == set(reference)


@settings(max_examples=30)
@given(FEATURES, st.lists(st.text(max_size=5)))
def test_only_what_is_asked_for_is_decoded(features, names):
    asked = [*list(features)[::2], *names]
    expected = {name: values for name, values in features.items() if name in asked}
    assert_same_features(decode_example(encode_example(features), asked), expected)


@settings(max_examples=150)
@given(FEATURES.filter(bool), st.booleans(), st.data())
def test_a_cut_example_is_an_error(features, packed, data):
    blob = encode_example(features, packed)
    with pytest.raises(ValueError, match=r"malformed tf\.train\.Example"):
        decode_example(blob[: data.draw(st.integers(1, len(blob) - 1))])


@settings(max_examples=300)
@given(st.binary(max_size=60), FEATURES, st.data())
def test_garbage_is_an_error_or_an_example(noise, features, data):
    blob = bytearray(encode_example(features))
    if blob and data.draw(st.booleans()):
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
        noise = bytes(blob)
    try:
        decode_example(noise)
    except ValueError as error:
        assert "malformed" in str(error)


@pytest.mark.parametrize(
    "content",
    [b"\x80" * 10 + b"\x01", b"\x01\x80", message(1, b"\xff")],
    ids=["eleven bytes", "cut off", "a message"],
)
def test_malformed_int64_lists(content):
    blob = message(1, message(1, message(1, b"a") + message(2, message(3, message(1, content)))))
    with pytest.raises(ValueError, match="malformed"):
        decode_example(blob)


# SQLite

CIFAR_FEATURES = {"image": (np.uint8, (2, 2, 3)), "label": (np.int32, ())}


def cifar_example(value):
    image = (np.arange(12) + value) % 256
    return {"image": image, "label": np.array([value]), "coarse_label": np.array([value // 5])}


def write_sqlite(path, rows, metadata=True):
    """Writes `rows`, (split, client id, serialised example), with the tables and indices of TFF."""
    connection = sqlite3.connect(path)
    connection.execute(
        "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,"
        " serialized_example_proto BLOB NOT NULL)"
    )
    connection.execute("CREATE INDEX idx_split ON examples (split_name, client_id)")
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    if metadata:
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL,"
            " num_examples INTEGER NOT NULL)"
        )
        connection.execute(
            "INSERT INTO client_metadata"
            " SELECT client_id, split_name, COUNT(*) FROM examples GROUP BY client_id, split_name"
        )
    connection.commit()
    connection.close()
    return path


def cifar_rows():
    owners = [("train", "7", 250), ("train", "12", 3), ("test", "0", 9), ("train", "7", 130)]
    return [
        (split, client, encode_example(cifar_example(value), packed=value % 2 == 0))
        for split, client, value in owners
    ]


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("compression", [None, lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_sqlite(tmp_path, metadata, compression):
    path = write_sqlite(tmp_path / "with space & #.sqlite", cifar_rows(), metadata)
    if compression:
        plain, path = path, tmp_path / "cifar.sqlite.lzma"
        path.write_bytes(lzma.compress(plain.read_bytes(), format=compression))
    data = from_sqlite(path, "train", CIFAR_FEATURES)
    assert data.client_ids.tolist() == ["12", "7"]
    np.testing.assert_array_equal(data.columns["label"], [3, 250, 130])
    assert data.columns["label"].dtype == np.int32
    assert data.columns["image"].dtype == np.uint8
    expected = (np.arange(12) + 130) % 256
    np.testing.assert_array_equal(data.get_client("7")["image"][1], expected.reshape(2, 2, 3))


def test_sqlite_text_and_floats(tmp_path):
    features = {"pixels": np.linspace(0, 1, 4, dtype=np.float32), "text": [b"To be", b""]}
    path = write_sqlite(tmp_path / "a", [("train", "THE_TRAGEDY", encode_example(features))])
    data = from_sqlite(path, "train", {"pixels": (np.float32, [2, 2]), "text": (bytes, [2])})
    np.testing.assert_array_equal(data.columns["pixels"][0].ravel(), features["pixels"])
    assert data.columns["text"].tolist() == [[b"To be", b""]]


def errors_of(path, message_pattern, split="train", features=CIFAR_FEATURES):
    with pytest.raises(ValueError, match=message_pattern) as error:
        from_sqlite(path, split, features)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_sqlite_names_client_and_example_of_a_bad_record(tmp_path):
    good = cifar_rows()
    whole = good[0][2]
    bad = {
        "malformed": whole[:-1],
        "no feature 'image'": b"",
        "feature 'image' has 3 values": encode_example({**cifar_example(1), "image": np.arange(3)}),
        "do not fit uint8": encode_example({**cifar_example(1), "image": np.arange(250, 262)}),
        "is a float_list": encode_example({**cifar_example(1), "label": np.ones(1, np.float32)}),
        "is a bytes_list": encode_example({**cifar_example(1), "label": [b"1"]}),
    }
    for number, (pattern, blob) in enumerate(bad.items()):
        path = write_sqlite(tmp_path / f"{number}", [*good, ("train", "7", blob)])
        errors_of(path, f"client '7', example 2: .*{pattern}")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.array([-1]), np.uint64), (np.array([-1]), np.uint8), (np.float32([1e6]), np.float16)],
)
def test_sqlite_values_that_would_wrap_or_become_infinite(tmp_path, value, dtype):
    path = write_sqlite(tmp_path / "a", [("train", "c", encode_example({"x": value}))])
    errors_of(path, "feature 'x' has values that do not fit", features={"x": (dtype, (1,))})


def test_sqlite_infinite_values_stay(tmp_path):
    path = write_sqlite(
        tmp_path / "a", [("train", "c", encode_example({"x": np.float32([np.inf])}))]
    )
    data = from_sqlite(path, "train", {"x": (np.float16, (1,))})
    assert np.isinf(data.columns["x"]).all()


def test_sqlite_bytes_that_end_in_nul(tmp_path):
    path = write_sqlite(tmp_path / "a", [("train", "c", encode_example({"t": [b"a\0"]}))])
    errors_of(
        path, "client 'c', example 0: feature 't' must not have text", features={"t": (bytes, (1,))}
    )


def test_sqlite_examples_that_its_metadata_does_not_know_or_misses(tmp_path):
    path = write_sqlite(tmp_path / "a", cifar_rows())
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM examples WHERE rowid = 4")
    connection.commit()
    connection.close()
    errors_of(path, "client '7' has 1 examples, client_metadata says 2")


def made(path, *statements):
    connection = sqlite3.connect(path)
    for statement, *rows in statements:
        connection.executemany(statement, rows) if rows else connection.execute(statement)
    connection.commit()
    connection.close()
    return path


EXAMPLES = "CREATE TABLE examples (split_name, client_id %s, serialized_example_proto)"
INSERT = "INSERT INTO examples VALUES (?, ?, ?)"


@pytest.mark.parametrize("declared", ["", "TEXT", "BLOB", "TEXT COLLATE NOCASE"])
@pytest.mark.parametrize("indexed", [True, False])
def test_sqlite_ids_of_another_type_or_collation_keep_their_examples(tmp_path, declared, indexed):
    """The id "b" as text and as bytes is one client, "B" another; each has its own examples."""
    ids = ["b", b"a", "B", b"b", "a", "b", b"B", "10", 10, b"10", "9"]
    splits = ["train", b"train"]
    rows = [
        (splits[row % 2], client, encode_example({"label": np.array([row])}))
        for row, client in enumerate(ids)
    ]
    path = made(tmp_path / "a", (EXAMPLES % declared,), (INSERT, *rows))
    if indexed:
        made(path, ("CREATE INDEX i ON examples (split_name, client_id)",))
    text = [client.decode() if isinstance(client, bytes) else str(client) for client in ids]
    expected = {
        client: [row for row, owner in enumerate(text) if owner == client]
        for client in sorted(set(text))
    }
    data = from_sqlite(path, "train", {"label": (np.int32, ())})
    assert {c: data.get_client(c)["label"].tolist() for c in data.client_ids.tolist()} == expected
    assert data.client_ids.tolist() == list(expected)
    counts = "CREATE TABLE client_metadata AS SELECT *, 1 AS num_examples FROM examples"
    for users in (
        dict.fromkeys(expected),
        {c: len(rows) for c, rows in expected.items()},
    ):
        reader = sqlite_reader(path)
        assert reader.users("train") == users
        blobs = [user for user, _ in reader.examples("train", users)]
        assert blobs == [client for client, rows in expected.items() for _ in rows]
        if users["a"] is None:
            made(path, (counts,))
    errors_of(path, r"no split 'dev'; its splits are \['train'\]", split="dev")


def test_sqlite_ids_that_are_missing_are_told(tmp_path):
    path = made(tmp_path / "a", (EXAMPLES % "",), (INSERT, ("train", None, b"")))
    errors_of(path, "client_id must name a client in every row, got NULL")


ENDLESS = """CREATE VIEW examples AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
    SELECT 'train' AS split_name, 'a' || i AS client_id, x'' AS serialized_example_proto FROM n"""
COMPUTED = """CREATE TABLE examples (split_name, client_id,
    serialized_example_proto AS (zeroblob(1000000000)))"""
VIRTUAL = (
    "CREATE VIRTUAL TABLE examples USING fts5(split_name, client_id, serialized_example_proto)"
)


@pytest.mark.parametrize("statement", [ENDLESS, COMPUTED, VIRTUAL])
@pytest.mark.parametrize("table", ["examples", "client_metadata"])
def test_sqlite_tables_that_are_computed_are_refused(tmp_path, statement, table):
    path = tmp_path / "a"
    if table == "client_metadata":
        write_sqlite(path, cifar_rows(), metadata=False)
        statement = statement.replace("examples", table, 1)
        statement = statement.replace("serialized_example_proto", "num_examples")
    made(path, (statement,))
    errors_of(path, f"{table} must be a table whose columns are stored, not computed")
    with pytest.raises(ValueError, match=f"{table} must be a table"):
        sqlite_reader(path).users("train")


def test_sqlite_queries_end(tmp_path, monkeypatch):
    """A file whose pages lead back to each other has rows without end."""
    monkeypatch.setattr(sqlite_file, "_FIRST_STEPS", 1000)
    monkeypatch.setattr(sqlite_file, "_STEPS_PER_BYTE", 0)
    monkeypatch.setattr(sqlite_file, "_STEPS_AT_ONCE", 100)
    blob = encode_example({"label": np.array([1])})
    path = write_sqlite(tmp_path / "a", [("train", "a", blob)] * 1000)
    errors_of(
        path, "takes far longer to read than a file of its size", features={"label": (int, ())}
    )


@pytest.mark.parametrize("format", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_lzma_that_unpacks_to_far_more_is_refused(tmp_path, format, monkeypatch):
    monkeypatch.setattr(unpacking, "_ALWAYS_ALLOWED", 1 << 20)
    bomb = tmp_path / "a.lzma"
    bomb.write_bytes(lzma.compress(bytes(1 << 24), format=format))
    errors_of(bomb, f"a.lzma unpacks from {bomb.stat().st_size:,} to more than .* bytes: refused")
    assert not list(tmp_path.glob("**/*.sqlite"))


def test_lzma_that_asks_for_much_memory_is_refused(tmp_path):
    path = tmp_path / "a.lzma"
    path.write_bytes(b"]" + struct.pack("<I", 3 << 30) + b"\xff" * 8 + bytes(100))
    errors_of(path, "a.lzma is damaged, it cannot be decompressed: Memory usage limit")


def test_lzma_of_several_streams(tmp_path):
    content = write_sqlite(tmp_path / "a", cifar_rows()).read_bytes()
    path = tmp_path / "a.lzma"
    half = len(content) // 2
    path.write_bytes(lzma.compress(content[:half]) + lzma.compress(content[half:]) + b"rest")
    assert from_sqlite(path, "train", CIFAR_FEATURES).num_clients == 2


def test_sqlite_unreadable_files(tmp_path):
    errors_of(tmp_path / "nowhere", "No such file")
    path = write_sqlite(tmp_path / "a", cifar_rows())
    errors_of(path, r"no split 'dev'; its splits are \['test', 'train'\]", split="dev")
    compressed = tmp_path / "a.lzma"
    packed = lzma.compress(path.read_bytes())
    compressed.write_bytes(packed[:-30])
    errors_of(compressed, f"a.lzma is cut off: it ends at byte {len(packed) - 30:,}")
    compressed.write_bytes(packed[:60] + bytes(20) + packed[80:])
    errors_of(compressed, "cannot be decompressed")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(path.read_bytes()[:3000])
    errors_of(damaged, "cannot be read as TFF's examples")
    (tmp_path / "text").write_text("not a database")
    errors_of(tmp_path / "text", "neither an SQLite database nor LZMA")
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE t (a)").connection.close()
    errors_of(tmp_path / "other", "no such table: examples")


@pytest.mark.parametrize(
    "features",
    [{}, {"a": np.int32}, {"a": ("nonsense", ())}, {"a": (np.int32, 3)}, {"a": (object, ())}],
)
def test_sqlite_features_must_be_described(tmp_path, features):
    with pytest.raises(ValueError, match="features"):
        from_sqlite(tmp_path / "unread", "train", features)
