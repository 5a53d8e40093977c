"""RESULTS.md: for each paper what held, what did not and what was not run, with links to the pages."""

from collections.abc import Sequence
from pathlib import Path

from experiments.studies.pages import WORDS, Notes, Page, anchor, found
from experiments.studies.sections.markdown import table

# For papers with more verdicts, the index has only their numbers for each section.
MOST_TEXTS = 20


def index(pages: Sequence[Page], notes: Notes, folder: Path, runs: Path) -> str:
    """`folder` has the pages, `runs` is the list of runs; both as seen from RESULTS.md."""
    parts = [
        "<!-- Written by `python -m experiments.studies`; the prose is in experiments/studies/. -->",
        "# Results",
        found(notes, "these runs"),
        # What the verdicts and their numbers are.
        notes[""] if any(page.verdicts for page in pages) else "",
    ]
    for page in pages:
        link = (folder / f"{page.name}.md").as_posix()
        rows = [[word, texts] for word in WORDS if (texts := _verdicts(page, link, word))]
        if page.not_run:
            rows.append(["not run", f"[{', '.join(page.not_run)}]({link}#not-run)"])
        parts.append(f"## [{page.title}]({link})")
        parts.append(table(["", "What the paper says"], rows, texts=2) if rows else "")
    parts.append(f"## [All runs]({runs.as_posix()})")
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdicts(page: Page, link: str, word: str) -> str:
    """By section with its link: what has this verdict, or how many where there are too many to read."""
    cells = []
    of_word = [verdict for verdict in page.verdicts if verdict.word == word]
    for heading in dict.fromkeys(verdict.heading for verdict in of_word):
        texts = [verdict.text for verdict in of_word if verdict.heading == heading]
        every = sum(verdict.heading == heading for verdict in page.verdicts)
        shown = "; ".join(texts)
        if len(page.verdicts) > MOST_TEXTS:
            shown = f"{len(texts)} of {every}"
        cells.append(f"[{heading}]({link}#{anchor(heading)}): {shown}")
    return ". ".join(cells)
