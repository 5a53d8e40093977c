"""Ranking of runs on the same clients: quality, costs, and differences to a baseline within seeds."""

import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedcodist.config.registry import method_of
from fedcodist.core.metric_kinds import is_share, lower_is_better
from fedcodist.report.accuracy_table import epsilon_of, largest_epsilon
from fedcodist.report.collection import Method
from fedcodist.report.costs import bytes_per_round, clients_per_round, pool_of, pools_of
from fedcodist.report.data_of_runs import DataOfRun, data_of, other_data
from fedcodist.report.intervals import student_half_width
from fedcodist.report.runs import Run, first_seed, mapping_of

ALL_PARTIES = "all parties"


class Entry(NamedTuple):
    """One model, or ensemble, of one run; costs are per seed.

    Attributes:
      run, model: their names.
      accuracies: accuracy or another metric after the last round, one per seed; shares are in %. NaN if
        undefined, such as precision without a prediction.
      seeds: the seeds' numbers, in the same order.
      split: the split on which it was measured.
      megabytes: sent and received in the whole run by the model's clients. These are all clients of its
        pool, even if the pool is divided among several models, or the model's party. For a model that
        parties or pools share, such as the server's, they are those of all.
      examples: number that these clients trained on, each counted as often as it was visited.
      client_flops: FLOPs of these clients; NaN if they are not counted.
      server_flops: FLOPs of the server.
      seconds: time of the whole run, all seeds.
      seconds_per_round: of all seeds together, without compilation and evaluation; NaN if unknown.
      shared: for a personal model, the name of the model that clients share. A fine-tuned personal model
        has the name of the fine-tuned shared model, which the run may lack.
      head: the auxiliary head that was measured; None for the main head, or a model without heads.
      num_models: number of models of which this is the mean.
      stopped_on_test_data: whether phases before the first round stopped on test data.
      epsilon: the largest of any client; infinite without noise, None if no method is private.
      data: seed -> what the run folder says of its data; seeds may divide the data in other ways.
      run_examples: number that all clients of the run trained on; NaN if unknown.
    """

    run: str
    model: str
    accuracies: tuple[float, ...]
    seeds: tuple[int, ...]
    split: str
    megabytes: float
    examples: float
    client_flops: float
    server_flops: float
    seconds: float
    seconds_per_round: float
    shared: str | None = None
    head: int | None = None
    num_models: int = 1
    stopped_on_test_data: bool = False
    epsilon: float | None = None
    data: Mapping[int, DataOfRun] = {}
    run_examples: float = math.nan


class Difference(NamedTuple):
    """Mean of the difference to the baseline over the seeds of both, and half of its 95 % interval."""

    mean: float
    half_width: float | None
    seeds: int


class UnknownMetric(ValueError):
    """A run does not have the metric."""


