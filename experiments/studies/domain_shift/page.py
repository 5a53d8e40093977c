"""The codistillation paper on text of two domains: its Table 2 and its Figure 3."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.configs.text_domain_shift import MORE_ROUNDS, TEXTS, get_runs
from experiments.studies import figures
from experiments.studies.archive import Record
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.samples import Curve, Sample, common_seeds, curve, sample, samples
from experiments.studies.sections.cells import NOT_RUN, accuracy
from experiments.studies.sections.endings import endings, full_length, not_run
from experiments.studies.sections.markdown import image, table
from experiments.studies.settings import read_by_fed_avg
from experiments.studies.verdicts import Verdict, judge
from fedcodist.config.registry import BASELINE, METHOD_NAMES, METHODS
from fedcodist.report.spread import mean_difference
from fedcodist.report.tables_domains import mean_change

MODELS = ("small", "large")
MERGED = "merged_codistillation"
STACKOVERFLOW = "stackoverflow_domain_shift"
EXPERIMENT = "text_domain_shift"
EXPERIMENTS = (EXPERIMENT, STACKOVERFLOW)
# Model -> MergedCodist less FedAvg on Stack Overflow's other domain, in the paper's Table 2.
PAPER_GAINS = {"small": "+5.03", "large": "+0.50"}
TITLES = {
    "python_source": "Python's standard library: prose and code",
    "stackexchange": "Stack Exchange: answers and questions",
    f"stackexchange,{MORE_ROUNDS}": f"Stack Exchange, {MORE_ROUNDS} rounds",
}


def domain_shift(records: Sequence[Record], notes: Notes) -> Page:
    """Each text's table and plot, and the paper's numbers on Stack Overflow."""
    plots: Plots = {}
    full = full_length(records)
    recorded = {
        text: title
        for text, title in TITLES.items()
        if any(f"{method},{text}" in _recorded(full) for method in METHODS)
    }
    verdicts = [v for text, title in recorded.items() for v in _verdicts(full, text, title)]
    parts = first_screen("Domain shift in text", notes, verdicts)
    for text, title in recorded.items():
        parts += [f"## {title}", *_text(full, text, title, notes, plots), found(notes, title)]
    parts += ["## The paper's: Stack Overflow", notes["Stack Overflow"], _paper()]
    parts += [
        found(notes, "Settings"),
        *endings(records, EXPERIMENTS, about_missing=notes["Not run"]),
    ]
    title = "Codistillation of text of two domains"
    missing = not_run(records, EXPERIMENTS)
    in_short = found(notes, IN_SHORT)
    return Page("domain_shift", title, EXPERIMENTS, parts, plots, in_short, verdicts, missing)


def _text(
    records: Sequence[Record], text: str, title: str, notes: Notes, plots: Plots
) -> list[str]:
    """`text`: what follows the method in the runs' names."""
    domains = TEXTS[text.split(",")[0]]
    methods = [method for method in METHODS if f"{method},{text}" in get_runs()]
    splits = [*(f"test_{domain}" for domain in domains), "test"]
    rows = [
        [
            METHOD_NAMES[method],
            model,
            *(_cell(records, f"{method},{text}", model, split) for split in splits),
        ]
        for method in methods
        for model in MODELS
    ]
    headings = [*(domain.capitalize() for domain in domains), "Mixed"]
    name = f"{EXPERIMENT}_{text.replace(',', '_')}.png"
    panels = {
        f"{model} model, {domain}{'' if domain == home else ' (never trained on)'}": curves
        for model, home in zip(MODELS, domains, strict=True)
        for domain in domains
        if (curves := _curves(records, text, model, f"held_out_{domain}"))
    }
    parts = [
        f"The small model's clients have {domains[0]}, the large one's {domains[1]}.",
        table(["Method", "Model", *headings], rows, texts=2),
        "Gains over FedAvg, in points:",
        table(["Method", "Model", *headings], _gains(records, text, methods, splits), texts=2),
    ]
    if methods == list(METHODS) and (changes := _changes(records, text, domains)):
        parts += [
            notes["Changes"],
            table(["Method", "Model", *headings[:2]], changes, texts=2),
        ]
    if panels:
        plots[name] = lambda: figures.curves_plot(panels)
        parts += [image(name, f"Accuracy by round in both domains, {title}"), notes["The plot"]]
    return parts


