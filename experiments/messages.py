"""Mistakes told by the settings that a config's author wrote."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


def choice(setting: str, name: str, choices: Mapping[str, Any]) -> Any:
    """The one of the choices that a setting names, or one line that lists them."""
    if name not in choices:
        raise ValueError(f"{setting} must be one of {sorted(choices)}, got {name!r}.")
    return choices[name]


@contextlib.contextmanager
def named(settings: str) -> Iterator[None]:
    """Completes errors that begin with a function's argument, and names of settings that are missing."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{settings}{error}") from None
    except AttributeError as error:
        # ConfigDict's way of saying that a setting is missing; it tells the last part of the name.
        is_missing = error.args and isinstance(error.args[0], KeyError)
        if not is_missing or not settings.endswith("."):
            raise
        name = str(error.args[0].args[0]).split("\n")[0].strip("'")
        raise ValueError(f"the config lacks '{settings}{name}'") from None
