"""XLA's options for programs that run for milliseconds and compile for seconds; does not import jax."""

import importlib.metadata
import mmap
from typing import Any

_FASTEST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_COMPILE",
    "xla_cpu_emitter_verification_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,  # until jaxlib 0.11
}


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """The options that this jaxlib has: XLA aborts a process that sets another one.

    The name of an option is a string of its own in XLA's library, between two zeros. Names that XLA has
    dropped are only parts of longer strings.
    """
    known: dict[str, Any] = {}
    for file in importlib.metadata.files("jaxlib") or []:
        if file.name.startswith("libjax_common"):
            with open(file.locate(), "rb") as library:
                content = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ)
            has = lambda name, content=content: content.find(b"\0%b\0" % name.encode()) >= 0
            known |= {name: value for name, value in options.items() if has(name)}
    return known


# For `compiler_options` of jax.jit.
QUICK = _known(_FASTEST)
# For the environment variable XLA_FLAGS of a process that has not imported jax yet.
XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK.items())
