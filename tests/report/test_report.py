"""The report, on made-up run folders."""

import base64
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import fedcodist as fc
from fedcodist import report
from fedcodist.config.registry import METHOD_NAMES, run_title
from fedcodist.report import accuracy_table, costs, mean_model, plots, privacy_plot
from fedcodist.report import collection as collection_lib
from fedcodist.report.clients_plot import clients_plot
from fedcodist.run.client_metrics import CLIENTS, ClientMetrics, save_clients

ROOT = Path(report.__file__).resolve().parents[2]
PARAMETERS = {"small": 5_000, "large": 20_000}


def write_run(
    folder,
    algorithm="fed_avg",
    *,
    seed=0,
    seeds=1,
    final=None,
    rounds=100,
    last_round=None,
    finished=True,
    splits=("held_out", "test"),
    name="digits",
    **settings,
):
    """A run folder whose accuracies rise linearly to `final[model]` (+ 0.02 per seed)."""
    folder.mkdir(parents=True)
    final = final or {"small": 0.8, "large": 0.7}
    config = {
        "name": name,
        "algorithm": {"name": algorithm, **settings},
        "rounds": rounds,
        "seed": seed,
        "seeds": seeds,
        "pools": {"small": {"fraction": 1.0}, "large": {"fraction": 0.33}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for round in range(0, (last_round or rounds) + 1, 20):
        for model, accuracy in final.items():
            for one in range(seed, seed + seeds):
                head = {"round": round, "model": model, "seed": one}
                test = (accuracy + 0.02 * one) * round / rounds
                for split in splits:
                    value = test if split == "test" else test - 0.01
                    lines.append(
                        {
                            **head,
                            "split": split,
                            "accuracy": value,
                            "loss": 2.3 - 2 * value,
                            "per_client": {"accuracy_mean": value, "accuracy_p10": value / 2},
                            "per_label_accuracy": [value] * 9 + [None],
                        }
                    )
                training = {"client_loss": 2.0 - test, "norm": [1, 2]}
                lines.append({**head, "split": "clients", **training})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "environment.json").write_text(
        json.dumps({"versions": {"jax": "0.10.2"}, "device": "<cpu> & co", "date": f"day {seed}"})
    )
    if finished:
        models = {
            model: {
                "parameters": PARAMETERS[model],
                "bytes_up_per_participation": 4 * PARAMETERS[model],
                "bytes_down_per_participation": 8 * PARAMETERS[model],
            }
            for model in final
        }
        summary = {"algorithm": algorithm, "models": models, "final": {}, "seconds": 12.3}
        summary |= {"rounds": rounds, "finished": True}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def three_methods(parent):
    write_run(parent / "merged", "merged_codistillation", final={"small": 0.85, "large": 0.75})
    write_run(parent / "periodic", "periodic_codistillation", period=40)
    write_run(parent / "fed_avg", "fed_avg", final={"small": 0.7912, "large": 0.6})
    return parent


def printed(collection, title="digits"):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(accuracy_table.table(collection, title))
    return console.export_text()


def cells(collection, method, model):
    """The words of one row, found by the method's block and the model's name."""
    (row,) = [
        row
        for row in accuracy_table.result_rows(collection)
        if row.method == method and row.model == model
    ]
    return row


def final(collection, method, model, split="test"):
    return cells(collection, method, model).accuracy[split]


def test_table_has_a_row_per_method_and_model(tmp_path):
    collection = collection_lib.collect([three_methods(tmp_path)])
    rows = [(row.method, row.model) for row in accuracy_table.result_rows(collection)]
    assert rows == [
        (method, model)
        for method in ("FedAvg", "PeriodicCodist", "MergedCodist")
        for model in ("small", "large")
    ]
    text = printed(collection)
    (line,) = [line for line in text.splitlines() if "FedAvg" in line]
    assert line.split() == ["FedAvg", "small", "79.12", "78.12", "20.0", "kB", "40.0", "kB", "100"]
    assert "digits" in text and "test" in text and "held out" in text
    assert "Seeds" not in text and "±" not in text
    assert not collection.notes


def test_smaller_model_comes_first_whatever_the_order_of_the_lines(tmp_path):
    write_run(tmp_path / "run", final={"large": 0.7, "small": 0.8})
    assert collection_lib.collect([tmp_path]).models == ("small", "large")


def test_runs_that_differ_in_the_seed_are_one_method(tmp_path):
    for seed in (0, 1, 5):
        write_run(tmp_path / f"seed{seed}", seed=seed, name=f"digits_{seed}")
    write_run(tmp_path / "other", "merged_codistillation")
    collection = collection_lib.collect([tmp_path])
    assert [method.label for method in collection.methods] == ["FedAvg", "MergedCodist"]
    values = [0.8, 0.82, 0.9]
    mean = sum(values) / 3
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
    statistic = final(collection, "FedAvg", "small")
    assert statistic.seeds == 3
    assert statistic.mean == pytest.approx(mean)
    assert statistic.spread == pytest.approx(spread)
    assert "84.00 ± 5.29" in printed(collection)
    assert final(collection, "MergedCodist", "small").spread is None


def test_seeds_inside_a_run_and_of_other_runs_count_together(tmp_path):
    write_run(tmp_path / "a", seed=0, seeds=3)
    write_run(tmp_path / "b", seed=3, seeds=1)
    assert final(collection_lib.collect([tmp_path]), "FedAvg", "large").seeds == 4


def test_bytes_are_the_mean_over_the_seeds_of_finished_runs(tmp_path):
    """They are measured where links are compressed; those of the first run were shown."""
    for name, seed, seeds, size in (("a", 0, 3, 1000), ("b", 3, 1, 2000)):
        path = write_run(tmp_path / name, seed=seed, seeds=seeds) / "summary.json"
        summary = json.loads(path.read_text())
        summary["models"]["small"]["bytes_up_per_participation"] = size
        path.write_text(json.dumps(summary))
    write_run(tmp_path / "c", seed=4, last_round=40, finished=False)
    row = cells(collection_lib.collect([tmp_path]), "FedAvg", "small")
    assert (row.bytes_up, row.bytes_down) == (1250, 8 * PARAMETERS["small"])


def test_a_repeated_seed_counts_once(tmp_path):
    write_run(tmp_path / "a", seed=0, seeds=3)
    write_run(tmp_path / "b", seed=1)
    collection = collection_lib.collect([tmp_path])
    assert final(collection, "FedAvg", "small").seeds == 3
    (note,) = collection.notes
    assert "repeats seed 1" in note


def test_seeds_counted_from_zero_inside_each_run_are_told_apart(tmp_path):
    for seed in (0, 7):
        run = write_run(tmp_path / f"{seed}", seed=seed)
        metrics = run / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"seed": 7', '"seed": 0'))
    assert final(collection_lib.collect([tmp_path]), "FedAvg", "small").seeds == 2


def test_runs_with_other_settings_are_methods_of_their_own(tmp_path):
    write_run(tmp_path / "a", "merged_codistillation", alpha=0.5)
    write_run(tmp_path / "b", "merged_codistillation", alpha=0.9, seed=1)
    labels = [method.label for method in collection_lib.collect([tmp_path]).methods]
    assert labels == ["MergedCodist (alpha=0.5)", "MergedCodist (alpha=0.9)"]


@pytest.mark.parametrize(
    ("one", "other", "label"),
    [
        ({"plan": {}}, {"plan": {"precision": "bfloat16"}}, "precision={}"),
        (
            {"plan": {}, "resumed": [{"plan": {"precision": "bfloat16"}}]},
            {"plan": {}, "resumed": [{"plan": {}}]},
            "precision={}",
        ),
        (
            {"plan": {}, "resumed": [{"plan": {"precision": "bfloat16"}}]},
            {"plan": {}, "resumed": [{"plan": {"precision": "bfloat16"}, "only_reads": True}]},
            "precision={}",
        ),
        (
            {"identity": {"settings": {"hyper": {"rate": 1.5}, "start": [1], "seed": 0}}},
            {"identity": {"settings": {"hyper": {"rate": 0.1}, "start": [2], "seed": 1}}},
            "rate={}",
        ),
        (
            {"identity": {"prepared": {"data/mine": "0123456789"}}},
            {"identity": {"prepared": {"data/mine": "9876543210"}}},
            "data/mine={}",
        ),
        (
            {"identity": {"prepared": {"training.method": {"mine.code": "a"}}}},
            {"identity": {"prepared": {"training.method": {"mine.code": "b"}}}},
            "code={}",
        ),
    ],
    ids=["precision", "precision changed", "only read in another", "of Python", "data", "code"],
)
def test_runs_of_one_config_in_another_precision_on_other_data_or_with_other_code_are_not_joined(
    one, other, label, tmp_path
):
    for seed, environment in enumerate((one, other, other)):
        run = write_run(tmp_path / str(seed), seed=seed)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"evaluation": {}}))
        (run / "environment.json").write_text(json.dumps(environment))
    methods = collection_lib.collect([tmp_path]).methods
    assert [len(method.runs) for method in methods] == [1, 2]
    values = {
        "precision={}": ["float32, then bfloat16" if "resumed" in one else "float32"],
        "data/mine={}": ["01234567", "98765432"],
        "code={}": ["a", "b"],
        "rate={}": ["1.5", "0.1"],
    }[label]
    if label.startswith("precision"):
        values.append("float32" if "resumed" in one else "bfloat16")
    assert [method.label for method in methods] == [
        f"FedAvg ({label.format(value)})" for value in values
    ]


