"""Checkpoints: one file per round, complete or absent.

A file is written beside its place, flushed to the disk and then renamed, so that a process killed at
any moment leaves the checkpoint before. Flax's serialisation is enough here, since every process
holds the whole state: orbax's coordination of hosts would have nothing to do.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization

from fedcodist.core.files import write_atomically

PyTree = Any
_MAGIC = b"FEDCODIST-CHECKPOINT-1\n"
_KEPT = 2
_NAME = re.compile(r"round_(\d+)\.msgpack")
_DAMAGED = "damaged"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or does not fit; the message is one line."""


class Checkpoint(NamedTuple):
    """What was saved: the round it belongs to, the state, and a dictionary of plain values."""

    round: int
    state: PyTree
    notes: dict[str, Any]


def save_checkpoint(folder: Path, round: int, state: PyTree, notes: dict[str, Any]) -> Path:
    """Writes a checkpoint and removes earlier ones, all but the newest.

    Those of later rounds stay: what they are is decided where a run starts, see `set_damaged_aside`.

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
    up_to_this = [old for at, old in _by_round(folder) if at <= round and old.is_file()]
    # The hidden ones are what processes killed while writing left.
    for old in (*up_to_this[:-_KEPT], *folder.glob(".round_*")):
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, like: PyTree) -> Checkpoint | None:
    """Reads the newest whole checkpoint of a folder; None if there is none.

    Args:
      folder: where checkpoints lie.
      like: pytree of arrays or shapes with the structure that is expected; a first dimension of -1
        fits any length.

    Raises:
      CheckpointError: the newest whole checkpoint holds other arrays than `like`, or a file cannot be
        read.
    """
    for round, path in reversed(_by_round(Path(folder))):
        saved = _content(path)
        if saved is None or saved["round"] != round:
            continue
        leaves = [_matching(path, saved["leaves"], key, leaf) for key, leaf in _paths(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Checkpoint(round, state, saved["notes"])
    return None


def set_damaged_aside(folder: Path, whole: int) -> list[Path]:
    """Moves checkpoints that `load_checkpoint` passed over into a folder beside the others.

    A run that goes on from an earlier round would otherwise keep them in place of its own.

    Args:
      folder: where checkpoints lie.
      whole: the round of the newest whole one; 0 if there is none.

    Returns:
      Where they were.

    Raises:
      CheckpointError: one of them cannot be moved.
    """
    folder = Path(folder)
    damaged = [path for round, path in _by_round(folder) if round > whole]
    for path in damaged:
        place, copies = folder / _DAMAGED / path.name, 1
        while place.exists():
            copies += 1
            place = place.with_name(f"{path.name}.{copies}")
        try:
            place.parent.mkdir(exist_ok=True)
            path.rename(place)
        except OSError as error:
            raise CheckpointError(
                f"cannot move damaged checkpoint {path}: {error.strerror}."
            ) from error
    return damaged


def _by_round(folder: Path) -> list[tuple[int, Path]]:
    """Whatever is called a checkpoint, in the order of rounds."""
    names = [(_NAME.fullmatch(path.name), path) for path in folder.glob("round_*.msgpack")]
    return sorted((int(name[1]), path) for name, path in names if name)


def _content(path: Path) -> dict[str, Any] | None:
    """What a checkpoint holds; None if it is damaged.

    Raises:
      CheckpointError: it cannot be read, so that nobody knows whether it is damaged.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None  # gone where another process has just set it aside
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror}.") from error
    start = len(_MAGIC) + 32
    payload = content[start:]
    digest = hashlib.sha256(payload).digest()
    return serialization.msgpack_restore(payload) if content[:start] == _MAGIC + digest else None


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
