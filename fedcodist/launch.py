"""Starting an experiment as one process or several, and starting it again when XLA aborts it.

On a CPU one process per core, each with one device and one thread, joined by `jax.distributed`, is
both the fastest layout and a safe one: several virtual devices in one process share one pool of
threads, where a collective that waits can starve the one it waits for. It is the same program as on
many machines.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

RANK = "FEDCODIST_PROCESS"
COUNT = "FEDCODIST_PROCESSES"
COORDINATOR = "FEDCODIST_COORDINATOR"
USER_ERROR = 2
INTERRUPTED = 130
_ATTEMPTS_WITHOUT_PROGRESS = 3
# Each process compiles for itself, and cohorts are small; more cores than this become threads.
_MOST_PROCESSES = 16


def default_processes() -> int:
    """One process per core on a CPU; one in all with an accelerator, or where the user has chosen.

    A choice is `XLA_FLAGS` with a device count, `JAX_NUM_CPU_DEVICES`, or a platform in
    `JAX_PLATFORMS` other than cpu.
    """
    chosen = "device_count" in os.environ.get("XLA_FLAGS", "") or os.environ.get(
        "JAX_NUM_CPU_DEVICES"
    )
    platforms = os.environ.get("JAX_PLATFORMS", "")
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "libtpu")
    accelerated = platforms not in ("", "cpu") or (
        not platforms and any(importlib.util.find_spec(plugin) for plugin in plugins)
    )
    if chosen or accelerated or sys.platform != "linux":
        return 1
    return min(len(_cores()), _MOST_PROCESSES)


def is_child() -> bool:
    """Whether this process was started by `supervise`."""
    return RANK in os.environ


def join() -> None:
    """Makes this process part of the run that `supervise` started; call it before any use of JAX.

    Does nothing in a process that was not started by `supervise`, or is the only one.
    """
    count = int(os.environ.get(COUNT, "1"))
    if count == 1:
        return
    rank = int(os.environ[RANK])
    cores = sorted(_cores())
    share = max(1, len(cores) // count)
    os.sched_setaffinity(0, cores[rank * share % len(cores) :][:share])
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(os.environ[COORDINATOR], count, rank)
    with _silent():
        # The first collective prints how the processes found each other.
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("fedcodist")


def cache_compilations() -> None:
    """Keeps the programs that are compiled from now on, on disk for the next start.

    Does nothing where the user has chosen a folder (JAX_COMPILATION_CACHE_DIR) or switched JAX's cache
    off. Programs of one kind of processor are kept apart from those of another, which may lack its
    instructions.
    """
    import jax

    settings: Any = jax.config  # whose names appear at run time
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    # Without a place to write, or a home, every start compiles.
    with contextlib.suppress(OSError, RuntimeError):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "fedcodist" / f"compiled-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True)
        settings.update("jax_compilation_cache_dir", str(folder))


def supervise(
    command: Sequence[str],
    processes: int,
    newest_checkpoint: Callable[[], str | None] = lambda: None,
    logs: Path | None = None,
) -> int:
    """Runs a command as one run of several processes; returns its exit status.

    Processes end with this one, however it ends. When one is killed by a signal (XLA aborts itself
    when a collective is stuck) all are started again, and one line says so; they continue from their
    checkpoint. After three starts that made no checkpoint it gives up.

    Args:
      command: the program and its arguments, the same for every process.
      processes: how many.
      newest_checkpoint: names the newest checkpoint, to tell progress from a loop.
      logs: folder for the output of all processes but the first; None discards it.
    """
    attempts, seen = 0, newest_checkpoint()
    while True:
        port = _free_port()
        children = [_start(command, rank, processes, port, logs) for rank in range(processes)]
        try:
            status = _wait(children)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from the last checkpoint.", flush=True)
            return INTERRUPTED
        finally:
            _stop(children)
        if status >= 0:
            if status and logs is not None and children[0].returncode <= 0:
                print(f"error: a process ended with status {status}: see {logs}.", file=sys.stderr)
            return status
        newest = newest_checkpoint()
        attempts = attempts + 1 if newest == seen else 1
        seen = newest
        reason = signal.Signals(-status).name
        if attempts >= _ATTEMPTS_WITHOUT_PROGRESS:
            print(f"stopped by {reason} {attempts} times without progress: giving up.", flush=True)
            return 1
        where = f"checkpoint {newest}" if newest else "the beginning"
        print(f"a process was stopped by {reason}: starting again from {where}.", flush=True)


def _start(command, rank, processes, port, logs):
    environment = os.environ | {
        RANK: str(rank),
        COUNT: str(processes),
        COORDINATOR: f"127.0.0.1:{port}",
    }
    parent = os.getpid()
    with contextlib.ExitStack() as opened:
        output = None
        if rank > 0:
            path = Path(os.devnull)
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                path = logs / f"process_{rank}.log"
            output = opened.enter_context(open(path, "ab"))
        return subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is this process's to handle; it ends the others.
            start_new_session=True,
            preexec_fn=lambda: _end_with(parent),
        )


def _wait(children: Sequence[subprocess.Popen]) -> int:
    """The exit status of a run: 0, an error's, or minus the signal that stopped a process."""
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            break
        time.sleep(0.02)
    # The first process's output is what the user sees: it gets the time to say what is wrong, which
    # is mostly the same in all. A signal that stopped one process makes others fail too.
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        if children[0].poll() == USER_ERROR:
            break
        time.sleep(0.02)
    codes = [child.poll() for child in children]
    if USER_ERROR in codes:
        return USER_ERROR
    stopped = [code for code in codes if code is not None and code < 0]
    return stopped[0] if stopped else next(code for code in codes if code)


def _stop(children: Sequence[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
    for child in children:
        child.wait()


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent is gone, even by SIGKILL."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _processor() -> str:
    """Short text that is the same for processors with the same instructions."""
    description = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
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
