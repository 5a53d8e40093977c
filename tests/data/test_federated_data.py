import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data import FederatedData


def make_data() -> FederatedData:
    columns = {"x": np.arange(12, dtype=np.uint8).reshape(6, 2), "y": np.arange(6)}
    return FederatedData.from_arrays(columns, offsets=[0, 2, 3, 6], client_ids=["a", "b", "c"])


def test_sizes_and_views():
    data = make_data()
    assert (data.num_clients, data.num_examples) == (3, 6)
    np.testing.assert_array_equal(data.client_sizes, [2, 1, 3])
    assert data.client_sizes.dtype == np.int64 and data.offsets.dtype == np.int64
    client = data.client(2)
    np.testing.assert_array_equal(client["y"], [3, 4, 5])
    assert client["x"].dtype == np.uint8 and np.shares_memory(client["x"], data.columns["x"])
    assert data.all_examples()["x"] is data.columns["x"]
    assert "3 clients, 6 examples" in repr(data) and "uint8[2]" in repr(data)


def test_all_examples_as_one_client():
    columns = {"x": np.arange(12).reshape(6, 2), "text": list("abcdef")}
    data = FederatedData.of_one_client(columns, "test")
    assert data.client_ids.tolist() == ["test"] and data.client_sizes.tolist() == [6]
    assert data.columns["x"] is columns["x"] and data.columns["text"].tolist() == columns["text"]
    assert FederatedData.of_one_client(columns).client_ids.tolist() == ["0"]
    for wrong, client_id, message in (
        ({"x": [1], "y": [1, 2]}, "a", "columns must have equal numbers of"),
        ({"x": []}, "a", "client 'a' has no examples"),
        (columns, "a\0", "client_ids must not have text that ends in NUL"),
    ):
        with pytest.raises(ValueError, match=message):
            FederatedData.of_one_client(wrong, client_id)
    with pytest.raises(TypeError, match="client_ids must be strings, got 3"):
        FederatedData.of_one_client(columns, 3)


def test_fedjax_style_access():
    data = make_data()
    assert [(client_id, len(table["y"])) for client_id, table in data.clients()] == [
        ("a", 2),
        ("b", 1),
        ("c", 3),
    ]
    np.testing.assert_array_equal(data.get_client("b")["y"], [2])
    assert [client_id for client_id, _ in data.get_clients(["c", "a"])] == ["c", "a"]


@pytest.mark.parametrize("order", [[0, 1], [2], [2, 0], [0, 2], [1, 2], [0, 1, 2]])
def test_select_keeps_each_clients_rows(order):
    data = make_data()
    chosen = data.select(order)
    assert chosen.client_ids.tolist() == [data.client_ids[i] for i in order]
    for position, index in enumerate(order):
        for name in data.columns:
            np.testing.assert_array_equal(chosen.client(position)[name], data.client(index)[name])


def test_select_of_consecutive_clients_is_a_view():
    data = make_data()
    assert np.shares_memory(data.select([1, 2]).columns["x"], data.columns["x"])


def test_keep_and_drop_columns():
    data = make_data()
    assert list(data.keep("x").columns) == ["x"]
    assert list(data.drop(["x"]).columns) == ["y"]
    assert list(data.columns) == ["x", "y"]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.booleans())
def test_client_of_row_loses_nothing_and_keeps_row_order(owners, natural):
    owners = np.unique(owners, return_inverse=True)[1]
    ids = np.array([f"user{owner}" for owner in owners]) if natural else owners
    data = FederatedData.from_arrays({"row": np.arange(len(owners))}, client_of_row=ids)
    for index in range(data.num_clients):
        np.testing.assert_array_equal(data.client(index)["row"], np.flatnonzero(owners == index))
    assert data.num_examples == len(owners)
    assert data.client_ids[0] == ("user0" if natural else "0")


@pytest.mark.parametrize(
    "owners",
    [
        np.array(["b", "a", "b", "é"], object),
        np.array([b"b", b"a", b"b", "é".encode()]),
        np.array(["b", b"a", b"b", "é"], object),
        ["b", "a", "b", "é"],
    ],
    ids=["objects", "bytes", "both", "list"],
)
def test_natural_ids_in_other_types_are_the_same_clients(owners):
    data = FederatedData.from_arrays({"row": np.arange(4)}, client_of_row=owners)
    assert data.client_ids.tolist() == ["a", "b", "é"]
    np.testing.assert_array_equal(data.get_client("b")["row"], [0, 2])


