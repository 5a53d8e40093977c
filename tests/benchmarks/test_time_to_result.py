"""Starts to the end of some rounds, with stand-in programs."""

import json
import sys

import pytest

from benchmarks import side_by_side, time_to_result
from benchmarks.side_by_side import OURS, Program

LOGS = """
import json, os, pathlib, sys, time
cache = pathlib.Path(os.environ["XDG_CACHE_HOME"])
found = [path.name for path in cache.iterdir()]
(cache / "compiled").touch()
with open({log!r}, "a") as file:
    file.write(json.dumps([{name!r}, sys.argv[1:], str(cache), found]) + "\\n")
if {fails}:
    sys.exit("out of memory")
time.sleep({seconds})
print(json.dumps({{"peer": {name!r}, "peak_rss_mb": 100.0}}))
"""
PEER = "torch_loop"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def put(fails=(), lacks=()):
        programs = {
            name: Program(
                (
                    sys.executable,
                    "-c",
                    LOGS.format(log=str(log), name=name, seconds=seconds, fails=name in fails),
                ),
                tmp_path,
                several=name == OURS,
                lacks=("digits",) if name in lacks else (),
            )
            for name, seconds in ((OURS, 0.0), (PEER, 0.5))
        }
        monkeypatch.setattr(time_to_result, "PROGRAMS", programs)
        monkeypatch.setattr(time_to_result.machine, "cores", lambda: 2)
        monkeypatch.setattr(
            side_by_side,
            "make_job",
            lambda workload, turns: side_by_side.Job(workload, tmp_path / "x.npz", 1, turns),
        )
        command = ["time_to_result.py", "--workload", "digits", "--turns", "2", "--rounds", "20"]
        monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "results")])
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return put


def test_programs_start_in_turn_and_find_only_what_they_kept(stand_in, tmp_path, capsys):
    calls = stand_in()
    assert time_to_result.main() == 0
    # Ours with three settings, each twice; the peer, which has one process, with one core too.
    assert [name for name, *_ in calls()] == 2 * [*6 * [OURS], *2 * [PEER]]
    for _, arguments, _, _ in calls():
        assert "--first-rounds=20" in arguments and "--repetitions=0" in arguments
    settings = [arguments[-3:-1] for _, arguments, _, _ in calls()[:8]]
    one_core, one_process = ["--processes=1", "--threads=1"], ["--processes=1", "--threads=2"]
    assert settings == [
        *2 * [one_core],
        *2 * [one_process],
        *2 * [["--processes=2", "--threads=1"]],
        *(one_core, one_process),
    ]
    assert [found for *_, found in calls()[:8]] == [*3 * [[], ["compiled"]], [], []]
    assert len({folder for _, _, folder, _ in calls()}) == 10
    (record,) = side_by_side.records.newest(tmp_path / "results")
    ours, theirs = record["programs"][OURS], record["programs"][PEER]
    assert record["measured"] == "digits" and record["rounds"] == 20
    assert len(ours["cold"]) == len(ours["warm"]) == 2 and "warm" not in theirs
    assert min(theirs["cold"]) > 0.5 and theirs["peak_mb"] == 100.0
    assert "digits" in capsys.readouterr().out


def test_programs_run_with_the_settings_that_rounds_are_measured_with(monkeypatch, tmp_path):
    """A program of one process ran with all cores only."""
    tried = []

    def start(program, job, setting, twice):
        tried.append((program.several, *setting))
        return [time_to_result.Start(1.0, 1.0)]

    monkeypatch.setattr(time_to_result, "start", start)
    monkeypatch.setattr(time_to_result.machine, "cores", lambda: 2)
    programs = {OURS: Program((), tmp_path), PEER: Program((), tmp_path, several=False)}
    time_to_result.measure(programs, side_by_side.Job("digits", tmp_path / "x.npz", 1, turns=1))
    ours = [(True, 1, 1), (True, 1, 2), (True, 2, 1)]
    assert tried == [*ours, (False, 1, 1), (False, 1, 2)]


def test_a_setting_that_fails_is_left_out_alone(monkeypatch, tmp_path, capsys):
    def start(program, job, setting, twice):
        if setting.threads == 1:
            raise time_to_result.ProgramFailed("no result")
        return [time_to_result.Start(1.0, 1.0)]

    monkeypatch.setattr(time_to_result, "start", start)
    monkeypatch.setattr(time_to_result.machine, "cores", lambda: 2)
    programs = {PEER: Program((), tmp_path, several=False)}
    job = side_by_side.Job("digits", tmp_path / "x.npz", 1, turns=2)
    found = time_to_result.measure(programs, job)[PEER]
    assert found["setting"] == {"processes": 1, "threads": 2} and found["cold"] == [1.0, 1.0]
    assert capsys.readouterr().err.count("failed in turn") == 1


def test_the_setting_with_the_lowest_median_counts():
    def starts(*seconds):
        return [[time_to_result.Start(each, 10 * each)] for each in seconds]

    slow, fast = side_by_side.Setting(1, 2), side_by_side.Setting(2, 1)
    found = time_to_result.best({slow: starts(1.0, 5.0, 6.0), fast: starts(2.0, 3.0, 4.0)})
    assert found["setting"] == {"processes": 2, "threads": 1}
    assert found["cold"] == [2.0, 3.0, 4.0] and found["peak_mb"] == 40.0


def test_where_ours_fails_there_is_one_line_and_no_record(stand_in, tmp_path, capsys):
    stand_in(fails=[OURS])
    assert time_to_result.main() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: fedcodist: status 1: out of memory"
    assert not (tmp_path / "results").exists()


def test_a_peer_that_fails_is_left_out_and_said(stand_in, tmp_path, capsys):
    calls = stand_in(fails=[PEER])
    assert time_to_result.main() == 0
    said = capsys.readouterr().err.splitlines()
    for setting in ("1 x 1", "1 x 2"):
        assert (
            said.count(f"torch_loop failed in turn 1 with {setting}: status 1: out of memory") == 1
        )
    assert [name for name, *_ in calls()].count(PEER) == 2
    (record,) = side_by_side.records.newest(tmp_path / "results")
    assert record["programs"][PEER] == {"error": "status 1: out of memory"}


def test_a_peer_that_cannot_do_the_work_is_not_started(stand_in, tmp_path):
    calls = stand_in(lacks=[PEER])
    assert time_to_result.main() == 0
    assert {name for name, *_ in calls()} == {OURS}
    (record,) = side_by_side.records.newest(tmp_path / "results")
    assert record["programs"][PEER] == {"error": side_by_side.NOT_SUPPORTED}
