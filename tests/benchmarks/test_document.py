"""Records of measurements and BENCHMARKS.md, from made-up records."""

import json
import re
import subprocess

import numpy as np
import pytest

from benchmarks import (
    cold_start,
    distillation_cost,
    document,
    fedavg_cnn,
    machine,
    overhead,
    privacy_cost,
    records,
    scale,
    side_by_side,
    svd_cost,
)
from benchmarks.side_by_side import NOT_SUPPORTED

CPU, GPU = "Some CPU, 2 cores", "1 x Some GPU"


def common(workload, kind, device=CPU, date="2026-01-02", **more):
    return {
        "workload": workload,
        "kind": kind,
        "date": date,
        "device": device,
        "commit": "c0ffee1234567890",
        "command": f"python benchmarks/{kind}.py --turns 3",
        "versions": {"python": "3.11.7", "jax": "0.10.2"},
        **more,
    }


def program(median, ratio):
    ratios = np.array([ratio, ratio - 0.25, ratio + 0.25]) if ratio != 1 else np.ones(3)
    return {
        "version": "9.8.7",
        "processes": 2,
        "threads": 1,
        "seconds_per_round": (median / ratio * np.array([1, 0.5, 2]) * ratios).tolist(),
        "median": median,
        "minimum": 0.5 * median,
        "maximum": 2 * median,
        "ratio_to_ours": ratio,
        "ratio_minimum": ratio - 0.25,
        "ratio_maximum": ratio + 0.25,
        "compile_or_warmup_seconds": 4.25,
        "peak_rss_mb": 1234.5,
    }


def compared(workload="digits", median=0.02, **more):
    programs = {
        "fedcodist": program(median, 1.0),
        "torch_loop": program(3 * median, 3.0),
        "fedjax": {"error": NOT_SUPPORTED},
        "pfl_research": {"error": "not installed: make bench-peers"},
    }
    return common(workload, "side_by_side", turns=3, rounds_per_repetition=5, **more) | {
        "programs": programs
    }


def checked(**more):
    def line(workload, program, difference=None, **own):
        about = {"workload": workload, "program": program, "double": workload == "merged"}
        about |= {"date": "2026-01-01", "commit": "abcdef1234567890-dirty"}
        setting = {"processes": 2, "threads": 1}
        return about | own if difference is None else about | setting | {"difference": difference}

    lines = [
        line("merged", "fedcodist", 2e-12),
        line("merged", "fedjax", hindrance=NOT_SUPPORTED),
        line("digits", "fedcodist", 1.2e-7),
        line("digits", "fedcodist", 3.4e-6),
        line("digits", "fedjax", 0.5),
        line("digits", "flower", error="no memory", processes=2, threads=1),
    ]
    return common("check", "check", tolerance=1e-4, checked=lines, **more)


def gemm(**more):
    own = {"gflop": 15.0, "seconds": [0.2, 0.1, 0.3], "share_of_peak": [0.5, 0.7, 0.4]}
    rounds = {"small": {**own, "first_call_seconds": 7.5}}
    about = {"processes": 2, "devices": 2, "gemm_gflops": [200.0, 210.0, 190.0], "rounds": rounds}
    return common("fedavg_cnn", "gemm", **about, **more)


def cold(**more):
    seconds = {"import": [1.5, 1.25, 1.75], "first start": [12.0], "second start": [4.0]}
    seconds |= {"command, first start": [13.0], "command, second start": [4.5]}
    about = {"processes": 2, "targets": cold_start.TARGETS, "seconds": seconds}
    return common("cold_start", "cold_start", **about, **more)


def looked(**more):
    seconds = [[0.1, 0.1, 0.2], [0.102, 0.101, 0.204], [0.103, 0.102, 0.206]]
    about = {"processes": 2, "rounds": 20, "target": 0.02}
    about["seconds_per_round"] = dict(zip(overhead.WAYS, seconds, strict=True))
    return common("overhead", "overhead", **about, **more)


def protected(**more):
    about = {"processes": 2, "rounds": 5, "target": 0.1}
    about["seconds_per_round"] = {"plain": [0.1, 0.2, 0.1], "private": [0.105, 0.22, 0.1]}
    return common("privacy_cost", "privacy_cost", **about, **more)


