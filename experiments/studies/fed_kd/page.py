"""FedKD: quality against bytes, each loss left out, energy thresholds, ranks; the paper's costs."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.configs.cifar_fed_kd import (
    CENTRALISED,
    FETCH_SGD_ROUNDS,
    THRESHOLDS,
    THROUGH_NORMALISER,
)
from experiments.studies import figures
from experiments.studies.archive import Record
from experiments.studies.figures import Cost, Spectrum
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.samples import Sample, common_seeds, equal_but, sample
from experiments.studies.sections.cells import OTHER_SETTINGS, accuracy
from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import image, listed, table
from experiments.studies.verdicts import DID_NOT_HOLD, Verdict, judge
from fedcodist.compression.svd import rank_for, threshold
from fedcodist.report.spread import mean_difference

CIFAR, ADE = "cifar_fed_kd", "ade_fed_kd"
EXPERIMENTS = (CIFAR, ADE, "mind_fed_kd")
TEACHERS, STUDENT = "main_teachers", "main"


class Method(NamedTuple):
    """A table row: its name, its run, the model that is tested, and its name in plots."""

    name: str
    run: str
    model: str
    style: str = "fed_kd"


LOCAL = Method("Local", "fed_kd,no_mutual", TEACHERS)
FED_AVG = Method("FedAvg, teacher's network", "fed_avg,teacher", STUDENT, "fed_avg")
OF_STUDENT = Method("FedAvg, student's network", "fed_avg,student", STUDENT, "fed_avg")
FED_KD = Method("FedKD", "fed_kd", TEACHERS)
CENTRAL = Method("Centralised", CENTRALISED, TEACHERS)
FML = Method("FML", "fml", TEACHERS, "fml")
FETCH_SGD = Method("FetchSGD", "fetch_sgd", STUDENT, "fetch_sgd")
FED_DROPOUT = Method("Federated Dropout", "fed_dropout", STUDENT, "fed_dropout")
METHODS = (
    LOCAL,
    CENTRAL,
    FED_AVG,
    OF_STUDENT,
    FED_KD,
    FML,
    FETCH_SGD,
    FED_DROPOUT,
)
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
PARTS = {
    "fed_kd": "all of them",
    "fed_kd,no_output": "without predictions",
    "fed_kd,no_hidden": "without hidden states (and attention, where there is any)",
    "fed_kd,not_adaptive": "without adaptive weights",
    "fed_kd,no_mutual": "the two task losses alone",
    f"fed_kd,{THROUGH_NORMALISER}": "with a gradient through the divisor",
}
# The paper says of none of these that teachers are worse; its code has the divisor's gradient.
NO_CLAIM = (FED_KD.run, LOCAL.run, f"fed_kd,{THROUGH_NORMALISER}", FML.run)
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
WHOLE = Method("whole students", "fed_kd,whole", TEACHERS)
LOWER_START = (Method("", "fed_kd,0.8-1", TEACHERS), Method("", "fed_kd,0.95-1", TEACHERS))
# Settings in which methods on the same clients may differ. `_are_comparable` looks at rounds, clients
# and the losses' divisor.
VARYING = (
    "algorithm.*",
    "rounds",
    "training.method",
    "training.fed_kd.*",
    "training.compression.*",
    "training.fetch_sgd.*",
    "training.fed_dropout.*",
    "tuning.*",
    "pools.main.model",
    "pools.main.server_learning_rate",
    "pools.main.cohort_size",
    "data.num_clients",
    "data.partition.num_clients",
)


class Panel(NamedTuple):
    """Methods on the same clients; their runs have the names of FedKD's runs with additions."""

    title: str
    experiment: str
    around: str = "{}"
    metric: str = "accuracy"
    others: tuple[str, ...] = ()  # further metrics, in a table of their own
    remark: str = ""  # in brackets behind the title, in verdicts

    def run(self, run: str) -> str:
        return self.around.format(run)


FEW_CLIENTS, MANY_CLIENTS = 4, 16
FEW = Panel(f"CIFAR-10, CNNs, {FEW_CLIENTS} clients", CIFAR)
MANY = Panel(f"CIFAR-10, CNNs, {MANY_CLIENTS} clients", CIFAR, "{}_16")
RESNETS = Panel(
    "CIFAR-10, ResNets, 4 clients", CIFAR, "resnet,{}", remark="two seeds, older losses"
)
SENTENCES = Panel(
    "ADE corpus, encoders, 4 clients",
    ADE,
    metric="f_score",
    others=("average_precision", "loss"),
    remark="F",
)
PANELS = (FEW, MANY, RESNETS, SENTENCES)
# F depends on a threshold, so sentences are judged without one too.
WITHOUT_THRESHOLD = SENTENCES._replace(metric="average_precision", remark="average precision")
METRICS = {
    "accuracy": "accuracy",
    "f_score": "F of sentences with an effect",
    "average_precision": "average precision",
    "loss": "100 times the loss",
}

