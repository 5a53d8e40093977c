"""Child processes: none outlives the command that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedcodist.core import child_processes

ROOT = Path(__file__).parents[2]
# A program that prints its process id and computes for ever, as a run does.
ENDLESS = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
# A shell's background jobs ignore SIGINT, and so would what they start.
HEEDS_INTERRUPTS = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupted(program: str, path: Path, number: int, started: int = 1) -> tuple[int, str]:
    """Signals a Python program once its children have started; returns its status and output.

    All of them are gone then.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HEEDS_INTERRUPTS + program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(lambda: len(pids(path)) == started or process.poll() is not None)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
        wait_for(lambda: not any(map(is_alive, pids(path))))
        assert len(pids(path)) == started, output
    finally:
        process.kill()
        for pid in filter(is_alive, pids(path)):
            os.kill(pid, signal.SIGKILL)
    return process.returncode, output


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children with their parent")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_child_ends_with_its_parent(name, tmp_path):
    path, number = tmp_path / "pids", getattr(signal, name)
    program = (
        "from fedcodist.core import child_processes\n"
        f"command = [sys.executable, '-c', {ENDLESS!r}, {str(path)!r}]\n"
        "work = lambda: child_processes.run(command).returncode\n"
        "sys.exit(child_processes.until_interrupted(work, 'interrupted.'))"
    )
    status, output = interrupted(program, path, number)
    expected = (-9, "") if name == "SIGKILL" else (128 + number, "interrupted.\n")
    assert (status, output) == expected