def traced(**more):
    small = {"dense layers": 2.0, "dispatch": 6.0}
    own = {"milliseconds": 7.5, "traced_milliseconds": 8.0}
    workloads = {
        "cnn_small": {**own, "parts": small},
        "cnn_large": {**own, "parts": {"copies": 8.0}},
    }
    return common("breakdown", "breakdown", rounds=5, workloads=workloads, **more)


def grown(**more):
    own = scale.Configuration("digits", 1_000_000, 20, 1, True)._asdict()
    own |= {"seconds_per_round": [0.0012], "ready_seconds_per_round": [0.001]}
    own |= {
        "gather_seconds": [0.0005],
        "program_mb": 2.5,
        "peak_rss_mb": [800.0],
        "anonymous_mb": [300.0],
    }
    other = own | {"streamed": False, "gather_seconds": [None], "ready_seconds_per_round": []}
    chunks = [
        other | {"chunk": 5, "program_mb": 123.4},
        other | {"chunk": 20, "precision": "bfloat16", "rematerialised": True},
    ]
    seeds = [other, other | {"seeds": 4, "seconds_per_round": [0.004]}]
    groups = {"population": [own], "streaming": [own, other], "memory": chunks, "seeds": seeds}
    return common("scale", "scale", turns=3, groups=groups, **more)


def taught(**more):
    def own(method, clients, seconds):
        about = {"method": method, "clients": clients, "teachers": clients}
        return about | {"seconds_per_step": [seconds], "peak_rss_mb": [900.0]}

    measured = [own("fed_df", 8, 0.5), own("fed_sdd", 8, 0.3), own("fed_df", 100, 4.0)]
    measured.append(own("fed_sdd", 100, 0.3))
    about = {"network": "resnet20", "batch": 256, "steps": 2, "turns": 1, "measured": measured}
    return common("distillation_cost", "distillation_cost", **about, **more)


def decomposed(**more):
    seconds = {
        svd_cost.WHOLE: [1.0, 2.0],
        svd_cost.EXACT: [2.0, 2.5],
        svd_cost.SUBSPACE: [1.0, 4.0],
    }
    rounds = {
        kind: {"seconds": own, "bytes_up": 390_952.0 / (1 + place)}
        for place, (kind, own) in enumerate(seconds.items())
    }
    matrices = [
        svd_cost.Decomposition(
            shape, number, spectrum, kind, (seconds, 3 * seconds), rank
        )._asdict()
        for shape, number in svd_cost.MATRICES.items()
        for spectrum, rank in ((svd_cost.FALLING, 12), (svd_cost.EQUAL, None))
        for kind, seconds in ((svd_cost.EXACTLY, 0.5), (svd_cost.WITHIN, 0.125))
    ]
    about = {"clients": 4, "examples": 500, "rounds": rounds, "columns": 128}
    return common("svd_cost", "svd_cost", **about, matrices=matrices, **more)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "benchmarks"


