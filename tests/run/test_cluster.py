"""A run on many machines: exit statuses, errors of one line, and the flags that describe it."""

import re
import socket
import sys
from pathlib import Path

import pytest

from fedcodist.run import cluster, launch
from fedcodist.run.cluster import Cluster

PREAMBLE = """
import os, pathlib, signal, sys
def starts():
    with open(pathlib.Path(sys.argv[1]) / "starts", "a") as file:
        file.write("x")
"""
JOIN = f"os.write(int(os.environ[{launch.JOINED!r}]), b'process_0.log')\n"


def supervise_host(program: str, folder: Path) -> int:
    return cluster.supervise_host([sys.executable, "-c", PREAMBLE + program, str(folder)])


@pytest.mark.parametrize("join", ["", JOIN])
@pytest.mark.parametrize("status", [0, 1, 2, 7])
def test_the_exit_status_of_a_host_is_its_process_own(status, join, tmp_path, capfd):
    assert supervise_host(f"{join}starts(); sys.exit({status})", tmp_path) == status
    assert (tmp_path / "starts").stat().st_size == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            f"{JOIN}os.abort()",
            "another process of the run ended or did not answer: the same command on all machines "
            "goes on from the last checkpoint. See process_0.log.",
        ),
        (
            f"{JOIN}sys.exit({launch.DISCONNECTED})",
            "another process of the run ended or did not answer: the same command on all machines "
            "goes on from the last checkpoint. See process_0.log.",
        ),
        (
            f"{JOIN}os.kill(os.getpid(), signal.SIGKILL)",
            "stopped by SIGKILL: the same command on all machines goes on from the last checkpoint. "
            "See process_0.log.",
        ),
        (
            "os.abort()",
            "the machines did not find each other within 300 s: is the command running on all of "
            "them, with the same coordinator?",
        ),
    ],
)
def test_a_host_says_in_one_line_why_it_ended(program, line, tmp_path, capfd):
    assert supervise_host(f"starts()\n{program}", tmp_path) == 1
    assert (tmp_path / "starts").stat().st_size == 1
    assert capfd.readouterr() == ("", f"error: {line}\n")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((None, None, None), None),
        (("10.0.0.1:1234", 2, 1), Cluster("10.0.0.1:1234", 2, 1)),
        (("first.cluster:65535", 1, 0), Cluster("first.cluster:65535", 1, 0)),
        (("[::1]:1", 3, 2), Cluster("[::1]:1", 3, 2)),
    ],
)
def test_a_cluster_is_what_the_flags_say(flags, expected):
    assert cluster.check_cluster(*flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("here:1", None, 0), "given together, --num_hosts missing"),
        ((None, 2, 0), "given together, --coordinator missing"),
        ((None, None, 0), "given together, --coordinator and --num_hosts missing"),
        (("here", 2, 0), "HOST:PORT with a port of 1 to 65535, got 'here'"),
        ((":1234", 2, 0), "got ':1234'"),
        (("here:", 2, 0), "got 'here:'"),
        (("here:http", 2, 0), "got 'here:http'"),
        (("here:-1", 2, 0), "got 'here:-1'"),
        (("here:0", 2, 0), "got 'here:0'"),
        (("here:65536", 2, 0), "got 'here:65536'"),
        (("here:1", 0, 0), "--num_hosts must be at least 1, got 0"),
        (("here:1", 2, 2), "--host must be between 0 and 1, got 2"),
        (("here:1", 2, -1), "--host must be between 0 and 1, got -1"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(cluster.ClusterError, match=re.escape(message)):
        cluster.check_cluster(*flags)


def test_a_port_that_is_in_use_is_refused(tmp_path):
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(cluster.ClusterError, match=r"port \d+ cannot be used on this machine"):
            cluster.join_cluster(Cluster(address, 2, 0), tmp_path)
