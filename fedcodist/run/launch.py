"""Starts an experiment as one process or several, and starts it again if XLA aborts it.

On a CPU there is one process per core, with one device and one thread, joined by `jax.distributed`.
This layout is the fastest, and it is safe. Several virtual devices in one process would share a pool of
threads, in which a waiting collective can block the one that it waits for. The program is the same as on
many machines, where every machine's command starts one process (`fedcodist.run.cluster`).
"""

import contextlib
import functools
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedcodist.core.child_processes import INTERRUPTED as INTERRUPTED
from fedcodist.core.child_processes import start, stop, until_interrupted
from fedcodist.run.native_logs import log_native_errors, silent

RANK = "FEDCODIST_PROCESS"
COUNT = "FEDCODIST_PROCESSES"
COORDINATOR = "FEDCODIST_COORDINATOR"
# The pipe by which a process of a run on many machines tells that it has joined them.
JOINED = "FEDCODIST_JOINED"
_LOGS = "FEDCODIST_LOGS"
USER_ERROR = 2
DISCONNECTED = 3
_ATTEMPTS_WITHOUT_PROGRESS = 3
# Cohorts are small. Further cores become threads.
_MOST_PROCESSES = 16


def default_processes() -> int:
    """One process per core on a CPU; a single one with an accelerator, or if the user sets devices.

    Users set them by `XLA_FLAGS` with a device count, by `JAX_NUM_CPU_DEVICES`, or by a platform other
    than cpu in `JAX_PLATFORMS`.
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


def check_processes(name: str, value: int) -> int:
    """Checks and returns the number of processes that a flag or setting asks for.

    Raises:
      ValueError: names the flag. Each process is a whole program, so many more than cores would exhaust
        the machine.
    """
    most = max(len(_cores()), _MOST_PROCESSES)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    if value > most:
        raise ValueError(f"{name} must be at most {most} on this machine, got {value}.")
    return value


def is_child() -> bool:
    """Whether this process was started by `supervise` or by `cluster.supervise_host`."""
    return RANK in os.environ


def processes_here() -> int:
    """The number of this run's processes on this machine."""
    return int(os.environ.get(COUNT, "1"))


def join() -> None:
    """Makes this process part of the run that `supervise` started. Call it before any use of JAX.

    Does nothing in a process that was not started by `supervise`, or is the run's only one.
    """
    count = processes_here()
    if count == 1:
        return
    rank = int(os.environ[RANK])
    if rank == 0 and _LOGS in os.environ:
        log_native_errors(Path(os.environ[_LOGS]) / "process_0.log")
    take_cores(rank, count)
    _schedule_in_batches()
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    address = os.environ[COORDINATOR]
    # Everybody who reaches the coordinator could join the run, so it listens on the loopback only.
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    _connect_on_loopback()
    with silent():
        # The first collective prints messages about connections.
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("fedcodist")


def is_disconnection(error: RuntimeError) -> bool:
    """Whether an error means that another process of the run has ended. Logs such an error."""
    signs = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
    is_one_of_several = JOINED in os.environ or processes_here() > 1
    gone = is_one_of_several and any(sign in str(error) for sign in signs)
    if gone:
        os.write(2, f"{error}\n".encode())
    return gone


def leave(status: int) -> None:
    """Ends a failed process, without waiting for the others at jax.distributed's exit barrier."""
    sys.stdout.flush()
    sys.stderr.flush()
    if JOINED in os.environ and status != DISCONNECTED:
        # All processes print a user's error; if the coordinator ended at once, the others would abort.
        time.sleep(1)
    os._exit(status)


