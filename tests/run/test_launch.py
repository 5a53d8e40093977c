"""The launcher: exit statuses, restarts after a signal, logs, and no child that outlives it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.run import launch

PREAMBLE = f"""
import os, pathlib, signal, sys, time
rank = int(os.environ[{launch.RANK!r}])
folder = pathlib.Path(sys.argv[1])
def starts():
    with open(folder / f"starts_{{rank}}", "a") as file:
        file.write("x")
    return (folder / f"starts_{{rank}}").stat().st_size
"""


def supervise(program: str, folder: Path, processes: int = 1, **options) -> int:
    return launch.supervise(
        [sys.executable, "-c", PREAMBLE + program, str(folder)], processes, **options
    )


def starts(folder: Path, rank: int = 0) -> int:
    return (folder / f"starts_{rank}").stat().st_size


@pytest.mark.parametrize("status", [0, 1, 2, 7])
def test_the_exit_status_is_the_process_own(status, tmp_path):
    assert supervise(f"starts(); sys.exit({status})", tmp_path) == status
    assert starts(tmp_path) == 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_failure_ends_all(rank, tmp_path):
    began = time.monotonic()
    assert supervise(f"sys.exit(1) if rank == {rank} else time.sleep(60)", tmp_path, 2) == 1
    assert time.monotonic() - began < 20


def test_a_user_error_of_the_first_process_stops_the_others_at_once(tmp_path):
    began = time.monotonic()
    assert supervise("sys.exit(2) if rank == 0 else time.sleep(60)", tmp_path, 2) == 2
    assert time.monotonic() - began < 2


def test_the_first_process_has_time_to_say_what_another_found_too(tmp_path, capfd):
    program = "time.sleep(1 - rank); print('error: alpha', file=sys.stderr); sys.exit(2)"
    assert supervise(program, tmp_path, 2, logs=tmp_path / "logs") == 2
    assert capfd.readouterr().err == "error: alpha\n"


def test_a_failure_that_the_first_process_did_not_tell_points_at_the_logs(tmp_path, capfd):
    logs = tmp_path / "logs"
    program = "print('seen', rank); sys.stdout.flush(); time.sleep(60 * (1 - rank)); sys.exit(1)"
    assert supervise(program, tmp_path, 2, logs=logs) == 1
    output, errors = capfd.readouterr()
    assert output == "seen 0\n"
    assert errors == f"error: a process ended with status 1: see {logs}.\n"
    assert (logs / "process_1.log").read_text() == "seen 1\n"


def test_logs_hold_both_streams_and_are_continued(tmp_path, capfd):
    program = (
        "print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.stderr.flush()\n"
        "os.abort() if rank == 0 and starts() == 1 else time.sleep(0.2)"
    )
    assert supervise(program, tmp_path, 3, logs=tmp_path / "logs") == 0
    for rank in (1, 2):
        lines = (tmp_path / "logs" / f"process_{rank}.log").read_text().splitlines()
        assert lines[-2:] == ["out", "err"]
    assert not (tmp_path / "logs" / "process_0.log").exists()


def test_processes_know_their_rank_number_and_address(tmp_path):
    program = "(folder / str(rank)).write_text(' '.join(os.environ[name] for name in NAMES))"
    program = f"NAMES = {(launch.COUNT, launch.COORDINATOR)}\n{program}"
    assert supervise(program, tmp_path, 3) == 0
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert len(set(texts)) == 1
    assert texts[0].startswith("3 127.0.0.1:")


@pytest.mark.parametrize("name", ["SIGABRT", "SIGKILL", "SIGSEGV"])
def test_a_process_stopped_by_a_signal_is_started_again(name, tmp_path, capfd):
    program = f"os.kill(os.getpid(), signal.{name}) if starts() == 1 else None"
    assert supervise(program, tmp_path) == 0
    assert starts(tmp_path) == 2
    assert capfd.readouterr().out == (
        f"a process was stopped by {name}: starting again from the beginning.\n"
    )


def test_all_processes_are_started_again(tmp_path, capfd):
    program = "n = starts()\nif n == 1: os.abort() if rank == 1 else time.sleep(60)"
    assert supervise(program, tmp_path, 2) == 0
    assert [starts(tmp_path, rank) for rank in range(2)] == [2, 2]
    assert capfd.readouterr().out.count("starting again") == 1


def test_a_signal_tells_more_than_the_failures_that_follow(tmp_path):
    program = "n = starts()\nif n == 1: os.abort() if rank == 1 else (time.sleep(0.3), sys.exit(1))"
    assert supervise(program, tmp_path, 2) == 0


def test_three_failures_without_progress_end_it(tmp_path, capfd):
    assert supervise("starts(); os.abort()", tmp_path) == 1
    assert starts(tmp_path) == 3
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "starting again" in line] == lines[:2]
    assert lines[2] == "stopped by SIGABRT 3 times without progress: giving up."
    assert supervise("os.abort()", tmp_path, logs=tmp_path / "logs") == 1
    assert capfd.readouterr().out.endswith(f"giving up. See {tmp_path / 'logs'}.\n")


def test_progress_lets_it_go_on(tmp_path, capfd):
    def newest():
        count = starts(tmp_path) if (tmp_path / "starts_0").exists() else 0
        return f"round_{count}" if 1 < count < 6 else None

    program = "n = starts()\nif n < 7: os.abort()"
    assert supervise(program, tmp_path, newest_checkpoint=newest) == 0
    assert starts(tmp_path) == 7
    assert "starting again from checkpoint round_5.\n" in capfd.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children with their parent")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_children_end_with_the_launcher(name, tmp_path):
    program = PREAMBLE + "(folder / str(rank)).write_text(str(os.getpid())); time.sleep(60)"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # A shell's background jobs ignore SIGINT, and so would what they start.
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from fedcodist.run import launch\n"
            f"sys.exit(launch.supervise([sys.executable, '-c', {program!r}, {str(tmp_path)!r}], 2))",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    pids = [tmp_path / "0", tmp_path / "1"]
    _wait_for(lambda: all(path.exists() and path.read_text() for path in pids))
    pids = [int(path.read_text()) for path in pids]
    os.kill(parent.pid, getattr(signal, name))
    output, _ = parent.communicate(timeout=20)
    assert parent.returncode != 0
    _wait_for(lambda: not any(map(_is_alive, pids)))
    if name == "SIGINT":
        assert parent.returncode == launch.INTERRUPTED
        assert output == "interrupted: the same command goes on from the last checkpoint.\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "cores"),
        ({"JAX_PLATFORMS": "cpu"}, "cores"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 1),
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}, "cores"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, 1),
        ({"JAX_PLATFORMS": "cuda"}, 1),
        ({"JAX_PLATFORMS": "tpu,cpu"}, 1),
    ],
)
def test_default_processes(environment, expected, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    if expected == "cores":
        expected = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    assert launch.default_processes() == expected


def test_an_accelerator_gets_one_process(monkeypatch):
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert launch.default_processes() == 1


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        *((value, "at least 1") for value in (0, -1)),
        *((value, "at most 16 on this machine") for value in (17, 10**12)),
        *((value, "a whole number") for value in (True, 2.0, "2")),
    ],
)
def test_a_number_of_processes_is_one_that_the_machine_stands(value, allowed, monkeypatch):
    monkeypatch.setattr(launch, "_cores", lambda: {0, 1})
    message = f"--processes must be {allowed}, got {value!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        launch.check_processes("--processes", value)
    monkeypatch.setattr(launch, "_cores", lambda: set(range(64)))
    assert launch.check_processes("--processes", 64) == 64


def test_join_leaves_a_process_alone_that_is_the_only_one(monkeypatch):
    affinity = os.sched_getaffinity(0)
    for count in (None, "1"):
        monkeypatch.delenv(launch.COUNT, raising=False)
        if count:
            monkeypatch.setenv(launch.COUNT, count)
        launch.join()
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy")
def test_threads_of_joined_processes_do_not_interrupt_each_other(tmp_path):
    program = """
