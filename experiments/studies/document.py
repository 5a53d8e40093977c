"""RESULTS.md and its plots from the records in results/, and what config files say of further runs.

    python -m experiments.studies [--results results] [--output RESULTS.md] [--check]

What is said about the numbers is written in `results/notes/<experiment>.md` (and `claims.md`,
`tuning.md`) and copied under the section. --check compares and writes nothing.
"""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.ablations import ABLATIONS, ablation
from experiments.studies.codistillation.domain_shift import EXPERIMENT as DOMAIN_SHIFT
from experiments.studies.codistillation.domain_shift import domain_shift
from experiments.studies.codistillation.figure_4 import figure_4
from experiments.studies.codistillation.table_1 import table_1
from experiments.studies.codistillation.tuning import tuning
from experiments.studies.codistillation.verdicts import verdicts
from experiments.studies.fed_kd.page import EXPERIMENTS as FEDKD
from experiments.studies.fed_kd.page import fed_kd
from experiments.studies.fed_md.page import TITLES as FEDMD
from experiments.studies.fed_md.page import fed_md
from experiments.studies.fed_sdd.page import EXPERIMENTS as FEDSDD
from experiments.studies.fed_sdd.page import fedsdd
from experiments.studies.mhd.page import EXPERIMENTS as MHD
from experiments.studies.mhd.page import mhd
from experiments.studies.record import read_object
from experiments.studies.records import FIGURE_4, TABLE_1, Record, load_records
from experiments.studies.sections.markdown import PLOT_FOLDER, Plots
from experiments.studies.sections.other import other
from experiments.studies.sections.run_list import run_list
from experiments.studies.sections.without_data import without_data
from fedcodist.config.command_line import Parser
from fedcodist.report.plots import INSTALL_PLOTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY_KEYS = (
    "study",
    "algorithm",
    "rounds",
    "trials",
    "states",
    "space",
    "best_value",
    "best_parameters",
    "command",
    "commit",
    "date",
    "workers",
)
HEADER = """\
<!-- Written by `python -m experiments.studies` from results/; edit the notes in results/notes/. -->

# Results

Our numbers beside those of the papers, first of all the codistillation paper's. Accuracies are in % on
the test images, of the last round's models; gains and other differences are in points.

- **±** in a table of accuracies is the sample standard deviation over the seeds; without it there
  is one seed. Seeds change initial weights, cohorts, batches and augmentation, never the division of
  the data over clients and pools.
- **Intervals** of differences are at 95 %. *Welch*: Student's t over the seeds, for two or more
  seeds on all sides. *paired*: Student's t over the differences within seeds. *binomial*: 1.96
  binomial standard errors of a difference on {images:,} test images, where a side has one seed; it
  says nothing of the spread over seeds.
- **†** marks runs of fewer rounds than the number needs; below the table is the command for the
  full length.
- The codistillation paper gives neither seeds nor spreads.
- **Gains** are over FedAvg with the same settings in all that both read: data, training, clients,
  models, learning rates, rounds.
- Where a run was done with several settings, tables show one that has FedAvg runs of its settings, of
  these the one with most rounds, then most seeds, then the newest, never the one with the best
  accuracy. [All runs](#all-runs) are listed at the end.
"""


class Document(NamedTuple):
    """The text of RESULTS.md and what draws each of its plots, by file name."""

    text: str
    plots: Plots


