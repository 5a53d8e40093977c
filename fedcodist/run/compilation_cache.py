"""Keeps compiled programs on disk between starts."""

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from fedcodist.run import launch


def cache_compilations() -> None:
    """Keeps programs that are compiled from now on, on disk for the next start.

    Does nothing if the user has chosen a folder (JAX_COMPILATION_CACHE_DIR) or switched JAX's cache off.
    Every kind of processor has its folder, since another kind may lack some instructions.
    """
    import jax

    settings: Any = jax.config  # its attributes exist at run time only
    if settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    # Without a writable folder every start compiles.
    with contextlib.suppress(OSError, RuntimeError):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "fedcodist" / f"compiled-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True)
        settings.update("jax_compilation_cache_dir", str(folder))
        # A start has several programs that compile in half a second; JAX's default is one second.
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            settings.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if launch.is_child():
        _write_from_every_process()


def _write_from_every_process() -> None:
    """Makes every process write its compiled programs.

    JAX writes from the first process only, since accelerators' programs are the same for all processes.
    On CPUs every process has another program, and all but the first would compile again at every start.
    JAX has no setting for it. If its names change, a test fails, and starts are slower.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compiler, distributed

        private: Any = compiler
        write, state = private._cache_write, distributed.global_state

        def write_as_first(key: str, seconds: float, name: str, backend: Any, *rest: Any) -> None:
            process = state.process_id
            if backend.platform == "cpu":
                state.process_id = 0
            try:
                write(key, seconds, name, backend, *rest)
            finally:
                state.process_id = process

        private._cache_write = write_as_first


def _processor() -> str:
    """A short text that is the same for processors with the same instructions."""
    description = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(description.encode()).hexdigest()[:12]