def _cell(records: Sequence[Record], run: str, model: str, split: str) -> str:
    """'25.50 ± 0.20 / 310'."""
    shown = sample(records, EXPERIMENT, run, model, split)
    if shown is None:
        return NOT_RUN
    loss = sample(records, EXPERIMENT, run, model, split, "loss")
    perplexity = math.exp(loss.mean / 100) if loss else math.nan  # a Sample is in %
    return f"{accuracy(shown)} / {perplexity:,.0f}"


def _gains(
    records: Sequence[Record], text: str, methods: Sequence[str], splits: Sequence[str]
) -> list[list[str]]:
    rows = []
    for method in methods[1:]:
        for model in MODELS:
            gains = [_gain(records, method, text, model, split) for split in splits]
            cells = [mean_difference(gain) if gain else NOT_RUN for gain in gains]
            rows.append([METHOD_NAMES[method], model, *cells])
    return rows


def _gain(records: Sequence[Record], method: str, text: str, model: str, split: str) -> list[float]:
    """Gains over FedAvg in the seeds that both have; empty if either was not run."""
    ours = sample(records, EXPERIMENT, f"{method},{text}", model, split)
    theirs = ours and _of_fed_avg(records, ours, text, model, split)
    return [a - b for a, b in common_seeds(ours, theirs)] if ours and theirs else []


def _of_fed_avg(
    records: Sequence[Record], ours: Sample, text: str, model: str, split: str
) -> Sample | None:
    """FedAvg's sample with the same values of all settings that both methods read."""
    wanted = read_by_fed_avg(ours.records[0], model)
    of_fed_avg = samples(records, EXPERIMENT, f"{BASELINE},{text}", model, split)
    return next((s for s in of_fed_avg if read_by_fed_avg(s.records[0], model) == wanted), None)


def _changes(records: Sequence[Record], text: str, domains: Sequence[str]) -> list[list[str]]:
    """A table row for each method and model; empty if these rounds were not evaluated."""
    rows = []
    for method in METHODS:
        for model in MODELS:
            cells = []
            for domain in domains:
                by_seed = _seeds_changes(records, f"{method},{text}", model, f"held_out_{domain}")
                cells.append(" / ".join(map(mean_difference, zip(*by_seed, strict=True))) or "-")
            rows.append([METHOD_NAMES[method], model, *cells])
    return rows if any(cell != "-" for row in rows for cell in row[2:]) else []


def _seeds_changes(
    records: Sequence[Record], run: str, model: str, split: str
) -> list[tuple[float, float]]:
    """For each seed the change at once and later, in points; means over codistillations."""
    shown = sample(records, EXPERIMENT, run, model, split)
    changes = []
    for record in shown.records if shown else ():
        points = record.curve.get(model, {}).get(split, {"round": [], "accuracy": []})
        around = record.config["evaluation"]["around"]
        for index in range(len(record.seeds)):
            values = [100 * each[index] for each in points["accuracy"]]
            by_round = dict(zip(points["round"], values, strict=True))
            change = mean_change(by_round, record.config["algorithm"]["period"], around["after"])
            changes += [change] if change else []
    return changes


def _curves(records: Sequence[Record], text: str, model: str, split: str) -> dict[str, Curve]:
    return {
        method: course
        for method in METHODS
        if (course := curve(records, EXPERIMENT, f"{method},{text}", model, split))
    }


def _paper() -> str:
    """The paper's Table 2 on Stack Overflow."""
    by_method: dict[str, list[str]] = {}
    sets: dict[str, None] = {}
    with Path(__file__).with_name("table_2.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            sets[line["test set"].capitalize()] = None
            cells = by_method.setdefault(METHOD_NAMES[line["method"]], [])
            cells.append(f"{line['small']} / {line['large']}")
    return table(["Method", *sets], [[method, *cells] for method, cells in by_method.items()])


def _verdicts(records: Sequence[Record], text: str, title: str) -> list[Verdict]:
    """Whether merging lifts models in the domain that they never train on, as in the paper's table."""
    domains = TEXTS[text.split(",")[0]]
    verdicts = []
    for model, unseen in zip(MODELS, reversed(domains), strict=True):
        claim = f"{title}: merging lifts the {model} model on {unseen}, which it never trains on"
        gains = _gain(records, MERGED, text, model, f"test_{unseen}")
        verdict = judge(claim, gains, "above 0", title)
        again = f"{MORE_ROUNDS} rounds" if text == f"stackexchange,{MORE_ROUNDS}" else ""
        verdicts.append(verdict._replace(paper=PAPER_GAINS[model], again=again))
    return verdicts


def _recorded(records: Sequence[Record]) -> set[str]:
    return {record.run for record in records if record.experiment == EXPERIMENT and record.finished}