# The paper's GB per client, and rounds (epochs): tables 2 and 3, by layers.
PAPER_COSTS = {
    "MIND": (3, {12: 2.05, 6: 1.03, 4: 0.69, 2: 0.35}),
    "SMM4H": (2, {12: 1.37, 6: 0.69, 4: 0.46, 2: 0.24}),
}
WIDTH = 768
# Six matrices, four of them square and two four times as wide, their biases, and two normalisations.
LAYER = 12 * WIDTH**2 + 13 * WIDTH


def fed_kd(records: Sequence[Record], notes: Notes) -> Page:
    """All of FedKD's, and the costs that follow from shapes."""
    plots: Plots = {}
    full = full_length(records)
    verdicts = _verdicts(full)
    parts = [*first_screen("FedKD", notes, verdicts), *_picture(full, notes, plots)]
    for panel in PANELS:
        if not any(_sample(full, panel, method) for method in METHODS):
            continue
        parts += [
            f"## {panel.title}",
            _methods(full, panel),
            *_without_threshold(full, panel, notes),
        ]
        if panel.around == "{}":
            parts += _students(full, panel)
            for metric in panel.others[:1]:
                measured = panel._replace(metric=metric)
                if any(_sample(full, measured, method) for method in METHODS):  # not in older runs
                    parts += _students(full, measured)
        parts += _parts(full, panel)
        if panel.around == "{}":
            parts += _thresholds(full, panel, notes)
            parts += _ranks(full, panel, notes, plots)
        parts.append(found(notes, panel.title))
    parts += ["## The paper's column of costs", notes["Costs"], paper_costs()]
    parts += endings(records, EXPERIMENTS, about_missing=notes["Not run"])
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("fed_kd", "FedKD", EXPERIMENTS, parts, plots, in_short, verdicts, missing)


def _verdicts(records: Sequence[Record]) -> list[Verdict]:
    """The paper's statements in each group of clients; the first group's are the main ones."""
    student, own_student = (method._replace(model=STUDENT) for method in (FED_KD, LOCAL))
    claims = [
        ("teachers are better than those that learn alone", FED_KD, LOCAL, "above 0"),
        ("teachers are as good as FedAvg of their network", FED_KD, FED_AVG, "about 0 or above"),
        ("teachers are better than FedAvg of the student's network", FED_KD, OF_STUDENT, "above 0"),
        ("teachers are better than FetchSGD", FED_KD, FETCH_SGD, "above 0"),
        ("teachers are better than Federated Dropout", FED_KD, FED_DROPOUT, "above 0"),
        ("teachers are better than their student", FED_KD, student, "above 0"),
        ("the student is better than without mutual learning", student, own_student, "above 0"),
    ]
    of_all = len(claims)
    claims += [
        (f"teachers are worse {text}", Method(text, run, TEACHERS), FED_KD, "below 0")
        for run, text in PARTS.items()
        if run not in NO_CLAIM
    ]
    lower = "teachers are worse if the energy threshold starts at 0.8 in place of 0.95"
    claims.append((lower, *LOWER_START, "below 0"))
    verdicts = []
    for panel in (FEW, MANY, RESNETS, WITHOUT_THRESHOLD, SENTENCES):
        for number, (text, plus, minus, expected) in enumerate(claims):
            if panel.run(plus.run) in planned(panel.experiment):
                differences = _differences(records, panel, plus, minus)
                shown = [] if isinstance(differences, str) else differences
                title = f"{panel.title} ({panel.remark})" if panel.remark else panel.title
                verdict = judge(f"{title}: {text}", shown, expected, panel.title)
                # What contradicts the paper is never only counted.
                is_of_group = number < of_all and panel != SENTENCES
                is_main = panel == FEW or is_of_group or verdict.word == DID_NOT_HOLD
                again = title if panel.remark else ""
                verdicts.append(verdict._replace(is_main=is_main, again=again))
    by_number = [
        ("teachers are as good", FED_KD, "about 0"),
        ("FedAvg of the student's network is worse", OF_STUDENT, "below 0"),
    ]
    for text, method, expected in by_number:
        text = f"{FEW.title}: {text} with {MANY_CLIENTS} clients, as many steps each"
        verdicts.append(judge(text, _by_more_clients(records, method), expected, MANY.title))
    return verdicts


