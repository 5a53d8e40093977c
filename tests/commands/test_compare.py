"""Comparing methods: reading run folders, the ranking, and differences within seeds."""

import codecs
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedcodist.commands import compare
from fedcodist.commands.evaluated_names import EvaluatedNames, _of_run, evaluated_names
from fedcodist.config import experiment, registry
from fedcodist.config.networks import MODELS
from fedcodist.config.passes import LEARNING
from fedcodist.configs import digits_methods, digits_parties
from fedcodist.report import entries as entries_lib
from fedcodist.report import flops, plots
from fedcodist.report.data_of_runs import DataOfRun
from fedcodist.report.entries import ALL_PARTIES, Entry
from fedcodist.report.forward_flops import forward_flops_of
from fedcodist.report.ranking import difference, ranked
from fedcodist.report.ranking_table import budget, for_terminal, ranking_table, write_ranking
from fedcodist.report.runs import load_run
from fedcodist.report.work import Flops

CONFIG = "fedcodist/configs/digits_methods.py"


def entry(run, accuracies, model="main", examples=10.0):
    seeds = tuple(range(len(accuracies)))
    return Entry(
        run, model, tuple(accuracies), seeds, "test", 1.0, examples, 2.5e9, 4e13, 5.0, 0.0123
    )


def read_run(name, folder, metric="accuracy"):
    return entries_lib.read_run(name, load_run(folder), metric)


def drawn(shown, baseline, entries, metric="accuracy", width=200):
    console = Console(record=True, width=width)
    console.print(for_terminal(ranking_table(shown, baseline, entries, metric)))
    return console.export_text()


ENTRIES = [
    entry("fed_avg", (50.0, 60.0, 55.0)),
    entry("fed_prox", (52.0, 61.0, 57.5)),
    entry("fed_sdd", (70.0, 60.0, 65.0)),
    entry("fed_sdd", (40.0, 45.0, 50.0), "model_1"),
    entry("fed_sdd", (71.0, 66.0, 67.0), "ensemble"),
]


def test_the_most_accurate_is_first_and_models_are_the_baselines():
    assert [e.run for e in ranked(ENTRIES, "fed_avg", None)] == ["fed_sdd", "fed_prox", "fed_avg"]
    both = ranked(ENTRIES, "fed_avg", ["main", "ensemble"])
    assert (both[0].run, both[0].model) == ("fed_sdd", "ensemble")
    with pytest.raises(ValueError, match=r"--model must be one of .*, got 'large'"):
        ranked(ENTRIES, "fed_avg", ["large"])


NAN = float("nan")


def shown_table(entries, baseline="fed_avg", metric="accuracy"):
    """(runs in order, text of the table)."""
    shown = ranked(entries, baseline, None, metric)
    return [e.run for e in shown], drawn(shown, baseline, entries, metric)


@pytest.mark.parametrize("undefined", [(NAN,), (math.inf,), (NAN, 99.0), (99.0, NAN)])
def test_what_is_undefined_is_last_and_a_dash(undefined):
    more = len(undefined) - 1
    entries = [
        entry("fed_avg", (41.0, *[43.0] * more)),
        entry("fed_prox", undefined),
        entry("scaffold", (87.0, *[86.0] * more)),
        entry("fed_df", (63.0, *[64.0] * more)),
    ]
    runs, text = shown_table(entries)
    assert runs == ["scaffold", "fed_df", "fed_avg", "fed_prox"]
    (line,) = [line for line in text.splitlines() if "fed_prox" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[2:4] == ["-", "-"] and "nan" not in text and "inf" not in text
    assert difference(entries[1], entries, "fed_avg") is None
    # And where it is the baseline.
    runs, text = shown_table(entries, "fed_prox")
    assert runs[-1] == "fed_prox" and "nan" not in text
    (line,) = [line for line in text.splitlines() if "scaffold" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]][3] == "-"


def test_parties_of_which_one_is_undefined_and_shared_models():
    entries = [
        entry("fed_kd", (NAN, 1.0)),
        entry("fed_kd", (3.0, 4.0), "main_teachers")._replace(shared="main"),
        entry("fed_avg", (2.0, 2.0)),
    ]
    runs, text = shown_table(entries)
    assert runs == ["fed_kd", "fed_avg"] and "nan" not in text


@pytest.mark.parametrize("metric", ["loss", "perplexity", "hidden_distance", "error_rate", "kl"])
def test_of_losses_the_least_is_first_and_they_are_no_shares(metric):
    entries = [entry("fed_avg", (2.5,)), entry("fed_prox", (0.5,)), entry("fed_df", (NAN,))]
    runs, text = shown_table(entries, metric=metric)
    assert runs == ["fed_prox", "fed_avg", "fed_df"]
    assert "%" not in text and "0.50" in text and "-2.00" in text and "the least is first" in text
    small = [entry("fed_avg", (0.0031,)), entry("fed_prox", (0.0027,))]
    text = shown_table(small, metric=metric)[1]
    assert "0.0031" in text and "-0.00040" in text


