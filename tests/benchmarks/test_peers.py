"""The comparison with peers: the driver with stand-in programs, and that all compute the same."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import live_line, side_by_side
from benchmarks.peers import measuring
from benchmarks.peers.pfl_research import program as pfl_program
from benchmarks.side_by_side import (
    NOT_INSTALLED,
    NOT_SUPPORTED,
    REFERENCE,
    Job,
    Program,
    ProgramFailed,
    Setting,
    make_inputs,
    work,
)

ROOT = Path(__file__).parents[2]

STAND_IN = """
import argparse, json, pathlib, shutil, sys
parser = argparse.ArgumentParser()
for name in ("behaviour", "workload", "inputs", "repetitions", "rounds-per-repetition",
             "processes", "threads", "save-weights"):
    parser.add_argument("--" + name)
own = parser.parse_args()
behaviour = json.loads(own.behaviour)
log = pathlib.Path(behaviour["log"])
calls = log.read_text().splitlines() if log.exists() else []
setting = own.processes + "x" + own.threads
with open(log, "a") as file:
    file.write(behaviour["name"] + " " + setting + "\\n")
mine = sum(call.startswith(behaviour["name"] + " ") for call in calls)
if setting in behaviour["fails"] or mine in behaviour["fails"]:
    sys.exit("out of memory, says " + behaviour["name"])
if own.save_weights:
    shutil.copy(behaviour["weights"], own.save_weights)
print("some chatter")
print(json.dumps({
    "version": "1.0",
    "seconds_per_round": [behaviour["seconds"][setting] * (1 + mine)],
    "compile_or_warmup_seconds": 2.0, "peak_rss_mb": 100.0 + mine,
    "processes": int(own.processes), "threads": int(own.threads),
}))
print("done")
"""


@pytest.fixture
def stand_in(tmp_path):
    """Makes programs that log their calls; each call takes longer than the one before."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def make(name, seconds, fails=(), weights="", several=True):
        behaviour = {
            "name": name,
            "seconds": seconds,
            "fails": list(fails),
            "weights": str(weights),
            "log": str(tmp_path / "log"),
        }
        command = (sys.executable, str(script), f"--behaviour={json.dumps(behaviour)}")
        return Program(command, script, several)

    return make


@pytest.fixture
def calls(tmp_path):
    return lambda: (tmp_path / "log").read_text().splitlines()


@pytest.fixture
def job(tmp_path):
    return Job("digits", tmp_path / "inputs.npz", rounds=5, turns=3)


SAME = {"1x1": 1.0, "1x2": 1.0, "2x1": 1.0}


def test_programs_run_in_turn_with_their_best_settings(stand_in, calls, job):
    programs = {
        "fedcodist": stand_in("fedcodist", {"1x1": 1.0, "1x2": 0.4, "2x1": 0.1}),
        "torch_loop": stand_in("torch_loop", {"1x1": 0.1, "1x2": 2.0}, several=False),
        "pfl": stand_in("pfl", {"1x1": 1.0, "1x2": 0.1, "2x1": 1.0}),
    }
    record = side_by_side.measure(programs, job, cores=2)
    trials, turns = calls()[:-9], calls()[-9:]
    assert len(trials) == 3 + 2 + 3
    assert turns == ["fedcodist 2x1", "torch_loop 1x1", "pfl 1x2"] * 3
    own = record["programs"]["fedcodist"]
    assert (own["processes"], own["threads"]) == (2, 1)
    assert [trial["seconds"] for trial in own["tried"]] == pytest.approx([1.0, 0.8, 0.3])


def test_settings_near_the_fastest_are_tried_again(stand_in, calls, job):
    """The machine slows down: of 2.0 and 2.1 s the second is the faster setting, as more trials tell."""
    program = stand_in("some", {"1x1": 9.0, "1x2": 1.0, "2x1": 0.7})
    tried = side_by_side.try_settings(program, job, side_by_side.settings(2, several=True))
    assert calls() == ["some 1x1", *(3 * ["some 1x2", "some 2x1"])]
    # Of calls 2, 4, 6 and 3, 5, 7.
    assert [trial["seconds"] for trial in tried] == pytest.approx([9.0, 4.0, 3.5])


def test_figures_over_turns(stand_in, job):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "peer": stand_in("peer", dict.fromkeys(SAME, 3.0)),
    }
    record = side_by_side.measure(programs, job, cores=2)
    ours, peer = record["programs"]["fedcodist"], record["programs"]["peer"]
    # Three trials, then turns that take 4, 5 and 6: the machine slows down.
    assert ours["seconds_per_round"] == [4, 5, 6]
    assert (ours["median"], ours["minimum"], ours["maximum"]) == (5, 4, 6)
    assert (peer["median"], peer["minimum"], peer["maximum"]) == (15, 12, 18)
    # Within a turn both are as slow, so ratios do not spread.
    assert peer["ratio_to_ours"] == peer["ratio_minimum"] == peer["ratio_maximum"] == 3
    assert peer["peak_rss_mb"] == 105 and peer["compile_or_warmup_seconds"] == 2
    text = side_by_side.table(record)
    row = next(line for line in text.splitlines() if line.startswith("peer"))
    assert row.split()[1:9] == ["1", "x", "1", "15.0000", "12.0000", "18.0000", "3.00", "3.00"]
    json.dumps(record)


def test_missing_peer_is_listed_and_not_run(stand_in, calls, job, tmp_path):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "flower": stand_in("flower", SAME)._replace(needs=tmp_path / "nowhere"),
    }
    record = side_by_side.measure(programs, job, cores=2)
    assert record["programs"]["flower"] == {"error": "not installed: make bench-peers"}
    assert not any(call.startswith("flower") for call in calls())
    assert "flower          not installed: make bench-peers" in side_by_side.table(record)


