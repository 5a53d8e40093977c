"""The types of inputs that networks get while they train, to be compared with those in evaluation.

A preprocessing that scales images turns bytes into floats. Where it is forgotten in evaluation, a
network gets numbers that are hundreds of times as large as in training, and no shape differs.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from fedcodist.core.model import Batch, Model

# column -> the types in which networks got it
InputTypes = dict[str, set[Any]]
_noted: contextvars.ContextVar[InputTypes | None] = contextvars.ContextVar("noted", default=None)


def note_inputs(model: Model, batch: Batch) -> None:
    """Notes the types of a training batch's input columns, while training is traced for a check."""
    noted = _noted.get()
    if noted is not None:
        for column in batch.keys() & set(model.inputs):
            noted.setdefault(column, set()).add(jnp.result_type(batch[column]))


@contextlib.contextmanager
def noted_inputs() -> Iterator[InputTypes]:
    """Collects what is noted inside."""
    noted: InputTypes = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)
