r"""Figure 4 of the codistillation paper: how few unlabelled images are enough.

A run is "method,images": images of the 135 clients set apart, from all 13,500 down to 600, with 4,700
examples for the large model. A smaller set lies inside every larger one.

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_figure4.py \
        --workdir runs/cifar100_figure4
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config.registry import CODISTILLATION

IMAGES = (600, 1250, 2500, 5000)  # all 13,500 are Table 1's runs


def get_runs() -> list[str]:
    """Every point of the figure; its baseline is Table 1's "fed_avg,4700"."""
    return [f"{method},{images}" for method in CODISTILLATION for images in IMAGES]


def get_config(run: str = "merged_codistillation,600") -> ConfigDict:
    """Returns one point of the figure."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    method, images = run.split(",")
    config = cifar100_table1.get_config(f"{method},4700,in_domain")
    config.name = "cifar100_figure4"
    config.run = run
    config.data.num_unlabelled = int(images)
    return config
