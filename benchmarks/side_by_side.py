"""Ours and the peers on the same work, in turn: seconds per round, ratios, compilation, memory.

    python benchmarks/side_by_side.py [--workload cnn_small ...] [--turns 7]
    python benchmarks/side_by_side.py --only flower [--workload cnn_small ...]
    python benchmarks/side_by_side.py --check [--workload digits ...]
    python benchmarks/side_by_side.py --accelerator [--peak-tflops N] [--workload cnn_small ...]

Each program first tries its settings of processes and threads. Settings near its fastest are tried three
times, and the fastest is used. Then all programs run in turn, several times, each time in new processes,
so a change of the machine's speed affects all alike. `make bench-peers` installs each peer in its own
environment.

`--only` measures ours and some programs and prints the table. Workloads that none of these programs can
run are left out. It writes no record, since this would replace a record of all programs.

In a terminal a live line shows what runs. As soon as a workload is measured, its table is printed and
its record written, so results stay if the comparison is ended. All processes that it started end with
it.

`--check` compares the weights after one round with the PyTorch loop's. It uses float64 if differences in
float32 would be mostly rounding: with distillation, since Adam makes a full step from a gradient near
zero, and with convolutions. Private rounds are compared without their noise, since each program draws
its own. The workloads htfl_* are compared with HtFLlib's own code, most of them after two rounds. This
code is not in this repository; peers/htfllib/program.py says how to get it. If the variable HTFLLIB is
not set, these workloads are measured only when named. The results are written to results/benchmarks/; a
workload's lines there replace its old ones.

`--accelerator` measures the programs that can use one, each in one process. Without it accelerators are
hidden from all programs. With the device's peak in `--peak-tflops`, the record has the share of it that
a round's counted FLOPs reach. Look the peak up for the arithmetic that programs use, by default TF32.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import live_line
import machine
import numpy as np
import records
import round_flops
from peers import make_inputs
from peers import workload as work

from fedcodist.core import child_processes

ROOT = Path(__file__).resolve().parents[1]
INPUTS = ROOT / "build" / "benchmarks"
OURS, REFERENCE, HTFLLIB = "fedcodist", "torch_loop", "htfllib"
KIND, CHECK = "side_by_side", "check"
# One repetition should be long enough for the clock and short enough for the user.
ROUNDS = {
    "cnn_small": 5,
    "cnn_large": 3,
    "private": 5,
    "digits": 50,
    "emnist": 3,
    "resnet20": 1,
    "lstm_small": 1,
    "lstm_large": 1,
    "merged": 1,
    "periodic": 1,
    "fed_sdd": 1,
    "fed_md": 1,
    "mhd": 1,
    "mhd_digits": 4,
    "mhd_64": 1,
    "fed_kd": 5,
    **{f"htfl_{method}": 1 for method in work.HTFL_METHODS},
}
# A setting is tried several times if its first time is near the fastest one: on a shared machine times
# differ by a third.
TRIALS, NEAR = 3, 1.3
TOLERANCE = 1e-4  # of weights after one round, relative to the norm of the round's update
ROUNDING = 1e-5  # updates with smaller norms count as rounding
TIME_LIMIT = 1800
HTFL = tuple(f"htfl_{method}" for method in work.HTFL_METHODS)
# Number of rounds before weights are compared. In the first round FD and LG-FedAvg do not receive
# anything yet. HtFLlib takes another mean of FedProto's prototypes, so its second round differs.
CHECKED_ROUNDS = dict.fromkeys(HTFL, work.HTFL_ORDERS) | {"htfl_fed_proto": 1}
DISTILLATION = (
    *("merged", "periodic", "fed_sdd", "fed_md"),
    *("mhd", "mhd_digits", "mhd_64", "fed_kd"),
)
# Rounds with user-level privacy. FedJAX's federated averaging neither clips nor adds noise. Flower's
# private strategies go around another one and add noise to its new weights. So the noise would come
# after the server's Adam, not before it.
PRIVATE = ("private",)
# Workloads that are checked in float64, and without noise. A few steps of ResNet-20 amplify float32's
# rounding so much that the loop's own rounds in float32 and float64 differ by as much as the weights
# move in a round. In the CNNs, near-ties of a max-pool send gradients to other pixels, and Adam makes
# full steps of them.
IN_DOUBLE = (*DISTILLATION, *HTFL, *PRIVATE, "resnet20", "cnn_small", "cnn_large", "emnist")
# These variables would give some programs compiled programs, and others no compiled Python modules.
NOT_INHERITED = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
NOT_SUPPORTED = "not supported"
NOT_INSTALLED = "not installed: make bench-peers"


class Program(NamedTuple):
    """How a program is started.

    Attributes:
      command: interpreter and script.
      needs: a file that exists if its environment was made.
      several: whether it can use several processes.
      lacks: workloads that it cannot run.
      accelerated: whether it can use an accelerator.
      folder: an environment variable that names a folder with its code, or "".
    """

    command: tuple[str, ...]
    needs: Path
    several: bool = True
    lacks: tuple[str, ...] = ()
    accelerated: bool = False
    folder: str = ""

    def hindrance(self, workload: str, accelerator: bool = False) -> str | None:
        """Why it cannot be run, or None."""
        if workload in self.lacks or (accelerator and not self.accelerated):
            return NOT_SUPPORTED
        if not self.needs.exists():
            return NOT_INSTALLED
        if self.folder and not os.environ.get(self.folder):
            return f"not fetched: {self.folder} names no folder with its code"
        return None


class Setting(NamedTuple):
    """Processes, and threads of each."""

    processes: int
    threads: int


class Job(NamedTuple):
    """The work of all programs."""

    workload: str
    inputs: Path
    rounds: int
    turns: int
    accelerator: bool = False


class ProgramFailed(RuntimeError):
    """A program gave no result; the message is the last line that it printed."""


def _peer(
    name: str,
    several: bool = True,
    lacks: tuple[str, ...] = HTFL,
    accelerated: bool = False,
    folder: str = "",
) -> Program:
    environment = ROOT / ".venv-peers" / name
    script = ROOT / "benchmarks" / "peers" / name / "program.py"
    command = (str(environment / "bin" / "python"), str(script))
    return Program(command, environment / ".installed", several, lacks, accelerated, folder)


PROGRAMS = {
    OURS: Program(
        (sys.executable, str(ROOT / "benchmarks" / "ours.py")),
        Path(sys.executable),
        accelerated=True,
    ),
    REFERENCE: _peer(REFERENCE, several=False, accelerated=True),
    # FedJAX's models have no mutable state; pfl-research averages parameters alone.
    "fedjax": _peer("fedjax", lacks=("resnet20", *PRIVATE, *DISTILLATION, *HTFL)),
    "pfl_research": _peer(
        "pfl_research", lacks=("resnet20", *DISTILLATION, *HTFL), accelerated=True
    ),
    # Flower averages weights, not updates. For the thousands of words that no client has, Adam would
    # make steps of float32's rounding in this mean, so Flower would compute another round of text.
    "flower": _peer("flower", lacks=("lstm_small", "lstm_large", *PRIVATE, *DISTILLATION, *HTFL)),
    # The user gets its code: see its program.
    HTFLLIB: _peer(
        HTFLLIB,
        several=False,
        lacks=tuple(name for name in work.WORKLOADS if name not in HTFL),
        folder="HTFLLIB",
    ),
}


def reference_of(workload: str) -> str:
    """The program with whose weights those of the others are compared."""
    return HTFLLIB if workload in HTFL else REFERENCE


def command() -> int:
    """`main`; if it is interrupted, all processes that it started end."""
    child_processes.adopt_orphans()
    return child_processes.until_interrupted(main, "interrupted.")


def main() -> int:
    """Measures, or checks, one workload after another."""
    arguments = parse_arguments()
    programs = {
        name: program
        for name, program in PROGRAMS.items()
        if arguments.only is None or name in (OURS, *arguments.only)
    }
    cores = machine.cores()
    if arguments.check:
        return check_all(arguments.workload, cores, arguments.results)
    workloads, accelerator = arguments.workload, arguments.accelerator
    if arguments.only is not None:
        named = [PROGRAMS[name] for name in arguments.only]
        can_run = lambda workload: None in [p.hindrance(workload, accelerator) for p in named]
        workloads = list(filter(can_run, workloads))
    if not workloads:
        reasons = [
            f"{name}: {hindrance_of(PROGRAMS[name], arguments.workload, accelerator)}"
            for name in arguments.only
        ]
        print(f"error: nothing can be compared: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    for workload in workloads:
        job = make_job(workload, arguments.turns)._replace(accelerator=arguments.accelerator)
        try:
            record = measure(programs, job, cores)
        except ProgramFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if arguments.peak_tflops is not None:
            flops = round_flops.flops_of_round(workload, job.inputs, job.rounds)
            record |= {"gflop_per_round": flops / 1e9, "peak_tflops": arguments.peak_tflops}
        print(table(record), flush=True)
        if arguments.only is None:
            records.write(record, arguments.results)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line; ends the program with one line if it is contradictory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", choices=sorted(ROUNDS))
    parser.add_argument("--turns", type=int, default=7)
    peers = [name for name in PROGRAMS if name != OURS]
    parser.add_argument("--only", nargs="+", choices=peers, help="beside ours; writes no record")
    parser.add_argument("--check", action="store_true", help="compare results, measure nothing")
    parser.add_argument("--accelerator", action="store_true", help="instead of the processor")
    parser.add_argument("--peak-tflops", type=float, help="of the accelerator, for MFU")
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error(f"--turns must be at least 1, got {arguments.turns}")
    if arguments.check and (arguments.only or arguments.accelerator):
        parser.error(
            "--check compares all programs on the processor: not --only, not --accelerator"
        )
    if arguments.peak_tflops is not None:
        if not arguments.accelerator:
            parser.error("--peak-tflops is an accelerator's: it needs --accelerator")
        if not arguments.peak_tflops > 0:
            parser.error(f"--peak-tflops must be positive, got {arguments.peak_tflops}")
    if arguments.workload is None:
        # With --only, the programs decide.
        is_usual = lambda name: arguments.only or name not in HTFL or os.environ.get("HTFLLIB")
        arguments.workload = list(filter(is_usual, ROUNDS))
    return arguments


def hindrance_of(program: Program, workloads: Sequence[str], accelerator: bool) -> str:
    """Why a program can run none of the workloads: what the user can change, where something is."""
    found = {program.hindrance(workload, accelerator) for workload in workloads} - {None}
    return next(iter(found - {NOT_SUPPORTED}), NOT_SUPPORTED)


def make_job(workload: str, turns: int) -> Job:
    """A workload's job, with inputs made by the present code."""
    path = INPUTS / f"{workload}.npz"
    make_inputs.write(workload, path)
    return Job(workload, path, ROUNDS[workload], turns)


