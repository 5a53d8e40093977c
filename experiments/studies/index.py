"""RESULTS.md: for each paper what held, what did not and what was not run, with links to the pages."""

from collections.abc import Sequence
from pathlib import Path

from experiments.studies.pages import THESE_RUNS, Notes, Page, found
from experiments.studies.verdicts import DID_NOT_HOLD, HELD, verdict_table


def index(pages: Sequence[Page], notes: Notes, folder: Path, runs: Path) -> str:
    """`folder` has the pages, `runs` is the list of runs; both as seen from RESULTS.md."""
    parts = [
        "<!-- Written by `python -m experiments.studies`; the prose is in experiments/studies/. -->",
        "# Results",
        found(notes, THESE_RUNS),
        # What the verdicts and their numbers are.
        notes[""] if any(page.verdicts for page in pages) else "",
    ]
    for page in pages:
        link = (folder / f"{page.name}.md").as_posix()
        not_run = (
            f"Not run at full length: [{', '.join(page.not_run)}]({link}#not-run)."
            if page.not_run
            else ""
        )
        # A second verdict on the same statement is shown on the page only. It is counted here too.
        verdicts = [v._replace(is_main=v.is_main and not v.again) for v in page.verdicts]
        decided = verdict_table(verdicts, link, (HELD, DID_NOT_HOLD), after=not_run)
        parts += [f"## [{page.title}]({link})", page.in_short, *decided]
    parts.append(f"## [All runs]({runs.as_posix()})")
    return "\n\n".join(part for part in parts if part) + "\n"
