"""Turns finished run folders into small records that are committed, `results/<experiment>/<run>.json`.

    python -m experiments.studies.record RUN [RUN ...] [--results results] [--partial]

A RUN is a run folder or a folder above some. Unfinished runs are skipped. Every other one is kept: one
with another config, commit, seeds, device or number of processes than the record of its name gets a name
of its own, `<run>-2.json`. The same run recorded again replaces itself.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcodist.config.command_line import Parser
from fedcodist.config.registry import BASELINE, ENTRIES, POOLS
from fedcodist.report.points import thin
from fedcodist.report.runs import find_run_folders, read_lines, read_object
from fedcodist.report.tables_heads import recorded_heads

# If two records of one name differ in any of these, they are two runs.
IDENTITY = ("config", "commit", "seeds", "device", "processes")
# Folders of results/ that hold other files.
RESERVED = ("benchmarks", "notes", "tuning")
# Methods whose server has no unlabelled data.
WITHOUT_UNLABELLED = tuple(
    entry.name
    for entry in ENTRIES.values()
    if entry.name == BASELINE or (entry.kind == POOLS and "unlabelled" not in entry.reads)
)
# What precedes `rank/<layer>` and `spectrum/<layer>` in metrics.jsonl.
_UPDATES, _GRADIENTS = "client_", "client_gradient_"

# model -> split -> round -> metric -> one value per seed
Evaluations = dict[tuple[str, str], dict[int, dict[str, list[float | None]]]]


class UnfinishedRun(ValueError):
    """The folder's run has not ended; the message is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for a mistake or if nothing was recorded.

    Reads all run folders before it writes.
    """
    parser = Parser(
        prog="python -m experiments.studies.record",
        description="Run folders into committed records.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or above")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where records lie")
    parser.add_argument(
        "--partial", action="store_true", help="record unfinished runs too, as unfinished"
    )
    options = parser.parse_args(arguments)
    try:
        records, unfinished = [], []
        without_runs: list[str] = []
        folders = find_run_folders(options.runs, without_runs)
        if not folders:
            raise ValueError("; ".join(without_runs))
        for note in without_runs:
            print(f"note: {note}", file=sys.stderr)
        for folder in folders:
            try:
                records.append(make_record(folder, options.partial))
            except UnfinishedRun as error:
                unfinished.append(error)
        for one in unfinished:
            print(f"{'skipped' if records else 'error'}: {one}", file=sys.stderr)
        for record in records:
            print(f"wrote {write_record(record, options.results)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0 if records else 2


def make_record(folder: Path, partial: bool = False) -> dict[str, Any]:
    """The record of a run folder: what was run, where, and its final numbers and curves.

    Accuracies are shares between 0 and 1, to five digits, one per seed in the order of `seeds`. For an
    unfinished run, the final numbers are those of the last round in which every model was evaluated.

    Raises:
      UnfinishedRun: the run is unfinished and `partial` is not set.
      ValueError: one line; the folder is no run folder, its files disagree, or it has no accuracy or an
        undefined one.
    """
    folder = Path(folder)
    config = read_object(folder / "config.json")
    environment = read_object(folder / "environment.json")
    finished = (folder / "summary.json").exists()
    if not finished and not partial:
        raise UnfinishedRun(
            f"{folder} is unfinished: it has no summary.json (--partial records it all the same)."
        )
    summary = read_object(folder / "summary.json") if finished else {}
    experiment, run = _names(config, folder)
    try:
        seeds = list(range(config["seed"], config["seed"] + config["seeds"]))
        rounds = config["rounds"]
        evaluations = _evaluations(folder / "metrics.jsonl", seeds)
        # A callback may have stopped the run.
        last_round = summary.get("rounds", rounds) if finished else _last_round(evaluations, folder)
        models = summary.get("models", {})
        record = {
            "experiment": experiment,
            "run": run,
            "command": _without_machine(environment.get("command")),
            "config": config,
            "commit": environment["commit"],
            "seeds": seeds,
            "rounds": rounds,
            "full_rounds": config.get("full_rounds", rounds),
            "finished": finished,
            "last_round": last_round,
            "device": environment["device"],
            "cores": environment["cores"],
            "processes": environment["plan"]["processes"],
            "date": environment["date"],
            "seconds": summary["seconds"] if finished else None,
            "versions": {"python": environment["python"], **environment["versions"]},
            "parameters": {model: each["parameters"] for model, each in models.items()},
            "bytes": {model: _bytes(each) for model, each in models.items()},
            "final": _rounded(summary["final"] if finished else _at(evaluations, last_round)),
            "curve": _curve(evaluations, _every_point(config)),
            "phases": _phases(folder),
            "heads": recorded_heads(folder, config) if finished else None,
            "spectra": _spectra(folder / "metrics.jsonl", seeds, _UPDATES),
            "gradient_spectra": _spectra(folder / "metrics.jsonl", seeds, _GRADIENTS),
            "data": environment.get("data", {}),
            "notes": [
                *(config.get("notes") or ()),
                *_data_notes(config, environment),
                *_precision_notes(environment),
                *_start_notes(environment),
            ],
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder} is not a complete run folder: {error} is missing.") from error
    _check_seeds(record, folder)
    _check_accuracies(record, folder)
    return record


def write_record(record: Mapping[str, Any], results: Path) -> Path:
    """Writes a record under the first name that is free or already this run's; returns the path.

    Raises:
      ValueError: an existing record of the name cannot be read, or is the same run and finished, while
        this one is not.
      OSError: the file cannot be written.
    """
    folder = Path(results) / record["experiment"]
    name, number = _file_name(record["run"]), 1
    while (path := folder / f"{name}{'' if number == 1 else f'-{number}'}.json").exists():
        present = read_object(path)
        if all(present.get(key) == record[key] for key in IDENTITY):
            if present.get("finished") and not record["finished"]:
                raise ValueError(f"{path} has the same run finished; the partial one is left out.")
            break
        number += 1
    folder.mkdir(parents=True, exist_ok=True)
    # One line per key: small, and a change shows in a diff.
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def _phases(folder: Path) -> dict[str, Any]:
    """The final metrics of the phases before a run's first round; empty for most runs."""
    paths = sorted((folder / "phases").glob("*/summary.json"))
    return {path.parent.name: _rounded(read_object(path)["final"]) for path in paths}


