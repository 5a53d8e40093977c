"""FedSDD's tables: which run and model is in which cell, and what is compared with what."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.codistillation.claims import Term
from experiments.studies.codistillation.paper_numbers import SDD_ALPHAS, SDD_COLUMNS
from fedcodist.config.registry import METHOD_NAMES

SCALED = "fedsdd_scaled"
TASK_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORK_NAMES = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "wide_resnet16_2": "WRN-16-2"}
METHODS_OF_TABLE_2 = {
    **{name: METHOD_NAMES[name] for name in ("fed_avg", "fed_prox", "scaffold", "fed_df")},
    **{f"fed_sdd_r{kept}": f"FedSDD, R = {kept}" for kept in (1, 2, 4)},
}


class Row(NamedTuple):
    """A label, a cell for each column, and the row of the same columns that it is compared with."""

    label: str
    cells: tuple[Term, ...]
    baseline: tuple[Term, ...] | None


class Table(NamedTuple):
    """One of the paper's tables.

    Attributes:
      experiment: that of the runs which no other table has.
      heading, columns, rows: as in the paper.
      compared_with: what the rows' baselines are called.
      varying: settings besides the method's own in which rows may differ from their baselines.
    """

    experiment: str
    heading: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    compared_with: str = "FedAvg"
    varying: tuple[str, ...] = ()


class Ordering(NamedTuple):
    """A difference of two models of scaled runs that the paper finds above zero."""

    text: str
    plus: Term
    minus: Term


def tables() -> list[Table]:
    """The paper's tables but the third, which is of speed."""
    return [
        *(_table_2(network, name) for network, name in NETWORK_NAMES.items()),
        _table_4(),
        _table_5(),
        _table_6(),
        _table_7(),
        _table_8(),
        _table_9(),
        _table_10(),
    ]


def scaled(run: str, model: str = "main") -> Term:
    """A model of a scaled run."""
    return Term(SCALED, run, model)


# A scaled run's model -> what it stands for in the paper's tables.
STANDS_FOR = {
    **{
        scaled(method): Term("fedsdd_table2", f"{method},resnet20,cifar10,0.1", "main")
        for method in METHODS_OF_TABLE_2
    },
    scaled("fed_sdd_r1", "ensemble"): Term(
        "fedsdd_table2", "fed_sdd_r1,resnet20,cifar10,0.1", "ensemble"
    ),
    scaled("no_distillation"): Term("fedsdd_table5", "4,1,0.1", "main"),
    scaled("no_distillation", "ensemble"): Term("fedsdd_table5", "4,4,0.1", "ensemble"),
    scaled("basic"): Term("fedsdd_table6", "basic,0.1", "main"),
    scaled("basic", "ensemble"): Term("fedsdd_table6", "basic,0.1", "ensemble"),
}
SCALED_ROWS = {
    **METHODS_OF_TABLE_2,
    "no_distillation": "Four models, none distilled (ensemble: R = 4)",
    "basic": "Four models, all distilled (R = 1)",
}
ORDERINGS = (
    Ordering("FedProx above FedAvg", scaled("fed_prox"), scaled("fed_avg")),
    Ordering("SCAFFOLD above FedAvg", scaled("scaffold"), scaled("fed_avg")),
    Ordering("FedDF above FedAvg", scaled("fed_df"), scaled("fed_avg")),
    Ordering("FedSDD, R = 1, above FedAvg", scaled("fed_sdd_r1"), scaled("fed_avg")),
    Ordering("FedSDD, R = 4, above FedAvg", scaled("fed_sdd_r4"), scaled("fed_avg")),
    Ordering("FedSDD, R = 4, above FedDF", scaled("fed_sdd_r4"), scaled("fed_df")),
    Ordering("FedSDD: R = 4 above R = 1", scaled("fed_sdd_r4"), scaled("fed_sdd_r1")),
    Ordering(
        "FedSDD, R = 1: ensemble above main model",
        scaled("fed_sdd_r1", "ensemble"),
        scaled("fed_sdd_r1"),
    ),
    Ordering(
        "FedAvg above one of four models without distillation",
        scaled("fed_avg"),
        scaled("no_distillation"),
    ),
    Ordering(
        "Their ensemble above FedAvg", scaled("no_distillation", "ensemble"), scaled("fed_avg")
    ),
    Ordering(
        "Distilling the main model alone above all four", scaled("fed_sdd_r1"), scaled("basic")
    ),
    Ordering(
        "Its ensemble above that of all four",
        scaled("fed_sdd_r1", "ensemble"),
        scaled("basic", "ensemble"),
    ),
)


def _table_2(network: str, name: str) -> Table:
    def cells(method: str) -> tuple[Term, ...]:
        runs = (f"{method},{network},{task},{alpha}" for task, alpha in SDD_COLUMNS)
        return tuple(Term("fedsdd_table2", run, "main") for run in runs)

    rows = [Row(label, cells(m), cells("fed_avg")) for m, label in METHODS_OF_TABLE_2.items()]
    columns = tuple(f"{TASK_NAMES[task]}, α {float(alpha):g}" for task, alpha in SDD_COLUMNS)
    return Table("fedsdd_table2", f"Table 2: {name}", columns, tuple(rows))


