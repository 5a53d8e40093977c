"""Child processes that end with the process that started them, however it ends.

A command that trains in child processes must not leave any running. INT, TERM and HUP raise an exception
in it (`until_interrupted`), and functions that wait for a child then stop the child. If the parent is
killed, Linux kills its children.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# The exit status that shells use: 128 plus the signal's number.
INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_SECONDS_TO_END = 10.0
# Loaded before any fork: the child of a process with several threads should load nothing.
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


class _Interrupted(KeyboardInterrupt):
    """A signal asked this process to end; `args` holds its number."""


def until_interrupted(work: Callable[[], int], line: str) -> int:
    """Calls `work`; INT, TERM and HUP end it like Ctrl-C, and the children that it started are stopped.

    Args:
      work: () -> exit status.
      line: printed if a signal has ended it.

    Returns:
      The exit status of `work`, or 128 plus the signal's number.
    """
    # Only the main thread can set handlers. Signals that are ignored, as under nohup, stay ignored.
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.getsignal(number)
        for number in _SIGNALS
        if is_main and signal.getsignal(number) is not signal.SIG_IGN
    }

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        # A second signal must not interrupt the stopping of children.
        for handled in before:
            signal.signal(handled, signal.SIG_IGN)
        raise _Interrupted(number)

    try:
        for number in before:
            signal.signal(number, interrupt)
        return work()
    except KeyboardInterrupt as interruption:
        print(line, flush=True)
        number = interruption.args[0] if isinstance(interruption, _Interrupted) else signal.SIGINT
        return 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    command: Sequence[str], timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """Like `subprocess.run`, but the child ends with this process; `options` as in `start`.

    Raises:
      subprocess.TimeoutExpired: the child was stopped after `timeout` seconds.
    """
    child = start(command, **options)
    try:
        output, errors = child.communicate(timeout=timeout)
    finally:
        stop([child])
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a program that ends with this process, even if this one is killed (on Linux).

    Args:
      command: the program and its arguments.
      options: further arguments of subprocess.Popen.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # JAX warns of forks, since its threads' locks stay locked in the child. The child uses none.
        warnings.simplefilter("ignore", RuntimeWarning)
        return subprocess.Popen(
            command,
            # Ctrl-C then reaches only this process, which ends its children.
            start_new_session=True,
            preexec_fn=lambda: _end_with(parent),
            **options,
        )


def stop(children: Sequence[subprocess.Popen], seconds: float = _SECONDS_TO_END) -> None:
    """Ends children of `start` that still run, and the processes that these started.

    Args:
      children: processes, which are ended at the same time.
      seconds: how long they may take to end their children before they are killed; 0 kills at once.
    """
    deadline = time.monotonic() + seconds
    if seconds:
        _signal(children, signal.SIGTERM)
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.02)
    _signal(children, signal.SIGKILL)
    for child in children:
        child.wait()


def _signal(children: Sequence[subprocess.Popen], number: int) -> None:
    """Sends a signal to the process groups of the children that run."""
    for child in children:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)


def adopt_orphans() -> None:
    """Makes this process the parent of its orphaned descendants (on Linux), for `none_left`."""
    if sys.platform == "linux":
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Kills, at its end, every process that was started inside and still runs (on Linux).

    `stop` ends process groups. A program that is not ours may put its workers into groups of their own,
    as torchrun does. If it ends before its workers, they are found only after `adopt_orphans`.
    """
    before = _descendants(os.getpid())
    try:
        yield
    finally:
        # Repeated, since a process may start another one before it is killed.
        while left := _descendants(os.getpid()) - before:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                # Only a process's parent can wait for it.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            time.sleep(0.02)


def _descendants(root: int) -> set[int]:
    """The ids of a process's descendants. Of ended ones (zombies), only its own children are counted."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # "pid (name) state parent ...", where a name may hold brackets and spaces.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == root:
                parents[int(folder.name)] = int(parent)
    found, new = set(), {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def end_with_parent() -> None:
    """Makes this process end with its parent; for processes that another library starts."""
    _end_with(os.getppid())


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
