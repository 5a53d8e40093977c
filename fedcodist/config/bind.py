"""Fills a function's arguments from settings by its signature, so that no builder lists its keywords."""

import contextlib
import difflib
import functools
import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.references import called_with_settings
from fedcodist.config.settings import is_group


def bind(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    prefix: str,
    *,
    made: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
    **given: Any,
) -> Any:
    """Calls the function with `given`, and with the settings that have the names of its arguments.

    An argument that is a named tuple, such as `hyper`, is built field by field: the field
    `digest.epochs` is read from the setting `digest_epochs`, or else from `epochs`. Arguments that are
    neither given nor set keep their defaults. Settings that another function of the library reads, and
    groups of settings, are ignored.

    Args:
      function: with arguments by name.
      settings: name -> value.
      prefix: of the settings' path, such as "algorithm.".
      made: a named tuple's class -> a function (argument, its fields that are given or set) that makes
        such arguments, in place of their defaults.
      given: arguments, or fields of named tuples, that are not settings. They go before settings of the
        library; a setting of another name must not be there too.

    Raises:
      ValueError, TypeError: names the setting. It is missing, the function has no such argument, or the
        function refuses the value; then its message has the setting in place of the argument. Any other
        error in a function of one's own becomes one line that names its module and the line there.
    """
    names = accepted(function, given)
    # A function of a user's may be called as a method of the library, whose group has other settings.
    is_own_group = not is_library_function(function) and prefix.endswith(f".{function.__name__}.")
    for name, value in settings.items():
        path, has_settings = f"{prefix}{name}", hasattr(value, "items")
        is_unknown = name not in (*names, function.__name__) and not is_group(path)
        # `check_settings` looks at the groups of the library's methods.
        if has_settings and is_unknown and not is_library_function(function):
            warnings.warn(f"{path} is not read by {function.__name__}.", stacklevel=2)
        is_of_another = (path in ALLOWED and not is_own_group) or is_group(path) or has_settings
        if not is_of_another and (name in given or name not in names):
            known = _settings_of(function, given)
            shortest = sorted({candidates[-1] for candidates in known})
            meant = [f"{prefix}{name}" for name in itertools.chain(*known)]
            if not is_own_group:
                meant += [setting for setting in ALLOWED if setting.startswith(prefix)]
            raise ValueError(
                f"{path} is not a setting of {function.__name__}, which has "
                f"{', '.join(shortest) or 'none'}{_meant(path, meant) or '.'}"
            )
    arguments: dict[str, Any] = {}
    # How the function's messages begin -> the setting.
    paths = {name: f"{prefix}{name}" for name in settings if name in given}

    def look_up(argument: str, *candidates: str) -> dict[str, Any]:
        """{argument's last name: value} of the first candidate that is given or set, or nothing."""
        for candidate in candidates:
            if candidate in given:
                return {argument.rpartition(".")[2]: given[candidate]}
        for candidate in candidates:
            if candidate in settings:
                paths[argument] = f"{prefix}{candidate}"
                return {argument.rpartition(".")[2]: settings[candidate]}
        return {}

    parameters = _parameters(function)
    for name, parameter in parameters.items():
        value = look_up(name, name)
        if not value and (kind := _named_tuple(parameter)):
            fields: dict[str, Any] = {}
            for field in kind._fields:
                fields |= look_up(f"{name}.{field}", *_candidates(name, field, parameters))
            if kind in made:
                with _of_settings(paths, prefix, given):
                    value = {name: made[kind](name, fields)}
            elif parameter.default is not inspect.Parameter.empty:
                value = {name: parameter.default._replace(**fields)}
            else:
                _check_complete(
                    fields, [f for f in kind._fields if f not in kind._field_defaults], prefix
                )
                value = {name: kind(**fields)}
        arguments |= value
    needed = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    _check_complete(arguments, needed, prefix)
    with _of_settings(paths, prefix, given):
        if is_library_function(function):
            return function(**arguments)
        return called_with_settings(prefix.rstrip("."), function, arguments)


def is_library_function(function: Callable[..., Any]) -> bool:
    """Whether a function is the library's; one of a user's may have the same name."""
    return function.__module__.startswith("fedcodist.")


def _meant(path: str, known: Collection[str]) -> str:
    """The setting whose path this one nearly is, for the end of a message; '' if there is none."""
    nearest = difflib.get_close_matches(path, known, n=1, cutoff=0.85)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def offered(
    function: Callable[..., Any],
    offers: Mapping[str, Callable[..., Any]],
    *about: Any,
    of_the_library: Collection[str] = (),
) -> dict[str, Any]:
    """Those arguments of the function that a builder can make: name -> `offers[name](*about)`.

    Args:
      function: with arguments by name.
      offers: name -> a function that makes the argument.
      about: arguments of `offers`.
      of_the_library: offers for single methods of the library. In a function of a user's such a name is
        an ordinary setting.
    """
    if not is_library_function(function):
        offers = {name: make for name, make in offers.items() if name not in of_the_library}
    names = accepted(function, offers)
    return {name: make(*about) for name, make in offers.items() if name in names}


def accepted(function: Callable[..., Any], given: Collection[str] = ()) -> set[str]:
    """Names of arguments, and of the fields of those named tuples that are not given as a whole."""
    parameters = _parameters(function)
    names = set(parameters)
    for name, parameter in parameters.items():
        if name not in given and (kind := _named_tuple(parameter)):
            names.update(*(_candidates(name, field, parameters) for field in kind._fields))
    return names


def _settings_of(function: Callable[..., Any], given: Collection[str]) -> list[list[str]]:
    """The names that settings of arguments which are not given may have, the shortest one last."""
    parameters = _parameters(function)
    names = []
    for name, parameter in parameters.items():
        fields = getattr(_named_tuple(parameter), "_fields", ())
        for candidates in [_candidates(name, f, parameters) for f in fields] or [[name]]:
            if candidates and name not in given and not set(candidates) & set(given):
                names.append(candidates)
    return names


def _candidates(name: str, field: str, parameters: Collection[str]) -> list[str]:
    """The names that a field's setting may have, without those of the function's own arguments."""
    return [setting for setting in (f"{name}_{field}", field) if setting not in parameters]


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function, eval_str=True).parameters
    return {name: p for name, p in parameters.items() if p.kind not in variable}


def _named_tuple(parameter: inspect.Parameter) -> Any:
    """The class of an argument that is always a named tuple, or None."""
    is_set = parameter.default is not inspect.Parameter.empty
    kind = type(parameter.default) if is_set else parameter.annotation
    return kind if hasattr(kind, "_field_defaults") else None


def _check_complete(values: Mapping[str, Any], needed: Collection[str], prefix: str) -> None:
    for name in needed:
        if name not in values:
            raise ValueError(f"the config lacks '{prefix}{name}'.")


@contextlib.contextmanager
def _of_settings(paths: Mapping[str, str], prefix: str, given: Collection[str]) -> Iterator[None]:
    """Puts settings in place of arguments in messages: at the beginning, and in values such as steps=3.

    A message about something given, such as "student's layers", begins with the settings' group.
    """
    renamed = lambda match: paths.get(match.group(), match.group())
    try:
        yield
    except (ValueError, TypeError) as error:
        message = re.sub(r"^[\w.]+(?![\w.\[])|\b[\w.]+(?==)", renamed, str(error))
        if (owner := re.match(r"(\w+)'s ", message)) and owner[1] in given:
            message = f"{prefix.rstrip('.')}: {message}"
        if message == str(error):
            raise
        raise type(error)(message) from error
