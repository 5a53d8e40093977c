r"""FedKD on sentences with and without adverse drug effects, at a size for a CPU.

    python datasets/ade/prepare.py --source FOLDER --length 48 --output data/ade
    python -m experiments.compare --config experiments/configs/ade_fed_kd.py --workdir runs/ade_fed_kd \
        --metric f_score

The paper's task is the same question about tweets. Runs are those of cifar_fed_kd.py, which explains
them, for four clients: `fed_kd,no_mutual` has the paper's "Local" as its teachers, `fed_avg,teacher` is
"Fed", `fed_avg,student` a small model alone. The teacher is an encoder of four layers of width 128
(1,910,034 parameters), the student one of two (1,513,490), of which 1,090,688 are embeddings, which are
trained and sent too. All networks start from nothing, or, with `--config.data.encoder=FILE`, from the
first layers of a file that `experiments.pretrain_encoder --layers 4 --width 128 --heads 2` has written.
Federated Dropout is not there: it knows chains of dense and convolutional layers only. FetchSGD takes a
plain gradient of all examples in each of its rounds, which suits encoders that start from nothing badly.
Learning rates are not tuned.
"""

from ml_collections import ConfigDict, config_dict

from experiments.configs import cifar_fed_kd
from experiments.configs.cifar_fed_kd import CNN, FED_AVG, PARTS

TEACHER, STUDENT = "bert_tiny_4", "bert_tiny_2"
RATE = 5e-4


def get_runs() -> list[str]:
    """FedAvg of either network, FedKD and its parts, FML, FetchSGD."""
    return [
        *FED_AVG,
        "fed_kd",
        *(f"fed_kd,{part}" for part in (*PARTS, "whole")),
        "fml",
        "fetch_sgd",
    ]


def get_config(run: str = "fed_kd") -> ConfigDict:
    """Returns one run's experiment."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    config = cifar_fed_kd.get_config(run)
    config.name = "ade_fed_kd"
    config.seeds = 1
    with config.unlocked():
        config.data = dict(
            name="prepared_sentences",
            folder="data/ade",
            num_clients=4,
            seed=0,
            encoder=config_dict.placeholder(str),
        )
    config.training.batch_size = 64
    main = config.pools.main
    main.model = {CNN.teacher: TEACHER, CNN.student: STUDENT}[main.model]
    main.client_learning_rate = RATE
    if "fed_kd" in config.training:
        own = config.training.fed_kd
        own.teacher, own.teacher_learning_rate = TEACHER, RATE
        del own.teacher_layers, own.student_layers  # an encoder shows all of its layers
    if "fetch_sgd" in config.training:  # a quarter of FedAvg's bytes
        config.training.fetch_sgd.update(rows=5, columns=23_000, count=37_500)
    config.evaluation.splits = ("held_out",)
    config.evaluation.batch_size = 200
    return config