def read_run(
    name: str, run: Run, metric: str = "accuracy", split: str | None = None
) -> list[Entry]:
    """All models of a finished run, on one split.

    Args:
      name: the run's name in the ranking.
      run: as `load_run` reads it.
      metric: its name in metrics lines.
      split: such as `client_test`; by default the first of the final splits.

    Raises:
      UnknownMetric: the run has no model with this metric.
      ValueError: the run is unfinished, was not measured on the split, or its files lack something.
    """
    # Imported late because it imports JAX, so that a mistyped option is reported at once.
    from fedcodist.core.method import FINE_TUNED, PARTIES
    from fedcodist.report.flops import Flops, flops_of_parties, flops_of_run

    summary, config, folder = run.summary, run.config, run.folder
    if not run.finished:
        raise ValueError(f"{folder} holds no finished run.")
    evaluation, of_parties = mapping_of(config, "evaluation"), "parties" in config
    if not evaluation or not isinstance(config.get("parties" if of_parties else "pools"), dict):
        raise ValueError(
            f"{folder} was run without a config of the library: its costs are unknown."
        )
    trained = _means(run, "client_examples")
    steps = _means(run, "distillation_steps")
    sizes = summary["models"]
    try:
        cohorts, bytes_of = clients_per_round(config, sizes), bytes_per_round(config, sizes)
    except ValueError as error:
        raise ValueError(f"{folder}: its costs are unknown: {error}") from error
    megabytes = {pool: count * summary["rounds"] / 1e6 for pool, count in bytes_of.items()}
    examples = dict.fromkeys(megabytes, 0.0)
    privacy = mapping_of(mapping_of(config, "training"), "privacy")
    counts_nothing = privacy.get("metrics") is False and not trained
    if counts_nothing:
        reason = "training.privacy.metrics is False, so clients count nothing"
        print(f"note: {name}: client examples and FLOPs are left out: {reason}", file=sys.stderr)
    for model, clients in cohorts.items():
        if counts_nothing:
            trained[model] = math.nan
        if model not in trained:
            raise ValueError(
                f"{folder}: metrics.jsonl has no client_examples of {model!r}, which rounds must return."
            )
        examples[pool_of(config, model)] += trained[model] * clients * summary["rounds"]
    # config.json lacks `execution`, which decides what teachers predict in streamed runs.
    executed = config | {"execution": mapping_of(run.environment, "plan")}
    try:
        if of_parties:
            work = flops_of_parties(executed, examples, summary["rounds"])
        else:
            # There are fewer rounds than the config has where a callback stopped the run.
            until = executed | {"rounds": summary["rounds"]}
            work = flops_of_run(until, examples, next(iter(steps.values()), None))
    except Exception as error:  # the table is useful without FLOPs
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"note: {name}: FLOPs are left out: {reason}", file=sys.stderr)
        work = Flops(dict.fromkeys(examples, math.nan), math.nan)
    personal = summary.get("personal_models", {})
    fine_tuned = {f"{own}{FINE_TUNED}": f"{shared}{FINE_TUNED}" for own, shared in personal.items()}
    shared_of = personal | fine_tuned
    final_splits = evaluation.get("final_splits") or evaluation.get("splits") or ()
    known = dict.fromkeys(name for splits in summary["final"].values() for name in splits)
    if split not in (None, *known):
        raise ValueError(f"--split must be one of {list(known)} for {name}, got {split!r}.")
    # Where only clients' own examples are evaluated, the splits are theirs.
    split = split or next(iter(final_splits), None) or next(iter(known))
    scale = 100 if is_share(metric) else 1
    entries = []
    measured: dict[str, None] = {}
    head = config["parties"].get("heads") if of_parties else None
    stopping = (config.get("phases") or {}).get("stopping")
    for model, splits in summary["final"].items():
        values = splits.get(split, {})
        measured |= dict.fromkeys(values)
        pools = pools_of(config, model, examples)
        for key, of_head in ((metric, None), (f"{metric}_head_{head}", head)):
            if key not in values:
                continue
            # Undefined values are null.
            measurements = [math.nan if value is None else value for value in values[key]]
            seeds = tuple(first_seed(config) + index for index in range(len(measurements)))
            entries.append(
                Entry(
                    name,
                    model,
                    tuple(scale * value for value in measurements),
                    seeds,
                    split,
                    sum(megabytes[pool] for pool in pools),
                    sum(examples[pool] for pool in pools),
                    sum(work.clients[pool] for pool in pools),
                    work.server,
                    summary["seconds"],
                    # Run folders of earlier versions do not have this time.
                    summary.get("seconds_per_round") or math.nan,
                    shared_of.get(model),
                    of_head,
                    stopped_on_test_data=stopping == "test_data",
                    epsilon=epsilon_of(summary),
                    data=dict.fromkeys(seeds, data_of(run, split)),
                    run_examples=sum(examples.values()),
                )
            )
    if not entries:
        raise unknown_metric(metric, list(measured), name)
    if not of_parties:
        return entries
    if {entry.model for entry in entries} == {PARTIES}:  # each was evaluated on its own examples
        return [e._replace(model=ALL_PARTIES, num_models=len(examples)) for e in entries]
    heads = dict.fromkeys(entry.head for entry in entries if entry.model in examples)
    means = [_all_parties([e for e in entries if e.head == head], examples) for head in heads]
    return [*means, *entries]


def unknown_metric(metric: str, names: Sequence[str], run: str) -> UnknownMetric:
    """The error, whose message lists the run's metrics."""
    return UnknownMetric(f"--metric must be one of {names} for {run}, got {metric!r}.")


def read_methods(
    methods: Sequence[Method], metric: str = "accuracy", split: str | None = None
) -> tuple[list[Entry], list[ValueError]]:
    """The models of all methods with finished runs, and the reasons why others are left out.

    Runs that differ only in their seed are one method. It has the name of its run, or a longer name if
    several methods would have the same.

    Args:
      methods: from `collect`.
      metric, split: as in `read_run`.

    Raises:
      ValueError: nothing is left.
    """
    names = [
        str(method.runs[0].config.get("run") or method_of(method.runs[0].config))
        for method in methods
    ]
    entries: list[Entry] = []
    without: list[ValueError] = []
    for name, method in zip(names, methods, strict=True):
        name = name if names.count(name) == 1 else method.label
        # A run contains dictionaries, so it has no hash.
        runs = {run.folder: run for run, _ in method.members}
        try:
            entries += _over_runs([read_run(name, run, metric, split) for run in runs.values()])
        except ValueError as error:
            without.append(error)
    if not entries:
        raise without[0]
    return entries, without


def _over_runs(runs: Sequence[Sequence[Entry]]) -> list[Entry]:
    """The entries of runs that differ only in their seed as one; a repeated seed counts once."""
    joined: dict[tuple[str, int | None], list[Entry]] = {}
    for entries in runs:
        for entry in entries:
            joined.setdefault((entry.model, entry.head), []).append(entry)
    return [_over_seeds(entries) for entries in joined.values()]


