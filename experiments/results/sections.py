"""The sections of RESULTS.md: functions from records to Markdown, a list of paragraphs each.

Those with plots add them to `plots`, what draws them by file name.
"""

import importlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.report import METHOD_NAMES
from experiments.results import figures, paper_numbers
from experiments.results.claims import FIGURE_4, UNLABELLED_NAMES, claims, find, gain, verdict
from experiments.results.figures import Point
from experiments.results.intervals import BINOMIAL, Estimate
from experiments.results.paper_numbers import (
    IN_DOMAIN_IMAGES,
    METHODS,
    MODELS,
    POOL_SIZES,
    run_name,
)
from experiments.results.pooling import (
    TABLE_1,
    Record,
    Sample,
    curve,
    differences,
    groups,
    pooled,
    sample,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Plots = dict[str, Callable[[], "Figure"]]

# Beside RESULTS.md.
PLOT_FOLDER = Path("docs/results")
# Experiment -> heading, and the runs of Table 1 with the default setting.
ABLATIONS = {
    "cifar100_alpha": ("Ablation: α of MergedCodist", ("merged_codistillation",)),
    "cifar100_kl_direction": ("Ablation: direction of the KL divergence", METHODS),
    "cifar100_interpolation": ("Ablation: interpolation λ with the student's start", METHODS),
}


def table_1(records: Sequence[Record], plots: Plots) -> list[str]:
    """Accuracies and gains beside the paper's, and the curves by round."""
    parts = ["## Table 1: CIFAR-100", "Test accuracy in %, small model / large model."]
    for unlabelled, name in UNLABELLED_NAMES.items():
        parts += [f"### Unlabelled images: {name}", _accuracy_table(records, unlabelled)]
        runs = [
            run_name(method, size, unlabelled)
            for method in ("fed_avg", *METHODS)
            for size in POOL_SIZES
        ]
        parts += _remarks(records, TABLE_1, runs)
        parts += [f"**Gains over FedAvg, {name}**", _gain_table(records, unlabelled)]
    parts += _gains_plot(records, plots)
    parts += ["### Held-out accuracy by round, 4,700 examples, in-domain"]
    return [*parts, *_curves_plot(records, plots)]


def _accuracy_table(records: Sequence[Record], unlabelled: str) -> str:
    headings = ["Method"]
    for size in POOL_SIZES:
        headings += [f"{size:,}: ours", f"{size:,}: paper"]
    rows = []
    for method in ("fed_avg", *METHODS):
        row = [METHOD_NAMES[method]]
        for size in POOL_SIZES:
            run = run_name(method, size, unlabelled)
            small, large = paper_numbers.TABLE_1[run]
            row += [_cell(records, TABLE_1, run), f"{small:.2f} / {large:.2f}"]
        rows.append(row)
    return _table(headings, rows)


def _cell(records: Sequence[Record], experiment: str, run: str) -> str:
    """'33.86 ± 0.21 / 33.15 ± 0.30 (3 seeds)', or why there is nothing."""
    samples = [sample(records, experiment, run, model) for model in MODELS]
    texts = [_accuracy(one) if one else _absence(records, experiment, run) for one in samples]
    if not any(samples):
        return texts[0]
    counts = [str(len(one.seeds)) for one in samples if one]
    distinct = "/".join(counts if len(set(counts)) > 1 else counts[:1])
    return f"{' / '.join(texts)} ({distinct} seed{'' if distinct == '1' else 's'})"


def _accuracy(one: Sample) -> str:
    spread = "" if one.deviation is None else f" ± {one.deviation:.2f}"
    return f"{one.mean:.2f}{spread}{' †' if one.is_short else ''}"


def _is_absent(records: Sequence[Record], experiment: str, run: str) -> bool:
    return not any(sample(records, experiment, run, model) for model in MODELS)


def _absence(records: Sequence[Record], experiment: str, run: str) -> str:
    of_run = [r for r in records if (r.experiment, r.run) == (experiment, run)]
    return "unfinished" if any(not record.finished for record in of_run) else "not run"


def _gain_table(records: Sequence[Record], unlabelled: str) -> str:
    headings = ["Method", "Examples", "Model", "Our gain", "Interval", "Rounds", "Paper's gain"]
    rows = []
    for method in METHODS:
        for size in POOL_SIZES:
            for model in MODELS:
                found = find(gain(method, size, unlabelled, model), records)
                assert found.paper is not None
                row = [METHOD_NAMES[method], f"{size:,}", model, found.decided, "", ""]
                outside = ""
                if found.ours:
                    row[3:5] = [_estimate(found.ours), found.ours.kind]
                    row[5] = _rounds(found.rounds, found.full_rounds)
                    is_outside = abs(found.ours.value - found.paper) > found.ours.half_width
                    outside = "outside" if is_outside else "inside"
                rows.append([*row, f"{found.paper:+.2f}", outside])
    return _table([*headings, "Paper's gain lies … our interval"], rows, texts=3)


def _remarks(records: Sequence[Record], experiment: str, runs: Iterable[str]) -> list[str]:
    """What a table's reader must know besides: short and missing runs, other settings, notes."""
    short: dict[str, list[str]] = {}
    missing: list[str] = []
    others: list[str] = []
    noted: list[Record] = []
    for run in runs:
        samples = [one for model in MODELS if (one := sample(records, experiment, run, model))]
        shown = {record.path: record for one in samples for record in one.records}
        # FedAvg's small model is another run's for two of three pools.
        if not any(record.run == run for record in shown.values()):
            missing.append(run)
        for one in samples:
            if one.is_short:
                short.setdefault(_rounds(one.rounds, one.full_rounds), []).append(
                    one.records[0].run
                )
        finished = [r for r in records if r.finished and (r.experiment, r.run) == (experiment, run)]
        if len(groups(finished)) > 1:
            others.append(run)
        noted += shown.values()
    parts = [
        f"{rounds} rounds. At full length:\n\n{_sweep(experiment, short[rounds], '_full')}"
        for rounds in short
    ]
    if missing:
        parts.append(f"Not run, or not to the end:\n\n{_sweep(experiment, missing)}")
    if others:
        of_them = [r for r in records if r.experiment == experiment and r.run in others]
        parts.append(f"Run with several settings:\n\n{_plain_table(of_them)}")
    return [*parts, *_own_notes(noted)]


def _sweep(experiment: str, runs: Sequence[str], suffix: str = "") -> str:
    """The command that does these runs; full lengths in a folder of their own."""
    named = [] if set(runs) >= set(_planned(experiment)) else dict.fromkeys(runs)
    only = "".join(f'    --only "{run}" \\\n' for run in named)
    return (
        "```\npython -m experiments.sweep \\\n"
        f"    --config experiments/configs/{experiment}.py \\\n{only}"
        f"    --workdir runs/{experiment}{suffix}\n```"
    )


def _gains_plot(records: Sequence[Record], plots: Plots) -> list[str]:
    ours: dict[str, dict[str, list[Point]]] = {}
    paper: dict[str, dict[str, list[Point]]] = {}
    for unlabelled, name in UNLABELLED_NAMES.items():
        for model in MODELS:
            title = f"{model} model, {name}"
            for method in METHODS:
                mine = ours.setdefault(title, {}).setdefault(method, [])
                theirs = paper.setdefault(title, {}).setdefault(method, [])
                for size in POOL_SIZES:
                    found = find(gain(method, size, unlabelled, model), records)
                    theirs.append(Point(size, found.paper or 0.0, None))
                    if found.ours:
                        mine.append(Point(size, found.ours.value, found.ours.half_width))
    if not any(points for panel in ours.values() for points in panel.values()):
        return []
    plots["gains.png"] = lambda: figures.gains_plot(ours, paper)
    text = "Gains over FedAvg. Filled: ours, with 95 % intervals. Hollow: the paper's."
    return [_image("gains.png", "Gains over FedAvg by pool size"), text]


def _curves_plot(records: Sequence[Record], plots: Plots) -> list[str]:
    panels = {}
    for model in MODELS:
        runs = {method: run_name(method, 4700, "in_domain") for method in ("fed_avg", *METHODS)}
        found = {
            method: one
            for method, run in runs.items()
            if (one := curve(records, TABLE_1, run, model, "held_out"))
        }
        if found:
            panels[f"{model} model"] = found
    if not panels:
        return ["No runs yet."]
    plots["curves.png"] = lambda: figures.curves_plot(panels)
    text = "Lines: mean over the seeds. Shades: ± one standard deviation."
    return [_image("curves.png", "Held-out accuracy by round"), text]


# Figure 4 and the ablations


def figure_4(records: Sequence[Record], plots: Plots) -> list[str]:
    """Accuracies by number of unlabelled images."""
    runs = _runs(records, FIGURE_4)
    few = {int(text) for run in runs if (text := run.split(",")[-1]).isdigit()}
    counts = sorted(few | {IN_DOMAIN_IMAGES})
    # Without any there is FedAvg, which is the same for both methods.
    rows = [["0 (FedAvg)", *[_cell(records, TABLE_1, "fed_avg,4700")] * len(METHODS)]]
    panels: dict[str, dict[str, list[Point]]] = {}
    any_short = False
    for count in counts:
        row = [f"{count:,}"]
        for method in METHODS:
            term = (FIGURE_4, f"{method},{count}")
            if count == IN_DOMAIN_IMAGES:
                term = (TABLE_1, run_name(method, 4700, "in_domain"))
            row.append(_cell(records, *term))
            for model in MODELS:
                if one := sample(records, *term, model):
                    any_short = any_short or one.is_short
                    lines = panels.setdefault(f"{model} model", {})
                    point = Point(count, one.mean, one.deviation)
                    lines.setdefault(method, []).append(point)
        rows.append(row)
    parts = [
        "## Figure 4: number of unlabelled images",
        f"In-domain images, 4,700 examples in the large model's pool; all {IN_DOMAIN_IMAGES:,} are "
        "Table 1's. The paper's figure has no numbers; it plots the mean test accuracy of its 25 tuning "
        "runs that are best on held-out clients. Ours, in %, small / large.",
        _table(["Unlabelled images", *(METHOD_NAMES[method] for method in METHODS)], rows),
        *_remarks(records, FIGURE_4, runs),
    ]
    # One point is no curve.
    if any(len(points) > 1 for lines in panels.values() for points in lines.values()):
        baselines = {
            f"{model} model": one.mean
            for model in MODELS
            if (one := sample(records, TABLE_1, "fed_avg,4700", model))
        }
        plots["unlabelled_images.png"] = lambda: figures.unlabelled_plot(panels, baselines)
        parts += [
            _image("unlabelled_images.png", "Accuracy by number of unlabelled images"),
            "Bars: ± one standard deviation over the seeds. Dashed: FedAvg."
            + (" What is marked † in the table is of fewer rounds here too." if any_short else ""),
        ]
    return parts


def ablation(records: Sequence[Record], experiment: str) -> list[str]:
    """Runs that differ in one setting, the default of Table 1 first."""
    heading, methods = ABLATIONS[experiment]
    runs = _runs(records, experiment)
    terms = [(TABLE_1, run_name(method, 4700, "in_domain")) for method in methods]
    terms += [(experiment, run) for run in runs]
    rows = [
        [f"`{run}`{' (Table 1)' if name == TABLE_1 else ''}", *_model_cells(records, name, run)]
        for name, run in terms
    ]
    headings = [f"{model}, {split}" for model in MODELS for split in ("test", "held-out")]
    return [
        f"## {heading}",
        "4,700 examples, in-domain. Choices are made on held-out clients.",
        _table(["Run", *headings, "Seeds", "Rounds"], rows),
        *_remarks(records, experiment, runs),
    ]


def _runs(records: Sequence[Record], experiment: str) -> list[str]:
    """The runs of the experiment's config, then others that were recorded."""
    recorded = sorted({record.run for record in records if record.experiment == experiment})
    return list(dict.fromkeys([*_planned(experiment), *recorded]))


def _planned(experiment: str) -> list[str]:
    return importlib.import_module(f"experiments.configs.{experiment}").get_runs()


def _model_cells(records: Sequence[Record], experiment: str, run: str) -> list[str]:
    if _is_absent(records, experiment, run):
        return [_absence(records, experiment, run), *[""] * 5]
    cells, last = [], None
    for model in MODELS:
        for split in ("test", "held_out"):
            one = sample(records, experiment, run, model, split)
            cells.append(_accuracy(one) if one else "")
            last = one or last
    assert last
    return [*cells, str(len(last.seeds)), _rounds(last.rounds, last.full_rounds)]


# Claims, other experiments, tuning, the list of runs


def claims_section(records: Sequence[Record], note: str) -> list[str]:
    """Verdicts, the note, and then the differences that they rest on."""
    parts = [
        "## The paper's claims",
        "A claim *holds* if every difference under it is above zero by more than its interval, *does "
        "not hold* if one is below zero by more than its interval; else there are *not enough runs*, or "
        "it is *undecided* as a difference lies within its interval. Each interval is at 95 % by "
        "itself. Runs compared have the same number of rounds. ‡ marks what rests on single seeds in "
        "part: their intervals cover the test images, not the seeds.",
    ]
    rows, details = [], []
    for number, claim in enumerate(claims(), start=1):
        findings = [find(comparison, records) for comparison in claim.comparisons]
        decided = sum(finding.decided in ("yes", "no") for finding in findings)
        short = any(finding.rounds < finding.full_rounds for finding in findings)
        word = verdict(findings) + (" †" if short else "")
        if any(finding.ours and finding.ours.kind == BINOMIAL for finding in findings):
            word += " ‡"
        rows.append([f"{number}. {claim.text}", f"**{word}**", f"{decided} of {len(findings)}"])
        lines = [
            [
                comparison.text,
                "no numbers" if finding.paper is None else f"{finding.paper:+.2f}",
                _estimate(finding.ours) if finding.ours else "",
                finding.ours.kind if finding.ours else "",
                _rounds(finding.rounds, finding.full_rounds) if finding.ours else "",
                finding.decided,
            ]
            for comparison, finding in zip(claim.comparisons, findings, strict=True)
        ]
        headings = ["Difference", "Paper", "Ours", "Interval", "Rounds", "Decided above zero"]
        details += [f"**{number}. {claim.text}: {word}**", _table(headings, lines)]
    parts.append(_table(["Claim", "Verdict", "Differences decided"], rows, texts=2))
    return [*parts, note, *details]


def other(records: Sequence[Record], experiment: str) -> list[str]:
    """An experiment that has no section of its own: a row per run and settings."""
    of_it = [record for record in records if record.experiment == experiment]
    tables = [_plain_table(of_it), *_own_notes(of_it)] if of_it else []
    return [f"## {experiment}", *tables]


def _plain_table(records: Sequence[Record]) -> str:
    finals = {(m, s) for record in records for m, splits in record.final.items() for s in splits}
    columns = sorted(
        finals, key=lambda each: (each[1] != "test", each[1], each[0] != "small", each)
    )
    rows = []
    for run in sorted({record.run for record in records}, key=_natural):
        of_run = groups(record for record in records if record.run == run and record.finished)
        for group, difference in zip(of_run, differences(of_run), strict=True):
            cells = [pooled([group], *column) for column in columns]
            seeds = sorted({seed for record in group for seed in record.seeds})
            rounds = _rounds(group[0].rounds, group[0].full_rounds)
            shown = [_accuracy(one) if one else "" for one in cells]
            rows.append([f"`{run}`", difference, *shown, _numbers(seeds), rounds])
    headings = [f"{model}, {split.replace('_', '-')}" for model, split in columns]
    if not rows:
        return "No finished runs yet."
    return _table(["Run", "Settings", *headings, "Seeds", "Rounds"], rows, texts=2)


def _own_notes(records: Iterable[Record]) -> list[str]:
    """What the configs remark on their runs."""
    by_note: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            by_note.setdefault(note, []).append(f"`{record.run}`")
    lines = [f"- {note} ({', '.join(dict.fromkeys(runs))})" for note, runs in by_note.items()]
    return ["\n".join(lines)] if lines else []


def tuning(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tuner's studies, as it sums them up."""
    parts = ["## Tuning"]
    rows = []
    for study in studies:
        states = ", ".join(
            f"{count} {state}" for state, count in sorted(study["states"].items()) if count
        )
        params = sorted((study["best_parameters"] or {}).items())
        best = study["best_value"]
        rows.append(
            [
                f"`{study['study']}`",
                METHOD_NAMES.get(study["algorithm"], study["algorithm"]),
                f"{len(study['trials'])}: {states}",
                f"{study['rounds']:,}",
                "" if best is None else f"{best:.4f}",
                ", ".join(f"{name}={_short(value)}" for name, value in params),
                str(sum(worker["compilations"] for worker in study["workers"])),
            ]
        )
    if rows:
        headings = ["Study", "Method", "Trials", "Rounds per trial", "Best value"]
        parts.append(_table([*headings, "Best parameters", "Compilations"], rows, texts=2))
        commands = "\n".join(f"- `{s['study']}`: `{s['command']}`" for s in studies)
        parts.append(commands)
    else:
        parts.append("No studies yet.")
    return parts


def run_list(records: Sequence[Record]) -> list[str]:
    """Every record, whichever section it is in or not."""
    rows = []
    for record in records:
        minutes = "" if record.seconds is None else f"{record.seconds / 60:.1f}"
        rounds = _rounds(record.rounds, record.full_rounds)
        if not record.finished:
            rounds = f"{record.last_round:,} of {record.rounds:,}, unfinished"
        rows.append(
            [
                record.experiment,
                f"`{record.run}`",
                _numbers(record.seeds),
                rounds,
                _test_accuracies(record),
                record.device or "",
                minutes,
                (record.date or "")[:10],
                (record.commit or "")[:7],
                f"`{_escaped(record.command)}`" if record.command else "",
            ]
        )
    headings = ["Experiment", "Run", "Seeds", "Rounds", "Test accuracy", "Device", "Minutes"]
    headings += ["Date", "Commit", "Command"]
    listed = _table(headings, rows, texts=len(headings)) if rows else "None yet."
    parts = ["## All runs", "Accuracies here are means over the record's seeds.", listed]
    if lines := [line for record in records if (line := _last_accuracies(record))]:
        parts.append("\n".join(lines))
    return parts


def _test_accuracies(record: Record) -> str:
    means = {
        model: 100 * statistics.fmean(splits["test"]["accuracy"])
        for model, splits in sorted(record.final.items(), reverse=True)
        if "test" in splits
    }
    return ", ".join(f"{model} {mean:.2f}" for model, mean in means.items())


def _last_accuracies(record: Record) -> str:
    """What an unfinished run had reached; such numbers enter no table."""
    if record.finished:
        return ""
    values = ", ".join(
        f"{model} {split.replace('_', '-')} "
        + "/".join(f"{100 * accuracy:.2f}" for accuracy in metrics["accuracy"])
        for model, splits in sorted(record.final.items(), reverse=True)
        for split, metrics in splits.items()
    )
    return f"- unfinished `{record.run}` at round {record.last_round:,}: {values}"


# Text


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table whose first `texts` columns are text, the others aligned right."""
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def _estimate(one: Estimate) -> str:
    return f"{one.value:+.2f} ± {one.half_width:.2f}"


def _rounds(rounds: int, full_rounds: int) -> str:
    return f"{rounds:,}" if rounds >= full_rounds else f"† {rounds:,} of {full_rounds:,}"


def _image(name: str, text: str) -> str:
    return f"![{text}]({(PLOT_FOLDER / name).as_posix()})"


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    """For a table's cell, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def _natural(run: str) -> list[tuple[int, float, str]]:
    """Sorts the numbers in runs' names as numbers."""
    parts = []
    for part in run.split(","):
        try:
            parts.append((0, float(part), ""))
        except ValueError:
            parts.append((1, 0.0, part))
    return parts
