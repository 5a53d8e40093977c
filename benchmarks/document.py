"""BENCHMARKS.md from the records in results/benchmarks/.

    python benchmarks/document.py [--check] [--results results/benchmarks] [--output BENCHMARKS.md]

The newest record of each workload and device is shown. Explanations of the numbers are copied from
`notes.md` beside the records. The text is printed. --check compares and writes nothing.
"""

import argparse
import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import breakdown
import cold_start
import distillation_cost
import fedavg_cnn
import overhead
import privacy_cost
import program_size
import records
import scale
import side_by_side
import svd_cost
import time_to_result
from side_by_side import HTFLLIB, OURS, PROGRAMS

Record = Mapping[str, Any]

HEADER = """\
<!-- Written by `python benchmarks/document.py` from results/benchmarks/; edit notes.md there. -->

# Benchmarks

This page shows how long one waits for a result, and how long a round takes: with this library, with
other simulators, and with a plain PyTorch loop, for the same work. `make bench-peers` installs the
others. `make bench` repeats all measurements and writes this page. It leaves out the workloads htfl_* if
the variable HTFLLIB names no folder with HtFLlib's code: `make bench-peers` installs what this code
requires, and `benchmarks/peers/htfllib/program.py` says how to get it. `make bench-check` says whether
rounds of FedAvg (digits, cnn_small, cnn_large) have become slower. This command compares a single
program with ours: `python benchmarks/side_by_side.py --only fedjax`. The other names are `torch_loop`,
`pfl_research`, `flower` and `htfllib`.

- All programs start from the same weights and train the same clients on the same examples.
  `python benchmarks/side_by_side.py --check` compares their weights after one round, in which all visit
  the examples in the same order, and writes down the result.
- Side by side, each program first tries several divisions of the cores into processes and threads, and
  continues with its fastest. Then the programs take turns, each time in new processes. Figures are
  medians over turns, with the smallest and the largest value in brackets. A time to the result without
  brackets is of one turn.
- **Ratios** are a program's seconds divided by ours in the same turn. If a ratio is above 1, we are
  faster.
- **Warm-up** is how much longer the rounds before the timed rounds took than timed rounds do. Most
  of ours is compilation.
- **Peak** is the sum of the largest resident memory of each process of a program. Memory that processes
  share counts in each.
- Pixels and labels are random, because speed does not depend on what images show.
"""
NOTHING = "Nothing was measured yet."
HTFL_BASE = "htfl_local_only"
PLOTS = Path("docs/benchmarks")  # beside the page
_MHD = (
    "Multi-Headed Distillation, 100 steps (a round) of clients on a complete graph, 64 private and 64 "
    "public images a step:"
)
DESCRIPTIONS = {
    "cnn_small": "FedAvg, the codistillation paper's small CNN (109,348 parameters) on 24x24 images; "
    "20 clients of 100 images.",
    "cnn_large": "cnn_small with the paper's large CNN (410,084 parameters).",
    "private": "cnn_small with user-level differential privacy: clients have equal weights, their "
    "updates are clipped to a norm that about half of them exceed in the first round, and the sum of "
    "updates gets Gaussian noise.",
    "digits": "FedAvg, a network of 4,810 parameters on 8x8 images; 20 clients of 100 images.",
    "emnist": "FedAvg, the CNN of the federated EMNIST benchmarks (1,206,590 parameters) on 28x28 "
    "images; 20 of 3,400 clients of 1 to 300 images.",
    "resnet20": "FedAvg, ResNet-20 with batch normalisation (272,474 parameters) on 32x32 images; "
    "8 clients of 100 images; batch statistics are averaged.",
    "lstm_small": "FedAvg, the codistillation paper's small LSTM (1,984,348 parameters), FedJAX's own "
    "Stack Overflow model: 20 clients of 100 to 984 sentences (448 in the mean) of up to 20 of 10,004 "
    "tokens, 20 sentences a step; random words, as many in a sentence as on Stack Overflow in the mean. "
    "All programs get sentences filled up with padding, of which ours alone computes no logits.",
    "lstm_large": "lstm_small with the paper's large LSTM (4,278,644 parameters).",
    "merged": "MergedCodist, the small and the large CNN; 20 clients of 100 images for each, then 32 "
    "steps of distillation of 128 images; both models are evaluated on every batch.",
    "periodic": "PeriodicCodist, merged's models and clients, with 200 steps of distillation in every "
    "round.",
    "fed_sdd": "FedSDD, four ResNet-20 (K = 4, R = 1) with two clients of 100 images each, then 8 steps "
    "of distillation of 128 images from all four into the first.",
    "fed_md": "FedMD, a round of collaboration of ten parties with the paper's ten networks, a quarter "
    "as wide, on 32x32 images, without dropout: logits of 1,024 public images, then 8 steps of digest "
    "of 128 images and 5 of revisit of 20 private ones.",
    "mhd": f"{_MHD} the codistillation paper's small CNN with three auxiliary heads, eight clients, one "
    "teacher from a pool of eight checkpoints.",
    "mhd_digits": f"{_MHD} a network of 4,810 parameters with three auxiliary heads on 8x8 images, "
    "eight clients, one teacher from a pool of eight checkpoints.",
    "mhd_64": f"{_MHD} mhd_digits' network, 64 clients, one teacher from a pool of 64 checkpoints.",
    "fed_kd": "FedKD, four clients of 100 images: the codistillation paper's large CNN as teacher, its "
    "small one as student, five steps of 20 images with adaptive weights and hidden states through "
    "learned maps; students' changes by exact SVD both ways.",
    "htfl_local_only": "Eight clients of 100 images 32x32 with four networks, two each: HtFLlib's CNN "
    "(878,538 parameters) and its ResNet-4, ResNet-6 and ResNet-8 (88,650 to 1,237,834), embeddings of "
    "512; ten steps of ten images, SGD. Local training alone.",
    "htfl_fd": "htfl_local_only's clients with FD: mean logits of each label.",
    "htfl_fml": "htfl_local_only's clients with FML: each trains a copy of a shared CNN besides.",
    "htfl_fed_kd_parties": "htfl_local_only's clients with FedKD: each is the teacher of a copy of a "
    "shared CNN.",
    "htfl_lg_fed_avg": "htfl_local_only's clients with LG-FedAvg: the mean of their heads.",
    "htfl_fed_proto": "htfl_local_only's clients with FedProto: mean embeddings of each label.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if --check finds a difference, or 2 for a bad record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=records.FOLDER)
    parser.add_argument("--output", type=Path, default=records.ROOT / "BENCHMARKS.md")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    notes = options.results / "notes.md"
    try:
        found = records.newest(options.results)
        text = render(found, notes.read_text(encoding="utf-8") if notes.exists() else "")
        drawn = plots(found)
        if options.check:
            return _check(text, drawn, options.output)
        for path, draw in drawn.items():
            (options.output.parent / path).parent.mkdir(parents=True, exist_ok=True)
            draw().savefig(options.output.parent / path, dpi=110)
        options.output.write_text(text, encoding="utf-8")
    except (KeyError, TypeError) as error:
        print(f"error: a record in {options.results} is incomplete: {error!r}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print('error: plots need matplotlib: pip install "fedcodist[plot]"', file=sys.stderr)
        return 2
    print(text)
    return 0


def plots(found: Sequence[Record]) -> dict[Path, Callable[[], Any]]:
    """Path of a plot beside the page -> function that draws it."""
    return {
        _plot_path(record): functools.partial(distillation_cost.plot, record)
        for record in found
        if record["kind"] == distillation_cost.KIND
    } | {
        _plot_path(own[0]): functools.partial(time_to_result.plot, own)
        for own in _waits(found).values()
    }


def _waits(found: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of times to the result, by device, in the order of workloads."""
    order = list(DESCRIPTIONS)
    waits = [record for record in found if record["kind"] == time_to_result.KIND]
    if unknown := [r["measured"] for r in waits if r["measured"] not in DESCRIPTIONS]:
        raise ValueError(f"a record's workload is {unknown[0]!r}, not one of {order}.")
    waits.sort(key=lambda record: order.index(record["measured"]))
    devices = dict.fromkeys(record["device"] for record in waits)
    return {device: [r for r in waits if r["device"] == device] for device in devices}


def render(found: Sequence[Record], notes: str = "") -> str:
    """The whole page; the same records give the same text."""
    found = [_of_turns(record) for record in found]
    parts = [HEADER]
    for device, own in _waits(found).items():
        parts += [f"## Time to the result: {device}", *waiting(own)]
    for device in dict.fromkeys(record["device"] for record in found):
        own = [
            record
            for record in found
            if record["device"] == device and record["kind"] != time_to_result.KIND
        ]
        if not own:
            continue
        parts += [f"## {device}", *_device(own)]
    if not found:
        parts.append(NOTHING)
    if notes.strip():
        parts += ["## Notes", notes]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _of_turns(record: Record) -> Record:
    """The record with medians and ratios of its turns, whatever it says of them."""
    if record["kind"] != side_by_side.KIND or "programs" not in record:
        return record
    turns = {
        name: own["seconds_per_round"]
        for name, own in record["programs"].items()
        if "error" not in own
    }
    figures = {
        name: side_by_side.over_turns(seconds, turns[OURS]) for name, seconds in turns.items()
    }
    programs = {name: own | figures.get(name, {}) for name, own in record["programs"].items()}
    return {**record, "programs": programs}


def _device(found: Sequence[Record]) -> Iterable[str]:
    by_kind = {
        kind: [record for record in found if record["kind"] == kind]
        for kind in (
            side_by_side.KIND,
            side_by_side.CHECK,
            fedavg_cnn.KIND,
            breakdown.KIND,
            cold_start.KIND,
            program_size.KIND,
            overhead.KIND,
            privacy_cost.KIND,
            scale.KIND,
            distillation_cost.KIND,
            svd_cost.KIND,
        )
    }
    if unknown := [record for record in found if record["kind"] not in by_kind]:
        raise ValueError(f"a record's kind is {unknown[0]['kind']!r}, not one of {list(by_kind)}.")
    compared = by_kind[side_by_side.KIND]
    if unknown := [r["workload"] for r in compared if r["workload"] not in DESCRIPTIONS]:
        raise ValueError(f"a record's workload is {unknown[0]!r}, not one of {list(DESCRIPTIONS)}.")
    if compared:
        yield "### Side by side"
        compared = sorted(compared, key=lambda r: list(DESCRIPTIONS).index(r["workload"]))
        yield overview(compared)
        first = next((r for r in compared if r["workload"] in side_by_side.HTFL), None)
        for record in compared:
            if record is first and record["workload"] != HTFL_BASE:
                # The others are described by what they add to it.
                yield f"The workloads htfl_* extend {HTFL_BASE}. {DESCRIPTIONS[HTFL_BASE]}"
            yield f"#### {record['workload']}"
            yield DESCRIPTIONS[record["workload"]]
            yield programs(record)
            rounds = record["rounds_per_repetition"]
            about = f"{record['turns']} turns of {rounds} round{'s' * (rounds != 1)}"
            if "peak_tflops" in record:
                about += (
                    f"; MFU: {record['gflop_per_round']:,.0f} GFLOP of a round's matrix products and "
                    f"direct convolutions by its seconds and by {record['peak_tflops']:g} TFLOP/s"
                )
            yield f"{about}; {origin(record)}"
    for heading, kind, section in (
        ("The same computation", side_by_side.CHECK, agreement),
        ("Against the GEMM peak", fedavg_cnn.KIND, gemm),
        ("Where the time goes", breakdown.KIND, parts),
        ("Cold start", cold_start.KIND, starts),
        ("Size of a round's program", program_size.KIND, sizes),
        ("Evaluating and logging", overhead.KIND, looking),
        ("The cost of privacy", privacy_cost.KIND, protecting),
        ("Scale", scale.KIND, growth),
        ("Distillation with more clients", distillation_cost.KIND, teaching),
        ("SVD in a round of FedKD", svd_cost.KIND, decomposing),
    ):
        for record in by_kind[kind]:
            yield f"### {heading}"
            yield from section(record)
            yield origin(record)


def overview(found: Sequence[Record]) -> str:
    """Our seconds per round and the peers' ratios, a row per workload."""
    measured = {name for record in found for name in record["programs"]}
    peers = [name for name in PROGRAMS if name not in (OURS, HTFLLIB)]
    peers += [HTFLLIB] if HTFLLIB in measured else []
    rows = []
    for record in found:
        own = record["programs"]
        ratios = [_ratio(own[peer]) if peer in own else "" for peer in peers]
        rows.append([record["workload"], _three(own[OURS]["median"]), *ratios])
    return _table(["workload", f"{OURS}, s/round", *(f"{peer} / ours" for peer in peers)], rows)


def programs(record: Record) -> str:
    """All figures of one workload, a row per program."""
    rows = []
    headings = ["program", "version", "processes x threads", "s/round", "/ ours", "warm-up, s"]
    headings.append("peak, MB")
    has_device = any("peak_device_mb" in own for own in record["programs"].values())
    headings += ["on the device, MB"] if has_device else []
    headings += ["MFU"] if "peak_tflops" in record else []
    for name, own in record["programs"].items():
        if "error" in own:
            rows.append([name, own["error"], *[""] * (len(headings) - 2)])
            continue
        peak = own.get("peak_device_mb")
        more = [f"{peak:,.0f}" if peak is not None else ""] if has_device else []
        if "peak_tflops" in record:
            more.append(f"{side_by_side.mfu(record, own['median']):.1%}")
        rows.append(
            [
                name,
                own["version"],
                f"{own['processes']} x {own['threads']}",
                _spread(own["median"], own["minimum"], own["maximum"]),
                _ratio(own),
                f"{own['compile_or_warmup_seconds']:.1f}",
                f"{own['peak_rss_mb']:,.0f}",
                *more,
            ]
        )
    return _table(headings, rows, texts=2)


def waiting(found: Sequence[Record]) -> Iterable[str]:
    """Times to the result and memory on one device, a row per workload."""
    rounds = "; ".join(sorted({f"{record['rounds']} rounds" for record in found}))
    yield (
        f"From the start of a program to its end after {rounds}, with imports, reading of data and "
        "compilation. In a *cold* start nothing is found compiled. *Again* is the next start, which "
        "reads the compiled programs that ours keeps on disk; the peers keep none. Nothing is "
        "evaluated. Each program has the fastest of the divisions of the cores that it was tried with. "
        "Exceptions are in the notes. Ratios are of cold starts."
    )
    yield f"![Times to the result]({_plot_path(found[0]).as_posix()})"
    measured = {name for r in found for name, own in r["programs"].items() if "cold" in own}
    peers = [name for name in PROGRAMS if name in measured and name != OURS]
    times, peaks = [], []
    for record in found:
        own = record["programs"]
        ours = [_over(own[OURS]["cold"]), _over(own[OURS]["warm"])]
        times.append([record["measured"], *ours, *(_waited(record, peer) for peer in peers)])
        memory = [_peak(own[name]) if name in own else "" for name in (OURS, *peers)]
        peaks.append([record["measured"], *memory])
    ratios = [f"{peer} / ours" for peer in peers]
    yield _table(["workload", f"{OURS} cold, s", "again, s", *ratios], times)
    yield "Peak resident memory of all processes of a program together, MB."
    yield _table(["workload", OURS, *peers], peaks)
    yield from dict.fromkeys(origin(record) for record in found)


def _waited(record: Record, peer: str) -> str:
    own = record["programs"].get(peer, {})
    if "error" in own:
        return own["error"].split(":")[0]
    return _over(time_to_result.ratios(record, peer)) if own else ""


def _peak(own: Mapping[str, Any]) -> str:
    return own["error"].split(":")[0] if "error" in own else f"{own['peak_mb']:,.0f}"


def agreement(record: Record) -> Iterable[str]:
    """How far programs' weights are from the reference's, a row per workload."""
    lines = record["checked"]
    known = [name for name in PROGRAMS if name in {line["program"] for line in lines}]
    text = (
        f"Weights after one round against those of {side_by_side.REFERENCE} in one thread: the largest "
        "distance of an array from the reference's, by the length of the reference's update; of each "
        f"program's settings the worst. {record['tolerance']:g} and less counts as the same."
    )
    if any(line["workload"] in side_by_side.HTFL for line in lines):
        text += (
            " Of the workloads htfl_* HtFLlib is the reference, after two rounds, of htfl_fed_proto "
            "after one."
        )
    if any(line["workload"] in side_by_side.PRIVATE for line in lines):
        text += (
            " Private rounds are compared without their noise, since each program draws its own."
        )
    yield text
    rows = []
    for workload in DESCRIPTIONS:
        if own := [line for line in lines if line["workload"] == workload]:
            found = [[line for line in own if line["program"] == name] for name in known]
            precision = "float64" if own[0]["double"] else "float32"
            commit = f"{own[0]['date']}, {_commit(own[0]['commit'])}"
            rows.append([workload, precision, commit, *(_difference(each) for each in found)])
    yield _table(["workload", "in", "checked", *known], rows, texts=3)


def _difference(lines: Sequence[Mapping[str, Any]]) -> str:
    """The worst of a program's settings."""
    if not lines:
        return ""
    if "hindrance" in lines[0]:
        return lines[0]["hindrance"].split(":")[0]
    if failed := [line for line in lines if "error" in line]:
        return f"failed with {failed[0]['processes']} x {failed[0]['threads']}"
    worst = max(line["difference"] for line in lines)
    return f"{worst:.0e}" + ("" if all(map(side_by_side.agrees, lines)) else " DIFFERS")


def gemm(record: Record) -> Iterable[str]:
    """Rounds as shares of the machine's peak in matrix products of the same run."""
    peaks = record["gemm_gflops"]
    yield (
        f"The product of float32 matrices of 2048 x 2048, on all cores, reaches {_over(peaks)} GFLOP/s; "
        f"{record['processes']} processes, {len(peaks)} repetitions in turn with the rounds. A round's "
        "GFLOP are those of direct convolutions."
    )
    rows = [
        [
            fedavg_cnn.name_of(workload),
            f"{own['gflop']:.1f}",
            _over(own["seconds"]),
            _over([100 * share for share in own["share_of_peak"]]),
            f"{own['first_call_seconds']:.1f}",
        ]
        for workload, own in record["rounds"].items()
    ]
    yield _table(["round", "GFLOP", "s/round", "% of the peak", "first call, s"], rows)


def parts(record: Record) -> Iterable[str]:
    """Milliseconds of a round by what they are for, a column per workload."""
    yield (
        f"Milliseconds of a round on one core, of {record['rounds']} rounds under the profiler, sorted "
        "by the scopes that each instruction of the compiled program was made of; *dispatch* is what "
        "is left."
    )
    workloads = record["workloads"]
    names = dict.fromkeys(name for own in workloads.values() for name in own["parts"])
    rows = [
        [name, *(_milliseconds(own["parts"].get(name), own) for own in workloads.values())]
        for name in names
    ]
    for heading, key in (("traced", "traced_milliseconds"), ("without profiler", "milliseconds")):
        rows.append([heading, *(_three(own[key]) for own in workloads.values())])
    yield _table(["", *workloads], rows)


def starts(record: Record) -> Iterable[str]:
    """Seconds of imports and starts, beside their targets."""
    yield (
        "From the command to its end or to the result of the first round of the small CNN, in new "
        f"processes ({record['processes']}). The import is of all public names, JAX with them. The "
        "first start has an empty folder for compiled programs, the second one what the first left."
    )
    if any(name.startswith("command") for name in record["seconds"]):
        yield (
            "*Command* is `python -m experiments.main` with a config of one such round, until it says "
            "that the round is done: it reads and checks a prepared folder of made-up images, evaluates "
            "before and after the round and writes a run folder. The others are the library alone."
        )
    rows = [
        [name, _over(own), f"< {record['targets'][name]:g}"]
        for name, own in record["seconds"].items()
    ]
    yield _table(["", "seconds", "target"], rows)


def sizes(record: Record) -> Iterable[str]:
    """Instructions of each workload's round."""
    yield (
        "HLO instructions of a round on a processor before XLA simplifies them; what is called several "
        "times counts as often. Compilation takes longer with more of them."
    )
    lines = program_size.as_listed(record["counted"])
    yield _table(
        ["workload", "counted", "instructions"],
        [
            [
                line["workload"],
                f"{line['date']}, {_commit(line['commit'])}",
                f"{line['instructions']:,}",
            ]
            for line in lines
        ],
        texts=2,
    )


def looking(record: Record) -> Iterable[str]:
    """The time that evaluating and logging add to a round."""
    yield (
        f"Runs of {record['rounds']} rounds of the small CNN by `run_experiment` in "
        f"{record['processes']} processes, with a run folder: evaluated at both ends; evaluated after "
        "every round, with a line in `metrics.jsonl` and a callback; and so with another split. Splits "
        "are of so few images that what is added is the loop's own time: the arithmetic of evaluating "
        "more images comes on top, checkpoints do too, and of a shorter round the same time is a larger "
        "share. Each way is compared with the one before it; the target is less than "
        f"{record['target']:.0%} of a round, and the program fails beyond it."
    )
    added = overhead.shares(record)
    rows = []
    for way, own in record["seconds_per_round"].items():
        shares = [100 * share for share in added.get(way, [])]
        more = f"{statistics.median(shares):.1f}" if shares else ""
        if way in overhead.beyond_target(record):
            more += " (beyond the target)"
        rows.append([way, _over([1000 * seconds for seconds in own]), more])
    yield _table(["evaluated", "ms/round", "adds, % of a round"], rows)


def protecting(record: Record) -> Iterable[str]:
    """A private round beside a plain one."""
    found = privacy_cost.ratios(record)
    yield (
        f"Rounds of the workloads cnn_small and private, in turn in {record['processes']} processes, "
        f"{len(found)} turns of {record['rounds']} rounds of each. Both train the same clients; in a "
        "private round the update of each client is clipped, and their sum gets Gaussian noise. The "
        f"target is at most {record['target']:.0%} more in the median, and the program fails beyond it."
    )
    rows = []
    for kind, own in record["seconds_per_round"].items():
        by_plain = _over(found) if kind == privacy_cost.PRIVATE else ""
        if by_plain and privacy_cost.beyond_target(record):
            by_plain += " (beyond the target)"
        rows.append([kind, _over([1000 * seconds for seconds in own]), by_plain])
    yield _table(["round", "ms/round", "by the plain one"], rows)


def growth(record: Record) -> Iterable[str]:
    """How a round's time and memory grow, a row per configuration."""
    yield (
        "Rounds of `run_experiment` on memory-mapped data: digits with 20 examples per client, the "
        "small CNN with 100. Gathering is the time that the host takes for a round's examples with "
        "nothing beside it; while rounds are computed the next one's are gathered. What is hidden of "
        "it is the part by which rounds do not take longer than those whose examples lie ready. Own "
        "memory is what is resident at the end without the pages of files that were read, which the "
        "system takes back when it needs them."
    )
    headings = ["grows", "network", "clients", "cohort", "devices", "training", "data", "ms/round"]
    rows = [
        [
            group,
            own["network"],
            f"{own['clients']:,}",
            f"{own['cohort']:,}",
            str(own["devices"]),
            scale.way(own),
            "streamed" if own["streamed"] else "on the device",
            _over([1000 * seconds for seconds in own["seconds_per_round"]]),
            *_gathering(own),
            f"{statistics.median(own['peak_rss_mb']):,.0f}",
            _own_memory(own),
        ]
        for group, configurations in record["groups"].items()
        for own in configurations
        if group not in ("memory", "seeds")
    ]
    if rows:
        more = ["ready, ms/round", "gathering, ms", "hidden", "peak, MB", "own, MB"]
        yield _table([*headings, *more], rows, texts=2)
    if memory := record["groups"].get("memory"):
        yield (
            "Memory against the number of clients that a device trains at once: what the compiled "
            "program says that it needs with its data, by which the library chooses that number, and "
            f"the peak of the whole process. Cohorts of {memory[0]['cohort']} clients, one device."
        )
        yield _ways(memory)
    if seeds := record["groups"].get("seeds"):
        yield (
            "Several seeds in one program against one: what a round takes, and what it takes of each "
            f"seed, to compare with as many runs of one. Cohorts of {seeds[0]['cohort']} clients, one "
            "device."
        )
        yield _ways(seeds)


def _ways(configurations: Sequence[Mapping[str, Any]]) -> str:
    """Time and memory of a round, a row per way of training the same clients."""
    has_seeds = any(own.get("seeds", 1) > 1 for own in configurations)
    has_device = any(_peak_on_device(own) for own in configurations)
    headings = ["training", "network", "ms/round", *(["ms/round and seed"] if has_seeds else [])]
    headings += ["program, MB", "peak, MB", *(["peak on the device, MB"] if has_device else [])]
    rows = []
    for own in configurations:
        times = [1000 * seconds for seconds in own["seconds_per_round"]]
        row = [scale.way(own), own["network"], _over(times)]
        if has_seeds:
            row.append(_three(statistics.median(times) / own.get("seeds", 1)))
        row += [f"{own['program_mb']:,.1f}", f"{statistics.median(own['peak_rss_mb']):,.0f}"]
        rows.append([*row, *([_peak_on_device(own)] if has_device else [])])
    return _table(headings, rows, texts=2)


def _peak_on_device(own: Mapping[str, Any]) -> str:
    """The largest peak of all turns; empty if devices do not report it."""
    told = [each for each in own.get("peak_device_mb", []) if each is not None]
    return f"{max(told):,.0f}" if told else ""


def _own_memory(own: Mapping[str, Any]) -> str:
    """The median over turns; empty if the system does not report it."""
    told = [each for each in own.get("anonymous_mb", []) if each is not None]
    return f"{statistics.median(told):,.0f}" if told else ""


def _gathering(own: Mapping[str, Any]) -> list[str]:
    if not own["streamed"]:
        return ["", "", ""]
    return [
        _over([1000 * seconds for seconds in own["ready_seconds_per_round"]]),
        _over([1000 * seconds for seconds in own["gather_seconds"]]),
        f"{scale.hidden_share(own):.0%}",
    ]


def teaching(record: Record) -> Iterable[str]:
    """A step of distillation with each number of clients, beside the paper's."""
    yield (
        f"One step of {record['batch']} images, a {record['network']} as student and as every teacher: "
        "FedDF has a teacher for each client of the round, FedSDD four aggregated models. The paper's "
        "(FedSDD's table 3) are of ResNet-20 and one A100."
    )
    paper = {
        method: {clients: 1000 * s / distillation_cost.PAPER_STEPS for clients, s in own.items()}
        for method, own in distillation_cost.PAPER.items()
    }
    headings = ["clients"]
    for name in distillation_cost.METHODS.values():
        headings += [f"{name}, ms/step", f"{name}, paper"]
    times: dict[int, dict[str, Sequence[float]]] = {}
    for own in record["measured"]:
        times.setdefault(own["clients"], {})[own["method"]] = own["seconds_per_step"]
    rows = []
    for clients, by_method in times.items():
        row = [str(clients)]
        for method in distillation_cost.METHODS:
            row.append(_over([1000 * seconds for seconds in by_method[method]]))
            row.append(_three(paper[method][clients]) if clients in paper[method] else "")
        rows.append(row)
    yield _table(headings, rows)
    yield f"![Milliseconds per step by number of clients]({_plot_path(record).as_posix()})"


def decomposing(record: Record) -> Iterable[str]:
    """The share of SVD in a round's time, exact and within random subspaces."""
    yield (
        f"FedKD, {record['clients']} clients of {record['examples']:,} images, the codistillation "
        "paper's large CNN as teacher, its small one as student, an epoch of steps of 32 images. The "
        "student's changes are decomposed by every client and, averaged, by the server: by LAPACK's "
        "exact SVD, or within a random subspace and exactly where that holds too little. SVD's share is "
        "what a round takes longer than one of the same turn that sends students as they are."
    )
    rounds = {kind: svd_cost.Round(**own) for kind, own in record["rounds"].items()}
    rows = []
    for kind, own in rounds.items():
        parts = [100 * part for part in svd_cost.shares(rounds, kind)]
        shown = f"{statistics.median(parts):.1f} ({min(parts):.1f} to {max(parts):.1f})"
        rows.append(
            [
                kind,
                _over([1000 * seconds for seconds in own.seconds]),
                shown if kind != svd_cost.WHOLE else "",
                f"{own.bytes_up / 1000:,.1f}",
            ]
        )
    yield _table(["sent", "ms/round", "of it SVD, %", "KB up"], rows)
    yield from _matrices(record)


def _matrices(record: Record) -> Iterable[str]:
    matrices = [
        svd_cost.Decomposition(**{**own, "shape": tuple(own["shape"])})
        for own in record["matrices"]
    ]
    yield (
        "Single matrices of the sizes of BERT-base's, 95 % of whose energy is to be kept, exactly or "
        f"within a random subspace of {record['columns']} dimensions. Where singular values are equal "
        "a subspace holds too little, and both are computed; such a matrix is sent whole."
    )
    rows = [
        [
            f"{own.shape[0]:,} x {own.shape[1]:,}",
            own.spectrum,
            own.kind,
            _over([1000 * seconds for seconds in own.seconds]),
            "whole" if own.rank is None else str(own.rank),
        ]
        for own in matrices
    ]
    yield _table(["matrix", "singular values", "SVD", "ms", "rank"], rows)
    exactly, within = (
        svd_cost.of_a_layer(matrices, svd_cost.FALLING, kind)
        for kind in (svd_cost.EXACTLY, svd_cost.WITHIN)
    )
    yield (
        f"The six matrices of a layer with falling singular values take {exactly:.2f} s exactly and "
        f"{within:.2f} s within subspaces, once in a round and client, and once for the server."
    )


def _plot_path(record: Record) -> Path:
    device = re.sub(r"[^a-z0-9]+", "_", record["device"].lower()).strip("_")
    return PLOTS / f"{record['kind']}_{device}.png"


def origin(record: Record) -> str:
    """The date, commit, versions and command of a record."""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    return (
        f"{record['date']}, commit {_commit(record['commit'])}, {versions}: `{record['command']}`"
    )


def _commit(commit: str | None) -> str:
    short = (commit or "unknown")[:10]
    return f"{short} with changes" if (commit or "").endswith("-dirty") else short


def _milliseconds(value: float | None, own: Mapping[str, Any]) -> str:
    if value is None:
        return ""
    return f"{value:,.1f} ({value / own['traced_milliseconds']:.0%})"


def _ratio(own: Mapping[str, Any]) -> str:
    if "error" in own:
        return own["error"].split(":")[0]
    return _spread(own["ratio_to_ours"], own["ratio_minimum"], own["ratio_maximum"])


def _over(values: Sequence[float]) -> str:
    if len(values) == 1:
        return _three(values[0])
    return _spread(statistics.median(values), min(values), max(values))


def _spread(median: float, lowest: float, highest: float) -> str:
    return f"{_three(median)} ({_three(lowest)} to {_three(highest)})"


def _three(value: float) -> str:
    """At least three digits, never in powers of ten."""
    places = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, places)}f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, rule, *rows))


def _check(text: str, drawn: Iterable[Path], output: Path) -> int:
    present = output.read_text(encoding="utf-8") if output.exists() else None
    lacking = [path for path in drawn if not (output.parent / path).exists()]
    if present == text and not lacking:
        return 0
    fault = "does not exist" if present is None else "differs from what the records give"
    if present == text:
        fault = f"lacks its plot {lacking[0]}"
    print(f"error: {output} {fault}; run: python benchmarks/document.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
