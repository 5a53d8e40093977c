"""One command per machine, here two on one: the same run as one process, and the loss of one of them."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from quick_compilation import XLA_FLAGS

from fedcodist.commands import run
from fedcodist.run import resume
from fedcodist.run.export import load_model
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
MODELS = ("small", "large")
SETTINGS = (
    "--config=fedcodist/configs/digits_codist.py:merged_codistillation",
    "--config.rounds=4",
    "--config.algorithm.steps=4",
    "--config.evaluation.every=2",
    "--config.evaluation.checkpoint_every=2",
    "--config.evaluation.splits=('held_out',)",
)
LOST = (
    "error: another process of the run ended or did not answer: the same command on all machines "
    "goes on from the last checkpoint. See {}.\n"
)


def start(workdir: Path, *settings: str, devices: int) -> subprocess.Popen:
    """The command, in an environment where it compiles quickly."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
        "XLA_FLAGS": XLA_FLAGS,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # Devices that wait for each other in one pool of threads: none must starve.
        "NPROC": "16",
        "XDG_CACHE_HOME": str(workdir.parent / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.main", *SETTINGS, f"--workdir={workdir}", *settings],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def hosts(workdir: Path, *settings: str, devices: int = 2):
    """One command for each of two machines with two devices."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    meeting = (f"--coordinator=127.0.0.1:{port}", "--num_hosts=2")
    both = [
        start(workdir, *settings, *meeting, f"--host={host}", devices=devices) for host in range(2)
    ]
    try:
        yield both
    finally:
        for process in both:
            process.kill()
            process.communicate()


def ends_well(process: subprocess.Popen) -> str:
    """Waits for the end; returns what was printed."""
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    return output


def records(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_close(workdir: Path, expected: Path) -> None:
    """The same selections, and the same values to float tolerance."""
    for ours, theirs in zip(records(workdir), records(expected), strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            if name in ("round", "model", "split", "seed", "client_num_steps"):
                assert ours[name] == value
            else:
                # An accuracy moves by a whole example when two logits are nearly equal.
                allowed = 0.05 if "accuracy" in name else 2e-4
                np.testing.assert_allclose(ours[name], value, rtol=allowed, atol=allowed)
    for model in MODELS:
        models = [
            load_model(folder / f"{model}_seed0.safetensors") for folder in (workdir, expected)
        ]
        for found, leaf in zip(*map(jax.tree.leaves, models), strict=True):
            assert np.linalg.norm(found - leaf) <= 1e-3 * np.linalg.norm(leaf)


@pytest.mark.slow
def test_two_machines_that_stream_their_own_clients_are_one_process(tmp_path):
    alone = start(tmp_path / "alone", devices=1)
    with hosts(tmp_path / "together", "--config.execution.stream") as (first, second):
        assert "run folder: " in ends_well(first)
        assert ends_well(second) == ""
    ends_well(alone)
    assert_close(tmp_path / "together", tmp_path / "alone")
    plan = json.loads((tmp_path / "together" / "environment.json").read_text())["plan"]
    assert (plan["processes"], plan["devices"]) == (2, 4)
    names = {path.name for path in (tmp_path / "alone").iterdir()} | {"logs"}
    assert {path.name for path in (tmp_path / "together").iterdir()} == names
    assert [path.name for path in sorted((tmp_path / "together" / "checkpoints").iterdir())] == [
        "round_00000002.msgpack",
        "round_00000004.msgpack",
    ]
    assert {path.name for path in (tmp_path / "together" / "logs").iterdir()} == {
        "process_0.log",
        "process_1.log",
    }


def test_commands_of_the_page_on_running_are_of_flags_that_exist():
    """For TPU pods, Slurm, plain machines and Kubernetes."""
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    several = text[text.index("## A TPU pod") : text.index("## Many runs")]
    for place in ("gcloud compute tpus tpu-vm ssh", "srun --nodes", "--host=1", "kind: Job"):
        assert place in several
    commands = re.findall(r"fedcodist run((?:[^\n]|\n +--coordinator)*)", several)
    assert len(commands) == 5
    for command in commands:
        flags = set(re.findall(r"--(\w+)", command))
        assert {"workdir"} < flags <= set(run.flags.FLAGS)
        assert "distributed" in flags or {"coordinator", "num_hosts", "host"} <= flags


def test_processes_of_different_commands_are_refused(monkeypatch):
    monkeypatch.setattr(resume, "from_all_processes", lambda value: [value, value])
    resume.check_same_run({"rounds": 3}, {})
    monkeypatch.setattr(resume, "from_all_processes", lambda value: [value, value ^ 1])
    with pytest.raises(RunFolderError, match=r"process 1 was given another config.*same command"):
        resume.check_same_run({"rounds": 3}, {})


def test_a_folder_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resume, "from_all_processes", lambda value: [value, value, 0])
    resume._check_same_round(0, RunFolder(tmp_path))
    with pytest.raises(RunFolderError, match=r"of round 20, process 2 of round 0 .*must share"):
        resume._check_same_round(20, RunFolder(tmp_path))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    with hosts(workdir, *LONGER) as both:
        for process in both:
            ends_well(process)
    return workdir


# Enough rounds for a process to be stopped in time.
LONGER = ("--config.rounds=60",)
STOPS = [(host, how) for host in (0, 1) for how in ("SIGKILL", "process", "silence")]
STOPS.append((1, "SIGTERM"))


@pytest.mark.slow
@pytest.mark.parametrize("host, how", STOPS)
def test_the_end_of_one_ends_the_other_and_both_go_on(host, how, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    with hosts(workdir, *LONGER) as both:
        _wait_for(lambda: any((workdir / "checkpoints").glob("round_*")))
        began = time.monotonic()
        if how == "process":
            os.kill(_child(both[host]), signal.SIGKILL)
        elif how == "silence":
            # A machine that is cut off: its connections stay open.
            os.kill(_child(both[host]), signal.SIGSTOP)
        else:
            both[host].send_signal(getattr(signal, how))
        other = both[1 - host]
        _, errors = other.communicate(timeout=120)
        # Mostly at once, at the latest when a heartbeat is missed.
        assert time.monotonic() - began < 90
        assert other.returncode == 1
        assert errors == LOST.format(workdir / "logs" / f"process_{1 - host}.log")
        if how == "process":
            _, errors = both[host].communicate(timeout=20)
            assert both[host].returncode == 1
            assert re.fullmatch(r"error: stopped by SIGKILL: the same command .*\n", errors)
    assert not (workdir / "summary.json").exists()
    with hosts(workdir, *LONGER) as both:
        for process in both:
            ends_well(process)
    for name in ("metrics.jsonl", *(f"{model}_seed0.safetensors" for model in MODELS)):
        assert (workdir / name).read_bytes() == (uninterrupted / name).read_bytes()


@pytest.mark.slow
def test_machines_with_different_commands_end_with_one_line_each(tmp_path):
    with hosts(tmp_path / "run") as (first, second):
        second.kill()
        other = start(
            tmp_path / "run",
            *[argument for argument in second.args if "=" in argument][len(SETTINGS) :],
            "--config.algorithm.alpha=0.3",
            devices=2,
        )
        for process in (first, other):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 2
            assert errors == (
                "error: process 1 was given another config or execution plan than process 0: the "
                "same command must run on all machines.\n"
            )
    for log in (tmp_path / "run" / "logs").iterdir():
        # Devices are connected before anything compiles: two processes and two devices in each.
        assert "connected to 3 peer ranks" in log.read_text()


def _child(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def _wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
