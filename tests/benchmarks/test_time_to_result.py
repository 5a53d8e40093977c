"""Cold starts to the end of some rounds, with stand-in programs."""

import json
import sys

import pytest

from benchmarks import side_by_side, time_to_result
from benchmarks.side_by_side import HTFLLIB, OURS, Program

LOGS = """
import json, os, pathlib, sys, time
log = pathlib.Path({log!r})
with open(log, "a") as file:
    caches = [os.environ.get(name) for name in ("XDG_CACHE_HOME", "JAX_ENABLE_COMPILATION_CACHE")]
    file.write(json.dumps([{name!r}, sys.argv[1:], caches]) + "\\n")
if {fails}:
    sys.exit("out of memory")
time.sleep({seconds})
print(json.dumps({{"peer": {name!r}}}))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def put(fails=False):
        programs = {
            name: Program(
                (
                    sys.executable,
                    "-c",
                    LOGS.format(
                        log=str(log), name=name, seconds=seconds, fails=fails and name != OURS
                    ),
                ),
                tmp_path,
            )
            for name, seconds in ((OURS, 0.0), (HTFLLIB, 0.5))
        }
        monkeypatch.setattr(time_to_result, "PROGRAMS", programs)
        monkeypatch.setattr(
            side_by_side,
            "make_job",
            lambda workload, turns: side_by_side.Job(workload, tmp_path / "x.npz", 1, turns),
        )
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return put


def test_programs_start_in_turn_with_nothing_compiled(stand_in, tmp_path, monkeypatch, capsys):
    calls = stand_in()
    command = ["time_to_result.py", "--workload", "htfl_fd", "--turns", "2", "--rounds", "20"]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path / "results")])
    assert time_to_result.main() == 0
    assert [name for name, _, _ in calls()] == 2 * [OURS, HTFLLIB]
    for _, arguments, (folder, is_cached) in calls():
        assert "--first-rounds=20" in arguments and "--repetitions=0" in arguments
        assert is_cached == "false" and not list((tmp_path / folder).glob("*"))
    assert len({folder for _, _, (folder, _) in calls()}) == 4
    (record,) = side_by_side.records.newest(tmp_path / "results")
    own = record["seconds"]["htfl_fd"]
    assert len(own[OURS]) == 2 and min(own[HTFLLIB]) > 0.5
    assert "htfl_fd" in capsys.readouterr().out


def test_a_program_that_fails_is_one_line_and_leaves_no_record(
    stand_in, tmp_path, monkeypatch, capsys
):
    stand_in(fails=True)
    results = tmp_path / "results"
    command = ["time_to_result.py", "--workload", "htfl_fd", "--results", str(results)]
    monkeypatch.setattr("sys.argv", command)
    assert time_to_result.main() == 1
    assert capsys.readouterr().err == "error: htfllib: status 1: out of memory\n"
    assert not results.exists()


def test_without_htfllib_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.delenv("HTFLLIB", raising=False)
    monkeypatch.setattr("sys.argv", ["time_to_result.py"])
    assert time_to_result.main() == 2
    assert capsys.readouterr().err.startswith("error: htfllib: not ")
