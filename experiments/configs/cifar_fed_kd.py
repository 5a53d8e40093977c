r"""FedKD on CIFAR-10 at a size for a CPU, in the orderings that its paper shows.

    python -m fedcodist.commands.compare --config experiments/configs/cifar_fed_kd.py \
        --workdir runs/cifar_fed_kd --only "fed_avg,student" --only "fed_avg,teacher" --only "fed_kd" \
        --only "fed_kd,no_mutual"

The training images are dealt into four or sixteen equal random parts (paper: four parts, of tweets or of
users). A run is a method's name. With `_16` after it there are sixteen clients and four times the
rounds, so a client takes as many steps as one of four. With `resnet,` before it, student and teacher
are ResNet-8 and ResNet-20 on 32x32 pixels (78,042 and 272,474 parameters). Otherwise they are the
codistillation paper's CNNs on 24x24 pixels (97,738 and 386,954). The smaller student is this CNN with
half the widths (24,938).

- `fed_avg,student`, `fed_avg,smaller` and `fed_avg,teacher` average one network.
- `fed_kd,smaller` has the smaller student.
- `fed_kd,no_mutual`: teachers learn from local data alone; they are the paper's "Local". Students are
  those of FedAvg with compressed links, and their Adam keeps its moments from round to round; the run's
  bytes are theirs.
- `centralised` is the same with one client who has all images; its teacher is the paper's "Cen".
- `fed_kd,no_output`, `no_hidden` and `not_adaptive` leave a part of the losses out; `whole` compresses
  nothing.
- `fed_kd,through_normaliser`: the losses' common divisor gets a gradient, as in the released code; the
  paper does not say.
  In all other runs it gets none: see `MutualLosses.detach_normaliser`.
- `fed_kd,0.9-1` has other energy thresholds at start and end; `fed_kd` has 0.95 and 0.98.
- `fml`: FML's losses for the same pair, with weights of a half. There are no hidden states and no
  adaptive weights, optimizers start anew in each round, and students are sent whole.
- `fetch_sgd` and `fed_dropout` train the teacher's network with about 25 % (and the model once) and 60 %
  of FedAvg's bytes. FetchSGD has twenty times as many rounds, each with one gradient of a twentieth of
  the examples.

`fed_kd` adds the ranks and singular values of clients' updates and of their gradients, layer by layer,
to metrics.jsonl after every round. Other runs do so with `--config.training.compression.spectra=True`,
and `gradient_spectra`. Learning rates are Adam's default. FetchSGD has no default; its rate is tuned
(results/tuning/cifar_fed_kd_fetch_sgd.json). In its recorded runs clients are weighted by all of their
images, now by those of the gradient. Clients have equally many images, or one more: new runs agree up
to rounding, not to the bit.

Results are in docs/results/fed_kd.md. Those with two seeds are older: in them the divisor got a
gradient, and sixteen clients had ten rounds. Runs of CNNs have five seeds, which decide most of the
paper's statements; ResNets have two, since they take hours. With four clients most runs of CNNs take 1
to 10 minutes each on two cores, Federated Dropout more. With sixteen, FedAvg takes half an hour to an
hour and a half of one core, and FedKD one to two hours.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.models import cnn

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
THROUGH_NORMALISER = "through_normaliser"
FML = dict(hidden_weight=0.0, adaptive="none", fresh_optimizers=True)
THRESHOLDS = {
    f"{start:g}-{end:g}": (start, end)
    for start, end in ((0.5, 1.0), (0.8, 1.0), (0.9, 1.0), (0.95, 1.0), (1.0, 1.0), (0.95, 0.95))
}
SMALLER_STUDENT = "experiments.configs.cifar_fed_kd:smaller_student"
# The runs with sixteen clients, and those with ResNets. FetchSGD and Federated Dropout cannot train
# networks with batch statistics.
MAIN = (*FED_AVG, "fed_kd", "fed_kd,no_mutual")
CENTRALISED = "centralised"
SMALLER = ("fed_avg,smaller", "fed_kd,smaller")
BASELINES = ("fml", "fetch_sgd", "fed_dropout")
FETCH_SGD_ROUNDS = 20  # for each round of the other methods


def get_runs() -> list[str]:
    """All of the CNNs with four clients, the methods with sixteen, and the main ones of ResNets."""
    kinds = [*PARTS, THROUGH_NORMALISER, "whole", *THRESHOLDS]
    cnn = [*FED_AVG, "fed_kd", *(f"fed_kd,{kind}" for kind in kinds), CENTRALISED, *SMALLER]
    sixteen = [f"{run}_16" for run in (*MAIN, *BASELINES)]
    return [*cnn, *BASELINES, *sixteen, *(f"resnet,{run}" for run in MAIN)]


def get_config(run: str = "fed_kd") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    pair = RESNET if run.startswith("resnet,") else CNN
    clients = 16 if run.endswith("_16") else 1 if run == CENTRALISED else 4
    name = "fed_kd,no_mutual" if run == CENTRALISED else run
    method, _, kind = name.removeprefix("resnet,").removesuffix("_16").partition(",")
    rounds = 40 if clients == 16 else 10
    config = defaults.experiment("cifar_fed_kd", rounds, run, seeds=2 if pair is RESNET else 5)

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
    elif kind != "teacher":
        config.pools.main.model = pair.student if kind == "student" else SMALLER_STUDENT
    return config


def smaller_student(num_classes: int) -> cnn.CNN:
    """The small CNN with half its widths."""
    return cnn.CNN((8, 16, 16), (32, 64), num_classes)


def _add_fed_kd(config: ConfigDict, pair: Pair, kind: str) -> None:
    is_fml = config.training.method == "fml"
    config.training.method = "fed_kd"
    config.pools.main.model = SMALLER_STUDENT if kind == "smaller" else pair.student
    config.training.fed_kd = defaults.fed_kd(
        pair.teacher,
        RATE,
        teacher_layers=pair.teacher_layers,
        student_layers=pair.student_layers,
        detach_normaliser=kind != THROUGH_NORMALISER,
    )
    config.training.fed_kd.update(FML if is_fml else PARTS.get(kind, {}))
    if not is_fml and kind != "whole":
        start, end = THRESHOLDS.get(kind, (0.95, 0.98))
        config.training.compression = defaults.compression(
            start=start,
            end=end,
            spectra=not kind,  # costs another decomposition
            gradient_spectra=not kind,
        )


def _add_fetch_sgd(config: ConfigDict) -> None:
    """A quarter of FedAvg's bytes in all: in a round 5,800 floats up, 1,935 values and indices down."""
    config.rounds = config.full_rounds = FETCH_SGD_ROUNDS * config.rounds
    config.evaluation.every *= FETCH_SGD_ROUNDS
    config.evaluation.checkpoint_every *= FETCH_SGD_ROUNDS
    # Nine tenths of the 30,000 images that we have. With all 50,000 it would be 45,000.
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
