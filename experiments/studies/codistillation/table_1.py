"""The codistillation paper's Table 1: accuracies, gains over FedAvg, and curves by round."""

from collections.abc import Mapping, Sequence

from experiments.studies import figures
from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.cells import both_models
from experiments.studies.codistillation.claims import UNLABELLED_NAMES, gain
from experiments.studies.codistillation.findings import find
from experiments.studies.codistillation.paper_numbers import MODELS, POOL_SIZES, run_name
from experiments.studies.config_files import config_of
from experiments.studies.figures import Point
from experiments.studies.pages import Notes, Plots, found
from experiments.studies.samples import baseline, curve, sample
from experiments.studies.sections.markdown import codes, estimate, image, rounds_of, table
from experiments.studies.settings import OWN, method_of, settings, without
from fedcodist.config.registry import BASELINE, CODISTILLATION, METHOD_NAMES, METHODS
from fedcodist.report.intervals import ONE_SEED

EARLIER = "Settings of the earlier studies"


def table_1(
    records: Sequence[Record], notes: Notes, level: str, all_records: Sequence[Record]
) -> list[str]:
    """Accuracies and gains of these records beside the paper's; nothing without runs of the table.

    `all_records` show the spread over seeds, also if these are short runs.
    """
    if not any(record.experiment == TABLE_1 for record in records):
        return []
    tables = _tables(records, f"{level}#", all_records)
    return [f"{level} Table 1: CIFAR-100", notes["Table 1"], *tables]


def with_earlier_settings(records: Sequence[Record]) -> list[Record]:
    """Runs of Table 1 with other settings of distillation than the config file has, beside FedAvg's."""
    of_table = [record for record in records if record.experiment == TABLE_1]
    earlier = [record for record in of_table if _is_earlier(record)]
    fed_avg = [record for record in of_table if method_of(record) == BASELINE]
    return [*fed_avg, *earlier] if earlier else []


def earlier_settings(
    records: Sequence[Record], notes: Notes, all_records: Sequence[Record]
) -> list[str]:
    """Table 1 of `with_earlier_settings`; nothing without such runs."""
    earlier = with_earlier_settings(records)
    if not earlier:
        return []
    tables = _tables(earlier, "###", all_records)
    return [f"## {EARLIER}", notes[EARLIER], *tables, found(notes, EARLIER)]


def _is_earlier(record: Record) -> bool:
    """Whether the run differs from the config file in the method's own settings alone."""
    config = config_of(record.experiment, record.run)
    if config is None or method_of(record) == BASELINE:
        return False
    mine, present = settings(record), settings(record._replace(config=config))
    return mine != present and without(mine, OWN) == without(present, OWN)


def _tables(records: Sequence[Record], level: str, all_records: Sequence[Record]) -> list[str]:
    parts = []
    for unlabelled, name in UNLABELLED_NAMES.items():
        fed_avg = {size: run_name(BASELINE, size, "") for size in POOL_SIZES}
        codistilled = {
            run_name(method, size, unlabelled): fed_avg[size]
            for method in CODISTILLATION
            for size in POOL_SIZES
        }
        parts += [
            f"{level} Unlabelled images: {name}",
            _accuracy_table(records, unlabelled),
            unlike_fed_avg(records, TABLE_1, codistilled),
            *_gains(records, unlabelled, all_records),
        ]
    return parts


def unlike_fed_avg(records: Sequence[Record], experiment: str, runs: Mapping[str, str]) -> str:
    """Names the shown runs whose settings differ from those of the FedAvg run in their table."""
    unlike = []
    for run, fed_avg in runs.items():
        for model in MODELS:
            shown = sample(records, experiment, run, model)
            above = sample(records, TABLE_1, fed_avg, model)
            if shown and above and baseline(records, shown.records[0], model) != above:
                unlike.append(run)
    return f"With other settings than FedAvg's row: {codes(unlike)}." if unlike else ""


def gains_plot(records: Sequence[Record], notes: Notes, plots: Plots) -> list[str]:
    """A plot of our gains and the paper's by pool size."""
    ours: dict[str, dict[str, list[Point]]] = {}
    paper: dict[str, dict[str, list[Point]]] = {}
    for unlabelled, name in UNLABELLED_NAMES.items():
        for model in MODELS:
            title = f"{model} model, {name}"
            for method in CODISTILLATION:
                mine = ours.setdefault(title, {}).setdefault(method, [])
                theirs = paper.setdefault(title, {}).setdefault(method, [])
                for size in POOL_SIZES:
                    finding = find(gain(method, size, unlabelled, model), records)
                    theirs.append(Point(size, finding.paper or 0.0, None))
                    if finding.ours:
                        value, half_width, kind = finding.ours
                        mine.append(Point(size, value, half_width, kind == ONE_SEED))
    ours = {title: panel for title, panel in ours.items() if any(panel.values())}
    if not ours:
        return []
    plots["gains.png"] = lambda: figures.gains_plot(ours, paper)
    return [image("gains.png", "Gains over FedAvg by pool size"), notes["The plot of gains"]]


def curves_plot(records: Sequence[Record], notes: Notes, plots: Plots) -> list[str]:
    """A plot of accuracies by round, for the runs with 4,700 examples, in domain."""
    panels = {}
    for model in MODELS:
        runs = {method: run_name(method, 4700, "in_domain") for method in METHODS}
        curves = {
            method: one
            for method, run in runs.items()
            if (one := curve(records, TABLE_1, run, model, "held_out"))
        }
        if curves:
            panels[f"{model} model"] = curves
    if not panels:
        return []
    plots["curves.png"] = lambda: figures.curves_plot(panels)
    picture = image("curves.png", "Held-out accuracy by round")
    return ["### Held-out accuracy by round", notes["Curves"], picture, found(notes, "Curves")]


def _accuracy_table(records: Sequence[Record], unlabelled: str) -> str:
    headings = ["Method"]
    for size in POOL_SIZES:
        headings += [f"{size:,}: ours", f"{size:,}: paper"]
    rows = []
    for method in METHODS:
        row = [METHOD_NAMES[method]]
        for size in POOL_SIZES:
            run = run_name(method, size, unlabelled)
            small, large = paper_numbers.TABLE_1[run]
            row += [both_models(records, TABLE_1, run), f"{small:.2f} / {large:.2f}"]
        rows.append(row)
    return table(headings, rows)


def _gains(records: Sequence[Record], unlabelled: str, all_records: Sequence[Record]) -> list[str]:
    """A table of gains for the recorded runs; empty if there are none."""
    headings = ["Method", "Examples", "Model", "Our gain", "Interval", "Rounds", "Paper's gain"]
    rows = []
    for method in CODISTILLATION:
        for size in POOL_SIZES:
            for model in MODELS:
                finding = find(gain(method, size, unlabelled, model), records, all_records)
                assert finding.paper is not None
                if finding.word == "runs missing":
                    continue
                row = [METHOD_NAMES[method], f"{size:,}", model, finding.word, "", ""]
                inside = ""
                if finding.ours:
                    row[3:5] = [estimate(finding.ours), finding.ours.kind]
                    row[5] = rounds_of(finding.rounds, finding.full_rounds)
                    is_outside = abs(finding.ours.value - finding.paper) > finding.ours.half_width
                    inside = "no" if is_outside else "yes"
                rows.append([*row, f"{finding.paper:+.2f}", inside])
    if not rows:
        return []
    gains = table([*headings, "Paper's gain in our interval"], rows, texts=3)
    return [f"**Gains over FedAvg, {UNLABELLED_NAMES[unlabelled]}**", gains]
