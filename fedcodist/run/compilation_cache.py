"""Keeps compiled programs on disk between starts."""

import contextlib
import functools
import hashlib
import inspect
import os
import platform
from pathlib import Path
from typing import Any

from fedcodist.run import launch

# A process that waits for another one's program compiles it itself after ten minutes.
_MILLISECONDS_PER_WAIT = 10_000
_MOST_WAITS = 60


def cache_compilations() -> None:
    """Stores programs that are compiled from now on, on disk for the next start.

    A folder set by the user (JAX_COMPILATION_CACHE_DIR) is used, and nothing is done if JAX's cache is
    off. Every kind of processor has its own folder, since another kind may lack some instructions. On
    one machine the first process compiles, and the others take its programs.
    """
    import jax

    settings: Any = jax.config  # its attributes exist at run time only
    if launch.processes_here() > 1 and settings.jax_enable_compilation_cache:
        _compile_in_the_first_process(settings)
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
    On CPUs programs of one device have another key in every process, and all but the first process would
    compile them again at every start. JAX has no setting for it. If its names change, a test fails, and
    starts are slower.
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


def _compile_in_the_first_process(settings: Any) -> None:
    """Makes the other processes wait for the first one's programs, which JAX sends to them.

    JAX does so on accelerators (`jax_share_binary_between_hosts`). On CPUs programs are the same too,
    but their keys differ, since the topology that JAX hashes names the process. The processes have the
    same processor. If JAX's names change, a test fails, and every process compiles for itself.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import cache_key, compiler, distributed
        from jax._src.interpreters import mlir

        keys: Any = cache_key
        private: Any = compiler
        hash_topology, hash_devices = keys._hash_accelerator_config, keys._hash_devices
        share, compile_alone = private._compile_and_share_module, private._compile_and_write_cache
        read = private._cache_read
        # In JAX before 0.11 `read` has no argument for callbacks.
        number_of_parameters = len(inspect.signature(read).parameters)

        def hash_alike(hashed: Any, devices: Any) -> None:
            if not _is_of_several_processes(devices):
                hash_topology(hashed, devices)
                return
            hash_devices(hashed, devices)
            hashed.update(_processor().encode())

        def share_on_one_machine(*arguments: Any) -> Any:
            backend, module, devices, options, callbacks, _, name, key, first = arguments
            alone = (*arguments[:5], name, key)
            # A callback is an address in the process that compiles, and so is a part of the key.
            if backend.platform != "cpu" or b"callback" in mlir.module_to_bytecode(module):
                return compile_alone(*alone)
            if distributed.global_state.process_id == first:
                return share(*arguments)
            for _ in range(_MOST_WAITS):
                try:
                    return share(*arguments)
                except RuntimeError as error:
                    if "DEADLINE" not in str(error):
                        raise
                # The first process sends nothing where it has found what another run has just stored.
                found, _ = read(
                    *(name, key, options, backend, devices, callbacks)[:number_of_parameters]
                )
                if found is not None:
                    return found
            return compile_alone(*alone)

        keys._hash_accelerator_config = hash_alike
        # JAX keeps what was shared in an attribute of the function that it finds under this name.
        private._compile_and_share_module = functools.update_wrapper(share_on_one_machine, share)
        settings.update("jax_share_binary_between_hosts_timeout_ms", _MILLISECONDS_PER_WAIT)
        settings.update("jax_share_binary_between_hosts", True)


def _is_of_several_processes(devices: Any) -> bool:
    """Whether CPU devices (an array) belong to more than one process."""
    own = {device.process_index for device in devices.flat}
    return devices.flat[0].platform == "cpu" and len(own) > 1


def _processor() -> str:
    """A short text that is the same for processors with the same instructions."""
    description = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        description += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(description.encode()).hexdigest()[:12]
