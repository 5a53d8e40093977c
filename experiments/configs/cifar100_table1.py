r"""The CIFAR-100 half of the codistillation paper's Table 1.

Rows are the method and the unlabelled data, columns the number of examples of the clients that can
train the large model. A run is "method,examples" or "method,examples,unlabelled":

                                   3100   4700   6300
    fed_avg                         x      x      x
    periodic_codistillation  in_domain and cifar10
    merged_codistillation    in_domain and cifar10

    python -m fedcodist.commands.sweep --config experiments/configs/cifar100_table1.py \
        --only "*,4700*" --workdir runs/cifar100_table1

What is marked as tuned was found by cifar100_tuning.py; PeriodicCodist and MergedCodist share it. The
large model's rates are of a study in results/tuning, the small one's of an earlier study whose record
was not kept (docs/results/tuning.md).

The data come from `datasets/cifar100/prepare.py` and, for out-of-domain images,
`datasets/cifar10/prepare.py`.
"""

from ml_collections import ConfigDict, config_dict

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
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    method, examples, *unlabelled = run.split(",")
    config = ConfigDict()
    config.name = "cifar100_table1"
    config.run = run
    config.rounds = 1500
    config.full_rounds = 1500  # what a table's number needs; shorter runs are marked
    config.seed = 0
    config.seeds = 1

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
    config.training = dict(
        client_optimizer="sgd",
        batch_size=20,
        epochs=1,
        server_optimizer="adam",
        server_epsilon=1e-5,
        server_schedule="linear_decay",  # to zero
    )
    config.pools = dict(
        small=dict(
            model="cnn_small",
            fraction=1.0,
            cohort_size=20,
            client_learning_rate=0.034,  # tuned
            server_learning_rate=1.4e-3,  # tuned
            alpha=config_dict.placeholder(float),
            teaching=dict(
                learning_rate=1.3e-3,  # tuned
                decay=0.1,
                interpolation=0.47,  # tuned
                self_teacher_temperature=1.0,
                temperature=0.36,  # tuned
                weight=1.0,
            ),
        ),
        large=dict(
            model="cnn_large",
            fraction=FRACTIONS[examples],
            cohort_size=20,
            client_learning_rate=4.8e-3,  # tuned
            server_learning_rate=1.8e-3,  # tuned
            alpha=config_dict.placeholder(float),
            teaching=dict(
                learning_rate=1.3e-3,  # tuned
                decay=0.1,
                interpolation=0.47,  # tuned
                self_teacher_temperature=1.0,
                temperature=0.36,  # tuned
                weight=1.0,
            ),
        ),
    )
    config.nested_pools = True  # large clients serve the small model too

    config.algorithm = dict(
        name=method,
        alpha=0.86,  # tuned
        alpha_schedule="constant",
        skip_at_alpha_one=False,
        period=200,
        steps={"periodic_codistillation": 200}.get(method, 32),
        batch_size=128,
        distillation_optimizer="adam",
        distillation_epsilon=1e-5,
        direction="forward",
        mixup_beta=2.0,
        flip=True,
    )
    config.evaluation = dict(
        every=25, batch_size=500, checkpoint_every=25, splits=("held_out",), final_splits=("test",)
    )
    config.execution = dict(
        processes=config_dict.placeholder(int),
        loop="scan",
        chunk_size=config_dict.placeholder(int),  # with loop="vmap" what fits, if not set
        seeds_loop="map",
        stream=False,
        precision="float32",  # or "bfloat16"
        rematerialise=False,
    )

    config.notes = ()  # remarks on the run, at the end of its page of results
    if method == "fed_avg" and examples != "4700":
        # The small model does not depend on the pool of the large one: 4700's serves all columns.
        del config.pools.small
    if unlabelled == ["cifar10"]:
        config.data.unlabelled_folder = UNLABELLED["cifar10"]
    return config
