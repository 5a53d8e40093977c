"""Simple values as JSON, and names of functions and classes that stay if a library moves them."""

import enum
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

NOT_JSON = object()
_LIBRARIES = {"fedcodist", *sys.stdlib_module_names}


def json_value(value: Any) -> Any:
    """A simple value as JSON; NOT_JSON for other values."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex | np.dtype) or value is Ellipsis:
        return str(value)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return value.__name__
    return NOT_JSON


def key_text(key: Any) -> str:
    """A key of a mapping, or a member of a set, as text."""
    plain = json_value(key)
    if plain is not NOT_JSON:
        return repr(plain)
    if isinstance(key, tuple | frozenset):
        parts = map(key_text, key) if isinstance(key, tuple) else sorted(map(key_text, key))
        return f"({', '.join(parts)})"
    return name_of(key if hasattr(key, "__qualname__") else type(key))


def name_of(named: Any) -> str:
    """The name of a function or class; in libraries, with the package but without the module."""
    name = getattr(named, "__qualname__", type(named).__qualname__)
    if not is_library(named):
        return name
    return f"{named.__module__.partition('.')[0]}.{name}"


def is_library(named: Any) -> bool:
    """Whether a function or class is of a library, or a module is."""
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