def cells(text, start):
    """The cells of the one row that starts with a text."""
    (row,) = re.findall(rf"^\| {re.escape(start)} \|.*$", text, re.MULTILINE)
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_without_records_it_says_so(folder, tmp_path, capsys):
    output = tmp_path / "BENCHMARKS.md"
    command = ["--results", str(folder), "--output", str(output)]
    assert document.main(command) == 0
    assert "Nothing was measured yet." in output.read_text()
    assert document.main([*command, "--check"]) == 0
    records.write(compared(), folder)
    assert document.main([*command, "--check"]) == 1
    assert "differs" in capsys.readouterr().err
    assert "Nothing was measured yet." in output.read_text(), "--check must not write"
    assert document.main(command) == 0
    assert "Nothing was measured yet." not in output.read_text()
    assert document.main([*command, "--check"]) == 0
    output.unlink()
    capsys.readouterr()
    assert document.main([*command, "--check"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_figures_of_a_comparison():
    text = document.render([compared()])
    row = ["fedcodist", "9.8.7", "2 x 1", "0.0200 (0.0100 to 0.0400)", "1.00 (1.00 to 1.00)"]
    assert cells(text, "fedcodist") == [*row, "4.2", "1,234"]
    assert cells(text, "torch_loop")[4] == "3.00 (2.75 to 3.25)"
    assert cells(text, "fedjax")[1] == NOT_SUPPORTED
    overview = ["digits", "0.0200", "3.00 (2.75 to 3.25)", NOT_SUPPORTED, "not installed", ""]
    assert cells(text, "digits") == overview
    for part in ("2026-01-02", "commit c0ffee1234", "jax 0.10.2", "`python benchmarks/side_by"):
        assert part in text
    assert f"## {CPU}" in text and "3 turns of 5 rounds" in text


def test_figures_are_those_of_the_turns():
    """A record that was edited showed its old ratio, and `--check` found nothing."""
    record = compared()
    text = document.render([record])
    record["programs"]["torch_loop"] |= {"median": 9.0, "ratio_to_ours": 9.0}
    assert document.render([record]) == text
    record["programs"]["torch_loop"]["seconds_per_round"] = [0.01, 0.005, 0.02]
    assert cells(document.render([record]), "torch_loop")[4] == "0.500 (0.500 to 0.500)"


def test_what_was_checked_is_a_table():
    text = document.render([checked()])
    commit = "2026-01-01, abcdef1234 with changes"
    row = ["digits", "float32", commit, "3e-06", "5e-01 DIFFERS", "failed with 2 x 1"]
    assert cells(text, "digits") == row
    assert cells(text, "merged") == ["merged", "float64", commit, "2e-12", NOT_SUPPORTED, ""]
    assert "### The same computation" in text and "0.0001 and less" in text
    assert "without their noise" not in text
    of_privacy = checked()
    of_privacy["checked"][0]["workload"] = "private"
    assert "Private rounds are compared without their noise" in document.render([of_privacy])
    # In the order of the list of workloads.
    assert text.index("| digits |") < text.index("| merged |")


def test_what_other_workloads_extend_is_described_before_them():
    """It was named in their descriptions, and had none where it has no record."""
    base = document.DESCRIPTIONS["htfl_local_only"]
    text = document.render([compared("htfl_fml"), compared("htfl_fd"), compared("digits")])
    assert text.count(base) == 1
    assert text.index("#### digits") < text.index(base) < text.index("#### htfl_fd")
    text = document.render([compared("htfl_fd"), compared("htfl_local_only")])
    assert text.count(base) == 1
    assert text.index("#### htfl_local_only") < text.index(base) < text.index("#### htfl_fd")
    assert base not in document.render([compared("digits")])


def test_figures_of_an_accelerator():
    record = compared(device=GPU) | {"gflop_per_round": 500.0, "peak_tflops": 100.0}
    record["programs"]["fedcodist"]["peak_device_mb"] = 2345.6
    text = document.render([record])
    assert cells(text, "fedcodist")[-3:] == ["1,234", "2,346", "25.0%"]
    assert cells(text, "torch_loop")[-2:] == ["", "8.3%"]
    assert cells(text, "fedjax")[1:] == [NOT_SUPPORTED, *[""] * 7]
    assert "100 TFLOP/s" in text and f"## {GPU}" in text
    assert "MFU" not in document.render([compared()])
    assert "MFU 25.0%" in side_by_side.table(record)
    assert "2346 MB on the device" in side_by_side.table(record)


def test_other_sections():
    text = document.render([gemm(), traced(), cold(), looked(), grown()])
    row = ["FedAvg small", "15.0", "0.200 (0.100 to 0.300)", "50.0 (40.0 to 70.0)", "7.5"]
    assert cells(text, "FedAvg small") == row
    assert "200 (190 to 210) GFLOP/s" in text
    assert cells(text, "after every round")[1:] == ["102 (101 to 204)", "2.0"]
    assert cells(text, "with a second split")[2] == "1.0"
    assert cells(text, "import") == ["import", "1.50 (1.25 to 1.75)", "< 2"]
    assert (
        cells(text, "command, second start")[2] == "< 5" and "`python -m experiments.main`" in text
    )
    assert cells(text, "population")[2:7] == ["1,000,000", "20", "1", "one by one", "streamed"]
    times = ["1.20", "1.00", "0.500"]  # of one turn
    assert cells(text, "population")[7:] == [*times, "60%", "800", "300"]
    assert cells(text, "5 at once")[2:] == ["1.20", "123.4", "800"]
    assert cells(text, "20 at once, bfloat16, rematerialised")[3] == "2.5"
    assert cells(text, "one by one, 4 seeds in turn")[2:4] == ["4.00", "1.00"]
    assert cells(text, "one by one")[2:4] == ["1.20", "1.20"]
    assert "on the device" in text and "peak on the device" not in text
    assert cells(text, "dense layers") == ["dense layers", "2.0 (25%)", ""]
    assert cells(text, "traced") == ["traced", "8.00", "8.00"]


def test_the_record_of_an_older_program_is_rendered():
    """Without a start of the command, seeds and what a device tells."""
    start, scaled = cold(), grown()
    for name in ("command, first start", "command, second start"):
        del start["seconds"][name]
    del scaled["groups"]["seeds"]
    for own in scaled["groups"]["memory"]:
        del own["seeds"], own["seeds_loop"]
    text = document.render([start, scaled])
    assert "experiments.main" not in text
    assert cells(text, "5 at once")[2:] == ["1.20", "123.4", "800"]


def test_memory_of_an_accelerator_is_shown_where_it_is_told():
    record = grown(device=GPU)
    for own, peaks in zip(record["groups"]["memory"], [[500.0, 600.0], [None]], strict=True):
        own["peak_device_mb"] = peaks
    text = document.render([record])
    assert cells(text, "5 at once")[-1] == "600"
    assert cells(text, "20 at once, bfloat16, rematerialised")[-1] == ""


def test_evaluating_beyond_the_target_is_marked():
    slow = looked()
    slow["seconds_per_round"]["after every round"] = [0.104, 0.104, 0.208]
    text = document.render([slow])
    assert cells(text, "after every round")[2] == "4.0 (beyond the target)"
    assert "(beyond the target)" not in document.render([looked() | {"target": 0.021}])


def test_a_private_round_is_shown_beside_a_plain_one():
    text = document.render([protected()])
    assert cells(text, "plain") == ["plain", "100 (100 to 200)", ""]
    assert cells(text, "private") == ["private", "105 (100 to 220)", "1.05 (1.00 to 1.10)"]
    assert "3 turns of 5 rounds" in text and "at most 10% more" in text
    slow = protected() | {"target": 0.04}
    assert cells(document.render([slow]), "private")[2] == "1.05 (1.00 to 1.10) (beyond the target)"


def test_distillation_with_more_clients_has_a_table_and_a_plot(folder, tmp_path, capsys):
    records.write(taught(), folder)
    output = tmp_path / "BENCHMARKS.md"
    command = ["--results", str(folder), "--output", str(output)]
    assert document.main(command) == 0
    text = output.read_text()
    row = ["8", "500", "44.7", "300", "34.8"]
    assert cells(text, "8") == row
    # The paper's table ends at 20 clients.
    assert cells(text, "100")[1:] == ["4,000", "", "300", ""]
    plot = tmp_path / "docs" / "benchmarks" / "distillation_cost_some_cpu_2_cores.png"
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.name in text
    assert document.main([*command, "--check"]) == 0
    plot.unlink()
    capsys.readouterr()
    assert document.main([*command, "--check"]) == 1
    assert "lacks its plot" in capsys.readouterr().err


def test_the_share_of_svd_is_taken_within_turns():
    text = document.render([decomposed()])
    whole = cells(text, svd_cost.WHOLE)
    assert whole[1:] == ["1,500 (1,000 to 2,000)", "", "391.0"]
    # A half and a fifth.
    assert cells(text, svd_cost.EXACT)[2:] == ["35.0 (20.0 to 50.0)", "195.5"]
    assert cells(text, svd_cost.SUBSPACE)[2] == "25.0 (0.0 to 50.0)"
    row = next(line for line in text.splitlines() if line.startswith("| 768 x 3,072 | falling"))
    assert row.split(" | ")[2:] == ["exact", "1,000 (500 to 1,500)", "12 |"]
    # Six matrices of a second or a quarter of one.
    assert "take 6.00 s exactly and 1.50 s within subspaces" in text


def test_lines_of_the_plot_are_the_medians():
    (axis,) = distillation_cost.plot(taught()).axes
    lines = {line.get_label(): line for line in axis.lines}
    assert lines["FedDF"].get_xdata().tolist() == [8, 100]
    assert lines["FedDF"].get_ydata().tolist() == [500.0, 4000.0]
    assert lines["FedSDD"].get_ydata().tolist() == [300.0, 300.0]


def test_every_table_has_rows_of_one_width():
    measured = [taught(), compared(), checked(), gemm(), traced(), cold(), grown(), decomposed()]
    text = document.render([*measured, protected()], "a note")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_notes_are_copied_in(folder, tmp_path):
    folder.mkdir()
    (folder / "notes.md").write_text("What limits the large model.\n")
    output = tmp_path / "BENCHMARKS.md"
    assert document.main(["--results", str(folder), "--output", str(output)]) == 0
    assert output.read_text().endswith("## Notes\n\nWhat limits the large model.\n")


def test_newest_record_of_each_workload_and_device(folder):
    for date, device, median in (
        ("2026-01-02", CPU, 2.0),
        ("2026-02-01", CPU, 3.0),
        ("2025-12-31", CPU, 1.0),
        ("2026-01-02", GPU, 4.0),
    ):
        records.write(compared(device=device, date=date, median=median), folder)
    records.write(compared("cnn_small", date="2024-01-01", median=5.0), folder)
    found = records.newest(folder)
    medians = {(r["device"], r["workload"]): r["programs"]["fedcodist"]["median"] for r in found}
    assert medians == {(CPU, "digits"): 3.0, (GPU, "digits"): 4.0, (CPU, "cnn_small"): 5.0}
    text = document.render(found)
    assert text.index(f"## {GPU}") and text.count("#### digits") == 2
    # Workloads are in the order of their list, not of the alphabet or of dates.
    assert text.index("#### cnn_small") < text.rindex("#### digits")


def test_a_day_keeps_one_record_per_device_and_replaces_it(folder):
    first = records.write(compared(median=1.0), folder)
    other = records.write(compared(device=GPU), folder)
    again = records.write(compared(median=2.0), folder)
    assert first == again and first.name == "2026-01-02-digits.json"
    assert other.name == "2026-01-02-digits-2.json"
    assert records.read(first)["programs"]["fedcodist"]["median"] == 2.0
    assert sorted(folder.iterdir()) == sorted([first, other])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"workload": "digits"}', "'kind' is missing"),
        (json.dumps(common("digits", "guess")), "'guess'"),
        (json.dumps(common("no_such", "side_by_side")), "'no_such'"),
        (json.dumps(common("digits", "side_by_side")), "incomplete"),
    ],
)
def test_bad_record_is_one_line(folder, tmp_path, capsys, text, said):
    folder.mkdir()
    (folder / "bad.json").write_text(text)
    output = tmp_path / "BENCHMARKS.md"
    assert document.main(["--results", str(folder), "--output", str(output)]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1
    assert not output.exists()


def test_programs_write_what_is_rendered(folder, monkeypatch):
    """Every program adds to its figures what the page needs."""
    monkeypatch.setattr("sys.argv", [str(records.ROOT / "benchmarks" / "scale.py"), "--turns", "2"])
    made = records.common("scale", "scale")
    assert set(made) == set(records.COMMON)
    assert made["command"] == "python benchmarks/scale.py --turns 2"
    assert made["device"] == machine.device()
    records.write({**grown(), **made}, folder)
    assert made["date"] in document.render(records.newest(folder))


def test_tables_in_the_terminal():
    """The programs print the records that they write."""
    assert "200 GFLOP/s" in fedavg_cnn.table(gemm()) and "50.0%" in fedavg_cnn.table(gemm())
    assert "1.50" in cold_start.table(cold()) and "< 15" in cold_start.table(cold())
    assert "2.0%" in overhead.table(looked())
    assert "private / plain: 1.050 (1.000 to 1.100)" in privacy_cost.table(protected())
    for part in ("1,000,000", "0.500", "60%", "123.4", "20 at once, bfloat16, rematerialised"):
        assert part in scale.table(grown())
    assert "4000.0" in distillation_cost.table(taught())
    assert NOT_SUPPORTED in side_by_side.table(compared())


def test_benchmarks_md_is_up_to_date():
    assert document.main(["--check"]) == 0


def waited(workload="digits", **more):
    setting = {"processes": 1, "threads": 2}
    programs = {
        "fedcodist": {"setting": setting, "cold": [10.0, 12.0, 11.0], "warm": [3.0, 4.0, 5.0]},
        "torch_loop": {"setting": setting, "cold": [30.0, 48.0, 22.0]},
        "fedjax": {"error": NOT_SUPPORTED},
        "pfl_research": {"error": "not installed: make bench-peers"},
    }
    for own in programs.values():
        if "cold" in own:
            own["peak_mb"] = 1234.5
    kind = "time_to_result"
    return common(
        f"{kind}_{workload}", kind, measured=workload, rounds=20, programs=programs, **more
    )


def test_times_to_the_result_lead_the_page():
    text = document.render([compared(), waited("mhd"), waited("digits")], "")
    assert text.index("## Time to the result") < text.index("### Side by side")
    assert (
        "after 20 rounds" in text
        and "(docs/benchmarks/time_to_result_some_cpu_2_cores.png)" in text
    )
    rows = [line for line in text[: text.index("### Side by side")].splitlines() if "| " in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0][-1] == "torch_loop / ours"  # of peers that were measured
    assert [row[0] for row in cells if row[0] in ("digits", "mhd")] == 2 * ["digits", "mhd"]
    assert cells[2][1:] == ["11.0 (10.0 to 12.0)", "4.00 (3.00 to 5.00)", "3.00 (2.00 to 4.00)"]
    assert cells[-1] == ["mhd", "1,234", "1,234"]


def test_a_machine_with_times_to_the_result_alone_has_one_section():
    text = document.render([waited()], "")
    assert re.findall("^## .*", text, re.MULTILINE) == [f"## Time to the result: {CPU}"]


def test_an_unknown_workload_of_a_time_to_the_result_is_named():
    with pytest.raises(ValueError, match="a record's workload is 'chess', not one of"):
        document.render([waited("chess")], "")


def test_times_to_the_result_are_drawn_once_per_machine():
    found = [waited("mhd"), waited("digits"), waited("digits", device=GPU)]
    drawn = document.plots(found)
    assert [path.name for path in drawn] == [
        "time_to_result_some_cpu_2_cores.png",
        "time_to_result_1_x_some_gpu.png",
    ]
    (axis,) = next(iter(drawn.values()))().axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["digits", "mhd"]
    points = [line for line in axis.lines if line.get_label() == "torch_loop"]
    assert points[0].get_xdata() == pytest.approx([3.0, 3.0])


def test_a_check_against_htfllib_says_so():
    line = {"workload": "htfl_fd", "program": "fedcodist", "double": True, "date": "2026-01-01"}
    line |= {"commit": "abcdef", "processes": 1, "threads": 1, "difference": 1e-9}
    record = common("check", "check", tolerance=1e-4, checked=[line])
    assert "HtFLlib is the reference, after two rounds" in document.render([record], "")
    other = record | {"checked": [line | {"workload": "digits"}]}
    assert "HtFLlib is the reference" not in document.render([other], "")


def test_sizes_of_programs_are_listed_in_the_order_of_the_workloads():
    line = {"workload": "mhd", "instructions": 12345, "date": "2026-01-01", "commit": "abcdef"}
    counted = [line, {**line, "workload": "digits", "instructions": 2967}]
    text = document.render([common("program_size", "program_size", counted=counted)], "")
    rows = [row for row in text.splitlines() if row.startswith(("| mhd", "| digits"))]
    assert [row.split("|")[1].strip() for row in rows] == ["digits", "mhd"]
    assert cells(text, "mhd") == ["mhd", "2026-01-01, abcdef", "12,345"]


def test_a_record_s_commit_is_unchanged_by_other_records(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "results").mkdir()
    record, code = tmp_path / "results" / "record.json", tmp_path / "code.py"
    for path in (record, code):
        path.write_text("first")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "running_commit", lambda: "c0ffee-dirty")
    record.write_text("second")
    assert records._commit.__wrapped__() == "c0ffee"
    code.write_text("second")
    assert records._commit.__wrapped__() == "c0ffee-dirty"
