"""Child processes that end with the process that started them, however it ends.

A command that trains in child processes must leave none behind, computing. INT, TERM and HUP unwind it
(`until_interrupted`), and what waits for a child stops it on the way. Where the parent is killed and
cannot do so, Linux kills its children.
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
from collections.abc import Callable, Sequence
from typing import Any

# A status that shells use too: 128 and the signal's number.
INTERRUPTED = 128 + signal.SIGINT
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
_SECONDS_TO_END = 10.0
# Loaded before any fork, after which a child of several threads had better load nothing.
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
_SET_PARENT_DEATH_SIGNAL = 1


class _Interrupted(KeyboardInterrupt):
    """A signal asked this process to end; `args` holds its number."""


def until_interrupted(work: Callable[[], int], line: str) -> int:
    """Does some work in a way that INT, TERM and HUP end like Ctrl-C: whatever it started is stopped.

    Args:
      work: () -> exit status.
      line: printed where a signal has ended it.

    Returns:
      Its exit status, or 128 and the signal's number.
    """
    # Handlers are the main thread's. What ignores a signal, as under nohup, goes on ignoring it.
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.getsignal(number)
        for number in _SIGNALS
        if is_main and signal.getsignal(number) is not signal.SIG_IGN
    }

    def interrupt(number, frame):
        # A second signal must not interrupt the stopping.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
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
    """`subprocess.run` of a child that ends with this process; `options` are `start`'s.

    Raises:
      subprocess.TimeoutExpired: it was stopped after `timeout` seconds.
    """
    child = start(command, **options)
    try:
        output, errors = child.communicate(timeout=timeout)
    finally:
        stop([child])
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts a program that ends with this process, even where this one is killed (Linux).

    Args:
      command: the program and its arguments.
      options: of subprocess.Popen.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        # JAX warns of forks: its threads' locks stay locked in the child, which takes none of them.
        warnings.simplefilter("ignore", RuntimeWarning)
        return subprocess.Popen(
            command,
            # Ctrl-C is this process's to handle; it ends the others.
            start_new_session=True,
            preexec_fn=lambda: _end_with(parent),
            **options,
        )


def stop(children: Sequence[subprocess.Popen], seconds: float = _SECONDS_TO_END) -> None:
    """Ends children of `start` that still run, with what they started themselves.

    Args:
      children: all of them end at once.
      seconds: that they have to end their own children before they are killed; 0 kills at once.
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
    """Sends a signal to the children that run, and to whatever is of their process groups."""
    for child in children:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)


def end_with_parent() -> None:
    """Makes this process end with the one that started it; for what another library starts."""
    _end_with(os.getppid())


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent is gone, even by SIGKILL."""
    if sys.platform == "linux":
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
