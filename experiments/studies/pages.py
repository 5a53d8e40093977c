"""The result of a study for the document: its page, and the verdicts that the index lists."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from experiments.studies.verdicts import Verdict, verdict_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Plots by file name, as functions that draw them.
Plots = dict[str, Callable[[], "Figure"]]

# A study's prose by section: explanations of its tables, and under `Found: ...` what our runs showed.
Notes = Mapping[str, str]
FOUND = "Found: "
IN_SHORT = "In short"
THESE_RUNS = "these runs"


class Page(NamedTuple):
    """A page of docs/results.

    Attributes:
      name: of its file.
      title: in the index.
      experiments: that it shows.
      parts: blocks of text, in order.
      plots: that the text refers to.
      in_short: what our runs showed, in one or two sentences.
      verdicts: on the paper's statements.
      not_run: experiments with configs and without runs.
    """

    name: str
    title: str
    experiments: Sequence[str]
    parts: Sequence[str]
    plots: Plots
    in_short: str = ""
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


def first_screen(heading: str, notes: Notes, verdicts: Sequence[Verdict] = ()) -> list[str]:
    """A page's title, its result in short, its verdicts, and what is compared with what."""
    of_page = (notes[""], found(notes, THESE_RUNS))
    return [f"# {heading}", found(notes, IN_SHORT), *verdict_table(verdicts), *of_page]