def _over_seeds(entries: Sequence[Entry]) -> Entry:
    value_of: dict[int, float] = {}
    counted = []  # how many seeds of each entry
    for entry in entries:
        before = len(value_of)
        for seed, value in zip(entry.seeds, entry.accuracies, strict=True):
            value_of.setdefault(seed, value)
        counted.append(len(value_of) - before)

    def mean(values: Iterable[float]) -> float:
        pairs = zip(counted, values, strict=True)
        return sum(seeds * value for seeds, value in pairs if seeds) / len(value_of)

    def total(seconds: Iterable[float]) -> float:
        triples = zip(counted, entries, seconds, strict=True)
        return sum(seeds / len(entry.seeds) * time for seeds, entry, time in triples if seeds)

    return entries[0]._replace(
        accuracies=tuple(value_of.values()),
        seeds=tuple(value_of),
        # As above, the first entry with a seed counts.
        data={seed: data for entry in reversed(entries) for seed, data in entry.data.items()},
        megabytes=mean(entry.megabytes for entry in entries),
        examples=mean(entry.examples for entry in entries),
        run_examples=mean(entry.run_examples for entry in entries),
        client_flops=mean(entry.client_flops for entry in entries),
        server_flops=mean(entry.server_flops for entry in entries),
        seconds=total(entry.seconds for entry in entries),
        seconds_per_round=total(entry.seconds_per_round for entry in entries),
        epsilon=largest_epsilon(entry.epsilon for entry in entries),
    )


def ranked(
    entries: Sequence[Entry],
    baseline: str,
    models: Sequence[str] | None,
    metric: str = "accuracy",
) -> list[Entry]:
    """The entries of the wanted models, the best first; entries undefined for any seed are last.

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
        shown = [e for e in without_shared(entries) if _compared_as(e) in wanted]
    sign = 1 if lower_is_better(metric) else -1

    def place(entry: Entry) -> tuple[bool, float]:
        is_undefined = not is_defined(entry.accuracies)
        return is_undefined, 0.0 if is_undefined else sign * statistics.fmean(entry.accuracies)

    return sorted(shown, key=place)


def difference(entry: Entry, entries: Sequence[Entry], baseline: str) -> Difference | None:
    """The difference to the baseline's model of the same name, or to its only model, within seeds.

    None if there is no such model, if either value is undefined, if the runs have no common seed, or if
    they were measured on different splits or had different data with a common seed, where seeds are no
    pairs. The interval is by Student's t over the seeds' differences. With one seed there is none.
    """
    candidates = [other for other in entries if other.run == baseline and other.head is None]
    same = [other for other in candidates if other.model == entry.model]
    same = same or [o for o in candidates if _compared_as(o) == _compared_as(entry)] or candidates
    if len(same) != 1 or same[0] == entry:
        return None
    if same[0].split != entry.split or other_data_of_seeds(entry, same[0]):
        return None
    ours, theirs = (dict(zip(e.seeds, e.accuracies, strict=True)) for e in (entry, same[0]))
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences or not is_defined(differences):
        return None
    mean, half_width = statistics.fmean(differences), student_half_width(differences)
    return Difference(mean, half_width, len(differences))


def other_data_of_seeds(ours: Entry, theirs: Entry) -> str:
    """What `other_data` says of the first common seed whose data differ; empty if there is none."""
    common = [seed for seed in ours.data if seed in theirs.data]
    differences = (other_data(ours.data[seed], theirs.data[seed]) for seed in common)
    return next(filter(None, differences), "")


def _compared_as(entry: Entry) -> str:
    """The name by which models are compared: for a personal model, that of the shared model."""
    return entry.shared or entry.model


def without_shared(entries: Sequence[Entry]) -> list[Entry]:
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


def _means(run: Run, metric: str) -> dict[str, float]:
    """Model -> mean of a metric over all rounds and seeds."""
    values_of: dict[str, dict[int, list[float]]] = {}
    for series, records in run.records.items():
        for round, record in records.items():
            if metric in record:
                rounds = values_of.setdefault(series.model, {})
                rounds.setdefault(round, []).append(record[metric])
    means = {}
    for model, by_round in values_of.items():
        before, counted, weighted = 0, 0, 0.0
        # A metrics line has the mean over the rounds since the previous line.
        for round, values in sorted(by_round.items()):
            # Undefined for rounds without clients, as Poisson cohorts may be.
            defined = [value for value in values if value is not None]
            if defined:
                weighted += (round - before) * statistics.fmean(defined)
                counted += round - before
            before = round
        means[model] = weighted / counted if counted else math.nan
    return means


def is_defined(values: Sequence[float]) -> bool:
    """Whether all are finite."""
    return all(map(math.isfinite, values))
