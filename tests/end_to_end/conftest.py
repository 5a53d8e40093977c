"""Runs of the real command. They share one small experiment, and what XLA compiles for it."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quick_compilation import XLA_FLAGS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = (sys.executable, "-m", "experiments.main")
CONFIG = "fedcodist/configs/digits_codist.py"
SMALL = (
    "--config.rounds=7",
    "--config.seeds=3",
    "--config.algorithm.alpha=0.5",
    "--config.algorithm.steps=2",
    "--config.algorithm.mixup_beta=0",
    "--config.data.num_clients=6",
    "--config.pools.small.cohort_size=3",
    "--config.pools.large.cohort_size=2",
    "--config.evaluation.every=2",
    "--config.evaluation.checkpoint_every=4",
)


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """The settings in which the small experiment differs from its config file."""
    return SMALL


def clean_environment(compilations: Path | None) -> dict[str, str]:
    """The environment of a user's shell; conftest.py's eight devices are for tests in-process."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment["JAX_PLATFORMS"] = "cpu"
    if compilations is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(compilations),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
    return environment


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all processes of a test session share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "end_to_end"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def environment(shared) -> dict[str, str]:
    """An environment in which the commands compile quickly, and each program once."""
    return clean_environment(shared / "compilations") | {
        "XLA_FLAGS": XLA_FLAGS,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


@pytest.fixture(scope="session")
def start(environment) -> Callable[..., subprocess.Popen]:
    """Starts the small experiment, with the fault `where:round:action` of faults.py if given."""

    def start(workdir, *settings, fault=None, config=CONFIG, environment=environment):
        arguments = [f"--config={config}", *SMALL, f"--workdir={workdir}", *settings]
        command = list(COMMAND)
        if fault:
            marker = Path(workdir).with_name(f"{Path(workdir).name}.reached")
            command = [sys.executable, str(HERE / "faults.py"), fault, str(marker)]
        return subprocess.Popen(
            command + arguments,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture(scope="session")
def run(start) -> Callable[..., subprocess.CompletedProcess]:
    """Like `start`, to its end."""

    def run(workdir, *settings, **options):
        process = start(workdir, *settings, **options)
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    return run


@pytest.fixture(scope="session")
def uninterrupted(run, shared) -> Path:
    """The run folder of the small experiment, never stopped; of one process, for all of them."""
    folder, output = shared / "uninterrupted", shared / "output"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not output.exists():
            done = run(folder, "--loggers=csv,tensorboard")
            assert done.returncode == 0, done.stderr
            output.write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], object]], None]:
    def wait_for(condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.01)

    return wait_for