def test_setting_that_fails_is_not_chosen(stand_in, calls, job):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "some": stand_in("some", {"1x1": 9.0, "1x2": 1.0, "2x1": 0.1}, fails=["2x1"]),
        "none": stand_in("none", SAME, fails=["1x1", "1x2", "2x1"]),
    }
    record = side_by_side.measure(programs, job, cores=2)
    assert calls()[-6:] == ["fedcodist 1x1", "some 1x2"] * 3
    assert "out of memory, says some" in record["programs"]["some"]["tried"][2]["error"]
    assert record["programs"]["none"]["error"] == "status 1: out of memory, says none"


def test_peer_that_fails_twice_in_a_turn_is_left_out(stand_in, calls, job, capsys):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "peer": stand_in("peer", SAME, fails=[4, 5]),
    }
    record = side_by_side.measure(programs, job, cores=2)
    assert calls()[-6:] == ["fedcodist 1x1", "peer 1x1"] * 2 + ["peer 1x1", "fedcodist 1x1"]
    assert record["programs"]["peer"]["error"] == "failed in turn 2"
    assert "peer failed in turn 2, left out" in capsys.readouterr().err
    assert record["programs"]["fedcodist"]["median"] == 5


def test_peer_that_fails_once_gets_another_try(stand_in, calls, job, capsys):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "peer": stand_in("peer", SAME, fails=[4]),
    }
    record = side_by_side.measure(programs, job, cores=2)
    assert calls()[-5:] == ["fedcodist 1x1", *["peer 1x1"] * 2, "fedcodist 1x1", "peer 1x1"]
    assert "error" not in record["programs"]["peer"]
    assert "peer failed in turn 2, once more" in capsys.readouterr().err


def test_without_ours_there_is_nothing_to_compare(stand_in, job):
    programs = {"fedcodist": stand_in("fedcodist", SAME, fails=["1x1", "1x2", "2x1"])}
    with pytest.raises(ProgramFailed, match="fedcodist does not run: status 1: out of memory"):
        side_by_side.measure(programs, job, cores=2)


def test_program_that_prints_no_result_has_failed(job, tmp_path):
    program = Program((sys.executable, "-c", "print('hello')"), tmp_path)
    with pytest.raises(ProgramFailed, match="status 0: hello"):
        side_by_side.run(program, job, Setting(1, 1))


def test_the_last_words_of_a_program_that_fails(job, tmp_path):
    program = Program((sys.executable, "-c", "exit('no memory\\n=====')"), tmp_path)
    with pytest.raises(ProgramFailed, match=r"^status 1: no memory$"):
        side_by_side.run(program, job, Setting(1, 1))


@pytest.mark.parametrize(
    ("cores", "several", "expected"),
    [
        (1, True, [(1, 1)]),
        (2, True, [(1, 1), (1, 2), (2, 1)]),
        (2, False, [(1, 1), (1, 2)]),
        (8, True, [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]),
    ],
)
def test_settings(cores, several, expected):
    assert side_by_side.settings(cores, several) == expected


def test_check_finds_what_differs(stand_in, job, tmp_path, capsys):
    network = work.WORKLOADS["digits"].networks[work.POOL]
    initial = {
        f"{work.POOL}/{name}": np.zeros(shape, np.float32)
        for name, shape in work.weight_shapes(network).items()
    }
    np.savez(job.inputs, **initial)
    paths = {}
    for name, bias in {"right": 1.0, "near": 1.00005, "wrong": 1.0002}.items():
        paths[name] = tmp_path / f"{name}.npz"
        # One small array differs among many: it must not drown in the norm of the others.
        small = {f"{work.POOL}/output/bias": np.full(10, bias, np.float32)}
        np.savez(paths[name], **{n: v + 1 for n, v in initial.items()} | small)
    programs = {
        "torch_loop": stand_in("torch_loop", SAME, weights=paths["right"], several=False),
        "near": stand_in("near", SAME, weights=paths["near"]),
        "missing": stand_in("missing", SAME)._replace(needs=tmp_path / "nowhere"),
        "unable": stand_in("unable", SAME)._replace(lacks=("digits",)),
    }
    found = {line["program"]: line for line in side_by_side.check(programs, job, cores=1)}
    assert all(side_by_side.agrees(line) for line in found.values())
    assert found["near"]["difference"] == pytest.approx(5e-5, rel=0.1)
    assert (found["near"]["processes"], found["near"]["threads"]) == (1, 1)
    assert found["missing"]["hindrance"] == NOT_INSTALLED
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "missing" in line and line.endswith(NOT_INSTALLED)]
    assert [line for line in lines if "unable" in line and line.endswith(NOT_SUPPORTED)]
    programs["wrong"] = stand_in("wrong", SAME, weights=paths["wrong"])
    programs["broken"] = stand_in("broken", SAME, fails=["1x1"])
    found = side_by_side.check(programs, job, cores=1)
    assert [line["program"] for line in found if not side_by_side.agrees(line)] == [
        "wrong",
        "broken",
    ]
    assert "out of memory" in found[-1]["error"] and "difference" not in found[-1]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if "wrong" in line] == ["DIFFERS"]
    assert [line.split()[-1] for line in lines if "near" in line] == ["ok"]


def checked(workload, difference=1e-6, program="fedcodist"):
    line = {"workload": workload, "program": program, "double": False}
    return line | {"processes": 1, "threads": 2, "difference": difference}


def test_a_check_replaces_the_lines_of_its_workload(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "side_by_side.py"), "--check"])
    write = lambda *lines: side_by_side.write_check(lines, tmp_path)
    write(checked("digits", 1e-6), checked("digits", 2e-6, "flower"))
    write(checked("merged", 3e-6))
    path = write(checked("digits", 4e-6))
    assert [path] == list(tmp_path.iterdir()) and path.name.endswith("-check.json")
    (record,) = side_by_side.records.newest(tmp_path)
    found = [(line["workload"], line["difference"]) for line in record["checked"]]
    assert found == [("merged", 3e-6), ("digits", 4e-6)]
    assert all(line["date"] and "commit" in line for line in record["checked"])
    assert record["tolerance"] == side_by_side.TOLERANCE


