"""Methods on the same clients as one ranked table: quality, costs, and differences to a baseline."""

import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from fedcodist.report.costs import bytes_per_round, clients_per_round, pool_of
from fedcodist.report.intervals import student_half_width
from fedcodist.report.metric_kinds import is_share, lower_is_better
from fedcodist.report.runs import read_lines, read_object
from fedcodist.report.spread import mean_and_deviation, plus_minus

ALL_PARTIES = "all parties"
UNDEFINED = "-"


class Entry(NamedTuple):
    """One model, or ensemble, of one run; costs are per seed.

    Attributes:
      run, model: their names.
      accuracies: accuracy or another metric, in % where it is a share, one per seed, after the last
        round. NaN where undefined, such as precision where nothing was predicted.
      megabytes: sent and received by these clients in the whole run. They are all clients of the model's
        pool, also where the pool is divided among several models; or the model's party. For a model that
        parties share, they are all parties.
      examples: that these clients trained on, counted as often as they were visited.
      client_flops: of these clients; NaN where they are not counted.
      server_flops: of the server.
      seconds: of the whole run, all seeds.
      shared: for a personal model, the name of the model that clients share.
      head: the auxiliary head that was measured; None for a model without heads, or its main head.
      num_models: number of models of which this is the mean.
      stopped_on_test_data: whether phases before the first round stopped on test data.
    """

    run: str
    model: str
    accuracies: tuple[float, ...]
    megabytes: float
    examples: float
    client_flops: float
    server_flops: float
    seconds: float
    shared: str | None = None
    head: int | None = None
    num_models: int = 1
    stopped_on_test_data: bool = False


class Difference(NamedTuple):
    """Mean over the seeds of the difference to the baseline, and half of its 95 % interval."""

    mean: float
    half_width: float | None


class UnknownMetric(ValueError):
    """A run does not have the metric."""


def read_run(run: str, folder: Path, metric: str = "accuracy") -> list[Entry]:
    """All models of a finished run, on the first of its final splits.

    Raises:
      UnknownMetric: the run has no model with this metric.
      ValueError: the run has no summary.
    """
    # Imported late because it imports JAX: a mistyped option is reported at once.
    from fedcodist.report.flops import Flops, flops_of_parties, flops_of_run

    try:
        summary = read_object(folder / "summary.json")
        config = read_object(folder / "config.json")
        records = [record for _, record in read_lines(folder / "metrics.jsonl")]
    except ValueError as error:
        raise ValueError(f"{folder} holds no finished run: {error}") from error
    trained = _means(records, "client_examples")
    steps = _means(records, "distillation_steps")
    sizes = summary["models"]
    megabytes = {
        pool: count * summary["rounds"] / 1e6
        for pool, count in bytes_per_round(config, sizes).items()
    }
    examples = dict.fromkeys(megabytes, 0.0)
    for model, clients in clients_per_round(config, sizes).items():
        if model not in trained:
            raise ValueError(
                f"{folder}: metrics.jsonl has no client_examples of {model!r}, which rounds must return."
            )
        examples[pool_of(config, model)] += trained[model] * clients * summary["rounds"]
    of_parties = "parties" in config
    try:
        if of_parties:
            work = flops_of_parties(config, examples, summary["rounds"])
        else:
            until = config | {"rounds": summary["rounds"]}  # fewer where a callback stopped the run
            work = flops_of_run(until, examples, next(iter(steps.values()), None))
    except Exception as error:  # the table is useful without FLOPs
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"note: {run}: FLOPs are left out: {reason}", file=sys.stderr)
        work = Flops(dict.fromkeys(examples, math.nan), math.nan)
    shared_of = summary.get("personal_models", {})
    final_splits = config["evaluation"]["final_splits"] or config["evaluation"]["splits"]
    scale = 100 if is_share(metric) else 1
    entries = []
    measured: dict[str, None] = {}
    head = config["parties"].get("heads") if of_parties else None
    stopping = (config.get("phases") or {}).get("stopping")
    for model, splits in summary["final"].items():
        values = splits.get(final_splits[0], {})
        measured |= dict.fromkeys(values)
        pools = [pool_of(config, model)]
        if of_parties and model not in examples:
            pools = list(examples)
        for name, of_head in ((metric, None), (f"{metric}_head_{head}", head)):
            if name not in values:
                continue
            # Undefined values are null.
            measurements = [math.nan if value is None else value for value in values[name]]
            entries.append(
                Entry(
                    run,
                    model,
                    tuple(scale * value for value in measurements),
                    sum(megabytes[pool] for pool in pools),
                    sum(examples[pool] for pool in pools),
                    sum(work.clients[pool] for pool in pools),
                    work.server,
                    summary["seconds"],
                    shared_of.get(model),
                    of_head,
                    stopped_on_test_data=stopping == "test_data",
                )
            )
    if not entries:
        raise unknown_metric(metric, list(measured), run)
    if not of_parties:
        return entries
    heads = dict.fromkeys(entry.head for entry in entries)
    means = [_all_parties([e for e in entries if e.head == head], examples) for head in heads]
    return [*means, *entries]


