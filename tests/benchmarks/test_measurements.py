"""The machine's description, and the programs that measure growth and cold starts."""

import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import (
    cold_start,
    distillation_cost,
    machine,
    overhead,
    privacy_cost,
    records,
    scale,
)
from benchmarks.peers import measuring
from benchmarks.scale import Configuration


@pytest.mark.parametrize(
    ("text", "name", "lanes"),
    [
        (
            "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: EPYC\nflags\t\t: sse2 avx2 avx512f fma\n",
            "EPYC (family 26, model 2)",
            16,
        ),
        ("model name: Xeon\nflags: sse2 avx avx2\n\nmodel name: other\n", "Xeon", 8),
        ("model name: Old\nflags: sse2\n", "Old", 4),
        ("processor: 0\nFeatures\t: fp asimd\n", None, 4),
        ("processor: 0\n", None, None),
        (None, None, None),
    ],
)
def test_machine_is_described_from_cpuinfo(tmp_path, monkeypatch, text, name, lanes):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert machine.vector_lanes() == lanes
    assert machine.processor() == name if name else machine.processor()


def test_device_counts_the_cores_that_may_be_used(monkeypatch):
    monkeypatch.setattr(machine, "processor", lambda: "Some CPU")
    monkeypatch.setattr(machine, "cores", lambda: 1)
    assert machine.device() == "Some CPU, 1 core"
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.device() == "Some CPU, 2 cores"


@pytest.mark.parametrize(
    ("cores", "devices"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2]), (6, [1, 2, 4]), (8, [1, 2, 4, 8]), (64, [1, 2, 4, 8])],
)
def test_what_grows(cores, devices):
    groups = scale.configurations(cores)
    assert [each.devices for each in groups["strong"]] == devices
    assert {each.cohort for each in groups["strong"]} == {20}
    assert [(each.devices, each.cohort) for each in groups["weak"]] == [
        (n, 20 * n) for n in devices
    ]
    assert [each.clients for each in groups["population"]] == [100, 10_000, 1_000_000]
    assert [each.cohort for each in groups["cohort"]] == [20, 200, 2000]
    for group in groups.values():
        assert all(each.cohort <= each.clients and each.devices <= cores for each in group)
    # Streaming is measured with and without a core for reading, all else equal, where there are two.
    assert all(each.streamed for each in groups["streaming"])
    assert {each.host_cores for each in groups["streaming"]} == set(range(min(cores, 2)))
    if cores > 1:
        pairs = zip(groups["streaming"][::2], groups["streaming"][1::2], strict=True)
        assert all(alone._replace(host_cores=1) == beside for alone, beside in pairs)
    chunks = [each.chunk for each in groups["memory"]]
    assert chunks == sorted(chunks) and chunks[0] == 0 and chunks[-1] == 20
    options = {(each.precision, each.rematerialised) for each in groups["memory"]}
    assert options == {("float32", False), ("bfloat16", False), ("float32", True)}
    # Several seeds are compared with one, all else equal.
    for each in groups["seeds"]:
        assert each._replace(seeds=1, seeds_loop="map") in groups["seeds"]
    loops = {(each.seeds > 1, each.chunk > 0, each.seeds_loop) for each in groups["seeds"]}
    assert len(groups["seeds"]) == 2 * len(loops) == 10


def test_fewer_rounds_are_timed_where_they_are_larger():
    groups = scale.configurations(8)
    assert [scale.rounds_of(each) for each in groups["cohort"]] == [200, 20, 5]
    assert [scale.rounds_of(each) for each in groups["memory"]][:2] == [5, 1]
    digits = [scale.rounds_of(each) for each in groups["seeds"] if each.network == "digits"]
    assert digits == [200, 50, 200, 50, 50]


@pytest.mark.parametrize(
    ("together", "share"), [(1.0, 1.0), (0.9, 1.0), (1.1, 0.5), (1.2, 0.0), (2.0, 0.0)]
)
def test_what_is_hidden_of_the_gathering(together, share):
    """Rounds of 1 s whose examples take 0.2 s to gather."""
    own = {"seconds_per_round": [9.0, together, 0.0], "ready_seconds_per_round": [1.0]}
    assert scale.hidden_share(own | {"gather_seconds": [0.2]}) == pytest.approx(share)


def test_columns_are_written_whole_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "CHUNK", 64)
    scale.write_columns(tmp_path, "digits", clients=11)
    images = np.load(tmp_path / "digits-11-image.npy", mmap_mode="r")
    labels = np.load(tmp_path / "digits-11-label.npy", mmap_mode="r")
    assert images.shape == (220, 64) and images.dtype == np.uint8
    assert labels.shape == (220,) and labels.dtype == np.int32 and set(labels) == set(range(10))
    assert (images.max(axis=1) > 100).all(), "a row was left out"


