"""How much memory of a device and of this machine a program may use."""

import contextlib
import os
from pathlib import Path

import jax

from fedcodist.core.devices import from_all_processes

# The remaining share is for evaluation, the next round's inputs and gaps between arrays.
ACCELERATOR_SHARE = 0.9
# A CPU's memory also holds the host's copy of the data, and other programs.
CPU_SHARE = 0.5
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_bytes(processes_here: int = 1) -> int:
    """Bytes of a device that a program may use: a share of its memory, the smallest of all processes."""
    about = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in about:
        share = ACCELERATOR_SHARE * about["bytes_limit"]
    else:
        share = CPU_SHARE * machine_bytes() / (processes_here * jax.local_device_count())
    if jax.process_count() == 1:
        return int(share)
    return min(from_all_processes(int(share // 2**20))) * 2**20


def host_bytes(processes_here: int = 1) -> int:
    """Bytes of this machine's memory that a process may use beside other programs."""
    return int(CPU_SHARE * machine_bytes() / processes_here)


def machine_bytes() -> int:
    """Bytes of this machine's memory, or of its container's limit."""
    if not hasattr(os, "sysconf"):
        raise ValueError("chunk_size must be given: this system does not tell its memory.")
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            size = min(size, int(Path(path).read_text(encoding="utf-8")))
    return size