class Results(NamedTuple):
    """What results/ holds: records, notes by name, and studies of the tuner by their file."""

    records: list[Record]
    notes: dict[str, str]
    studies: list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if --check finds a difference, or 2 for a bad record."""
    parser = Parser(
        prog="python -m experiments.studies", description="RESULTS.md and its plots from results/."
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="the records")
    parser.add_argument("--output", type=Path, default=Path("RESULTS.md"), help="the text")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    try:
        document = render(load_results(options.results))
        if options.check:
            return _check(document, options.output)
        try:
            write(document, options.output)
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
    print(f"wrote {options.output} and {len(document.plots)} plots")
    return 0


def load_results(folder: Path) -> Results:
    """Reads results/.

    Raises:
      ValueError: one line that names a malformed file.
    """
    if not folder.is_dir():
        raise ValueError(f"--results must be an existing folder, got {str(folder)!r}.")
    studies = [_load_study(path) for path in sorted(folder.glob("tuning/*.json"))]
    notes = {path.stem: _read(path).strip() for path in sorted(folder.glob("notes/*.md"))}
    return Results(load_records(folder), notes, studies)


def render(results: Results) -> Document:
    """The whole document; the same results give the same text."""
    records, notes = results.records, results.notes
    plots: Plots = {}

    def note(name: str) -> str:
        return notes.get(name, "")

    parts = [
        HEADER.format(images=paper_numbers.TEST_IMAGES),
        *table_1(records, plots),
        note(TABLE_1),
        *figure_4(records, plots),
        note(FIGURE_4),
    ]
    for name in ABLATIONS:
        parts += [*ablation(records, name), note(name)]
    parts += domain_shift(records, notes, plots)
    parts += verdicts(records, note("claims"))
    parts += fedsdd(records, notes)
    parts += fed_md(records, notes, plots)
    parts += fed_kd(records, notes, plots)
    parts += mhd(records, notes, plots)
    known = {TABLE_1, FIGURE_4, *ABLATIONS, DOMAIN_SHIFT, *FEDSDD, *FEDMD, *FEDKD, *MHD}
    known |= {"claims", "tuning"}
    for name in sorted({*(record.experiment for record in records), *notes} - known):
        parts += [*other(records, name), note(name)]
    parts += [*tuning(results.studies), note("tuning"), *without_data(records), *run_list(records)]
    return Document("\n\n".join(part.strip("\n") for part in parts if part) + "\n", plots)


def write(document: Document, output: Path) -> None:
    """Writes the text and the plots beside it, in docs/results/."""
    for name, draw in document.plots.items():
        path = output.parent / PLOT_FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_png(draw()))
    output.write_text(document.text, encoding="utf-8")


def _png(figure: "Figure") -> bytes:
    """With 64 colours, which is a third of the size."""
    from PIL import Image

    drawn, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=120)
    Image.open(drawn).convert("RGB").quantize(64).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def _check(document: Document, output: Path) -> int:
    present = _read(output) if output.exists() else None
    lacking = [name for name in document.plots if not (output.parent / PLOT_FOLDER / name).exists()]
    if present == document.text and not lacking:
        return 0
    fault = "differs from what the records give" if present is not None else "does not exist"
    if present == document.text:
        fault = f"lacks its plot {PLOT_FOLDER / lacking[0]}"
    print(f"error: {output} {fault}; run: python -m experiments.studies", file=sys.stderr)
    return 1


def _load_study(path: Path) -> dict[str, Any]:
    study = read_object(path)
    if missing := [key for key in STUDY_KEYS if key not in study]:
        raise ValueError(f"{path} is not a study: {missing[0]!r} is missing.")
    kinds: dict[str, Any] = dict(
        study=str, rounds=int, trials=list, states=dict, best_value=int | float | None
    )
    kinds |= dict(best_parameters=dict | None, workers=list, space=dict)
    for key, kind in kinds.items():
        if not isinstance(study[key], kind):
            raise ValueError(f"{path} is not a study: {key} is {study[key]!r}.")
    for worker in study["workers"]:
        if not isinstance(worker, dict) or not isinstance(worker.get("compilations"), int):
            raise ValueError(f"{path} is not a study: workers has {worker!r}.")
    for name, bounds in study["space"].items():
        if not isinstance(bounds, dict) or not {"low", "high", "scale"} <= set(bounds):
            raise ValueError(f"{path} is not a study: space.{name} is {bounds!r}.")
    return study


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}.") from error
