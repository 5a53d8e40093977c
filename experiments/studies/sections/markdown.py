"""Pieces of Markdown: tables, images, numbers."""

from collections.abc import Iterable, Sequence

from fedcodist.report.intervals import Estimate
from fedcodist.report.spread import plus_minus


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first `texts` columns are text, the others aligned right."""
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def image(name: str, text: str) -> str:
    """A plot by its file name; it lies beside the page."""
    return f"![{text}]({name})"


def estimate(difference: Estimate) -> str:
    """'+2.02 ± 0.31'."""
    return plus_minus(difference.value, difference.half_width, is_difference=True)


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