def test_clients_methods_have_their_names(tmp_path):
    for method in ("fed_avg", "scaffold"):
        run = write_run(tmp_path / method)
        config = json.loads((run / "config.json").read_text())
        config |= {"run": method, "training": {"method": method}}
        (run / "config.json").write_text(json.dumps(config))
    labels = [method.label for method in collection_lib.collect([tmp_path]).methods]
    assert labels == ["FedAvg", "SCAFFOLD"]


def test_runs_that_have_names_are_called_by_them(tmp_path):
    for number, (algorithm, run) in enumerate(
        (
            ("fed_sdd", "fed_sdd"),
            ("fed_sdd", "fed_sdd,fed_prox"),
            ("merged_codistillation", "merged,4700"),
        )
    ):
        folder = write_run(tmp_path / str(number), algorithm)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"run": run, "number": number}))
    labels = [method.label for method in collection_lib.collect([tmp_path]).methods]
    assert labels == ["FedSDD", "FedSDD (fed_sdd,fed_prox)", "MergedCodist (merged,4700)"]


def test_a_phase_and_a_run_without_a_config_have_names(tmp_path):
    configs = {"a": {"phase": "public"}, "b": {"algorithm": "fed_prox"}, "c": {"name": "encoder"}}
    for name, config in configs.items():
        write_run(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    labels = {method.label for method in collection_lib.collect([tmp_path]).methods}
    assert labels == {"public training", "FedProx", "encoder"}


@pytest.mark.parametrize(
    ("config", "title"),
    [
        (
            {"name": "a", "algorithm": {"name": "fed_avg"}, "training": {"method": "fed_prox"}},
            "a · fed_prox",
        ),
        (
            {"name": "a", "run": "b,1", "algorithm": {"name": "fed_sdd"}, "training": {}},
            "a · b,1 · fed_sdd",
        ),
        ({"name": "a", "run": "fed_df", "algorithm": {"name": "fed_df"}}, "a · fed_df"),
    ],
)
def test_a_run_is_called_by_experiment_run_and_method(config, title):
    assert run_title(config) == title


def test_phases_that_looked_at_test_data_are_in_the_label(tmp_path):
    for stopping in ("fixed", "test_data"):
        run = write_run(tmp_path / stopping)
        config = json.loads((run / "config.json").read_text())
        config |= {"algorithm": {"name": "fed_md"}, "phases": {"stopping": stopping}}
        (run / "config.json").write_text(json.dumps(config))
    labels = {method.label.split(" (")[0] for method in collection_lib.collect([tmp_path]).methods}
    fed_md = METHOD_NAMES.get("fed_md", "fed_md")
    assert labels == {fed_md, f"{fed_md}, phases stopped on test data"}


def test_half_written_last_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", last_round=60, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 80, "model": "small", "split": "te')
    collection = collection_lib.collect([run])
    row = cells(collection, "FedAvg", "small")
    assert row.accuracy["test"].mean == pytest.approx(0.8 * 0.6)
    assert row.rounds == "60 of 100, unfinished"
    assert row.bytes_up is None
    assert [note for note in collection.notes if "unfinished (60 of 100 rounds)" in note]
    assert not [note for note in collection.notes if "no evaluation" in note]


def test_half_written_evaluation_does_not_mix_rounds(tmp_path):
    run = write_run(tmp_path / "run", last_round=60, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        line = {"round": 80, "model": "small", "split": "held_out", "seed": 0, "accuracy": 0.99}
        file.write(json.dumps(line) + "\n\n")
    row = cells(collection_lib.collect([run]), "FedAvg", "small")
    assert row.rounds.startswith("60 of")
    assert row.accuracy["held_out"].mean == pytest.approx(0.8 * 0.6 - 0.01)


def test_broken_line_in_the_middle_is_noted(tmp_path):
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text("\0\0[1]\n" + metrics.read_text())
    (note,) = collection_lib.collect([run]).notes
    assert "metrics.jsonl line 1" in note


def test_a_round_evaluated_twice_counts_as_evaluated_last(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        line = {"round": 100, "model": "small", "split": "test", "seed": 0, "accuracy": 0.5}
        file.write(json.dumps(line) + "\n")
    assert final(collection_lib.collect([run]), "FedAvg", "small").mean == 0.5


def with_metric(folder, new, old="accuracy"):
    """The run with another metric in place of its accuracy."""
    for name in ("metrics.jsonl", "summary.json"):
        path = folder / name
        path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))
    return folder


@pytest.mark.parametrize(
    ("metric", "heading", "value"),
    [("f_score", "F score, %", "80.00"), ("perplexity", "Perplexity", "0.80")],
)
def test_a_run_without_an_accuracy_shows_another_metric(metric, heading, value, tmp_path):
    """Only its bytes were shown, and no rounds."""
    with_metric(write_run(tmp_path / "run"), metric)
    collection = collection_lib.collect([tmp_path])
    assert collection.metric == metric and collection.splits == ("test", "held_out")
    text = printed(collection)
    assert heading in text and "Accuracy" not in text
    (line,) = [line for line in text.splitlines() if "FedAvg" in line]
    assert line.split()[2] == value and line.split()[-1] == "100"
    plot = tmp_path / f"{metric}_by_bytes.png"
    plot.touch()
    drawn = report.page(collection, "", [plot])
    assert value in drawn and f"<h2>{heading.split(',')[0]} against bytes exchanged" in drawn


def test_the_accuracy_is_shown_wherever_a_run_has_it_unless_a_metric_is_chosen(tmp_path, capsys):
    write_run(tmp_path / "a")
    with_metric(write_run(tmp_path / "b", "fed_df"), "f_score")
    collection = collection_lib.collect([tmp_path])
    assert collection.metric == "accuracy"
    row = cells(collection, "FedDF", "small")
    assert row.accuracy["test"] is None and row.rounds == "100"
    assert final(collection_lib.collect([tmp_path], "loss"), "FedDF", "small").mean == 2.3 - 2 * 0.8
    message = one_line_and_status_2([tmp_path, "--metric=f_scor"], capsys)
    assert "--metric must be one of ['accuracy', 'f_score', 'loss'], got 'f_scor'." in message


def test_unfinished_run_does_not_enter_the_mean_of_finished_ones(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, last_round=40, finished=False)
    collection = collection_lib.collect([tmp_path])
    assert final(collection, "FedAvg", "small") == collection_lib.Statistic(0.8, None, 1)
    (note,) = collection.notes
    assert "left out" in note


def test_final_accuracies_from_the_summary_where_the_metrics_are_gone(tmp_path):
    run = write_run(tmp_path / "run", seeds=2)
    (run / "metrics.jsonl").unlink()
    summary = json.loads((run / "summary.json").read_text())
    summary["final"] = {"small": {"test": {"accuracy": [0.25, 0.75]}}}
    (run / "summary.json").write_text(json.dumps(summary))
    assert final(collection_lib.collect([run]), "FedAvg", "small").mean == 0.5


def test_non_finite_accuracy_is_shown_as_such(tmp_path):
    run = write_run(tmp_path / "run", splits=("test",))
    with (run / "metrics.jsonl").open("a") as file:
        line = {"round": 100, "model": "small", "split": "test", "seed": 0, "accuracy": None}
        file.write(json.dumps(line) + "\n")
    collection = collection_lib.collect([run])
    assert math.isnan(final(collection, "FedAvg", "small").mean)
    report.write_report(collection, tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (437_392, "437.4 kB"),
        (999_960, "1.0 MB"),
        (1_640_336, "1.6 MB"),
        (5_000_000_000_000, "5.0 TB"),
    ],
)
def test_human_bytes(count, text):
    assert accuracy_table.human_bytes(count) == text