def test_figures_of_all_turns():
    line = {
        "seconds_per_round": [1.0, 2.0],
        "ready_seconds_per_round": [1.0],
        "gather_seconds": None,
        "program_mb": 5.0,
        "peak_rss_mb": 3.0,
        "anonymous_mb": 2.0,
        "peak_device_mb": None,
    }
    assert scale.summary([line, line]) == {
        "seconds_per_round": [1.0, 2.0, 1.0, 2.0],
        "ready_seconds_per_round": [1.0, 1.0],
        "gather_seconds": [None, None],
        "program_mb": 5.0,
        "peak_rss_mb": [3.0, 3.0],
        "anonymous_mb": [2.0, 2.0],
        "peak_device_mb": [None, None],
    }


def test_cold_start_takes_turns(tmp_path, monkeypatch, capsys):
    values, folders = iter([(3.0, 9.0, 4.0, 7.0, 1.0), (1.0, 8.0, 5.0, 8.0, 2.0)]), []

    def measure(data):
        assert data == folders[0] and data.parent.is_dir()
        return dict(zip(cold_start.TARGETS, next(values), strict=True))

    monkeypatch.setattr(cold_start, "measure", measure)
    monkeypatch.setattr(cold_start, "write_images", folders.append)
    script = str(records.ROOT / "benchmarks" / "cold_start.py")
    monkeypatch.setattr("sys.argv", [script, "--turns", "2", "--results", str(tmp_path)])
    assert cold_start.main() == 0
    (record,) = records.newest(tmp_path)
    assert record["seconds"]["import"] == [3.0, 1.0]
    assert record["seconds"]["second start"] == [4.0, 5.0]
    assert record["seconds"]["command, second start"] == [1.0, 2.0]
    assert "2.00" in capsys.readouterr().out and len(folders) == 1


def test_second_start_finds_what_the_first_has_left(monkeypatch, tmp_path):
    starts = []

    def seconds_until(said, command, environment):
        cache = environment["XDG_CACHE_HOME"]
        starts.append((said, command, cache, sorted(os.listdir(cache))))
        open(os.path.join(cache, "program"), "a").close()
        assert "JAX_COMPILATION_CACHE_DIR" not in environment
        return float(len(starts))

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "of the user")
    monkeypatch.setattr(cold_start, "IMPORT", "pass")
    monkeypatch.setattr(cold_start, "seconds_until", seconds_until)
    measured = cold_start.measure(tmp_path)
    assert list(measured) == list(cold_start.TARGETS)
    assert list(measured.values())[1:] == [1, 2, 3, 4]
    assert [said for said, *_ in starts] == 2 * [cold_start.DONE] + 2 * [cold_start.REPORTED]
    for (_, first, cache, before), (_, second, same, then) in (starts[:2], starts[2:]):
        assert cache == same and before == [] and then == ["program"]
        # Each run of the command has a new run folder; it would go on from a checkpoint otherwise.
        assert (first == second) == ("experiments.main" not in first)
    cold_start.measure(tmp_path)
    assert starts[4][3] == [] and len({cache for _, _, cache, _ in starts}) == 4


def test_a_command_is_timed_until_it_says_so(capfd):
    """And run to its end, whose status counts."""
    program = (
        "import sys; print('some round 1/1'); print('round 1/1 again'); sys.exit(int(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program]
    assert 0 < cold_start.seconds_until("round 1/1", [*command, "0"], os.environ) < 60
    with pytest.raises(RuntimeError, match="status 3"):
        cold_start.seconds_until("round 1/1", [*command, "3"], os.environ)
    with pytest.raises(RuntimeError, match="status 0"):
        cold_start.seconds_until("round 2/2", [*command, "0"], os.environ)


def test_teachers_of_each_method():
    found = distillation_cost.configurations([8, 100])
    assert [each.teachers for each in found if each.method == "fed_df"] == [8, 100]
    assert [each.teachers for each in found if each.method == "fed_sdd"] == [4, 4]


def test_distillation_with_more_clients_takes_turns(tmp_path, monkeypatch, capsys):
    calls = []

    def run(configuration, options):
        calls.append(configuration)
        seconds = [configuration.teachers / 10, len(calls)]
        return {"seconds_per_step": seconds, "peak_rss_mb": 1.0, "device": "Some GPU"}

    monkeypatch.setattr(distillation_cost, "run", run)
    script = str(records.ROOT / "benchmarks" / "distillation_cost.py")
    arguments = ["--turns", "2", "--clients", "8", "9", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [script, *arguments])
    assert distillation_cost.main() == 0
    (record,) = records.newest(tmp_path)
    assert calls == 2 * calls[:4] and record["device"] == "Some GPU"
    assert record["measured"][2]["seconds_per_step"] == [0.9, 3, 0.9, 7]
    assert "FedSDD" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [script, "--clients", "3"])
    with pytest.raises(SystemExit):
        distillation_cost.main()
    assert "--clients must be at least 4" in capsys.readouterr().err


