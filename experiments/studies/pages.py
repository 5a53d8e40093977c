"""The result of a study for the document: its page, and the verdicts that the index lists."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedcodist.report.intervals import student_half_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plots by file name, as functions that draw them.
Plots = dict[str, Callable[[], "Figure"]]

# A study's prose by section: explanations of its tables, and under `Found: ...` what our runs showed.
Notes = Mapping[str, str]
FOUND = "Found: "

# Verdicts: whether the runs show what the paper says.
HELD, DID_NOT_HOLD, UNDECIDED, OPEN = "held", "did not hold", "not decided", "not enough runs"
WORDS = (HELD, DID_NOT_HOLD, UNDECIDED, OPEN)


class Verdict(NamedTuple):
    """A paper's statement, one of WORDS, and the heading on the page under which its runs are."""

    text: str
    word: str
    heading: str


class Page(NamedTuple):
    """A page of docs/results; `not_run` names experiments with configs and without runs."""

    name: str
    title: str
    experiments: Sequence[str]
    parts: Sequence[str]
    plots: Plots
    verdicts: Sequence[Verdict] = ()
    not_run: Sequence[str] = ()

    @property
    def text(self) -> str:
        return "\n\n".join(part.strip("\n") for part in self.parts if part) + "\n"


def read_notes(path: Path, with_findings: bool) -> dict[str, str]:
    """The sections of a notes file by heading; the first has no heading and belongs to the title.

    Findings are left out if other records are rendered than those that they describe.

    Raises:
      ValueError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}.") from error
    first, *rest = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], map(str.strip, rest[1::2]), strict=True))
    title = re.sub(r"\A# .*\n", "", first).strip()
    return {"": title} | {
        heading: body
        for heading, body in sections.items()
        if with_findings or not heading.startswith(FOUND)
    }


def found(notes: Notes, section: str) -> str:
    """The text on what our runs showed; empty if other records are rendered."""
    return notes.get(FOUND + section, "")


def decided(value: float, half_width: float | None, expected: str) -> str:
    """The verdict on a difference that the paper says is 'above 0', 'below 0' or 'about 0'.

    A difference that should be about zero does not hold if its interval does not contain zero. Otherwise
    it is undecided, since an interval around zero does not prove equality.
    """
    if half_width is None or abs(value) <= half_width:
        return UNDECIDED
    if "about 0" in expected:
        return DID_NOT_HOLD
    return HELD if (value > 0) == ("above 0" in expected) else DID_NOT_HOLD


def word_of(differences: Sequence[float], expected: str) -> str:
    """The verdict on differences within seeds, by Student's t; without any there are not enough runs."""
    if not differences:
        return OPEN
    return decided(statistics.fmean(differences), student_half_width(differences), expected)


def anchor(heading: str) -> str:
    """The anchor of a heading on GitHub; for plain letters also on the documentation's site."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
