"""The codistillation paper's domain shift: its Table 2, what codistillations change, its Figure 3."""

import math
from collections.abc import Sequence

from experiments.configs.text_domain_shift import MORE_ROUNDS, TEXTS, get_runs
from experiments.studies import figures
from experiments.studies.codistillation.paper_numbers import DOMAIN_SHIFT, MODELS
from experiments.studies.pooling import Curve, Sample, curve, sample, samples
from experiments.studies.records import Record
from experiments.studies.sections.cells import accuracy, mean_difference
from experiments.studies.sections.commands import planned, sweep
from experiments.studies.sections.footnotes import remarks
from experiments.studies.sections.markdown import Plots, image, table
from experiments.studies.settings import read_by_fed_avg
from fedcodist.config.registry import BASELINE, METHOD_NAMES, METHODS
from fedcodist.report.tables_domains import mean_change

EXPERIMENT = "text_domain_shift"
TITLES = {
    "python_source": "Python's standard library: prose and code",
    "stackexchange": "Stack Exchange: answers and questions",
    f"stackexchange,{MORE_ROUNDS}": f"Stack Exchange, {MORE_ROUNDS} rounds",
}


def domain_shift(records: Sequence[Record], notes: dict[str, str], plots: Plots) -> list[str]:
    """Each text's table and plot, and the paper's numbers on Stack Overflow."""
    parts = [
        "## Domain shift in text",
        "Clients of one domain train the small LSTM, others of another domain the large one, and the "
        "models teach each other on unlabelled text of both (the codistillation paper's Table 2 and "
        "Figure 3): accuracy in vocabulary in % on test users and, behind the stroke, perplexity of a "
        "token; the *mixed* set is both domains' text. Differences are within seeds, their intervals "
        "Student's t (95 %).",
    ]
    if not any(record.experiment == EXPERIMENT and record.finished for record in records):
        return [*parts, f"Not run.\n\n{sweep(EXPERIMENT, planned(EXPERIMENT))}"]
    for text, title in TITLES.items():
        parts += [f"### {title}", *_text(records, text, title, plots)]
    return [*parts, *_paper(), notes.get(EXPERIMENT, "")]


def _text(records: Sequence[Record], text: str, title: str, plots: Plots) -> list[str]:
    """`text`: what follows the method in the runs' names."""
    domains = TEXTS[text.split(",")[0]]
    methods = [method for method in METHODS if f"{method},{text}" in get_runs()]
    runs = [f"{method},{text}" for method in methods]
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
        f"{model} model, {domain}{'' if domain == own else ' (never trained on)'}": found
        for model, own in zip(MODELS, domains, strict=True)
        for domain in domains
        if (found := _curves(records, text, model, f"held_out_{domain}"))
    }
    parts = [
        f"The small model's clients have {domains[0]}, the large one's {domains[1]}.",
        table(["Method", "Model", *headings], rows, texts=2),
        "Gains over FedAvg, in points:",
        table(["Method", "Model", *headings], _gains(records, text, methods, splits), texts=2),
    ]
    if methods == list(METHODS) and (changes := _changes(records, text, domains)):
        parts += [
            "What a codistillation changes, all rounds around each being evaluated: held-out accuracy "
            "less that of the round before it, in its own round and, behind the stroke, four rounds "
            "later, in points. Methods without codistillations have their changes in the same rounds.",
            table(["Method", "Model", *headings[:2]], changes, texts=2),
        ]
    if panels:
        plots[name] = lambda: figures.curves_plot(panels)
        parts += [
            image(name, f"Accuracy by round in both domains, {title}"),
            "Shades: ± one standard deviation over the seeds, where there are several.",
        ]
    return [*parts, *remarks(records, EXPERIMENT, runs)]


def _cell(records: Sequence[Record], run: str, model: str, split: str) -> str:
    """'25.50 ± 0.20 / 310'."""
    found = sample(records, EXPERIMENT, run, model, split)
    if found is None:
        return "not run"
    loss = sample(records, EXPERIMENT, run, model, split, "loss")
    perplexity = math.exp(loss.mean / 100) if loss else math.nan  # a Sample is in %
    return f"{accuracy(found)} / {perplexity:,.0f}"


def _gains(
    records: Sequence[Record], text: str, methods: Sequence[str], splits: Sequence[str]
) -> list[list[str]]:
    rows = []
    for method in methods[1:]:
        for model in MODELS:
            cells = []
            for split in splits:
                ours = sample(records, EXPERIMENT, f"{method},{text}", model, split)
                theirs = ours and _of_fed_avg(records, ours, text, model, split)
                if ours is None or theirs is None:
                    cells.append("not run")
                    continue
                of_baseline = dict(zip(theirs.seeds, theirs.values, strict=True))
                pairs = zip(ours.seeds, ours.values, strict=True)
                differences = [v - of_baseline[s] for s, v in pairs if s in of_baseline]
                cells.append(mean_difference(differences) if differences else "no common seeds")
            rows.append([METHOD_NAMES[method], model, *cells])
    return rows


def _of_fed_avg(
    records: Sequence[Record], ours: Sample, text: str, model: str, split: str
) -> Sample | None:
    """FedAvg's, with the same settings in all that both read."""
    wanted = read_by_fed_avg(ours.records[0], model)
    found = samples(records, EXPERIMENT, f"{BASELINE},{text}", model, split)
    return next((s for s in found if read_by_fed_avg(s.records[0], model) == wanted), None)


def _changes(records: Sequence[Record], text: str, domains: Sequence[str]) -> list[list[str]]:
    """A row per method and model; empty where the rounds in question were not evaluated."""
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
    """Of each seed the change at once and later, in points; means over codistillations."""
    found = sample(records, EXPERIMENT, run, model, split)
    changes = []
    for record in found.records if found else ():
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
        method: found
        for method in METHODS
        if (found := curve(records, EXPERIMENT, f"{method},{text}", model, split))
    }


def _paper() -> list[str]:
    splits = list(DOMAIN_SHIFT[BASELINE])
    rows = [
        [METHOD_NAMES[method], *(" / ".join(f"{v:.2f}" for v in own[split]) for split in splits)]
        for method, own in DOMAIN_SHIFT.items()
    ]
    return [
        "### The paper's: Stack Overflow",
        "Small / large model, 30,000 users each, 10,000 words, 1,500 rounds; one number, without seeds.",
        table(["Method", *(split.capitalize() for split in splits)], rows),
    ]
