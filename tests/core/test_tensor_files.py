"""Safetensors files: every kind of number comes back, whatever the package's own reader knows."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from fedcodist.core.files import write_atomically
from fedcodist.core.model import Variables
from fedcodist.core.tensor_files import load_tensors, save_tensors, tensors_of
from fedcodist.run.export import load_model, save_model
from fedcodist.text.bert import Encoder
from fedcodist.text.bert_weights import load_encoder, save_encoder

KINDS = [bool, np.float16, np.float32, np.float64, np.complex64, jnp.bfloat16]
KINDS += [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_kind_comes_back(kind, shape, tmp_path):
    value = np.random.default_rng(0).integers(0, 100, shape).astype(kind)
    tensors = {"a": value, "b/c": np.ones(3, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "file")
    found = load_tensors(tmp_path / "file")
    assert set(found) == set(tensors)
    for name, each in tensors.items():
        assert found[name].dtype == each.dtype
        np.testing.assert_array_equal(found[name], each)


def test_what_is_no_file_of_tensors_is_one_line(tmp_path):
    content = safetensors.numpy.save({"a": np.ones(3, np.float32)})
    for bad in (b"", content[:-1], content[:20], content + b"x"):
        with pytest.raises(ValueError, match=r"^Error while deserializing: [^\n]*$"):
            tensors_of(bad)
    # Same widths: F8_E4M3 is of a byte, as is I8.
    small = safetensors.numpy.save({"a": np.ones(3, np.int8)})
    start = 8 + int.from_bytes(small[:8], "little")
    header = small[8:start].replace(b'"I8"', b'"F8_E4M3"').rstrip()
    other = len(header).to_bytes(8, "little") + header + small[start:]
    with pytest.raises(
        ValueError, match=r"^tensor a is of F8_E4M3, and must be of one of \['BOOL'"
    ):
        tensors_of(other)
    with pytest.raises(ValueError, match=r"^No such file or directory$"):
        load_tensors(tmp_path / "none")


def test_models_in_bfloat16_are_read(tmp_path):
    params = {"dense": {"kernel": np.arange(6).reshape(2, 3).astype(jnp.bfloat16)}}
    save_model(tmp_path / "model", Variables(params, {}))
    kernel = load_model(tmp_path / "model").params["dense"]["kernel"]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, params["dense"]["kernel"])


def test_an_encoder_in_bfloat16_is_read_as_float32(tmp_path):
    encoder = Encoder(vocabulary=7, width=4, layers=1, heads=2, positions=5)
    params = encoder.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_encoder(tmp_path / "encoder", half)
    found = load_encoder(tmp_path / "encoder", encoder)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, found, half)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_may_be_read_by_whom_the_umask_lets(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        save_model(tmp_path / "model.safetensors", Variables({"w": np.ones(2)}, {}))
        save_tensors(tmp_path / "tensors.safetensors", {"w": np.ones(2)}, {})
        write_atomically(tmp_path / "checkpoint", b"")
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == mode, path


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tensors.safetensors"
    save_tensors(path, {"w": np.ones(2)}, {"round": "1"})
    with monkeypatch.context() as patch:

        def full(file, content):
            raise OSError(28, "No space left on device")

        patch.setattr("fedcodist.core.files.write_all", full)
        with pytest.raises(OSError, match="No space left"):
            save_tensors(path, {"w": np.zeros(2)}, {})
    np.testing.assert_array_equal(load_tensors(path)["w"], np.ones(2))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_same_tensors_and_metadata_are_the_same_bytes(tmp_path):
    """The package's own writer has metadata in any order."""
    tensors = {"ü": np.arange(3.0), "w": np.ones((2, 2), np.float32)}
    metadata = {"heads": "2", "format": "pt", "size": "größer"}
    for copy in range(10):
        save_tensors(tmp_path / str(copy), tensors, metadata)
    assert len({(tmp_path / str(copy)).read_bytes() for copy in range(10)}) == 1
    loaded = load_tensors(tmp_path / "0")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)
    with safetensors.safe_open(tmp_path / "0", framework="numpy") as opened:
        assert opened.metadata() == metadata