def _by_more_clients(records: Sequence[Record], method: Method) -> list[float]:
    """A method with many clients less itself with few, if clients take as many steps in both."""
    many, few = (_sample(records, panel, method) for panel in (MANY, FEW))
    if not (many and few) or few.rounds * MANY_CLIENTS != many.rounds * FEW_CLIENTS:
        return []
    return [a - b for a, b in common_seeds(many, few)]


def _methods(records: Sequence[Record], panel: Panel) -> str:
    rows = []
    for method in METHODS:
        if panel.run(method.run) not in planned(panel.experiment):
            continue
        shown = _sample(records, panel, method)
        # Bytes of other numbers of rounds are not compared.
        whole = _comparable(records, panel, FED_AVG, (method, shown)) if shown else None
        sent = 0.0 if shown and method == LOCAL else _megabytes(shown)
        if method == CENTRAL:
            sent = None  # its data are sent
        difference = "" if method == FED_AVG else _difference(records, panel, method, FED_AVG)
        quality = _quality(records, panel, method)
        seeds = listed(shown.seeds) if shown else ""
        rows.append([method.name, *quality, *_cost(sent, _megabytes(whole)), difference, seeds])
    headings = ["Method", METRICS[panel.metric], "the student's", "MB", "of FedAvg's"]
    return table([*headings, "to FedAvg, teacher's network", "Seeds"], rows)


def _without_threshold(records: Sequence[Record], panel: Panel, notes: Notes) -> list[str]:
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
            if _sample(records, measured, method) is None:
                continue
            name = method.name if method in METHODS else f"FedKD {method.name}"
            value, student = _quality(records, measured, method)
            differences = [
                "" if method == base else _difference(records, measured, method, base)
                for base in (LOCAL, FED_KD)
            ]
            if student and method != FED_KD:
                both = of_student(method), of_student(FED_KD)
                differences.append(_difference(records, measured, *both))
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


def _students(records: Sequence[Record], panel: Panel) -> list[str]:
    """Students' networks: what teachers gain from each, and each from its teachers."""
    rows, runs = [], planned(panel.experiment)
    for name, (of_fed_avg, of_fed_kd) in STUDENTS.items():
        if of_fed_kd not in runs:
            continue
        alone, taught = Method(name, of_fed_avg, STUDENT), Method(name, of_fed_kd, STUDENT)
        teachers = taught._replace(model=TEACHERS)
        shown = [accuracy(_sample(records, panel, each)) for each in (alone, taught, teachers)]
        differences = [
            _difference(records, panel, taught, alone),
            _difference(records, panel, teachers, LOCAL),
        ]
        rows.append([name, *shown, *differences])
    headings = ["Student", "by FedAvg", "by FedKD", "FedKD's teachers"]
    headings += ["by FedKD, to FedAvg", "teachers, to Local"]
    return [
        f"**Students' networks, {METRICS[panel.metric]}, {panel.title}**",
        table(headings, rows),
    ]


def _parts(records: Sequence[Record], panel: Panel) -> list[str]:
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
                *(_difference(records, panel, *pair) for pair in zip(both, base, strict=True)),
                "–" if run in NO_CLAIM[2:] else "below 0",
            ]
        differences.insert(2, _difference(records, panel, both[1], OF_STUDENT))
        sent = _megabytes(_sample(records, panel, both[0]))
        cost = "–" if sent is None else f"{sent:,.2f}"
        rows.append([text, *_quality(records, panel, both[0]), cost, *differences])
    headings = ["Losses", f"teachers' {METRICS[panel.metric]}", "the student's", "MB"]
    headings += ["teachers, to all losses", "student, to all losses"]
    headings += ["student, to FedAvg of its network", "paper (teachers)"]
    return [f"**Each loss left out, {panel.title}**", table(headings, rows)]