def test_report_is_one_file_with_everything_in_it(tmp_path):
    collection = collection_lib.collect([three_methods(tmp_path / "runs")])
    files = report.write_report(collection, tmp_path / "out", "A <title>")
    assert [path.name for path in files.plots] == [
        "accuracy.png",
        "loss.png",
        "per_label_accuracy.png",
    ]
    for path in files.plots:
        assert path.read_bytes().startswith(b"\x89PNG")
    html = files.html.read_text()
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]*)""", html)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert base64.b64decode(sources[0].split(",")[1]) == files.plots[0].read_bytes()
    assert not re.search(r"https?://|<script|<link|@import", html)
    assert "A &lt;title&gt;" in html and "<title>A <title>" not in html
    for text in ("PeriodicCodist", "algorithm.period", "&lt;cpu&gt; &amp; co", "versions.jax"):
        assert text in html
    assert "10th percentile" in html and "12.3 s" in html


def test_the_page_has_colours_for_dark_screens_and_tables_that_scroll(tmp_path):
    collection = collection_lib.collect([three_methods(tmp_path / "runs")])
    html = report.write_report(collection, tmp_path / "out").html.read_text()
    style = re.search(r"<style>(.*?)</style>", html, flags=re.DOTALL)[1]
    light, dark, rest = re.split(r"@media \(prefers-color-scheme: dark\) \{|\n\}\n", style)[:3]
    colours = lambda text: set(re.findall(r"(--\w+): #", text))
    assert "color-scheme: light dark" in light and colours(light) == colours(dark) != set()
    # Every other colour is one of these names, but for the white behind plots.
    assert re.findall(r"#\w+", rest) == ["#fff"] and set(re.findall(r"var\((--\w+)\)", rest))
    assert "(max-width: 40rem)" in style and 'name="viewport"' in html
    assert html.count("<table>") == html.count('<div class="wide"><table>') > 0


def with_cohorts(run, **cohorts):
    config = json.loads((run / "config.json").read_text())
    config["pools"] = {pool: {"cohort_size": clients} for pool, clients in cohorts.items()}
    (run / "config.json").write_text(json.dumps(config))


def test_accuracy_against_the_bytes_of_each_pools_clients(tmp_path):
    with_cohorts(write_run(tmp_path / "run"), small=10, large=3)
    collection = collection_lib.collect([tmp_path])
    small, large = plots._bytes_plot(collection).axes
    # Per client and parameter 12 bytes; evaluations are 20 rounds apart.
    step = 20 * 12 / 1e6
    np.testing.assert_allclose(
        small.lines[0].get_xdata(), np.arange(6) * step * 10 * PARAMETERS["small"]
    )
    np.testing.assert_allclose(
        large.lines[0].get_xdata(), np.arange(6) * step * 3 * PARAMETERS["large"]
    )
    assert "accuracy_by_bytes.png" in [
        path.name for path in report.write_report(collection, tmp_path / "out").plots
    ]


@pytest.mark.parametrize("averaged", [False, True])
def test_bytes_that_change_are_added_up_round_by_round(averaged, tmp_path, monkeypatch):
    """The mean over the whole run moved early points to the right, or to the left."""
    monkeypatch.setattr(mean_model, "MOST_MODELS", 1 if averaged else 8)
    final = {"small": 0.8, "large": 0.7, "ensemble": 0.9}
    monkeypatch.setitem(PARAMETERS, "ensemble", 0)
    run = write_run(tmp_path / "run", seeds=2, final=final)
    with_cohorts(run, small=10, large=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if (line["model"], line["split"]) != ("ensemble", "clients")]
    measured = {20: 100.0, 40: None, 60: 700.0, 80: 800.0, 100: 900.0}
    for line in lines:
        if (line["model"], line["split"]) == ("small", "clients") and line["round"]:
            value = measured[line["round"]]
            line["client_bytes_up"] = value and value + 50 * line["seed"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    del summary["models"]["ensemble"]
    (run / "summary.json").write_text(json.dumps(summary))
    up = np.array([0, 125, 4 * PARAMETERS["small"], 725, 825, 925])  # means of two seeds
    down = np.array([0, *5 * [8 * PARAMETERS["small"]]])
    small = 10 * 20 * np.cumsum(up + down) / 1e6
    large = 3 * 20 * np.arange(6) * 12 * PARAMETERS["large"] / 1e6
    expected = {"small model": small, "large model": large, "ensemble model": small + large}
    if averaged:
        expected = dict.fromkeys(("mean of 2 models", "ensemble model"), small + large)
    collection = mean_model.with_mean_model(collection_lib.collect([tmp_path]))
    panels = {axes.get_title(): axes for axes in plots._bytes_plot(collection).axes}
    assert panels.keys() == expected.keys()
    for title, places in expected.items():
        np.testing.assert_allclose(panels[title].lines[0].get_xdata(), places)


def test_models_that_divide_one_pool_cost_what_all_its_clients_exchange(tmp_path):
    run = write_run(tmp_path / "run", "fed_sdd", final={"small": 0.8, "large": 0.7})
    with_cohorts(run, everyone=5)
    config = json.loads((run / "config.json").read_text())
    assert costs.clients_per_round(config, ["a", "b"]) == {"a": 3, "b": 2}
    small, large = plots._bytes_plot(collection_lib.collect([tmp_path])).axes
    total = 12 * (3 * PARAMETERS["small"] + 2 * PARAMETERS["large"]) * 100 / 1e6
    assert small.lines[0].get_xdata()[-1] == large.lines[0].get_xdata()[-1] == pytest.approx(total)
    config["algorithm"]["group_sizes"] = [1, 4]
    assert costs.clients_per_round(config, ["a", "b"]) == {"a": 1, "b": 4}
    # A run from Python may have any config.
    for pools in (["a"], {"a": 4}, 3):
        assert costs.clients_per_round({"pools": pools, "algorithm": "mine"}, ["a"]) == {"a": 0}
        assert costs.pool_of({"pools": pools}, "a") == "a"


def test_curves_are_of_the_split_that_is_followed(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [each for each in lines if each["split"] != "test" or each["round"] == 100]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    collection = collection_lib.collect([tmp_path])
    assert collection.splits[0] == "test"
    for figure in (plots._metric_plot(collection), plots._loss_plot(collection)):
        assert len(figure.axes[0].lines[0].get_xdata()) == 6


def test_seeds_that_stopped_in_different_rounds_count_with_their_own_last_one(tmp_path):
    """With test data after the last round alone, they have no round in common."""
    for seed, end in ((0, 100), (1, 60)):
        run = write_run(tmp_path / f"seed_{seed}", seed=seed, last_round=end)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        kept = [each for each in lines if each["split"] != "test" or each["round"] == end]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        summary = json.loads((run / "summary.json").read_text()) | {"rounds": end}
        (run / "summary.json").write_text(json.dumps(summary))
    collection = collection_lib.collect([tmp_path])
    (method,) = collection.methods
    row = cells(collection, method.label, "small")
    assert row.rounds == "60 to 100"
    assert row.accuracy["test"].mean == pytest.approx((0.8 + 0.82 * 0.6) / 2)
    assert row.accuracy["held_out"].mean == pytest.approx((0.79 + 0.82 * 0.6 - 0.01) / 2)
    assert plots._per_label(method, "small", "test")[0] == pytest.approx(
        100 * (0.8 + 0.82 * 0.6) / 2
    )


def test_curve_is_over_the_rounds_that_every_seed_has(tmp_path):
    write_run(tmp_path / "a", seed=0, last_round=60, finished=False)
    write_run(tmp_path / "b", seed=1, last_round=40, finished=False)
    (method,) = collection_lib.collect([tmp_path]).methods
    one = collection_lib.curve(method, "small", "test", "accuracy")
    assert one.rounds == (0, 20, 40)
    assert one.statistics[2].mean == pytest.approx((0.8 + 0.82) / 2 * 0.4)


def test_command_prints_the_table_and_where_the_files_are(tmp_path, capsys):
    three_methods(tmp_path)
    (tmp_path / "notes").mkdir()
    assert report.main([str(tmp_path), "--title", "three [methods]"]) == 0
    output = capsys.readouterr().out
    assert "three [methods]" in output and "MergedCodist" in output
    for name in ("accuracy.png", "loss.png", "report.html"):
        assert f"wrote {tmp_path / name}" in output
        assert (tmp_path / name).stat().st_size > 1000


def test_command_writes_above_several_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    three_methods(tmp_path / "runs")
    (tmp_path / "runs" / "report.html").write_text("what a glob also finds")
    assert report.main(["runs/fed_avg", "runs/merged", "runs/report.html"]) == 0
    assert "base64" in (tmp_path / "runs" / "report.html").read_text()


def test_output_folder_is_created(tmp_path):
    three_methods(tmp_path / "runs")
    output = tmp_path / "deep" / "out"
    assert report.main([str(tmp_path / "runs"), "--output", str(output)]) == 0
    assert (output / "report.html").exists()
    assert not (tmp_path / "runs" / "report.html").exists()


def one_line_and_status_2(arguments, capsys):
    assert report.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert not captured.out
    return captured.err


def test_no_run_found(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert "no run" in one_line_and_status_2([tmp_path], capsys)


def test_missing_folder(tmp_path, capsys):
    assert "no such folder" in one_line_and_status_2([tmp_path / "nothing"], capsys)


@pytest.mark.parametrize("config", ["{", "[1]", "\xff"])
def test_only_a_broken_run(tmp_path, capsys, config):
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text(config, encoding="latin-1")
    assert "config.json" in one_line_and_status_2([tmp_path], capsys)


def test_run_killed_before_its_first_evaluation(tmp_path, capsys):
    run = write_run(tmp_path / "run", finished=False)
    (run / "metrics.jsonl").write_text('{"round": 20, "mod')
    assert "no evaluation yet" in one_line_and_status_2([run], capsys)


def test_folders_without_a_run_are_noted(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    collection = collection_lib.collect([tmp_path / "run", tmp_path / "empty", tmp_path / "run"])
    (note,) = collection.notes
    assert "empty" in note
    assert len(collection.methods[0].runs) == 1


def test_output_that_is_a_file(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert report.main([str(tmp_path / "run"), "--output", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_the_table_and_a_hint(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    three_methods(tmp_path)
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "MergedCodist" in output
    assert [line for line in output.splitlines() if "fedcodist[plot]" in line]
    assert not list(tmp_path.glob("*.png"))
    assert "MergedCodist" in (tmp_path / "report.html").read_text()


def test_many_parties_are_one_panel_of_their_mean(tmp_path):
    """A panel for each would make pictures too wide to be read, or to be drawn."""
    accuracies = {f"party_{number}": 0.5 + number / 1000 for number in range(100)}
    for seed in (0, 1):
        write_run(tmp_path / str(seed), "fed_md", seed=seed, final=accuracies, finished=False)
    collection = collection_lib.collect([tmp_path])
    averaged = mean_model.with_mean_model(collection)
    assert averaged.models == ("mean of 100 models",)
    of_mean = collection_lib.curve(averaged.methods[0], *averaged.models, "test", "accuracy")
    every = [collection_lib.curve(collection.methods[0], m, "test", "accuracy") for m in accuracies]
    assert of_mean.rounds == every[0].rounds
    for place, statistic in enumerate(of_mean.statistics):
        means = [curve.statistics[place].mean for curve in every]
        assert statistic.mean == pytest.approx(sum(means) / 100)
        assert statistic.spread == pytest.approx(every[0].statistics[place].spread, abs=1e-9)
    labels = plots._per_label(averaged.methods[0], *averaged.models, "test")
    assert labels[0] == pytest.approx(100 * of_mean.statistics[-1].mean) and math.isnan(labels[-1])
    (panel,) = plots._metric_plot(averaged).axes
    assert panel.get_title() == "mean of 100 models"
    assert [mean_model.panel_title(name) for name in ("small", "global_model")] == [
        "small model",
        "global_model",
    ]
    files = report.write_report(collection, tmp_path / "report")
    assert {path.name for path in files.plots} == {
        "accuracy.png",
        "loss.png",
        "per_label_accuracy.png",
    }


def test_the_mean_of_all_parties_has_the_bytes_of_all(tmp_path, monkeypatch):
    names = [f"party_{number}" for number in range(9)]
    monkeypatch.setattr(sys.modules[__name__], "PARAMETERS", dict.fromkeys(names, 1_000))
    run = write_run(tmp_path / "run", "fed_md", final=dict.fromkeys(names, 0.5))
    config = json.loads((run / "config.json").read_text())
    config["parties"] = config.pop("pools")
    (run / "config.json").write_text(json.dumps(config))
    collection = collection_lib.collect([run])
    averaged = mean_model.with_mean_model(collection)
    (of_one,) = plots._megabytes(collection.methods[0], "party_0", [1])
    assert of_one == pytest.approx(0.012)
    (of_all,) = plots._megabytes(averaged.methods[0], averaged.models[0], [1])
    assert of_all == pytest.approx(9 * of_one)


def test_what_clients_do_not_train_has_a_panel_of_its_own(tmp_path):
    models = {f"party_{number}": 0.5 for number in range(9)} | {"server": 0.9}
    run = write_run(tmp_path / "run", "ds_fl", final=models, finished=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [each for each in lines if (each["model"], each["split"]) != ("server", "clients")]
    # A party that took no step has no loss, and one of them was not evaluated in round 20.
    for each in kept:
        if each["model"] == "party_3" and each["split"] == "clients":
            each["client_loss"] = None
    kept = [e for e in kept if (e["model"], e["split"], e["round"]) != ("party_5", "test", 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    collection = collection_lib.collect([run])
    averaged = mean_model.with_mean_model(collection)
    assert averaged.models == ("mean of 9 models", "server")
    curve = lambda *what: collection_lib.curve(averaged.methods[0], *what)
    assert curve("mean of 9 models", "test", "accuracy").rounds == (0, 40, 60, 80, 100)
    assert curve("server", "test", "accuracy").statistics[-1].mean == pytest.approx(0.9)
    expected = collection_lib.curve(collection.methods[0], "party_0", "clients", "client_loss")
    of_mean = curve("mean of 9 models", "clients", "client_loss").statistics
    assert [s.mean for s in of_mean] == pytest.approx([s.mean for s in expected.statistics])


def test_a_few_models_have_their_own_panels(tmp_path):
    collection = collection_lib.collect([three_methods(tmp_path)])
    assert mean_model.with_mean_model(collection) is collection


@pytest.mark.parametrize("name", ["client_loss", "loss"])
def test_the_loss_in_training_has_a_panel(tmp_path, name):
    """Pools call it client_loss, and parties loss."""
    run = write_run(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text().replace("client_loss", name)
    (run / "metrics.jsonl").write_text(text)
    figure = plots._loss_plot(collection_lib.collect([run]))
    labels = {axes.get_ylabel() for axes in figure.axes} - {""}
    assert labels == {"Test loss", "Clients' loss in training"}


def test_loss_only_runs_have_a_loss_plot(tmp_path):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "accuracy" not in k} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    files = report.write_report(collection_lib.collect([run]), tmp_path)
    assert [path.name for path in files.plots] == ["loss.png"]
    # Also if no split is called 'test'.
    kept = [line for line in kept if line["split"] != "test"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    figure = plots._loss_plot(collection_lib.collect([run]))
    assert len(figure.axes[0].lines[0].get_xdata()) == 6


def test_command_starts_without_jax_and_ends_with_its_status(tmp_path):
    code = (
        "import sys; from fedcodist import report; status = report.main(sys.argv[1:]);"
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


def test_clients_are_plotted_from_the_lowest_to_the_highest(tmp_path):
    folder = tmp_path / "run"
    write_run(folder)
    measured = {
        model: ClientMetrics(
            np.arange(4), np.full(4, 5), {"accuracy": np.array([values]), "loss": np.ones((1, 4))}
        )
        for model, values in {
            "small": [0.8, 0.2, 0.6, 0.4],
            "small_fine_tuned": [0.9, 0.8, 0.7, 1.0],
            "personal": [0.1, 0.2, 0.3, 0.4],
            "personal_fine_tuned": [0.4, 0.3, 0.2, 0.1],  # the last style of lines, a pattern
        }.items()
    }
    save_clients(folder / CLIENTS, 100, {"client_test": measured})
    figure = clients_plot(collection_lib.collect([tmp_path]))
    (axes,) = figure.axes
    shown = {line.get_label().split(", ")[-1]: line.get_ydata().tolist() for line in axes.lines}
    assert shown["small"] == pytest.approx([20, 40, 60, 80])
    assert shown["small_fine_tuned"] == pytest.approx([70, 80, 90, 100])
    files = report.write_report(collection_lib.collect([tmp_path]), tmp_path / "out")
    assert "clients.png" in [path.name for path in files.plots]
    assert "Accuracy of each client on its own examples" in files.html.read_text()


def test_only_finished_runs_and_each_seed_once_are_plotted(tmp_path, capsys):
    """Clients are sorted within a seed: with another division a client is another one."""
    of_runs = {"a": ([0.2, 0.4], 1), "b": ([0.8, 0.6], 2), "again": ([0.0, 0.0], 1)}
    for name, (values, seed) in of_runs.items():
        write_run(tmp_path / name, seed=seed)
        metrics = {"accuracy": np.array([values])}
        measured = {"small": ClientMetrics(np.arange(2), np.full(2, 5), metrics)}
        save_clients(tmp_path / name / CLIENTS, 100, {"client_test": measured})
    write_run(tmp_path / "killed", seed=3, finished=False)
    save_clients(tmp_path / "killed" / CLIENTS, 50, {"client_test": measured})
    (axes,) = clients_plot(collection_lib.collect([tmp_path])).axes
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([40, 60])
    (tmp_path / "b" / CLIENTS).write_bytes(b"x")
    (axes,) = clients_plot(collection_lib.collect([tmp_path])).axes
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([20, 40])
    assert "is damaged" in capsys.readouterr().err


def test_without_measured_clients_there_is_no_such_plot(tmp_path):
    write_run(tmp_path / "run")
    assert clients_plot(collection_lib.collect([tmp_path])) is None


@pytest.mark.parametrize("group", ["training", "algorithm"])
def test_budgets_of_one_method_are_one_line_of_accuracy_by_epsilon(group, tmp_path):
    for name, epsilon, accuracy in (("a", 8.0, 0.8), ("b", 2.0, 0.5), ("c", None, 0.9)):
        privacy = {"privacy": {"epsilon": epsilon}}
        write_run(tmp_path / name, name="private", final={"small": accuracy})
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(
            json.dumps(config | {group: config.get(group, {}) | privacy})
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        spent = [json.loads(line) | {"epsilon": epsilon} for line in lines]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in spent))
    write_run(tmp_path / "d", algorithm="merged_codistillation", name="private")  # counts none
    lines = privacy_plot._lines(collection_lib.collect([tmp_path]), "test")
    (line,) = lines.values()
    assert line.epsilons == [2.0, 8.0]
    assert line.accuracies == pytest.approx([50.0, 80.0])
    assert line.without_noise == pytest.approx(90.0)
    figure = privacy_plot.privacy_plot(collection_lib.collect([tmp_path]))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["small model"]


def test_a_personal_model_beside_a_noised_one_is_no_run_without_noise(tmp_path):
    for name, epsilon in (("a", 8.0), ("b", 2.0)):
        write_run(tmp_path / name, name="private", final={"small": 0.8, "large": 0.9})
        config = json.loads((tmp_path / name / "config.json").read_text())
        training = config.get("training", {}) | {"privacy": {"epsilon": epsilon}}
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"training": training}))
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        spent = [x | ({"epsilon": epsilon} if x["model"] == "small" else {}) for x in lines]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in spent))
    (key,) = privacy_plot._lines(collection_lib.collect([tmp_path]), "test")
    assert key[1] == "small"


def test_budgets_of_one_method_with_two_settings_have_a_label_each(tmp_path):
    for rate in (0.1, 0.01):
        folder = write_run(tmp_path / str(rate), name="private", final={"small": 0.5})
        config = json.loads((folder / "config.json").read_text())
        training = config.get("training", {}) | {"rate": rate, "privacy": {"epsilon": 2.0}}
        (folder / "config.json").write_text(json.dumps(config | {"training": training}))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        spent = [json.loads(line) | {"epsilon": 2.0} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in spent))
    figure = privacy_plot.privacy_plot(collection_lib.collect([tmp_path]))
    (legend,) = figure.legends
    labels = sorted(text.get_text().rpartition(", ")[2] for text in legend.get_texts())
    assert labels == ["rate=0.01", "rate=0.1"]
    # None of them is cut off.
    figure.draw_without_rendering()
    edges = legend.get_window_extent()
    assert 0 <= edges.x0 < edges.x1 <= figure.bbox.x1


def run_of_a_script(workdir, width=8, rounds=2, seed=0):
    """A run of `run_experiment` without a config."""
    draw = np.random.default_rng(0)
    columns = {
        "image": draw.normal(size=(20, 3)).astype(np.float32),
        "label": np.arange(20, dtype=np.int32) % 2,
    }
    clients = fc.FederatedData.from_arrays(columns, offsets=np.arange(5) * 5)
    network = nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(2)])
    model = fc.from_flax_linen(network, jnp.zeros((1, 3)))
    method = fc.fed_avg(model, fc.LocalTraining(batch_size=5))
    pools = {"main": fc.Pool(method, np.arange(4), cohort_size=2)}
    experiment = fc.Experiment(
        fc.independent_pools(pools, clients.columns),
        fc.resident_data(clients),
        splits={"held_out": clients},
        rounds=rounds,
        evaluate_every=1,
        seed=seed,
    )
    fc.run_experiment(experiment, workdir, show_progress=False)


@pytest.mark.usefixtures("compile_quickly")
def test_runs_of_a_script_are_reported_and_only_those_of_one_experiment_joined(tmp_path):
    run_of_a_script(tmp_path / "a")
    assert report.main([str(tmp_path / "a"), "--output", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").exists()
    run_of_a_script(tmp_path / "b", seed=1)
    run_of_a_script(tmp_path / "c", width=4)
    run_of_a_script(tmp_path / "d", rounds=3)
    collection = collection_lib.collect([tmp_path])
    folders = [[run.folder.name for run in method.runs] for method in collection.methods]
    assert folders == [["a", "b"], ["c"], ["d"]]
    assert [len(method.members) for method in collection.methods] == [2, 1, 1]
    assert collection.methods[1].label == "FedAvg (rounds=2, features=4)"
    assert collection.notes == ()


def test_only_periodic_methods_have_lines_where_they_distil(tmp_path):
    for name in ("fed_avg", "merged_codistillation", "periodic_codistillation"):
        write_run(tmp_path / name, name, period=40)
    methods = collection_lib.collect(
        [
            tmp_path / name
            for name in ("fed_avg", "merged_codistillation", "periodic_codistillation")
        ]
    ).methods
    lines = {each.label: plots._codistillation_rounds(each) for each in methods}
    assert lines == {"FedAvg": [], "PeriodicCodist": [40, 80], "MergedCodist": []}