@pytest.mark.parametrize(
    ("differences", "status"), [([1e-6, 1e-5], 0), ([1e-3, 1e-6], 1), ([float("nan"), 0.0], 1)]
)
def test_status_of_a_check_of_several_workloads(tmp_path, monkeypatch, differences, status):
    of = dict(zip(["digits", "merged"], differences, strict=True))
    monkeypatch.setattr(side_by_side, "make_job", lambda workload, turns: workload)
    monkeypatch.setattr(side_by_side, "check", lambda p, job, cores: [checked(job, of[job])])
    here = {REFERENCE: Program((), tmp_path)}
    monkeypatch.setattr(side_by_side, "PROGRAMS", here)
    command = ["side_by_side.py", "--check", "--workload", *of, "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    assert side_by_side.main() == status
    (record,) = side_by_side.records.newest(tmp_path)
    assert [line["workload"] for line in record["checked"]] == list(of)
    here[REFERENCE] = here[REFERENCE]._replace(needs=tmp_path / "nowhere")
    assert side_by_side.main() == 2


def test_some_programs_beside_ours_leave_no_record(
    stand_in, calls, job, tmp_path, monkeypatch, capsys
):
    programs = {name: stand_in(name, SAME) for name in ("fedcodist", "torch_loop", "flower")}
    monkeypatch.setattr(side_by_side, "PROGRAMS", programs)
    monkeypatch.setattr(side_by_side, "make_job", lambda workload, turns: job)
    results = tmp_path / "results"
    command = ["side_by_side.py", "--workload", "digits", "--results", str(results)]
    monkeypatch.setattr("sys.argv", [*command, "--only", "flower"])
    assert side_by_side.main() == 0
    assert {call.split()[0] for call in calls()} == {"fedcodist", "flower"}
    said = capsys.readouterr().out
    assert "flower" in said and "torch_loop" not in said and not results.exists()
    monkeypatch.setattr("sys.argv", command)
    assert side_by_side.main() == 0
    (record,) = side_by_side.records.newest(results)
    assert list(record["programs"]) == list(programs)


def only(monkeypatch, tmp_path, *arguments):
    """The status of `--only` with those arguments, and what was measured."""
    measured = []

    def measure(programs, job, cores):
        measured.append(job.workload)
        return {}

    monkeypatch.setattr(side_by_side, "measure", measure)
    monkeypatch.setattr(side_by_side, "table", lambda record: "")
    make_job = lambda workload, turns: Job(workload, tmp_path / "x.npz", 1, turns)
    monkeypatch.setattr(side_by_side, "make_job", make_job)
    monkeypatch.setattr("sys.argv", ["side_by_side.py", "--only", *arguments])
    return side_by_side.main(), measured


def test_what_no_named_program_can_run_is_not_measured(monkeypatch, tmp_path, capsys):
    """Ours was measured alone, for an hour."""
    installed = {
        name: program._replace(needs=tmp_path) for name, program in side_by_side.PROGRAMS.items()
    }
    monkeypatch.setattr(side_by_side, "PROGRAMS", installed)
    monkeypatch.delenv("HTFLLIB", raising=False)
    assert only(monkeypatch, tmp_path, "htfllib") == (2, [])
    assert capsys.readouterr().err == (
        "error: nothing can be compared: htfllib: not fetched: HTFLLIB names no folder with its code\n"
    )
    assert only(monkeypatch, tmp_path, "htfllib", "--workload", "digits") == (2, [])
    assert capsys.readouterr().err.endswith("compared: htfllib: not supported\n")
    of_fedjax = ["cnn_small", "cnn_large", "digits", "emnist", "lstm_small", "lstm_large"]
    assert only(monkeypatch, tmp_path, "fedjax") == (0, of_fedjax)
    assert only(monkeypatch, tmp_path, "fedjax", "htfllib") == (0, of_fedjax)
    assert only(monkeypatch, tmp_path, "fedjax", "--workload", "merged", "digits")[1] == ["digits"]
    monkeypatch.setenv("HTFLLIB", str(tmp_path))
    assert only(monkeypatch, tmp_path, "htfllib") == (0, list(side_by_side.HTFL))
    installed["flower"] = installed["flower"]._replace(needs=tmp_path / "nowhere")
    assert only(monkeypatch, tmp_path, "flower") == (2, [])
    assert NOT_INSTALLED in capsys.readouterr().err


WITH_WORKERS = """
import json, pathlib, subprocess, sys, time
pids, workload = pathlib.Path(sys.argv[1]), sys.argv[2].partition("=")[2]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
with open(pids, "a") as file:
    print(workload, worker.pid, file=file, flush=True)
print(json.dumps({
    "version": "1.0", "seconds_per_round": [1.0], "compile_or_warmup_seconds": 0.0,
    "peak_rss_mb": 1.0, "processes": 1, "threads": 1,
}), flush=True)
if workload == "emnist":
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "name",
    ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGHUP"))],
)
def test_a_comparison_that_is_ended_leaves_its_tables_and_no_process(name, tmp_path):
    """The first workload is measured, the second one is just running."""
    script, pids, results = tmp_path / "program.py", tmp_path / "pids", tmp_path / "results"
    script.write_text(WITH_WORKERS)
    pids.touch()
    driver = (
        "import sys, pathlib\n"
        "from benchmarks import side_by_side\n"
        "own, program = map(pathlib.Path, sys.argv[1:3])\n"
        "command = (sys.executable, str(program), str(own))\n"
        "side_by_side.PROGRAMS = {'fedcodist': side_by_side.Program(command, program, several=False)}\n"
        "side_by_side.machine.cores = lambda: 1\n"
        "make_job = lambda workload, turns: side_by_side.Job(workload, own, 1, turns)\n"
        "side_by_side.make_job = make_job\n"
        "sys.argv[1:3] = []\n"
        "sys.exit(side_by_side.command())"
    )
    arguments = ["--workload", "digits", "emnist", "--turns", "1", "--results", str(results)]
    comparison = subprocess.Popen(
        [sys.executable, "-c", driver, str(pids), str(script), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while "emnist" not in pids.read_text() and comparison.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = [int(line.split()[1]) for line in pids.read_text().splitlines()]
    comparison.send_signal(getattr(signal, name))
    said, steps = comparison.communicate(timeout=60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers), workers
    assert comparison.returncode == 128 + getattr(signal, name), steps
    assert said.startswith("\ndigits: ") and said.endswith("interrupted.\n")
    assert steps.splitlines() == [
        "digits: fedcodist tries processes and threads",
        "digits: turn 1 of 1, fedcodist",
        "emnist: fedcodist tries processes and threads",
    ]
    (record,) = side_by_side.records.newest(results)
    assert record["workload"] == "digits" and len(workers) == 3


def test_in_a_terminal_a_live_line_says_what_runs():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    console = Console(file=Terminal(), force_terminal=True, width=60)
    with live_line.showing("digits [1]: turn 2 of 7, flower", console):
        pass
    said = console.file.getvalue()
    # The line, the time since its start, and a line that is erased.
    assert "digits [1]: turn 2 of 7, flower" in said and "0:00:00" in said
    assert said.endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--turns", "0"], "--turns must be at least 1"),
        (["--only", "fedcodist"], "invalid choice: 'fedcodist'"),
        (["--check", "--only", "flower"], "not --only"),
        (["--check", "--accelerator"], "not --accelerator"),
        (["--peak-tflops", "5"], "it needs --accelerator"),
        (["--accelerator", "--peak-tflops", "0"], "--peak-tflops must be positive"),
    ],
)
def test_refused_arguments(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["side_by_side.py", *arguments])
    with pytest.raises(SystemExit) as error:
        side_by_side.main()
    assert error.value.code == 2 and said in capsys.readouterr().err


SAYS_WHERE = """
import json, os, sys
device = {"device": "1 x Some GPU", "peak_device_mb": 50.0} if "--accelerator" in sys.argv else {}
print(json.dumps({
    "version": os.environ.get("CUDA_VISIBLE_DEVICES", "all"), "seconds_per_round": [2.0],
    "compile_or_warmup_seconds": 0.0, "peak_rss_mb": 1.0, "processes": 1, "threads": 8, **device,
}))
"""


def test_an_accelerator_is_used_where_it_is_asked_for_and_else_hidden(job, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    able = Program((sys.executable, "-c", SAYS_WHERE), tmp_path, accelerated=True)
    programs = {"fedcodist": able, "torch_loop": able, "flower": able._replace(accelerated=False)}
    there = side_by_side.measure(programs, job._replace(accelerator=True), cores=8)
    assert there["device"] == "1 x Some GPU"
    assert there["programs"]["flower"] == {"error": NOT_SUPPORTED}
    own = there["programs"]["torch_loop"]
    assert own["version"] == "all" and own["peak_device_mb"] == 50.0
    # One process, with all cores for what the host does.
    assert [(t["processes"], t["threads"]) for t in own["tried"]] == [(1, 8)]
    here = side_by_side.measure(programs, job, cores=1)
    assert here["device"] == side_by_side.machine.device()
    assert all(own["version"] == "" for own in here["programs"].values())
    assert not any("device" in key for own in here["programs"].values() for key in own)


def test_share_of_an_accelerators_peak():
    """A round of 50 TFLOP in 2 s at a peak of 100 TFLOP/s."""
    assert side_by_side.mfu({"gflop_per_round": 50_000, "peak_tflops": 100.0}, 2.0) == 0.25


def test_who_can_use_an_accelerator():
    able = {name for name, program in side_by_side.PROGRAMS.items() if program.accelerated}
    assert able == {"fedcodist", "torch_loop", "pfl_research"}
    for name, program in side_by_side.PROGRAMS.items():
        hindrance = program.hindrance("digits", accelerator=True)
        assert (hindrance == NOT_SUPPORTED) == (name not in able)


@pytest.mark.parametrize(
    "name",
    [
        "fedcodist",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("torch_loop", "pfl_research")),
    ],
)
def test_an_accelerator_that_is_not_there_is_one_line(name, tmp_path, monkeypatch):
    program = side_by_side.PROGRAMS[name]
    if program.hindrance("digits"):
        pytest.skip(f"{name} is not installed: make bench-peers")
    for variable in os.environ.keys() - _environment().keys():
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    np.savez(tmp_path / "inputs.npz", **make_inputs.make("digits"))
    job = Job("digits", tmp_path / "inputs.npz", rounds=1, turns=1, accelerator=True)
    with pytest.raises(ProgramFailed, match=r"^status 2: error: --accelerator: \w+ finds no"):
        side_by_side.run(program, job, Setting(1, 1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--accelerator", "--processes=2"], "--processes must be at most 1"),
        (["--processes=2"], None),
    ],
)
def test_an_accelerator_has_one_process(arguments, said, monkeypatch, capsys):
    command = ["program.py", "--workload=digits", "--inputs=x", *arguments]
    monkeypatch.setattr("sys.argv", command)
    if said is None:
        assert not measuring.parse_arguments("About.", accelerated=True).accelerator
        return
    with pytest.raises(SystemExit):
        measuring.parse_arguments("About.", accelerated=True)
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measuring.parse_arguments("About.")
    assert "unrecognized arguments: --accelerator" in capsys.readouterr().err


def test_a_report_tells_of_an_accelerator_where_it_is_told(capsys):
    arguments = _arguments(rounds_per_repetition=1)
    more = {"device": "1 x Some GPU", "peak_device_mb": None}
    measuring.report("peer", "1.0", arguments, [0.0, 1.0, 2.0, 3.0], 10.0, **more)
    line = json.loads(capsys.readouterr().out)
    assert line["device"] == "1 x Some GPU" and "peak_device_mb" not in line


def test_what_only_rounding_moves_must_not_be_moved_by_more():
    """A bias before batch normalisation has rounding errors as gradient, which differ by program."""
    initial = {"kernel": np.ones(4), "bias": np.zeros(3)}
    reference = {"kernel": np.full(4, 2.0), "bias": np.full(3, 1e-10)}
    moved = lambda bias: side_by_side.relative_difference(
        reference | {"bias": np.full(3, bias)}, reference, initial
    )
    assert moved(-1e-10) < side_by_side.TOLERANCE < moved(1e-8)


FED_MD_THREES = (30_464, 23_504, 44_304, 19_072, 26_032)


@pytest.mark.parametrize(
    ("workload", "counts"),
    [
        ("cnn_small", [109_348]),
        ("cnn_large", [410_084]),
        ("private", [109_348]),
        ("digits", [4_810]),
        ("emnist", [1_206_590]),
        ("resnet20", [272_474]),
        ("lstm_small", [1_984_348]),
        ("lstm_large", [4_278_644]),
        ("merged", [109_348, 410_084]),
        ("periodic", [109_348, 410_084]),
        ("fed_sdd", 4 * [272_474]),
        # Twos, then threes; equal to the library's (tests/models/test_fed_md.py counts the full widths).
        ("fed_md", [249_984, 374_496, 499_008, 269_376, 536_832, *FED_MD_THREES]),
        # With three more heads of 128 x 100 and of 64 x 10.
        ("mhd", 8 * [109_348 + 3 * 12_900]),
        ("mhd_digits", 8 * [4_810 + 3 * 650]),
        ("mhd_64", 64 * [4_810 + 3 * 650]),
        ("fed_kd", [410_084, 109_348]),
        # As tests/models/test_htfl.py has them of HtFLlib's own.
        ("htfl_fd", 2 * [878_538, 88_650, 318_794, 1_237_834]),
        ("htfl_fml", [*(2 * [878_538, 88_650, 318_794, 1_237_834]), 878_538]),
    ],
)
def test_networks_have_the_published_sizes(workload, counts):
    found = []
    for network in work.WORKLOADS[workload].networks.values():
        shapes = work.weight_shapes(network).items()
        trained = [shape for name, shape in shapes if not name.endswith(("mean", "var"))]
        found.append(sum(int(np.prod(shape)) for shape in trained))
    assert found == counts


def test_every_workload_has_rounds_and_a_program_that_can_do_it():
    assert set(side_by_side.ROUNDS) == set(work.WORKLOADS)
    for workload in work.WORKLOADS:
        for name in (side_by_side.OURS, side_by_side.reference_of(workload)):
            assert workload not in side_by_side.PROGRAMS[name].lacks
    lacking = {workload for p in side_by_side.PROGRAMS.values() for workload in p.lacks}
    assert lacking <= set(work.WORKLOADS)


def test_a_private_round_is_of_the_plain_ones_clients_and_compared_without_noise(tmp_path):
    plain, private = (make_inputs.make(workload) for workload in ("cnn_small", "private"))
    assert set(plain) == set(private)
    for name in set(plain) - {"workload"}:
        np.testing.assert_array_equal(plain[name], private[name])
    np.savez(tmp_path / "inputs.npz", **private)
    read = lambda double: work.read_inputs(tmp_path / "inputs.npz", "private", double)
    assert read(double=False).privacy == work.WORKLOADS["private"].privacy
    assert read(double=False).privacy.noise_multiplier > 0
    assert read(double=True).privacy == (work.WORKLOADS["private"].privacy.clip, 0.0)
    own = {name for name, workload in work.WORKLOADS.items() if workload.privacy is not None}
    assert own == set(side_by_side.PRIVATE) <= set(side_by_side.IN_DOUBLE)


def test_what_a_program_lacks_is_not_run(stand_in, calls, job):
    programs = {
        "fedcodist": stand_in("fedcodist", SAME),
        "unable": stand_in("unable", SAME)._replace(lacks=("digits", "merged")),
    }
    record = side_by_side.measure(programs, job, cores=1)
    assert record["programs"]["unable"] == {"error": NOT_SUPPORTED}
    assert not [call for call in calls() if call.startswith("unable")]
    assert NOT_SUPPORTED in side_by_side.table(record)


def test_clients_of_emnist_are_unequal():
    population = work.WORKLOADS["emnist"].population
    sizes = make_inputs.client_sizes(population, population.clients, np.random.default_rng(0))
    assert len(sizes) == 3400 and sizes.min() == 1 and 290 <= sizes.max() <= 300
    assert len(np.unique(sizes)) > 250


def test_sentences_are_as_long_as_those_of_stack_overflow():
    network = work.WORKLOADS["lstm_small"].networks[work.POOL]
    tokens = make_inputs.examples(network, 20_000, np.random.default_rng(0))["tokens"]
    assert tokens.shape == (20_000, work.POSITIONS + 1) and tokens.dtype == np.uint16
    predicted = np.count_nonzero(tokens[:, 1:], axis=1)
    assert predicted.mean() == pytest.approx(work.EXPECTED_LENGTH, abs=0.1)
    assert predicted.min() == 2 and 0.2 < (predicted == work.POSITIONS).mean() < 0.35
    for row, length in zip(tokens[:500], predicted[:500], strict=True):
        words = row[1:length] if work.END in row else row[1:]
        assert row[0] == work.BEGINNING and not row[length + 1 :].any()
        assert (work.END in row) == (row[length] == work.END) or length == work.POSITIONS
        assert words.min() >= work.FIRST_WORD and words.max() < network.vocabulary - 1
    counts = np.bincount(tokens[tokens >= work.FIRST_WORD])[work.FIRST_WORD :]
    # As by Zipf's law: the ten most frequent of 10,000 words are about a quarter of all words.
    assert counts[1] / counts[0] == pytest.approx(np.log(3 / 2) / np.log(2), rel=0.03)
    assert counts[:10].sum() / counts.sum() == pytest.approx(np.log(11) / np.log(10_000), rel=0.03)


def test_clients_of_text_have_stack_overflows_mean_of_sentences():
    population = work.WORKLOADS["lstm_small"].population
    sizes = make_inputs.client_sizes(population, 10_000, np.random.default_rng(0))
    assert sizes.mean() == pytest.approx(13_567_778 / 34_248, rel=0.02)


def test_pools_of_codistillation_share_no_clients_and_unlabelled_rows_are_visited_evenly():
    arrays = make_inputs.make("merged")
    cohorts = {pool: arrays[f"{pool}/cohorts"] for pool in ("small", "large")}
    assert not set(cohorts["small"].flat) & set(cohorts["large"].flat)
    assert cohorts["small"].shape == cohorts["large"].shape == (make_inputs.ROUNDS, 20)
    assert max(cohorts["large"].flat) < len(arrays["offsets"]) - 1
    rows = arrays["unlabelled_rows"]
    assert rows.shape == (make_inputs.DISTILLATIONS, 32, 128) and rows.dtype == np.int32
    visits = np.bincount(rows.reshape(-1), minlength=len(arrays["unlabelled"]))
    assert len(visits) == 5000 and visits.max() - visits.min() <= 1
    # One endless stream: the first round sees no row twice.
    assert len(np.unique(rows[0])) == 32 * 128


def test_models_of_fed_sdd_start_apart_and_share_no_clients():
    arrays, names = make_inputs.make("fed_sdd"), list(work.WORKLOADS["fed_sdd"].networks)
    cohorts = np.stack([arrays[f"{name}/cohorts"] for name in names])
    assert cohorts.shape == (4, make_inputs.ROUNDS, 2)
    assert len(np.unique(cohorts // 25)) == 4 and len(arrays["offsets"]) == 101
    kernels = np.stack([arrays[f"{name}/stem/kernel"].ravel() for name in names])
    assert np.abs(np.corrcoef(kernels) - np.eye(4)).max() < 0.3
    assert arrays["unlabelled"].shape == (5000, 32, 32, 3)


@pytest.mark.slow
def test_parties_visit_examples_in_orders_of_their_own():
    """Those of this library's first round, which the other programs are given."""
    arrays = make_inputs.make("fed_md")
    for purpose, size in (("digest", 8 * 128), ("revisit", 100)):
        orders = arrays[f"{purpose}_orders"]
        assert orders.shape == (10, size) and orders.dtype == np.int32
        np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(size), (10, 1)))
        assert len(np.unique(orders, axis=0)) == 10
    assert arrays["offsets"].tolist() == list(range(0, 1001, 100))


