"""A folder of compiled programs that all processes of a test session share; does not import jax."""

import atexit
import os
import shutil
import tempfile


def environment() -> dict[str, str]:
    """Variables that the first process sets before it imports jax, and that the others inherit.

    A folder that the user has chosen is used. The one that is made here is removed at the end of the
    process that made it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    folder = tempfile.mkdtemp(prefix="fedcodist-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
