"""Every test process has eight virtual CPU devices; set before jax is imported anywhere."""

import os

import quick_compilation

# Nearly all of the tests' time is compilation: of code that need not be fast.
os.environ.setdefault(
    "XLA_FLAGS",
    f"--xla_force_host_platform_device_count=8 {quick_compilation.XLA_FLAGS}",
)
# XLA runs all virtual devices on one pool of threads, and a collective blocks the thread it runs on:
# with more threads than devices can block, none starves.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture(scope="module")
def compile_quickly():
    """For programs that run for milliseconds and compile for seconds."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
