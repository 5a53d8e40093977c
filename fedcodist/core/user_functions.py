"""Functions that users write, traced by shape: an error names the function and the user's line."""

import dis
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax.errors import ScopeParamShapeError

_OF_TRACING = " The error occurred while tracing"  # from here JAX tells of this library's functions


def traced(
    name: str,
    function: Callable[..., Any],
    *arguments: Any,
    hint: str = "",
    about_none: str = "",
    given: str = "what it is given",
) -> Any:
    """The shapes of a function's result.

    Args:
      name: the function's name, for messages.
      function: the function to trace.
      arguments: arrays or shapes.
      hint: what the function may look up; ends the message if it looks up something else.
      about_none: which argument is None, and why; for messages about a None.
      given: the arguments, for messages.

    Raises:
      ValueError, TypeError: names the function, and says what is wrong with it.
    """
    try:
        return jax.eval_shape(function, *arguments)
    except WrongResult as error:
        raise TypeError(f"{name} {error}") from None
    except KeyError as error:
        line = f" ({place})" if (place := users_line(error)) else ""
        raise ValueError(f"{name} looks up {error}{line}, which is not there{hint}.") from error
    except Exception as error:
        if raised_here(error):
            raise
        message = " ".join(str(error).split()).partition(_OF_TRACING)[0] or type(error).__name__
        kind = type(error) if type(error) in (TypeError, ValueError) else ValueError
        about = about_none if "NoneType" in message else ""
        if isinstance(error, ScopeParamShapeError):
            about += ", inputs of another shape than the network was made with"
        raise kind(f"{name} does not fit {given}{about}{error_place(error)}: {message}") from error


class WrongResult(Exception):
    """A function returned a wrong kind of value. The message continues after the function's name."""


def raised_here(error: BaseException) -> bool:
    """Whether this library raised an error, so that its message is already complete."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not place.tb_frame.f_globals["__name__"].startswith("fedcodist."):
        return False
    # Python itself raises if the library calls a function with too many arguments.
    return place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def error_place(error: BaseException) -> str:
    """Where an error comes from, " (in <function>, module.py, line 3)"; '' if nothing is known."""
    # JAX adds notes too.
    functions = [note for note in getattr(error, "__notes__", []) if note.startswith("in ")]
    places = ", ".join(filter(None, [*functions[:1], users_line(error)]))
    return f" ({places})" if places else ""


def users_line(error: BaseException) -> str:
    """The last line of a user's module that led to the error, "module.py, line 3"; '' if none did."""
    # This library, Python's own modules, and installed packages, whose folder Debian names otherwise.
    folders = (Path(__file__).parents[1], Path(dis.__file__).parent)
    ours = tuple(f"{folder}{os.sep}" for folder in folders)
    is_installed = lambda file: "site-packages" in file or "dist-packages" in file
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_installed(frame.filename) and not frame.filename.startswith(ours)
    ]
    return f"{Path(users[-1].filename).name}, line {users[-1].lineno}" if users else ""