@pytest.mark.parametrize(
    ("metric", "share"),
    [
        ("accuracy_head_2", True),
        ("ndcg_5", True),
        ("f_score", True),
        ("loss", False),
        ("words", False),
    ],
)
def test_shares_alone_are_in_per_cent(metric, share, tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["final"]["main"]["test"][metric] = [0.5, 0.25]
    path.write_text(json.dumps(summary))
    (found,) = read_run("run", tmp_path / "run", metric)
    assert found.values == ((50.0, 25.0) if share else (0.5, 0.25))
    assert (f"{metric} in %" in shown_table([found], "run", metric)[1]) == share


def test_a_setting_that_a_count_of_flops_lacks_is_named(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")
    monkeypatch.setattr("fedcodist.report.flops.flops_of_run", lambda *_: {}["open_size"])
    read_run("run", tmp_path / "run")
    assert "looks up 'open_size', which is not set in the config" in capsys.readouterr().err


def test_flops_that_are_not_counted_are_a_dash(tmp_path, capsys):
    """A method of one's own: what was trained is worth its table."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["algorithm"]["name"] = "ours"
    path.write_text(json.dumps(config))
    entries = read_run("run", tmp_path / "run")
    assert entries[0].values == (50.0, 75.0) and math.isnan(entries[0].client_flops)
    error = capsys.readouterr().err
    assert error.startswith("note: run: FLOPs are left out: FLOPs of 'ours'")
    assert error.count("\n") == 1
    text = shown_table(entries, "run")[1]
    (line,) = [line for line in text.splitlines() if "main" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]][-4:-2] == ["-", "-"]


def test_a_run_without_the_metric_leaves_the_others_their_table(tmp_path, monkeypatch, capsys):
    for name, metric in (("fed_avg", "f_score"), ("fed_df", "f_score"), ("fed_sdd", "auc")):
        write_run(tmp_path / name)
        add_metric(tmp_path / name, metric, [0.5, 0.25])
    monkeypatch.setattr(compare.sweep, "main", lambda arguments: 0)
    reports = []
    monkeypatch.setattr(
        compare.report, "show_report", lambda collection, *_, **__: reports.append(collection) or 0
    )
    given = ["--config", CONFIG, "--workdir", str(tmp_path)]
    given += [f"--only={name}" for name in ("fed_avg", "fed_df", "fed_sdd")]
    assert compare.main([*given, "--metric=f_score"]) == 0
    output, error = capsys.readouterr()
    assert "fed_df" in output and "37.50" in output
    assert [collection.metric for collection in reports] == ["f_score"]
    assert error.startswith("note: left out: --metric must be one of") and error.count("\n") == 1
    assert compare.main([*given, "--metric=auc"]) == 2
    assert capsys.readouterr().err.startswith("error: --metric must be one of")


def test_a_metric_that_no_run_will_have_is_refused_before_anything_is_trained(tmp_path, capfd):
    arguments = [f"--config={CONFIG}", f"--workdir={tmp_path / 'runs'}", "--only=fed_avg"]
    assert compare.main([*arguments, "--metric=f_score"]) == 2
    assert capfd.readouterr().err == (
        "error: --metric must be one of ['loss', 'accuracy'] for fed_avg, got 'f_score'.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_split_that_no_run_will_have_is_refused_before_anything_is_trained(tmp_path, capfd):
    arguments = [f"--config={CONFIG}", f"--workdir={tmp_path / 'runs'}", "--only=fed_avg"]
    assert compare.main([*arguments, "--split=tset"]) == 2
    assert capfd.readouterr().err.endswith("for fed_avg, got 'tset'.\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--metric=f_scor", "--metric must be one of ['accuracy'] for fed_avg, got 'f_scor'."),
        ("--split=tset", "--split must be one of ['test', 'held_out'] for fed_avg, got 'tset'."),
        (
            "--metric=accuracy_weighted",
            "--metric must be one of ['accuracy'] for fed_avg, got 'accuracy_weighted'.",
        ),
    ],
)
def test_names_of_a_finished_baseline_are_read_from_it(
    option, message, tmp_path, monkeypatch, capsys
):
    """With a mistyped one, all other runs were trained first."""
    write_run(tmp_path / "fed_avg")
    monkeypatch.setattr(compare, "evaluated_names", lambda *_: pytest.fail("is a process"))
    monkeypatch.setattr(compare.sweep, "main", lambda _: pytest.fail("trains"))
    assert compare.main([f"--config={CONFIG}", f"--workdir={tmp_path}", option]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_model_that_no_run_will_have_is_refused_before_anything_is_trained(
    tmp_path, monkeypatch, capsys
):
    models = {"fed_avg": ["main"], "fed_df": ["main", "ensemble"], "fed_sdd": ["main"]}
    asked, trained = [], []

    def names(config, others):
        asked.append(config.rpartition(":")[2])
        return EvaluatedNames({"test": ["accuracy"]}, models[asked[-1]])

    monkeypatch.setattr(compare, "evaluated_names", names)
    monkeypatch.setattr(compare.sweep, "main", lambda arguments: trained.append(1) or 1)
    given = [f"--config={CONFIG}", f"--workdir={tmp_path}", *(f"--only={run}" for run in models)]
    assert compare.main([*given, "--model=ensembl"]) == 2
    assert capsys.readouterr().err == (
        "error: --model must be one of ['main', 'ensemble'], got 'ensembl'.\n"
    )
    assert asked == list(models) and not trained
    asked.clear()
    assert compare.main([*given, "--model=ensemble"]) == 1
    assert len(asked) == 2 and trained, "no further run is asked than necessary"


def test_metrics_and_splits_are_known_without_training():
    names = evaluated_names(f"{CONFIG}:fed_sdd", ["--config.rounds=3"])
    assert names.metrics == {"held_out": ["loss", "accuracy"], "test": ["loss", "accuracy"]}
    assert {"main", "ensemble"} <= set(names.models)
    personal = str(CONFIG).replace("digits_methods", "digits_personal")
    own = evaluated_names(f"{personal}:ditto", [])
    assert list(own.metrics) == ["held_out", "test", "client_test"]
    assert {name for name in own.metrics["client_test"] if "accuracy_w" in name} == {
        "accuracy_weighted",
        "accuracy_worst_tenth",
    }
    assert "accuracy_weighted" not in own.metrics["test"]
    assert "loss_weighted" not in own.metrics["client_test"]
    assert {"main", "main_personal", "main_fine_tuned"} <= set(own.models)
    # A mistake in a run is reported when that run starts.
    assert evaluated_names(f"{CONFIG}:fed_sdd", ["--config.data.num_clients=0"]) is None


def test_metrics_of_the_config_are_known_too(tmp_path):
    """Before, `compare --metric top_3` was refused for a config that adds it."""
    config = tmp_path / "config.py"
    config.write_text(
        "from fedcodist.configs import digits_methods\n"
        "get_runs = digits_methods.get_runs\n"
        "def get_config(run):\n"
        "    config = digits_methods.get_config(run)\n"
        "    config.metrics = dict(top_3='top_3')\n"
        "    return config\n"
    )
    metrics = evaluated_names(f"{config}:fed_avg", []).metrics
    assert metrics["test"] == ["loss", "accuracy", "top_3"]


def test_no_round_is_compiled_to_know_names(monkeypatch):
    """With `vmap` the size of chunks was chosen, for which rounds are compiled, and then not used."""
    monkeypatch.setattr(experiment, "choose_chunk_size", lambda *_: pytest.fail("compiles rounds"))
    config = digits_methods.get_config("fed_avg")
    config.execution.loop = "vmap"
    assert config.execution.chunk_size is None
    assert _of_run(config).metrics["test"] == ["loss", "accuracy"]


def test_names_are_shown_as_they_are():
    """Names are not read as rich's markup, where an unmatched end is an error."""
    name = "[/b] [red]x $y$"
    runs, text = shown_table([entry(name, (1.0,)), entry("fed_avg", (2.0,))], name, "[/a] accuracy")
    assert runs == ["fed_avg", name] and name in text and f"to {name}" in text


def test_differences_are_within_seeds():
    found = difference(ENTRIES[1], ENTRIES, "fed_avg")
    pairs = np.array([2.0, 1.0, 2.5])
    assert found.mean == pytest.approx(pairs.mean())
    low, high = stats.t.interval(0.95, 2, pairs.mean(), stats.sem(pairs))
    assert found.half_width == pytest.approx((high - low) / 2)
    assert difference(ENTRIES[0], ENTRIES, "fed_avg") is None
    # An ensemble is compared with the baseline's only model.
    assert difference(ENTRIES[4], ENTRIES, "fed_avg").mean == pytest.approx(13.0)
    one = [entry("a", (1.0,)), entry("b", (3.0,))]
    assert difference(one[1], one, "a") == (2.0, None, 1)


def test_differences_are_to_the_main_head_of_a_baseline_with_heads():
    last = entry("mhd", (90.0, 90.0))._replace(head=3)
    entries = [entry("mhd", (50.0, 60.0)), last, entry("local_only_steps", (40.0, 56.0))]
    assert difference(entries[2], entries, "mhd").mean == -7.0
    assert difference(last, entries, "mhd").mean == 35.0


def test_the_table_shows_everything():
    text = drawn(ranked(ENTRIES, "fed_avg", ["main", "ensemble"]), "fed_avg", ENTRIES)
    assert "3 seeds" in text
    assert text.index("ensemble") < text.index("fed_prox")
    for shown in ("55.00 ± 5.00", "+1.83 ± 1.90", "1.0", "10", "2.50 G", "40.00 T", "0.012"):
        assert shown in text
    assert "the same budget of client examples" in " ".join(text.split())


def test_clients_own_models_stand_for_the_one_they_share():
    """FedKD is ranked by its teachers, and the student is shown too."""
    entries = [
        entry("fed_avg", (50.0, 60.0)),
        entry("fed_kd", (40.0, 41.0)),
        entry("fed_kd", (62.0, 64.0), "main_teachers")._replace(shared="main"),
    ]
    for baseline in ("fed_avg", "fed_kd"):
        shown = ranked(entries, baseline, None)
        assert [(e.run, e.model) for e in shown] == [
            ("fed_kd", "main_teachers"),
            ("fed_avg", "main"),
        ]
        text = drawn(shown, baseline, entries)
        assert "shared model" in text and "40.50 ± 0.71" in text
        assert ("+8.00" if baseline == "fed_avg" else "-8.00") in text
    assert difference(entries[2], entries, "fed_avg").mean == 8.0
    both = ranked(entries, "fed_avg", ["main", "main_teachers"])
    assert [e.model for e in both] == ["main_teachers", "main", "main"]
    assert "shared model" not in drawn(ranked(ENTRIES, "fed_avg", None), "fed_avg", ENTRIES)


def test_fine_tuned_personal_models_stand_for_fine_tuned_shared_ones(tmp_path):
    """They were left out, or the fine-tuned shared model of their run was shown in their place."""
    fine_tuned = {"main_fine_tuned": 0.8, "main_personal_fine_tuned": 0.7}
    of_run = {
        "fed_avg": ["main_fine_tuned"],
        "fed_per": ["main_personal_fine_tuned"],  # its clients share no head
        "apfl": list(fine_tuned),
    }
    entries = []
    for run, models in of_run.items():
        write_run(tmp_path / run)
        path = tmp_path / run / "summary.json"
        summary = json.loads(path.read_text())
        summary["personal_models"] = {"main_personal": "main"}
        summary["final"] |= {
            model: {"client_test": {"accuracy": [fine_tuned[model]]}} for model in models
        }
        path.write_text(json.dumps(summary))
        entries += entries_lib.read_run(run, load_run(tmp_path / run), split="client_test")
    for baseline in of_run:
        shown = ranked(entries, baseline, None)
        assert [(entry.run, entry.model) for entry in shown] == [
            ("fed_avg", "main_fine_tuned"),
            ("fed_per", "main_personal_fine_tuned"),
            ("apfl", "main_personal_fine_tuned"),
        ]
        table = ranking_table(shown, baseline, entries)
        assert [row[3] for row in table.rows] == ["", "", "80.00"]
    assert difference(shown[1], entries, "fed_avg").mean == pytest.approx(-10.0)


def test_unequal_budgets_are_told():
    assert budget(ENTRIES).startswith("all runs have the same budget")
    assert budget([*ENTRIES, entry("x", (1.0,), examples=11.0)]).startswith("UNEQUAL BUDGETS")
    # A large model's pool has other clients than a small one's.
    pools = [entry(run, (1.0,), "large", 3.0) for run in ("fed_avg", "fed_sdd")]
    assert budget([*ENTRIES, *pools]).startswith("all runs have the same budget")
    # A personal model is compared with the shared ones.
    teachers = entry("fed_kd", (1.0,), "main_teachers", 1000.0)._replace(shared="main")
    assert budget([*ENTRIES, teachers]).startswith("UNEQUAL BUDGETS")
    uncounted = entry("x", (1.0,), examples=math.nan)
    assert budget([*ENTRIES, uncounted]).startswith("counted runs have the same budget")
    assert budget([uncounted]) == "no run has counted its client examples"


def test_budgets_of_runs_without_a_common_model_are_those_of_whole_runs():
    """Each model was compared with itself alone, and budgets were called the same."""
    three = [entry("x", (1.0,))._replace(run_examples=30.0)]
    mine = [
        entry("mine", (1.0,), model, examples)._replace(run_examples=30.0)
        for model, examples in (("shared", 20.0), ("own", 10.0))
    ]
    assert budget([*three, *mine]) == "all runs have the same budget of client examples"
    other = [each._replace(run_examples=31.0) for each in mine]
    assert budget([*three, *other]).startswith("UNEQUAL BUDGETS")


def write_run(folder, final_splits=("test",)):
    folder.mkdir(parents=True)
    config = {
        "rounds": 10,
        "pools": {"main": {"model": "digits_small", "cohort_size": 5}},
        "training": {},
        "algorithm": {
            "name": "fed_sdd",
            "steps": 3,
            "batch_size": 7,
            "num_models": 2,
            "rounds_kept": 1,
            "warm_up": 0,
            "cached": False,
            "distilled": "main",
        },
        "evaluation": {"splits": ["held_out"], "final_splits": list(final_splits)},
    }
    sizes = {"bytes_up_per_participation": 600_000, "bytes_down_per_participation": 400_000}
    summary = {
        "rounds": 10,
        "finished": True,
        "seconds": 3.5,
        "seconds_per_round": 0.25,
        "models": {"main": sizes, "model_1": sizes},
        "final": {
            "main": {"test": {"accuracy": [0.5, 0.75]}, "held_out": {"accuracy": [0.1, 0.2]}},
            "model_1": {"test": {"accuracy": [0.4, 0.4]}},
            "ensemble": {"test": {"accuracy": [0.6, 0.8]}},
        },
    }
    lines = [
        {"round": 0, "model": "main", "split": "held_out", "seed": 0, "accuracy": 0.1},
        # Means of four and of six rounds.
        {"round": 4, "model": "main", "split": "clients", "seed": 0, "client_examples": 20.0},
        {"round": 4, "model": "main", "split": "clients", "seed": 1, "client_examples": 40.0},
        {"round": 10, "model": "main", "split": "clients", "seed": 0, "client_examples": 10.0},
        {"round": 10, "model": "main", "split": "clients", "seed": 1, "client_examples": 10.0},
        {"round": 10, "model": "model_1", "split": "clients", "seed": 0, "client_examples": 50.0},
    ]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_metric(folder, metric, values):
    """Adds a metric of the main model on test data, a value per seed, to a run folder."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["final"]["main"]["test"][metric] = values
    path.write_text(json.dumps(summary))
    with (folder / "metrics.jsonl").open("a") as lines:
        for seed, value in enumerate(values):
            line = {"round": 10, "model": "main", "split": "test", "seed": seed, metric: value}
            print(json.dumps(line), file=lines)


@pytest.mark.parametrize(
    ("megabytes", "text"),
    [(0.0, "0.0"), (0.00528, "0.0053"), (0.31, "0.31"), (1.04, "1.0"), (12345.6, "12,345.6")],
)
def test_the_megabytes_of_a_small_network_are_not_zero(megabytes, text):
    table = ranking_table([entry("a", (50.0,))._replace(megabytes=megabytes)], "a", [])
    assert table.rows[0][table.headings.index("MB")] == text


def test_a_run_folder_tells_accuracies_and_costs(tmp_path):
    write_run(tmp_path / "run")
    main, other, ensemble = read_run("fed_sdd", tmp_path / "run")
    assert main.values == (50.0, 75.0)
    # Five clients in each of ten rounds, a megabyte each, whichever of the models they trained.
    assert main.megabytes == other.megabytes == ensemble.megabytes == 50.0
    # Three clients of the main model, two of the other.
    assert main.examples == pytest.approx(3 * (4 * 30 + 6 * 10) + 2 * 10 * 50)
    assert main.examples == other.examples == ensemble.examples
    forward = forward_flops_of(MODELS["digits_small"])
    assert main.client_flops == pytest.approx(LEARNING * forward * main.examples)
    # Ten rounds of three batches; two teachers and a student.
    assert main.server_flops == 10 * 21 * (2 + LEARNING) * forward
    assert main.seconds == 3.5
    write_run(tmp_path / "no_test", final_splits=())
    assert read_run("x", tmp_path / "no_test")[0].values == pytest.approx((10.0, 20.0))


def test_models_of_several_pools_divide_them_and_the_servers_costs_all(tmp_path):
    """A KeyError ended the comparison; main models were counted with their pools' whole cohorts."""
    write_run(tmp_path / "run")
    config, summary = (
        json.loads((tmp_path / "run" / name).read_text())
        for name in ("config.json", "summary.json")
    )
    config["algorithm"]["name"] = "fed_sdd_pools"
    config["pools"] = {
        pool: {"model": f"digits_{pool}", "cohort_size": clients}
        for pool, clients in (("small", 5), ("large", 1))
    }
    (sizes, _) = summary["models"].values()
    examples = {"small": 10.0, "small_model_1": 30.0, "large": 7.0}
    summary["models"] = dict.fromkeys(examples, sizes)
    summary["final"] = {
        model: {"test": {"accuracy": [0.5]}} for model in ("small", "large", "ensemble")
    }
    lines = [
        {"round": 10, "model": model, "split": "clients", "seed": 0, "client_examples": count}
        for model, count in examples.items()
    ]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    small, large, ensemble = read_run("run", tmp_path / "run")
    # Ten rounds, a megabyte per client.
    assert (small.megabytes, large.megabytes, ensemble.megabytes) == (50.0, 10.0, 60.0)
    assert (small.examples, large.examples) == (10 * (3 * 10 + 2 * 30), 10 * 7)
    assert ensemble.examples == small.examples + large.examples
    assert ensemble.client_flops == small.client_flops + large.client_flops > 0


def test_a_cached_teacher_of_a_streamed_run_predicts_the_rounds_images(tmp_path):
    """Its FLOPs were counted as if all unlabelled images were on the device."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["algorithm"]["cached"] = True
    path.write_text(json.dumps(config))
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"plan": {"stream": True}}))
    (found, *_) = read_run("run", tmp_path / "run")
    forward = forward_flops_of(MODELS["digits_small"])
    assert found.server_flops == 10 * 21 * (2 + LEARNING) * forward


def test_a_method_that_does_not_count_examples_is_one_line(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="has no client_examples of 'model_1'"):
        read_run("run", tmp_path / "run")


def test_a_private_run_without_clients_metrics_is_ranked_without_its_examples(tmp_path, capsys):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("client_examples", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config.setdefault("training", {})["privacy"] = {"metrics": False}
    path.write_text(json.dumps(config))
    found = read_run("run", tmp_path / "run")
    assert all(math.isnan(each.examples) and math.isnan(each.client_flops) for each in found)
    assert (
        "run: client examples and FLOPs are left out: training.privacy.metrics"
        in capsys.readouterr().err
    )
    both = [*ENTRIES[:2], found[0]._replace(model="main")]
    text = drawn(both, "fed_avg", both)
    assert "nan" not in text and "counted runs have the same budget" in text


def test_files_that_begin_with_a_byte_order_mark_are_read(tmp_path):
    write_run(tmp_path / "run")
    expected = read_run("run", tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_run("run", tmp_path / "run") == expected


def test_any_metric_is_read(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["final"]["main"]["test"]["f_score"] = [None, 0.25]  # one is undefined
    path.write_text(json.dumps(summary))
    (found,) = read_run("run", tmp_path / "run", "f_score")
    assert found.model == "main" and found.values == pytest.approx((math.nan, 25), nan_ok=True)
    message = r"--metric must be one of \['accuracy', 'f_score'\] for run, got 'auc'"
    with pytest.raises(ValueError, match=message):
        read_run("run", tmp_path / "run", "auc")


def write_party_run(folder):
    """Two rounds of FD between parties 0 and 2 with one network and party 1 with another, two seeds."""
    config = digits_parties.get_config("fd")
    config.data.num_parties = 3
    with config.ignore_type():
        config.parties.networks = (((6,), 0.0), ((5,), 0.0), ((6,), 0.0))
    folder.mkdir()
    names = {"dense_6_0": 0.2, "dense_6_2": 0.3, "dense_5": 0.7}
    sizes = {"bytes_up_per_participation": 440, "bytes_down_per_participation": 440}
    accuracies = {party: {"test": {"accuracy": [a, a + 0.3]}} for party, a in names.items()}
    summary = {
        "rounds": 2,
        "finished": True,
        "seconds": 1.0,
        "models": dict.fromkeys(names, sizes),
        "final": accuracies | {"server": {"test": {"accuracy": [0.0, 0.0]}}},
    }
    lines = [
        {"round": 2, "model": party, "split": "clients", "seed": seed, "client_examples": 48.0}
        for party in names
        for seed in (0, 1)
    ]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_parties_with_heads_are_ranked_on_their_own_examples_by_both_heads(tmp_path):
    """There all parties are one model. Its second head's entry ended in an error."""
    write_party_run(tmp_path / "fd")
    config = json.loads((tmp_path / "fd" / "config.json").read_text())
    config["parties"]["heads"] = 2
    (tmp_path / "fd" / "config.json").write_text(json.dumps(config))
    summary = json.loads((tmp_path / "fd" / "summary.json").read_text())
    own = {"accuracy": [0.5, 0.7], "accuracy_head_2": [0.6, 0.9]}
    summary["final"]["parties"] = {"client_test": own}
    (tmp_path / "fd" / "summary.json").write_text(json.dumps(summary))
    entries = entries_lib.read_run("fd", load_run(tmp_path / "fd"), split="client_test")
    assert [(e.model, e.head) for e in entries] == [(ALL_PARTIES, None), (ALL_PARTIES, 2)]
    assert entries[1].values == pytest.approx((60.0, 90.0))


def test_of_runs_with_other_seeds_the_largest_epsilon_is_shown():
    several = [
        entry("private", (50.0,))._replace(seeds=(seed,), epsilon=epsilon)
        for seed, epsilon in ((0, 1.0), (1, 4.0), (2, None))
    ]
    assert entries_lib._over_seeds(several).epsilon == 4.0


def test_times_of_repeated_seeds_are_not_added():
    """Their values count once."""
    three = entry("fed_avg", (50.0, 60.0, 70.0))._replace(seconds=30.0, seconds_per_round=0.3)
    again = entry("fed_avg", (60.0,))._replace(seeds=(1,), seconds=8.0, megabytes=9.0)
    part = entry("fed_avg", (70.0, 80.0))._replace(seeds=(2, 3), seconds=20.0, megabytes=5.0)
    joined = entries_lib._over_seeds([three, again, part])
    assert joined.seeds == (0, 1, 2, 3) and joined.seconds == 40.0
    assert joined.megabytes == 2.0 and joined.seconds_per_round == pytest.approx(0.3 + 0.0123 / 2)


def test_parties_are_ranked_by_their_mean_and_cost_together(tmp_path):
    write_party_run(tmp_path / "fd")
    entries = read_run("fd", tmp_path / "fd")
    assert [e.model for e in entries] == [
        ALL_PARTIES,
        "dense_6_0",
        "dense_6_2",
        "dense_5",
        "server",
    ]
    everybody, first, *_, server = entries
    assert everybody.values == pytest.approx((40.0, 70.0))
    # Two rounds of 2 x 440 bytes, and 48 examples, of each party; what they share costs all of it.
    assert (first.megabytes, first.examples) == pytest.approx((1760e-6, 96))
    assert (everybody.megabytes, everybody.examples) == pytest.approx((3 * 1760e-6, 3 * 96))
    assert everybody.client_flops == sum(e.client_flops for e in entries[1:4])
    assert (server.megabytes, server.examples) == (everybody.megabytes, everybody.examples)
    # 64 pixels, so many hidden features, ten classes; FD's parties answer each image once in 4 epochs.
    assert first.client_flops == 96 * (LEARNING + 1 / 4) * 2 * (64 * 6 + 6 * 10)
    # By default the mean over parties is shown.
    assert [e.model for e in ranked(entries, "fd", None)] == [ALL_PARTIES]
    assert [e.model for e in ranked(entries, "fd", ["dense_5"])] == ["dense_5"]


@pytest.mark.parametrize("stopping", ["fixed", "held_out", "test_data"])
def test_phases_that_looked_at_test_data_are_told(stopping, tmp_path):
    write_party_run(tmp_path / "fd")
    path = tmp_path / "fd" / "config.json"
    config = json.loads(path.read_text())
    config["phases"]["stopping"] = stopping
    path.write_text(json.dumps(config))
    entries = read_run("fd", tmp_path / "fd")
    notes = ranking_table(ranked(entries, "fd", None), "fd", entries).notes
    told = "phases before rounds stopped on TEST DATA, accuracies are too good: fd"
    assert (told in notes) == (stopping == "test_data")


def test_an_unfinished_run_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        read_run("x", tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ValueError, match="run holds no finished run"):
        read_run("x", tmp_path / "run")


def write_runs(folder):
    """Two methods, one of them as two runs with a seed each and another with both."""
    write_run(folder / "both")
    for place, seed in enumerate((0, 1)):
        path = folder / f"seed_{seed}"
        write_run(path)
        for name in ("config.json", "summary.json"):
            content = json.loads((path / name).read_text())
            if name == "config.json":
                content |= {"seed": seed, "run": "one_model"}
                content["algorithm"]["warm_up"] = 1
            else:
                for splits in content["final"].values():
                    values = splits["test"]["accuracy"]
                    splits["test"]["accuracy"] = [values[place] + 0.1 * (seed + 1)]
            (path / name).write_text(json.dumps(content))


def test_folders_of_runs_have_the_titles_that_their_modules_register(
    tmp_path, capsys, monkeypatch, request
):
    write_run(tmp_path / "runs" / "own")
    path = tmp_path / "runs" / "own" / "config.json"
    config = json.loads(path.read_text())
    config["algorithm"] = {"name": "titled_of_one"}
    config["methods"] = ["module_of_titled"]
    path.write_text(json.dumps(config))
    assert compare.main([str(tmp_path), "--model=main"]) == 0
    output, error = capsys.readouterr()
    assert "titled_of_one" in output
    assert "there is no module 'module_of_titled'" in error
    module = "from fedcodist.config.registry import POOLS, Entry, register\n"
    module += "register(Entry('titled_of_one', 'A title of one', POOLS, make=print))\n"
    (tmp_path / "module_of_titled.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "ENTRIES", dict(registry.ENTRIES))
    request.addfinalizer(lambda: registry.METHOD_NAMES.pop("titled_of_one"))
    assert compare.main([str(tmp_path), "--model=main"]) == 0
    assert "A title of one" in capsys.readouterr().out


def test_folders_of_runs_are_compared_and_runs_of_one_method_joined(tmp_path, capsys):
    write_runs(tmp_path / "runs")
    (tmp_path / "runs" / "empty").mkdir()
    assert compare.main([str(tmp_path), "--model=main", "--baseline=fed_sdd"]) == 0
    output, error = capsys.readouterr()
    assert "to fed_sdd" in output and error == ""
    content = json.loads((tmp_path / "report" / "ranking.json").read_text())
    first, second = content["rows"]
    assert (first["run"], first["seeds"], first["values"]) == ("one_model", [0, 1], [60.0, 95.0])
    assert (second["run"], second["values"]) == ("fed_sdd", [50.0, 75.0])
    assert first["difference"] == 15.0 and second["difference"] is None
    # Costs are of one seed; times of all.
    assert first["megabytes"] == second["megabytes"] == 50.0
    assert (first["seconds_per_round"], second["seconds_per_round"]) == (0.5, 0.25)
    html = (tmp_path / "report" / "report.html").read_text()
    assert html.index("<h2>Ranking: test accuracy in %, 2 seeds") < html.index("<h2>Results")
    for note in content["notes"]:
        assert note.replace("'", "&#x27;") in html and note in " ".join(output.split())
    # The same from the run folders themselves.
    folders = [str(tmp_path / "runs" / name) for name in ("both", "seed_1", "seed_0")]
    assert compare.main([*folders, "--model=main"]) == 0
    again = json.loads((tmp_path / "runs" / "report" / "ranking.json").read_text())
    assert again["rows"][0]["seeds"] == [1, 0] and again["baseline"] == "fed_sdd"


def test_the_report_shows_the_metric_that_ranks(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    add_metric(tmp_path / "run", "f_score", [0.625, 0.625])
    shown = []
    monkeypatch.setattr(
        compare.report, "show_report", lambda collection, *_, **__: shown.append(collection) or 0
    )
    for option in ("--metric=f_score", "--metric=accuracy"):
        assert compare.main([str(tmp_path / "run"), option]) == 0
    assert [collection.metric for collection in shown] == ["f_score", "accuracy"]
    assert [collection.splits for collection in shown] == [("test",), ("test", "held_out")]


def test_differences_are_within_the_seeds_that_both_have():
    entries = [
        entry("fed_avg", (50.0, 60.0, 70.0)),
        entry("fed_prox", (65.0, 71.0))._replace(seeds=(1, 2)),
        entry("fed_df", (65.0,))._replace(seeds=(9,)),
    ]
    assert difference(entries[1], entries, "fed_avg").mean == 3.0
    assert difference(entries[2], entries, "fed_avg") is None
    other = entry("scaffold", (65.0, 71.0, 72.0))._replace(seeds=(1, 2, 3))
    assert difference(other, entries, "fed_avg").seeds == 2
    (told,) = [n for n in ranking_table([other], "fed_avg", entries).notes if "only" in n]
    assert told == "to fed_avg: only 2 of the 3 seeds of scaffold are fed_avg's too"
    assert not any("only" in n for n in ranking_table(entries[:2], "fed_avg", entries).notes)
    text = drawn(ranked(entries, "fed_avg", None), "fed_avg", entries)
    assert "seeds" in text.splitlines()[2] and "3 seeds" not in text


def test_runs_on_other_splits_or_data_have_no_difference(tmp_path):
    """Values of the same seed were subtracted, though the examples were others."""
    write_run(tmp_path / "fed_avg")
    write_run(tmp_path / "without_test", final_splits=())
    entries = read_run("fed_avg", tmp_path / "fed_avg")
    entries += read_run("without_test", tmp_path / "without_test")
    shown = ranked(entries, "fed_avg", ["main"])
    table = ranking_table(shown, "fed_avg", entries)
    assert table.headings[3:5] == ["split", "to fed_avg"]
    assert [row[3:5] for row in table.rows] == [["test", ""], ["held out", "-"]]
    assert any(note.startswith("split: ") for note in table.notes)
    assert not any("other data" in note for note in table.notes)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (
            ({"data.num_clients": 40}, {}),
            ({"data.num_clients": 60}, {}),
            "num_clients = 40 in place",
        ),
        (({"data.seed": 1}, {"clients": "a"}), ({"data.seed": 2}, {"clients": "a"}), ""),
        (
            ({"data.seed": 1}, {"clients": "a"}),
            ({"data.seed": 2}, {"clients": "b"}),
            "data.seed = 1",
        ),
        (({}, {"test": "a"}), ({}, {"test": "b"}), "other examples"),
        (({"data.seed": 1}, {}), ({"data.seed": 1}, {"clients": "b"}), ""),
    ],
)
def test_other_data_are_told_by_their_checksums_or_else_by_settings(ours, theirs, told):
    entries = [
        entry(run, (50.0, 60.0))._replace(data=dict.fromkeys((0, 1), DataOfRun(*data)))
        for run, data in (("fed_prox", ours), ("fed_avg", theirs))
    ]
    notes = [n for n in ranking_table(entries, "fed_avg", entries).notes if "other data" in n]
    assert (difference(entries[0], entries, "fed_avg") is None) == bool(notes) == bool(told)
    assert told in "".join(notes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("same", [True, False])
def test_data_that_differ_by_seed_are_compared_seed_by_seed(order, same):
    """As with data.division_per_seed; the first seed's data stood for all, so the order counted."""

    def of_seed(run, seed, value):
        checksums = {"clients": "other" if (run, seed, same) == ("mine", 1, False) else seed}
        one = entry(run, (value,))
        return one._replace(seeds=(seed,), data={seed: DataOfRun({}, checksums)})

    ours = entries_lib._over_seeds([of_seed("mine", seed, 60.0 + seed) for seed in order])
    theirs = entries_lib._over_seeds([of_seed("fed_avg", seed, 50.0 - seed) for seed in (0, 1, 2)])
    found = difference(ours, [ours, theirs], "fed_avg")
    notes = ranking_table([ours, theirs], "fed_avg", [ours, theirs]).notes
    assert (found is not None and found.mean == 11.0) == same
    assert any(note.startswith("other data") for note in notes) != same
    # Without a common seed nothing says that the data are others.
    apart = of_seed("mine", 3, 60.0)
    notes = ranking_table([apart, theirs], "fed_avg", [apart, theirs]).notes
    assert "to fed_avg: no seed of mine is fed_avg's too" in notes
    assert not any(note.startswith("other data") for note in notes)


def test_data_of_a_run_are_its_settings_and_checksums(tmp_path):
    write_run(tmp_path / "run")
    data = {
        "clients": {"image": "a"},
        "splits": {"test": {"image": "b"}, "held_out": {"image": "c"}},
    }
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"identity": {"data": data}}))
    (found, *_) = read_run("run", tmp_path / "run")
    assert list(found.data) == [0, 1]
    assert found.data[0].checksums == {"clients": {"image": "a"}, "test": {"image": "b"}}
    assert found.run_examples == found.examples


