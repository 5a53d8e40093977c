"""FedKD's tables of a panel: methods, metrics without a threshold, students, losses, thresholds."""

from collections.abc import Sequence

from experiments.configs.cifar_fed_kd import THRESHOLDS
from experiments.studies.archive import Record
from experiments.studies.fed_kd.comparisons import (
    comparable,
    cost_cells,
    difference_text,
    megabytes,
    quality_cells,
    sample_of,
)
from experiments.studies.fed_kd.panels import (
    CENTRAL,
    FED_AVG,
    FED_KD,
    FML,
    LOCAL,
    METHODS,
    METRICS,
    NO_CLAIM,
    OF_STUDENT,
    PARTS,
    STUDENT,
    TEACHERS,
    WHOLE,
    Method,
    Panel,
)
from experiments.studies.pages import Notes
from experiments.studies.sections.cells import accuracy
from experiments.studies.sections.commands import planned
from experiments.studies.sections.markdown import listed, table

# The student's network -> FedAvg's run of it and FedKD's.
STUDENTS = {
    "as above": ("fed_avg,student", "fed_kd"),
    "smaller": ("fed_avg,smaller", "fed_kd,smaller"),
    "CNN": ("fed_avg,text_cnn", "fed_kd,text_cnn"),
    "LSTM": ("fed_avg,text_lstm", "fed_kd,text_lstm"),
    "CNN, attention": ("fed_avg,text_cnn_attention", "fed_kd,text_cnn_attention"),
    "LSTM, attention": ("fed_avg,text_lstm_attention", "fed_kd,text_lstm_attention"),
    "self-attention": ("fed_avg,text_self_attention", "fed_kd,text_self_attention"),
}
# As in the paper's figures.
SWEEPS = {
    "start, up to 1": (
        "fed_kd,0.5-1",
        "fed_kd,0.8-1",
        "fed_kd,0.9-1",
        "fed_kd,0.95-1",
        "fed_kd,1-1",
    ),
    "end, from 0.95": ("fed_kd,0.95-0.95", "fed_kd", "fed_kd,0.95-1"),
}
DEFAULT_THRESHOLDS = (0.95, 0.98)


def methods_table(records: Sequence[Record], panel: Panel) -> str:
    """A row for each method: quality, bytes, and the difference to FedAvg of the teacher's network."""
    rows = []
    for method in METHODS:
        if panel.run(method.run) not in planned(panel.experiment):
            continue
        shown = sample_of(records, panel, method)
        # Bytes of other numbers of rounds are not compared.
        whole = comparable(records, panel, FED_AVG, (method, shown)) if shown else None
        sent = 0.0 if shown and method == LOCAL else megabytes(shown)
        if method == CENTRAL:
            sent = None  # its data are sent
        difference = "" if method == FED_AVG else difference_text(records, panel, method, FED_AVG)
        quality = quality_cells(records, panel, method)
        seeds = listed(shown.seeds) if shown else ""
        rows.append([method.name, *quality, *cost_cells(sent, megabytes(whole)), difference, seeds])
    headings = ["Method", METRICS[panel.metric], "the student's", "MB", "of FedAvg's"]
    return table([*headings, "to FedAvg, teacher's network", "Seeds"], rows)


def metrics_table(records: Sequence[Record], panel: Panel, notes: Notes) -> list[str]:
    """What the panel's further metrics say of the methods and of each part of the losses."""
    parts = [Method(text, run, TEACHERS) for run, text in PARTS.items() if run != LOCAL.run]
    parts = [
        *(part for part in parts if part.run != FED_KD.run),
        WHOLE._replace(name="with whole students"),
    ]
    of_student = lambda method: method._replace(model=STUDENT)
    rows = []
    for metric in panel.others:
        measured = panel._replace(metric=metric)
        for method in (*METHODS, *parts):
            if sample_of(records, measured, method) is None:
                continue
            name = method.name if method in METHODS else f"FedKD {method.name}"
            value, student = quality_cells(records, measured, method)
            differences = [
                "" if method == base else difference_text(records, measured, method, base)
                for base in (LOCAL, FED_KD)
            ]
            if student and method != FED_KD:
                both = of_student(method), of_student(FED_KD)
                differences.append(difference_text(records, measured, *both))
            else:
                differences.append("")
            rows.append([METRICS[metric], name, value, student, *differences])
    if not rows:
        return []
    headings = ["Metric", "Method", "value", "the student's"]
    headings += ["to Local", "to FedKD's teachers", "the student's, to FedKD's"]
    return [
        f"**Metrics without a threshold, {panel.title}**",
        table(headings, rows, texts=2),
        notes["Without a threshold"],
    ]


