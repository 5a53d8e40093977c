"""Records of run folders, on made-up ones."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import archive, record
from fedcodist.report.points import MOST_POINTS

RUN = "merged_codistillation,4700,in_domain"
NAME = "merged_codistillation-4700-in_domain.json"


def accuracy(model, seed, round):
    return min(round / 1000, 0.7) + {"small": 0.1, "large": 0.2}[model] + seed / 100


def write_run(
    folder,
    *,
    run=RUN,
    seed=0,
    seeds=2,
    rounds=100,
    every=10,
    last_round=None,
    finished=True,
    commit="c0ffee",
    about_data=None,
    **settings,
):
    """A run folder as the training loop writes it; 'test' is evaluated after the last round only."""
    folder.mkdir(parents=True)
    config = {"name": "table", "run": run, "rounds": rounds, "seed": seed, "seeds": seeds}
    config |= {"full_rounds": 1500, "notes": ["a note"], "algorithm": {"name": "merged"}}
    environment = {
        "command": "python -m experiments.main --config=x",
        "plan": {"processes": 2},
        "versions": {"jax": "0.10.2"},
        "python": "3.11.7",
        "commit": commit,
        "device": "cpu",
        "cores": 4,
        "date": "2026-01-02T03:04:05+00:00",
    }
    if about_data is not None:
        environment["data"] = about_data
    lines = []
    models, all_seeds = ("large", "small"), range(seed, seed + seeds)
    for round in range(0, (last_round or rounds) + 1, every):
        for split in ("held_out", "test") if round == rounds else ("held_out",):
            for model in models:
                for one in all_seeds:
                    head = {"round": round, "model": model, "split": split, "seed": one}
                    lines.append({**head, "accuracy": accuracy(model, one, round), "loss": 1.0})
        lines.append({"round": round, "model": "small", "split": "clients", "seed": seed})
    (folder / "config.json").write_text(json.dumps(config | settings))
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        finals = [accuracy("small", one, rounds) + 1e-7 for one in all_seeds]
        larges = [accuracy("large", one, rounds) for one in all_seeds]
        sizes = {"bytes_down_per_participation": 4, "bytes_up_per_participation": 8}
        summary = {
            "models": {model: {"parameters": 7, **sizes} for model in models},
            "final": {
                "small": {"test": {"accuracy": finals, "loss": [1.23456789] * seeds}},
                "large": {"test": {"accuracy": larges, "loss": [None] * seeds}},
            },
            "seconds": 12.5,
            "finished": True,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def run_command(capsys, *arguments):
    status = record.main([str(argument) for argument in arguments])
    return status, capsys.readouterr()


def refusal(capsys, *arguments):
    """The one line of a refused command."""
    status, printed = run_command(capsys, *arguments)
    assert status == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


@given(st.lists(st.integers(), unique=True, max_size=300), st.integers(2, 60))
def test_thinning_keeps_the_ends_the_order_and_at_most_so_many(points, most):
    kept = record.thin(points, most)
    assert len(kept) == min(len(points), most)
    assert kept == [point for point in points if point in set(kept)]
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])


@given(st.integers(41, 2000))
def test_thinned_points_are_evenly_spread(count):
    kept = record.thin(range(count))
    steps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(steps) - min(steps) <= 2


def test_rounds_around_codistillations_are_all_kept(tmp_path):
    for name, around in (("thin", None), ("whole", {"before": 1, "after": 4})):
        evaluation = {"every": 1, "around": around}
        folder = write_run(tmp_path / name, every=1, evaluation=evaluation)
        points = record.make_record(folder)["curve"]["large"]["held_out"]["round"]
        assert len(points) == (101 if around else MOST_POINTS)


def test_a_record_says_what_was_run_and_what_it_gave(tmp_path):
    one = record.make_record(write_run(tmp_path / "run", seed=3))
    assert (one["experiment"], one["run"], one["seeds"]) == ("table", RUN, [3, 4])
    assert one["command"] == "python -m experiments.main --config=x"
    assert (one["rounds"], one["full_rounds"], one["last_round"]) == (100, 1500, 100)
    assert one["finished"] is True
    assert (one["device"], one["cores"], one["processes"]) == ("cpu", 4, 2)
    assert (one["commit"], one["seconds"]) == ("c0ffee", 12.5)
    assert one["versions"] == {"python": "3.11.7", "jax": "0.10.2"}
    assert one["parameters"] == {"large": 7, "small": 7}
    assert one["bytes"]["small"] == {"down": 4, "up": 8}
    assert one["notes"] == ["a note"]
    assert one["config"]["algorithm"] == {"name": "merged"}
    assert one["final"]["small"] == {"test": {"accuracy": [0.23, 0.24], "loss": [1.23457] * 2}}
    assert one["final"]["large"]["test"]["loss"] == [None, None]
    curve = one["curve"]["large"]["held_out"]
    assert curve["round"] == list(range(0, 101, 10))
    assert curve["accuracy"][1] == [0.24, 0.25]
    assert one["curve"]["small"]["test"] == {"round": [100], "accuracy": [[0.23, 0.24]]}
    assert "clients" not in one["curve"]["small"]


def test_a_long_curve_is_thinned(tmp_path):
    one = record.make_record(write_run(tmp_path / "run", rounds=1500))
    rounds = one["curve"]["small"]["held_out"]["round"]
    assert (len(rounds), rounds[0], rounds[-1]) == (61, 0, 1500)


def test_a_recorded_file_is_one_that_the_results_read(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert run_command(capsys, tmp_path / "run", "--results", tmp_path / "results")[0] == 0
    (one,) = archive.load_records(tmp_path / "results")
    assert one.path == tmp_path / "results" / "table" / NAME
    assert one.final["small"]["test"]["accuracy"] == [0.2, 0.21]


def test_the_same_run_recorded_again_is_the_same_file(tmp_path, capsys):
    write_run(tmp_path / "run")
    contents = []
    for _ in range(2):
        run_command(capsys, tmp_path / "run", "--results", tmp_path / "results")
        (path,) = (tmp_path / "results").glob("*/*")
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize("other", [{"seed": 5}, {"commit": "beef"}, {"algorithm": {"alpha": 1}}])
def test_another_run_of_the_same_name_is_kept_beside(tmp_path, capsys, other):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", **other)]
    for _ in range(2):
        run_command(capsys, *folders, "--results", tmp_path / "results")
    found = sorted(path.name for path in (tmp_path / "results" / "table").iterdir())
    assert found == [NAME.replace(".json", "-2.json"), NAME]


def test_a_config_without_run_names_is_named_by_its_method(tmp_path):
    folder = write_run(tmp_path / "run", run=None)
    assert record.make_record(folder)["run"] == "merged"


def test_names_of_runs_are_safe_file_names(tmp_path):
    one = record.make_record(write_run(tmp_path / "run", run="../0.7, linear/x"))
    path = record.write_record(one, tmp_path / "results")
    assert path.parent == tmp_path / "results" / "table"
    assert path.name == "-0.7-linear-x.json"


def test_an_unfinished_run_is_skipped_and_the_others_are_recorded(tmp_path, capsys):
    folder = write_run(tmp_path / "run", last_round=40, finished=False)
    done = [write_run(tmp_path / f"done{seed}", seed=seed) for seed in (0, 5)]
    results = tmp_path / "results"
    status, printed = run_command(capsys, done[0], folder, done[1], "--results", results)
    assert status == 0
    assert printed.err.startswith(f"skipped: {folder} is unfinished")
    assert printed.err.count("\n") == 1 and "--partial" in printed.err
    assert sorted(one.seeds for one in archive.load_records(results)) == [[0, 1], [5, 6]]


def test_where_nothing_is_finished_nothing_is_recorded(tmp_path, capsys):
    folder = write_run(tmp_path / "run", last_round=40, finished=False)
    line = refusal(capsys, folder, "--results", tmp_path / "results")
    assert str(folder) in line and "--partial" in line
    assert not (tmp_path / "results").exists()


def test_a_folder_of_runs_is_searched(tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    for name, seed in (("a", 0), ("deep/b", 5)):
        write_run(runs / name, seed=seed)
    (tmp_path / "empty").mkdir()
    status, printed = run_command(capsys, runs, tmp_path / "empty", "--results", results)
    assert status == 0
    assert printed.err.startswith(f"note: {tmp_path / 'empty'} is not a run folder")
    assert sorted(one.seeds for one in archive.load_records(results)) == [[0, 1], [5, 6]]
    # The same run given twice is one record.
    status, printed = run_command(capsys, runs / "a", runs, "--results", results)
    assert status == 0 and printed.out.count("wrote") == 2
    assert "none below" in refusal(capsys, tmp_path / "empty", "--results", results)


def test_another_mistake_leaves_everything_unrecorded(tmp_path, capsys):
    done = write_run(tmp_path / "done")
    line = refusal(capsys, done, tmp_path / "none", "--results", tmp_path / "results")
    assert str(tmp_path / "none") in line
    assert not (tmp_path / "results").exists()


ABOUT = {"source": "CIFAR-10, web", "seed": None, "unverified": True}
ABOUT_DATA = {"far": {**ABOUT, "num_examples": {"train": 30_000, "test": 10}}}


@pytest.mark.parametrize(
    ("num_unlabelled", "images"), [(None, "the 30,000"), (600, "600 of the 30,000")]
)
def test_unlabelled_images_of_another_folder_are_noted_by_its_manifest(
    tmp_path, num_unlabelled, images
):
    data = {"folder": "near", "unlabelled_folder": "far", "num_unlabelled": num_unlabelled}
    run = write_run(tmp_path / "run", data=data, about_data=ABOUT_DATA)
    one = record.make_record(run)
    doubt = "not verified as its official files"
    note = f"Unlabelled: {images} images in far (CIFAR-10, web, {doubt})."
    assert one["notes"] == ["a note", note]
    assert one["data"] == ABOUT_DATA


def test_unlabelled_sentences_are_of_a_folder_that_has_no_others(tmp_path):
    """C4's has a vocabulary and sentences of nobody."""
    about = {**ABOUT, "source": "C4", "num_examples": {"distillation": 500, "vocabulary": 90}}
    data = {"folder": "near", "unlabelled_folder": "far", "num_unlabelled": None}
    run = write_run(tmp_path / "run", data=data, about_data={"far": about})
    note = "Unlabelled: the 500 sentences in far (C4, not verified as its official files)."
    assert note in record.make_record(run)["notes"]


