"""FedSDD's tables as the paper has them: which run and model is in which cell, and its numbers.

`paper_tables.csv` has a line per cell, `scaled.csv` the rows of scaled runs and what they stand for,
`orderings.csv` the differences that the paper finds above zero.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.studies.samples import Term

SCALED = "fedsdd_scaled"
FOLDER = Path(__file__).parent


class Reported(NamedTuple):
    """Mean and standard deviation over three seeds; where the latter is None we have not noted it."""

    mean: float
    deviation: float | None = None


class Row(NamedTuple):
    """A label, a cell for each column, and for each the cell that it is compared with, if any."""

    label: str
    cells: tuple[Term, ...]
    baseline: tuple[Term | None, ...]


class Table(NamedTuple):
    """One of the paper's tables; `compared_with` is what the rows' baselines are called."""

    heading: str
    compared_with: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def experiment(self) -> str:
        """That of the runs which no other table has."""
        return f"fedsdd_table{self.heading.split(':')[0].removeprefix('Table ')}"

    @property
    def varying(self) -> tuple[str, ...]:
        """Settings besides the method's own in which rows may differ from their baselines."""
        return ("pools.*.client_learning_rate",) if self.experiment == "fedsdd_table10" else ()


class ScaledRow(NamedTuple):
    """A method's run, and what its main model and its ensemble stand for in the paper's tables."""

    label: str
    run: str
    main: Term
    ensemble: Term | None


class Ordering(NamedTuple):
    """A difference of two models of scaled runs that the paper finds above zero."""

    text: str
    plus: Term
    minus: Term


def tables() -> list[Table]:
    """The paper's tables but the third, which is of speed."""
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


# A cell -> what the paper reports; a cell of several tables has the same numbers in each.
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
        _term(line["main"]),
        _term(line["ensemble"]) if line["ensemble"] else None,
    )
    for line in _lines("scaled.csv")
)
# A scaled run's model -> what it stands for in the paper's tables.
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
