"""Loads config files, which are Python; any error in a file becomes one line that names the file."""

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from absl import flags
from ml_collections import ConfigDict

Result = TypeVar("Result")
_SHIPPED = Path(__file__).parents[1] / "configs"


class ConfigFileError(Exception):
    """A config file cannot be used. The message is one line that names the file and the line in it."""


class ConfigFileParser(flags.ArgumentParser):
    """Parses `--config=FILE:RUN` into a config.

    ml_collections' parser lets through most exceptions of a file, and its `sys.exit`.
    """

    def parse(self, argument: str) -> ConfigDict:
        path, *run = argument.split(":", 1)
        config = config_of(load_config_file(path), argument, *run)
        config.lock()
        return config


def shipped_configs() -> list[str]:
    """Names of the configs that come with the package, which need no path."""
    return sorted(path.stem for path in _SHIPPED.glob("[!_]*.py"))


def config_path(argument: str) -> str:
    """The config file that a command names: its path, or the name of one that comes with the package.

    Raises:
      ConfigFileError: there is no such file. The message lists the known names.
    """
    if Path(argument).is_file():
        return argument
    names = shipped_configs()
    if (name := argument.removesuffix(".py")) in names:
        return str(_SHIPPED / f"{name}.py")
    raise ConfigFileError(
        f"--config must be an existing file, got {argument!r}; or the name of one that comes with the "
        f"package: {', '.join(names)}."
    )


def load_config_file(argument: str) -> types.ModuleType:
    """The module of a config file, which is named as for `config_path`.

    Puts the file's folder first on Python's path, so that a config can import modules beside it and name
    their functions.

    Raises:
      ConfigFileError: there is no such file, or it cannot be run.
    """
    path = config_path(argument)

    if (folder := str(Path(path).resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)

    def load() -> types.ModuleType:
        spec = importlib.util.spec_from_file_location("config", path)
        if spec is None or spec.loader is None:
            raise ValueError("a config file's name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return _run(argument, path, load)


def load_config_of_runs(argument: str) -> types.ModuleType:
    """The module of a config file for a command that chooses runs by --only.

    Raises:
      ConfigFileError: as `load_config_file` does, or the argument names a run.
    """
    path, _, run = argument.partition(":")
    module = load_config_file(path)
    if run:
        raise ConfigFileError(
            f"--config must be a config without a run, got {argument!r}; name the run by --only {run}."
        )
    return module


def config_of(module: types.ModuleType, argument: str, *run: str) -> ConfigDict:
    """Returns what the module's `get_config` returns.

    Args:
      module: of a config file.
      argument: FILE or FILE:RUN, for messages.
      run: the argument of `get_config`, where one was given.

    Raises:
      ConfigFileError: the module has no such function, or the function does not return a config.
    """
    if not callable(getattr(module, "get_config", None)):
        raise ConfigFileError(f"--config={argument}: the file has no get_config().")
    config = _run(argument, module.__file__, lambda: module.get_config(*run))
    if not isinstance(config, ConfigDict):
        raise ConfigFileError(
            f"--config={argument}: get_config() must return a ConfigDict, got {type(config).__name__}."
        )
    return config


def runs_of(module: types.ModuleType, path: str) -> list[str]:
    """Returns the names of runs that the module's `get_runs` returns; each names a run's folder.

    Raises:
      ConfigFileError: the module has no such function, or the function does not return names, or two
        runs would have one folder.
    """
    if not callable(getattr(module, "get_runs", None)):
        raise ConfigFileError(f"--config {path} has no get_runs(); run it with fedcodist run.")
    runs = _run(path, module.__file__, lambda: list(module.get_runs()))
    for run in runs:
        if not isinstance(run, str) or not run or "/" in run or run in (".", ".."):
            raise ConfigFileError(
                f"--config={path}: get_runs() must return names without '/', got {run!r}."
            )
    if not runs or len(set(runs)) < len(runs):
        raise ConfigFileError(
            f"--config={path}: get_runs() must return names, no two the same, got {runs}."
        )
    of_folder: dict[str, str] = {}
    for run in runs:
        if (first := of_folder.setdefault(folder := run_folder_name(run), run)) != run:
            raise ConfigFileError(
                f"--config={path}: get_runs() must return names of different folders, got {first!r} and "
                f"{run!r}, which are both {folder!r}."
            )
    return runs


def run_folder_name(run: str) -> str:
    """The run's name as a folder: 'merged,4700' becomes 'merged-4700'."""
    return run.replace(",", "-")


def _run(argument: str, file: str | None, call: Callable[[], Result]) -> Result:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `sys.exit` among them
        line = line_of(error, file)
        where = "" if line is None else f" (line {line})"
        raise ConfigFileError(f"--config={argument}: {reason_of(error)}{where}") from error


def reason_of(error: BaseException) -> str:
    """The message of an exception from a user's code, in one line."""
    if isinstance(error, SystemExit):
        return f"it ended the program with sys.exit({error.code!r})."
    # ConfigDict wraps its message about an unknown name in a second KeyError.
    inner = error.args[0] if error.args and isinstance(error.args[0], KeyError) else error
    text = " ".join((error.msg if isinstance(error, SyntaxError) else str(inner)).split())
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def line_of(error: BaseException, file: str | None) -> int | None:
    """The last line of the file that was run, or the line with a syntax error."""
    if isinstance(error, SyntaxError) and _is_same_file(error.filename, file):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == file:
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _is_same_file(one: str | None, other: str | None) -> bool:
    """Whether two paths, of which one may be relative, are those of one file."""
    return bool(one and other) and Path(str(one)).resolve() == Path(str(other)).resolve()
