"""The command: its exit status, its run folder, and agreement of all ways of execution."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedcodist.core.rematerialisation import NEEDS_CPU_FLAG
from fedcodist.run.export import load_model

ROUNDS = [0, 2, 4, 6, 7]
MODELS = ("small", "large")
SPLITS = ("held_out", "train")  # and the test split, after the last round
ROOT = Path(__file__).parents[2]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def assert_close(found, expected, tolerance: float) -> None:
    """Checks that metrics lines and models agree to float tolerance."""
    for ours, theirs in zip(records(found), records(expected), strict=True):
        _assert_close_values(ours, theirs, tolerance)
    for path in sorted(expected.glob("*.safetensors")):
        for a, b in zip(
            jax.tree.leaves(load_model(found / path.name)),
            jax.tree.leaves(load_model(path)),
            strict=True,
        ):
            assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), path.name


def _assert_close_values(ours, theirs, tolerance):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if isinstance(value, dict):
            _assert_close_values(ours[name], value, tolerance)
        elif name == "split" or name == "model":
            assert ours[name] == value
        else:
            # An accuracy moves by a whole example when two logits are nearly equal.
            allowed = 0.02 if "accuracy" in name else tolerance
            np.testing.assert_allclose(
                np.array(ours[name], float), np.array(value, float), rtol=allowed, atol=allowed
            )


def test_the_run_folder_is_complete(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    models = {f"{model}_seed{seed}.safetensors" for model in MODELS for seed in range(3)}
    files = {"config.json", "metrics.jsonl", "summary.json", "environment.json", "checkpoints"}
    # Those of `--loggers` among them.
    watched = {"metrics.csv", "tensorboard"}
    assert names - {"logs", ".lock"} == models | files | watched
    assert [path.name for path in sorted((uninterrupted / "checkpoints").iterdir())] == [
        "round_00000004.msgpack",
        "round_00000007.msgpack",
    ]


def test_the_config_holds_the_overrides(uninterrupted):
    config = read(uninterrupted, "config.json")
    assert config["rounds"] == 7 and config["algorithm"]["alpha"] == 0.5
    assert config["algorithm"]["name"] == "merged_codistillation"
    # The plan says how it is executed.
    assert "execution" not in config


def test_every_evaluation_has_a_line_per_model_split_and_seed(uninterrupted):
    found = [(r["round"], r["model"], r["split"], r["seed"]) for r in records(uninterrupted)]
    assert len(set(found)) == len(found)
    evaluated = {
        (round, model, split, seed)
        for round in ROUNDS
        for model in MODELS
        for split in (*SPLITS, *(("test",) if round == ROUNDS[-1] else ()))
        for seed in range(3)
    }
    trained = {
        (round, model, "clients", seed)
        for round in ROUNDS[1:]
        for model in MODELS
        for seed in range(3)
    }
    assert set(found) == evaluated | trained
    for record in records(uninterrupted):
        if record["split"] != "clients":
            assert 0 <= record["accuracy"] <= 1 and record["loss"] > 0
            assert len(record["per_label_accuracy"]) == 10
            assert ("per_client" in record) == (record["split"] == "train")
        else:
            assert record["pseudo_gradient_norm"] > 0 and record["client_loss"] > 0


def test_seeds_differ_and_training_helps(uninterrupted):
    final = read(uninterrupted, "summary.json")["final"]
    for model in MODELS:
        losses = final[model]["held_out"]["loss"]
        assert len(set(losses)) == 3
        (first,) = [
            r["loss"]
            for r in records(uninterrupted)
            if (r["round"], r["model"], r["split"], r["seed"]) == (0, model, "held_out", 0)
        ]
        assert losses[0] < first


def test_the_summary_repeats_the_last_evaluation(uninterrupted):
    summary = read(uninterrupted, "summary.json")
    assert summary["finished"] is True and summary["rounds"] == 7
    for record in records(uninterrupted):
        if record["round"] == 7 and record["split"] != "clients":
            final = summary["final"][record["model"]][record["split"]]
            assert final["accuracy"][record["seed"]] == record["accuracy"]
            assert final["loss"][record["seed"]] == record["loss"]
    # Down goes the model in float32; up its pseudo-gradient and a weight or two.
    for model, parameters in (("small", 2410), ("large", 17226)):
        about = summary["models"][model]
        assert about["parameters"] == parameters
        assert 4 * parameters <= about["bytes_down_per_participation"] <= 4 * parameters + 16
        assert 4 * parameters <= about["bytes_up_per_participation"] <= 4 * parameters + 16


def test_the_environment_says_versions_commit_device_and_plan(uninterrupted):
    environment = read(uninterrupted, "environment.json")
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["versions"]["numpy"] == np.__version__
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if head.returncode == 0:
        commit = environment["commit"]
        assert commit[:40] == head.stdout.strip()
        # Files may be edited while the tests run.
        assert commit[40:] in ("", "-dirty")
    assert environment["device"] == "cpu"
    assert environment["plan"] == {
        "processes": 1,
        "devices": 1,
        "platform": "cpu",
        "loop": "scan",
        "chunk_size": 1,
        "seeds_loop": "map",
        "stream": False,
        "precision": "float32",
        "rematerialise": False,
    }


def test_tensorboard_gets_every_scalar(uninterrupted):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    found = {}
    for path in (uninterrupted / "tensorboard").glob("seed*/*"):
        content = path.read_bytes()
        while content:
            # A TFRecord: length, checksum, content, checksum.
            length = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            for value in event.summary.value:
                found[path.parent.name, value.tag, event.step] = value.simple_value
            content = content[16 + length :]
    for record in records(uninterrupted):
        seed, tag = f"seed{record['seed']}", f"{record['model']}/{record['split']}"
        for name, value in record.items():
            if isinstance(value, float):
                of_seed = found[seed, f"{tag}/{name}", record["round"]]
                assert of_seed == pytest.approx(value, rel=1e-6)


def test_the_output_says_how_far_it_is_and_where_things_are(uninterrupted):
    output = (uninterrupted.parent / "output").read_text().splitlines()
    assert output[0].endswith("compiling")
    assert "round 7/7" in output[-3] and "  held-out accuracy: large " in output[-3]
    assert "finished, 7 rounds  test accuracy, mean of 3 seeds: large " in output[-2]
    assert output[-1] == f"run folder: {uninterrupted}"


@pytest.mark.slow
def test_streamed_data_gives_the_same_values(uninterrupted, run, tmp_path):
    done = run(tmp_path / "run", "--config.execution.stream=True")
    assert (done.returncode, done.stderr) == (0, "")
    assert_close(tmp_path / "run", uninterrupted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["False", "True"])
def test_two_processes_give_the_same_values(stream, uninterrupted, run, tmp_path):
    done = run(tmp_path / "run", "--processes=2", f"--config.execution.stream={stream}")
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "run", "environment.json")["plan"]["processes"] == 2
    assert_close(tmp_path / "run", uninterrupted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("loop=vmap", "chunk_size=2"), ("seeds_loop=vmap",)])
def test_other_loops_give_the_same_values(settings, uninterrupted, run, tmp_path):
    done = run(tmp_path / "run", *(f"--config.execution.{setting}" for setting in settings))
    assert (done.returncode, done.stderr) == (0, "")
    assert_close(tmp_path / "run", uninterrupted, 1e-4)


@pytest.mark.slow
def test_a_seed_trained_alone_is_the_same(uninterrupted, run, tmp_path):
    done = run(tmp_path / "run", "--config.seeds=1", "--config.seed=2")
    assert (done.returncode, done.stderr) == (0, "")
    alone = records(tmp_path / "run")
    together = [record for record in records(uninterrupted) if record["seed"] == 2]
    for ours, theirs in zip(alone, together, strict=True):
        _assert_close_values(ours, theirs, 1e-4)


@pytest.mark.slow
def test_a_chunk_is_chosen_said_and_kept(run, tmp_path):
    """As many clients as the larger cohort has: digits are small."""
    settings = ("--config.execution.loop=vmap", "--config.rounds=1", "--config.seeds=1")
    config = "fedcodist/configs/digits_codist.py:fed_avg"
    done = run(tmp_path / "run", *settings, config=config)
    assert (done.returncode, done.stderr) == (0, "")
    assert "chunk_size: 3 clients at once, " in done.stdout.splitlines()[0]
    assert read(tmp_path / "run", "environment.json")["plan"]["chunk_size"] == 3


@pytest.mark.slow
def test_models_in_bfloat16_and_rematerialised(uninterrupted, run, tmp_path):
    for name, value, allowed in (("precision", "bfloat16", 0.05), ("rematerialise", True, 1e-4)):
        folder = tmp_path / name
        done = run(folder, f"--config.execution.{name}={value}")
        assert done.returncode == 0
        warned = "saves no memory on a CPU" in done.stderr
        # XLA of jaxlib 0.12 saves memory on a CPU too.
        assert warned == (name == "rematerialise" and NEEDS_CPU_FLAG) == bool(done.stderr)
        assert read(folder, "environment.json")["plan"][name] == value
        losses, expected = (
            [r["loss"] for r in records(each) if r["round"] <= 2 and "loss" in r]
            for each in (folder, uninterrupted)
        )
        assert losses == pytest.approx(expected, rel=allowed)
        assert losses != expected or name == "rematerialise"


@pytest.fixture(scope="module")
def first_start(run, environment, tmp_path_factory):
    """A run of a user who has chosen no folder for compiled programs, and wants a trace."""
    folder = tmp_path_factory.mktemp("first_start")
    own = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    settings = ("--config.rounds=4", "--config.seeds=1")
    profile = f"--profile={folder / 'trace'}"
    done = run(folder / "run", *settings, profile, environment=own)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout, lambda again: run(folder / again, *settings, environment=own)


def kept_programs(folder):
    return {path.name for path in (folder / "cache").glob("fedcodist/compiled-*/*-cache")}


@pytest.mark.slow
def test_the_launcher_keeps_compiled_programs(first_start):
    assert len(kept_programs(first_start[0])) > 3


@pytest.mark.slow
def test_the_next_start_compiles_nothing_again(first_start):
    folder, _, start = first_start
    before = kept_programs(folder)
    assert start("second").returncode == 0
    assert kept_programs(folder) == before


@pytest.mark.slow
def test_some_rounds_are_traced(first_start):
    folder, output, _ = first_start
    assert f"trace: {folder / 'trace'}\n" in output
    (file,) = folder.glob("trace/plugins/profile/*/*.trace.json.gz")
    assert b"jit_train" in gzip.decompress(file.read_bytes())


def test_the_report_shows_mean_and_spread_over_seeds(uninterrupted, environment, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedcodist.report",
            str(folder),
            "--output",
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "MergedCodist" in done.stdout and "±" in done.stdout
    assert [path.suffix for path in (tmp_path / "out").glob("*.html")] == [".html"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fed_avg", "periodic_codistillation"])
def test_the_other_algorithms_run(algorithm, run, tmp_path):
    config = f"fedcodist/configs/digits_codist.py:{algorithm}"
    done = run(tmp_path / "run", "--config.algorithm.period=3", config=config)
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "run", "summary.json")["algorithm"] == algorithm