def test_clients_of_mhd_have_streams_and_pools_of_their_own():
    arrays = make_inputs.make("mhd_digits")
    private, public = arrays["private_orders"], arrays["public_orders"]
    assert private.shape == public.shape == (8, 100, 64)
    # A pass over the 100 private images, then another one, and so on.
    passes = np.sort(private.reshape(8, 64, 100), axis=2)
    np.testing.assert_array_equal(passes, np.broadcast_to(np.arange(100), passes.shape))
    assert len(np.unique(private.reshape(8, -1), axis=0)) == 8
    assert public.max() < work.UNLABELLED and len(np.unique(public[0])) > 3000
    assert arrays["drawn_orders"].shape == (8, 100)
    assert set(arrays["drawn_orders"].flat) == set(range(8))
    # Models of all others, the first one twice; later of another client, into a place of the pool.
    everybody = np.arange(8)
    for client, first in enumerate(arrays["first_orders"]):
        others = np.delete(everybody, client)
        np.testing.assert_array_equal(first, [*others, others[0]])
    sources, replaced = arrays["source_orders"][:, 1:], arrays["replaced_orders"][:, 1:]
    assert sources.shape == replaced.shape == (8, work.MHD_ROUNDS - 1)
    assert (sources != everybody[:, None]).all() and (replaced < 8).all()