def unknown_metric(metric: str, names: Sequence[str], run: str) -> UnknownMetric:
    return UnknownMetric(f"--metric must be one of {names} for {run}, got {metric!r}.")


def ranked(
    entries: Sequence[Entry],
    baseline: str,
    models: Sequence[str] | None,
    metric: str = "accuracy",
) -> list[Entry]:
    """The entries of the wanted models, the best first; those undefined in any seed are last.

    Raises:
      ValueError: no run has such a model.
    """
    known = list(dict.fromkeys(entry.model for entry in entries))
    for model in models or ():
        if model not in known:
            raise ValueError(f"--model must be one of {known}, got {model!r}.")
    if models:
        shown = [entry for entry in entries if entry.model in models]
    else:
        wanted = {_compared_as(entry) for entry in entries if entry.run == baseline}
        wanted = {ALL_PARTIES} if ALL_PARTIES in wanted else wanted
        shown = [e for e in _without_shared(entries) if _compared_as(e) in wanted]
    sign = 1 if lower_is_better(metric) else -1

    def place(entry: Entry) -> tuple[bool, float]:
        is_undefined = not _is_defined(entry.accuracies)
        return is_undefined, 0.0 if is_undefined else sign * statistics.fmean(entry.accuracies)

    return sorted(shown, key=place)


def difference(entry: Entry, entries: Sequence[Entry], baseline: str) -> Difference | None:
    """The difference to the baseline's model of the same name, or to its only one, within seeds.

    None without such a model, or where either is undefined. The interval is Student's t over the seeds'
    differences; with one seed there is no interval.
    """
    candidates = [other for other in entries if other.run == baseline and other.head is None]
    same = [other for other in candidates if other.model == entry.model]
    same = same or [o for o in candidates if _compared_as(o) == _compared_as(entry)] or candidates
    if len(same) != 1 or same[0] == entry:
        return None
    if not (_is_defined(entry.accuracies) and _is_defined(same[0].accuracies)):
        return None
    pairs = zip(entry.accuracies, same[0].accuracies, strict=True)
    differences = [a - b for a, b in pairs]
    return Difference(statistics.fmean(differences), student_half_width(differences))


def table(
    shown: Sequence[Entry], baseline: str, entries: Sequence[Entry], metric: str = "accuracy"
) -> Table:
    """The ranking as a table for a terminal."""
    seeds = len(shown[0].accuracies) if shown else 0
    # Where the baseline has personal models, others are compared with these, unless its shared model
    # is shown.
    compared = [e for e in entries if e in shown or e in _without_shared(entries)]
    stood_for = {(e.run, e.model): e for e in entries}
    has_shared = any(entry.shared for entry in shown)
    drawn = Table(
        title=Text(
            f"{metric}{' in %' if is_share(metric) else ''}, {seeds} seed{'' if seeds == 1 else 's'}"
            f"{', the least is first' if lower_is_better(metric) else ''}"
        ),
        caption=Text("; ".join([budget(shown), *_too_good(shown)])),
    )
    drawn.add_column("method")
    drawn.add_column("model")
    costs = ("client examples", "MB", "clients' FLOPs", "server's FLOPs", "seconds")
    headings = [metric, *(["shared model"] if has_shared else []), f"to {baseline}", *costs]
    for heading in headings:
        drawn.add_column(Text(heading), justify="right")
    for entry in shown:
        difference_to = difference(entry, compared, baseline)
        beside = [""]
        if entry.shared:
            beside = [_spread(stood_for[entry.run, entry.shared].accuracies)]
        cells = [
            entry.run,
            entry.model if entry.head is None else f"{entry.model}, head {entry.head}",
            _spread(entry.accuracies),
            *(beside if has_shared else []),
            _to_baseline(entry, difference_to, baseline),
            f"{entry.examples:,.0f}",
            f"{entry.megabytes:,.1f}",
            _scaled(entry.client_flops),
            _scaled(entry.server_flops),
            f"{entry.seconds:,.0f}",
        ]
        # As Text, because a run's name is not rich's markup.
        drawn.add_row(*map(Text, cells))
    return drawn


