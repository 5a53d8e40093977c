r"""Multi-Headed Distillation on scikit-learn's handwritten digits: eight clients on a directed cycle.

Each client has three of the ten digits as primary labels and few examples of the others; no download. A
run is a method's name. All runs share data and private batches. They also share initial weights, except
FedAvg, whose clients all start from those of the first client.

    fedcodist run digits_mhd
    python -m fedcodist.report.tables_heads runs/digits_mhd/multi_headed_distillation

The second command prints the accuracies of every head. docs/results/mhd.md has the results of longer
runs on digits (experiments/configs/digits_mhd_orderings.py).
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config import defaults


def get_runs() -> list[str]:
    """MHD and its baselines."""
    return list(_methods())


def get_config(run: str = "multi_headed_distillation") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("digits_mhd", 40, run)

    config.data = dict(
        name="digits_primary",
        num_clients=8,
        labels_per_client=3,  # paper: 250 of 1,000 (not verified)
        assignment="random",  # or "even"
        skew=100.0,
        public_share=0.2,  # paper: about 0.1 (not verified)
        private_share=config_dict.placeholder(float),
        test_share=0.2,
        held_out_share=0.1,
        seed=0,
    )
    config.parties = dict(
        networks="digits_small",  # or one name per client
        heads=3,
        projection=config_dict.placeholder(int),  # a width, if embeddings have different widths
        graph=dict(
            name="directed_cycle",  # "complete", "islands" of a size, "random" with a probability
            size=config_dict.placeholder(int),
            probability=config_dict.placeholder(float),
            seed=config_dict.placeholder(int),
        ),
    )
    # paper: 0.03, 0.9, batches of 512 and 200 steps between exchanges (not verified)
    config.training = dict(learning_rate=0.03, momentum=0.9, batch_size=32, steps=25)
    with config.ignore_type():
        config.algorithm = dict(name=run, **_methods()[run])
    config.evaluation = defaults.evaluation(10, 20)
    config.execution = defaults.plain_execution(processes=1, loop="vmap", chunk_size=8)
    return config


def _methods() -> dict[str, dict]:
    """Each method's settings, made anew because configs that share a placeholder share its value."""
    return {
        "multi_headed_distillation": dict(
            embedding_weight=1.0,
            head_weight=1.0,  # paper: 3 (not verified)
            public_batch_size=64,  # paper: 512 (not verified)
            teachers=1,  # Delta
            candidates="base",  # "same_level", "self", "same_level_and_self"
            separate_levels=True,  # whether candidates of the same level have their own loss term
            choice="most_confident",  # or "random"
            top_predictions=config_dict.placeholder(int),  # sent by every head; all if not set
            embedding_distance="squared",
            reaches_backbone=True,  # whether heads' and embeddings' losses change the backbone
            updates_statistics=False,  # whether public batches change running averages too
            checkpoints_per_client=config_dict.placeholder(int),  # as many as there are clients
            checkpoints_on="device",  # or "host"
            exchange_seed=0,
            same_start=False,  # whether clients of one network start from the same weights
        ),
        "local_only_steps": dict(same_start=False),
        "decentralised_fed_avg": dict(same_start=True),  # a mean of unrelated weights is useless
        "decentralised_periodic_codistillation": dict(
            public_batch_size=64,
            period=6,  # so that the last codistillation is some rounds before the end
            examples=9600,  # as many as MHD's clients see in a period
            distillation_learning_rate=1e-3,
            temperature=1.0,
            same_start=False,
        ),
        "centralised": dict(),
    }
