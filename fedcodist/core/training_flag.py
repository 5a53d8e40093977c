"""Whether a network can be told of training, which dropout and batch statistics must be."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

TRAIN = "train"
# Other names of what tells of training, and of evaluation.
_TRAINING = ("training", "is_training", "is_train", "train_mode", "training_mode")
_EVALUATION = ("deterministic", "use_running_average", "inference", "eval_mode")


class Call(NamedTuple):
    """How a network is called beside its inputs.

    Attributes:
      parameters: those after the inputs.
      accepted: the names of those that are given.
      by_place: how many are given by their place; the others are given by name.
    """

    parameters: tuple[inspect.Parameter, ...]
    accepted: frozenset[str]
    by_place: int

    def arguments(self, **available: Any) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by place and by name, of those available."""
        first, others = self.parameters[: self.by_place], self.parameters[self.by_place :]
        placed = [available.get(each.name, each.default) for each in first]
        return placed, {
            each.name: available[each.name] for each in others if each.name in self.accepted
        }

    def with_train_by_place(self) -> "Call":
        """The same with `train`, and what stands before it, given by place."""
        names = [parameter.name for parameter in self.parameters]
        return self._replace(by_place=max(self.by_place, names.index(TRAIN) + 1))


def read_call(
    argument: str,
    network: Any,
    function: Callable[..., Any],
    available: Collection[str],
    told_by: Iterable[str] = (TRAIN,),
    has_modes: bool = False,
) -> Call:
    """How a network is called.

    Args:
      argument: what the network is called in errors.
      network: the module or function, for its name.
      function: what is called with the inputs first; a module's bound `__call__`.
      available: names of arguments that can be given.
      told_by: those of them that tell of training.
      has_modes: whether modules are told of training besides, as NNX's are: a flag whose default is None
        is left to that.

    Raises:
      ValueError: one line; a network that would be told of training in another way, or that has a
        parameter which nobody would set.
    """
    parameters = list(inspect.signature(function).parameters.values())
    starred = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    if parameters and parameters[0].kind not in starred:
        parameters = parameters[1:]
    named = tuple(each for each in parameters if each.kind not in starred)
    accepted = frozenset(each.name for each in named) & frozenset(available)
    if accepted.isdisjoint(told_by):
        for each in named:
            if _is_flag(each.name) and not (has_modes and each.default is None):
                raise _cannot_be_told(argument, network, repr(each.name))
        for each in parameters:
            if each.kind in starred and not _is_of_a_library(function):
                raise _cannot_be_told(argument, network, starred[each.kind] + each.name)
    for each in named:
        if each.default is each.empty and each.name not in accepted:
            raise ValueError(
                f"{argument} must be called as {name_of(network)}(inputs), with any of "
                f"{sorted(available)}: it needs {each.name!r} too, which nobody would set."
            )
    only_by_place = [index for index, each in enumerate(named) if each.kind == each.POSITIONAL_ONLY]
    return Call(named, accepted, 1 + max(only_by_place, default=-1))


def check_attributes(argument: str, network: Any, attributes: Mapping[str, Any]) -> None:
    """Raises one line where a network would be told of training by one of these attributes."""
    for name, value in attributes.items():
        if _is_flag(name) and isinstance(value, bool | None):
            raise _cannot_be_told(argument, network, f"an attribute {name!r}")


def check_all_told(argument: str, network: Any, off: Iterable[str]) -> None:
    """Raises one line where layers are as in evaluation, in training, of a network without `train`.

    Args:
      argument: what the network is called in errors.
      network: the module or function, for its name.
      off: names of such layers.
    """
    for layer in off:
        raise ValueError(
            f"{argument} must be told of training by a parameter `{TRAIN}`, and tell its layers: "
            f"{layer} of {name_of(network)} is in training as in evaluation."
        )


def says_evaluation(arguments: Mapping[str, Any]) -> bool:
    """Whether a layer is told of evaluation, by its arguments or attributes."""
    return any(arguments.get(name) is False for name in (TRAIN, *_TRAINING)) or any(
        arguments.get(name) is True for name in _EVALUATION
    )


def given_arguments(layer: Any, placed: Iterable[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer was called with, its defaults included; those that are None left out."""
    bound = inspect.signature(type(layer).__call__).bind_partial(layer, *placed, **named)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if value is not None}


def name_of(network: Any) -> str:
    """A function's name, or the name of a module's class."""
    while hasattr(network, "func"):  # of functools.partial
        network = network.func
    return getattr(network, "__name__", type(network).__name__)


def _is_flag(name: str) -> bool:
    return name in (TRAIN, *_TRAINING, *_EVALUATION)


def _cannot_be_told(argument: str, network: Any, by: str) -> ValueError:
    return ValueError(
        f"{argument} must be told of training by a parameter `{TRAIN}`: {name_of(network)} has {by}, "
        "which nobody would set."
    )


def _is_of_a_library(function: Any) -> bool:
    """Whether it is a container of Flax or Haiku, such as `Sequential`, which passes on what it gets."""
    module = getattr(inspect.unwrap(function), "__module__", None) or ""
    return module.split(".")[0] in ("flax", "haiku")
