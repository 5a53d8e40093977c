"""Shows the current step of a benchmark: a live line in a terminal, otherwise a plain line per step."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def showing(step: str, console: Console | None = None) -> Iterator[None]:
    """Shows a step while the `with` block runs; in a terminal also its time, until the block ends.

    Args:
      step: the text to show.
      console: where to show it; by default standard error, so that tables can be redirected alone.
    """
    console = console or Console(stderr=True)
    # With FORCE_COLOR rich treats a pipe as a terminal, and cursor movements would fill the log.
    if not (console.is_interactive and console.file.isatty()):
        print(step, file=console.file, flush=True)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(step)
        yield