def test_what_numbers_are_is_said_under_the_table():
    several = ranking_table(ENTRIES[:2], "fed_avg", ENTRIES).notes
    assert several[0] == "accuracy: mean over the seeds ± their sample standard deviation"
    assert "half of its 95 % interval" in several[1]
    one = ranking_table([entry("fed_avg", (1.0,))], "fed_avg", [])
    assert "no interval" in one.notes[0] and not any("95 %" in note for note in one.notes)
    assert one.title == "test accuracy in %, 1 seed"


def test_the_table_is_written_as_markdown_and_json(tmp_path):
    entries = [entry("a|b", (1.0, 3.0)), entry("fed_df", (NAN, 2.0))._replace(client_flops=NAN)]
    markdown, numbers = write_ranking(ranking_table(entries, "a|b", entries), tmp_path / "new")
    lines = markdown.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[2].startswith("| a\\|b | main | 2.00 ± 1.41 |  | 10 |") and len(rows) == 4
    # As many cells in each row; the escaped bar is none.
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    first, second = json.loads(numbers.read_text())["rows"]
    assert first["values"] == [1.0, 3.0] and first["standard_deviation"] == round(2**0.5, 9)
    assert second["values"] == [None, 2.0] and second["mean"] is second["client_flops"] is None


def test_runs_without_a_config_are_left_out(tmp_path, capsys):
    write_run(tmp_path / "run")
    write_run(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    del config["evaluation"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert compare.main([str(tmp_path)]) == 0
    assert "other was run without a config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pools": {"main": {"cohort_size": "all"}}}, "pools.main.cohort_size must be a number"),
        ({"pools": {"main": {"cohort_size": None}}}, "pools.main.cohort_size must be a number"),
        ({"algorithm": {"group_sizes": [5]}}, "algorithm.group_sizes must be 2 numbers"),
        ({"evaluation": "often"}, "without a config of the library"),
        ({"parties": ["a", "b"]}, "without a config of the library"),
        ({"pools": None}, "without a config of the library"),
    ],
)
def test_a_config_of_another_form_is_one_line_and_has_no_plot_of_bytes(changed, message, tmp_path):
    """Of a run that was started from Python."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=f"run.*{message}"):
        read_run("run", tmp_path / "run")
    run = load_run(tmp_path / "run")
    known = plots._megabytes(SimpleNamespace(members=[(run, 0)]), "main", [1])
    assert (known is None) == ("pools" in changed or "algorithm" in changed)


def test_the_split_of_training_is_none_of_the_final_ones(tmp_path):
    """Earlier versions wrote it for parties."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    summary["final"]["main"]["clients"] = {"num_steps": [4, 4]}
    path.write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"^--split must be one of \['test', 'held_out'\] for"):
        entries_lib.read_run("run", load_run(tmp_path / "run"), split="clients")
    assert set(compare._names_in(tmp_path / "run").metrics) == {"test", "held_out"}


