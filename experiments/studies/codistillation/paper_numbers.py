"""Test accuracies in % that papers report.

The codistillation paper's are of its Tables 1 (CIFAR-100) and 2 (text), without seeds or spreads; its
figure 4 has no numbers. FedSDD's are means and standard deviations over three seeds.
"""

from collections.abc import Iterator
from typing import NamedTuple

from fedcodist.config.registry import BASELINE

MODELS = ("small", "large")
# Examples of the clients that can train the large model.
POOL_SIZES = (3100, 4700, 6300)
TEST_IMAGES = 10_000
IN_DOMAIN_IMAGES = 13_500

# Run -> accuracy of the (small, large) model. FedAvg's small model is one, trained on all clients.
TABLE_1 = {
    "fed_avg,3100": (31.84, 24.76),
    "fed_avg,4700": (31.84, 30.57),
    "fed_avg,6300": (31.84, 35.10),
    "periodic_codistillation,3100,in_domain": (33.95, 31.09),
    "periodic_codistillation,4700,in_domain": (34.36, 35.08),
    "periodic_codistillation,6300,in_domain": (35.68, 37.20),
    "merged_codistillation,3100,in_domain": (32.86, 31.98),
    "merged_codistillation,4700,in_domain": (33.86, 33.15),
    "merged_codistillation,6300,in_domain": (33.78, 33.96),
    "periodic_codistillation,3100,cifar10": (33.75, 25.03),
    "periodic_codistillation,4700,cifar10": (34.02, 30.53),
    "periodic_codistillation,6300,cifar10": (33.37, 34.27),
    "merged_codistillation,3100,cifar10": (33.02, 25.83),
    "merged_codistillation,4700,cifar10": (33.45, 31.02),
    "merged_codistillation,6300,cifar10": (33.03, 33.47),
}

# Table 2, next words of Stack Overflow: method -> test set -> accuracy of the (small, large) model. The
# small model is trained on answers, the large one on questions; the mixed set has both.
DOMAIN_SHIFT = {
    "fed_avg": {"answers": (26.00, 24.79), "questions": (22.62, 30.34), "mixed": (24.51, 27.25)},
    "periodic_codistillation": {
        "answers": (25.56, 24.82),
        "questions": (22.51, 30.23),
        "mixed": (24.21, 27.23),
    },
    "merged_codistillation": {
        "answers": (25.50, 25.29),
        "questions": (27.65, 30.75),
        "mixed": (26.45, 27.70),
    },
}


class Reported(NamedTuple):
    """Mean and standard deviation over three seeds; where the latter is None we have not noted it."""

    mean: float
    deviation: float | None = None