def _thresholds(records: Sequence[Record], panel: Panel, notes: Notes) -> list[str]:
    runs = planned(panel.experiment)
    swept = [(varied, run) for varied, all_ in SWEEPS.items() for run in all_ if run in runs]
    if WHOLE.run not in runs:
        return []
    whole = _megabytes(_sample(records, panel, WHOLE))
    rows = []
    for varied, run in (*swept, ("nothing compressed", WHOLE.run)):
        method = Method(varied, run, TEACHERS)
        thresholds = THRESHOLDS.get(run.partition(",")[2], DEFAULT_THRESHOLDS)
        shown, difference = [f"{share:g}" for share in thresholds], ""
        if run == WHOLE.run:
            shown = ["", ""]
        else:
            difference = _difference(records, panel, method, WHOLE)
        cost = _cost(_megabytes(_sample(records, panel, method)), whole)
        rows.append([varied, *shown, *_quality(records, panel, method), *cost, difference])
    headings = ["Varied", "T at the start", "T at the end", f"teachers' {METRICS[panel.metric]}"]
    headings += ["the student's", "MB", "of whole students'", "to whole students"]
    return [
        f"**Energy thresholds, {panel.title}**",
        table(headings, rows),
        notes["Thresholds"] if len(swept) > 1 else "",
    ]


def _ranks(records: Sequence[Record], panel: Panel, notes: Notes, plots: Plots) -> list[str]:
    """Ranks by round, and spectra of the first and last round, of the newest run that recorded them.

    First those of clients' updates, then those of gradients, if the run recorded them too.
    """
    looked = [
        record
        for record in records
        if (record.experiment, record.run) == (panel.experiment, panel.run(FED_KD.run))
        and record.finished
        and record.spectra.get(STUDENT)
    ]
    if not looked:
        return []
    record = max(looked, key=lambda record: record.date or "")
    parts = _ranks_of(record, record.spectra[STUDENT], panel, "updates", plots)
    if STUDENT in record.gradient_spectra:
        parts += _ranks_of(record, record.gradient_spectra[STUDENT], panel, "gradients", plots)
    return [*parts, notes["Ranks"]]


def _ranks_of(
    record: Record, spectra: Mapping[str, dict], panel: Panel, of: str, plots: Plots
) -> list[str]:
    """Table and plot of clients' `of`, "updates" or "gradients"."""
    layers = {
        layer: Spectrum(*(tuple(parts[part]) for part in ("round", "rank", "first", "last")))
        for layer, parts in spectra.items()
    }
    shown = next(iter(layers.values())).rounds
    link = record.config["training"]["compression"]
    shares = [
        float(threshold(link["start"], link["end"], number / record.rounds)) for number in shown
    ]
    rows = [
        [
            f"`{layer}`",
            str(len(spectrum.first)),
            *(f"{spectrum.ranks[place]:.1f}" for place in (0, -1)),
            *(
                str(int(rank_for(np.array(values), shares[0])))
                for values in (spectrum.first, spectrum.last)
            ),
        ]
        for layer, spectrum in layers.items()
    ]
    ends = [f"round {number}" for number in (shown[0], shown[-1])]
    headings = [f"{end}, T = {shares[place]:.3f}" for end, place in zip(ends, (0, -1), strict=True)]
    headings += [f"{end}, T = {shares[0]:.3f}, mean spectrum" for end in ends]
    name = f"{panel.experiment}_{'' if of == 'updates' else 'gradient_'}ranks.png"
    plots[name] = lambda: figures.ranks_plot(layers)
    return [
        f"**Singular values of {of} that the energy threshold keeps, {panel.title}**",
        table(["Layer", "all", *headings], rows),
        image(name, f"Ranks by round and singular values of clients' {of}"),
    ]


def _picture(records: Sequence[Record], notes: Notes, plots: Plots) -> list[str]:
    """Quality against bytes, a panel for each group of clients that has runs."""
    panels: dict[str, dict[str, Cost]] = {}
    levels = {}
    for panel in PANELS:
        main = _sample(records, panel, FED_KD)
        costs = {}
        for method in METHODS:
            shown = _sample(records, panel, method)
            if not shown or (main and not _have_equal_settings((FED_KD, main), (method, shown))):
                continue
            if method == LOCAL:
                levels[panel.title] = shown.mean
            elif method != CENTRAL and (sent := _megabytes(shown)):
                # FedAvg has two points, one for each network.
                is_second = "student" in method.run
                cost = Cost(method.style, sent, shown.mean, shown.deviation, is_second)
                costs[method.name] = cost
        if len(costs) > 1:  # one method alone is compared with nothing
            panels[panel.title] = costs
    if not panels:
        return []
    drawn = {title: levels[title] for title in panels if title in levels}
    plots["fed_kd.png"] = lambda: figures.costs_plot(panels, drawn, LOCAL.name)
    return [
        image("fed_kd.png", "Quality against bytes of FedKD and the methods beside it"),
        notes["The plot of costs"],
    ]


