"""Whether our runs show what a paper says, and the table of it at the top of a page."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.sections.markdown import table
from fedcodist.report.intervals import student_half_width
from fedcodist.report.spread import mean_difference

HELD, DID_NOT_HOLD, UNDECIDED, OPEN = "held", "did not hold", "not decided", "not enough runs"
WORDS = (HELD, DID_NOT_HOLD, UNDECIDED, OPEN)
# What "about 0" and "a little" mean, in points. The papers do not say it, so these margins are ours.
ABOUT, A_LITTLE = 1.0, 5.0
HEADINGS = ("Verdict", "What the paper says", "Paper", "Here")


class Verdict(NamedTuple):
    """A statement of a paper, and whether our runs show it.

    Attributes:
      text: the statement.
      word: one of WORDS.
      heading: the heading on the page under which its runs are.
      paper: the paper's numbers, or where it says that the difference lies.
      ours: our differences with their intervals, in points; empty without runs.
      is_main: whether the table at the top of the page has it. The others are only counted.
      again: what differs, if another verdict is on the same statement; such ones are counted apart.
    """

    text: str
    word: str
    heading: str
    paper: str = ""
    ours: str = ""
    is_main: bool = True
    again: str = ""


def judge(text: str, differences: Sequence[float], expected: str, heading: str) -> Verdict:
    """The verdict on differences within seeds, by Student's t; without any there are not enough runs."""
    if not differences:
        return Verdict(text, OPEN, heading, expected)
    word = decided(statistics.fmean(differences), student_half_width(differences), expected)
    return Verdict(text, word, heading, expected, mean_difference(differences))


def decided(value: float, half_width: float | None, expected: str) -> str:
    """HELD if the whole interval lies where the paper says, DID_NOT_HOLD if no part of it does.

    Args:
      value: the difference, in points.
      half_width: of its interval; None if there is one seed.
      expected: 'above 0', 'below 0', 'about 0', 'about 0 or above', 'a little above 0', 'at most 6',
        'at least 10', or a longer text that contains one of these.
    """
    if half_width is None:
        return UNDECIDED
    low, high = _expected_range(expected)
    if low < value - half_width and value + half_width < high:
        return HELD
    if value + half_width < low or value - half_width > high:
        return DID_NOT_HOLD
    return UNDECIDED


def verdict_table(
    verdicts: Sequence[Verdict], page: str = "", words: Sequence[str] = WORDS, after: str = ""
) -> list[str]:
    """A table with links to the sections of `page`, in the order of `words`; none without verdicts.

    If it does not have all verdicts, their numbers follow, and then the sentence `after`.
    """
    rows = [
        [f"**{word}**", f"[{v.text}]({page}#{anchor(v.heading)})", v.paper, v.ours]
        for word in words
        for v in verdicts
        if v.word == word and v.is_main
    ]
    counts = ""
    if len(rows) < len(verdicts):
        first = [verdict for verdict in verdicts if not verdict.again]
        counts = f"All {len(first)} statements: {_counted(first)}."
        for again in dict.fromkeys(v.again for v in verdicts if v.again):
            same = [verdict for verdict in verdicts if verdict.again == again]
            counts += f" {len(same)} of them again with {again}: {_counted(same)}."
    parts = [
        table(HEADINGS, rows, texts=2) if rows else "",
        " ".join(filter(None, (counts, after))),
    ]
    return [part for part in parts if part]


def anchor(heading: str) -> str:
    """The anchor of a heading on GitHub; for plain letters also on the documentation's site."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _counted(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(f"{sum(v.word == word for v in verdicts)} {word}" for word in WORDS)


def _expected_range(expected: str) -> tuple[float, float]:
    if limit := re.match(r"at (most|least) (\d+)", expected):
        number = float(limit[2])
        return (-math.inf, number) if limit[1] == "most" else (number, math.inf)
    ranges = {
        "about 0 or above": (-ABOUT, math.inf),
        "about 0": (-ABOUT, ABOUT),
        "a little above 0": (0.0, A_LITTLE),
        "above 0": (0.0, math.inf),
        "below 0": (-math.inf, 0.0),
    }
    return next(bounds for words, bounds in ranges.items() if words in expected)
