"""The progress display of an experiment: round, speed, time left and current metrics.

with progress("digits · fed_avg", total_rounds=100) as show:
    show(20, "held-out accuracy: small 83.1 % · large 79.9 %")
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 2.0


class Show(Protocol):
    """The type of the function that `progress` yields. Call it after every block of rounds."""

    def __call__(self, round: int, metrics: str = "") -> None: ...


@contextmanager
def progress(
    name: str,
    total_rounds: int,
    start_round: int = 0,
    enabled: bool = True,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Show]:
    """Shows the progress of an experiment, and yields the function that updates the display.

    A terminal gets a live bar. Until the first rounds are done, it shows "compiling" and the time so
    far. Anything else (a file, a CI log) gets plain lines: one that says "compiling", then at most one
    every two seconds, and the last one. Speed and time left do not count compilation: they start at the
    first call with new rounds, and again at the first call with metrics. `metrics` is a text that names
    its split, as `metrics_text` writes it. A call without metrics keeps the last text and adds its
    round.

    Args:
      name: shown first.
      total_rounds: rounds of the run.
      start_round: rounds that are done already.
      enabled: False shows nothing.
      console: where to show; standard output where not given.
      clock: () -> seconds.

    Raises:
      ValueError: names `total_rounds` if below 1, or `start_round` if not in [0, total_rounds].
    """
    if total_rounds < 1:
        raise ValueError(f"total_rounds must be at least 1, got {total_rounds}")
    if not 0 <= start_round <= total_rounds:
        raise ValueError(f"start_round must be in [0, {total_rounds}], got {start_round}")
    if not enabled:
        yield _show_nothing
        return
    console = console or Console()
    state = _State(name, total_rounds, start_round, clock)
    # With FORCE_COLOR rich treats a pipe as a terminal, and cursor movements would litter the log.
    if console.is_interactive and console.file.isatty():
        with Live(state, console=console, refresh_per_second=4) as live:

            def show_live(round: int, metrics: str = "") -> None:
                state.update(round, metrics)
                live.refresh()

            yield show_live
        return
    lines = _Lines(state, console, clock)
    if not state.finished():
        lines.print_compiling()
    try:
        yield lines.show
    finally:
        lines.print_pending()


def _show_nothing(round: int, metrics: str = "") -> None:
    del round, metrics


class _State:
    """The state of the run so far, and its text."""

    def __init__(
        self, name: str, total_rounds: int, start_round: int, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.total_rounds = total_rounds
        self.round = start_round
        self.metrics, self.measured_at = "", start_round
        self.clock = clock
        self.started = clock()
        # Round and time after which, as far as we know, nothing compiles any more.
        self.first: tuple[int, float] | None = None
        self.has_evaluated = False
        self.last: tuple[int, float] = (start_round, self.started)

    def update(self, round: int, metrics: str) -> None:
        now = self.clock()
        if round > self.last[0]:
            if self.first is None or (metrics and not self.has_evaluated):
                self.first = (round, now)
            self.last = (round, now)
        self.has_evaluated = self.has_evaluated or bool(metrics)
        self.round = round
        if metrics:
            self.metrics, self.measured_at = metrics, round

    def compiles(self) -> bool:
        """Whether no round is done yet; the first round's time is mostly that of compilation."""
        return self.first is None and not self.finished()

    def rounds_per_second(self) -> float | None:
        """Speed up to the last report; None if all reports so far include compilation."""
        if self.first is None or self.last == self.first:
            return None
        elapsed = self.last[1] - self.first[1]
        return (self.last[0] - self.first[0]) / elapsed if elapsed > 0 else None

    def seconds_left(self) -> float | None:
        speed = self.rounds_per_second()
        if not speed:
            return None
        since_report = self.clock() - self.last[1]
        return max(0.0, (self.total_rounds - self.round) / speed - since_report)

    def finished(self) -> bool:
        return self.round >= self.total_rounds

    def speed_text(self) -> str:
        speed = self.rounds_per_second()
        if speed is None:
            return ""
        return f"{speed:.1f} rounds/s" if speed >= 1 else f"{1 / speed:.1f} s/round"

    def compiling_text(self) -> str:
        done = f"continues after round {self.round}, " if self.round else ""
        return f"{done}compiling, {duration(self.clock() - self.started)}"

    def time_text(self) -> str:
        if self.finished():
            return f"done in {duration(self.last[1] - self.started)}"
        left = self.seconds_left()
        return "" if left is None else f"ETA {duration(left)}"

    def metrics_text(self) -> str:
        """The last metrics, with their round if it is not the current one."""
        if not self.metrics or self.measured_at == self.round:
            return self.metrics
        return f"{self.metrics} (round {self.measured_at})"

    def line(self) -> str:
        counted = f"round {self.round:>{len(str(self.total_rounds))}}/{self.total_rounds}"
        parts = [self.name, counted, self.speed_text(), self.time_text(), self.metrics_text()]
        return "  ".join(part for part in parts if part)

    def __rich__(self) -> Group:
        bar = ProgressBar(total=self.total_rounds, completed=self.round, width=24)
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(
            Text(self.name, style="bold"),
            bar,
            Text(f"{self.round}/{self.total_rounds}", style="cyan"),
            Text(self.compiling_text() if self.compiles() else self.speed_text()),
            Text(self.time_text()),
        )
        if not self.metrics:
            return Group(row)
        return Group(row, Text(f"  {self.metrics_text()}", style="green"))


class _Lines:
    """The display for logs: whole lines, at a limited rate."""

    def __init__(self, state: _State, console: Console, clock: Callable[[], float]) -> None:
        self.state = state
        self.console = console
        self.clock = clock
        self.printed_at: float | None = None
        self.pending = False

    def print_compiling(self) -> None:
        """Prints the line "compiling"; later lines show rounds and speed."""
        done = f"continues after round {self.state.round}, " if self.state.round else ""
        self._print(f"{self.state.name}  {done}compiling")

    def show(self, round: int, metrics: str = "") -> None:
        self.state.update(round, metrics)
        self.pending = True
        due = self.printed_at is None or self.clock() - self.printed_at >= SECONDS_BETWEEN_LINES
        if due:
            self.print_pending()

    def print_pending(self) -> None:
        if not self.pending:
            return
        self._print(self.state.line())
        self.printed_at = self.clock()
        self.pending = False

    def _print(self, line: str) -> None:
        # Without soft_wrap rich would wrap the line at 80 columns.
        self.console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
        self.console.file.flush()


def duration(seconds: float) -> str:
    """'1:05', or '1:00:05' from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