def paper_costs() -> str:
    """GB per client from an encoder's shapes, beside the paper's, and the shares that are left."""
    rows = []
    for layers in next(iter(PAPER_COSTS.values()))[1]:
        row = [str(layers)]
        for epochs, paper in PAPER_COSTS.values():
            cost = layers * LAYER * 4 * 2 * epochs / 1e9
            row += [f"{cost:.3f}", f"{paper[layers]:.2f}", f"{paper[layers] - cost:+.3f}"]
        rows.append(row)
    headings = ["Layers"]
    for name, (epochs, _) in PAPER_COSTS.items():
        headings += [f"{name}, {epochs} epochs: derived", "paper", "residual"]
    return table(headings, rows)


def _quality(records: Sequence[Record], panel: Panel, method: Method) -> list[str]:
    """The model's quality, and the student's if the model is a personal one."""
    shown = _sample(records, panel, method)
    beside = None
    if shown and method.model == TEACHERS and method not in (LOCAL, CENTRAL):
        beside = _sample(records, panel, method._replace(model=STUDENT))
    return [accuracy(shown), accuracy(beside) if beside else ""]


def _cost(megabytes: float | None, whole: float | None) -> list[str]:
    """Megabytes sent, and their share of another cost."""
    if megabytes is None:
        return ["–", "–"]
    return [f"{megabytes:,.2f}", f"{100 * megabytes / whole:.1f} %" if whole else "–"]


def _difference(records: Sequence[Record], panel: Panel, plus: Method, minus: Method) -> str:
    """'+0.31 ± 0.20', or why there is none."""
    differences = _differences(records, panel, plus, minus)
    return differences if isinstance(differences, str) else mean_difference(differences)


def _differences(
    records: Sequence[Record], panel: Panel, plus: Method, minus: Method
) -> list[float] | str:
    """Differences in the seeds that both have, or the reason why there are none."""
    ours, other = _sample(records, panel, plus), _sample(records, panel, minus)
    if ours is None or other is None:
        return ""
    are_equal = _have_equal_settings((plus, ours), (minus, other))
    pairs = common_seeds(ours, other) if are_equal else []
    return [a - b for a, b in pairs] or OTHER_SETTINGS


def _comparable(
    records: Sequence[Record], panel: Panel, method: Method, other: tuple[Method, Sample]
) -> Sample | None:
    """The method's sample, unless it is not comparable with the other one."""
    shown = _sample(records, panel, method)
    return shown if shown and _are_comparable((method, shown), other) else None


def _have_equal_settings(one: tuple[Method, Sample], other: tuple[Method, Sample]) -> bool:
    """Whether two methods differ only in settings that methods on the same clients may differ in."""
    return equal_but(one[1], other[1], VARYING) and _are_comparable(one, other)


def _are_comparable(*sides: tuple[Method, Sample]) -> bool:
    """Whether passes, clients and the gradient through the losses' divisor are the same."""
    passes, divisors, clients = set(), set(), set()
    for method, shown in sides:
        if method != CENTRAL:
            data = shown.records[0].config["data"]
            clients.add(data.get("num_clients") or data["partition"]["num_clients"])
        # Rounds of FetchSGD have one gradient of a part of the examples.
        is_sketch = method.run == "fetch_sgd"
        passes.add(shown.rounds / (FETCH_SGD_ROUNDS if is_sketch else 1))
        own = shown.records[0].config["training"].get("fed_kd")
        if own and own["adaptive"] != "none" and (own["output_weight"] or own["hidden_weight"]):
            divisors.add(own.get("detach_normaliser", False))
    is_the_question = any(THROUGH_NORMALISER in method.run for method, _ in sides)
    return len(passes) == len(clients) == 1 and (len(divisors) < 2 or is_the_question)


def _sample(records: Sequence[Record], panel: Panel, method: Method) -> Sample | None:
    run = panel.run(method.run)
    return sample(records, panel.experiment, run, method.model, metric=panel.metric)


def _megabytes(shown: Sample | None) -> float | None:
    """Megabytes that a client sends and receives in the run, if all take part in every round."""
    if shown is None:
        return None
    sent: list[Mapping[str, int]] = [r.bytes[STUDENT] for r in shown.records if STUDENT in r.bytes]
    if not sent:
        return None
    return statistics.fmean(sum(ways.values()) for ways in sent) * shown.rounds / 1e6
