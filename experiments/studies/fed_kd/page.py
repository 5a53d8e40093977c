"""FedKD: quality against bytes, each loss left out, energy thresholds, ranks; the paper's costs."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.configs.cifar_fed_kd import THRESHOLDS
from experiments.studies import figures
from experiments.studies.figures import Cost, Spectrum
from experiments.studies.pooling import Sample, sample
from experiments.studies.records import Record
from experiments.studies.sections.cells import accuracy, mean_difference
from experiments.studies.sections.commands import planned
from experiments.studies.sections.footnotes import remarks
from experiments.studies.sections.markdown import Plots, image, table
from experiments.studies.settings import settings, without
from fedcodist.compression.svd import rank_for, threshold

CIFAR, ADE = "cifar_fed_kd", "ade_fed_kd"
EXPERIMENTS = (CIFAR, ADE)
TEACHERS, STUDENT = "main_teachers", "main"


class Method(NamedTuple):
    """A row: its name, its run, and the model that is tested."""

    name: str
    run: str
    model: str


LOCAL = Method("Local", "fed_kd,no_mutual", TEACHERS)
FED_AVG = Method("FedAvg, teacher's network", "fed_avg,teacher", STUDENT)
FED_KD = Method("FedKD", "fed_kd", TEACHERS)
METHODS = (
    LOCAL,
    FED_AVG,
    Method("FedAvg, student's network", "fed_avg,student", STUDENT),
    FED_KD,
    Method("FML", "fml", TEACHERS),
    Method("FetchSGD", "fetch_sgd", STUDENT),
    Method("Federated Dropout", "fed_dropout", STUDENT),
)
PARTS = {
    "fed_kd": "all of them",
    "fed_kd,no_output": "without predictions",
    "fed_kd,no_hidden": "without hidden states (and attention, where there is any)",
    "fed_kd,not_adaptive": "without adaptive weights",
    "fed_kd,no_mutual": "the two task losses alone",
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
WHOLE = Method("whole students", "fed_kd,whole", TEACHERS)
# What methods on the same clients may differ in. FetchSGD takes more rounds of one gradient each.
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
)


class Panel(NamedTuple):
    """Methods on the same clients, whose runs are named as FedKD's with more around it."""

    title: str
    experiment: str
    around: str = "{}"
    metric: str = "accuracy"

    def run(self, run: str) -> str:
        return self.around.format(run)


PANELS = (
    Panel("CIFAR-10, CNNs, 4 clients", CIFAR),
    Panel("CIFAR-10, CNNs, 16 clients", CIFAR, "{}_16"),
    Panel("CIFAR-10, ResNets, 4 clients", CIFAR, "resnet,{}"),
    Panel("ADE corpus, encoders, 4 clients", ADE, metric="f_score"),
)
# What a command that is shown lacks.
NEEDS = {
    ADE: "These start from an encoder that is pre-trained first: "
    f"`experiments/configs/{ADE}.py` has the command, whose file `--config.data.encoder` names."
}
METRICS = {"accuracy": "accuracy", "f_score": "F of sentences with an effect"}

# The paper's GB per client, and rounds (epochs): tables 2 and 3, by layers.
PAPER_COSTS = {
    "MIND": (3, {12: 2.05, 6: 1.03, 4: 0.69, 2: 0.35}),
    "SMM4H": (2, {12: 1.37, 6: 0.69, 4: 0.46, 2: 0.24}),
}
WIDTH = 768
# Six matrices, four of them square and two four times as wide, their biases, and two normalisations.
LAYER = 12 * WIDTH**2 + 13 * WIDTH


def fed_kd(records: Sequence[Record], notes: dict[str, str], plots: Plots) -> list[str]:
    """All of FedKD's; where nothing was run, the commands and the costs that follow from shapes."""
    parts = [
        "## FedKD",
        "Private teachers and one small student that travels (Wu et al., 2022): test results in % after "
        "the last round. Where clients keep teachers, these are tested, the mean over clients, and the "
        "student that they share stands beside it. *Local* are the teachers of FedKD without what "
        "models learn from each other. MB are what a client sends and receives in the run, as measured "
        "where links are compressed. Differences are *within seeds*, their intervals Student's t over "
        "the seeds (95 %).",
        *_picture(records, plots),
    ]
    for experiment in EXPERIMENTS:
        first, *others = (panel for panel in PANELS if panel.experiment == experiment)
        parts.append(f"### {first.title}")
        if any(record.experiment == experiment and record.finished for record in records):
            parts += [_methods(records, first), *_parts(records, first)]
            parts += [*_thresholds(records, first), *_ranks(records, first, plots)]
        for panel in others:
            if any(_sample(records, panel, method) for method in METHODS):
                parts += [f"### {panel.title}", _methods(records, panel)]
        parts += remarks(records, experiment, planned(experiment), (STUDENT,))
        parts += [NEEDS.get(experiment, ""), notes.get(experiment, "")]
    return [*parts, *paper_costs()]