@pytest.mark.slow
def test_the_measured_step_is_one_of_the_method():
    """A student that is its only teacher has nothing to learn; one with another network has."""
    import jax

    step, (student, members, rows) = distillation_cost.prepare(2, "cnn_small", batch=4, steps=2)
    moved = lambda after: max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(abs(a - b).max()), after, student))
    )
    assert moved(step(student, members, rows)) > 1e-4
    alone = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), student)
    assert moved(step(student, alone, rows)) < 1e-5


@pytest.mark.slow
def test_one_measurement_of_distillation():
    arguments = ["--network=cnn_small", "--batch=4", "--steps=1"]
    line = json.loads(_last_line("distillation_cost.py", "--one", '["fed_df", 4, 4]', *arguments))
    assert len(line["seconds_per_step"]) == distillation_cost.REPETITIONS
    assert all(seconds > 0 for seconds in line["seconds_per_step"])


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_one_measurement_of_growth(tmp_path, streamed, devices):
    if devices > machine.cores():
        pytest.skip(f"needs {devices} cores")
    scale.write_columns(tmp_path, "digits", 30)
    one = json.dumps(Configuration("digits", 30, 5, devices, streamed))
    line = json.loads(_last_line("scale.py", "--one", str(tmp_path), one, "--rounds=3"))
    assert len(line["seconds_per_round"]) == scale.REPETITIONS
    assert all(0 < seconds < 60 for seconds in line["seconds_per_round"])
    assert 50 < line["peak_rss_mb"] < 10_000
    assert line["program_mb"] > 0
    assert len(line["ready_seconds_per_round"]) == (scale.REPETITIONS if streamed else 0)
    assert 0 < line["gather_seconds"] < 10 if streamed else line["gather_seconds"] is None


@pytest.mark.slow
def test_chunks_and_options_change_what_a_program_needs(tmp_path):
    scale.write_columns(tmp_path, "cnn_small", 6)
    one = Configuration("cnn_small", 6, 6, 1, False)

    def program_mb(**settings):
        about = json.dumps(one._replace(**settings))
        line = json.loads(_last_line("scale.py", "--one", str(tmp_path), about))
        return line["program_mb"]

    two, six = program_mb(chunk=2), program_mb(chunk=6)
    assert two < six
    assert program_mb(chunk=6, rematerialised=True) < 0.95 * six


@pytest.mark.slow
def test_seeds_are_of_the_measured_program(tmp_path):
    """One program for several seeds, not as many runs."""
    scale.write_columns(tmp_path, "digits", 30)
    one = Configuration("digits", 30, 5, 1, False, seeds=2, seeds_loop="vmap")
    line = json.loads(_last_line("scale.py", "--one", str(tmp_path), json.dumps(one), "--rounds=2"))
    assert len(line["seconds_per_round"]) == scale.REPETITIONS
    assert line["peak_device_mb"] is None  # of a processor


def test_how_clients_and_seeds_are_trained_is_said():
    one = Configuration("digits", 30, 5, 1, False)
    said = {
        "one by one": one,
        "5 at once, bfloat16": one._replace(chunk=5, precision="bfloat16"),
        "one by one, 4 seeds in turn": one._replace(seeds=4),
        "5 at once, 4 seeds at once": one._replace(chunk=5, seeds=4, seeds_loop="vmap"),
    }
    assert {text: scale.way(own._asdict()) for text, own in said.items()} == {t: t for t in said}


@pytest.mark.parametrize(
    ("backend", "about", "expected"),
    [
        ("gpu", {"peak_bytes_in_use": 2_500_000}, 2.5),
        ("gpu", {}, None),
        ("gpu", None, None),
        ("cpu", {"peak_bytes_in_use": 2_500_000}, None),
    ],
)
def test_peak_memory_of_an_accelerator(monkeypatch, backend, about, expected):
    import jax

    class Device:
        def memory_stats(self):
            return about

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert machine.peak_accelerator_mb() == expected


@pytest.mark.slow
def test_first_round_of_a_start():
    assert _last_line("cold_start.py", cold_start.FIRST_ROUND) == cold_start.DONE


