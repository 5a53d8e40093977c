"""Every test process has eight virtual CPU devices; set before jax is imported anywhere."""

import gc
import os
import sys
from pathlib import Path

import compiled_programs
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
# Tests of forked processes read all of stderr, where older tokenizers warn of a fork after their use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Many tests compile the same programs.
os.environ.update(compiled_programs.environment())

import hypothesis
import jax
import pytest

# A machine that does other work too takes seconds where an idle one takes milliseconds.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Tracing makes millions of objects that stay. With Python's own threshold a tenth of the suite's time
# goes into looking at them again.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish():
    """Tests write modules and change them within a second: compiled modules would hide the change.

    Until here Python keeps what it compiles: the test modules, and the packages that they import.
    """
    sys.dont_write_bytecode = True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks what slow_variants.txt lists, before pytest leaves out what is marked."""
    lines = (Path(__file__).parent / "slow_variants.txt").read_text(encoding="utf-8").splitlines()
    variants = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(variants):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def compile_quickly():
    """For programs that run for milliseconds and compile for seconds.

    `run_experiment` then uses one device: programs for several take a quarter longer to compile.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcodist.run.experiment.all_devices", lambda: None)
        yield
    jax.config.update("jax_disable_most_optimizations", before)
