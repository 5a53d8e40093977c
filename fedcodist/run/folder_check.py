"""What a run folder may hold; does not import JAX, so that a command can say so at once."""

import json
import re
from pathlib import Path
from typing import Any

LOCK = ".lock"
CHECKPOINTS = "checkpoints"
PHASES = "phases"  # run folders of the phases before a run's first round
# What a process that was killed while it wrote one of a run's files leaves: see `write_atomically`.
# Other hidden files, such as an editor's `.config.json.swp`, are the user's.
_UNFINISHED = re.compile(
    r"\.(config\.json|environment\.json|summary\.json|metrics\.jsonl|clients\.npz|.+\.safetensors)\.\d+"
)
# What a start may leave if it is killed at once, beside unfinished files.
_BEGINNINGS = ("logs", PHASES, LOCK)


class RunFolderError(ValueError):
    """The folder is another run's, is in use or cannot be written. The message is one line."""


def check_folder(path: Path) -> None:
    """Checks that a folder holds a run or nothing; writes nothing.

    Raises:
      RunFolderError: it is a file, or holds something else.
    """
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"workdir must be a folder, {path} is a file.")
    names = {path.name for path in path.glob("*")}
    if "config.json" not in names and not all(map(_is_beginning, names)):
        raise RunFolderError(f"folder {path} is not empty and holds no run.")


def read_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder. Raises RunFolderError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"cannot read {path}: {error}.") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"cannot read {path}: it is no JSON object.")
    return content


def is_unfinished(name: str) -> bool:
    """Whether a file of a run folder is one that a killed process has not finished writing."""
    return _UNFINISHED.fullmatch(name) is not None


def _is_beginning(name: str) -> bool:
    return name in _BEGINNINGS or is_unfinished(name)