@pytest.mark.parametrize(
    "settings",
    [
        {"data": {"folder": "near", "unlabelled_folder": None}, "about_data": ABOUT_DATA},
        # As before manifests were kept.
        {"data": {"folder": "near", "unlabelled_folder": "far"}},
        # FedAvg has no use for them.
        {
            "data": {"folder": "near", "unlabelled_folder": "far"},
            "about_data": ABOUT_DATA,
            "algorithm": {"name": "fed_avg"},
        },
        # Nor has FedSDD without distillation.
        {
            "data": {"folder": "near", "unlabelled_folder": "far"},
            "about_data": ABOUT_DATA,
            "algorithm": {"name": "fed_sdd", "steps": 0},
        },
    ],
)
def test_nothing_is_noted_of_images_that_are_not_used_or_not_known(tmp_path, settings):
    one = record.make_record(write_run(tmp_path / "run", **settings))
    assert one["notes"] == ["a note"]


def test_another_device_of_a_continued_run_is_noted(tmp_path):
    for devices, notes in ((["cpu"], []), (["NVIDIA H200", "cpu"], ["Devices: cpu, NVIDIA H200."])):
        run = write_run(tmp_path / str(len(devices)))
        environment = json.loads((run / "environment.json").read_text())
        environment["resumed"] = [{**environment, "device": device} for device in devices]
        (run / "environment.json").write_text(json.dumps(environment))
        assert record.make_record(run)["notes"] == ["a note", *notes]