def test_seeds_are_those_of_the_metrics_lines(tmp_path):
    """A config that Python gives may have another one than the experiment."""
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        write_run(folder)
        summary = json.loads((folder / "summary.json").read_text())
        summary["final"] = {"main": {"test": {"accuracy": [0.5]}}}
        del summary["models"]["model_1"]
        (folder / "summary.json").write_text(json.dumps(summary))
        line = {"round": 10, "model": "main", "split": "test", "seed": seed, "accuracy": 0.5}
        examples = line | {"split": "clients", "client_examples": 20.0}
        lines = "".join(json.dumps(each) + "\n" for each in (line, examples))
        (folder / "metrics.jsonl").write_text(lines)
        assert read_run("run", folder)[0].seeds == (seed,)


def test_a_config_of_ones_own_without_final_splits_is_ranked(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluation": {"every": 5}}))
    assert read_run("run", tmp_path / "run")[0].split == "test"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nowhere.py"], "--config must be an existing file, got 'nowhere.py'"),
        ([f"--config={CONFIG}", "--only=other"], "--only 'other' matches none of"),
        ([f"--config={CONFIG}", "--baseline=other"], "--baseline must be one of"),
        ([f"--config={CONFIG}", "--config.round=3"], "did you mean --config.rounds"),
        (["--config=digits_methods:fed_avg"], "name the run by --only fed_avg."),
        (["--config=nowhere"], "'nowhere' is no folder of runs, and --config must be an existing"),
        ([f"--config={CONFIG}", "--metrc=loss"], "--metrc is no option; did you mean --metric?"),
        (["runs"], "--workdir is an option of runs that --config describes"),
        (["--config.rounds=3", "runs"], "--config.rounds is an option of runs that --config"),
        (
            ["runs", "--metrc", "loss"],
            "--metrc is no option for folders of runs; did you mean --metric?",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path):
    assert compare.main([*arguments, f"--workdir={tmp_path / 'runs'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config and --workdir, or run folders"),
        (["nowhere"], "no such folder: nowhere"),
        ([f"--config={CONFIG}"], "--workdir must be given"),
        (["tests/commands"], "no run with an evaluation in or below tests/commands"),
    ],
)
def test_mistakes_with_folders_are_one_line(arguments, message, capsys):
    assert compare.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_runs_are_listed(capsys, tmp_path):
    assert compare.main([f"--config={CONFIG}", f"--workdir={tmp_path / 'runs'}", "--list"]) == 0
    assert set(capsys.readouterr().out.split()) == set(digits_methods.get_runs())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_methods_run_on_the_same_clients_and_are_ranked(tmp_path, capfd):
    """From the command to the table and the report, twice: the second time nothing runs."""
    arguments = [
        f"--config={CONFIG}",
        f"--workdir={tmp_path}",
        "--only=fed_avg",
        "--only=scaffold",
        "--only=fed_df",
        "--only=fed_sdd*",
        "--model=main",
        "--model=ensemble",
        "--config.rounds=4",
        "--config.evaluation.every=2",
        "--config.evaluation.checkpoint_every=2",
    ]
    assert compare.main(arguments) == 0
    output = capfd.readouterr().out
    assert "to fed_avg" in output
    assert "the same budget of client examples" in " ".join(output.split())
    for run in ("fed_avg", "scaffold", "fed_df", "fed_sdd", "fed_sdd,scaffold"):
        assert f"{run}: finished" in output
    for name in ("report.html", "accuracy.png", "accuracy_by_bytes.png"):
        assert (tmp_path / "report" / name).exists()
    assert compare.main(arguments) == 0
    runs = [run for run in digits_methods.get_runs() if run.startswith("fed_sdd")]
    assert capfd.readouterr().out.count("finished already") == 3 + len(runs)

    def start(run):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        first = [json.loads(line) for line in lines]
        return [r["loss"] for r in first if r["round"] == 0 and r["model"] == "main"]

    assert len(start("fed_avg")) == 3
    # The same initial weights.
    for run in ("scaffold", "fed_df", "fed_sdd"):
        assert all(
            math.isclose(a, b, rel_tol=1e-5)
            for a, b in zip(start(run), start("fed_avg"), strict=True)
        )


