"""Finds out how a network's training mode is set. Dropout and batch statistics depend on it."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fedcodist.core.checks import shown
from fedcodist.core.shape_checks import described

TRAIN = "train"
# Other names of parameters and attributes that set the mode.
_TRAINING = ("training", "is_training", "is_train", "train_mode", "training_mode")
_EVALUATION = ("deterministic", "use_running_average", "inference", "eval_mode")


class Call(NamedTuple):
    """The arguments with which a network is called after its inputs.

    Attributes:
      parameters: the parameters of the network's signature after its inputs.
      accepted: the names of the parameters that are passed.
      by_place: how many of them are passed by position; the others are passed by name.
    """

    parameters: tuple[inspect.Parameter, ...]
    accepted: frozenset[str]
    by_place: int

    def arguments(self, **available: Any) -> tuple[list[Any], dict[str, Any]]:
        """The arguments by position and by name, out of those available."""
        first, others = self.parameters[: self.by_place], self.parameters[self.by_place :]
        placed = [available.get(parameter.name, parameter.default) for parameter in first]
        return placed, {
            parameter.name: available[parameter.name]
            for parameter in others
            if parameter.name in self.accepted
        }

    def with_train_by_place(self) -> "Call":
        """The same call, with `train` and the parameters before it passed by position."""
        names = [parameter.name for parameter in self.parameters]
        return self._replace(by_place=max(self.by_place, names.index(TRAIN) + 1))


def read_call(
    argument: str,
    network: Any,
    function: Callable[..., Any],
    available: Collection[str],
    flags: Iterable[str] = (TRAIN,),
    has_modes: bool = False,
) -> Call:
    """Reads from a network's signature how to call it.

    Args:
      argument: the network's name in errors.
      network: the module or function, for its name.
      function: the callable that gets the inputs first, such as a module's bound `__call__`.
      available: names of arguments that can be passed.
      flags: those of them that set the training mode.
      has_modes: whether modules also have modes, as in NNX. A flag with default None then follows the
        mode.

    Raises:
      ValueError: names the argument, if the network's training mode is set in another way, or if it has
        a parameter that nobody would set.
    """
    parameters = list(inspect.signature(function).parameters.values())
    starred = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    if parameters and parameters[0].kind not in starred:
        parameters = parameters[1:]
    named = tuple(parameter for parameter in parameters if parameter.kind not in starred)
    accepted = frozenset(parameter.name for parameter in named) & frozenset(available)
    if accepted.isdisjoint(flags):
        for parameter in named:
            if _is_flag(parameter.name) and not (has_modes and parameter.default is None):
                raise _wrong_flag(argument, network, repr(parameter.name))
        for parameter in parameters:
            if parameter.kind in starred and not _is_of_a_library(function):
                raise _wrong_flag(argument, network, starred[parameter.kind] + parameter.name)
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in accepted:
            raise ValueError(
                f"{argument} must be called as {name_of(network)}(inputs), with any of "
                f"{sorted(available)}: it needs {parameter.name!r} too, which nobody would set."
            )
    only_by_place = [
        index
        for index, parameter in enumerate(named)
        if parameter.kind == parameter.POSITIONAL_ONLY
    ]
    return Call(named, accepted, 1 + max(only_by_place, default=-1))


def check_attributes(argument: str, network: Any, attributes: Mapping[str, Any]) -> None:
    """Raises ValueError that names the argument if an attribute would set the training mode."""
    for name, value in attributes.items():
        if _is_flag(name) and isinstance(value, bool | None):
            raise _wrong_flag(argument, network, f"an attribute {name!r}")


def check_linen_module(argument: str, module: Any) -> None:
    """Raises TypeError that names the argument unless it is a Flax linen module, already made."""
    import flax.linen as nn

    if isinstance(module, type):
        raise TypeError(
            f"{argument} must be a flax.linen.Module, such as {module.__name__}(...), got the class "
            "itself."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{argument} must be a flax.linen.Module, got {shown(module)}: modules of Flax NNX are for "
            "from_flax_nnx."
        )


def check_part(argument: str, part: Any) -> None:
    """Checks that a part of a network gets its mode from the network, or has none.

    Args:
      argument: the part's name in errors.
      part: a Flax linen module, which the network calls with `call_part`.

    Raises:
      TypeError: `part` is no linen module.
      ValueError: its training mode is set in another way than by `train`.
    """
    check_linen_module(argument, part)
    call = read_call(argument, part, part.__call__, (TRAIN, "mask"))
    if TRAIN not in call.accepted:
        flags = {name: getattr(part, name, ...) for name in part.__dataclass_fields__}
        check_attributes(argument, part, flags)


def part_arguments(part: Any, **available: Any) -> dict[str, Any]:
    """Those of the available arguments that a part of a network has parameters for."""
    accepted = inspect.signature(type(part).__call__).parameters
    return {name: value for name, value in available.items() if name in accepted}


def call_part(argument: str, part: Any, x: Any, **available: Any) -> Any:
    """Calls a part of a network with `part_arguments`. Returns its output, an array.

    Args:
      argument: the part's name in errors.
      part: a Flax linen module that is bound to the network.
      x: its inputs.
      available: `train` and `mask`.

    Raises:
      ValueError: names the argument, if the part does not return an array, or if `train` does not reach
        it through `nn.remat` or `nn.jit`.
    """
    arguments = part_arguments(part, **available)
    try:
        output = part(x, **arguments)
    except Exception as error:
        if TRAIN not in arguments or not is_lifted(part):
            raise
        raise ValueError(
            f"{argument} must be without `nn.remat` and `nn.jit`, through which `{TRAIN}` does not "
            f"reach {name_of(part)}: give the module itself, and wrap the model in "
            f"fedcodist.rematerialised to save memory. ({first_line(error)})"
        ) from error
    if not hasattr(output, "ndim"):
        raise ValueError(f"{argument} must return an array [batch, ...], got {described(output)}.")
    return output


def is_lifted(module: Any) -> bool:
    """Whether a linen module's class was made by a transformation, such as `nn.remat` or `nn.jit`."""
    return type(module).__module__ == "flax.linen.transforms"


def first_line(error: Exception | None) -> str:
    """The first line of an error's message, or its type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_layers_train(argument: str, network: Any, off: Iterable[str]) -> None:
    """Raises ValueError that names the argument if layers are in evaluation mode in training.

    Args:
      argument: the network's name in errors.
      network: the module or function, for its name; it has no parameter `train`.
      off: names of such layers.
    """
    if layer := next(iter(off), None):
        raise ValueError(
            f"{argument} must have a parameter `{TRAIN}` and pass it to its layers: {layer} of "
            f"{name_of(network)} is in the same mode in training and in evaluation."
        )


def says_evaluation(arguments: Mapping[str, Any]) -> bool:
    """Whether a layer's arguments or attributes set it to evaluation."""
    return any(arguments.get(name) is False for name in (TRAIN, *_TRAINING)) or any(
        arguments.get(name) is True for name in _EVALUATION
    )


def given_arguments(layer: Any, placed: Iterable[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's call, with defaults, without those that are None."""
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


def _wrong_flag(argument: str, network: Any, by: str) -> ValueError:
    return ValueError(
        f"{argument} must have a parameter `{TRAIN}` for the training mode: {name_of(network)} has "
        f"{by}, which nobody would set."
    )


def _is_of_a_library(function: Any) -> bool:
    """Whether a function is of Flax or Haiku, such as `Sequential`, which passes its arguments on."""
    module = getattr(inspect.unwrap(function), "__module__", None) or ""
    return module.split(".")[0] in ("flax", "haiku")
