"""Starts an experiment as one process or several, and starts it again if XLA aborts it.

On a CPU there is one process per core, with one device and one thread, joined by `jax.distributed`.
This layout is the fastest, and it is safe. Several virtual devices in one process would share a pool of
threads, in which a waiting collective can block the one that it waits for. The program is the same as on
many machines, where every machine's command starts one process (`supervise_host`).
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedcodist.core.child_processes import INTERRUPTED as INTERRUPTED
from fedcodist.core.child_processes import start, stop, until_interrupted

RANK = "FEDCODIST_PROCESS"
COUNT = "FEDCODIST_PROCESSES"
COORDINATOR = "FEDCODIST_COORDINATOR"
_LOGS = "FEDCODIST_LOGS"
_JOINED = "FEDCODIST_JOINED"
USER_ERROR = 2
DISCONNECTED = 3
_RESUME = "the same command on all machines goes on from the last checkpoint"
# A killed process is mostly noticed at once, since its connections close; a lost machine is not.
_SECONDS_WITHOUT_HEARTBEAT = 30
_SECONDS_TO_JOIN = 300
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


class ClusterError(ValueError):
    """The machines of a run cannot be joined. The message is one line."""


class Cluster(NamedTuple):
    """Where the machines of a run meet.

    Attributes:
      coordinator: address and a free port of host 0, 'host:port'.
      num_hosts: number of machines.
      host: index of this machine, from 0.
    """

    coordinator: str
    num_hosts: int
    host: int


def check_cluster(
    coordinator: str | None, num_hosts: int | None, host: int | None
) -> Cluster | None:
    """The cluster that three flags describe; None if none of them is given.

    Raises:
      ClusterError: names the flag and what is allowed.
    """
    flags = {"coordinator": coordinator, "num_hosts": num_hosts, "host": host}
    missing = [f"--{name}" for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing or coordinator is None or num_hosts is None or host is None:
        raise ClusterError(
            "--coordinator, --num_hosts and --host must be given together, "
            f"{' and '.join(missing)} missing."
        )
    name, _, port = coordinator.rpartition(":")
    if not name or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ClusterError(
            f"--coordinator must be HOST:PORT with a port of 1 to 65535, got {coordinator!r}."
        )
    if num_hosts < 1:
        raise ClusterError(f"--num_hosts must be at least 1, got {num_hosts}.")
    if not 0 <= host < num_hosts:
        raise ClusterError(f"--host must be between 0 and {num_hosts - 1}, got {host}.")
    return Cluster(coordinator, num_hosts, host)


def is_child() -> bool:
    """Whether this process was started by `supervise` or `supervise_host`."""
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
        _log_native_errors(Path(os.environ[_LOGS]) / "process_0.log")
    take_cores(rank, count)
    _schedule_in_batches()
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    address = os.environ[COORDINATOR]
    # Everybody who reaches the coordinator could join the run, so it listens on the loopback only.
    jax.distributed.initialize(address, count, rank, coordinator_bind_address=address)
    _connect_on_loopback()
    with _silent():
        # The first collective prints messages about connections.
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("fedcodist")


def join_cluster(cluster: Cluster | None, logs: Path) -> None:
    """Makes this process part of a run on many machines. Call it before any use of JAX.

    From then on, output of C++ code goes to a log. JAX ends a process that has lost the others with
    twenty lines and SIGABRT; `supervise_host` prints one line instead.

    Args:
      cluster: where the machines meet; None lets JAX detect it (TPU pods, Slurm, Kubernetes, MPI).
      logs: folder of the logs, one for each process.

    Raises:
      ClusterError: JAX found no cluster, or the log cannot be written.
    """
    import jax

    if cluster is not None and cluster.host == 0:
        _check_port(cluster)
    coordinator, num_hosts, host = cluster or (None, None, None)
    try:
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            host,
            cluster_detection_method="deactivate" if cluster else None,
            initialization_timeout=_SECONDS_TO_JOIN,
            heartbeat_timeout_seconds=_SECONDS_WITHOUT_HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        if cluster is not None:
            raise
        raise ClusterError(
            f"--distributed found no cluster that it can join ({str(error).rstrip('.')}); elsewhere, "
            "give --coordinator, --num_hosts and --host."
        ) from error
    path = logs / f"process_{jax.process_index()}.log"
    try:
        _log_native_output(path)
    except OSError as error:
        raise ClusterError(f"cannot write in {logs} on this machine: {error.strerror}.") from error
    if _JOINED in os.environ:
        os.write(int(os.environ[_JOINED]), str(path).encode())
    _connect_devices()


def is_disconnection(error: RuntimeError) -> bool:
    """Whether an error means that another process of the run has ended. Logs such an error."""
    signs = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
    is_one_of_several = _JOINED in os.environ or processes_here() > 1
    gone = is_one_of_several and any(sign in str(error) for sign in signs)
    if gone:
        os.write(2, f"{error}\n".encode())
    return gone


def leave(status: int) -> None:
    """Ends a failed process, without waiting for the others at jax.distributed's exit barrier."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _JOINED in os.environ and status != DISCONNECTED:
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


