"""What a benchmark does just now: one live line in a terminal, elsewhere a plain line of each step."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def showing(step: str, console: Console | None = None) -> Iterator[None]:
    """Says what goes on inside; in a terminal also for how long, and the line is gone afterwards.

    Args:
      step: what goes on.
      console: where to say it; standard error where not given, so that tables can be redirected alone.
    """
    console = console or Console(stderr=True)
    # With FORCE_COLOR rich treats a pipe as a terminal, and cursor movements would litter the log.
    if not (console.is_interactive and console.file.isatty()):
        print(step, file=console.file, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(step)
        yield