def measure(programs: Mapping[str, Program], job: Job, cores: int) -> dict[str, Any]:
    """Measures all installed programs in turn; returns the content of the record."""
    measured: dict[str, dict[str, Any]] = {}
    chosen = {}
    for name, program in programs.items():
        if hindrance := program.hindrance(job.workload, job.accelerator):
            measured[name] = {"error": hindrance}
            continue
        possible = settings(cores, program.several)
        if job.accelerator:
            possible = [Setting(1, cores)]
        with live_line.showing(f"{job.workload}: {name} tries processes and threads"):
            tried = try_settings(program, job, possible)
        measured[name] = {"tried": tried}
        worked = [trial for trial in tried if "error" not in trial]
        if not worked:
            measured[name]["error"] = tried[0]["error"]
            continue
        best = min(worked, key=lambda trial: trial["seconds"])
        chosen[name] = Setting(best["processes"], best["threads"])
    if OURS not in chosen:
        raise ProgramFailed(f"{OURS} does not run: {measured[OURS]['error']}")
    for name, own in compare({name: programs[name] for name in chosen}, chosen, job).items():
        measured[name] |= own
    # If an accelerator is used, our report has its name.
    device = measured[OURS].pop("device", None)
    return {
        **records.common(job.workload, KIND, device),
        "turns": job.turns,
        "rounds_per_repetition": job.rounds,
        "programs": measured,
    }