def test_client_ids_may_be_bytes_or_objects():
    for ids in ([b"a", "b"], np.array(["a", "b"], object), np.array([b"a", b"b"])):
        data = FederatedData.from_arrays({"x": np.ones(2)}, offsets=[0, 1, 2], client_ids=ids)
        assert data.client_ids.tolist() == ["a", "b"]
    indices = FederatedData.from_arrays({"x": np.ones(2)}, client_of_row=np.array([1, 0], object))
    assert indices.num_clients == 2


@pytest.mark.parametrize("keys", [("z", "b"), (7, 3), (np.int64(7), np.int32(3)), (b"z", "b")])
def test_a_partition_may_be_a_mapping_from_clients(keys):
    partition = dict(zip(keys, (range(1, 3), {5, 0}), strict=True))
    data = FederatedData.from_arrays({"row": np.arange(6)}, partition=partition)
    names = [key.decode() if isinstance(key, bytes) else str(key) for key in keys]
    assert data.client_ids.tolist() == names
    np.testing.assert_array_equal(data.client(0)["row"], [1, 2])
    np.testing.assert_array_equal(data.client(1)["row"], [0, 5])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [[1], [1, 2], [3], [4]],
            r"column 'x' must be an array \[examples, ...\] of one shape",
        ),
        (np.array(["a", 1, None, 2], object), r"column 'x' must be numeric.* got dtype object"),
        (
            np.ma.masked_array([1, 2, 3, 4], [0, 1, 0, 0]),
            "must not be masked.* the 1 masked entries",
        ),
        ([np.ma.masked_array([1, 2], [0, 1])] * 4, "must not be masked.* the 4 masked entries"),
        (np.array(["2020-01-01"] * 4, "datetime64[D]"), "column 'x' must be numeric.*datetime64"),
    ],
)
def test_columns_that_are_no_arrays_of_numbers_are_one_line(column, message):
    with pytest.raises(ValueError, match=message) as caught:
        FederatedData.from_arrays({"x": column}, offsets=[0, 4])
    assert "\n" not in str(caught.value)


def test_masks_of_one_client_are_refused():
    masked = np.ma.masked_array([1, 2], [False, True])
    clients = {"a": {"x": np.array([1, 2])}, "b": {"x": masked}}
    with pytest.raises(ValueError, match=r"column 'x' of client 'b' must not be masked.* the 1 "):
        FederatedData.from_client_dict(clients)


def test_a_masked_array_without_masked_entries_is_an_array():
    data = FederatedData.from_arrays({"x": np.ma.masked_array([1, 2])}, offsets=[0, 2])
    assert type(data.columns["x"]) is np.ndarray
    ids = np.ma.masked_array(["a", "b"])
    data = FederatedData.from_arrays({"x": [1, 2]}, offsets=[0, 1, 2], client_ids=ids)
    assert type(data.client_ids) is np.ndarray


def test_partition_may_leave_rows_out():
    data = FederatedData.from_arrays({"row": np.arange(6)}, partition=[[4, 1], [5]])
    np.testing.assert_array_equal(data.columns["row"], [4, 1, 5])
    np.testing.assert_array_equal(data.offsets, [0, 2, 3])


def test_memory_mapped_columns_in_order_are_not_copied(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(8))
    column = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = FederatedData.from_arrays({"x": column}, client_of_row=[0, 0, 1, 1, 1, 2, 2, 2])
    assert isinstance(data.columns["x"], np.memmap)
    assert isinstance(data.select([1, 2]).columns["x"], np.memmap)


def test_from_client_dict():
    clients = {"b": {"x": [1, 2], "t": ["ab", "c"]}, "a": {"x": [3], "t": ["long text"]}}
    data = FederatedData.from_client_dict(clients)
    assert data.client_ids.tolist() == ["b", "a"]
    np.testing.assert_array_equal(data.columns["x"], [1, 2, 3])
    assert data.columns["t"].tolist() == ["ab", "c", "long text"]