# Network -> method -> accuracies on CIFAR-10 with alpha 1 and 0.1, and on CIFAR-100.
_SDD_TABLE_2 = {
    "resnet20": {
        "fed_avg": ((88.53, 0.31), (78.72, 2.31), (58.84, 0.42), (52.98, 1.41)),
        "fed_prox": ((88.36, 0.18), (79.44, 2.17), (58.76, 0.93), (53.57, 0.37)),
        "scaffold": ((89.85, 0.50), (80.08, 1.53), (61.09, 0.46), (54.74, 1.26)),
        "fed_df": ((87.98, 0.16), (80.04, 1.87), (59.74, 0.38), (51.83, 0.83)),
        "fed_sdd_r1": ((89.06, 0.19), (80.18, 2.38), (61.90, 0.83), (54.72, 0.87)),
        "fed_sdd_r2": ((89.01, 0.18), (81.27, 2.16), (62.42, 0.57), (56.39, 1.10)),
        "fed_sdd_r4": ((89.01, 0.07), (82.21, 1.10), (62.84, 0.45), (56.90, 0.77)),
    },
    "resnet56": {
        "fed_avg": ((89.25, 0.11), (80.05, 2.65), (59.47, 1.23), (54.37, 1.24)),
        "fed_prox": ((89.65,), (80.84,), (61.01,), (57.18,)),
        "scaffold": ((90.73,), (82.22,), (62.94,), (56.36,)),
        "fed_df": ((88.87,), (81.10,), (60.71,), (52.52,)),
        "fed_sdd_r1": ((89.86,), (81.30,), (62.95,), (57.48,)),
        "fed_sdd_r2": ((90.23,), (82.77,), (65.28,), (59.37,)),
        "fed_sdd_r4": ((90.00, 0.26), (83.20, 0.99), (65.63, 0.89), (59.56, 0.43)),
    },
    "wide_resnet16_2": {
        "fed_avg": ((90.26, 0.33), (81.52, 2.66), (63.57, 1.06), (58.77, 0.55)),
        "fed_prox": ((90.38,), (81.78,), (63.75,), (59.24,)),
        "scaffold": ((91.32,), (82.90,), (65.33,), (60.66,)),
        "fed_df": ((89.52,), (81.32,), (63.54,), (56.89,)),
        "fed_sdd_r1": ((90.69,), (82.62,), (66.46,), (61.16,)),
        "fed_sdd_r2": ((90.77,), (83.39,), (67.11,), (62.37,)),
        "fed_sdd_r4": ((90.70, 0.31), (84.02, 1.75), (67.48, 0.22), (63.05, 0.80)),
    },
}
SDD_COLUMNS = (("cifar10", "1.0"), ("cifar10", "0.1"), ("cifar100", "1.0"), ("cifar100", "0.1"))
SDD_ALPHAS = ("1.0", "0.1")
# Of ResNet-20 on CIFAR-10. Experiment -> run without alpha -> model -> mean with alpha 1 and 0.1.
_SDD_TABLES = {
    "fedsdd_table4": {
        "fed_sdd+fed_prox,8": {"main": (88.98, 81.21)},
        "fed_sdd+scaffold,8": {"main": (88.80, 76.51)},
        "fed_avg,20": {"main": (88.59, 79.84)},
        "fed_prox,20": {"main": (88.52, 79.63)},
        "scaffold,20": {"main": (90.10, 82.83)},
        "fed_sdd,20": {"main": (89.04, 82.89)},
        "fed_sdd+fed_prox,20": {"main": (89.28, 82.12)},
        "fed_sdd+scaffold,20": {"main": (90.66, 84.30)},
    },
    "fedsdd_table5": {
        "1,1": {
            "main": (88.53, 78.72),
            "clients": (88.82, 80.22),
            "gaussian": (88.72, 79.60),
            "dirichlet": (88.70, 80.25),
        },
        "4,1": {"main": (86.69, 70.74), "clients": (90.49, 82.12), "ensemble": (90.58, 81.76)},
        "4,2": {"ensemble": (90.75, 83.50)},
        "4,4": {"ensemble": (90.69, 83.99)},
    },
    "fedsdd_table6": {
        "basic": {"main": (88.63, 79.98), "ensemble": (89.23, 80.57)},
        "warm_up_20": {"main": (88.66, 80.20), "ensemble": (89.38, 80.80)},
        "warm_up_40": {"main": (88.47, 79.27), "ensemble": (89.19, 80.32)},
    },
    "fedsdd_table7": {
        "fed_avg,25": {"main": (85.81, 73.17)},
        "fed_df,25": {"main": (86.78, 77.79)},
        "fed_sdd_r1,25": {"main": (86.27, 73.99)},
        "fed_avg,400": {"main": (89.69, 79.19)},
        "fed_df,400": {"main": (88.90, 78.92)},
        "fed_sdd_r1,400": {"main": (90.37, 81.34)},
    },
    "fedsdd_table8": {"2": {"main": (88.34, 79.38)}, "3": {"main": (88.89, 79.63)}},
    "fedsdd_table9": {
        "fed_avg,14": {"main": (88.67, 80.25)},
        "fed_df,14": {"main": (88.38, 81.61)},
        "fed_sdd_k4,14": {"main": (89.14, 81.26)},
        "fed_sdd_k7,14": {"main": (89.31, 81.90)},
        "fed_df,20": {"main": (88.12, 81.55)},
        "fed_sdd_k10,20": {"main": (89.14, 81.97)},
    },
    "fedsdd_table10": {
        "feddf": {"main": (82.53, 68.72)},
        "training": {"main": (87.93, 79.01)},
        "no_validation": {"main": (87.42, 78.55)},
        "fed_sdd": {"main": (88.35, 79.59)},
    },
}
_SDD_ENSEMBLE = (90.31, 81.39)  # of Table 6's last row, whose main model is in Table 2


def _fedsdd() -> Iterator[tuple[tuple[str, str, str], Reported]]:
    for network, methods in _SDD_TABLE_2.items():
        for method, values in methods.items():
            for (task, alpha), value in zip(SDD_COLUMNS, values, strict=True):
                run = f"{method},{network},{task},{alpha}"
                yield ("fedsdd_table2", run, "main"), Reported(*value)
    for alpha, mean in zip(SDD_ALPHAS, _SDD_ENSEMBLE, strict=True):
        run = f"fed_sdd_r1,resnet20,cifar10,{alpha}"
        yield ("fedsdd_table2", run, "ensemble"), Reported(mean)
    for experiment, runs in _SDD_TABLES.items():
        for run, models in runs.items():
            for model, means in models.items():
                for alpha, mean in zip(SDD_ALPHAS, means, strict=True):
                    yield (experiment, f"{run},{alpha}", model), Reported(mean)


# (experiment, run, model) -> what the paper reports; each once, whatever tables it is in.
FEDSDD: dict[tuple[str, str, str], Reported] = dict(_fedsdd())


def accuracy(run: str, model: str) -> float:
    """The paper's test accuracy in % of a run of Table 1, 'small' or 'large'."""
    return TABLE_1[run][MODELS.index(model)]


def run_name(method: str, pool_size: int, unlabelled: str) -> str:
    """A run of Table 1; FedAvg uses no unlabelled data."""
    return f"{method},{pool_size}" + ("" if method == BASELINE else f",{unlabelled}")