from unittest import mock
from fedcodist.run import launch
policies = []
jax = mock.MagicMock()
jax.distributed.initialize = lambda *_, **__: policies.append(os.sched_getscheduler(0))
with mock.patch.dict(sys.modules, {"jax": jax, "jax.experimental": jax.experimental}):
    launch.join()
(folder / str(rank)).write_text(str(policies == [os.SCHED_BATCH]))
"""
    assert supervise(program, tmp_path, 2) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["True", "True"]


LISTENING = """
from fedcodist.run import launch
launch.join()
import jax, jax.numpy as jnp
files = [pathlib.Path("/proc/net/tcp"), pathlib.Path("/proc/net/tcp6")]
inodes = set()
for link in pathlib.Path("/proc/self/fd").iterdir():
    try:
        inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    except OSError:
        pass
lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()]
own = [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]
(folder / str(rank)).write_text(" ".join(own))
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_of_one_machine_listen_to_it_alone(tmp_path):
    assert supervise(LISTENING, tmp_path, 2, logs=tmp_path / "logs") == 0
    addresses = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    # 127.0.0.1 as the kernel writes it, alone or within IPv6: the coordinator's and Gloo's.
    assert addresses[0] and {each[-8:] for own in addresses for each in own} == {"0100007F"}


def test_gloo_is_told_to_listen_on_loopback(monkeypatch):
    from jax._src import xla_bridge

    told = []
    monkeypatch.setattr(
        xla_bridge._jax, "make_gloo_tcp_collectives", lambda **options: told.append(options)
    )
    launch._connect_on_loopback()
    xla_bridge._jax.make_gloo_tcp_collectives(distributed_client=None)
    assert told == [{"distributed_client": None, "hostname": "127.0.0.1"}]


