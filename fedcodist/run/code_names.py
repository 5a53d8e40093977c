"""Names of functions and classes. Those of libraries stay as they are if the library moves them."""

import sys
import types
from pathlib import Path
from typing import Any

_LIBRARIES = {"fedcodist", *sys.stdlib_module_names}


def name_of(named: Any) -> str:
    """The name of a function or class; in libraries, with the package but without the module."""
    name = getattr(named, "__qualname__", type(named).__qualname__)
    if not is_library(named):
        return name
    return f"{named.__module__.partition('.')[0]}.{name}"


def is_library(named: Any) -> bool:
    """Whether a function, a class or a module is of a library."""
    is_module = isinstance(named, types.ModuleType)
    module = named.__name__ if is_module else getattr(named, "__module__", None)
    package = (module or "").partition(".")[0]
    if package in _LIBRARIES:
        return package != "__main__"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if package == "experiments":
        # The one beside the library. A user's own package may have the same name.
        return Path(file).parent.parent == Path(__file__).parents[2]
    return "site-packages" in file or "dist-packages" in file