def compare(
    programs: Mapping[str, Program], chosen: Mapping[str, Setting], job: Job
) -> dict[str, dict[str, Any]]:
    """Runs programs in turn, including ours, with a setting for each; returns their figures."""
    lines = in_turn(programs, chosen, job)
    ours = [seconds(line) for line in lines[OURS]]
    return {
        name: {"error": f"failed in turn {len(own) + 1}"}
        if len(own) < job.turns
        else summary(own, ours)
        for name, own in lines.items()
    }


def settings(cores: int, several: bool) -> list[Setting]:
    """The settings that a program tries: every division of all cores into processes, and one core."""
    divisors = [count for count in range(1, cores + 1) if cores % count == 0]
    processes = divisors if several else [1]
    return sorted({Setting(count, cores // count) for count in processes} | {Setting(1, 1)})


def try_settings(program: Program, job: Job, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Runs a program once with each setting, and again with those near the fastest.

    Returns:
      For each setting its median seconds per round, or its error.
    """
    times: dict[Setting, list[float]] = {setting: [] for setting in settings}
    errors: dict[Setting, str] = {}

    def attempt(setting: Setting) -> None:
        try:
            times[setting].append(seconds(run(program, job, setting)))
        except ProgramFailed as error:
            errors[setting] = str(error)

    for setting in settings:
        attempt(setting)
    worked = {setting: own[0] for setting, own in times.items() if own}
    near = [s for s, first in worked.items() if first <= NEAR * min(worked.values())]
    if len(near) > 1:
        for setting in (TRIALS - 1) * near:
            attempt(setting)
    return [
        setting._asdict() | {"error": errors[setting]}
        if setting in errors
        else setting._asdict() | {"seconds": statistics.median(times[setting])}
        for setting in settings
    ]


def in_turn(
    programs: Mapping[str, Program], chosen: Mapping[str, Setting], job: Job
) -> dict[str, list[dict[str, Any]]]:
    """Runs A, B, C, A, B, C, ...; a program that fails twice in its turn is left out afterwards."""
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for turn in range(job.turns):
        for name, program in programs.items():
            if len(lines[name]) < turn:
                continue
            # Twice, since a port that the program chose may be taken before it uses it.
            for last in (False, True):
                try:
                    with live_line.showing(
                        f"{job.workload}: turn {turn + 1} of {job.turns}, {name}"
                    ):
                        lines[name].append(run(program, job, chosen[name]))
                    break
                except ProgramFailed as error:
                    if name == OURS:
                        raise ProgramFailed(f"{OURS} failed in turn {turn + 1}: {error}") from error
                    again = "left out" if last else "once more"
                    print(f"{name} failed in turn {turn + 1}, {again}: {error}", file=sys.stderr)
    return lines


def summary(lines: Sequence[Mapping[str, Any]], ours: Sequence[float]) -> dict[str, Any]:
    """A program's figures over all turns; ratios are taken within each turn."""
    own = [seconds(line) for line in lines]
    return {
        "version": lines[0]["version"],
        "processes": lines[0]["processes"],
        "threads": lines[0]["threads"],
        "seconds_per_round": own,
        **over_turns(own, ours),
        "compile_or_warmup_seconds": statistics.median(
            line["compile_or_warmup_seconds"] for line in lines
        ),
        "peak_rss_mb": max(line["peak_rss_mb"] for line in lines),
        **({"device": lines[0]["device"]} if "device" in lines[0] else {}),
        **(
            {"peak_device_mb": max(line["peak_device_mb"] for line in lines)}
            if "peak_device_mb" in lines[0]
            else {}
        ),
    }


def over_turns(own: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Median and range of a program's seconds per round, and of their ratios to ours within turns."""
    ratios = [mine / theirs for mine, theirs in zip(own, ours, strict=True)]
    return {
        "median": statistics.median(own),
        "minimum": min(own),
        "maximum": max(own),
        "ratio_to_ours": statistics.median(ratios),
        "ratio_minimum": min(ratios),
        "ratio_maximum": max(ratios),
    }


def table(record: Mapping[str, Any]) -> str:
    """The results of one workload, as text."""
    title = (
        f"\n{record['workload']}: {record['device']}, {record['turns']} turns of "
        f"{record['rounds_per_repetition']} rounds"
    )
    head = (
        f"{'':<14}{'processes x threads':>20}{'s/round':>11}{'min':>10}{'max':>10}"
        f"{'ratio':>8}{'min':>8}{'max':>8}{'warm-up, s':>12}{'peak, MB':>10}"
    )
    lines = [title, head]
    for name, own in record["programs"].items():
        if "error" in own:
            lines.append(f"{name:<14}  {own['error']}")
            continue
        setting = f"{own['processes']} x {own['threads']}"
        times = "".join(f"{own[key]:10.4f}" for key in ("median", "minimum", "maximum"))
        ratios = "".join(
            f"{own[key]:8.2f}" for key in ("ratio_to_ours", "ratio_minimum", "ratio_maximum")
        )
        rest = f"{own['compile_or_warmup_seconds']:12.1f}{own['peak_rss_mb']:10.0f}"
        if "peak_device_mb" in own:
            rest += f"  {own['peak_device_mb']:.0f} MB on the device"
        if "peak_tflops" in record:
            rest += f"  MFU {mfu(record, own['median']):.1%}"
        lines.append(f"{name:<14}{setting:>20} {times}{ratios}{rest}  {own['version']}")
    return "\n".join(lines)


def mfu(record: Mapping[str, Any], seconds: float) -> float:
    """A round's counted FLOPs, divided by its seconds and by the device's peak."""
    return record["gflop_per_round"] / seconds / (1000 * record["peak_tflops"])


def check_all(workloads: Sequence[str], cores: int, results: Path) -> int:
    """Checks workloads and writes the result of each; returns 1 if a program disagrees."""
    for workload in workloads:
        reference = reference_of(workload)
        if hindrance := PROGRAMS[reference].hindrance(workload):
            print(f"error: the check of {workload} needs {reference}: {hindrance}", file=sys.stderr)
            return 2
    status = 0
    for workload in workloads:
        try:
            found = check(PROGRAMS, make_job(workload, turns=1), cores)
        except ProgramFailed as error:
            print(f"error: {reference_of(workload)}: {error}", file=sys.stderr)
            return 1
        write_check(found, results)
        if not all(agrees(line) for line in found):
            status = 1
    return status


def write_check(found: Sequence[Mapping[str, Any]], results: Path) -> Path:
    """Writes a workload's lines of `check`, and the newest ones of the others, with date and commit."""
    record = records.common(CHECK, CHECK)
    old = [
        line
        for other in records.newest(results)
        if other["kind"] == CHECK and other["device"] == record["device"]
        for line in other["checked"]
        if line["workload"] != found[0]["workload"]
    ]
    new = [{**line, "date": record["date"], "commit": record["commit"]} for line in found]
    record |= {"tolerance": TOLERANCE, "checked": [*old, *new]}
    return records.write(record, results)


def check(programs: Mapping[str, Program], job: Job, cores: int) -> list[dict[str, Any]]:
    """Compares weights after the first round with the reference's, of each program in each setting.

    Returns:
      Lines with workload, program, processes, threads, whether in float64, and the difference or an
      error. For a program that was not run, the line has its `hindrance` instead of a setting.
    """
    initial = initial_weights(job)
    double = job.workload in IN_DOUBLE
    with live_line.showing(f"{job.workload}: first weights of {reference_of(job.workload)}"):
        reference = first_weights(programs[reference_of(job.workload)], job, Setting(1, 1))
    lines = []
    for name, program in programs.items():
        line = {"workload": job.workload, "program": name, "double": double}
        if hindrance := program.hindrance(job.workload):
            lines.append({**line, "hindrance": hindrance})
            print(f"{job.workload:<20}{name:<14}{hindrance}", flush=True)
            continue
        for setting in settings(cores, program.several):
            where = f"{job.workload:<20}{name:<14}{setting.processes} x {setting.threads}"
            where += "  float64" if double else ""
            own: dict[str, Any] = {**line, **setting._asdict()}
            lines.append(own)
            try:
                with live_line.showing(f"{job.workload}: first weights of {name}"):
                    weights = first_weights(program, job, setting)
            except ProgramFailed as error:
                own["error"] = str(error)
                print(f"{where}  failed: {error}", flush=True)
                continue
            own["difference"] = relative_difference(weights, reference, initial)
            said = "ok" if agrees(own) else "DIFFERS"
            print(f"{where}  {own['difference']:.1e}  {said}", flush=True)
    return lines


def agrees(line: Mapping[str, Any]) -> bool:
    """Whether a line of `check` shows no fault; programs that could not be run are no fault."""
    return "hindrance" in line or line.get("difference", math.inf) <= TOLERANCE


def initial_weights(job: Job) -> dict[str, np.ndarray]:
    """The weights that all programs start from, 'pool/layer/leaf' -> array."""
    names = [
        f"{pool}/{name}"
        for pool, network in work.WORKLOADS[job.workload].networks.items()
        for name in work.weight_shapes(network)
    ]
    with np.load(job.inputs) as file:
        return {name: file[name] for name in names}


def first_weights(program: Program, job: Job, setting: Setting) -> dict[str, np.ndarray]:
    """Runs one round, or CHECKED_ROUNDS, of those IN_DOUBLE in float64, and reads the weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        rounds = CHECKED_ROUNDS.get(job.workload, 1)
        run(program, job, setting, repetitions=0, save_weights=path, first_rounds=rounds)
        with np.load(path) as file:
            return dict(file)


def relative_difference(
    weights: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    initial: Mapping[str, np.ndarray],
) -> float:
    """The largest, over arrays, of |weights - reference| / |reference - initial|.

    Arrays that only rounding moves, such as a bias before batch normalisation, must not differ by more.
    """
    differences = []
    for name, start in initial.items():
        update = max(np.linalg.norm(reference[name].astype(np.float64) - start), ROUNDING)
        difference = np.linalg.norm(weights[name].astype(np.float64) - reference[name])
        differences.append(difference / update)
    return float(np.max(differences))  # NaN if any is: Python's `max` may leave it out


def run(
    program: Program,
    job: Job,
    setting: Setting,
    repetitions: int = 1,
    save_weights: Path | None = None,
    first_rounds: int = 1,
    cache: str | None = None,
) -> dict[str, Any]:
    """Runs a program to its end; returns its line of JSON, or raises ProgramFailed.

    Processes that it has started end with it, and also with this process.

    Args:
      program, job, setting: what is run.
      repetitions: number of timed repetitions, of `job.rounds` rounds each.
      save_weights: a file for the weights, if they are to be compared.
      first_rounds: number of rounds before the weights are saved.
      cache: a folder for compiled programs; without it everything is compiled.
    """
    command = [
        *program.command,
        f"--workload={job.workload}",
        f"--inputs={job.inputs}",
        f"--repetitions={repetitions}",
        f"--rounds-per-repetition={job.rounds}",
        f"--processes={setting.processes}",
        f"--threads={setting.threads}",
    ]
    if first_rounds > 1:
        command.append(f"--first-rounds={first_rounds}")
    if save_weights is not None:
        command.append(f"--save-weights={save_weights}")
        if job.workload in IN_DOUBLE:
            command.append("--double")
    hidden = {} if job.accelerator else {"CUDA_VISIBLE_DEVICES": ""}
    if job.accelerator:
        command.append("--accelerator")
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    try:
        with child_processes.none_left(), tempfile.TemporaryDirectory() as empty:
            done = child_processes.run(
                command,
                TIME_LIMIT,
                env=inherited | hidden | {"XDG_CACHE_HOME": cache or empty},
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
    except subprocess.TimeoutExpired as expired:
        raise ProgramFailed(f"no result within {TIME_LIMIT} s") from expired
    output, errors = done.stdout, done.stderr
    line = next((text for text in reversed(output.splitlines()) if text.startswith("{")), None)
    if done.returncode or line is None:
        # Some programs print a line of symbols at the end.
        lines = [text for text in (errors.strip() or output).splitlines() if re.search(r"\w", text)]
        said = lines[-1] if lines else "no output"
        raise ProgramFailed(f"status {done.returncode}: {said[:200]}")
    return json.loads(line)


def seconds(line: Mapping[str, Any]) -> float:
    """Seconds per round of one run of a program."""
    return statistics.median(line["seconds_per_round"])


if __name__ == "__main__":
    sys.exit(command())
