"""A study's page for a user's own records, which only shows these records.

The project's pages say for every number of a paper whether it was run. A page of other records does not
show what was not run: cells, rows, tables, and sections without a remaining table.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.pages import Page
from experiments.studies.sections.cells import NOT_RUN, OTHER_SETTINGS
from experiments.studies.sections.endings import NOT_RUN as NOT_RUN_HEADING
from experiments.studies.verdicts import OPEN, verdict_table

_MISSING = (NOT_RUN, OTHER_SETTINGS, OPEN, "runs missing")
_OURS = ": ours"


class Section(NamedTuple):
    """A heading's line, its level (0 for the text before the first), and its blocks of lines."""

    level: int
    heading: str
    blocks: list[str]


def without_missing(page: Page) -> Page:
    """The page without what was not run, and without verdicts that need it."""
    verdicts = [verdict for verdict in page.verdicts if verdict.word != OPEN]
    of_all, of_these = ("\n\n".join(verdict_table(each)) for each in (page.verdicts, verdicts))
    sections = _sections(page.text.replace(of_all, of_these, 1) if of_all else page.text)
    kept = _without_empty([(section, _shown(section.blocks)) for section in sections])
    parts = [
        "\n\n".join(([section.heading] if section.heading else []) + section.blocks)
        for section in kept
    ]
    return page._replace(parts=parts, verdicts=verdicts, not_run=())


def _sections(text: str) -> list[Section]:
    sections = [Section(0, "", [])]
    is_code = False
    for block in text.strip("\n").split("\n\n"):
        heading = re.match(r"(#+) ", block)
        if heading and not is_code:
            line, _, rest = block.partition("\n")
            sections.append(Section(len(heading[1]), line, [rest] if rest else []))
        else:
            sections[-1].blocks.append(block)
        is_code ^= block.count("```") % 2 == 1
    return sections


def _shown(blocks: Sequence[str]) -> list[str]:
    shown = [_table(block) if block.startswith("|") else block for block in blocks]
    return [block for block in shown if block and f"**{OPEN}**" not in block]


def _table(table: str) -> str:
    """A Markdown table without rows and columns that were not run; '' if nothing is left.

    With a column "X: ours", all columns "X: ..." go.
    """
    head, rule, *body = [_cells(line) for line in table.splitlines()]
    ours = [place for place, name in enumerate(head) if name.endswith(_OURS)]
    body = [row for row in body if not _is_missing([row[place] for place in ours] or row, ours)]
    empty = tuple(
        head[place].removesuffix(_OURS) + ": "
        for place in ours
        if all(row[place] in _MISSING for row in body)
    )
    places = [place for place, name in enumerate(head) if not name.startswith(empty)]
    rows = [[row[place] for place in places] for row in (head, rule, *body)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) if body else ""


def _is_missing(cells: Sequence[str], ours: Sequence[int]) -> bool:
    """Whether all of our cells of a row are missing; or any cell, if no column is marked as ours."""
    is_missing = [cell.strip("*") in _MISSING for cell in cells]
    return all(is_missing) if ours else any(is_missing)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def _without_empty(sections: Sequence[tuple[Section, list[str]]]) -> list[Section]:
    """The sections, without those that lost all their tables or all sections beneath them.

    The page's title and what follows it stay.
    """
    kept: list[Section] = []
    for section, blocks in reversed(sections):
        has_table = lambda lines: any(line.startswith("|") for line in lines)
        is_lost = has_table(section.blocks) and not has_table(blocks)
        beneath = _beneath(sections, section)
        has_lost_all = bool(beneath) and not any(
            other.heading == own.heading for other in kept for own in beneath
        )
        if section.heading.strip("# ") == NOT_RUN_HEADING:
            continue
        if section.level > 1 and (is_lost or (has_lost_all and not has_table(blocks))):
            continue
        kept.insert(0, section._replace(blocks=blocks))
    return kept


def _beneath(sections: Sequence[tuple[Section, list[str]]], above: Section) -> list[Section]:
    """The sections of lower levels that follow one, up to the next of its level."""
    plain = [section for section, _ in sections]
    place = next(index for index, section in enumerate(plain) if section is above)
    beneath = []
    for section in plain[place + 1 :]:
        if section.level <= above.level:
            break
        beneath.append(section)
    return beneath