def _methods(records: Sequence[Record], panel: Panel) -> str:
    whole = _megabytes(_sample(records, panel, FED_AVG))
    rows = []
    for method in METHODS:
        if panel.run(method.run) not in planned(panel.experiment):
            continue
        own = _sample(records, panel, method)
        sent = 0.0 if own and method == LOCAL else _megabytes(own)
        difference = "" if method == FED_AVG else _difference(records, panel, method, FED_AVG)
        quality = _quality(records, panel, method)
        rows.append([method.name, *quality, *_cost(sent, whole), difference])
    headings = ["Method", METRICS[panel.metric], "the student's", "MB", "of FedAvg's"]
    return table([*headings, "to FedAvg, teacher's network"], rows)


def _parts(records: Sequence[Record], panel: Panel) -> list[str]:
    """What is lost with each of the losses; the paper's remarks are on teachers."""
    rows = []
    for run, text in PARTS.items():
        both = [Method(text, run, model) for model in (TEACHERS, STUDENT)]
        base = [FED_KD._replace(model=model) for model in (TEACHERS, STUDENT)]
        differences = ["", "", ""]
        if run != FED_KD.run:
            differences = [
                *(_difference(records, panel, *each) for each in zip(both, base, strict=True)),
                "below 0",
            ]
        sent = _megabytes(_sample(records, panel, both[0]))
        cost = "–" if sent is None else f"{sent:,.2f}"
        rows.append([text, *_quality(records, panel, both[0]), cost, *differences])
    headings = ["Losses", f"teachers' {METRICS[panel.metric]}", "the student's", "MB"]
    headings += ["teachers, to all losses", "student, to all losses", "paper (teachers)"]
    return [f"**Each loss left out, {panel.title}**", table(headings, rows)]


def _thresholds(records: Sequence[Record], panel: Panel) -> list[str]:
    runs = planned(panel.experiment)
    swept = [(varied, run) for varied, own in SWEEPS.items() for run in own if run in runs]
    if WHOLE.run not in runs:
        return []
    whole = _megabytes(_sample(records, panel, WHOLE))
    rows = []
    for varied, run in (*swept, ("nothing compressed", WHOLE.run)):
        method = Method(varied, run, TEACHERS)
        thresholds = THRESHOLDS.get(run.partition(",")[2], DEFAULT_THRESHOLDS)
        shown, difference = [f"{each:g}" for each in thresholds], ""
        if run == WHOLE.run:
            shown = ["", ""]
        else:
            difference = _difference(records, panel, method, WHOLE)
        cost = _cost(_megabytes(_sample(records, panel, method)), whole)
        rows.append([varied, *shown, *_quality(records, panel, method), *cost, difference])
    headings = ["Varied", "T at the start", "T at the end", f"teachers' {METRICS[panel.metric]}"]
    headings += ["the student's", "MB", "of whole students'", "to whole students"]
    told = ["The paper finds that quality falls quickly below a start of 0.95."]
    return [
        f"**Energy thresholds, {panel.title}**",
        table(headings, rows),
        *(told if len(swept) > 1 else []),
    ]


def _ranks(records: Sequence[Record], panel: Panel, plots: Plots) -> list[str]:
    """Ranks by round and spectra at both ends, of the newest run that looked at them."""
    found = [
        record
        for record in records
        if (record.experiment, record.run) == (panel.experiment, panel.run(FED_KD.run))
        and record.finished
        and record.spectra.get(STUDENT)
    ]
    if not found:
        return []
    record = max(found, key=lambda one: one.date or "")
    layers = {
        layer: Spectrum(*(tuple(own[part]) for part in ("round", "rank", "first", "last")))
        for layer, own in record.spectra[STUDENT].items()
    }
    shown = next(iter(layers.values())).rounds
    link = record.config["training"]["compression"]
    shares = [
        float(threshold(link["start"], link["end"], number / record.rounds)) for number in shown
    ]
    rows = [
        [
            f"`{layer}`",
            str(len(own.first)),
            *(f"{own.ranks[place]:.1f}" for place in (0, -1)),
            *(str(int(rank_for(np.array(part), shares[0]))) for part in (own.first, own.last)),
        ]
        for layer, own in layers.items()
    ]
    ends = [f"round {number}" for number in (shown[0], shown[-1])]
    headings = [f"{end}, T = {shares[place]:.3f}" for end, place in zip(ends, (0, -1), strict=True)]
    headings += [f"{end}, T = {shares[0]:.3f}, mean spectrum" for end in ends]
    name = f"{panel.experiment}_ranks.png"
    plots[name] = lambda: figures.ranks_plot(layers)
    return [
        f"**Singular values that the energy threshold keeps, {panel.title}**",
        table(["Layer", "all", *headings], rows),
        image(name, "Ranks by round and singular values of clients' updates"),
        f"Left: means over clients and {len(record.seeds)} seed{'s' * (len(record.seeds) > 1)}, whether "
        "factors are sent or, where these are more numbers, the tensor. Beside it: singular values of "
        f"clients' updates in rounds {shown[0]} and {shown[-1]}. The threshold rises with the rounds, "
        "and ranks with it; the last two columns hold it fixed, as the paper's figure does, which finds "
        "that more are needed late, and fewest by feed-forward layers.",
    ]