def test_pools_of_fed_kd_are_the_same_four_clients():
    arrays = make_inputs.make("fed_kd")
    assert arrays["offsets"].tolist() == [0, 100, 200, 300, 400]
    for pool in (work.TEACHER, work.STUDENT):
        cohorts = arrays[f"{pool}/cohorts"]
        assert np.array_equal(np.sort(cohorts, axis=1), np.tile(np.arange(4), (len(cohorts), 1)))
    assert "unlabelled" not in arrays and "unlabelled_rows" not in arrays
    own, other = (
        work.hidden_widths(work.WORKLOADS["fed_kd"].networks[pool])
        for pool in (work.TEACHER, work.STUDENT)
    )
    assert list(own) == list(other) == ["conv1", "conv2", "conv3", "dense1", "dense2"]
    assert list(own.values()) == [32, 64, 64, 128, 256]
    assert list(other.values()) == [16, 32, 32, 64, 128]


def test_clients_of_htfllib_start_with_one_head_and_visit_examples_in_orders_of_their_own():
    arrays = make_inputs.make("htfl_fml")
    orders = arrays["visited_orders"]
    assert orders.shape == (8, work.HTFL_ORDERS, 100) and orders.dtype == np.int32
    assert (np.sort(orders, axis=2) == np.arange(100)).all()
    assert len(np.unique(orders.reshape(-1, 100), axis=0)) == 8 * work.HTFL_ORDERS
    assert arrays["offsets"].tolist() == list(range(0, 801, 100))  # the meme has no examples
    heads = np.stack(
        [arrays[f"{pool}/head/kernel"] for pool in work.WORKLOADS["htfl_fml"].networks]
    )
    assert (heads == heads[0]).all() and heads.shape == (9, 512, 10)
    first, second = (arrays[f"client_{index}/conv1/kernel"] for index in (0, 4))
    assert (first != second).any()


