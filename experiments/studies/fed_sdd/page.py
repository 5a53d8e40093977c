"""FedSDD's tables: ours beside the paper's, and differences within seeds."""

from collections.abc import Sequence

from experiments.studies.codistillation.claims import Term
from experiments.studies.codistillation.paper_numbers import FEDSDD, TEST_IMAGES
from experiments.studies.fed_sdd.tables import (
    ORDERINGS,
    SCALED,
    SCALED_ROWS,
    STANDS_FOR,
    Table,
    scaled,
    tables,
)
from experiments.studies.pooling import Sample, sample
from experiments.studies.records import Record
from experiments.studies.sections.cells import accuracy
from experiments.studies.sections.commands import planned, sweep
from experiments.studies.sections.footnotes import recorded_runs, remarks
from experiments.studies.sections.markdown import estimate, table
from experiments.studies.settings import UNLABELLED, settings, without
from fedcodist.report.intervals import Estimate, paired

EXPERIMENTS = (SCALED, *dict.fromkeys(each.experiment for each in tables()))
MODELS = ("main", "ensemble", "clients", "gaussian", "dirichlet")
# What the methods of one table may differ in.
VARYING = (
    "algorithm.*",
    "training.method",
    "training.proximal_weight",
    "training.scaffold_option",
    *UNLABELLED,
)


def fedsdd(records: Sequence[Record], notes: dict[str, str]) -> list[str]:
    """The scaled runs, the tables that have runs, and commands for those that have none."""
    parts = [
        "## FedSDD",
        "Test accuracy in % after the last round, beside *FedSDD* (Kwan and Song, 2023). ± of the "
        "paper's numbers is its standard deviation over three seeds. Our differences are *within "
        "seeds*: runs with the same seed share the division of the data, cohorts and batches, and "
        "their intervals are Student's t over the seeds' differences (95 %).",
        *_scaled(records),
        notes.get(SCALED, ""),
    ]
    empty: dict[str, list[str]] = {}
    noted = set()
    for each in tables():
        terms = [term for row in each.rows for term in row.cells]
        if not any(_sample(records, term) for term in terms if term.experiment == each.experiment):
            empty.setdefault(each.experiment, []).append(each.heading)
            continue
        parts += _table(records, each)
        if each.experiment not in noted:
            noted.add(each.experiment)
            parts += remarks(
                records, each.experiment, recorded_runs(records, each.experiment), MODELS
            )
            parts.append(notes.get(each.experiment, ""))
    rows = [
        ["; ".join(headings), str(len(planned(each))), f"`{_command(each)}`"]
        for each, headings in empty.items()
        if each not in noted
    ]
    if rows:
        parts += [
            "### Not run",
            "At the paper's length these are for accelerators.",
            table(["Table", "Runs", "Command"], rows, texts=3),
        ]
    return parts


def _scaled(records: Sequence[Record]) -> list[str]:
    rows = []
    for run, label in SCALED_ROWS.items():
        row = [label]
        for model in ("main", "ensemble"):
            term = scaled(run, model)
            if model == "ensemble" and not run.startswith(("fed_sdd", "no_", "basic")):
                row += ["", ""]
                continue
            row += [_ours(records, term), _paper(STANDS_FOR.get(term))]
        rows.append(row)
    orderings = []
    for text, plus, minus in ORDERINGS:
        ours = difference(records, plus, minus)
        missing = not (_sample(records, plus) and _sample(records, minus))
        lack = ["not run" if missing else "no runs with equal settings", "", ""]
        theirs = FEDSDD[STANDS_FOR[plus]].mean - FEDSDD[STANDS_FOR[minus]].mean
        orderings.append([text, *(_shown(ours) if ours else lack), f"{theirs:+.2f}"])
    headings = ["Method", "Main model: ours †", "paper", "Ensemble: ours †", "paper"]
    return [
        "### Scaled down: CIFAR-10, α = 0.1",
        "† All of these runs are far shorter than the paper's and of a smaller network: the CNN of "
        "the codistillation paper on 24x24 images, 12 rounds of 2 epochs, 100 steps of distillation "
        "(`experiments/configs/fedsdd_scaled.py`). The paper's are of ResNet-20, 100 rounds of 40 "
        "epochs and 5,000 steps. Orderings may be compared, levels may not.",
        table(headings, rows),
        *remarks(records, SCALED, recorded_runs(records, SCALED), MODELS),
        "What the paper finds, and the same differences of ours:",
        table(["Ordering", "Ours †", "Interval", "Above zero", "Paper's difference"], orderings),
    ]


def _table(records: Sequence[Record], shown: Table) -> list[str]:
    headings = ["Method"]
    for column in shown.columns:
        headings += [f"{column}: ours", "paper"]
    rows, differences = [], []
    for row in shown.rows:
        cells = [row.label]
        for term in row.cells:
            cells += [_ours(records, term), _paper(term)]
        rows.append(cells)
        baseline = row.baseline or row.cells
        for column, term, other in zip(shown.columns, row.cells, baseline, strict=True):
            if other != term and (ours := difference(records, term, other, shown.varying)):
                theirs = FEDSDD[term].mean - FEDSDD[other].mean
                differences.append([row.label, column, *_shown(ours)[:2], f"{theirs:+.2f}"])
    parts = [f"### {shown.heading}", table(headings, rows)]
    if differences:
        parts += [
            f"**Differences to: {shown.compared_with}**",
            table(["Method", "Column", "Ours", "Interval", "Paper's"], differences, texts=2),
        ]
    return parts


def difference(
    records: Sequence[Record], plus: Term, minus: Term, varying: Sequence[str] = ()
) -> Estimate | None:
    """`plus` less `minus` over the seeds that both have; None where one is missing, or where settings
    differ that are neither the method's nor among `varying`."""
    one, other = _sample(records, plus), _sample(records, minus)
    if one is None or other is None:
        return None
    mine, theirs = (
        without(settings(each.records[0]), (*VARYING, *varying)) for each in (one, other)
    )
    values = [dict(zip(each.seeds, each.values, strict=True)) for each in (one, other)]
    seeds = sorted(values[0].keys() & values[1].keys())
    if mine != theirs or not seeds:
        return None
    return paired(*([own[seed] for seed in seeds] for own in values), TEST_IMAGES)


def _shown(ours: Estimate) -> list[str]:
    word = "within the interval"
    if abs(ours.value) > ours.half_width:
        word = "yes" if ours.value > 0 else "no"
    return [estimate(ours), ours.kind, word]


def _ours(records: Sequence[Record], term: Term) -> str:
    one = _sample(records, term)
    return "not run" if one is None else accuracy(one)


def _paper(term: Term | None) -> str:
    reported = None if term is None else FEDSDD.get(term)
    if reported is None:
        return "–"
    spread = "" if reported.deviation is None else f" ± {reported.deviation:.2f}"
    return f"{reported.mean:.2f}{spread}"


def _sample(records: Sequence[Record], term: Term) -> Sample | None:
    return sample(records, *term)


def _command(experiment: str) -> str:
    return " ".join(
        sweep(experiment, planned(experiment)).strip("`\n").replace("\\\n", " ").split()
    )
