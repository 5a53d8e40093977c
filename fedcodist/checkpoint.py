"""Checkpoints: one file per round, complete or absent.

A file is written beside its place, flushed to the disk and then renamed, so that a process killed at
any moment leaves the checkpoint before. Flax's serialisation is enough here, since every process
holds the whole state: orbax's coordination of hosts would have nothing to do.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization

PyTree = Any
_MAGIC = b"FEDCODIST-CHECKPOINT-1\n"
_KEPT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or does not fit; the message is one line."""


class Checkpoint(NamedTuple):
    """What was saved: the round it belongs to, the state, and a dictionary of plain values."""

    round: int
    state: PyTree
    notes: dict[str, Any]


def save_checkpoint(folder: Path, round: int, state: PyTree, notes: dict[str, Any]) -> Path:
    """Writes a checkpoint and removes all but the newest two.

    Args:
      folder: created if missing.
      round: rounds that are done.
      state: pytree of arrays.
      notes: plain values (numbers, strings) kept beside it.

    Raises:
      CheckpointError: the disk is full or the folder cannot be written. Earlier checkpoints stay.
    """
    folder = Path(folder)
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in _paths(state)}
    payload = serialization.msgpack_serialize({"round": round, "notes": notes, "leaves": leaves})
    path = folder / f"round_{round:08d}.msgpack"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {path}: {error.strerror}.") from error
    # The hidden ones are what processes killed while writing left.
    for old in (*sorted(folder.glob("round_*.msgpack"))[:-_KEPT], *folder.glob(".round_*")):
        old.unlink()
    return path


def load_checkpoint(folder: Path, like: PyTree) -> Checkpoint | None:
    """Reads the newest whole checkpoint of a folder; None if there is none.

    Args:
      folder: where checkpoints lie.
      like: pytree of arrays or shapes with the structure that is expected; a first dimension of -1
        fits any length.

    Raises:
      CheckpointError: the newest whole checkpoint holds other arrays than `like`.
    """
    for path in sorted(Path(folder).glob("round_*.msgpack"), reverse=True):
        content = path.read_bytes()
        start = len(_MAGIC) + 32
        payload = content[start:]
        if content[len(_MAGIC) : start] != hashlib.sha256(payload).digest():
            continue
        saved = serialization.msgpack_restore(payload)
        leaves = [_matching(path, saved["leaves"], key, leaf) for key, leaf in _paths(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Checkpoint(saved["round"], state, saved["notes"])
    return None


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by new content, or leaves it as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            write_all(file, content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_all(file: Any, content: bytes) -> None:
    """Writes bytes to an open file; the one place where a full disk shows."""
    file.write(content)


def _paths(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _matching(path: Path, leaves: dict[str, Any], key: Any, expected: Any) -> np.ndarray:
    name = jax.tree_util.keystr(key)
    if name not in leaves:
        raise CheckpointError(f"checkpoint {path} has no {name}: it belongs to another program.")
    found = leaves[name]
    shape = expected.shape
    if shape[:1] == (-1,):
        shape = (*found.shape[:1], *shape[1:])
    if found.shape != shape or found.dtype != expected.dtype:
        raise CheckpointError(
            f"checkpoint {path}: {name} is {found.dtype}{list(found.shape)}, "
            f"expected {expected.dtype}{list(expected.shape)}."
        )
    return found