def _picture(records: Sequence[Record], plots: Plots) -> list[str]:
    """Quality against bytes, a panel for each group of clients that something was run of."""
    panels: dict[str, dict[str, Cost]] = {}
    levels = {}
    for panel in PANELS:
        if local := _sample(records, panel, LOCAL):
            levels[panel.title] = local.mean
        costs = {}
        for method in METHODS:
            own = _sample(records, panel, method)
            if method != LOCAL and own and (sent := _megabytes(own)):
                costs[method.name] = Cost(sent, own.mean, own.deviation)
        if costs:
            panels[panel.title] = costs
    if not panels:
        return []
    shown = {title: levels[title] for title in panels if title in levels}
    plots["fed_kd.png"] = lambda: figures.costs_plot(panels, shown, LOCAL.name)
    return [
        image("fed_kd.png", "Quality against bytes of FedKD and the methods beside it"),
        "Accuracy, of the ADE corpus F of sentences with an effect; bars: ± one standard deviation "
        "over the seeds. Dashed: Local, which sends nothing.",
    ]


def paper_costs() -> list[str]:
    """GB per client as they follow from an encoder's shapes, beside the paper's, and what is left."""
    rows = []
    for layers in next(iter(PAPER_COSTS.values()))[1]:
        row = [str(layers)]
        for epochs, told in PAPER_COSTS.values():
            cost = layers * LAYER * 4 * 2 * epochs / 1e9
            row += [f"{cost:.3f}", f"{told[layers]:.2f}", f"{told[layers] - cost:+.3f}"]
        rows.append(row)
    headings = ["Layers"]
    for name, (epochs, _) in PAPER_COSTS.items():
        headings += [f"{name}, {epochs} epochs: derived", "paper", "residual"]
    return [
        "### The paper's column of costs",
        f"GB per client of FedAvg: layers of {LAYER:,} float32 numbers (width {WIDTH}), both ways, once "
        "an epoch. Embeddings stay where they are, and heads are left out. The paper's footnote names "
        "updated token embeddings for its column; the residual is not fitted.",
        table(headings, rows),
    ]


def _quality(records: Sequence[Record], panel: Panel, method: Method) -> list[str]:
    """The model's, and the student's where the model is the clients' own."""
    own = _sample(records, panel, method)
    if own is None:
        return ["not run", ""]
    beside = None
    if method.model == TEACHERS and method != LOCAL:
        beside = _sample(records, panel, method._replace(model=STUDENT))
    return [accuracy(own), accuracy(beside) if beside else ""]


def _cost(megabytes: float | None, whole: float | None) -> list[str]:
    """What is sent, and its share of another cost."""
    if megabytes is None:
        return ["–", "–"]
    return [f"{megabytes:,.2f}", f"{100 * megabytes / whole:.1f} %" if whole else "–"]


def _difference(records: Sequence[Record], panel: Panel, plus: Method, minus: Method) -> str:
    """'+0.31 ± 0.20', or why there is none."""
    one, other = _sample(records, panel, plus), _sample(records, panel, minus)
    if one is None or other is None:
        return ""
    mine, theirs = (without(settings(each.records[0]), VARYING) for each in (one, other))
    by_seed = [dict(zip(each.seeds, each.values, strict=True)) for each in (one, other)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    if mine != theirs or not seeds:
        return "no runs with equal settings"
    values = [by_seed[0][seed] - by_seed[1][seed] for seed in seeds]
    return mean_difference(values)


def _sample(records: Sequence[Record], panel: Panel, method: Method) -> Sample | None:
    run = panel.run(method.run)
    return sample(records, panel.experiment, run, method.model, metric=panel.metric)


def _megabytes(one: Sample | None) -> float | None:
    """What a client sends and receives in the run, everybody taking part in every round."""
    if one is None:
        return None
    each: list[Mapping[str, int]] = [r.bytes[STUDENT] for r in one.records if STUDENT in r.bytes]
    if not each:
        return None
    return statistics.fmean(sum(ways.values()) for ways in each) * one.rounds / 1e6
