"""Has anything become slower? A short measurement against what was recorded on this machine.

    python benchmarks/check.py

Only ratios are compared, ours against a peer's and our share of the GEMM peak; a machine's speed is
not. Exit status 0: nothing is slower; 1: one line for each ratio that fell by more than noise; 2: the
machine is too busy to judge, or nothing comparable was recorded or measured.
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

import fedavg_cnn
import machine
import records
import side_by_side
from side_by_side import OURS, PROGRAMS, ProgramFailed, Setting

WORKLOADS = ("digits", "cnn_small")
TURNS, GEMM_REPETITIONS = 3, 5
GEMM_ROUNDS = ("small", "large")
# A record may have a small spread by luck.
LEAST_NOISE = 0.05
SLOWER, CANNOT_JUDGE = 1, 2


class Ratio(NamedTuple):
    """A figure that a machine's speed cancels out of; the larger, the faster are we.

    Attributes:
      name: what is compared with what.
      median: over turns or repetitions, as are the others.
      lowest: the smallest.
      highest: the largest.
    """

    name: str
    median: float
    lowest: float
    highest: float


def main() -> int:
    """Measures and compares; returns the exit status."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        return compare_with_records()
    except ProgramFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return SLOWER
    except ValueError as error:  # a bad record
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_JUDGE


def compare_with_records() -> int:
    """Measures what was recorded on this machine once more; returns the exit status."""
    device = machine.device()
    recorded = {r["workload"]: r for r in records.newest() if r["device"] == device}
    wanted = [name for name in (fedavg_cnn.RECORD, *WORKLOADS) if name in recorded]
    if not wanted:
        print(f"nothing to compare with was recorded on {device}: make bench", file=sys.stderr)
        return CANNOT_JUDGE
    gemm = measure_gemm()
    if fault := implausible(gemm["gemm_gflops"], machine.cores(), machine.vector_lanes()):
        print(fault, file=sys.stderr)
        return CANNOT_JUDGE
    measured = [gemm, *(measure_again(recorded[name]) for name in WORKLOADS if name in recorded)]
    return judge(
        [ratio for name in wanted for ratio in ratios(recorded[name])],
        [ratio for record in measured for ratio in ratios(record)],
    )


def judge(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> int:
    """Prints what was compared and what fell; returns the exit status."""
    found, present = findings(recorded, measured), {ratio.name: ratio for ratio in measured}
    for old in recorded:
        new = present.get(old.name)
        now = f"{new.median:.3g}" if new else "not measured"
        print(
            f"{old.name}: {now}, recorded {old.median:.3g} ({old.lowest:.3g} to {old.highest:.3g})"
        )
    for finding in found:
        print(f"SLOWER: {finding}", file=sys.stderr)
    if found:
        return SLOWER
    if not {ratio.name for ratio in recorded} & set(present):
        print("nothing that was recorded could be measured", file=sys.stderr)
        return CANNOT_JUDGE
    return 0


def findings(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> list[str]:
    """One line for each measured ratio that lies below the recorded one by more than noise.

    Noise is the recorded ratio's spread, from its lowest to its highest, and at least LEAST_NOISE of
    it. Ratios that are in one of the two only are left out.
    """
    present, found = {ratio.name: ratio for ratio in measured}, []
    for old in recorded:
        new = present.get(old.name)
        noise = max(old.highest - old.lowest, LEAST_NOISE * old.median)
        if new is not None and not new.median >= old.median - noise:
            found.append(
                f"{old.name} fell from {old.median:.3g} to {new.median:.3g}, "
                f"by more than the noise of {noise:.3g}"
            )
    return found


def ratios(record: Mapping[str, Any]) -> Iterator[Ratio]:
    """The ratios that a record of side_by_side.py or fedavg_cnn.py holds."""
    if record["kind"] == fedavg_cnn.KIND:
        for workload, own in record["rounds"].items():
            shares = own["share_of_peak"]
            name = f"{fedavg_cnn.name_of(workload)}: share of the GEMM peak"
            yield Ratio(name, statistics.median(shares), min(shares), max(shares))
        return
    for peer, own in record["programs"].items():
        if peer != OURS and "error" not in own:
            spread = (own["ratio_minimum"], own["ratio_maximum"])
            yield Ratio(f"{record['workload']}: {peer} / {OURS}", own["ratio_to_ours"], *spread)


def implausible(gflops: Sequence[float], cores: int, lanes: int | None) -> str | None:
    """One line where the GEMM peak is not what such a machine can do, else None.

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

    A core has two units for fused multiply-adds, so four FLOPs per lane and cycle, and at most 6 GHz.
    One that gets less than 0.3 GHz' worth of them is shared with others.
    """
    narrowest, widest = (4, 16) if lanes is None else (lanes, lanes)
    return 1.25 * narrowest, 24.0 * widest


def measure_gemm() -> dict[str, Any]:
    """A short run of fedavg_cnn.py."""
    script = Path(__file__).parent / "fedavg_cnn.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), f"--repetitions={GEMM_REPETITIONS}"]
        command += ["--workloads", *GEMM_ROUNDS, f"--results={folder}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
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
    sys.exit(main())
