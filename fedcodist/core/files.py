"""Files that are written whole or not at all."""

import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content, or leaves it unchanged if that fails."""
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
    """Writes bytes to an open file. Tests replace this function to simulate a full disk."""
    file.write(content)