@pytest.mark.slow
def test_compressed_links_are_compared_by_measured_bytes(tmp_path, capfd):
    arguments = [
        "--config=fedcodist/configs/digits_compression.py",
        f"--workdir={tmp_path}",
        "--only=fed_avg",
        "--only=fetch_sgd",
        "--only=fed_dropout",
        "--only=fed_avg,svd",
        "--config.rounds=8",
        "--config.seeds=1",
        "--config.evaluation.every=4",
        "--config.evaluation.checkpoint_every=4",
    ]
    assert compare.main(arguments) == 0
    output = " ".join(capfd.readouterr().out.split())
    assert "UNEQUAL BUDGETS" in output  # FetchSGD computes one gradient where others train
    entries = {
        run: read_run(run, tmp_path / run.replace(",", "-"))[0]
        for run in ("fed_avg", "fetch_sgd", "fed_dropout", "fed_avg,svd")
    }
    megabytes = {run: entry.megabytes for run, entry in entries.items()}
    whole = 4 * 2410 * 2 * 4 * 8 / 1e6  # floats, both ways, clients, rounds
    assert megabytes["fed_avg"] == pytest.approx(whole, rel=1e-3)
    assert megabytes["fed_dropout"] == pytest.approx(0.595 * whole, rel=1e-2)
    # The first download is the whole model.
    assert 0.249 * whole < megabytes["fetch_sgd"] < (0.249 + 1 / 16) * whole
    assert megabytes["fed_avg,svd"] < 0.8 * whole
    records = (tmp_path / "fed_avg-svd" / "metrics.jsonl").read_text().splitlines()
    assert any("client_bytes_up" in json.loads(line) for line in records)


