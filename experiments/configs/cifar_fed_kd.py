r"""FedKD on CIFAR-10 at a size for a CPU, in the orderings that its paper shows.

    python -m fedcodist.commands.compare --config experiments/configs/cifar_fed_kd.py \
        --workdir runs/cifar_fed_kd --only "*student" --only "*teacher" --only "fed_kd*"

The training images are dealt into four or sixteen equal random parts (paper: four parts, of tweets or of
users). A run is a method's name. With `_16` after it there are sixteen clients. With `resnet,` before
it, student and teacher are ResNet-8 and ResNet-20 on 32x32 pixels (78,042 and 272,474 parameters).
Otherwise they are the codistillation paper's CNNs on 24x24 pixels (97,738 and 386,954).

- `fed_avg,student` and `fed_avg,teacher` average either network.
- `fed_kd,no_mutual`: teachers learn from local data alone; they are the paper's "Local". Students are
  those of FedAvg with compressed links; the run's bytes are theirs.
- `fed_kd,no_output`, `no_hidden` and `not_adaptive` leave a part of the losses out; `whole` compresses
  nothing.
- `fed_kd,0.9-1` has other energy thresholds at start and end; `fed_kd` has 0.95 and 0.98.
- `fml`: FML's losses for the same pair, with weights of a half. There are no hidden states and no
  adaptive weights, optimizers start anew in each round, and students are sent whole.
- `fetch_sgd` and `fed_dropout` train the teacher's network with about 25 % (and the model once) and 60 %
  of FedAvg's bytes. FetchSGD has twenty times as many rounds, each with one gradient of a twentieth of
  the examples.

`fed_kd` adds the ranks and singular values of clients' updates, layer by layer, to metrics.jsonl after
every round; its other runs do so with `--config.training.compression.spectra=True`. Learning rates are
Adam's default. FetchSGD has no default; its rate is tuned
(results/tuning/cifar_fed_kd_fetch_sgd.json).

Outcome with the CNNs and four clients: FedKD's teachers have 60.1 % with a fifth of the bytes of FedAvg
of the teacher's network, which has 63.7 % (docs/results/fed_kd.md).
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedcodist.config import defaults

RATE = 0.001


class Pair(NamedTuple):
    """Teacher and student, the layers whose outputs they compare, and the images that they take."""

    teacher: str
    student: str
    teacher_layers: tuple[str, ...]
    student_layers: tuple[str, ...]
    crop: int


_CNN_LAYERS = ("conv1", "conv2", "conv3", "dense1", "dense2")
CNN = Pair("cnn_large_10", "cnn_small_10", _CNN_LAYERS, _CNN_LAYERS, 24)
RESNET = Pair(
    "resnet20_10",
    "resnet8_10",
    tuple(f"stage{stage}_block3" for stage in (1, 2, 3)),
    tuple(f"stage{stage}_block1" for stage in (1, 2, 3)),
    32,
)
FED_AVG = ("fed_avg,student", "fed_avg,teacher")
PARTS: dict[str, dict[str, Any]] = {
    "no_mutual": dict(output_weight=0.0, hidden_weight=0.0),
    "no_output": dict(output_weight=0.0),
    "no_hidden": dict(hidden_weight=0.0),
    "not_adaptive": dict(adaptive="none"),
}
FML = dict(hidden_weight=0.0, adaptive="none", fresh_optimizers=True)
THRESHOLDS = {
    f"{start:g}-{end:g}": (start, end)
    for start, end in ((0.5, 1.0), (0.8, 1.0), (0.9, 1.0), (0.95, 1.0), (1.0, 1.0), (0.95, 0.95))
}
# The runs with sixteen clients, and those with ResNets. FetchSGD and Federated Dropout cannot train
# networks with batch statistics.
MAIN = (*FED_AVG, "fed_kd", "fed_kd,no_mutual")
BASELINES = ("fml", "fetch_sgd", "fed_dropout")
FETCH_SGD_ROUNDS = 20  # for each round of the other methods


def get_runs() -> list[str]:
    """All of the CNNs with four clients, the methods with sixteen, and the main ones of ResNets."""
    kinds = [*PARTS, "whole", *THRESHOLDS]
    cnn = [*FED_AVG, "fed_kd", *(f"fed_kd,{kind}" for kind in kinds)]
    sixteen = [f"{run}_16" for run in (*MAIN, *BASELINES)]
    return [*cnn, *BASELINES, *sixteen, *(f"resnet,{run}" for run in MAIN)]


def get_config(run: str = "fed_kd") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    pair = RESNET if run.startswith("resnet,") else CNN
    clients = 16 if run.endswith("_16") else 4
    method, _, kind = run.removeprefix("resnet,").removesuffix("_16").partition(",")
    config = defaults.experiment("cifar_fed_kd", 10, run, seeds=2)

    config.data = dict(
        name="prepared",
        folder="data/cifar10",
        unlabelled_folder="data/cifar10",  # not used by any of the methods
        num_unlabelled=1,
        partition=dict(
            name="equal_dirichlet", num_clients=clients, concentration=1e6, validation=0.1
        ),
        crop=pair.crop,
        padding=4 if pair.crop == 32 else 0,
        augmentation="per_image",
        seed=0,
    )
    config.training = defaults.training(
        method=method,
        client_optimizer="adam",
        batch_size=32,
    )
    config.pools = defaults.one_pool(pair.teacher, clients, RATE)
    config.nested_pools = True
    config.algorithm = dict(name="fed_avg")
    config.evaluation = dict(
        every=1,
        clients=100,
        batch_size=500,
        checkpoint_every=5,
        splits=("validation",),
        final_splits=("test",),
    )
    config.execution = defaults.execution()
    if method in ("fed_kd", "fml"):
        _add_fed_kd(config, pair, kind)
    elif method == "fetch_sgd":
        _add_fetch_sgd(config)
    elif method == "fed_dropout":
        config.training.fed_dropout = dict(share=0.77)  # of units; 59 % of the parameters
    elif kind == "student":
        config.pools.main.model = pair.student
    return config


def _add_fed_kd(config: ConfigDict, pair: Pair, kind: str) -> None:
    is_fml = config.training.method == "fml"
    config.training.method = "fed_kd"
    config.pools.main.model = pair.student
    config.training.fed_kd = defaults.fed_kd(
        pair.teacher,
        RATE,
        teacher_layers=pair.teacher_layers,
        student_layers=pair.student_layers,
    )
    config.training.fed_kd.update(FML if is_fml else PARTS.get(kind, {}))
    if not is_fml and kind != "whole":
        start, end = THRESHOLDS.get(kind, (0.95, 0.98))
        config.training.compression = defaults.compression(
            start=start,
            end=end,
            spectra=not kind,  # of clients' updates; costs another decomposition
        )


def _add_fetch_sgd(config: ConfigDict) -> None:
    """A quarter of FedAvg's bytes in all: in a round 5,800 floats up, 1,935 values and indices down."""
    config.rounds = config.full_rounds = FETCH_SGD_ROUNDS * config.rounds
    config.evaluation.every *= FETCH_SGD_ROUNDS
    config.evaluation.checkpoint_every *= FETCH_SGD_ROUNDS
    examples = 27_000 // (FETCH_SGD_ROUNDS * config.data.partition.num_clients)
    config.training.fetch_sgd = dict(
        sketch_rows=5,
        sketch_columns=1160,
        k=1935,
        momentum=0.9,
        examples_per_round=examples,
    )
    config.pools.main.server_learning_rate = 0.27
    # For fedcodist.tuning.tune, with four clients and one seed: rates of SGD have no default.
    config.tuning = dict(space=(("pools.main.server_learning_rate", 0.03, 3.0, "log"),))