def test_examples_of_htfllibs_workloads_are_float32_numbers_in_float64_too(tmp_path):
    """HtFLlib rounds them. Without this a ReLU near zero was on in one of two equal programs."""
    path = tmp_path / "inputs.npz"
    np.savez(path, **make_inputs.make("htfl_fd"))
    images = work.read_inputs(path, "htfl_fd", double=True).images
    assert images.dtype == np.float64
    np.testing.assert_array_equal(images, images.astype(np.float32))


def test_rounds_before_the_weights_are_saved():
    arguments = _arguments(repetitions=1, rounds_per_repetition=2, first_rounds=3)
    done, saved = [], []
    measuring.run(done.append, lambda: saved.append(sum(done)), arguments, lambda: 0.0)
    assert done == [3, 2, 2] and saved == [3] and measuring.total_rounds(arguments) == 7
    own = measuring.rounds(arguments)
    assert [next(own) for _ in range(7)] == [0, 1, 2, 0, 1, 0, 1]


def test_htfllib_needs_a_folder_with_its_code(monkeypatch, tmp_path):
    program = side_by_side.PROGRAMS[side_by_side.HTFLLIB]._replace(needs=tmp_path)
    monkeypatch.delenv("HTFLLIB", raising=False)
    assert program.hindrance("htfl_fd") == "not fetched: HTFLLIB names no folder with its code"
    assert program.hindrance("digits") == NOT_SUPPORTED
    monkeypatch.setenv("HTFLLIB", str(tmp_path))
    assert program.hindrance("htfl_fd") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("nowhere", "HTFLLIB must be a checkout of github.com/TsingZ0/HtFLlib, got nowhere"),
        ("other", "other is not at commit e959261"),
    ],
)
def test_other_code_than_htfllibs_commit_is_refused(folder, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "system" / "flcore").mkdir(parents=True)
    program = side_by_side.PROGRAMS[side_by_side.HTFLLIB]
    monkeypatch.setenv("HTFLLIB", folder)
    if program.hindrance("htfl_fd"):
        pytest.skip("its environment is not installed: make bench-peers")
    job = Job("htfl_fd", tmp_path / "inputs.npz", rounds=1, turns=1)
    with pytest.raises(ProgramFailed, match=rf"^status 2: error: .*{said}"):
        side_by_side.run(program, job, Setting(1, 1))


