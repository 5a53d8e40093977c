r"""How long FedSDD's rounds take with distillation in sequence and overlapped (figure 2, appendix A.6).

    python -m experiments.studies.schedule [--client-seconds 15.5 15.5 15.5 15.5] \
        [--distillation-seconds 175]

Each of four models has one client, and one client is available at a time. Only the main model is
distilled, so the others' clients need not wait for it: their next round begins during a distillation.
Results do not change, since no other model depends on a distillation. The default times are those of the
paper's table 3, on an A100: 123.6 s for eight clients of FedAvg, and 175 s of distillation.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from fedcodist.config import command_line
from fedcodist.core.checks import check_integer, check_number

MAIN = 0


class Task(NamedTuple):
    """Training of a model, or its distillation, from `start` to `end` in seconds."""

    round: int
    model: int
    is_distillation: bool
    start: float
    end: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for a mistake."""
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    each = 123.6 / 8
    parser.add_argument(
        "--client-seconds", type=float, nargs="+", default=[each] * 4, help="the main model's first"
    )
    parser.add_argument("--distillation-seconds", type=float, default=175.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=1, help="clients that are available at once")
    options = parser.parse_args(arguments)
    times = (options.client_seconds, options.distillation_seconds, options.rounds)
    try:
        both = [schedule(*times, overlapped, options.at_once) for overlapped in (False, True)]
    except ValueError as error:
        return command_line.refuse(error)
    for name, tasks in zip(("in sequence", "overlapped"), both, strict=True):
        print(f"{name}, the first three rounds:\n{timeline([t for t in tasks if t.round < 3])}\n")
    sequence, overlapped = (duration(tasks) for tasks in both)
    print(
        f"{options.rounds} rounds in sequence: {sequence:,.0f} s, overlapped: {overlapped:,.0f} s, "
        f"{1 - overlapped / sequence:.1%} less"
    )
    return 0


def schedule(
    client_seconds: Sequence[float],
    distillation_seconds: float,
    rounds: int,
    overlapped: bool,
    at_once: int = 1,
) -> list[Task]:
    """The times at which every training and every distillation begin and end.

    A client trains as soon as a place is free and its model is ready; clients that could begin earlier
    come first. If overlapped, only the main model waits for the last distillation, and the other models
    are at most one round ahead of it.

    Args:
      client_seconds: of each model's client in a round, the main model's first.
      distillation_seconds: of the main model, in every round.
      rounds: number of rounds.
      overlapped: whether the other models' clients train during a distillation.
      at_once: clients that are available at a time.

    Returns:
      Tasks in the order in which they begin.

    Raises:
      ValueError: no client, a negative time, or fewer than one round or client at once.
    """
    if not client_seconds:
        raise ValueError("client_seconds must name at least one client, got none.")
    for seconds in client_seconds:
        check_number("client_seconds", seconds, low=0)
    check_number("distillation_seconds", distillation_seconds, low=0)
    check_integer("rounds", rounds, low=1)
    check_integer("at_once", at_once, low=1)
    tasks: list[Task] = []
    free = [0.0] * at_once  # when each place for a client is free again
    distilled = {-2: 0.0, -1: 0.0}  # round -> end of its distillation
    trained = dict.fromkeys(range(len(client_seconds)), 0.0)  # model -> end of its last training
    for round in range(rounds):
        ready = {
            model: max(trained[model], distilled[round - 2 if overlapped and model else round - 1])
            for model in trained
        }
        while ready:
            place = min(range(at_once), key=lambda p: free[p])
            # Among those that could begin by now, the main model; else whoever can begin first.
            model = min(ready, key=lambda m: (max(ready[m], free[place]), m))
            start = max(ready.pop(model), free[place])
            free[place] = trained[model] = start + client_seconds[model]
            tasks.append(Task(round, model, False, start, trained[model]))
        start = max(max(trained.values()), distilled[round - 1])
        distilled[round] = start + distillation_seconds
        tasks.append(Task(round, MAIN, True, start, distilled[round]))
    return sorted(tasks, key=lambda task: (task.start, task.round, task.is_distillation))


def duration(tasks: Sequence[Task]) -> float:
    """Seconds until everything has ended."""
    return max(task.end for task in tasks)


def timeline(tasks: Sequence[Task], width: int = 88) -> str:
    """A line of text per model and one for the server; digits are rounds."""
    scale = width / (duration(tasks) or 1.0)
    lanes: dict[str, list[str]] = {}
    for task in sorted(tasks, key=lambda task: (task.is_distillation, task.model)):
        own = "main model" if task.model == MAIN else f"model {task.model}"
        lane = lanes.setdefault("server" if task.is_distillation else own, [" "] * width)
        start, end = round(task.start * scale), max(round(task.end * scale), 1)
        lane[start:end] = str((task.round + 1) % 10) * (end - start)
    return "\n".join(f"{name:<12}|{''.join(lane)}|" for name, lane in lanes.items())


if __name__ == "__main__":
    sys.exit(main())
