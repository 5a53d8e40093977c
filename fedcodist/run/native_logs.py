"""Where the output of C++ code goes: XLA and Gloo print from outside of Python."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def log_native_output(path: Path, streams: Sequence[str] = ("stdout", "stderr")) -> None:
    """Sends output of C++ code to a log; that of Python still goes where it went."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as log:
        for name in streams:
            before, descriptor = getattr(sys, name), {"stdout": 1, "stderr": 2}[name]
            before.flush()
            now = os.fdopen(os.dup(descriptor), "w", 1, before.encoding, before.errors)
            setattr(sys, name, now)
            os.dup2(log.fileno(), descriptor)


def log_native_errors(path: Path) -> None:
    """Sends errors of C++ code to a log: XLA and Gloo print them when a process has ended.

    Standard output stays, since a live display needs the terminal's width.
    """
    with contextlib.suppress(OSError):  # the run itself refuses a folder that cannot be written
        log_native_output(path, ("stderr",))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discards what C++ code prints to standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, nothing):
            os.close(descriptor)