def students_table(records: Sequence[Record], panel: Panel) -> list[str]:
    """Students' networks: what teachers gain from each, and each from its teachers."""
    rows, runs = [], planned(panel.experiment)
    for name, (of_fed_avg, of_fed_kd) in STUDENTS.items():
        if of_fed_kd not in runs:
            continue
        alone, taught = Method(name, of_fed_avg, STUDENT), Method(name, of_fed_kd, STUDENT)
        teachers = taught._replace(model=TEACHERS)
        shown = [accuracy(sample_of(records, panel, each)) for each in (alone, taught, teachers)]
        differences = [
            difference_text(records, panel, taught, alone),
            difference_text(records, panel, teachers, LOCAL),
        ]
        rows.append([name, *shown, *differences])
    headings = ["Student", "by FedAvg", "by FedKD", "FedKD's teachers"]
    headings += ["by FedKD, to FedAvg", "teachers, to Local"]
    return [
        f"**Students' networks, {METRICS[panel.metric]}, {panel.title}**",
        table(headings, rows),
    ]


def parts_table(records: Sequence[Record], panel: Panel) -> list[str]:
    """The effect of leaving out each loss, and FML's losses; the paper's remarks are on teachers."""
    rows = []
    for run, text in (*PARTS.items(), (FML.run, "FML's losses, with whole students")):
        if panel.run(run) not in planned(panel.experiment):
            continue
        both = [Method(text, run, model) for model in (TEACHERS, STUDENT)]
        base = [FED_KD._replace(model=model) for model in (TEACHERS, STUDENT)]
        differences = ["", "", ""]
        if run != FED_KD.run:
            differences = [
                *(difference_text(records, panel, *pair) for pair in zip(both, base, strict=True)),
                "–" if run in NO_CLAIM[2:] else "below 0",
            ]
        differences.insert(2, difference_text(records, panel, both[1], OF_STUDENT))
        sent = megabytes(sample_of(records, panel, both[0]))
        cost = "–" if sent is None else f"{sent:,.2f}"
        rows.append([text, *quality_cells(records, panel, both[0]), cost, *differences])
    headings = ["Losses", f"teachers' {METRICS[panel.metric]}", "the student's", "MB"]
    headings += ["teachers, to all losses", "student, to all losses"]
    headings += ["student, to FedAvg of its network", "paper (teachers)"]
    return [f"**Each loss left out, {panel.title}**", table(headings, rows)]


def thresholds_table(records: Sequence[Record], panel: Panel, notes: Notes) -> list[str]:
    """A row for each energy threshold: quality and bytes, beside those of whole students."""
    runs = planned(panel.experiment)
    swept = [(varied, run) for varied, all_ in SWEEPS.items() for run in all_ if run in runs]
    if WHOLE.run not in runs:
        return []
    whole = megabytes(sample_of(records, panel, WHOLE))
    rows = []
    for varied, run in (*swept, ("nothing compressed", WHOLE.run)):
        method = Method(varied, run, TEACHERS)
        thresholds = THRESHOLDS.get(run.partition(",")[2], DEFAULT_THRESHOLDS)
        shown, difference = [f"{share:g}" for share in thresholds], ""
        if run == WHOLE.run:
            shown = ["", ""]
        else:
            difference = difference_text(records, panel, method, WHOLE)
        cost = cost_cells(megabytes(sample_of(records, panel, method)), whole)
        rows.append([varied, *shown, *quality_cells(records, panel, method), *cost, difference])
    headings = ["Varied", "T at the start", "T at the end", f"teachers' {METRICS[panel.metric]}"]
    headings += ["the student's", "MB", "of whole students'", "to whole students"]
    return [
        f"**Energy thresholds, {panel.title}**",
        table(headings, rows),
        notes["Thresholds"] if len(swept) > 1 else "",
    ]