def _names(config: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    experiment = config.get("name")
    if not isinstance(experiment, str) or not re.fullmatch(r"\w[\w.+-]*", experiment):
        raise ValueError(
            f"{folder}: config.name must be letters, digits, '_', '-' and '.', got {experiment!r}."
        )
    if experiment in RESERVED:
        raise ValueError(f"{folder}: config.name must not be one of {RESERVED}: {experiment!r}.")
    # A config file of a single run does not name it: the method tells its runs apart.
    run = config.get("run") or config.get("algorithm", {}).get("name")
    if not isinstance(run, str) or not run:
        raise ValueError(f"{folder}: config.run must be a run's name, got {run!r}.")
    return experiment, run


def _data_notes(config: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Notes on images that replaced the unlabelled images set apart, from their folder's manifest."""
    data = config.get("data", {})
    folder = data.get("unlabelled_folder")
    about = environment.get("data", {}).get(folder)
    algorithm = config["algorithm"]
    if about is None or algorithm["name"] in WITHOUT_UNLABELLED or algorithm.get("steps") == 0:
        return []
    counts = about["num_examples"]
    count = counts["train"] if "train" in counts else counts["distillation"]
    used = data.get("num_unlabelled")
    those = f"the {count:,}" if used in (None, count) else f"{used:,} of the {count:,}"
    what = "sentences" if "vocabulary" in counts else "images"
    doubt = ", not verified as its official files" if about["unverified"] else ""
    return [f"Unlabelled: {those} {what} in {folder} ({about['source']}{doubt})."]


def _precision_notes(environment: Mapping[str, Any]) -> list[str]:
    """Notes on precision, which is in the plans of execution and not in the config."""
    found = dict.fromkeys(
        start.get("plan", {}).get("precision", "float32") for start in _starts(environment)
    )
    if list(found) == ["float32"]:
        return []
    return [f"Networks computed in {', then in '.join(found)}."]


def _starts(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that trained: of a finished run that is started again nothing is computed."""
    later = environment.get("resumed", [])
    return [environment, *(start for start in later if not start.get("only_reads"))]


def _without_machine(command: str | None) -> str | None:
    """A command without the folder of a machine in which `runs` lies."""
    return command and re.sub(r"(?<==)/\S*?/(?=runs/)", "", command)


def _start_notes(environment: Mapping[str, Any]) -> list[str]:
    """Notes on a run that was continued on another kind of device, or with other code."""
    notes, starts = [], _starts(environment)
    for what, name in (("Devices", "device"), ("Commits", "commit")):
        found = list(dict.fromkeys(str(start[name]) for start in starts if start.get(name)))
        notes += [f"{what}: {', '.join(found)}."] if len(found) > 1 else []
    return notes


def _file_name(run: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", run).lstrip(".")


def _evaluations(path: Path, seeds: Sequence[int]) -> Evaluations:
    """The metrics of metrics.jsonl for rounds that every seed has; a killed run's last line may be
    half-written."""
    found: dict[tuple[str, str], dict[int, dict[int, dict[str, Any]]]] = {}
    for number, record in read_lines(path):
        try:
            if "accuracy" in record:
                rounds = found.setdefault((record["model"], record["split"]), {})
                rounds.setdefault(record["round"], {})[record["seed"]] = record
        except (KeyError, TypeError):
            raise ValueError(f"{path} line {number} is no evaluation.") from None
    return {
        series: {
            round: {
                metric: [by_seed[seed].get(metric) for seed in seeds]
                for metric in ("accuracy", "loss")
            }
            for round, by_seed in sorted(rounds.items())
            if by_seed.keys() == set(seeds)
        }
        for series, rounds in found.items()
    }


def _spectra(
    path: Path, seeds: Sequence[int], before: str
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Ranks and singular values of clients' updates or gradients, if the run recorded them.

    Model -> layer -> 'round' and 'rank', the rank that the energy threshold asks for, and 'first' and
    'last', the singular values in the first of these rounds and in the last; means over the seeds.
    """
    rank, spectrum = f"{before}rank/", f"{before}spectrum/"
    by_model: dict[str, dict[int, dict[int, dict[str, Any]]]] = {}
    for _, record in read_lines(path):
        if not any(key.startswith(rank) for key in record):
            continue
        rounds = by_model.setdefault(record["model"], {})
        rounds.setdefault(record["round"], {})[record["seed"]] = record
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for model, rounds in by_model.items():
        whole = {
            at: [by_seed[seed] for seed in seeds]
            for at, by_seed in sorted(rounds.items())
            if by_seed.keys() == set(seeds)
        }
        if not whole:
            continue
        shown = thin(list(whole))
        layers = [key.removeprefix(rank) for key in whole[shown[0]][0] if key.startswith(rank)]
        found[model] = {
            layer: {
                "round": shown,
                "rank": [_mean(each[rank + layer] for each in whole[at]) for at in shown],
                "first": _means(each[spectrum + layer] for each in whole[shown[0]]),
                "last": _means(each[spectrum + layer] for each in whole[shown[-1]]),
            }
            for layer in layers
        }
    return found


def _mean(values: Iterable[float]) -> float:
    return float(f"{statistics.fmean(values):.4g}")


def _means(rows: Iterable[Sequence[float]]) -> list[float]:
    return [_mean(column) for column in zip(*rows, strict=True)]


def _last_round(evaluations: Evaluations, folder: Path) -> int:
    """The last round that has everything that the first evaluation has."""
    first = min((round for rounds in evaluations.values() for round in rounds), default=None)
    regular = [set(rounds) for rounds in evaluations.values() if first in rounds]
    if not regular:
        raise ValueError(f"{folder} has no evaluation yet.")
    return max(set.intersection(*regular))


def _at(evaluations: Evaluations, round: int) -> dict[str, dict[str, dict[str, list[Any]]]]:
    final: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for (model, split), rounds in evaluations.items():
        if round in rounds:
            final.setdefault(model, {})[split] = rounds[round]
    return final


def _every_point(config: Mapping[str, Any]) -> bool:
    """Whether to keep every point of curves: the run evaluated chosen rounds, around codistillations."""
    return bool((config.get("evaluation") or {}).get("around"))


def _curve(
    evaluations: Evaluations, every_point: bool
) -> dict[str, dict[str, dict[str, list[Any]]]]:
    curves: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for (model, split), rounds in evaluations.items():
        kept = list(rounds) if every_point else thin(list(rounds))
        accuracies = [[_five_digits(value) for value in rounds[at]["accuracy"]] for at in kept]
        curves.setdefault(model, {})[split] = {"round": kept, "accuracy": accuracies}
    return curves


def _rounded(final: Mapping[str, Any]) -> dict[str, dict[str, dict[str, list[Any]]]]:
    return {
        model: {
            split: {
                metric: [_five_digits(value) for value in values]
                for metric, values in metrics.items()
            }
            for split, metrics in splits.items()
            if "accuracy" in metrics
        }
        for model, splits in final.items()
    }


def _five_digits(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _bytes(model: Mapping[str, int]) -> dict[str, int]:
    """Bytes of one participation of one client."""
    return {way: model[f"bytes_{way}_per_participation"] for way in ("down", "up")}


def _check_seeds(record: Mapping[str, Any], folder: Path) -> None:
    for model, splits in record["final"].items():
        for split, metrics in splits.items():
            if len(metrics["accuracy"]) != len(record["seeds"]):
                raise ValueError(
                    f"{folder}: summary.json has {len(metrics['accuracy'])} accuracies of {model} on "
                    f"{split}, config.json has {len(record['seeds'])} seeds."
                )


def _check_accuracies(record: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError for what pages cannot show: they are rendered from all records or from none."""
    if not any(record["final"].values()):
        raise ValueError(f"{folder} has no accuracy: nothing to record.")
    finals = [record["final"], *record["phases"].values()]
    measured = [
        (model, split, metrics["accuracy"])
        for final in finals
        for model, splits in final.items()
        for split, metrics in splits.items()
    ]
    measured += [
        (model, split, values)
        for model, splits in record["curve"].items()
        for split, points in splits.items()
        for values in points["accuracy"]
    ]
    for model, split, values in measured:
        for value in values:
            if value is None or not 0 <= value <= 1:
                raise ValueError(
                    f"{folder}: accuracies of {model} on {split} must be numbers from 0 to 1, "
                    f"got {value}."
                )


if __name__ == "__main__":
    sys.exit(main())