def budget(shown: Sequence[Entry]) -> str:
    """A sentence on whether the clients of all runs did the same work, and on what FLOPs are."""
    by_model: dict[str, list[float]] = {}
    for entry in shown:
        by_model.setdefault(entry.model, []).append(entry.examples / entry.num_models)
    # Metrics have seven digits.
    equal = all(
        math.isclose(min(counts), max(counts), rel_tol=1e-5) for counts in by_model.values()
    )
    examples = (
        "all runs have the same budget of client examples"
        if equal
        else "UNEQUAL BUDGETS: the runs' clients trained on different numbers of examples"
    )
    return f"{examples}; FLOPs are of matrix products and convolutions, counted from the networks"


def _too_good(shown: Sequence[Entry]) -> list[str]:
    """A warning that names the runs whose phases were stopped on test data."""
    runs = dict.fromkeys(entry.run for entry in shown if entry.stopped_on_test_data)
    if not runs:
        return []
    names = ", ".join(runs)
    return [f"phases before rounds stopped on TEST DATA, accuracies are too good: {names}"]


def _compared_as(entry: Entry) -> str:
    """The name by which models are compared: for a personal model, that of the shared model."""
    return entry.shared or entry.model


def _without_shared(entries: Sequence[Entry]) -> list[Entry]:
    """The entries without shared models that personal models replace in the ranking."""
    shared = {(entry.run, entry.shared) for entry in entries}
    return [entry for entry in entries if (entry.run, entry.model) not in shared]


def _all_parties(entries: Sequence[Entry], parties: Collection[str]) -> Entry:
    """The mean over parties of their accuracies, seed by seed, and the sum of their costs."""
    of_parties = [entry for entry in entries if entry.model in parties]
    accuracies = zip(*(entry.accuracies for entry in of_parties), strict=True)
    return of_parties[0]._replace(
        model=ALL_PARTIES,
        accuracies=tuple(map(statistics.fmean, accuracies)),
        megabytes=sum(entry.megabytes for entry in of_parties),
        examples=sum(entry.examples for entry in of_parties),
        client_flops=sum(entry.client_flops for entry in of_parties),
        num_models=len(of_parties),
    )


def _means(records: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Model -> mean of a metric over all rounds and seeds."""
    values_of: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if metric in record:
            rounds = values_of.setdefault(record["model"], {})
            rounds.setdefault(record["round"], []).append(record[metric])
    means = {}
    for model, by_round in values_of.items():
        before, weighted = 0, 0.0
        # A line has the mean over the rounds since the line before.
        for round, values in sorted(by_round.items()):
            weighted += (round - before) * statistics.fmean(values)
            before = round
        means[model] = weighted / before
    return means


def _is_defined(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _spread(values: Sequence[float]) -> str:
    if not _is_defined(values):
        return UNDEFINED
    return mean_and_deviation(values)


def _scaled(flops: float) -> str:
    """'1.23 T'."""
    if not math.isfinite(flops):
        return UNDEFINED
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.2f} {unit}"
    return f"{flops:,.0f}"


def _to_baseline(entry: Entry, estimate: Difference | None, baseline: str) -> str:
    """The difference as text; empty for the baseline itself."""
    if estimate is None:
        return "" if entry.run == baseline else UNDEFINED
    return plus_minus(estimate.mean, estimate.half_width, is_difference=True)
