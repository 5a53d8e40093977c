r"""FedKD on sentences with and without adverse drug effects, at a size for a CPU.

    python datasets/ade/prepare.py --source FOLDER --length 48 --output data/ade
    python -m fedcodist.commands.pretrain_encoder --data data/ade --workdir runs/ade_encoder \
        --output runs/ade_encoder.safetensors --layers 4 --width 128 --heads 2
    python -m fedcodist.commands.compare --config experiments/configs/ade_fed_kd.py \
        --workdir runs/ade_fed_kd \
        --metric f_score --config.data.encoder=runs/ade_encoder.safetensors

The paper has the same task on tweets. There, 8 % of the tweets describe an effect, here a fifth of the
sentences do. These are shown twice, as the paper does it for language models; its other networks see
them nine times. The runs are those of cifar_fed_kd.py, which explains them, for four clients: the
teachers of `fed_kd,no_mutual` are the paper's "Local", `centralised` has its "Cen", `fed_avg,teacher` is
its "Fed", and `fed_avg,student` is a small model alone. Results are in docs/results/fed_kd.md: mutual
learning lowers the student by 2.6 points of average precision, teachers gain by predictions and lose as
much by hidden states, and SVD halves the bytes at a cost below 0.1 points. Results with two seeds are
older: no sentence is repeated in them, and the losses' divisor has a gradient.

Question of the runs with five seeds: which of the paper's statements hold without a gradient through the
losses' divisor (the paper does not say) and with sentences with an effect twice, by F, average precision
and loss? Intervals are Student's t over the differences of the seeds; test sentences are looked at once.
The stop rule: three hours of two cores in all, for the encoder too. Runs are in the order of `get_runs`
up to `fml`, then `centralised`, Federated Dropout, FetchSGD and the rest. What has not begun
then is put off: `text_lstm_attention` and `text_self_attention`. The encoder and the runs before these
took 5.8 hours of one core.

The teacher is an encoder of four layers of width 128, the student one of two layers. Both start from the
file's first layers. `fed_kd,smaller` has a student of one layer. `fed_kd,text_cnn` has the network of
the paper's table 5, of which only the embeddings come from the file; there are also `text_lstm`, both
with attentive pooling (`text_cnn_attention`, `text_lstm_attention`), and `text_self_attention`.
`fed_avg,text_cnn` averages this network, and so on. These runs have four clients, who see the sentences
with an effect twice. In the paper's table these networks are trained centrally, and see them nine times.

As in the paper, embedding tables keep the file's values and are neither trained nor sent. This leaves
819,602 and 423,058 parameters. With `--config.data.frozen_tables=False` the tables are parameters too,
and no file is needed. The sizes of FetchSGD and Federated Dropout are for frozen tables: about 25 % (and
the model once) and 60 % of FedAvg's bytes. A client of Federated Dropout has one of two heads in each
layer and 323 inner neurons of 512. FetchSGD takes a plain gradient of a twentieth of the examples in
each of its rounds, without dropout. Its learning rate is tuned
(results/tuning/ade_fed_kd_fetch_sgd.json), Adam's is not. In its runs with two seeds clients are
weighted by all of their sentences, later by those of the gradient, which are equally many.
"""

from ml_collections import ConfigDict, config_dict

from experiments.configs import cifar_fed_kd
from experiments.configs.cifar_fed_kd import (
    CENTRALISED,
    CNN,
    FED_AVG,
    PARTS,
    SMALLER,
    SMALLER_STUDENT,
    THROUGH_NORMALISER,
)
from fedcodist.config import defaults
from fedcodist.config.data_bert import SMALL_ENCODERS

TEACHER, STUDENT, SMALL_STUDENT = "bert_tiny_4", "bert_tiny_2", "bert_tiny_1"
# The networks of the paper's table 5.
ONE_LAYER = tuple(SMALL_ENCODERS)
RATE = 5e-4


def get_runs() -> list[str]:
    """FedAvg of either network, FedKD and its parts, FML, FetchSGD, Federated Dropout."""
    parts = [f"fed_kd,{part}" for part in (*PARTS, THROUGH_NORMALISER, "whole")]
    baselines = ["fml", "fetch_sgd", "fed_dropout"]
    one_layer = [f"{method},{name}" for method in ("fed_avg", "fed_kd") for name in ONE_LAYER]
    return [*FED_AVG, "fed_kd", *parts, *baselines, CENTRALISED, *SMALLER, *one_layer]


def get_config(run: str = "fed_kd") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    method, _, student = run.partition(",")
    config = cifar_fed_kd.get_config(f"{method},smaller" if student in ONE_LAYER else run)
    config.name, config.run = "ade_fed_kd", run
    config.rounds = config.full_rounds = config.rounds * 3 // 10  # three epochs; the paper has two
    with config.unlocked():
        config.data = dict(
            name="prepared_sentences",
            folder="data/ade",
            num_clients=1 if run == CENTRALISED else 4,
            seed=0,
            encoder=config_dict.placeholder(str),
            frozen_tables=True,
            positive_copies=2,  # paper: 2 for language models, 9 for the other networks
        )
    config.training.batch_size = 64
    main = config.pools.main
    main.model = {
        CNN.teacher: TEACHER,
        CNN.student: STUDENT,
        SMALLER_STUDENT: student if student in ONE_LAYER else SMALL_STUDENT,
    }[main.model]
    main.client_learning_rate = RATE
    if "fed_kd" in config.training:
        own = config.training.fed_kd
        own.teacher, own.teacher_learning_rate = TEACHER, RATE
        del own.teacher_layers, own.student_layers  # an encoder outputs all of its layers
    if "fetch_sgd" in config.training:
        # A twentieth of a client's sentences: there are 16,775, and 3,383 of them twice.
        config.training.fetch_sgd.update(
            sketch_rows=5, sketch_columns=2467, k=4025, examples_per_round=252
        )
        main.server_learning_rate = 0.4
    if "fed_dropout" in config.training:
        config.training.fed_dropout.share = 0.63
    config.evaluation.splits = ("held_out",)
    config.evaluation.checkpoint_every = config.evaluation.every
    config.evaluation.batch_size = 200
    return config