@pytest.mark.slow
def test_first_round_of_the_documented_command(tmp_path):
    cold_start.write_images(tmp_path / "data")
    (tmp_path / "cache").mkdir()
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = clean | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = cold_start.command(tmp_path / "data", tmp_path / "run")
    assert cold_start.seconds_until(cold_start.REPORTED, command, environment) > 0
    assert any((tmp_path / "cache" / "fedcodist").glob("compiled-*/*")), "no program was kept"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {line["model"] for line in found} == {"small"}
    assert {line["round"] for line in found} == {0, 1}


@pytest.mark.slow
def test_short_gemm_run_writes_its_record(tmp_path):
    text = _output(
        "fedavg_cnn.py", "--repetitions=1", "--workloads", "small", "--results", str(tmp_path)
    )
    (record,) = records.newest(tmp_path)
    assert "GEMM peak" in text and record["device"] == machine.device()
    assert len(record["gemm_gflops"]) == 1
    assert 0 < record["rounds"]["small"]["share_of_peak"][0] < 2


@pytest.mark.parametrize(("added", "status"), [(0.015, 0), (0.025, 1)])
def test_more_than_the_target_is_a_failure(added, status, tmp_path, monkeypatch, capsys):
    """In the median of the repetitions; one that was disturbed does not count."""
    before = [0.1, 0.1, 0.1]
    seconds = [before, before, [0.1 * (1 + added), 0.1 * (1 + added), 0.3]]
    measured = dict(zip(overhead.WAYS, seconds, strict=True))
    script = str(records.ROOT / "benchmarks" / "overhead.py")
    monkeypatch.setattr("sys.argv", [script, "--results", str(tmp_path), "--runs", "x"])
    monkeypatch.setattr(overhead.launch, "is_child", lambda: True)
    monkeypatch.setattr(overhead.launch, "join", lambda: None)
    monkeypatch.setattr(overhead, "measure", lambda *arguments: measured)
    assert overhead.main() == status
    (record,) = records.newest(tmp_path)
    assert record["seconds_per_round"] == measured
    said = "with a second split: more than the target of 2% of a round"
    assert (said in capsys.readouterr().out) == bool(status)


@pytest.mark.slow
def test_every_way_of_looking_is_measured(tmp_path):
    _output("overhead.py", "--repetitions=1", "--results", str(tmp_path), statuses=(0, 1))
    (record,) = records.newest(tmp_path)
    assert list(record["seconds_per_round"]) == list(overhead.WAYS)
    assert all(len(own) == 1 and own[0] > 0 for own in record["seconds_per_round"].values())


@pytest.mark.parametrize(("private", "status"), [(1.09, 0), (1.11, 1)])
def test_privacy_beyond_its_target_is_a_failure(private, status, tmp_path, monkeypatch, capsys):
    """In the median of the ratios; the second turn is slower as a whole, the third was disturbed."""
    measured = {
        privacy_cost.PLAIN: [0.1, 0.2, 0.1],
        privacy_cost.PRIVATE: [0.1 * private, 0.2 * private, 0.3],
    }
    script = str(records.ROOT / "benchmarks" / "privacy_cost.py")
    monkeypatch.setattr("sys.argv", [script, "--results", str(tmp_path)])
    monkeypatch.setattr(privacy_cost.launch, "is_child", lambda: True)
    monkeypatch.setattr(privacy_cost.launch, "join", lambda: None)
    monkeypatch.setattr(privacy_cost, "measure", lambda turns: measured)
    assert privacy_cost.main() == status
    (record,) = records.newest(tmp_path)
    assert record["seconds_per_round"] == measured
    said = capsys.readouterr().out
    assert f"private / plain: {private:.3f} ({private:.3f} to 3.000)" in said
    assert ("more than the target of 1.10" in said) == bool(status)


@pytest.mark.slow
def test_private_rounds_are_measured_beside_plain_ones(tmp_path):
    _output("privacy_cost.py", "--turns=2", "--results", str(tmp_path), statuses=(0, 1))
    (record,) = records.newest(tmp_path)
    assert list(record["seconds_per_round"]) == [privacy_cost.PLAIN, privacy_cost.PRIVATE]
    assert all(len(own) == 2 and min(own) > 0 for own in record["seconds_per_round"].values())


def _last_line(*arguments):
    return _output(*arguments).splitlines()[-1]


def _output(script, *arguments, statuses=(0,)):
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    done = subprocess.run(
        command, cwd=records.ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode in statuses, done.stderr
    return done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_pages_of_files_are_no_own_memory(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(b"1" * 2**26)
    before = measuring.anonymous_memory_mb()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert pages[:: 2**12].count(b"1") == 2**14
        mapped = measuring.anonymous_memory_mb()
    own = np.ones(2**26, np.uint8)
    assert mapped - before < 32 < measuring.anonymous_memory_mb() - before and own[0] == 1
