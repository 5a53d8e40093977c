"""bench-check: what counts as slower, from made-up records."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import check
from benchmarks.check import CANNOT_JUDGE, SLOWER, Ratio

POSITIVE = st.floats(0.01, 100)
# FedJAX's seconds in the record of the small CNN: one turn of seven was disturbed.
DISTURBED = Ratio("fedjax", (3.626, 3.422, 3.194, 5.130, 3.511, 3.144, 3.629))


def steady(name, median, spread=0.0, turns=5):
    """Turns evenly from median - spread to median + spread, so quartiles are a spread apart."""
    return Ratio(name, tuple(np.linspace(median - spread, median + spread, turns).tolist()))


def test_one_disturbed_turn_of_three_widens_nothing():
    assert Ratio("torch_loop", (18.96, 1.87, 19.1)).spread == pytest.approx(2 * 0.14)


def scaled(ratio, by):
    return ratio._replace(values=tuple(by * value for value in ratio.values))


@st.composite
def recorded_ratios(draw):
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
    turns = st.lists(POSITIVE, min_size=1, max_size=9)
    return [Ratio(name, tuple(draw(turns))) for name in names]


@given(recorded_ratios(), st.floats(1, 10))
def test_as_fast_or_faster_is_never_a_finding(recorded, faster):
    measured = [scaled(ratio, faster) for ratio in recorded]
    assert check.findings(recorded, measured) == []
    assert check.judge(recorded, measured) == 0


@given(recorded_ratios(), st.floats(0.01, 1))
def test_a_fall_beyond_the_spread_is_one_line_each(recorded, beyond):
    def fallen(ratio):  # to turns that are all alike
        noise = max(ratio.spread, check.LEAST_NOISE * ratio.median)
        return ratio._replace(values=3 * (ratio.median - noise * (1 + beyond),))

    found = check.findings(recorded, [fallen(ratio) for ratio in recorded])
    assert len(found) == len(recorded)
    assert all(line.startswith(r.name) for line, r in zip(found, recorded, strict=True))


@given(recorded_ratios(), st.floats(0, 0.99))
def test_a_fall_within_both_spreads_is_noise(recorded, within):
    def fallen(ratio):  # with turns that spread as much as the recorded ones
        return ratio._replace(values=tuple(v - within * 2 * ratio.spread for v in ratio.values))

    assert check.findings(recorded, [fallen(ratio) for ratio in recorded]) == []


@given(recorded_ratios(), recorded_ratios())
def test_a_fall_by_half_never_passes(recorded, measured):
    """However much the turns differ."""
    measured = [
        scaled(new, 0.5 * old.median / new.median)._replace(name=old.name)
        for old, new in zip(recorded, itertools.cycle(measured), strict=False)
    ]
    assert check.judge(recorded, measured) != 0


def test_one_disturbed_turn_hides_no_fall():
    now = scaled(steady("fedjax", 1.0, 0.05), DISTURBED.median)
    assert check.judge([DISTURBED], [now]) == 0
    assert check.judge([DISTURBED], [scaled(now, 0.9)]) == 0
    assert check.judge([DISTURBED], [scaled(now, 0.8)]) == SLOWER
    assert check.judge([DISTURBED], [scaled(now, 1.6 / 3.51)]) == SLOWER


@given(recorded_ratios(), st.floats(0.1, 10))
def test_the_machines_speed_changes_nothing(recorded, speed):
    """Where all seconds are longer by one factor, ratios stay the same."""
    length = min(len(ratio.values) for ratio in recorded)
    programs = {"fedcodist": {"seconds_per_round": [speed] * length}}
    for index, ratio in enumerate(recorded):
        own = [speed * value for value in ratio.values[:length]]
        programs[f"peer {index}"] = {"seconds_per_round": own}
    read = check.ratios({"kind": "side_by_side", "workload": "digits", "programs": programs})
    for found, ratio in zip(read, recorded, strict=True):
        assert found.values == pytest.approx(ratio.values[:length])


def test_what_was_not_recorded_is_left_out():
    old, new = steady("old", 2.0), steady("new", 0.1)
    assert check.findings([old], [new]) == []
    assert check.findings([old], [new, old._replace(values=(float("nan"),))]) != []


def test_a_small_spread_is_not_taken_at_its_word():
    lucky = steady("lucky", 2.0)
    assert check.findings([lucky], [steady("lucky", 1.91)]) == []
    assert len(check.findings([lucky], [steady("lucky", 1.89)])) == 1


def test_exit_status_and_lines(capsys):
    recorded = [steady("digits: fedjax / fedcodist", 24.0, 3.0), steady("share", 0.5, 0.05)]
    assert check.judge(recorded, recorded) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.endswith("none of 2 recorded ratios is slower\n")
    assert "digits: fedjax / fedcodist: 24, recorded 24; may fall by 6 (25%)" in said.out
    slow = [steady(recorded[0].name, 20.0), recorded[1]]
    assert check.judge(recorded, slow) == SLOWER == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "digits: fedjax / fedcodist fell from 24 to 20, by more than the noise of 3" in line
    assert check.judge(recorded, []) == CANNOT_JUDGE == 2


def test_a_ratio_that_could_not_be_measured_is_no_pass(capsys):
    recorded = [steady("digits: fedjax / fedcodist", 24.0), steady("share", 0.5)]
    assert check.judge(recorded, recorded[:1]) == CANNOT_JUDGE
    said = capsys.readouterr()
    assert "share: not measured" in said.out and "is slower" not in said.out
    assert said.err.splitlines()[-1] == (
        "NOT JUDGED: 1 of 2 recorded ratios could not be judged: share was not measured"
    )
    # The message names what became slower, and also what is missing.
    assert check.judge(recorded, [steady(recorded[0].name, 20.0)]) == SLOWER
    slower, unknown = capsys.readouterr().err.splitlines()
    assert slower.startswith("SLOWER: digits") and unknown.startswith("NOT JUDGED: 1 of 2")


def test_turns_too_unlike_to_tell_are_no_pass(capsys):
    wild = steady("wild", 2.0, 0.6)
    assert check.judge([wild], [wild._replace(values=tuple(v - 0.1 for v in wild.values))]) == 2
    assert "wild is too noisy" in capsys.readouterr().err.splitlines()[-1]
    # A fall by more than such a noise is one all the same, and is judged.
    fallen = Ratio("r", (0.5, 3.0, 3.5, 0.2, 6.5))
    assert check.judge([Ratio("r", (10.0, 10.0, 10.0))], [fallen]) == SLOWER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("SLOWER: r fell from 10 to 3")


def test_ratios_of_both_kinds_of_record():
    record = {
        "kind": "side_by_side",
        "workload": "digits",
        "programs": {
            "fedcodist": {"seconds_per_round": [1.0, 2.0, 4.0]},
            "flower": {"seconds_per_round": [3.0, 5.0, 14.0]},
            "fedjax": {"error": "not supported"},
        },
    }
    assert list(check.ratios(record)) == [Ratio("digits: flower / fedcodist", (3.0, 2.5, 3.5))]
    gemm = {"kind": "gemm", "rounds": {"small": {"share_of_peak": [0.5, 0.3, 0.6]}}}
    assert list(check.ratios(gemm)) == [
        Ratio("FedAvg small: share of the GEMM peak", (0.5, 0.3, 0.6))
    ]


@pytest.mark.parametrize(
    ("gflops", "cores", "lanes", "plausible"),
    [
        ([200.0], 2, 16, True),
        ([200.0, 190.0, 1.0], 2, 16, True),  # the median counts
        ([38.0], 2, 16, False),
        ([42.0], 2, 16, True),
        ([19.0], 2, 8, False),
        ([150.0], 1, 8, True),
        ([200.0], 1, 8, False),  # a clock that is wrong
        ([9.0], 2, 4, False),
        ([9.0], 2, None, False),
        ([12.0], 2, None, True),
    ],
)
def test_plausible_peaks(gflops, cores, lanes, plausible):
    fault = check.implausible(gflops, cores, lanes)
    assert (fault is None) == plausible
    assert fault is None or ("too busy to judge" in fault and "\n" not in fault)


@given(st.sampled_from([4, 8, 16, None]), st.integers(1, 64), POSITIVE)
def test_plausibility_is_of_one_core(lanes, cores, each):
    alone = check.implausible([each], 1, lanes)
    assert (check.implausible([each * cores], cores, lanes) is None) == (alone is None)


def test_busy_machine_is_not_judged(monkeypatch, capsys):
    recorded = {"workload": "digits", "device": "some device", "kind": "side_by_side"}
    monkeypatch.setattr("sys.argv", ["check.py"])
    monkeypatch.setattr(check.machine, "device", lambda: "some device")
    monkeypatch.setattr(check.machine, "vector_lanes", lambda: 16)
    monkeypatch.setattr(check.machine, "cores", lambda: 2)
    monkeypatch.setattr(check.records, "newest", lambda: [recorded])
    monkeypatch.setattr(check, "measure_gemm", lambda rounds: {"gemm_gflops": [2.0]})
    assert check.main() == CANNOT_JUDGE
    assert "too busy" in capsys.readouterr().err
    monkeypatch.setattr(check.machine, "device", lambda: "another device")
    assert check.main() == CANNOT_JUDGE
    assert "another device" in capsys.readouterr().err


def test_failing_program_is_an_error(monkeypatch, capsys):
    def fail(rounds):
        raise check.ProgramFailed("status 1: no memory")

    recorded = {"workload": "digits", "device": check.machine.device(), "kind": "side_by_side"}
    monkeypatch.setattr("sys.argv", ["check.py"])
    monkeypatch.setattr(check.records, "newest", lambda: [recorded])
    monkeypatch.setattr(check, "measure_gemm", fail)
    assert check.main() == SLOWER
    assert "no memory" in capsys.readouterr().err


def recorded_workloads(monkeypatch):
    """Records of four workloads on this machine, and of one on another; returns what is measured."""
    programs = {
        name: {"seconds_per_round": 3 * [seconds], "processes": 1, "threads": 1}
        for name, seconds in {"fedcodist": 1.0, "torch_loop": 2.0}.items()
    }
    here, there, measured = check.machine.device(), "another device", []
    found = [
        {"workload": name, "device": device, "kind": "side_by_side", "programs": programs}
        for name, device in [
            *((name, here) for name in ("cnn_large", "cnn_small", "digits", "merged")),
            ("emnist", there),
        ]
    ]
    shares = {"small": {"share_of_peak": [0.5]}, "merged": {"share_of_peak": [0.5]}}
    found.append({"workload": "fedavg_cnn", "device": here, "kind": "gemm", "rounds": shares})

    def measure_gemm(rounds):
        own = {name: shares[name] for name in rounds}
        return {"kind": "gemm", "gemm_gflops": [50.0], "rounds": own}

    def measure_again(record):
        measured.append(record["workload"])
        return record

    monkeypatch.setattr(check.records, "newest", lambda: found)
    monkeypatch.setattr(check.machine, "cores", lambda: 1)
    monkeypatch.setattr(check.machine, "device", lambda: here)
    monkeypatch.setattr(check.machine, "vector_lanes", lambda: None)
    monkeypatch.setattr(check, "measure_gemm", measure_gemm)
    monkeypatch.setattr(check, "measure_again", measure_again)
    return measured


def test_some_workloads_are_measured_and_others_on_demand(monkeypatch, capsys):
    measured = recorded_workloads(monkeypatch)
    monkeypatch.setattr("sys.argv", ["check.py"])
    assert check.main() == 0
    assert measured == ["digits", "cnn_small", "cnn_large"]
    assert "none of 5 recorded ratios" in capsys.readouterr().out
    measured.clear()
    monkeypatch.setattr("sys.argv", ["check.py", "--workload", "merged"])
    assert check.main() == 0 and measured == ["merged"]
    monkeypatch.setattr("sys.argv", ["check.py", "--workload", "merged", "emnist"])
    assert check.main() == CANNOT_JUDGE and measured == ["merged"]
    assert "emnist was not recorded on" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_no_pass(monkeypatch, capsys):
    recorded_workloads(monkeypatch)
    without = {"kind": "side_by_side", "workload": "digits"}
    without["programs"] = {"fedcodist": {"seconds_per_round": [1.0]}}
    monkeypatch.setattr(check, "measure_again", lambda record: without)
    monkeypatch.setattr("sys.argv", ["check.py", "--workload", "digits"])
    assert check.main() == CANNOT_JUDGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert "1 of 3" in last and "digits: torch_loop / fedcodist was not measured" in last
