r"""FedSDD's Table 2: accuracy by method, network, data set and skew of the labels.

A run is "method,network,task,alpha"; `fed_sdd_r4` is FedSDD with the aggregated models of four rounds
in its ensemble, each of four models.

                                      cifar10         cifar100
                                     1.0    0.1      1.0    0.1
    fed_avg, fed_prox, scaffold,
    fed_df,                           x      x        x      x      for each of three networks
    fed_sdd_r1, fed_sdd_r2, fed_sdd_r4

    python -m fedcodist.commands.sweep --config experiments/configs/fedsdd_table2.py \
        --only "*,resnet20,cifar10,*" --workdir runs/fedsdd_table2

All methods share the division of the data and, seed by seed, cohorts and batches; seeds change
everything else. In the paper each seed has its own division. For this, run
`--config.data.division_per_seed=True --config.seeds=1 --config.seed=N` for every N in its own work
folder; `python -m fedcodist.report` reads all folders together. The length is the paper's;
fedsdd_scaled.py is for a CPU.

The data come from `datasets/cifar10/prepare.py`, `datasets/cifar100/prepare.py` with all clients in
training, and `datasets/imagenet32/prepare.py`. Settings that the paper leaves open are marked as
choices, those that we know of. Expected from the paper, ResNet-20, CIFAR-10, 0.1: FedAvg 78.7 %, FedSDD
with R = 4 82.2 %. All its numbers are in experiments/studies/fed_sdd/paper_tables.csv.
"""

from typing import NamedTuple

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults


class Task(NamedTuple):
    """The clients' data set, and the server's images."""

    folder: str
    unlabelled_folder: str
    classes: int


METHODS = ("fed_avg", "fed_prox", "scaffold", "fed_df", "fed_sdd_r1", "fed_sdd_r2", "fed_sdd_r4")
NETWORKS = ("resnet20", "resnet56", "wide_resnet16_2")
TASKS = {
    "cifar10": Task("data/cifar10", "data/cifar100_whole", 10),
    "cifar100": Task("data/cifar100_whole", "data/imagenet32", 100),
}
ALPHAS = ("1.0", "0.1")  # of the Dirichlet distribution over labels; small is uneven
LOCAL = ("fed_avg", "fed_prox", "scaffold")


def get_runs() -> list[str]:
    """Every cell of the table."""
    return [
        f"{method},{network},{task},{alpha}"
        for network in NETWORKS
        for method in METHODS
        for task in TASKS
        for alpha in ALPHAS
    ]


def get_config(run: str = "fed_sdd_r4,resnet20,cifar10,0.1") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, network, task, alpha = run.split(",")
    name, _, rounds_kept = method.partition("_r")
    if name in LOCAL:
        server, local = "fed_avg", name
    else:
        server, local = name, "fed_avg"
    config = defaults.experiment("fedsdd_table2", 100, run, seeds=3)

    config.data = dict(
        name="prepared",
        folder=TASKS[task].folder,
        unlabelled_folder=TASKS[task].unlabelled_folder,
        num_unlabelled=config_dict.placeholder(int),  # all
        # Choices: FedDF's own division is "equal_dirichlet". A client may have a single example,
        # since `min_size` keeps its default of 1.
        partition=dict(
            name="dirichlet", num_clients=20, concentration=float(alpha), validation=0.0
        ),
        crop=32,  # choice: crops of the image with 4 pixels around, and flips, as FedDF
        padding=4,
        augmentation="per_image",
        division_per_seed=False,
        seed=0,
    )
    # Choices: SGD has no momentum, on clients and on the server. Averages include batch statistics.
    config.training = defaults.training(
        method=local,
        proximal_weight=0.001,  # fed_prox
        scaffold_option=2,
        batch_size=64,
        epochs=40,
    )
    # Choices: ResNets have basic blocks, and shortcuts of kind "B", which are 1x1 convolutions.
    config.pools = defaults.one_pool(f"{network}_{TASKS[task].classes}", 8, 0.8)
    config.nested_pools = True

    config.algorithm = dict(name=server)
    if server != "fed_avg":
        # Choices: KL(teacher || student); the loss times the temperature squared, which is not
        # validated; students in training mode, so that server data change their batch statistics; the
        # server's images are normalised as the clients' are.
        config.algorithm = defaults.distillation(server, steps=5000, batch_size=256)
    if server == "fed_sdd":
        config.algorithm.rounds_kept = int(rounds_kept)
    if server == "fed_df":
        # No validation data, so neither early stopping nor drop-worst, which Table 10 has.
        with config.ignore_type():
            config.algorithm.validation = None
    # Curves are of test images, as in the paper; nothing is chosen by them.
    config.evaluation = defaults.evaluation(10, 10, splits=("test",), final_splits=())
    config.execution = defaults.execution()
    config.notes = ()  # remarks on the run, at the end of its page of results
    return config