# The first process's reaction when XLA reports that another process is gone.
LOST = f"""
if rank == 1:
    starts()
    time.sleep(0.5 if (folder / "starts_1").stat().st_size == 1 else 0)
    os.kill(os.getpid(), signal.SIGKILL) if (folder / "starts_1").stat().st_size == 1 else sys.exit(0)
from fedcodist.run import launch
from fedcodist.run.native_logs import log_native_errors
if starts() == 1:
    log_native_errors(pathlib.Path(os.environ[{launch._LOGS!r}]) / "process_0.log")
    time.sleep(1)
    os.write(2, b"E1 gloo: line\\n" * 26)
    error = RuntimeError("Gloo all-reduce failed: Connection closed by peer")
    assert launch.is_disconnection(error)
    print("a warning of Python's", file=sys.stderr, flush=True)
    os._exit(launch.DISCONNECTED)
"""


def test_a_killed_process_is_told_in_one_line(tmp_path, capfd):
    """Gloo's many lines about it go to a log."""
    logs = tmp_path / "logs"
    assert supervise(LOST, tmp_path, 2, logs=logs) == 0
    output, errors = capfd.readouterr()
    assert output == "a process was stopped by SIGKILL: starting again from the beginning.\n"
    assert errors == "a warning of Python's\n"
    log = (logs / "process_0.log").read_text()
    assert log.count("gloo: line") == 26 and "Connection closed by peer" in log


@pytest.mark.parametrize(
    ("statuses", "line", "expected"),
    [
        ((launch.DISCONNECTED, 1), "a process ended with status 1", 1),
        ((launch.DISCONNECTED,) * 2, "the processes lost each other", launch.DISCONNECTED),
    ],
)
def test_no_error_is_lost_with_a_connection(statuses, line, expected, tmp_path, capfd):
    logs = tmp_path / "logs"
    assert supervise(f"sys.exit({statuses}[rank])", tmp_path, 2, logs=logs) == expected
    assert capfd.readouterr().err == f"error: {line}: see {logs}.\n"


def shares(cores: set[int], places: int) -> list[list[int]]:
    """The cores that each process gets on a system with these cores."""
    taken = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.os, "sched_getaffinity", lambda process: cores, raising=False)
        patch.setattr(launch.os, "sched_setaffinity", taken.__setitem__, raising=False)
        for place in range(places):
            launch.take_cores(place, places, process=100 + place)
    assert list(taken) == [100 + place for place in range(places)]
    return list(taken.values())


@given(cores=st.sets(st.integers(0, 99), min_size=1, max_size=40), places=st.integers(1, 40))
def test_every_core_is_in_an_equal_share(cores, places):
    sizes = [len(share) for share in shares(cores, places)]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    taken = Counter(core for share in shares(cores, places) for core in share)
    assert set(taken) == cores
    assert max(taken.values()) - min(taken.values()) <= (places > len(cores))


def test_shares_are_neighbouring_cores():
    assert shares({0, 1, 2, 3}, 2) == [[0, 1], [2, 3]]
    assert shares({4, 5, 7}, 2) == [[4], [5, 7]]
    assert shares({4, 5}, 3) == [[4], [4], [5]]


def test_a_system_that_confines_no_process(monkeypatch):
    monkeypatch.delattr(launch.os, "sched_setaffinity")
    launch.take_cores(0, 2)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
