r"""The CIFAR-100 half of the codistillation paper's Table 1.

The table's rows are the method and the unlabelled data, its columns the number of examples of the
clients that can train the large model. A run is "method,examples" or "method,examples,unlabelled":

                                   3100   4700   6300
    fed_avg                         x      x      x
    periodic_codistillation  in_domain and cifar10
    merged_codistillation    in_domain and cifar10

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_table1.py \
        --only "*,4700*" --workdir runs/cifar100_table1

Settings marked as tuned were found on held-out clients; PeriodicCodist and MergedCodist share them.
Dropout and the small model's rates are from cifar100_regularisation.py. Its study of the large model was
not finished, so the large model's rates were taken from one of its trials by hand. The settings of
distillation are older: they are from cifar100_tuning.py, for networks without dropout.

The data come from `datasets/cifar100/prepare.py` and, for out-of-domain images,
`datasets/cifar10/prepare.py`. With 4,700 examples, FedAvg has 35.8 / 27.0 % (small / large) in our runs
and PeriodicCodist in domain 35.2 / 29.5 %; the paper has 31.8 / 30.6 and 34.4 / 35.1 %
(docs/results/codistillation.md).
"""

from ml_collections import ConfigDict, config_dict

from experiments.configs.cifar100_networks import network
from fedcodist.config import defaults
from fedcodist.config.registry import METHODS

# Share of the 315 clients, 100 images each, that are able to train the large model.
FRACTIONS = {"3100": 0.10, "4700": 0.15, "6300": 0.20}
UNLABELLED = {"in_domain": None, "cifar10": "data/cifar10"}


def get_runs() -> list[str]:
    """Every cell of the table."""
    return [
        f"{method},{examples}" + (f",{unlabelled}" if unlabelled else "")
        for method in METHODS
        for unlabelled in (("",) if method == "fed_avg" else UNLABELLED)
        for examples in FRACTIONS
    ]


def get_config(run: str = "merged_codistillation,4700,in_domain") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, examples, *unlabelled = run.split(",")
    config = defaults.experiment("cifar100_table1", 1500, run)

    config.data = dict(
        name="prepared",
        folder="data/cifar100",
        unlabelled_folder=config_dict.placeholder(str),  # in place of the 13,500 images set apart
        num_unlabelled=config_dict.placeholder(int),  # all
        crop=24,
        padding=0,
        augmentation="per_image",  # or "per_batch", as FedJAX draws crops and flips
        seed=0,
    )
    config.training = defaults.adaptive_training()
    teaching = dict(learning_rate=1.3e-3, interpolation=0.47, temperature=0.36)  # tuned
    config.pools = dict(
        small=defaults.codistilled_pool(
            network("small", "flat"),  # tuned
            teaching,
            fraction=1.0,
            client_learning_rate=6.57057e-3,  # tuned
            server_learning_rate=4.54723e-3,  # tuned
        ),
        large=defaults.codistilled_pool(
            network("large", "both"),  # tuned
            teaching,
            fraction=FRACTIONS[examples],
            client_learning_rate=0.03,
            server_learning_rate=1.5e-3,
        ),
    )
    config.nested_pools = True  # large clients serve the small model too

    config.algorithm = defaults.codistillation(
        method,
        alpha=0.86,  # tuned
        batch_size=128,
        flip=True,
    )
    config.evaluation = defaults.evaluation(25, 25)
    config.execution = defaults.execution()

    config.notes = ()  # remarks on the run, at the end of its page of results
    if method == "fed_avg" and examples != "4700":
        # FedAvg's small model does not depend on the large model's pool, so the run 4700 has it for all.
        del config.pools.small
    if unlabelled == ["cifar10"]:
        config.data.unlabelled_folder = UNLABELLED["cifar10"]
    return config
