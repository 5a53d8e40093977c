"""What the commands share: config files with overrides, and one-line answers to mistakes.

How a flag reaches a function: `parse` puts it into the config, `config/algorithm.py` chooses the builder
of the method's kind (`config/<kind>_methods.py`), and `config/bind.py` calls the function with it.
"""

import argparse
import difflib
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict

from fedcodist.config.config_file import ConfigFileError, ConfigFileParser, config_path
from fedcodist.config.settings import check_settings
from fedcodist.config.walk import settings_and_groups_of
from fedcodist.core.extras import check_installed
from fedcodist.run import launch

# What parsing a flag or an override of a setting can raise.
PARSE_ERRORS = (
    flags.Error,
    ConfigFileError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    ImportError,
    OSError,
)

# Values of `data.name`.
_DIGITS = ("digits", "digits_public_private", "digits_primary")


class Parser(argparse.ArgumentParser):
    """Answers a mistake in one line instead of printing the command's usage.

    Options are written in full: `--seed` is no `--seeds`. So programs that share a command line find the
    same options in it.
    """

    def __init__(self, **named: Any):
        super().__init__(allow_abbrev=False, **named)

    def error(self, message: str) -> NoReturn:
        self.exit(launch.USER_ERROR, f"error: {message}; see --help.\n")


def parse(arguments: list[str], values: flags.FlagValues, required: Sequence[str]) -> None:
    """Parses a command line with a flag `config`; raises one of PARSE_ERRORS for a mistake."""
    given = Parser(add_help=False)
    given.add_argument("--config", default="")
    path = given.parse_known_args(arguments[1:])[0].config
    if path:
        config_path(path.split(":")[0])
    values["config"].parser = ConfigFileParser()
    try:
        unknown = values(arguments)[1:]
    except (LookupError, AttributeError, TypeError, ValueError):
        if path:
            _check_settings(arguments, values["config"].parser.parse(path))
        raise
    if unknown:
        raise ValueError(f"unexpected argument {unknown[0]!r}; settings are --config.name=value.")
    for name in required:
        if not values[name].value:
            raise ValueError(f"--{name} must be given.")
    if (config := values["config"].value) is not None:
        check_settings(config)
        _check_extras(config)


def nearest_name(name: str, names: Sequence[str]) -> str:
    """Returns the name in `names` that is most similar."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0)[0]


def is_mistake(error: Exception) -> bool:
    """Whether an error of building an experiment is a mistake in the config, not in the program."""
    if isinstance(error, AttributeError):
        # ConfigDict raises this where a setting is missing.
        return bool(error.args) and isinstance(error.args[0], KeyError)
    return isinstance(error, ValueError | TypeError | ImportError | OSError | KeyError)


def refuse(error: Exception) -> int:
    """Prints the error in one line and returns the exit status of a user's mistake."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    text: Any = error
    if isinstance(error, KeyError):
        lacks = _is_of_config(error)
        text = f"the config lacks {error.args[0]}" if lacks else f"KeyError: {error}"
    print(f"error: {' '.join(str(text).split())}", file=sys.stderr, flush=True)
    return launch.USER_ERROR


def _is_of_config(error: KeyError) -> bool:
    """Whether a config lacks a setting that was looked up; ConfigDict names it in its message."""
    trace = error.__traceback__
    if trace is None:  # the argument of the AttributeError that ConfigDict raises
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(trace.tb_frame.f_locals.get("self"), ConfigDict)


def show_warnings(shown: bool) -> None:
    """Prints each warning in one line, or none: of several processes only one prints them."""
    warnings.showwarning = _show_warning if shown else lambda *_, **__: None


def _check_extras(config: ConfigDict) -> None:
    """Raises ImportError where a package is missing without which the config's data cannot be read."""
    data = config.get("data")
    if isinstance(data, ConfigDict) and data.get("name") in _DIGITS:
        check_installed("the digits data set", "sklearn", "digits")


def _check_settings(arguments: list[str], config: ConfigDict) -> None:
    """Raises ValueError for an unknown setting; ml_collections names only the last part of it."""
    names = [path for path, _ in settings_and_groups_of(config)]
    for argument in arguments:
        name = argument.split("=")[0]
        if name.startswith("--config.") and name.removeprefix("--config.") not in names:
            if name == "--config.loggers":  # which not every config has
                raise ValueError(
                    "--config.loggers is no setting of the config; give --loggers=csv."
                )
            nearest = nearest_name(name, [f"--config.{setting}" for setting in names])
            raise ValueError(
                f"{name} is no setting of the config; did you mean {nearest}? A setting that the config "
                "file does not have yet must be written there."
            )


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