def test_no_round_of_pfl_research_is_evaluated():
    """With its rule. It evaluated clients of the first round, which counts in a time to a result."""

    class Algorithm:
        def get_next_central_contexts(self, model, iteration, most, frequency):
            return None if iteration == most else iteration % frequency == 0

    rounds, algorithm = 3, pfl_program.unevaluated(Algorithm)()
    evaluated = [
        algorithm.get_next_central_contexts("model", iteration, rounds + 1, rounds + 1)
        for iteration in range(rounds + 1)
    ]
    assert evaluated == [False, False, False, None]


def test_one_clients_teacher_that_differs_is_found():
    """FedKD's teachers are compared with the weights that all of them start from."""
    initial = {"kernel": np.zeros((3, 2))}
    reference = {"kernel": np.ones((4, 3, 2))}
    other = reference["kernel"].copy()
    other[2, 1, 1] += 0.01
    assert side_by_side.relative_difference(reference, reference, initial) == 0
    differs = side_by_side.relative_difference({"kernel": other}, reference, initial)
    assert differs > side_by_side.TOLERANCE


def test_weights_that_are_no_numbers_do_not_agree():
    """In whichever array they are."""
    initial = {"kernel": np.zeros(2), "bias": np.zeros(2)}
    reference = {name: np.ones(2) for name in initial}
    for name in initial:
        weights = reference | {name: np.array([1, np.nan])}
        differs = side_by_side.relative_difference(weights, reference, initial)
        assert not differs <= side_by_side.TOLERANCE


def test_inputs_are_the_same_whenever_they_are_made():
    first, second = make_inputs.make("digits"), make_inputs.make("digits")
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    assert all(len(set(cohort)) == 20 for cohort in first[f"{work.POOL}/cohorts"].tolist())
    assert first["offsets"][-1] == len(first["labels"]) == len(first["pixels"])


def test_report_separates_warm_up_from_rounds(capsys):
    arguments = _arguments(repetitions=3, rounds_per_repetition=2)
    # A first round of 11 s, then 2 s a round and 3 s more in the warm-up, with 5 s in one of three.
    now, ends = 0.0, []

    def train(rounds):
        nonlocal now
        for _ in range(rounds):
            now += {0: 11.0, 1: 5.0, 5: 5.0}.get(len(ends), 2.0)
            ends.append(now)

    times = measuring.run(train, lambda: None, arguments, lambda: now)
    assert len(ends) == measuring.total_rounds(arguments)
    assert times == measuring.ends_of_parts(0.0, ends, arguments)
    measuring.report("peer", "1.0", arguments, times, 10.0)
    line = json.loads(capsys.readouterr().out)
    assert line["seconds_per_round"] == [2.0, 3.5, 2.0]
    assert line["compile_or_warmup_seconds"] == 9.0 + 3.0


def test_every_repetition_trains_on_the_same_cohorts():
    arguments = _arguments(repetitions=2, rounds_per_repetition=3)
    pool = work.Pool(work.WORKLOADS["digits"].networks[work.POOL], np.arange(8), {})
    inputs = work.Inputs("digits", *[np.zeros(0)] * 3, {work.POOL: pool})
    own = measuring.cohorts(inputs, arguments)
    taken = [int(next(own)) for _ in range(measuring.total_rounds(arguments))]
    assert taken == [0] + [0, 1, 2] * 3


