"""From CIFAR-100's files to a table and a study: prepare, run, record, render, tune.

On a made-up archive of 600 images in the official format, and on the real images where FEDCODIST_DATA
names them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.studies.codistillation import paper_numbers
from fedcodist.config.registry import CODISTILLATION
from tests.datasets.test_cifar import as_archive, made_up_table, python2_pickle

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "experiments" / "configs"
# The README's commands with fewer rounds, clients and steps.
SHORT = (
    "--processes=1",
    "--config.rounds=2",
    "--config.evaluation.every=1",
    "--config.evaluation.checkpoint_every=1",
    "--config.pools.small.cohort_size=2",
    "--config.pools.large.cohort_size=2",
    "--config.algorithm.period=1",
    "--config.algorithm.steps=1",
    "--config.algorithm.batch_size=16",
)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A folder with the made-up images, prepared."""
    folder = tmp_path_factory.mktemp("made_up")
    files = {
        "train": python2_pickle(made_up_table(500, seed=1)),
        "test": python2_pickle(made_up_table(100, seed=2)),
        "meta": python2_pickle({b"fine_label_names": [b"apple"]}),
    }
    (folder / "cifar-100-python.tar.gz").write_bytes(as_archive(files))
    prepare(
        folder,
        "--source=cifar-100-python.tar.gz",
        "--accept-unverified",
        *("--clients=25", "--examples-per-client=20"),
        *("--train-clients=15", "--distillation-clients=7", "--held-out-clients=3"),
    )
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A folder with the real images, prepared."""
    if "FEDCODIST_DATA" not in os.environ:
        pytest.skip("FEDCODIST_DATA does not name a folder with cifar-100-python")
    folder = tmp_path_factory.mktemp("real")
    prepare(folder, f"--source={Path(os.environ['FEDCODIST_DATA']) / 'cifar-100-python'}")
    return folder


def prepare(folder, *arguments):
    run(folder, ROOT / "datasets" / "cifar100" / "prepare.py", "--output=data/cifar100", *arguments)


def run(folder, *arguments):
    """Runs Python in a folder that is not the checkout; returns what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_real_images_become_a_table(real):
    check_a_run_becomes_a_table(real, "fed_avg,4700")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["periodic_codistillation", "merged_codistillation"])
@pytest.mark.parametrize("data", ["made_up", "real"])
def test_images_become_a_table_by_codistillation(method, data, request):
    check_a_run_becomes_a_table(request.getfixturevalue(data), f"{method},4700,in_domain")


def check_a_run_becomes_a_table(folder, name):
    command = ["-m", "fedcodist.commands.sweep", f"--config={CONFIGS / 'cifar100_table1.py'}"]
    command += [f"--only={name}", "--workdir=runs", *SHORT]
    run(folder, *command)
    # The table's networks are functions beside its config, so the run itself finds that it is finished.
    assert f"{name} · {name.split(',')[0]}  finished already" in run(folder, *command)

    run(folder, "-m", "experiments.studies.record", f"runs/{name.replace(',', '-')}")
    path = folder / "results" / "cifar100_table1" / f"{name.replace(',', '-')}.json"
    record = json.loads(path.read_text())
    assert record["data"]["data/cifar100"]["num_examples"]["test"] > 0
    curve = record["curve"]["small"]
    assert curve["held_out"]["round"] == [0, 1, 2]
    assert curve["test"]["round"] == [2]  # looked at once
    for model in ("small", "large"):
        assert 0 <= record["final"][model]["test"]["accuracy"][0] < 0.2

    run(folder, "-m", "experiments.studies")
    text = (folder / "docs" / "results" / "codistillation.md").read_text()
    small = 100 * record["final"]["small"]["test"]["accuracy"][0]
    papers = " / ".join(f"{number:.2f}" for number in paper_numbers.TABLE_1[name])
    assert f"{small:.2f}" in text and "†" in text and papers in text


@pytest.mark.slow
@pytest.mark.parametrize("study", CODISTILLATION)
def test_made_up_images_are_tuned_by_one_compiled_program(made_up, study):
    config = f"--config={CONFIGS / 'cifar100_tuning.py'}:{study}"
    common = ("--study", study, "--storage", "tuning.db", "--output", f"{study}.json")
    printed = run(made_up, "-m", "fedcodist.tuning.tune", config, *common, "--trials=3", *SHORT)
    assert "compiled training programs: 1" in printed
    summary = json.loads((made_up / f"{study}.json").read_text())
    assert len(summary["trials"]) == 3
    assert len({json.dumps(trial["parameters"]) for trial in summary["trials"]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("heads,s=100,3", 8),
        ("larger,mhd", 4),
        ("centralised,s=0", 1),
        ("fed_avg,s=0", 8),
        ("periodic,s=100", 8),
    ],
)
def test_decentralised_clients_of_the_scaled_config(made_up, tmp_path, name, models):
    folder = tmp_path / "run"
    settings = ["rounds=1", "seeds=1", "training.steps=2", "training.batch_size=4"]
    settings += ["evaluation.every=1", "evaluation.checkpoint_every=1"]
    if not name.startswith(("centralised", "fed_avg")):
        settings.append("algorithm.public_batch_size=4")
    if name.startswith("periodic"):
        settings += ["algorithm.examples=8", "algorithm.period=1"]
    run(
        made_up,
        *("-m", "experiments.main", f"--config={CONFIGS / 'cifar100_mhd.py'}:{name}"),
        *("--processes=1", f"--workdir={folder}"),
        *(f"--config.{setting}" for setting in settings),
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["final"]) == models
    heads = {metric for own in summary["final"].values() for metric in own["test"]}
    assert ("accuracy_head_3" in heads) == name.startswith(("heads", "larger"))
