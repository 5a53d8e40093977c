r"""The CIFAR-100 half of the codistillation paper's Table 1.

The table's rows are the method and the unlabelled data, its columns the number of examples of the
clients that can train the large model. A run is "method,examples" or "method,examples,unlabelled":

                                   3100   4700   6300
    fed_avg                         x      x      x
    periodic_codistillation  in_domain and cifar10
    merged_codistillation    in_domain and cifar10

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_table1.py \
        --only "*,4700*" --workdir runs/cifar100_table1 --config.seeds=3

The paper states neither its crop nor its initial weights. Here crops of 24x24 are drawn for each image,
and pixels are normalised by channel. FedJAX draws one crop for a batch, and standardises each image of
24x24 by itself. Kernels start from Flax's `lecun_normal`, which is 1.137 times as wide as Haiku's
default (`fedcodist.models.cnn.HAIKU_KERNELS`).

Settings were tuned on held-out clients: dropout and learning rates of clients and servers by
cifar100_regularisation.py, the methods' own settings by cifar100_tuning.py.

The data come from `datasets/cifar100/prepare.py` and, for out-of-domain images,
`datasets/cifar10/prepare.py`. With 4,700 examples, FedAvg has 35.8 / 27.0 % (small / large) in our runs
and PeriodicCodist in domain 35.5 / 27.3 %; the paper has 31.8 / 30.6 and 34.4 / 35.1 %
(docs/results/codistillation.md).
"""

from ml_collections import ConfigDict, config_dict

from experiments.configs.cifar100_networks import network
from fedcodist.config import defaults
from fedcodist.config.registry import METHODS

# Share of the 315 clients, 100 images each, that are able to train the large model.
FRACTIONS = {"3100": 0.10, "4700": 0.15, "6300": 0.20}
UNLABELLED = {"in_domain": None, "cifar10": "data/cifar10"}
# The best trial of each method's study in cifar100_tuning.py.
TEACHING = {
    "periodic_codistillation": dict(
        small=dict(
            learning_rate=3.34772e-4, decay=0.058477, temperature=0.78292, interpolation=0.0965883
        ),
        large=dict(
            learning_rate=1.49683e-4, decay=0.017363, temperature=0.437032, interpolation=0.131461
        ),
    ),
    "merged_codistillation": dict(
        small=dict(
            learning_rate=2.16162e-3, decay=0.019033, temperature=0.460857, interpolation=0.426545
        ),
        large=dict(
            learning_rate=3.96561e-3, decay=0.0893591, temperature=0.327906, interpolation=0.0396563
        ),
    ),
}


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
    teaching = TEACHING.get(method, {})
    # The paper has one learning rate of clients for both pools. Here each pool has its own.
    config.pools = dict(
        small=defaults.codistilled_pool(
            network("small", "flat"),
            teaching.get("small"),
            fraction=1.0,
            client_learning_rate=6.57057e-3,
            server_learning_rate=4.54723e-3,
        ),
        large=defaults.codistilled_pool(
            network("large", "both"),
            teaching.get("large"),
            fraction=FRACTIONS[examples],
            client_learning_rate=0.03,
            server_learning_rate=1.5e-3,
        ),
    )
    config.nested_pools = True  # large clients serve the small model too

    config.algorithm = defaults.codistillation(
        method,
        alpha=0.946076,
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