def supervise_host(command: Sequence[str]) -> int:
    """Runs a command as this machine's process of a run on many machines; returns its exit status.

    The process ends with this one, however it ends. If it or another machine's process is stopped, one
    line is printed. Nothing is started again, since all machines must start together.

    Args:
      command: the program, which calls `join_cluster`, and its arguments.
    """
    return until_interrupted(lambda: _supervised_host(command), f"interrupted: {_RESUME}.")


def _supervised_host(command: Sequence[str]) -> int:
    reading, writing = os.pipe()
    joined = {RANK: "0", COUNT: "1", _JOINED: str(writing)}
    child = start(command, env=os.environ | joined, stdin=subprocess.DEVNULL, pass_fds=(writing,))
    os.close(writing)
    try:
        status = child.wait()
    finally:
        stop([child], seconds=0)
        with os.fdopen(reading, "rb") as pipe:
            log = pipe.read().decode()
    if status == DISCONNECTED or (status == -signal.SIGABRT and log):
        reason = f"another process of the run ended or did not answer: {_RESUME}."
    elif status < 0 and not log:
        reason = (
            f"the machines did not find each other within {_SECONDS_TO_JOIN} s: is the command "
            "running on all of them, with the same coordinator?"
        )
    elif status < 0:
        reason = f"stopped by {signal.Signals(-status).name}: {_RESUME}."
    else:
        return status
    print(f"error: {reason}{f' See {log}.' if log else ''}", file=sys.stderr, flush=True)
    return 1


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


def _check_port(cluster: Cluster) -> None:
    """Raises ClusterError if host 0 cannot listen: JAX would end in a segmentation fault."""
    port = int(cluster.coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ClusterError(
            f"--coordinator: port {port} cannot be used on this machine, which is host 0: "
            f"{error.strerror}."
        ) from error


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


def _connect_devices() -> None:
    """Connects processes and devices now.

    On a CPU all must connect within 30 s. Later this could take too long: one process may still compile
    while another has read its programs from the disk.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("fedcodist")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    nothing = jax.sharding.PartitionSpec()

    def total() -> jax.Array:
        # The sum of a constant would be computed without any connection.
        return jax.lax.psum(jax.lax.axis_index("devices"), "devices")

    summed = jax.shard_map(total, mesh=mesh, in_specs=(), out_specs=nothing)
    jax.block_until_ready(jax.jit(summed)())


def _log_native_output(path: Path, streams: Sequence[str] = ("stdout", "stderr")) -> None:
    """Sends output of C++ code to a log; that of Python still goes where it went."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as log:
        for name in streams:
            before, descriptor = getattr(sys, name), {"stdout": 1, "stderr": 2}[name]
            before.flush()
            now = os.fdopen(os.dup(descriptor), "w", 1, before.encoding, before.errors)
            setattr(sys, name, now)
            os.dup2(log.fileno(), descriptor)


def _log_native_errors(path: Path) -> None:
    """Sends errors of C++ code to a log: XLA and Gloo print them when a process has ended.

    Standard output stays, since a live display needs the terminal's width.
    """
    with contextlib.suppress(OSError):  # the run itself refuses a folder that cannot be written
        _log_native_output(path, ("stderr",))


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
