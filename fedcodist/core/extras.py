"""Packages that only some uses need: a missing one is one line with the command that installs it."""

import importlib.util
import sys

# Where the package has another name than its module.
_TITLES = {
    "Cryptodome": "pycryptodomex",
    "haiku": "dm-haiku",
    "jax_privacy": "jax-privacy",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "TensorFlow Datasets",
}


def check_installed(what: str, module: str, extra: str) -> None:
    """Raises ImportError where a module cannot be found; nothing is imported.

    Args:
      what: needs it, the beginning of the message.
      module: top-level name of the module.
      extra: that of fedcodist which brings it.
    """
    if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
        title = _TITLES.get(module, module)
        raise ImportError(f"{what} needs {title}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """What a user types to have an extra."""
    return f'pip install "fedcodist[{extra}]"'