def test_the_clients_of_a_dictionary_may_be_numbers():
    data = FederatedData.from_client_dict({7: {"x": [1]}, np.int64(3): {"x": [2]}})
    assert data.client_ids.tolist() == ["7", "3"]
    with pytest.raises(
        ValueError, match=r"^the ids of clients must be different clients, got '7' twice"
    ):
        FederatedData.from_client_dict({7: {"x": [1]}, "7": {"x": [2]}})


def test_an_id_that_is_missing_is_no_client():
    with pytest.raises(ValueError, match="client_of_row must be all text where some are, got nan"):
        FederatedData.from_arrays({"x": np.ones(3)}, client_of_row=["a", float("nan"), "b"])


def test_clients_without_examples_only_on_request():
    clients = {"a": {"x": np.ones(2)}, "nobody": {"x": np.ones(0)}}
    with pytest.raises(ValueError, match="client 'nobody' has no examples"):
        FederatedData.from_client_dict(clients)
    data = FederatedData.from_client_dict(clients, allow_empty=True)
    np.testing.assert_array_equal(data.client_sizes, [2, 0])
    np.testing.assert_array_equal(data.select([1]).client_sizes, [0])
    with pytest.raises(ValueError, match="client '1' has no examples"):
        FederatedData.from_arrays({"x": np.ones(3)}, client_of_row=[0, 2, 2])


def test_arrays_that_describe_clients_are_read_only():
    data = make_data()
    for array in (data.offsets, data.client_ids, data.client_sizes):
        with pytest.raises(ValueError):
            array[0] = array[1]


