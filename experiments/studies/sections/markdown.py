"""Pieces of Markdown: tables, images, numbers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcodist.report.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What draws each plot, by file name.
Plots = dict[str, Callable[[], "Figure"]]

# Beside RESULTS.md.
PLOT_FOLDER = Path("docs/results")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text, the others aligned right."""
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def image(name: str, text: str) -> str:
    """A plot by its file name."""
    return f"![{text}]({(PLOT_FOLDER / name).as_posix()})"


def estimate(one: Estimate) -> str:
    """'+2.02 ± 0.31'."""
    return f"{one.value:+.2f} ± {one.half_width:.2f}"


def rounds_of(rounds: int, full_rounds: int) -> str:
    """'1,500', or '† 300 of 1,500'."""
    return f"{rounds:,}" if rounds >= full_rounds else f"† {rounds:,} of {full_rounds:,}"


def split_name(split: str) -> str:
    """'held-out'."""
    return split.replace("_", "-")


def listed(values: Iterable[int]) -> str:
    """'0, 1, 2'."""
    return ", ".join(map(str, values))


def codes(texts: Iterable[str]) -> str:
    """Names as code, each once."""
    return ", ".join(f"`{text}`" for text in dict.fromkeys(texts))