# Dense ones, which compile quickly.
QUICK_PARTIES = """
from fedcodist.configs import digits_parties
from fedcodist.configs.digits_parties import get_runs

def get_config(run="fed_md"):
    config = digits_parties.get_config(run)
    with config.ignore_type():
        config.parties.networks = 3 * (((16,), 0.0), ((8,), 0.0))
    if run == "fed_l2g":
        config.algorithm.warm_up = 0  # of more rounds than these runs have
    return config
"""


@pytest.mark.slow
def test_methods_of_parties_run_from_the_same_start_and_are_ranked(tmp_path, capfd):
    """Bytes are of logits and index lists, of label means, of models, of nothing."""
    config = tmp_path / "parties.py"
    config.write_text(QUICK_PARTIES)
    arguments = [
        f"--config={config}",
        f"--workdir={tmp_path}",
        "--config.rounds=2",
        f"--config.phases.cache={tmp_path / 'kept'}",
        "--config.phases.public.epochs=2",
        "--config.phases.private.epochs=2",
    ]
    assert compare.main(arguments) == 0
    output = capfd.readouterr().out
    assert "to local_only" in output
    assert "UNEQUAL BUDGETS" in " ".join(output.split())
    entries = {run: read_run(run, tmp_path / run)[0] for run in digits_parties.get_runs()}
    examples = {run: entry.examples for run, entry in entries.items()}
    # FedL2G's parties set a quarter of their examples apart for the guiding vectors.
    assert examples.pop("fed_l2g") == pytest.approx(0.75 * examples["local_only"])
    assert list(examples.values()) == pytest.approx([examples["local_only"]] * len(examples))
    rounds, parties, classes = 2, 6, 10
    scores, indices = 200 * classes * 4, 200 * 4
    width = digits_parties.EMBEDDING_WIDTH
    head = (width + 1) * classes * 4
    generator = ((32 + classes + 1) * 64 + (64 + 1) * width) * 4
    sent = {
        "local_only": 0,
        "fed_md": 2 * scores + indices,
        "ds_fl": 2 * scores + indices,
        "kt_pfl": 2 * scores + indices,
        "fd": 2 * classes * (classes + 1) * 4,
        "fml": 2 * (64 * 8 + 8 + 8 * classes) * 4,  # party 1's network
        "lg_fed_avg": 2 * head,
        "fed_gen": 2 * (head + classes * 4) + generator,
    }
    for run, size in sent.items():
        assert entries[run].megabytes == pytest.approx(rounds * parties * size / 1e6)
    of_the_server = ("server", "meme", "student", "shared")
    starts = {True: [], False: []}  # of networks that have a head, and of the others
    # FedMRL's parties predict with the shared network too, from the start.
    for run in set(digits_parties.get_runs()) - {"fed_mrl"}:
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        first = {
            (r["model"], r["seed"]): r["loss"]
            for r in records
            if r["round"] == 0 and r["split"] == "held_out" and r["model"] not in of_the_server
        }
        starts[run in digits_parties.HEADS].append(first)
    for first, *others in starts.values():
        assert len(first) == parties * 3
        for other in others:
            assert other == pytest.approx(first, rel=1e-5)


