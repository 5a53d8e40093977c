"""Checkpoints: the same bits back, the newest complete one, and a clear error for what does not fit."""

import errno
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.core import files
from fedcodist.run.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    set_damaged_aside,
)


class State(NamedTuple):
    model: dict
    optimizer: tuple
    counts: list


def make_state(seed: int = 0) -> State:
    draw = np.random.default_rng(seed)
    params = {"w": draw.normal(size=(3, 4)).astype(np.float32), "b": jnp.zeros(4, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    return State(
        params,
        optimizer.init(params),
        [np.uint32(4_000_000_000), np.int8([-3, 3]), np.bool_([True, False]), np.float64(0.1)],
    )


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


def test_a_round_trip_gives_the_same_bits(tmp_path):
    state = make_state()
    state.model["w"][0, :3] = [np.nan, -np.inf, -0.0]
    notes = {"seconds": 1.25, "metrics_length": 2**40}
    save_checkpoint(tmp_path / "checkpoints", 12, state, notes)
    saved = load_checkpoint(tmp_path / "checkpoints", make_state(1))
    assert (saved.round, saved.notes) == (12, notes)
    assert_same(saved.state, state)


def test_shapes_alone_say_what_is_expected(tmp_path):
    state = make_state()
    save_checkpoint(tmp_path, 1, state, {})
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)})
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path, shapes)
    save_checkpoint(tmp_path, 2, {"w": np.ones((3, 4), np.float32)}, {})
    found = load_checkpoint(tmp_path, {"w": shapes["w"]})
    np.testing.assert_array_equal(found.state["w"], np.ones((3, 4)))


def test_none_where_there_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "nowhere", make_state()) is None
    assert load_checkpoint(tmp_path, make_state()) is None


def test_the_newest_two_stay(tmp_path):
    for round in (1, 2, 10, 9, 100):
        save_checkpoint(tmp_path, round, {"a": np.float32(round)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round_00000010.msgpack",
        "round_00000100.msgpack",
    ]
    assert load_checkpoint(tmp_path, {"a": np.float32(0)}).round == 100


@pytest.mark.parametrize("damage", ["truncated", "empty", "a bit flipped", "a byte added", "text"])
def test_a_damaged_newest_one_falls_back_to_the_one_before(damage, tmp_path):
    save_checkpoint(tmp_path, 1, make_state(1), {"n": 1})
    newest = save_checkpoint(tmp_path, 2, make_state(2), {"n": 2})
    content = bytearray(newest.read_bytes())
    flipped = bytearray(content)
    flipped[-5] ^= 16
    newest.write_bytes(
        {
            "truncated": content[:-1],
            "empty": b"",
            "a bit flipped": flipped,
            "a byte added": content + b"x",
            "text": b"not a checkpoint",
        }[damage]
    )
    saved = load_checkpoint(tmp_path, make_state())
    assert (saved.round, saved.notes) == (1, {"n": 1})
    assert_same(saved.state, make_state(1))
    (tmp_path / "round_00000001.msgpack").unlink()
    assert load_checkpoint(tmp_path, make_state()) is None


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": np.zeros((2, 3), np.float32), "b": np.int32(0)}, r"\['b'\]"),
        ({"a": np.zeros((3, 2), np.float32)}, r"\['a'\] is float32\[2, 3\], expected .*\[3, 2\]"),
        ({"a": np.zeros((2, 3), np.float64)}, r"\['a'\] is float32\[2, 3\], expected float64"),
    ],
)
def test_what_does_not_fit_is_one_line(like, message, tmp_path):
    save_checkpoint(tmp_path, 1, {"a": np.zeros((2, 3), np.float32)}, {})
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(tmp_path, like)
    assert "\n" not in str(raised.value) and "round_00000001" in str(raised.value)


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path, monkeypatch):
    def full(file, content):
        file.write(content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = save_checkpoint(tmp_path, 1, make_state(), {}).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", full)
        for round in (1, 2):
            with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
                save_checkpoint(tmp_path, round, make_state(1), {})
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*file"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, make_state(), {})


def test_what_a_killed_process_left_is_removed(tmp_path):
    half = tmp_path / ".round_00000001.msgpack.4711"
    half.write_bytes(b"half")
    save_checkpoint(tmp_path, 2, make_state(), {})
    assert half.is_file()  # another run that shares the folder may be writing it
    (tmp_path / "kept").mkdir()
    half_kept = tmp_path / "kept" / ".round_00000001.msgpack.4711"
    half_kept.write_bytes(b"half")
    set_damaged_aside(tmp_path, 2)  # when a run starts
    assert not half_kept.exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        "round_00000002.msgpack"
    ]


def test_no_name_holds_half_a_file_at_any_moment(tmp_path, monkeypatch):
    """Files of a process that was killed while writing are not read as a checkpoint."""
    seen = []

    def half(file, content):
        file.write(content[: len(content) // 2])
        file.flush()
        seen.append(load_checkpoint(tmp_path, make_state()).round)
        seen.append(len(list(tmp_path.glob("round_*"))))
        file.write(content[len(content) // 2 :])

    save_checkpoint(tmp_path, 1, make_state(), {})
    monkeypatch.setattr(files, "write_all", half)
    save_checkpoint(tmp_path, 2, make_state(), {})
    assert seen == [1, 1]
    assert load_checkpoint(tmp_path, make_state()).round == 2


STRAY = ("round_00000008.msgpack", "round_00000009.msgpack")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_damaged_newest_ones_never_displace_what_is_written(tmp_path):
    for name in STRAY:
        (tmp_path / name).write_bytes(b"not a checkpoint")
    for round in (1, 2, 3):
        save_checkpoint(tmp_path, round, make_state(round), {})
        assert load_checkpoint(tmp_path, make_state()).round == round
    assert names(tmp_path) == ["round_00000002.msgpack", "round_00000003.msgpack", *STRAY]


def test_damaged_ones_are_set_aside(tmp_path):
    assert set_damaged_aside(tmp_path / "nowhere", 0) == []
    save_checkpoint(tmp_path, 1, make_state(), {})
    for copies in ("", ".2"):
        (tmp_path / STRAY[0]).write_bytes(b"not a checkpoint")
        (tmp_path / STRAY[1]).mkdir()
        assert load_checkpoint(tmp_path, make_state()).round == 1
        assert set_damaged_aside(tmp_path, 1) == [tmp_path / name for name in STRAY]
        assert names(tmp_path) == ["damaged", "round_00000001.msgpack"]
        assert {name + copies for name in STRAY} <= {*names(tmp_path / "damaged")}
    assert set_damaged_aside(tmp_path, 1) == []


def test_a_copy_under_another_rounds_name_is_damaged(tmp_path):
    path = save_checkpoint(tmp_path, 1, make_state(), {})
    (tmp_path / STRAY[0]).write_bytes(path.read_bytes())
    assert load_checkpoint(tmp_path, make_state()).round == 1


def test_another_format_is_damaged(tmp_path):
    path = save_checkpoint(tmp_path, 1, make_state(), {})
    path.write_bytes(path.read_bytes().replace(b"CHECKPOINT-1", b"CHECKPOINT-9"))
    assert load_checkpoint(tmp_path, make_state()) is None


def test_one_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, make_state(), {})

    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("pathlib.Path.read_bytes", broken)
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*Input/output error"):
        load_checkpoint(tmp_path, make_state())