def test_the_precision_is_noted_where_it_is_not_float32(tmp_path):
    for precision, notes in (("float32", []), ("bfloat16", ["Networks computed in bfloat16."])):
        run = write_run(tmp_path / precision)
        environment = json.loads((run / "environment.json").read_text())
        environment["plan"]["precision"] = precision
        (run / "environment.json").write_text(json.dumps(environment))
        assert record.make_record(run)["notes"] == ["a note", *notes]
    environment["resumed"] = [environment | {"plan": {"processes": 1, "precision": "float32"}}]
    (run / "environment.json").write_text(json.dumps(environment))
    note = "Networks computed in bfloat16, then in float32."
    assert record.make_record(run)["notes"] == ["a note", note]


def test_a_partial_record_is_of_the_last_whole_evaluation(tmp_path, capsys):
    folder = write_run(tmp_path / "run", last_round=40, finished=False)
    half = {"round": 50, "model": "small", "split": "held_out", "seed": 0, "accuracy": 0.9}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(half) + '\n{"round": 50, "mod')
    assert run_command(capsys, folder, "--partial", "--results", tmp_path / "results")[0] == 0
    (one,) = archive.load_records(tmp_path / "results")
    assert (one.finished, one.last_round, one.rounds, one.seconds) == (False, 40, 100, None)
    expected = [round(accuracy("large", seed, 40), 5) for seed in (0, 1)]
    assert one.final["large"] == {"held_out": {"accuracy": expected, "loss": [1.0, 1.0]}}


