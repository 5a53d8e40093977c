"""Whether a folder may become a run's; does not import JAX, so that a command can say so at once."""

import fnmatch
from pathlib import Path

LOCK = ".lock"
PHASES = "phases"  # run folders of the phases before a run's first round
# Files that a start may leave if it is killed at once.
_BEGINNINGS = ("logs", PHASES, LOCK, ".*.json.*")


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


def _is_beginning(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _BEGINNINGS)