def test_a_split_of_clients_own_examples_is_ranked_by_its_metrics(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    own = {"accuracy": [0.6, 0.7], "accuracy_worst_tenth": [0.2, 0.3]}
    for splits in summary["final"].values():
        splits["client_test"] = own
    path.write_text(json.dumps(summary))
    run = load_run(tmp_path / "run")
    entry = entries_lib.read_run("run", run, "accuracy_worst_tenth", "client_test")[0]
    assert entry.values == pytest.approx((20.0, 30.0)) and entry.split == "client_test"
    with pytest.raises(ValueError, match=r"--split must be one of \['test', .*'client_test'\]"):
        entries_lib.read_run("run", run, split="validation")


def test_parties_on_their_own_examples_have_one_row(tmp_path, monkeypatch):
    work = Flops({"main": 1.0, "model_1": 1.0}, 0.0)
    monkeypatch.setattr(flops, "flops_of_parties", lambda *_: work)
    write_run(tmp_path / "run")
    for name in ("config.json", "summary.json"):
        path = tmp_path / "run" / name
        content = json.loads(path.read_text())
        if name == "config.json":
            content["parties"] = {}
        else:
            content["final"]["parties"] = {"client_test": {"accuracy": [0.6, 0.7]}}
        path.write_text(json.dumps(content))
    entries = entries_lib.read_run("run", load_run(tmp_path / "run"), split="client_test")
    assert [(e.model, e.values) for e in entries] == [("all parties", (60.0, 70.0))]


def test_runs_whose_models_have_other_names_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare.report, "show_report", lambda *arguments, **named: 0)
    settings = SimpleNamespace(model=None, metric="accuracy")
    others = [*ENTRIES, entry("mine", (50.0,), "shared"), entry("mine", (50.0,), "own")]
    assert compare._rank(settings, "fed_avg", others, (), None, tmp_path) == 0
    assert capsys.readouterr().err == (
        "note: left out: mine, whose models have other names than the baseline's: shared, own "
        "(--model chooses models)\n"
    )
    settings.model = ["own"]
    assert compare._rank(settings, "fed_avg", others, (), None, tmp_path) == 0
    assert "left out" not in capsys.readouterr().err
