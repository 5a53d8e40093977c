"""A run on many machines: every machine's command starts one process, and JAX joins them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedcodist.core.child_processes import start, stop, until_interrupted
from fedcodist.run.launch import COUNT, DISCONNECTED, JOINED, RANK
from fedcodist.run.native_logs import log_native_output

_RESUME = "the same command on all machines goes on from the last checkpoint"
# A killed process is mostly noticed at once, since its connections close; a lost machine is not.
_SECONDS_WITHOUT_HEARTBEAT = 30
_SECONDS_TO_JOIN = 300


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
        log_native_output(path)
    except OSError as error:
        raise ClusterError(f"cannot write in {logs} on this machine: {error.strerror}.") from error
    if JOINED in os.environ:
        os.write(int(os.environ[JOINED]), str(path).encode())
    _connect_devices()


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
    joined = {RANK: "0", COUNT: "1", JOINED: str(writing)}
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
