"""Killed at any moment and started again with the same command, a run ends with the same bits."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from flax import serialization

MAGIC_AND_CHECKSUM = len(b"FEDCODIST-CHECKPOINT-1\n") + 32
BYTES = (
    "config.json",
    "metrics.jsonl",
    *(f"{m}_seed{s}.safetensors" for m in ("small", "large") for s in range(3)),
)


def assert_same_bits(folder: Path, expected: Path) -> None:
    for name in BYTES:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert summary(folder) == summary(expected)
    names = sorted(path.name for path in (expected / "checkpoints").iterdir())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    for name in names:
        found, wanted = arrays(folder, name), arrays(expected, name)
        assert list(found) == list(wanted)
        for key in wanted:
            assert found[key].dtype == wanted[key].dtype
            np.testing.assert_array_equal(found[key], wanted[key], err_msg=f"{name} {key}")


def summary(folder: Path) -> dict:
    content = json.loads((folder / "summary.json").read_text())
    assert content.pop("seconds") > 0 and content.pop("seconds_per_round") > 0
    return content


def arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    content = (folder / "checkpoints" / name).read_bytes()
    return serialization.msgpack_restore(content[MAGIC_AND_CHECKSUM:])["leaves"]


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(process, wait_for) -> None:
    """SIGKILL to the command itself; its children must end with it."""
    started = children(process.pid)
    assert started
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(map(is_alive, started)), seconds=10)


def kill_at(moment, start, folder, wait_for, *settings, **options):
    """Starts the run, kills it at the moment, and checks that this moment was reached."""
    marker = folder.with_name(f"{folder.name}.reached")
    process = start(folder, *settings, fault=moment, **options)
    try:
        wait_for(lambda: marker.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        kill(process, wait_for)
    finally:
        process.kill()


def finish(run, folder, *settings, **options):
    done = run(folder, *settings, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done


@pytest.mark.slow
def test_killed_during_compilation(uninterrupted, start, run, tmp_path, wait_for):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for((folder / "environment.json").exists)
    kill(process, wait_for)
    assert not (folder / "checkpoints").exists()
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(uninterrupted, start, run, tmp_path, wait_for):
    folder = tmp_path / "run"
    kill_at("checkpoint:7:hang", start, folder, wait_for)
    partial = [path.name for path in (folder / "checkpoints").glob(".round_00000007*")]
    assert len(partial) == 1
    assert [path.name for path in (folder / "checkpoints").glob("round_*")] == [
        "round_00000004.msgpack"
    ]
    # The metrics of round 7 were written; the run that goes on from round 4 writes them again.
    assert lines(folder)[-1]["round"] == 7
    assert not (folder / "summary.json").exists()
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "metrics:0:hang",
        "metrics:2:hang",
        "training:2:hang",
        "metrics:4:hang",
        "checkpoint:4:hang",
        "training:4:hang",
        "metrics:6:hang",
        "training:6:hang",
        "metrics:7:hang",
        "summary:0:hang",
    ],
)
def test_killed_at_a_moment(moment, uninterrupted, start, run, tmp_path, wait_for):
    folder = tmp_path / "run"
    kill_at(moment, start, folder, wait_for)
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
def test_killed_again_and_again_by_the_clock(uninterrupted, start, run, tmp_path, wait_for):
    folder = tmp_path / "run"
    draw = np.random.default_rng(0)
    for _ in range(8):
        process = start(folder)
        time.sleep(draw.uniform(0.5, 6))
        if children(process.pid):
            kill(process, wait_for)
        process.kill()
        process.communicate()
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
def test_a_second_command_meanwhile_is_refused(uninterrupted, start, run, tmp_path, wait_for):
    folder = tmp_path / "run"
    process = start(folder, fault="training:4:hang")
    try:
        wait_for((tmp_path / "run.reached").exists)
        done = run(folder)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: run folder {folder} is in use by another process.")
        assert done.stderr.count("\n") == 1
        kill(process, wait_for)
    finally:
        process.kill()
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
def test_killed_with_streamed_data(start, run, tmp_path, wait_for):
    streamed = "--config.execution.stream=True"
    finish(run, tmp_path / "whole", streamed)
    folder = tmp_path / "run"
    kill_at("training:4:hang", start, folder, wait_for, streamed)
    finish(run, folder, streamed)
    assert_same_bits(folder, tmp_path / "whole")


@pytest.mark.slow
def test_killed_with_two_processes(start, run, tmp_path, wait_for):
    finish(run, tmp_path / "whole", "--processes=2")
    folder = tmp_path / "run"
    kill_at("checkpoint:7:hang", start, folder, wait_for, "--processes=2")
    finish(run, folder, "--processes=2")
    assert_same_bits(folder, tmp_path / "whole")


@pytest.mark.slow
def test_an_aborted_process_is_started_again(uninterrupted, start, tmp_path, wait_for):
    folder = tmp_path / "run"
    process = start(folder, fault="training:6:hang")
    wait_for((tmp_path / "run.reached").exists)
    (child,) = children(process.pid)
    os.kill(child, signal.SIGABRT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    said = [line for line in output.splitlines() if "SIGABRT" in line]
    assert said == [
        "a process was stopped by SIGABRT: starting again from checkpoint round_00000004.msgpack."
    ]
    assert_same_bits(folder, uninterrupted)


@pytest.mark.slow
def test_one_of_two_processes_aborts(run, tmp_path):
    finish(run, tmp_path / "whole", "--processes=2")
    done = run(tmp_path / "run", "--processes=2", fault="training:6:abort")
    # What XLA and Gloo say of the lost process is in the log.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("a process was stopped by SIGABRT") == 1
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_started_again_stays_as_it_is(uninterrupted, run, tmp_path):
    import shutil

    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    finish(run, folder)
    assert_same_bits(folder, uninterrupted)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
