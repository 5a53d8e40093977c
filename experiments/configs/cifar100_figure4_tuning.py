r"""Figure 4 of the codistillation paper as the paper made it: from tuning runs, here with few of them.

The paper plots the mean test accuracy of those 25 tuning runs that are best on held-out clients, by
number of unlabelled images. Here are the six best settings of PeriodicCodist's study in
cifar100_tuning.py, with 400 rounds as there, for 600 unlabelled images and for all 13,500. A run is
"fed_avg" or "images,place"; place 1 is the study's best. For each number of images the three runs with
the best mean accuracy of both models on held-out clients are taken.

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_figure4_tuning.py \
        --workdir runs/cifar100_figure4_tuning

Question: in the mean of such runs, do 600 images lift the models above FedAvg, and as much as 13,500?
Stop rule: these 13 runs, about two hours of a core. MergedCodist's would take twice as long and are not
made. The study had all 13,500 images, so its settings favour them. Result: no gain over FedAvg
with either number (docs/results/codistillation.md).
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from experiments.configs import cifar100_table1, cifar100_tuning
from fedcodist.config import defaults

STUDY = Path(__file__).parents[2] / "results/tuning/cifar100_periodic_dropout.json"
IMAGES = (600, 13_500)
TRIALS = 6


def get_runs() -> list[str]:
    """FedAvg, then every setting with each number of images."""
    return [
        "fed_avg",
        *(f"{images},{place}" for images in IMAGES for place in range(1, TRIALS + 1)),
    ]


def get_config(run: str = "600,1") -> ConfigDict:
    """Returns one tuning run."""
    defaults.check_run(run, get_runs())
    if run == "fed_avg":
        config = cifar100_table1.get_config("fed_avg,4700")
        config.rounds = config.full_rounds = cifar100_tuning.ROUNDS
    else:
        images, place = map(int, run.split(","))
        config = cifar100_tuning.get_config("periodic_codistillation")
        del config.tuning
        config.data.num_unlabelled = images
        config.update_from_flattened_dict(_settings_of_study()[place - 1])
    config.name = "cifar100_figure4_tuning"
    config.run = run
    return config


def _settings_of_study() -> list[dict[str, float]]:
    """The settings of the study's trials, the best on held-out clients first."""
    trials = json.loads(STUDY.read_text(encoding="utf-8"))["trials"]
    ordered = sorted(trials, key=lambda trial: trial["value"], reverse=True)
    return [trial["parameters"] for trial in ordered]
