"""RESULTS.md, a page and plots per study, and a list of all runs, from the records in results/.

    python -m experiments.studies [--results FOLDER] [--output FILE] [--check]

Pages and plots go to docs/results/ beside the output, the list of runs to runs.csv in the folder of the
records. The prose is in `experiments/studies/<study>/notes.md`. Where other records than the project's
are rendered, the pages are those of these records' experiments, without what the project's runs showed
and without what was not run. --check compares and writes nothing.
"""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.studies.archive import Record, load_records
from experiments.studies.codistillation.page import codistillation
from experiments.studies.domain_shift.page import domain_shift
from experiments.studies.fed_kd.page import fed_kd
from experiments.studies.fed_md.page import fed_md
from experiments.studies.fed_sdd.page import fed_sdd
from experiments.studies.heterogeneous.page import heterogeneous
from experiments.studies.index import index
from experiments.studies.mhd.page import mhd
from experiments.studies.own_records import without_missing
from experiments.studies.pages import Notes, Page, read_notes
from experiments.studies.privacy.page import privacy
from experiments.studies.run_list import run_list
from experiments.studies.sections.other import other
from experiments.studies.tuning.page import load_tuning, tuning
from fedcodist.config.command_line import Parser
from fedcodist.report.plots import INSTALL_PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGES = Path("docs/results")  # beside RESULTS.md
# In the order of RESULTS.md; each has its prose in its folder.
STUDIES: Mapping[str, Callable[[Sequence[Record], Notes], Page]] = {
    "codistillation": codistillation,
    "domain_shift": domain_shift,
    "fed_sdd": fed_sdd,
    "fed_md": fed_md,
    "fed_kd": fed_kd,
    "mhd": mhd,
    "heterogeneous": heterogeneous,
    "privacy": privacy,
}


class Document(NamedTuple):
    """The texts of all files that are written, by path, and the functions that draw plots."""

    texts: dict[Path, str]
    plots: dict[Path, Callable[[], "Figure"]]


class Results(NamedTuple):
    """The content of results/, and the prose of each study, by name; that of the index has the name ''.

    `is_ours`: whether these are the project's records. Only for these, pages list missing runs.
    """

    folder: Path
    records: list[Record]
    notes: Mapping[str, Notes]
    tuning: list[dict[str, Any]]
    is_ours: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if --check finds a difference, or 2 for a bad record."""
    parser = Parser(
        prog="python -m experiments.studies", description="Pages of results from results/."
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="the records")
    parser.add_argument(
        "--output", type=Path, help="the index (default: RESULTS.md beside --results)"
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    try:
        results = load_results(options.results)
        output = options.output or options.results.parent / "RESULTS.md"
        document = render(results, output)
        if options.check:
            return check(document)
        try:
            write(document)
        except ImportError as error:
            raise ValueError(INSTALL_PLOTS) from error
        except OSError as error:
            raise ValueError(f"cannot write {error.filename}: {error.strerror}.") from error
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot read {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    print(f"wrote {output}, {len(document.texts) - 1} more texts, {len(document.plots)} plots")
    return 0


def load_results(folder: Path) -> Results:
    """Reads results/ and the notes.

    Raises:
      ValueError: one line that names a malformed file.
    """
    if not folder.is_dir():
        raise ValueError(f"--results must be an existing folder, got {str(folder)!r}.")
    is_ours = folder.resolve() == HERE.parents[1] / "results"
    notes = {
        name: read_notes(HERE / name / "notes.md", is_ours) for name in ("", "tuning", *STUDIES)
    }
    return Results(folder, load_records(folder), notes, load_tuning(folder / "tuning"), is_ours)


def render(results: Results, output: Path) -> Document:
    """All files; the same results give the same texts."""
    pages = [make(results.records, results.notes[name]) for name, make in STUDIES.items()]
    experiments = {record.experiment for record in results.records}
    placed = {experiment for page in pages for experiment in page.experiments}
    if not results.is_ours:
        pages = [page for page in pages if experiments & {*page.experiments}]
    if results.is_ours or results.tuning:
        pages.append(tuning(results.tuning, results.notes["tuning"]))
    if others := sorted(experiments - placed):
        pages.append(other(results.records, others))
    if not results.is_ours:
        pages = [without_missing(page) for page in pages]
    runs = results.folder / "runs.csv"
    from_index = Path(os.path.relpath(runs, output.parent))
    folder = output.parent / PAGES
    texts = {
        output: index(pages, results.notes[""], PAGES, from_index),
        **{folder / f"{page.name}.md": page.text for page in pages},
        runs: run_list(results.records),
    }
    plots = {folder / name: draw for page in pages for name, draw in page.plots.items()}
    return Document(texts, plots)


def write(document: Document) -> None:
    """Writes texts and plots."""
    for path, draw in document.plots.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(draw()))
    for path, text in document.texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _png(figure: "Figure") -> bytes:
    """A figure as PNG with 256 colours, which halves the size."""
    from PIL import Image

    drawn, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=120)
    Image.open(drawn).convert("RGB").quantize(256).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def check(document: Document) -> int:
    """Prints the first file that is missing or differs from the records; returns 1 then, else 0."""
    for path, text in document.texts.items():
        fault = "does not exist"
        if path.exists():
            fault = "differs from what the records give"
            if path.read_text(encoding="utf-8") == text:
                continue
        print(f"error: {path} {fault}; run: python -m experiments.studies", file=sys.stderr)
        return 1
    for path in document.plots:
        if not path.exists():
            print(
                f"error: {path} does not exist; run: python -m experiments.studies", file=sys.stderr
            )
            return 1
    return 0
