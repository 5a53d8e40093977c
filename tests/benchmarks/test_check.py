"""bench-check: what counts as slower, from made-up records."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import check
from benchmarks.check import CANNOT_JUDGE, SLOWER, Ratio

POSITIVE = st.floats(0.01, 100)


@st.composite
def recorded_ratios(draw):
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
    spreads = [sorted(draw(st.tuples(POSITIVE, POSITIVE, POSITIVE))) for _ in names]
    return [Ratio(n, m, low, high) for n, (low, m, high) in zip(names, spreads, strict=True)]


@settings(deadline=None)
@given(recorded_ratios(), st.floats(1, 10))
def test_as_fast_or_faster_is_never_a_finding(recorded, faster):
    measured = [r._replace(median=r.median * faster, lowest=0.0) for r in recorded]
    assert check.findings(recorded, measured) == []


@settings(deadline=None)
@given(recorded_ratios(), st.floats(0.01, 1))
def test_a_fall_beyond_the_spread_is_one_line_each(recorded, beyond):
    def fallen(ratio):
        noise = max(ratio.highest - ratio.lowest, check.LEAST_NOISE * ratio.median)
        return ratio._replace(median=ratio.median - noise * (1 + beyond))

    found = check.findings(recorded, [fallen(ratio) for ratio in recorded])
    assert len(found) == len(recorded)
    assert all(line.startswith(r.name) for line, r in zip(found, recorded, strict=True))


@settings(deadline=None)
@given(recorded_ratios(), st.floats(0, 0.99))
def test_a_fall_within_the_spread_is_noise(recorded, within):
    measured = [r._replace(median=r.median - within * (r.highest - r.lowest)) for r in recorded]
    assert check.findings(recorded, measured) == []


@settings(deadline=None)
@given(recorded_ratios(), st.floats(0.1, 10))
def test_the_machines_speed_changes_nothing(recorded, speed):
    """Of a record all of whose seconds are longer, the ratios are the same."""
    programs = {
        "fedcodist": {"median": speed},
        **{
            ratio.name: {
                "median": speed * ratio.median,
                "ratio_to_ours": ratio.median,
                "ratio_minimum": ratio.lowest,
                "ratio_maximum": ratio.highest,
            }
            for ratio in recorded
        },
    }
    read = check.ratios({"kind": "side_by_side", "workload": "digits", "programs": programs})
    assert [r[1:] for r in read] == [r[1:] for r in recorded if r.name != "fedcodist"]


def test_what_was_not_measured_or_not_recorded_is_left_out():
    old, new = Ratio("old", 2.0, 1.9, 2.1), Ratio("new", 0.1, 0.1, 0.1)
    assert check.findings([old], [new]) == []
    assert check.findings([old], [new, old._replace(median=float("nan"))]) != []


def test_a_small_spread_is_not_taken_at_its_word():
    lucky = Ratio("lucky", 2.0, 2.0, 2.0)
    assert check.findings([lucky], [lucky._replace(median=1.91)]) == []
    assert len(check.findings([lucky], [lucky._replace(median=1.89)])) == 1


def test_exit_status_and_lines(capsys):
    recorded = [
        Ratio("digits: fedjax / fedcodist", 24.0, 22.0, 25.0),
        Ratio("share", 0.5, 0.4, 0.6),
    ]
    assert check.judge(recorded, recorded) == 0
    assert capsys.readouterr().err == ""
    slow = [recorded[0]._replace(median=20.0), recorded[1]]
    assert check.judge(recorded, slow) == SLOWER == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "digits: fedjax / fedcodist fell from 24 to 20, by more than the noise of 3" in line
    assert check.judge(recorded, []) == CANNOT_JUDGE == 2
    assert check.judge(recorded, slow[:1]) == SLOWER
    assert "share: not measured" in capsys.readouterr().out


def test_ratios_of_both_kinds_of_record():
    peer = {"ratio_to_ours": 3.0, "ratio_minimum": 2.5, "ratio_maximum": 3.5}
    record = {
        "kind": "side_by_side",
        "workload": "digits",
        "programs": {"fedcodist": {}, "flower": peer, "fedjax": {"error": "not supported"}},
    }
    assert list(check.ratios(record)) == [Ratio("digits: flower / fedcodist", 3.0, 2.5, 3.5)]
    gemm = {"kind": "gemm", "rounds": {"small": {"share_of_peak": [0.5, 0.3, 0.6]}}}
    assert list(check.ratios(gemm)) == [
        Ratio("FedAvg small: share of the GEMM peak", 0.5, 0.3, 0.6)
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


@settings(deadline=None)
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
    monkeypatch.setattr(check, "measure_gemm", lambda: {"gemm_gflops": [2.0]})
    assert check.main() == CANNOT_JUDGE
    assert "too busy" in capsys.readouterr().err
    monkeypatch.setattr(check.machine, "device", lambda: "another device")
    assert check.main() == CANNOT_JUDGE
    assert "another device" in capsys.readouterr().err


def test_failing_program_is_an_error(monkeypatch, capsys):
    def fail():
        raise check.ProgramFailed("status 1: no memory")

    recorded = {"workload": "digits", "device": check.machine.device(), "kind": "side_by_side"}
    monkeypatch.setattr("sys.argv", ["check.py"])
    monkeypatch.setattr(check.records, "newest", lambda: [recorded])
    monkeypatch.setattr(check, "measure_gemm", fail)
    assert check.main() == SLOWER
    assert "no memory" in capsys.readouterr().err