# Starts an endless process in a session of its own, and ends itself if it is asked to.
LAUNCHER = f"""
import subprocess, sys, time
endless = [sys.executable, "-c", {ENDLESS!r}, sys.argv[1]]
subprocess.Popen(endless, start_new_session=True)
while sys.argv[2] == "stays" or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", None])
def test_nothing_is_left_of_what_a_child_has_started(name, tmp_path):
    """Neither where the parent is interrupted, nor where a child ends before its own children."""
    path = tmp_path / "pids"
    path.touch()
    arguments = (LAUNCHER, str(path), "stays" if name else "ends")
    program = (
        "from fedcodist.core import child_processes\n"
        "child_processes.adopt_orphans()\n"
        f"command = [sys.executable, '-c', *{arguments!r}]\n"
        "def work():\n"
        "    with child_processes.none_left():\n"
        "        return child_processes.run(command).returncode\n"
        "sys.exit(child_processes.until_interrupted(work, 'interrupted.'))"
    )
    number = getattr(signal, name) if name else 0
    expected = (128 + number, "interrupted.\n") if name else (0, "")
    assert interrupted(program, path, number) == expected


def test_without_prctl_a_signal_still_ends_the_children(tmp_path):
    """As on macOS, where only the handlers end children."""
    path = tmp_path / "pids"
    program = (
        "from fedcodist.core import child_processes\n"
        "child_processes._end_with = lambda parent: None\n"
        f"command = [sys.executable, '-c', {ENDLESS!r}, {str(path)!r}]\n"
        "work = lambda: child_processes.run(command).returncode\n"
        "sys.exit(child_processes.until_interrupted(work, 'interrupted.'))"
    )
    assert interrupted(program, path, signal.SIGTERM) == (143, "interrupted.\n")


def test_signals_that_are_ignored_stay_ignored():
    """As under nohup; the handlers are restored afterwards."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        def work():
            os.kill(os.getpid(), signal.SIGHUP)
            return 5

        term = signal.getsignal(signal.SIGTERM)
        assert child_processes.until_interrupted(work, "interrupted.") == 5
        assert signal.getsignal(signal.SIGTERM) is term
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_child_says_and_its_status_are_returned():
    command = [sys.executable, "-c", "print('said'); raise SystemExit(3)"]
    done = child_processes.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "said\n")
    with pytest.raises(subprocess.TimeoutExpired):
        child_processes.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_a_child_that_ignores_term_is_killed():
    program = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True); time.sleep(60)"
    )
    child = child_processes.start(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    began = time.monotonic()
    child_processes.stop([child], seconds=0.3)
    assert child.returncode == -signal.SIGKILL and 0.3 <= time.monotonic() - began < 10
    child.stdout.close()


# The commands that start runs. Each starts a stand-in for a run in place of the real one.

COMMANDS = {
    "sweep": (
        "from fedcodist.commands import sweep\n"
        "sweep._COMMAND = STAND_IN\n"
        "sys.exit(sweep.main(['--config=CONFIG', '--workdir=WORKDIR']))",
        1,
    ),
    "sweep at once": (
        "from fedcodist.commands import sweep\n"
        "sweep._COMMAND = STAND_IN\n"
        "sys.exit(sweep.main(['--config=CONFIG', '--workdir=WORKDIR', '--at-once=2']))",
        2,
    ),
    "compare": (
        "from fedcodist.commands import compare, sweep\n"
        "sweep._COMMAND = STAND_IN\n"
        "sys.exit(compare.main(['--config=CONFIG', '--workdir=WORKDIR']))",
        1,
    ),
    "demo": (
        "from fedcodist.commands import demo\n"
        "sys.executable = STAND_IN_FILE\n"
        "sys.argv = ['demo', '--workdir=WORKDIR']\n"
        "sys.exit(demo.main())",
        1,
    ),
    "demo_text": (
        "from fedcodist.commands import demo_text\n"
        "sys.executable = STAND_IN_FILE\n"
        "sys.argv = ['demo_text', '--workdir=WORKDIR']\n"
        "sys.exit(demo_text.main())",
        1,
    ),
    "tune": (
        "from fedcodist.tuning import workers\n"
        "from fedcodist.core import child_processes\n"
        "work = lambda: workers.supervise(STAND_IN, 2)\n"
        "sys.exit(child_processes.until_interrupted(work, 'interrupted: the same command goes on.'))",
        1,
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "SIGTERM") for command in COMMANDS),
        *(
            pytest.param(command, name, marks=pytest.mark.slow)
            for command in COMMANDS
            for name in ("SIGINT", "SIGHUP", "SIGKILL")
        ),
    ],
)
def test_no_run_outlives_its_command(command, name, tmp_path):
    path, config, stand_in = tmp_path / "pids", tmp_path / "config.py", tmp_path / "stand_in"
    config.write_text(
        "from ml_collections import ConfigDict\n"
        "get_runs = lambda: ['one', 'two']\n"
        "get_config = lambda run: ConfigDict(dict(run=run))\n"
    )
    # Like `experiments.main`, it starts a process that computes and ends it with itself.
    inner = [sys.executable, "-c", ENDLESS, str(path)]
    stand_in.write_text(
        f"#!{sys.executable}\nimport sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from fedcodist.run import launch\nsys.exit(launch.supervise({inner!r}, 1))\n"
    )
    stand_in.chmod(0o755)
    program, started = COMMANDS[command]
    for text, value in (
        ("STAND_IN_FILE", repr(str(stand_in))),
        ("STAND_IN", repr((str(stand_in),))),
        ("CONFIG", str(config)),
        ("WORKDIR", str(tmp_path / "runs")),
    ):
        program = program.replace(text, value)
    number = getattr(signal, name)
    status, output = interrupted(program, path, number, started)
    assert status == (-9 if name == "SIGKILL" else 128 + number), output
    if name != "SIGKILL":
        assert output.splitlines()[-1].startswith("interrupted: the same command goes on"), output


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("side_by_side.py", ["--workload=digits", "--turns=1"]),
        pytest.param("cold_start.py", ["--turns=1"], marks=pytest.mark.slow),
        pytest.param("scale.py", ["--only=population", "--turns=1"], marks=pytest.mark.slow),
        pytest.param("distillation_cost.py", ["--turns=1"], marks=pytest.mark.slow),
    ],
)
def test_no_program_outlives_a_benchmark(script, arguments, tmp_path):
    """The real scripts, with a stand-in for the programs that they start."""
    path, stand_in = tmp_path / "pids", tmp_path / "stand_in"
    stand_in.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[1:] = [{str(path)!r}]\n{ENDLESS}\n"
    )
    stand_in.chmod(0o755)
    module = script.removesuffix(".py")
    if module in ("cold_start", "scale"):  # without the data that they write first
        run = [
            f"import {module}",
            f"{module}.write_images = {module}.write_columns = lambda *_: None",
            f"sys.exit({module}.child_processes.until_interrupted({module}.main, 'interrupted.'))",
        ]
    else:
        path_of_script = str(ROOT / "benchmarks" / script)
        run = ["import runpy", f"runpy.run_path({path_of_script!r}, run_name='__main__')"]
    lines = [
        f"sys.argv = {[script, *arguments, f'--results={tmp_path}']!r}",
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})",
        f"sys.executable = {str(stand_in)!r}",
        *run,
    ]
    status, output = interrupted("\n".join(lines), path, signal.SIGTERM)
    assert (status, output.splitlines()[-1]) == (143, "interrupted."), output
