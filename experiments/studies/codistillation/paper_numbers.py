"""Test accuracies in % of the codistillation paper's Table 1, without seeds or spreads."""

import csv
from pathlib import Path

from fedcodist.config.registry import BASELINE

FIGURE_4 = "cifar100_figure4"
MODELS = ("small", "large")
# Examples of the clients that can train the large model.
POOL_SIZES = (3100, 4700, 6300)
TEST_IMAGES = 10_000
IN_DOMAIN_IMAGES = 13_500

# Run -> accuracy of the (small, large) model. FedAvg's small model is one, trained on all clients.
with Path(__file__).with_name("table_1.csv").open(encoding="utf-8", newline="") as file:
    TABLE_1 = {line["run"]: tuple(float(line[m]) for m in MODELS) for line in csv.DictReader(file)}


def accuracy(run: str, model: str) -> float:
    """The paper's test accuracy in % of a run of Table 1, 'small' or 'large'."""
    return TABLE_1[run][MODELS.index(model)]


def run_name(method: str, pool_size: int, unlabelled: str) -> str:
    """A run of Table 1; FedAvg uses no unlabelled data."""
    return f"{method},{pool_size}" + ("" if method == BASELINE else f",{unlabelled}")
