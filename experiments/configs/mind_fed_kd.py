r"""FedKD on MIND at its paper's length (Wu et al., 2022, table 2): for accelerators.

    python datasets/mind/prepare.py --source MINDsmall_train --evaluation MINDsmall_dev \
        --vocabulary vocab.txt --output data/mind
    python -m fedcodist.commands.compare --config experiments/configs/mind_fed_kd.py \
        --workdir runs/mind_fed_kd --metric auc --config.data.encoder=model.safetensors

Published weights of BERT-base, uncased, and its vocabulary stand in for UniLM's, so orderings may be
compared with the paper and numbers may not. Readers are dealt into four equal parts. The teacher is the
encoder of twelve layers, students have its first four or two; tables of embeddings stay as they are.

- `fed_avg,teacher`, `fed_avg,4` and `fed_avg,2` average one network.
- `fed_kd,4` and `fed_kd,2`; the teachers of `fed_kd,4,no_mutual` are the paper's "Local".
- `fed_dropout` trains 60 % of the teacher's network.

Rates, batches, the three rounds of an epoch each, thresholds and the rest are the paper's. FetchSGD,
whose rounds it does not tell, is left out.
"""

from ml_collections import ConfigDict, config_dict

TEACHER, STUDENTS = "bert_base_12", {"4": "bert_base_4", "2": "bert_base_2"}
TEACHER_RATE, STUDENT_RATE = 2e-6, 5e-6


def get_runs() -> list[str]:
    """FedAvg of the three networks, FedKD with either student, local teachers, Federated Dropout."""
    alone = ["fed_avg,teacher", *(f"fed_avg,{layers}" for layers in STUDENTS)]
    return [
        *alone,
        *(f"fed_kd,{layers}" for layers in STUDENTS),
        "fed_kd,4,no_mutual",
        "fed_dropout",
    ]


def get_config(run: str = "fed_kd,4") -> ConfigDict:
    """Returns one run's experiment."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    method, *kinds = run.split(",")
    student = STUDENTS.get(kinds[0]) if kinds else None
    config = ConfigDict()
    config.name = "mind_fed_kd"
    config.run = run
    config.rounds = config.full_rounds = 3
    config.seed = 0
    config.seeds = 5  # repeats of the paper

    config.data = dict(
        name="prepared_news",
        folder="data/mind",
        num_clients=4,
        seed=0,
        encoder=config_dict.placeholder(str),
        frozen_tables=True,
    )
    config.training = dict(
        method=method,
        client_optimizer="adam",
        batch_size=32,
        epochs=1,
        server_optimizer="sgd",  # of rate 1: the mean of the clients' models
        server_epsilon=config_dict.placeholder(float),
        server_schedule="constant",
    )
    config.pools = dict(
        main=dict(
            model=student or TEACHER,
            fraction=1.0,
            cohort_size=4,
            client_learning_rate=STUDENT_RATE if student else TEACHER_RATE,
            server_learning_rate=1.0,
        ),
    )
    config.nested_pools = True
    config.algorithm = dict(name="fed_avg")
    # Impressions have up to 300 candidates.
    config.evaluation = dict(
        every=1,
        clients=100,
        batch_size=4,
        checkpoint_every=1,
        splits=("held_out",),
        final_splits=("test",),
    )
    config.execution = dict(
        processes=config_dict.placeholder(int),
        loop="scan",
        chunk_size=config_dict.placeholder(int),
        seeds_loop="map",
        stream=False,
        precision="float32",
        rematerialise=False,
    )
    if method == "fed_dropout":
        config.training.fed_dropout = dict(share=0.6)  # of heads and inner neurons
    if method == "fed_kd":
        weight = 0.0 if "no_mutual" in kinds else 1.0
        config.training.fed_kd = dict(
            teacher=TEACHER,
            teacher_learning_rate=TEACHER_RATE,
            output_weight=weight,
            hidden_weight=weight,
            exchange="epoch_delta",
            adaptive="batch",
            kl_reduction="batchmean",
            hidden_map="learned",
            detach_targets=True,
            detach_normaliser=False,
            without_padding=False,  # of text, in distances of hidden states
        )
        config.training.compression = dict(
            uplink="svd",
            downlink="svd",
            start=0.95,
            end=0.98,
            range_finder=config_dict.placeholder(int),  # columns; exact where not set
            spectra=False,  # of clients' updates, in metrics.jsonl
            gradient_spectra=False,  # of a batch's gradient, before any optimizer
        )
    return config
