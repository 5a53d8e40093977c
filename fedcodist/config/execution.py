"""Reads a config's `execution`: how clients are run, and how models are computed."""

import os
import warnings

import jax
from ml_collections import ConfigDict

from fedcodist.config.config_errors import choice
from fedcodist.core.checks import check_integer
from fedcodist.core.for_each_client import Execution
from fedcodist.core.model import Model
from fedcodist.core.precision import in_bfloat16
from fedcodist.core.rematerialisation import CPU_FLAG, NEEDS_CPU_FLAG, rematerialised


def execution_of(config: ConfigDict) -> Execution:
    """How clients are run; a chunk size that is not set is one client until it is chosen."""
    settings = config.execution
    choice("execution.loop", settings.loop, dict.fromkeys(("scan", "vmap")))
    if settings.chunk_size is None:
        return Execution(settings.loop)
    check_integer("execution.chunk_size", settings.chunk_size, low=1)
    if settings.loop == "scan" and settings.chunk_size > 1:
        raise ValueError(
            "execution.chunk_size must be None with execution.loop='scan', which runs clients one by "
            f"one, got {settings.chunk_size}: set execution.loop='vmap'."
        )
    return Execution(settings.loop, settings.chunk_size)


def check_plainly_executed(config: ConfigDict) -> None:
    """Raises ValueError that names a setting of `execution` that the algorithm does not offer."""
    for setting, plain in (("precision", "float32"), ("rematerialise", False)):
        if (value := config.execution.get(setting, plain)) != plain:
            raise ValueError(
                f"execution.{setting} must be {plain!r} for {config.algorithm.name}, whose clients "
                f"have models of their own, got {value!r}."
            )


def as_executed(config: ConfigDict, model: Model) -> Model:
    """The model, computed as `execution.precision` and `execution.rematerialise` say."""
    settings = config.execution
    precisions = {"float32": lambda model: model, "bfloat16": in_bfloat16}
    model = choice("execution.precision", settings.get("precision", "float32"), precisions)(model)
    rematerialise = settings.get("rematerialise", False)
    if not isinstance(rematerialise, bool):
        raise TypeError(f"execution.rematerialise must be True or False, got {rematerialise!r}.")
    if not rematerialise:
        return model
    is_undone = NEEDS_CPU_FLAG and CPU_FLAG not in os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() == "cpu" and is_undone:
        warnings.warn(
            "execution.rematerialise saves no memory on a CPU, where XLA merges what is computed "
            f"twice, unless XLA_FLAGS holds {CPU_FLAG}.",
            stacklevel=2,
        )
    return rematerialised(model)
