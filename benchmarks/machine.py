"""The machine of a measurement: processor, cores, vector width."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def device() -> str:
    """The machine's name in records: 'AMD EPYC (family 26, model 2), 2 cores'.

    Call it before a process joins others: afterwards it is confined to its own cores.
    """
    count = cores()
    return f"{processor()}, {count} core{'s' if count > 1 else ''}"


def accelerator() -> str | None:
    """The devices that JAX uses, '1 x NVIDIA H200'; None where it uses the processor."""
    import jax

    if jax.default_backend() == "cpu":
        return None
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def peak_accelerator_mb() -> float | None:
    """Peak memory that JAX used on its first device; None for a processor, or if it is not reported."""
    import jax

    about = jax.local_devices()[0].memory_stats() or {}
    if jax.default_backend() == "cpu" or "peak_bytes_in_use" not in about:
        return None
    return about["peak_bytes_in_use"] / 1e6


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name and the numbers of its model, as far as the system reports them.

    The numbers are needed, since virtual machines have one name for processors of several generations.
    """
    name = _field("model name") or platform.processor() or platform.machine()
    numbers = [_field("cpu family"), _field("model")]
    return f"{name} (family {numbers[0]}, model {numbers[1]})" if all(numbers) else name


def vector_lanes() -> int | None:
    """float32 values of one vector instruction; None if the system does not report it."""
    flags = (_field("flags") or _field("Features") or "").split()
    lanes = {"avx512f": 16, "avx2": 8, "sse2": 4, "asimd": 4}
    return next((lanes[flag] for flag in lanes if flag in flags), None)


def _field(name: str) -> str | None:
    """A field of the first processor in /proc/cpuinfo, if there is this file."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for key, value in fields if key.strip() == name), None)
