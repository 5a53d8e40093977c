r"""Figure 4 of the codistillation paper: accuracy by the number of unlabelled images.

A run is "method,images". The unlabelled images are those of the 135 clients set apart, from all 13,500
down to 600. The large model has 4,700 examples. Every set of images contains all smaller ones. In the
paper 600 images are enough for a gain over FedAvg; our runs are in docs/results/codistillation.md.

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_figure4.py \
        --workdir runs/cifar100_figure4 --config.seeds=3
"""

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1
from fedcodist.config import defaults
from fedcodist.config.registry import CODISTILLATION

IMAGES = (600, 1250, 2500, 5000)  # the runs with all 13,500 are Table 1's


def get_runs() -> list[str]:
    """Every point of the figure; its baseline is Table 1's "fed_avg,4700"."""
    return [f"{method},{images}" for method in CODISTILLATION for images in IMAGES]


def get_config(run: str = "merged_codistillation,600") -> ConfigDict:
    """Returns one point of the figure."""
    defaults.check_run(run, get_runs())
    method, images = run.split(",")
    config = cifar100_table1.get_config(f"{method},4700,in_domain")
    config.name = "cifar100_figure4"
    config.run = run
    config.data.num_unlabelled = int(images)
    return config
