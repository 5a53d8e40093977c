r"""The codistillation paper's domain shift (table 2, figure 3) on text that anyone has.

Clients of one domain train the small model, others of another domain the large one, and the models teach
each other on unlabelled text of both. The rounds around each codistillation are evaluated, besides every
twentieth, to see what it changes and what of that is forgotten. A run is "method,text"; the texts are

    python_source    prose (docstrings and comments) to the small model, code to the large one
    stackexchange    answers to the small model, questions to the large one, as in the paper

"method,text,600" has so many rounds in place of 200: what merging needs on Stack Exchange.

    python datasets/python_source/prepare.py --output data/python_source \
        --vocabulary 4000 --max-examples 100
    python datasets/stackexchange/prepare.py --source FOLDER --output data/stackexchange \
        --vocabulary 4000 --max-examples 50
    python -m fedcodist.commands.sweep --config experiments/configs/text_domain_shift.py \
        --workdir runs/text_domain_shift --config.seeds=3 --at-once 2
    python -m fedcodist.report.tables_domains runs/text_domain_shift

The paper has 30,000 users in each pool of Stack Overflow, 10,000 words and 1,500 rounds; here a few
hundred users know 4,000 words. Learning rates are ours, of four pairs that were tried with FedAvg.
"""

from ml_collections import ConfigDict, config_dict

from fedcodist.config.registry import METHODS

# Domains of the small and of the large model.
TEXTS = {"python_source": ("prose", "code"), "stackexchange": ("answers", "questions")}
ROUNDS = 200  # paper: 1,500
MORE_ROUNDS = 600
LONGER_RUNS = [
    f"{method},stackexchange,{MORE_ROUNDS}" for method in ("fed_avg", "merged_codistillation")
]


def get_runs() -> list[str]:
    """Every cell of the tables."""
    return [f"{method},{text}" for text in TEXTS for method in METHODS] + LONGER_RUNS


def get_config(run: str = "merged_codistillation,python_source") -> ConfigDict:
    """Returns one run; see `get_runs`."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    method, text, *more = run.split(",")
    domains = TEXTS[text]
    config = ConfigDict()
    config.name = "text_domain_shift"
    config.run = run
    config.rounds = config.full_rounds = int(more[0]) if more else ROUNDS
    config.seed = 0
    config.seeds = 1

    config.data = dict(
        name="prepared_text",
        folder=f"data/{text}",
        # Shares of the users, disjoint; of Stack Exchange's not all have asked or answered.
        domains=dict.fromkeys(domains, {"python_source": 0.45, "stackexchange": 0.35}[text]),
        seed=0,
    )
    config.training = dict(
        client_optimizer="sgd",
        batch_size=20,
        epochs=1,
        server_optimizer="adam",
        server_epsilon=1e-5,
        server_schedule="linear_decay",
        samples=0,  # classes that a training step's softmax is sampled from; 0 takes all
    )
    config.pools = {
        pool: dict(
            model=f"lstm_{pool}",  # or f"transformer_{pool}"
            domain=domain,
            cohort_size=20,
            client_learning_rate=0.3,
            server_learning_rate=0.01,
            alpha=config_dict.placeholder(float),  # in place of algorithm.alpha
            teaching=dict(
                learning_rate=1e-3,
                decay=0.1,
                interpolation=0.05,
                self_teacher_temperature=1.0,
                temperature=1.0,
                weight=1.0,
            ),
        )
        for pool, domain in zip(("small", "large"), domains, strict=True)
    }
    config.nested_pools = False

    config.algorithm = dict(
        name=method,
        alpha=0.7,  # merged
        alpha_schedule="constant",
        skip_at_alpha_one=False,
        # Periodic; paper: 200. The last one is a tenth of the rounds before the end.
        period=config.rounds * 3 // 10,
        # As many unlabelled sentences in a round of merging as clients have of their own.
        steps={"periodic_codistillation": 200}.get(method, 8),
        batch_size=64,
        distillation_optimizer="adam",
        distillation_epsilon=1e-5,
        direction="forward",
        mixup_beta=0.0,
        flip=False,
    )
    config.evaluation = dict(
        every=20,
        # Rounds around each multiple of the period that are evaluated, whatever the method.
        around=dict(before=1, after=4),
        batch_size=100,
        checkpoint_every=40,
        splits=tuple(f"held_out_{domain}" for domain in domains),
        final_splits=("test", *(f"test_{domain}" for domain in domains)),
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
    config.notes = ()
    return config
