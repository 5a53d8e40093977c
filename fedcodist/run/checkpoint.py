"""Checkpoints: one file per round, complete or absent.

A file is written under another name, flushed to the disk and then renamed. So a process that is killed
at any moment leaves at least the previous checkpoint. Flax's serialisation is enough, since every
process has the whole state: orbax's coordination of hosts is not needed. `run/resume.py` decides what
`state` holds, and `run/training_loop.py` what `notes` hold.
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
_MOST_CHECKPOINTS = 2
_NAME = re.compile(r"round_(\d+)\.msgpack")
_DAMAGED = "damaged"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or does not fit the run. The message is one line."""


class Checkpoint(NamedTuple):
    """A checkpoint's round, state, and dictionary of plain values."""

    round: int
    state: PyTree
    notes: dict[str, Any]


def save_checkpoint(folder: Path, round: int, state: PyTree, notes: dict[str, Any]) -> Path:
    """Writes a checkpoint and removes earlier ones, except the one before it.

    Checkpoints of later rounds stay; `set_damaged_aside` treats them when a run starts.

    Args:
      folder: created if missing.
      round: number of rounds done.
      state: pytree of arrays.
      notes: plain values (numbers, strings) stored with the state.

    Returns:
      The checkpoint's path.

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
    up_to_this = [
        old for old_round, old in _by_round(folder) if old_round <= round and old.is_file()
    ]
    for old in up_to_this[:-_MOST_CHECKPOINTS]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, like: PyTree, of_round: int | None = None) -> Checkpoint | None:
    """Reads the newest undamaged checkpoint of a folder, or that of a round; None if there is none.

    Args:
      folder: of the checkpoints.
      like: pytree of arrays or shapes with the expected structure. A first dimension of -1 stands for
        any length.
      of_round: the one to read; None for the newest.

    Raises:
      CheckpointError: names the file that cannot be read, or that has other arrays than `like`.
    """
    for round, path in reversed(_by_round(Path(folder))):
        if of_round not in (None, round):
            continue
        saved = _content(path)
        if saved is None or saved["round"] != round:
            continue
        leaves = [_matching(path, saved["leaves"], key, leaf) for key, leaf in _paths(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Checkpoint(round, state, saved["notes"])
    return None


def newest_beyond(folder: Path, rounds: int) -> int | None:
    """The round of the newest whole checkpoint of more than so many rounds; None if there is none."""
    for round, path in reversed(_by_round(folder)):
        if round > rounds:
            saved = _content(path)
            if saved is not None and saved["round"] == round:
                return round
    return None


def notes_of(folder: Path, round: int) -> dict[str, Any] | None:
    """The notes of the whole checkpoint of a round; None if there is none."""
    for of_round, path in _by_round(folder):
        saved = _content(path) if of_round == round else None
        if saved is not None:
            return saved["notes"]
    return None


def set_damaged_aside(folder: Path, whole: int) -> list[Path]:
    """Moves damaged checkpoints, which `load_checkpoint` has skipped, to the folder 'damaged'.

    Removes the files that processes were writing when they were killed.

    Otherwise a run that continues from an earlier round would keep the damaged files, which have later
    rounds, and remove its own checkpoints.

    Args:
      folder: of the checkpoints.
      whole: the round of the newest undamaged one; 0 if there is none.

    Returns:
      The paths from which they were moved.

    Raises:
      CheckpointError: names the checkpoint that cannot be moved.
    """
    folder = Path(folder)
    # Processes that were killed while writing have left hidden ones. Only a run that starts removes
    # them: in a folder that runs share, another one may be writing.
    for unfinished in folder.rglob(".round_*"):
        unfinished.unlink(missing_ok=True)
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
    """All files with a checkpoint's name, in the order of rounds."""
    names = [(_NAME.fullmatch(path.name), path) for path in folder.glob("round_*.msgpack")]
    return sorted((int(name[1]), path) for name, path in names if name)


def _content(path: Path) -> dict[str, Any] | None:
    """A checkpoint's content; None if it is damaged.

    Raises:
      CheckpointError: the file cannot be read, so it may or may not be damaged.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return None  # another process may have just set it aside
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
    array = leaves[name]
    shape = expected.shape
    if shape[:1] == (-1,):
        shape = (*array.shape[:1], *shape[1:])
    if array.shape != shape or array.dtype != expected.dtype:
        raise CheckpointError(
            f"checkpoint {path}: {name} is {array.dtype}{list(array.shape)}, "
            f"expected {expected.dtype}{list(expected.shape)}."
        )
    return array
