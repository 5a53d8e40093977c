"""Differences of FedKD's methods within seeds, their quality and their bytes."""

import statistics
from collections.abc import Mapping, Sequence

from experiments.configs.cifar_fed_kd import FETCH_SGD_ROUNDS, THROUGH_NORMALISER
from experiments.studies.archive import Record
from experiments.studies.fed_kd.panels import CENTRAL, LOCAL, STUDENT, TEACHERS, Method, Panel
from experiments.studies.samples import Sample, common_seeds, equal_but, sample
from experiments.studies.sections.cells import OTHER_SETTINGS, accuracy
from fedcodist.report.spread import mean_difference

# Settings in which methods on the same clients may differ. `_are_comparable` looks at rounds, clients
# and the losses' divisor.
VARYING = (
    "algorithm.*",
    "rounds",
    "training.method",
    "training.fed_kd.*",
    "training.compression.*",
    "training.fetch_sgd.*",
    "training.fed_dropout.*",
    "tuning.*",
    "pools.main.model",
    "pools.main.server_learning_rate",
    "pools.main.cohort_size",
    "data.num_clients",
    "data.partition.num_clients",
)


def quality_cells(records: Sequence[Record], panel: Panel, method: Method) -> list[str]:
    """The model's quality, and the student's if the model is a personal one."""
    shown = sample_of(records, panel, method)
    beside = None
    if shown and method.model == TEACHERS and method not in (LOCAL, CENTRAL):
        beside = sample_of(records, panel, method._replace(model=STUDENT))
    return [accuracy(shown), accuracy(beside) if beside else ""]


def cost_cells(megabytes: float | None, whole: float | None) -> list[str]:
    """Megabytes sent, and their share of another cost."""
    if megabytes is None:
        return ["–", "–"]
    return [f"{megabytes:,.2f}", f"{100 * megabytes / whole:.1f} %" if whole else "–"]


def difference_text(records: Sequence[Record], panel: Panel, plus: Method, minus: Method) -> str:
    """'+0.31 ± 0.20', or why there is none."""
    differences = differences_of(records, panel, plus, minus)
    return differences if isinstance(differences, str) else mean_difference(differences)


def differences_of(
    records: Sequence[Record], panel: Panel, plus: Method, minus: Method
) -> list[float] | str:
    """Differences in the seeds that both have, or the reason why there are none."""
    ours, other = sample_of(records, panel, plus), sample_of(records, panel, minus)
    if ours is None or other is None:
        return ""
    are_equal = have_equal_settings((plus, ours), (minus, other))
    pairs = common_seeds(ours, other) if are_equal else []
    return [a - b for a, b in pairs] or OTHER_SETTINGS


def comparable(
    records: Sequence[Record], panel: Panel, method: Method, other: tuple[Method, Sample]
) -> Sample | None:
    """The method's sample, unless it is not comparable with the other one."""
    shown = sample_of(records, panel, method)
    return shown if shown and _are_comparable((method, shown), other) else None


def have_equal_settings(one: tuple[Method, Sample], other: tuple[Method, Sample]) -> bool:
    """Whether two methods differ only in settings that methods on the same clients may differ in."""
    return equal_but(one[1], other[1], VARYING) and _are_comparable(one, other)


def _are_comparable(*sides: tuple[Method, Sample]) -> bool:
    """Whether passes, clients and the gradient through the losses' divisor are the same."""
    passes, divisors, clients = set(), set(), set()
    for method, shown in sides:
        if method != CENTRAL:
            data = shown.records[0].config["data"]
            clients.add(data.get("num_clients") or data["partition"]["num_clients"])
        # Rounds of FetchSGD have one gradient of a part of the examples.
        is_sketch = method.run == "fetch_sgd"
        passes.add(shown.rounds / (FETCH_SGD_ROUNDS if is_sketch else 1))
        own = shown.records[0].config["training"].get("fed_kd")
        if own and own["adaptive"] != "none" and (own["output_weight"] or own["hidden_weight"]):
            divisors.add(own.get("detach_normaliser", False))
    is_the_question = any(THROUGH_NORMALISER in method.run for method, _ in sides)
    return len(passes) == len(clients) == 1 and (len(divisors) < 2 or is_the_question)


def sample_of(records: Sequence[Record], panel: Panel, method: Method) -> Sample | None:
    """The panel's metric of a method's model, one value per seed; None if it was not run."""
    run = panel.run(method.run)
    return sample(records, panel.experiment, run, method.model, metric=panel.metric)


def megabytes(shown: Sample | None) -> float | None:
    """Megabytes that a client sends and receives in the run, if all take part in every round."""
    if shown is None:
        return None
    sent: list[Mapping[str, int]] = [r.bytes[STUDENT] for r in shown.records if STUDENT in r.bytes]
    if not sent:
        return None
    return statistics.fmean(sum(ways.values()) for ways in sent) * shown.rounds / 1e6