def _table_4() -> Table:
    def cells(method: str, clients: int) -> tuple[Term, ...]:
        if clients == 8 and "+" not in method:
            return _of_table_2("fed_sdd_r1" if method == "fed_sdd" else method)
        return _with_alphas("fedsdd_table4", f"{method},{clients}")

    names = {name: METHOD_NAMES[name] for name in ("fed_avg", "fed_prox", "scaffold", "fed_sdd")}
    names |= {f"fed_sdd+{n}": f"FedSDD over {names[n]}" for n in ("fed_prox", "scaffold")}
    rows = [
        Row(f"{label}, {clients} clients", cells(method, clients), cells("fed_avg", clients))
        for clients in (8, 20)
        for method, label in names.items()
    ]
    return _on_cifar10("4", "other methods for the clients", rows, "FedAvg with as many clients")


def _table_5() -> Table:
    def cells(run: str, model: str) -> tuple[Term, ...]:
        return _with_alphas("fedsdd_table5", run, model)

    alone = cells("1,1", "main")
    rows = [
        Row("one model", alone, None),
        Row("its clients", cells("1,1", "clients"), alone),
        Row("its clients, mean and Gaussian samples", cells("1,1", "gaussian"), alone),
        Row("its clients, mean and Dirichlet samples", cells("1,1", "dirichlet"), alone),
        Row("one of four models", cells("4,1", "main"), alone),
        Row("the clients of all four", cells("4,1", "clients"), alone),
        *(Row(f"all four, R = {r}", cells(f"4,{r}", "ensemble"), alone) for r in (1, 2, 4)),
    ]
    return _on_cifar10("5", "ensembles without distillation", rows, "one model")


def _table_6() -> Table:
    def cells(kind: str, model: str) -> tuple[Term, ...]:
        if kind == "none":
            return _with_alphas("fedsdd_table5", "4,1", model)
        if kind == "main":
            return _of_table_2("fed_sdd_r1", model)
        return _with_alphas("fedsdd_table6", kind, model)

    names = {
        "none": "none distilled",
        "basic": "all distilled",
        "warm_up_20": "all, from round 20",
        "warm_up_40": "all, from round 40",
        "main": "the main model alone",
    }
    rows = [
        Row(f"{label}: {what}", cells(kind, model), cells("none", model))
        for model, what in (("main", "main model"), ("ensemble", "ensemble"))
        for kind, label in names.items()
    ]
    return _on_cifar10("6", "which models are distilled", rows, "none distilled")


def _table_7() -> Table:
    def cells(method: str, rounds: int) -> tuple[Term, ...]:
        if rounds == 100:
            return _of_table_2(method)
        return _with_alphas("fedsdd_table7", f"{method},{rounds}")

    rows = [
        Row(
            f"{METHODS_OF_TABLE_2[method]}, {rounds} rounds of {4000 // rounds} epochs",
            cells(method, rounds),
            cells("fed_avg", rounds),
        )
        for rounds in (25, 100, 400)
        for method in ("fed_avg", "fed_df", "fed_sdd_r1")
    ]
    return _on_cifar10("7", "fewer, longer rounds", rows, "FedAvg in as many rounds")


def _table_8() -> Table:
    def cells(models: int) -> tuple[Term, ...]:
        if models == 4:
            return _of_table_2("fed_sdd_r1")
        return _with_alphas("fedsdd_table8", str(models))

    rows = [Row(f"{models} models", cells(models), _of_table_2("fed_avg")) for models in (2, 3, 4)]
    return _on_cifar10("8", "number of global models", rows)


def _table_9() -> Table:
    def cells(method: str, clients: int) -> tuple[Term, ...]:
        if clients == 8:
            return _of_table_2("fed_sdd_r1" if method == "fed_sdd_k4" else method)
        if clients == 20 and method in ("fed_avg", "fed_sdd_k4"):
            name = "fed_sdd" if method == "fed_sdd_k4" else method
            return _with_alphas("fedsdd_table4", f"{name},20")
        return _with_alphas("fedsdd_table9", f"{method},{clients}")

    names = {"fed_avg": "FedAvg", "fed_df": "FedDF", "fed_sdd_k4": "FedSDD, K = 4"}
    more = {8: {}, 14: {"fed_sdd_k7": "FedSDD, K = 7"}, 20: {"fed_sdd_k10": "FedSDD, K = 10"}}
    rows = [
        Row(f"{label}, {clients} clients", cells(method, clients), cells("fed_avg", clients))
        for clients, extra in more.items()
        for method, label in (names | extra).items()
    ]
    return _on_cifar10("9", "clients in a round", rows, "FedAvg with as many clients")


def _table_10() -> Table:
    names = {
        "feddf": "FedDF as published",
        "training": "with FedSDD's training",
        "no_validation": "without drop-worst and early stopping",
        "fed_sdd": "FedSDD, K = 4, R = 1",
    }
    first = _with_alphas("fedsdd_table10", "feddf")
    rows = [
        Row(label, _with_alphas("fedsdd_table10", step), first) for step, label in names.items()
    ]
    shown = _on_cifar10("10", "from FedDF to FedSDD, on 90 % of the images", rows, names["feddf"])
    return shown._replace(varying=("pools.*.client_learning_rate",))


def _on_cifar10(
    number: str, subject: str, rows: Sequence[Row], compared_with: str = "FedAvg"
) -> Table:
    columns = tuple(f"α {float(alpha):g}" for alpha in SDD_ALPHAS)
    heading = f"Table {number}: {subject} (ResNet-20, CIFAR-10)"
    return Table(f"fedsdd_table{number}", heading, columns, tuple(rows), compared_with)


def _with_alphas(experiment: str, run: str, model: str = "main") -> tuple[Term, ...]:
    return tuple(Term(experiment, f"{run},{alpha}", model) for alpha in SDD_ALPHAS)


def _of_table_2(method: str, model: str = "main") -> tuple[Term, ...]:
    return _with_alphas("fedsdd_table2", f"{method},resnet20,cifar10", model)
