"""Optional packages. If one is missing, the error is one line with the command that installs it."""

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
      what: the feature that needs the module; begins the message.
      module: top-level name of the module.
      extra: the extra of fedcodist that installs the module.
    """
    if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
        title = _TITLES.get(module, module)
        raise ImportError(f"{what} needs {title}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs an extra of fedcodist."""
    return f'pip install "fedcodist[{extra}]"'
