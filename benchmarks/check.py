"""Has anything become slower? Compares a short measurement with the records of this machine.

    python benchmarks/check.py [--workload digits cnn_small cnn_large]

Only ratios are compared, since a machine's speed cancels out of them: a peer's time divided by ours, and
our share of the GEMM peak. A ratio may fall by the noise of the recorded turns and of those measured
now.

Exit status 0: every recorded ratio was measured and none has fallen. 1: some ratios fell by more than
the noise; there is a line for each. Or a program failed that was measured before. 2: no ratio fell, but
not all could be compared: the machine is too busy, a program is not installed, or there is no comparable
record. The last line names the reason.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import fedavg_cnn
import machine
import records
import side_by_side
from side_by_side import OURS, PROGRAMS, ROUNDS, ProgramFailed, Setting

from fedcodist.core import child_processes

WORKLOADS = ("digits", "cnn_small", "cnn_large")
TURNS, GEMM_REPETITIONS = 5, 5
# Shares of the recorded median. At least the first is allowed, since turns may agree by luck. If the
# noise reaches the second, a fall within it is not judged.
LEAST_NOISE, MOST_NOISE = 0.05, 0.5
SLOWER, CANNOT_JUDGE = 1, 2


class Ratio(NamedTuple):
    """A figure out of which a machine's speed cancels; it is larger if we are faster.

    Attributes:
      name: what is compared with what.
      values: one for each turn or repetition.
    """

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over turns."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Twice the median distance from the median, which one disturbed turn of three does not widen.

        For many turns it is the distance of the quartiles.
        """
        return 2 * statistics.median(abs(value - self.median) for value in self.values)


