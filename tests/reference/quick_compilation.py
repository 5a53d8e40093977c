"""XLA's options for programs that run for milliseconds and compile for seconds; does not import jax."""

import importlib.metadata

# jaxlib 0.12 no longer knows the option, and XLA aborts a process that sets an unknown one.
_HAS_FUSION_EMITTERS = tuple(
    int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]
) < (0, 12)

# For `compiler_options` of jax.jit.
QUICK = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if _HAS_FUSION_EMITTERS else {}
)
# For the environment variable XLA_FLAGS of a process that has not imported jax yet.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
