"""Test accuracies in % of the codistillation paper's Table 1, without seeds or spreads."""

from fedcodist.config.registry import BASELINE

FIGURE_4 = "cifar100_figure4"
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


def accuracy(run: str, model: str) -> float:
    """The paper's test accuracy in % of a run of Table 1, 'small' or 'large'."""
    return TABLE_1[run][MODELS.index(model)]


def run_name(method: str, pool_size: int, unlabelled: str) -> str:
    """A run of Table 1; FedAvg uses no unlabelled data."""
    return f"{method},{pool_size}" + ("" if method == BASELINE else f",{unlabelled}")
