"""Undefined values are a dash and names are shown unchanged, in every table and plot of runs."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import optuna
import pytest
from rich.console import Console

from fedcodist import report
from fedcodist.algorithms.graph import graphs
from fedcodist.core.metric_kinds import decimal, is_share, lower_is_better
from fedcodist.report import (
    accuracy_table,
    collection,
    costs,
    plots,
    ranking_table,
    tables_domains,
    tables_heads,
    tables_parties,
)
from fedcodist.report.entries import Entry
from fedcodist.report.plot_parties import PartyCurve, parties_plot
from fedcodist.report.runs import Run, Series
from fedcodist.report.spread import plus_minus
from fedcodist.tuning import held_out, trials
from tests.report import test_report
from tests.report.test_report import write_run

# Markup of HTML and of rich, and formulas of matplotlib that it cannot read.
NAMES = ["<script>alert(1)</script> & co", "[/b] [red]x", r"$\frac{a$ and $", "a|b `c`", "$x$"]


@pytest.mark.parametrize(
    ("metric", "lower", "share"),
    [
        ("accuracy", False, True),
        ("accuracy_head_3", False, True),
        ("ndcg_10", False, True),
        ("per_token_losses", True, False),
        ("task_loss", True, False),
        ("Perplexity", True, False),
        ("KL", True, False),
        ("words", False, False),
        ("error-rate", True, False),
        ("negative_log_likelihood", True, False),
        ("log_likelihood", False, False),
        ("logloss", True, False),
        ("crossentropy", True, False),
        ("ppl", True, False),
        ("rmsle", True, False),
        ("huber", True, False),
        ("bpc", True, False),
        ("hamming", True, False),
        ("hamming_score", False, True),
        ("false_positive_rate", True, False),
        ("true_positive_rate", False, False),
        ("misclassification-rate", True, False),
        ("costs", True, False),
        ("cost_accuracy", False, True),
    ],
)
def test_kinds_of_metrics(metric, lower, share):
    assert (lower_is_better(metric), is_share(metric)) == (lower, share)


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.0031, None, "0.0031"),
        (0.0031, 0.0002, "0.00310 ± 0.00020"),
        (0.6931, 0.0, "0.69 ± 0.00"),
        (0.6931, 0.0123, "0.693 ± 0.012"),
        (12.3456, 0.5, "12.35 ± 0.50"),
        (-0.00012, 0.5, "-0.00 ± 0.50"),
        (3.1e-9, 2e-10, "3.1e-09 ± 2.0e-10"),
        (0.5, 1e-12, "0.500000 ± 0.000000"),
        (0.0, None, "0.00"),
    ],
)
def test_metrics_that_are_no_shares_keep_two_digits(mean, half_width, text):
    """A loss of 0.0031 was shown as 0.00."""
    assert plus_minus(mean, half_width, is_share=False) == text
    shares = f"{mean:.2f}" + ("" if half_width is None else f" ± {half_width:.2f}")
    assert plus_minus(mean, half_width) == shares


def test_a_mean_over_rounds_leaves_out_those_without_clients():
    """As a Poisson cohort may be: 4 of two rounds, nothing of one, 10 of three."""
    lines = {2: 4.0, 3: None, 6: 10.0}
    records = {Series("main", "clients", 0): {r: {"client_loss": v} for r, v in lines.items()}}
    run = Run(Path("run"), {}, records, {}, {}, True, ())
    assert costs._mean_over_rounds(run, "client_loss") == {
        "main": pytest.approx((2 * 4 + 3 * 10) / 5)
    }
    nothing = run._replace(records={Series("main", "clients", 0): {2: {"client_loss": None}}})
    assert math.isnan(costs._mean_over_rounds(nothing, "client_loss")["main"])


def test_a_dash_for_what_is_no_number():
    assert [decimal(value) for value in (1.25, math.nan, math.inf)] == ["1.2", "-", "-"]


def test_gains_of_a_party_without_an_accuracy(tmp_path, capsys):
    final = {
        "a": {"test": {"accuracy": [0.5, None]}},
        "b": {"test": {"accuracy": [0.25, 0.25]}},
        "parties": {"client_test": {"accuracy": [0.5, 0.5]}},
    }
    for folder in (tmp_path, tmp_path / "phases" / "private"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"final": final}))
    config = {
        "phases": {"stopping": "fixed"},
        "evaluation": {"splits": [], "final_splits": ["test"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = [
        {"round": 1, "model": "a", "split": "test", "seed": 0, "accuracy": None},
        {"round": 1, "model": "b", "split": "test", "seed": 0, "accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert tables_parties.main([str(tmp_path), "--plot", str(tmp_path / "figure.png")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "-", "-"] in rows and ["b", "25.0", "25.0"] in rows and ["mean", "-", "-"] in rows
    assert "parties" not in [row[0] for row in rows]
    with pytest.raises(
        ValueError, match=r"no model in .*summary\.json was evaluated on 'held_out'"
    ):
        tables_parties.results(tmp_path, "held_out")


def test_heads_without_an_accuracy():
    values = np.full((1, 2, 2), 0.5)
    values[0, 0, 1] = np.nan
    on_others = np.full((1, 2, 2, 2), np.nan)
    text = tables_heads.tables(
        tables_heads.Heads(values, on_others, graphs.hops(graphs.complete(2)))
    )
    assert "nan" not in text and "50.0" in text and "-" in text.split()
    clients = tables_heads.table_of_clients(
        tables_heads.Heads(values, on_others, np.zeros((2, 2), int))
    )
    assert "nan" not in clients and "- / 50.0" in clients


@pytest.mark.parametrize(
    ("accuracy", "loss", "shown"),
    [(None, 1.0, "- / 3"), (0.5, None, "50.00 / -"), (0.5, 1e4, "50.00 / -")],
)
def test_domains_of_what_is_undefined_or_beyond_floats(accuracy, loss, shown):
    series = Series("[/b] $m$", "test_a", 0)
    record = {"accuracy": accuracy, "loss": loss}
    config = {
        "rounds": 2,
        "evaluation": {"around": {"before": 1, "after": 1}},
        "algorithm": {"period": 1},
    }
    records = {series: {0: record, 1: record, 2: record}}
    run = Run("folder", config, records, {}, {}, True, ())
    console = Console(record=True, width=150)
    console.print(
        tables_domains.domain_table({"[/x] ours": tables_domains.cells(run, "test")}, "test")
    )
    console.print(tables_domains.change_table({"[/x] ours": tables_domains.changes(run)}))
    text = console.export_text()
    assert shown in text and "[/x] ours" in text and "[/b] $m$" in text and "nan" not in text


def test_long_names_are_whole_in_a_narrow_terminal(tmp_path, monkeypatch):
    """Rows whose names were cut looked the same, also where the output was written to a file."""
    method, model = "q" * 60, "z" * 60
    monkeypatch.setitem(test_report.PARAMETERS, model, 1)
    write_run(tmp_path / "run", method, final={model: 0.8})
    entry = Entry(method, model, (50.0,), (0,), "test", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    cells = {(model, "test"): tables_domains.Cell(0.5, 1.0, None)}
    changes = {(model, "test"): tables_domains.Change([0.1], [0.1], 1)}
    for table in (
        accuracy_table.table(collection.collect([tmp_path])),
        ranking_table.for_terminal(ranking_table.ranking_table([entry], "fed_avg", [entry])),
        tables_domains.domain_table({method: cells}, "test"),
        tables_domains.change_table({method: changes}),
    ):
        console = Console(record=True, width=110)
        console.print(table)
        text = console.export_text()
        assert text.count("q") == text.count("z") == 60


def test_a_report_of_undefined_accuracies(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if "accuracy" in record:
            record["accuracy"] = record["loss"] = None
            record["per_client"] = {"accuracy_mean": None}
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert report.main([str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    found = collection.collect([tmp_path / "run"])
    cells = [
        accuracy_table.number_cells(row, found, False) for row in accuracy_table.result_rows(found)
    ]
    assert all(row[0] == "–" for row in cells)
    assert (
        "nan"
        not in (tmp_path / "out" / "report.html").read_text().split("<img")[0].split("<h2>")[1]
    )


def test_a_trial_whose_accuracy_is_undefined_is_pruned(monkeypatch):
    """A study's file takes no NaN: the trial would stop the worker."""
    assert math.isnan(
        held_out.held_out_accuracy(
            [{"split": "held_out", "accuracy": None}, {"split": "held_out", "accuracy": 1.0}]
        )
    )
    from fedcodist.tuning import study

    def run(experiment, programs, callbacks, show_progress):
        callbacks[0]([{"round": 3, "split": "held_out", "accuracy": None}])

    monkeypatch.setattr(trials, "run_experiment", run)
    value, state, reason = trials._run_trial(None, None, None, None)
    assert (value, state) == (
        None,
        study.TrialState.PRUNED,
    ) and state is optuna.trial.TrialState.PRUNED
    assert reason == "accuracy undefined in round 3"


@pytest.mark.parametrize(
    "name", [*NAMES[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[3:])]
)
def test_a_runs_name_does_not_break_its_report(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(test_report.PARAMETERS, name, 7)
    folder = write_run(tmp_path / "run", final={name: 0.7, "large": 0.6})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"name": name, "run": name}))
    other = write_run(tmp_path / "other", "fed_df")
    assert report.main([str(folder), str(other), "--output", str(tmp_path / "out")]) == 0
    assert name in capsys.readouterr().out  # the title
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in html and html.count("<img ") >= 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plots.write_plots(collection.collect([folder, other]), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_names_in_plots_are_drawn_as_they_are(name, tmp_path):
    from matplotlib.figure import Figure

    text = Figure().text(0, 0, plots.as_written(name))
    assert text._preprocess_math(text.get_text()) == (name, False)
    parties_plot({name: PartyCurve((1, 2), (1.0, 2.0))}, 1.0, None).savefig(tmp_path / "figure.png")
    tables_heads.profiles({name: {name: np.zeros(2)}}).savefig(tmp_path / "profiles.png")
