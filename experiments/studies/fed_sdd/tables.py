"""FedSDD's tables in the paper: the run and model of each cell, and the paper's numbers.

`paper_tables.csv` has a line per cell, `scaled.csv` the scaled runs and the cells that they correspond
to, and `orderings.csv` the differences that are above zero in the paper.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.studies.samples import Term

SCALED = "fedsdd_scaled"
FOLDER = Path(__file__).parent


class Reported(NamedTuple):
    """Mean and standard deviation over three seeds; None if we did not copy it from the paper."""

    mean: float
    deviation: float | None = None


class Row(NamedTuple):
    """A label, a cell for each column, and for each cell the one to compare it with, if any."""

    label: str
    cells: tuple[Term, ...]
    baseline: tuple[Term | None, ...]


class Table(NamedTuple):
    """One of the paper's tables; `compared_with` is the name of the rows' baselines."""

    heading: str
    compared_with: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def experiment(self) -> str:
        """The experiment with the runs that are only in this table."""
        return f"fedsdd_table{self.heading.split(':')[0].removeprefix('Table ')}"

    @property
    def varying(self) -> tuple[str, ...]:
        """Settings besides the method's own in which rows may differ from their baselines."""
        return ("pools.*.client_learning_rate",) if self.experiment == "fedsdd_table10" else ()


class ScaledRow(NamedTuple):
    """A method's run, and the paper's cells for its main model and its ensemble, where there are any."""

    label: str
    run: str
    main: Term | None
    ensemble: Term | None


class Ordering(NamedTuple):
    """A difference of two models of scaled runs that is above zero in the paper."""

    text: str
    plus: Term
    minus: Term


def tables() -> list[Table]:
    """The paper's tables without the third, which is about speed."""
    by_heading: dict[str, dict[str, list[dict[str, str]]]] = {}
    for line in _lines("paper_tables.csv"):
        by_heading.setdefault(line["table"], {}).setdefault(line["row"], []).append(line)
    shown = []
    for heading, by_row in by_heading.items():
        rows = [
            Row(
                label,
                tuple(_term(line["cell"]) for line in lines),
                tuple(_term(line["baseline"]) if line["baseline"] else None for line in lines),
            )
            for label, lines in by_row.items()
        ]
        first = next(iter(by_row.values()))
        columns = tuple(line["column"] for line in first)
        shown.append(Table(heading, first[0]["compared_with"], columns, tuple(rows)))
    return shown


def scaled(run: str, model: str = "main") -> Term:
    """A model of a scaled run."""
    return Term(SCALED, run, model)


def _lines(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _term(text: str) -> Term:
    return Term(*text.split(" "))


# A cell -> the paper's numbers; a cell that is in several tables has the same numbers in each.
REPORTED = {
    _term(line["cell"]): Reported(
        float(line["mean"]), float(line["deviation"]) if line["deviation"] else None
    )
    for line in _lines("paper_tables.csv")
}
SCALED_ROWS = tuple(
    ScaledRow(
        line["method"],
        line["run"],
        _term(line["main"]) if line["main"] else None,
        _term(line["ensemble"]) if line["ensemble"] else None,
    )
    for line in _lines("scaled.csv")
)
# A scaled run's model -> the corresponding cell of the paper's tables.
STANDS_FOR = {
    scaled(row.run, model): term
    for row in SCALED_ROWS
    for model, term in (("main", row.main), ("ensemble", row.ensemble))
    if term
}
ORDERINGS = tuple(
    Ordering(line["ordering"], scaled(*line["plus"].split(" ")), scaled(*line["minus"].split(" ")))
    for line in _lines("orderings.csv")
)