def take_cores(place: int, places: int, process: int = 0) -> None:
    """Confines a process to its share of this process's cores.

    Call it before XLA starts, which makes as many threads. Shares differ by at most one core. If there
    are fewer cores than places, some places share a core. Does nothing on systems where a process cannot
    be confined, such as macOS.

    Args:
      place: index of the share, from 0.
      places: number of shares.
      process: its id; 0 is the calling process.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(_cores())
    first = place * len(cores) // places
    end = (place + 1) * len(cores) // places
    os.sched_setaffinity(process, cores[first : max(end, first + 1)])


def _schedule_in_batches() -> None:
    """Sets batch scheduling for this thread and later ones: waking threads do not preempt (Linux).

    Otherwise the thread that receives from other processes would preempt, on the only core, the thread
    whose lock it needs. It would then spin until the kernel's next tick. A collective takes 0.1 ms with
    batch scheduling, and 4 ms without.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def supervise(
    command: Sequence[str],
    processes: int,
    newest_checkpoint: Callable[[], str | None] = lambda: None,
    logs: Path | None = None,
) -> int:
    """Runs a command as one run of several processes; returns its exit status.

    The processes end with this one, however it ends. If a signal kills one of them (XLA aborts itself
    when a collective is stuck), all are started again, one line is printed, and they continue from their
    checkpoint. After three starts without a new checkpoint the run fails.

    Args:
      command: the program and its arguments, the same for every process.
      processes: how many.
      newest_checkpoint: () -> name of the newest checkpoint, by which progress is seen.
      logs: folder for the output of all processes but the first, and for C++ errors of the first. With
        None the first process's output is shown, and that of the others is discarded.
    """
    return until_interrupted(
        lambda: _supervised(command, processes, newest_checkpoint, logs),
        "interrupted: the same command goes on from the last checkpoint.",
    )


def _supervised(
    command: Sequence[str],
    processes: int,
    newest_checkpoint: Callable[[], str | None],
    logs: Path | None,
) -> int:
    attempts, seen = 0, newest_checkpoint()
    while True:
        port, started = _free_port(), []
        try:
            for rank in range(processes):
                started.append(_start_local(command, rank, processes, port, logs))
            status = _wait(started)
        finally:
            stop(started, seconds=0)
        if status >= 0:
            is_printed = started[0].returncode > 0 and started[0].returncode != DISCONNECTED
            if status and logs is not None and not is_printed:
                description = f"a process ended with status {status}"
                if status == DISCONNECTED:
                    description = "the processes lost each other"
                print(f"error: {description}: see {logs}.", file=sys.stderr)
            return status
        newest = newest_checkpoint()
        attempts = attempts + 1 if newest == seen else 1
        seen = newest
        reason = signal.Signals(-status).name
        if attempts >= _ATTEMPTS_WITHOUT_PROGRESS:
            see = "" if logs is None else f" See {logs}."
            print(
                f"stopped by {reason} {attempts} times without progress: giving up.{see}",
                flush=True,
            )
            return 1
        origin = f"checkpoint {newest}" if newest else "the beginning"
        print(f"a process was stopped by {reason}: starting again from {origin}.", flush=True)


def _start_local(
    command: Sequence[str], rank: int, processes: int, port: int, logs: Path | None
) -> subprocess.Popen:
    environment = {RANK: str(rank), COUNT: str(processes), COORDINATOR: f"127.0.0.1:{port}"}
    if logs is not None:
        environment[_LOGS] = str(logs)
    with contextlib.ExitStack() as opened:
        output = None
        if rank > 0:
            path = Path(os.devnull)
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                path = logs / f"process_{rank}.log"
            output = opened.enter_context(open(path, "ab"))
        return start(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _wait(children: Sequence[subprocess.Popen]) -> int:
    """The exit status of a run: 0, that of an error, or minus the signal that stopped a process."""
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            break
        time.sleep(0.02)
    # The user sees the output of the first process, so it gets time to print its error, which is mostly
    # that of all. If a signal stopped one process, others fail too.
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        if children[0].poll() == USER_ERROR:
            break
        time.sleep(0.02)
    codes = [child.poll() for child in children]
    if USER_ERROR in codes:
        return USER_ERROR
    stopped = [code for code in codes if code is not None and code < 0]
    # The status of a process that lost another says nothing about the cause.
    failed = [code for code in codes if code and code != DISCONNECTED]
    return (stopped or failed or [DISCONNECTED])[0]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _connect_on_loopback() -> None:
    """Makes Gloo listen on the loopback, and not on the address of the host name."""
    # JAX has no public setting for it. If JAX moves the function, Gloo listens as it does by default.
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import xla_bridge

        make = xla_bridge._jax.make_gloo_tcp_collectives
        xla_bridge._jax.make_gloo_tcp_collectives = functools.partial(make, hostname="127.0.0.1")