@pytest.mark.slow
def test_ours_computes_the_round_that_the_inputs_say(tmp_path):
    arrays = make_inputs.make("digits")
    # Unequal clients: their last batches are smaller.
    sizes = 5 + np.arange(100) % 90
    arrays["offsets"] = np.concatenate([[0], np.cumsum(sizes)])
    for name in ("pixels", "labels"):
        arrays[name] = arrays[name][: sizes.sum()]
    np.savez(tmp_path / "inputs.npz", **arrays)
    command = [
        *(sys.executable, "benchmarks/ours.py", "--workload=digits", "--repetitions=0"),
        *(f"--inputs={tmp_path / 'inputs.npz'}", f"--save-weights={tmp_path / 'weights.npz'}"),
    ]
    subprocess.run(command, cwd=ROOT, env=_environment(), check=True, timeout=300)
    weights = dict(np.load(tmp_path / "weights.npz"))
    inputs = work.read_inputs(tmp_path / "inputs.npz", "digits")
    initial = _in_pool(inputs.pool.weights)
    expected = _in_pool(_round_by_numpy(inputs))
    assert side_by_side.relative_difference(weights, expected, initial) < 1e-4
    clients = np.split(np.arange(sizes.sum()), inputs.offsets[1:-1])
    backwards = np.concatenate([rows[::-1] for rows in clients])
    other = inputs._replace(images=inputs.images[backwards], labels=inputs.labels[backwards])
    expected = _in_pool(_round_by_numpy(other))
    assert side_by_side.relative_difference(weights, expected, initial) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["digits", "lstm_large"])
def test_ours_and_the_pytorch_loop_agree_after_one_round(workload, tmp_path, monkeypatch):
    _skip_without_reference()
    for name in os.environ.keys() - _environment().keys():
        monkeypatch.delenv(name)
    arrays = make_inputs.make(workload)
    if "tokens" in arrays:  # few sentences, one of each client's in a batch that is not full
        arrays["offsets"] = 21 * np.arange(101)
        arrays["tokens"] = arrays["tokens"][:2100]
    np.savez(tmp_path / "inputs.npz", **arrays)
    job = Job(workload, tmp_path / "inputs.npz", rounds=1, turns=1)
    ours, reference = (
        side_by_side.first_weights(side_by_side.PROGRAMS[name], job, Setting(1, 1))
        for name in (side_by_side.OURS, REFERENCE)
    )
    initial = side_by_side.initial_weights(job)
    assert side_by_side.relative_difference(ours, reference, initial) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("workload", list(work.WORKLOADS))
def test_all_programs_agree_after_one_round(workload, tmp_path):
    _skip_without_reference(workload)
    command = [sys.executable, "benchmarks/side_by_side.py", "--check", "--workload", workload]
    command += ["--results", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "fedcodist" in line]
    assert lines and all(line.endswith("ok") for line in lines)


AT_ONCE = """
import sys
sys.path[:0] = ["benchmarks", "."]
import jax
jax.config.update("jax_enable_x64", True)
import ours, side_by_side
from pathlib import Path
from side_by_side import work
path, workload = Path(sys.argv[1]), sys.argv[2]
found, programs = [], set()
for at_once in (False, True):
    prepared = ours.prepare(work.read_inputs(path, workload, double=True), 1, at_once)
    programs.add(prepared.lowered().as_text())
    prepared.train(1)
    own = prepared.weights()
    found.append({f"{pool}/{name}": own[pool][name] for pool in own for name in own[pool]})
initial = side_by_side.initial_weights(side_by_side.Job(workload, path, 1, 1))
print(len(programs), side_by_side.relative_difference(*found, initial))
"""


@pytest.mark.parametrize(
    "workload",
    [
        "emnist",
        "mhd",
        "merged",
        "fed_sdd",
        "fed_kd",
    ],
)
@pytest.mark.slow
def test_ours_trains_the_same_clients_at_once(workload, tmp_path):
    """As it does on accelerators."""
    make_inputs.write(workload, tmp_path / "inputs.npz")
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "inputs.npz"), workload]
    environment = _environment() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    programs, distance = done.stdout.split()[-2:]
    assert int(programs) == 2
    assert float(distance) < 1e-6


def _skip_without_reference(workload="digits"):
    name = side_by_side.reference_of(workload)
    if hindrance := side_by_side.PROGRAMS[name].hindrance(workload):
        pytest.skip(f"{name} is not there: {hindrance}")


def _in_pool(weights):
    return {f"{work.POOL}/{name}": value for name, value in weights.items()}


def _arguments(**values):
    from argparse import Namespace

    defaults = {"workload": "digits", "processes": 1, "threads": 1, "save_weights": None}
    defaults["first_rounds"] = 1
    return Namespace(**defaults | values)


def _environment():
    """A user's environment: conftest.py's eight devices and slow code are for tests in this process."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _round_by_numpy(inputs):
    """One round of federated averaging on the two-layer network, in float64."""
    initial = {name: value.astype(np.float64) for name, value in inputs.pool.weights.items()}
    total = {name: np.zeros_like(value) for name, value in initial.items()}
    examples = 0
    for client in inputs.pool.cohorts[0]:
        rows = inputs.rows_of(client)
        trained = _client_by_numpy(dict(initial), inputs.images[rows], inputs.labels[rows])
        size = rows.stop - rows.start
        examples += size
        for name in total:
            total[name] += size * (initial[name] - trained[name])
    result = {}
    for name, value in initial.items():
        gradient = total[name] / examples
        # Adam's first step: both bias corrections cancel the decay.
        result[name] = value - 1e-3 * gradient / (np.abs(gradient) + 1e-5)
    return result


def _client_by_numpy(weights, images, labels):
    for start in range(0, len(labels), 20):
        x, y = images[start : start + 20].astype(np.float64), labels[start : start + 20]
        before = x @ weights["dense1/kernel"] + weights["dense1/bias"]
        hidden = np.maximum(before, 0)
        logits = hidden @ weights["output/kernel"] + weights["output/bias"]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        error = (probabilities - np.eye(10)[y]) / len(y)
        back = error @ weights["output/kernel"].T * (before > 0)
        gradients = {
            "output/kernel": hidden.T @ error,
            "output/bias": error.sum(axis=0),
            "dense1/kernel": x.T @ back,
            "dense1/bias": back.sum(axis=0),
        }
        weights = {name: value - 0.05 * gradients[name] for name, value in weights.items()}
    return weights
