"""`package.module:function` in a config: a user's code, without a change to this library.

The module may be of an installed package, or lie beside the config file, whose folder is on Python's
path. Any error in it becomes one line that names the setting, and the line in the module.
"""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcodist.config.config_file import line_of, reason_of

_LIBRARY = str(Path(__file__).parents[1])  # the package's folder
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(name: Any) -> bool:
    """Whether a setting's value has the form of a reference, such as "my_package.module:function"."""
    return isinstance(name, str) and _REFERENCE.fullmatch(name) is not None


def choice_or_reference(setting: str, name: Any, choices: Mapping[str, Any]) -> Any:
    """The choice of this name, or the reference's function; raises ValueError that lists the names."""
    if is_reference(name):
        return function_at(setting, name)
    if not isinstance(name, str) or name not in choices:
        raise ValueError(
            f"{setting} must be one of {sorted(choices)} or package.module:function, got {name!r}."
        )
    return choices[name]


def function_at(setting: str, reference: str) -> Callable[..., Any]:
    """The function, or class, that a reference stands for.

    Raises:
      ValueError: as `value_at`, or it cannot be called.
    """
    function = value_at(setting, reference)
    if not callable(function):
        raise ValueError(
            f"{setting} must be a function or a class, got {reference!r}, which is of type "
            f"{type(function).__name__}."
        )
    return function


def value_at(setting: str, reference: str) -> Any:
    """The value that a reference stands for.

    Raises:
      ValueError: names the setting: there is no such module, its import fails, or it has no such name.
    """
    name, _, path = reference.partition(":")
    value: Any = imported(setting, reference, name)
    for part in path.split("."):
        if not hasattr(value, part):
            nearest = difflib.get_close_matches(part, dir(value), n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise ValueError(f"{setting} {reference!r}: there is no {part!r} in {name}{hint}")
        value = getattr(value, part)
    return value


def imported(setting: str, reference: str, name: str) -> ModuleType:
    """The module of this name, to which a setting's value refers.

    Raises:
      ValueError: names the setting, and the line in the module: there is no such module, or its import
        fails.
    """
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit` among them
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ValueError(
                f"{setting} {reference!r}: there is no module {missing!r}, neither installed nor beside "
                "the config file."
            ) from None
        reason = _reason_and_line(error, _file_of(name))
        raise ValueError(
            f"{setting} {reference!r}: the import of {name} failed: {reason}"
        ) from error


def called(
    setting: str, reference: str, function: Callable[..., Any], *values: Any, **named: Any
) -> Any:
    """Calls a reference's function.

    Raises:
      ValueError: names the setting, and the line in the function's module: the function raised an error,
        or does not take these arguments.
    """
    try:
        signature_of(function).bind(*values, **named)
    except TypeError as error:
        raise ValueError(
            f"{setting} {reference!r}: {error}, {_signature_text(function)}."
        ) from None
    except ValueError:
        pass  # functions written in C may have no signature
    try:
        return function(*values, **named)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = _reason_and_line(error, getattr(inspect.getmodule(function), "__file__", None))
        raise ValueError(f"{setting} {reference!r}: {reason}") from error


def called_with_settings(
    group: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Any:
    """Calls a reference's function with arguments that a config's group sets.

    Raises:
      ValueError: names the group, the function, and the line in its module where it failed.
      ValueError, TypeError: as it was raised: its message begins with an argument, or the library, which
        the function called, raised it.
    """
    try:
        return function(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        is_of_argument = re.split(r"\W", str(error), maxsplit=1)[0] in arguments
        is_refusal = isinstance(error, ValueError | TypeError)
        if is_refusal and (is_of_argument or _is_of_the_library(error)):
            raise
        reason = _reason_and_line(error, getattr(inspect.getmodule(function), "__file__", None))
        reference = f"{function.__module__}:{function.__qualname__}"
        raise ValueError(f"{group} {reference!r}: {reason}") from error


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature; for a class that of its `__init__`, which NNX's metaclass hides.

    Raises:
      ValueError: the function has none.
    """
    if not isinstance(function, type):
        return inspect.signature(function)
    signature = inspect.signature(function.__init__)  # type: ignore[misc]
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


def _is_of_the_library(error: BaseException) -> bool:
    """Whether the library raised the error, or a function that it called, for who called the library."""
    trace, files = error.__traceback__, []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any(
        file.startswith(_LIBRARY) for file in files[1:]
    )  # the first is `called_with_settings`


def _reason_and_line(error: BaseException, file: str | None) -> str:
    """Why a function of this file failed, and the line in the file."""
    line = line_of(error, file)
    where = "" if line is None or file is None else f" ({file.rpartition('/')[2]}, line {line})"
    return f"{reason_of(error)}{where}"


def _file_of(module: str) -> str | None:
    """The file of a module whose import may have failed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return getattr(sys.modules.get(module), "__file__", None) or (spec.origin if spec else None)


def _signature_text(function: Callable[..., Any]) -> str:
    names = list(signature_of(function).parameters)
    return f"it has the arguments {', '.join(names)}" if names else "it has no arguments"