def test_a_finished_run_replaces_its_partial_record_and_not_the_other_way(tmp_path, capsys):
    results = tmp_path / "results"
    part = write_run(tmp_path / "part", last_round=40, finished=False)
    whole = write_run(tmp_path / "whole")
    run_command(capsys, part, "--partial", "--results", results)
    assert run_command(capsys, whole, "--results", results)[0] == 0
    (one,) = archive.load_records(results)
    assert one.finished
    assert "has the same run finished" in refusal(capsys, part, "--partial", "--results", results)
    assert archive.load_records(results) == [one]


def test_no_evaluation_yet(tmp_path, capsys):
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "metrics.jsonl").write_text('{"round": 0, "mod')
    assert "no evaluation yet" in refusal(capsys, folder, "--partial", "--results", tmp_path)


def test_a_broken_line_in_the_middle(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    metrics.write_text("{\n" + metrics.read_text())
    assert "metrics.jsonl line 1" in refusal(capsys, folder, "--results", tmp_path)


def test_summary_and_config_disagree_on_the_seeds(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["final"]["small"]["test"]["accuracy"] = [0.5]
    (folder / "summary.json").write_text(json.dumps(summary))
    line = refusal(capsys, folder, "--results", tmp_path)
    assert "1 accuracies of small on test" in line and "2 seeds" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace('"accuracy"', '"f_score"'),
            "has no accuracy: nothing to record.",
        ),
        (
            lambda text: re.sub(r'"accuracy": (\[?)[\d.]+', r'"accuracy": \1null', text),
            "accuracies of small on test must be numbers from 0 to 1, got None.",
        ),
    ],
)
def test_what_pages_cannot_show_is_not_recorded(tmp_path, capsys, change, message):
    """A null in one record stopped the rendering of all pages."""
    folder = write_run(tmp_path / "run")
    for name in ("summary.json", "metrics.jsonl"):
        (folder / name).write_text(change((folder / name).read_text()))
    assert message in refusal(capsys, folder, "--results", tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["../x", "", None, "benchmarks", "notes", "tuning", "a b"])
def test_names_of_experiments_that_are_no_folders(tmp_path, capsys, name):
    folder = write_run(tmp_path / "run", name=name)
    assert "config.name" in refusal(capsys, folder, "--results", tmp_path / "results")


@pytest.mark.parametrize("file", ["config.json", "environment.json", "metrics.jsonl"])
def test_a_missing_file(tmp_path, capsys, file):
    folder = write_run(tmp_path / "run")
    (folder / file).unlink()
    assert file in refusal(capsys, folder, "--results", tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_file(tmp_path, capsys, text):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(text)
    assert "summary.json" in refusal(capsys, folder, "--results", tmp_path)


def test_results_that_are_a_file(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (tmp_path / "results").write_text("")
    assert "cannot write" in refusal(capsys, folder, "--results", tmp_path / "results")


def test_other_code_of_a_continued_run_is_noted(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "environment.json"
    environment = json.loads(path.read_text())
    environment["resumed"] = [dict(environment), environment | {"commit": "0123abc-dirty"}]
    path.write_text(json.dumps(environment))
    note = f"Commits: {environment['commit']}, 0123abc-dirty."
    assert record.make_record(folder)["notes"] == ["a note", note]


def test_a_command_names_no_folder_of_a_machine(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "environment.json"
    command = (
        "python -m run --config=a/b.py:c --workdir=/home/ann/runs/b/c --config.data.folder=/data/x"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"command": command}))
    shown = command.replace("/home/ann/", "")
    assert record.make_record(folder)["command"] == shown
