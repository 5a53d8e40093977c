"""`config.loggers` and `config.callbacks`: the functions that watch a run.

    config.loggers = ("tensorboard", "wandb", "mlflow", "csv", "my_module:MyLogger")
    config.callbacks = dict(
        stop_early=dict(split="held_out", metric="loss", patience=5),
        keep_best=dict(split="held_out", metric="accuracy"),
        mine=dict(name="my_module:my_callback", every=10),
    )

A logger is a function or class that takes the run folder, a `pathlib.Path`, and returns a callback: a
function of metrics lines, or an object as in `fedcodist.run.callbacks`. It is made before the run, which
only takes an empty folder. So it opens files there in `start`, or with the first lines. Loggers do not
change results, so a run may be resumed with other ones. Where `config.loggers` is not set, TensorBoard's
files are written if tensorboardX is installed. A user's callback is returned by a function of its
settings, or by a class.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.bind import bind
from fedcodist.config.config_errors import named
from fedcodist.config.references import called, choice_or_reference, is_reference
from fedcodist.run.callbacks import Callback
from fedcodist.run.csv_logger import CSVLogger
from fedcodist.run.mlflow_logger import MLflowLogger
from fedcodist.run.stopping import KeepBest, StopEarly
from fedcodist.run.tensorboard_logger import TensorBoardLogger
from fedcodist.run.wandb_logger import WandbLogger

LOGGERS: dict[str, Callable[[Path], Callback]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
    "csv": CSVLogger,
}
CALLBACKS: dict[str, Callable[..., Any]] = {"stop_early": StopEarly, "keep_best": KeepBest}


def loggers_of(names: Sequence[str] | None, workdir: Path) -> list[Callback]:
    """The callbacks that `config.loggers` names.

    Args:
      names: names in LOGGERS, or references; None for the default.
      workdir: the run folder.

    Raises:
      ValueError, ImportError: names the logger, and the command that installs its package if that is
        missing.
    """
    if names is None:
        try:
            return [TensorBoardLogger(workdir)]
        except ImportError:
            return []
    loggers: list[Callback] = []
    for index, name in enumerate(names):
        setting = f"loggers[{index}]"
        if name in names[:index]:
            raise ValueError(f"{setting} must be another logger than those before, got {name!r}.")
        make = choice_or_reference(setting, name, LOGGERS)
        if is_reference(name):
            logger = called(setting, name, make, workdir)
            if not callable(logger):
                raise ValueError(
                    f"{setting} {name!r} must return a function of metrics lines, got "
                    f"{type(logger).__name__}."
                )
        else:
            try:
                logger = make(workdir)
            except ImportError as error:
                raise ImportError(
                    f"loggers {name!r} needs a package that is not installed ({error.name}): "
                    f"pip install 'fedcodist[{name}]'"
                ) from error
        loggers.append(logger)
    return loggers


def callbacks_of(callbacks: Mapping[str, ConfigDict]) -> dict[str, Callback]:
    """Name -> the callback that `config.callbacks` sets there.

    Raises:
      ValueError, TypeError: one line that names the setting.
    """
    made: dict[str, Callback] = {}
    for key, group in callbacks.items():
        settings = dict(group)
        name = settings.pop("name", key)
        setting = f"callbacks.{key}.name"
        make = choice_or_reference(setting, name, CALLBACKS)
        if is_reference(name):
            made[key] = called(setting, name, make, **settings)
        else:
            made[key] = bind(make, settings, f"callbacks.{key}.")
        if not callable(made[key]):
            raise ValueError(
                f"{setting} {name!r} must return a function of metrics lines, got "
                f"{type(made[key]).__name__}."
            )
    return made


def checked_callbacks(callbacks: Mapping[str, ConfigDict], experiment: Any) -> list[Callback]:
    """The callbacks of `callbacks_of`, checked against an experiment; nothing compiles.

    Raises:
      ValueError, TypeError: names the setting; also for a split or a metric that the experiment does not
        have.
    """
    made = callbacks_of(callbacks)
    for key, callback in made.items():
        if hasattr(callback, "check"):
            with named(f"callbacks.{key}."):
                callback.check(experiment)
    return list(made.values())