X = {"x": np.arange(4)}
MASKED = np.ma.masked_array([0, 1, 2, 3], [0, 0, 1, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offsets": [0, 4], "partition": [[0]]}, "exactly one of"),
        ({}, "none of them; for examples without clients there is FederatedData.of_one_client"),
        ({"offsets": [0, 3]}, "offsets must run from 0 to the number of examples, 4, got 0 to 3"),
        ({"offsets": [1, 4]}, "got 1 to 4"),
        ({"offsets": [0, 3, 2, 4]}, "must not decrease, got 3 then 2 at client index 1"),
        ({"offsets": [0.0, 4.0]}, "offsets must be integers"),
        ({"offsets": [0]}, "at least one client"),
        ({"offsets": [0, 4], "client_ids": ["a", "b"]}, "each of the 1 clients once"),
        ({"offsets": [0, 2, 4], "client_ids": ["a", "a"]}, "unique, got 'a' twice"),
        ({"offsets": [0, 2, 4], "client_ids": ["a", ""]}, "empty string"),
        ({"offsets": [0, 2, 4], "client_ids": ["a", "a\0"]}, "NUL"),
        ({"partition": []}, "at least one client"),
        ({"partition": [[0, 1], [1]]}, "got 1 twice"),
        ({"partition": [[0, 4]]}, r"examples in 0\.\.3, got 4"),
        ({"partition": [[0, -1]]}, r"examples in 0\.\.3, got -1"),
        ({"partition": [[0.5]]}, r"partition\[0\] must be a vector of indices of examples"),
        ({"partition": [[0], []]}, "client '1' has no examples"),
        ({"partition": [[0, [1]]]}, r"partition\[0\] must be one array"),
        (
            {"partition": {"a": [0], "b": 1.5}},
            r"partition\[1\] must be a vector of indices of examples",
        ),
        ({"partition": {0: [0], "0": [1]}}, "different clients, got '0' twice"),
        ({"partition": {"a": [0]}, "client_ids": ["a"]}, "client_ids cannot be given"),
        ({"offsets": [[0], [1, 4]]}, "offsets must be one array"),
        ({"client_of_row": [[0], [1, 2], 1, 1]}, "client_of_row must be one array"),
        ({"client_of_row": np.array([b"a", b"\xff"] * 2)}, "must be text in UTF-8"),
        (
            {"client_of_row": ["a", "a\0", "b", "b"]},
            "client_of_row must not have text that ends in NUL",
        ),
        ({"client_of_row": MASKED}, "client_of_row must not be masked.* the 1 masked entries"),
        ({"client_of_row": MASKED.astype(str)}, "client_of_row must not be masked"),
        ({"client_of_row": [*MASKED]}, "client_of_row must not be masked"),
        ({"offsets": MASKED}, "offsets must not be masked"),
        ({"partition": [MASKED]}, r"partition\[0\] must not be masked"),
        ({"offsets": range(5), "client_ids": MASKED.astype(str)}, "client_ids must not be masked"),
        ({"client_of_row": [0, 1]}, "each of the 4 examples"),
        ({"client_of_row": [0, 1, 1, -1]}, "negative, got -1"),
        ({"client_of_row": [0, 0, 0, 10**12]}, "pass natural ids as strings"),
        ({"client_of_row": [0, 0, 1, 1], "client_ids": ["a"]}, "below the number of client_ids, 1"),
        ({"client_of_row": list("aabb"), "client_ids": ["a", "b"]}, "natural ids"),
        ({"client_of_row": [0, 0, 1, 1], "allow_empty": True}, "client_ids must be given"),
    ],
)
def test_clear_errors_for_rows_and_clients(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        FederatedData.from_arrays(X, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({}, ValueError, "columns must not be empty"),
        ([1, 2], TypeError, "mapping"),
        ({"x": 3}, ValueError, "scalar"),
        ({"x": [1, 2], "y": [1]}, ValueError, "equal numbers of examples"),
        ({"x": np.array([{}, {}])}, ValueError, "column 'x' must be numeric"),
        ({"x": np.array([1, 2], ">i4")}, ValueError, "native byte order"),
        ({1: [1, 2]}, TypeError, "column names"),
        (
            {"x": ["a\0", "b"]},
            ValueError,
            "column 'x' must not have text that ends in NUL.* got 'a",
        ),
        ({"x": [[b"a", b"b\0"]] * 2}, ValueError, "column 'x' must not have text that ends in NUL"),
        ({"x": ["a", 1]}, ValueError, "column 'x' must be all text where some is, got 1"),
        ({"x": [np.array("a"), 1]}, ValueError, "column 'x' must be all text where some is, got 1"),
        ({"x": ["a", float("nan")]}, ValueError, "column 'x' must be all text .* got nan"),
    ],
)
def test_clear_errors_for_columns(columns, error, message):
    with pytest.raises(error, match=message):
        FederatedData.from_arrays(columns, offsets=[0, 2])


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "non-empty"),
        ({"a": {}}, "client 'a' has no columns"),
        ({"a": {"x": [1]}, "b": {"y": [1]}}, "client 'b' has columns"),
        ({"a": {"x": [1]}, "b": {"x": [[1]]}}, "client 'b': column 'x'"),
        ({"a": {"x": [1]}, "b": {"x": [1.0]}}, "client 'b': column 'x' is float64"),
        ({"a": {"x": [1], "y": [1, 2]}}, "client 'a': columns must have equal"),
    ],
)
def test_clear_errors_name_the_client(clients, message):
    with pytest.raises(ValueError, match=message):
        FederatedData.from_client_dict(clients)


def test_clear_errors_of_access():
    data = make_data()
    for wrong, message in [([], "non-empty"), ([0, 3], r"0\.\.2, got 3"), ([1, 1], "distinct")]:
        with pytest.raises(ValueError, match=message):
            data.select(wrong)
    with pytest.raises(ValueError, match=r"index must be in 0\.\.2, got -1"):
        data.client(-1)
    for wrong in (1.0, "a", None, [1]):
        with pytest.raises(TypeError, match=r"index must be an integer in 0\.\.2, got "):
            data.client(wrong)
    np.testing.assert_array_equal(data.client(np.array(1))["y"], data.client(1)["y"])
    with pytest.raises(ValueError, match="client_id 'z' is not among the 3 clients"):
        data.get_client("z")
    with pytest.raises(ValueError, match="no column 'z'"):
        data.drop("z")
    with pytest.raises(ValueError, match="columns must not be empty"):
        data.drop(["x", "y"])
    with pytest.raises(TypeError, match="client_ids must be strings"):
        FederatedData.from_arrays(X, offsets=[0, 2, 4], client_ids=[1, 2])
