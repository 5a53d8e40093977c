"""Callbacks look at a run at every evaluation; they may stop it or keep a checkpoint of it.

A callback is a function of an evaluation's metrics lines, or an object that is called with them. It gets
whatever else it names among its parameters:

    def callback(records, models, history): ...

- `records`: copies of the metrics lines of this evaluation, as in metrics.jsonl.
- `models`: a function without arguments that returns model -> Variables, leaves [seeds, ...] on the
  host. Nothing is copied unless it is called. It can be called during the callback only.
- `history`: all metrics lines of the run so far, including `records` and the lines from before a resume.
  A callback that decides by them alone decides the same in a run that was interrupted.

It returns a `Decision`, or None. An object may have these methods too:

- `check(experiment)`: called before anything compiles; raises ValueError with one line.
- `start(config)`: called whenever the run is started; its config is a dictionary, empty without one.
- `finish(summary)`: called after the last round with the content of summary.json.

With an attribute `only_reads = True` it gets the run's own list as `history`, and must not change it. In
a long run, a copy at every evaluation takes time. With `keeps = True` it must be the only such callback:
only one round is kept, so a second callback could replace what the first one has kept.

Callbacks are called in one process; their decision holds for all processes. After a stop the final
splits are evaluated, and callbacks get these metrics lines too.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcodist.core.checks import check_several, shown
from fedcodist.core.devices import from_all_processes
from fedcodist.run.metrics_lines import Record

Callback = Callable[..., Any]

# What a callback gets beside its records, if it has parameters of these names.
_FURTHER = ("models", "history")


class Decision(NamedTuple):
    """What a callback asks of the run.

    Attributes:
      stop: why the run is to end after this round, for its summary; empty if it goes on.
      keep: whether this round's state is the best one so far. It is kept in `checkpoints/kept`, in place
        of what was kept before, and its models are those of `Outcome.kept`.
    """

    stop: str = ""
    keep: bool = False


def check_callbacks(callbacks: Any, experiment: Any) -> None:
    """Raises TypeError or ValueError, one line, for a callback that cannot be one of this experiment."""
    check_several("callbacks", callbacks)
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"callbacks must be functions of records, got {shown(callback)}.")
        if isinstance(callback, type):
            raise TypeError(
                f"callbacks must be functions of records, got the class {callback.__name__}: call it."
            )
        _check_parameters(callback)
        if hasattr(callback, "check"):
            callback.check(experiment)
    keeping = [shown(callback) for callback in callbacks if getattr(callback, "keeps", False)]
    if len(keeping) > 1:
        raise ValueError(
            "callbacks must have at most one that keeps a round, since only one is kept, got "
            f"{keeping[0]} and {keeping[1]}."
        )


def keeper_of(callbacks: Sequence[Callback]) -> str:
    """The callback that keeps a round, as the same text in every start; empty where there is none."""
    for callback in callbacks:
        if getattr(callback, "keeps", False):
            fields = dataclasses.fields(callback) if dataclasses.is_dataclass(callback) else ()
            values = {field.name: getattr(callback, field.name) for field in fields}
            plain = {n: v for n, v in values.items() if isinstance(v, str | int | float | None)}
            shown_values = ", ".join(f"{name}={value!r}" for name, value in plain.items())
            return f"{type(callback).__name__}({shown_values})"
    return ""


def start_callbacks(callbacks: Sequence[Callback], config: Mapping[str, Any] | None) -> None:
    """Passes the run's config to the callbacks."""
    for callback in callbacks:
        if hasattr(callback, "start"):
            callback.start(dict(config or {}))


def finish_callbacks(callbacks: Sequence[Callback], summary: Mapping[str, Any]) -> None:
    """Tells callbacks that the run has ended."""
    for callback in callbacks:
        if hasattr(callback, "finish"):
            callback.finish(summary)


def call_callbacks(
    callbacks: Sequence[Callback],
    records: Sequence[Record],
    models: Callable[[], Mapping[str, Any]],
    history: Sequence[Record],
) -> Decision:
    """Calls all callbacks and joins their decisions; all processes take the decision of process 0.

    Args:
      callbacks: empty in all processes but the first.
      records, models, history: what callbacks get.
    """
    decisions = []
    for callback in callbacks:
        wanted = _parameters(callback)
        arguments: dict[str, Any] = {}
        if "models" in wanted:
            arguments["models"] = models
        if "history" in wanted:
            only_reads = getattr(callback, "only_reads", False)
            arguments["history"] = history if only_reads else _copied(history)
        try:
            decision = callback(_copied(records), **arguments)
        except Exception as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            error.add_note(f"The callback {name} raised this after round {records[0]['round']}.")
            raise
        if _is_meant_as_decision(decision):
            raise TypeError(
                f"callbacks must return a Decision, such as Decision(stop='a reason'), or None, got "
                f"{shown(decision)}."
            )
        if isinstance(decision, Decision):
            decisions.append(decision)
    why = "; ".join(decision.stop for decision in decisions if decision.stop)
    keep = any(decision.keep for decision in decisions)
    code = from_all_processes(2 * bool(why) + keep)[0]
    return Decision(stop=(why or "as process 0 decided") if code >= 2 else "", keep=bool(code % 2))


def _copied(lines: Sequence[Record]) -> list[Record]:
    """For a callback, which may change what it gets. The run's summary is made of its own lines."""
    return [dict(line) for line in lines]


def _is_meant_as_decision(returned: Any) -> bool:
    """Whether a value looks like a decision to stop; others, such as a number of bytes, do not."""
    return isinstance(returned, bool) or str(getattr(returned, "dtype", "")) == "bool"


def _check_parameters(callback: Callback) -> None:
    try:
        signature = inspect.signature(callback)
    except ValueError:  # functions written in C, such as a list's `append`
        return
    arguments = {name: None for name in _FURTHER if name in signature.parameters}
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        raise TypeError(
            "callbacks must be functions of records, and of models and history if they have these "
            f"parameters, got one of {signature}: {error}."
        ) from None


def _parameters(callback: Callback) -> set[str]:
    try:
        return set(inspect.signature(callback).parameters)
    except ValueError:  # functions written in C, such as a list's `append`
        return set()