def main() -> int:
    """Measures and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workload", nargs="+", choices=sorted(ROUNDS), help=f"default: {' '.join(WORKLOADS)}"
    )
    try:
        return compare_with_records(parser.parse_args().workload)
    except ProgramFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return SLOWER
    except ValueError as error:  # a bad record
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_JUDGE


def compare_with_records(asked: Sequence[str] | None) -> int:
    """Measures what was recorded on this machine once more; returns the exit status.

    Args:
      asked: workloads that must have records; None takes those of WORKLOADS that have them.
    """
    device = machine.device()
    recorded = {r["workload"]: r for r in records.newest() if r["device"] == device}
    workloads = [name for name in asked or WORKLOADS if name in recorded]
    wanted = [*([fedavg_cnn.RECORD] if fedavg_cnn.RECORD in recorded else []), *workloads]
    if lacking := [name for name in asked or () if name not in recorded]:
        print(f"{lacking[0]} was not recorded on {device}: make bench", file=sys.stderr)
        return CANNOT_JUDGE
    if not wanted:
        print(f"nothing to compare with was recorded on {device}: make bench", file=sys.stderr)
        return CANNOT_JUDGE
    shares = recorded[fedavg_cnn.RECORD]["rounds"] if fedavg_cnn.RECORD in recorded else ["small"]
    gemm = measure_gemm(list(shares))
    if fault := implausible(gemm["gemm_gflops"], machine.cores(), machine.vector_lanes()):
        print(fault, file=sys.stderr)
        return CANNOT_JUDGE
    measured = [gemm, *(measure_again(recorded[name]) for name in workloads)]
    return judge(
        [ratio for name in wanted for ratio in ratios(recorded[name])],
        [ratio for record in measured for ratio in ratios(record)],
    )


def judge(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> int:
    """Prints what was compared, what fell and what is undecided; returns the exit status."""
    present = {ratio.name: ratio for ratio in measured}
    for old in recorded:
        if new := present.get(old.name):
            noise = allowed_fall(old, new)
            print(
                f"{old.name}: {new.median:.3g}, recorded {old.median:.3g}; may fall by {noise:.3g} "
                f"({noise / old.median:.0%})"
            )
        else:
            print(f"{old.name}: not measured, recorded {old.median:.3g}")
    found = findings(recorded, measured)
    for finding in found:
        print(f"SLOWER: {finding}", file=sys.stderr)
    unknown = doubts(recorded, measured)
    if unknown:
        few = f"{len(unknown)} of {len(recorded)} recorded ratios could not be judged"
        print(f"NOT JUDGED: {few}: {'; '.join(unknown)}", file=sys.stderr)
    elif not found:
        print(f"none of {len(recorded)} recorded ratios is slower")
    return SLOWER if found else CANNOT_JUDGE if unknown else 0


def allowed_fall(recorded: Ratio, measured: Ratio) -> float:
    """The noise of two medians: the spreads of both, and at least LEAST_NOISE of the recorded one."""
    return max(recorded.spread + measured.spread, LEAST_NOISE * recorded.median)


def findings(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> list[str]:
    """One line for each measured ratio that lies below the recorded one by more than noise.

    Ratios that are in only one of the two are left out.
    """
    present, found = {ratio.name: ratio for ratio in measured}, []
    for old in recorded:
        new = present.get(old.name)
        if new is None:
            continue
        noise = allowed_fall(old, new)
        if not new.median >= old.median - noise:
            found.append(
                f"{old.name} fell from {old.median:.3g} to {new.median:.3g}, "
                f"by more than the noise of {noise:.3g}"
            )
    return found


def doubts(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> list[str]:
    """Each recorded ratio that was not measured, or that fell while its turns differ too much."""
    present, found = {ratio.name: ratio for ratio in measured}, []
    for old in recorded:
        new = present.get(old.name)
        if new is None:
            found.append(f"{old.name} was not measured")
            continue
        noise = allowed_fall(old, new)
        if noise >= MOST_NOISE * old.median and old.median - noise <= new.median < old.median:
            found.append(f"{old.name} is too noisy")
    return found


def ratios(record: Mapping[str, Any]) -> Iterator[Ratio]:
    """The ratios that a record of side_by_side.py or fedavg_cnn.py holds."""
    if record["kind"] == fedavg_cnn.KIND:
        for workload, own in record["rounds"].items():
            name = f"{fedavg_cnn.name_of(workload)}: share of the GEMM peak"
            yield Ratio(name, tuple(own["share_of_peak"]))
        return
    ours = record["programs"][OURS]["seconds_per_round"]
    for peer, own in record["programs"].items():
        if peer != OURS and "error" not in own:
            turns = zip(own["seconds_per_round"], ours, strict=True)
            values = tuple(theirs / mine for theirs, mine in turns)
            yield Ratio(f"{record['workload']}: {peer} / {OURS}", values)


def implausible(gflops: Sequence[float], cores: int, lanes: int | None) -> str | None:
    """One line if such a machine cannot have this GEMM peak, otherwise None.

    Args:
      gflops: of each repetition, all cores together.
      cores: that took part.
      lanes: float32 values of a vector, None where that is not known.
    """
    lowest, highest = plausible_gflops(lanes)
    each = statistics.median(gflops) / cores
    if lowest <= each <= highest:
        return None
    vectors = "vectors of unknown width" if lanes is None else f"vectors of {lanes} float32"
    return (
        f"too busy to judge: the GEMM peak is {each:.3g} GFLOP/s per core, and {lowest:.3g} to "
        f"{highest:.3g} are plausible with {vectors}"
    )


def plausible_gflops(lanes: int | None) -> tuple[float, float]:
    """GFLOP/s of one core: 10 to 192 with AVX2, 20 to 384 with AVX-512.

    A core has two units for fused multiply-adds, that is, four FLOPs per lane and cycle, and at most 6
    GHz. A core that reaches less than 0.3 GHz of them is shared with other programs.
    """
    narrowest, widest = (4, 16) if lanes is None else (lanes, lanes)
    return 1.25 * narrowest, 24.0 * widest


def measure_gemm(rounds: Sequence[str]) -> dict[str, Any]:
    """A short run of fedavg_cnn.py on some of its rounds."""
    script = Path(__file__).parent / "fedavg_cnn.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), f"--repetitions={GEMM_REPETITIONS}"]
        command += ["--workloads", *rounds, f"--results={folder}"]
        done = child_processes.run(
            command,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if done.returncode:
            said = (done.stderr.strip() or "no output").splitlines()[-1]
            raise ProgramFailed(f"fedavg_cnn.py: status {done.returncode}: {said}")
        (record,) = records.newest(Path(folder))
    return record


def measure_again(record: Mapping[str, Any]) -> dict[str, Any]:
    """A few turns of the programs that a record holds, with their recorded settings."""
    chosen = {
        name: Setting(own["processes"], own["threads"])
        for name, own in record["programs"].items()
        if "error" not in own
        and name in PROGRAMS
        and PROGRAMS[name].hindrance(record["workload"]) is None
    }
    job = side_by_side.make_job(record["workload"], TURNS)
    programs = {name: PROGRAMS[name] for name in chosen}
    measured = side_by_side.compare(programs, chosen, job)
    return {"kind": side_by_side.KIND, "workload": record["workload"], "programs": measured}


if __name__ == "__main__":
    sys.exit(child_processes.until_interrupted(main, "interrupted."))
