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

from ml_collections import ConfigDict

from fedcodist.config import defaults
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
    defaults.check_run(run, get_runs())
    method, text, *more = run.split(",")
    domains = TEXTS[text]
    config = defaults.experiment("text_domain_shift", int(more[0]) if more else ROUNDS, run)

    config.data = dict(
        name="prepared_text",
        folder=f"data/{text}",
        # Shares of the users, disjoint; of Stack Exchange's not all have asked or answered.
        domains=dict.fromkeys(domains, {"python_source": 0.45, "stackexchange": 0.35}[text]),
        seed=0,
    )
    config.training = defaults.adaptive_training(
        samples=0,  # classes that a training step's softmax is sampled from; 0 takes all
    )
    config.pools = {
        pool: defaults.codistilled_pool(
            f"lstm_{pool}",  # or f"transformer_{pool}"
            domain=domain,
            client_learning_rate=0.3,
        )
        for pool, domain in zip(("small", "large"), domains, strict=True)
    }
    config.nested_pools = False

    config.algorithm = defaults.codistillation(
        method,
        # Periodic; paper: 200. The last one is a tenth of the rounds before the end.
        period=config.rounds * 3 // 10,
        # As many unlabelled sentences in a round of merging as clients have of their own.
        steps=200 if method == "periodic_codistillation" else 8,
        mixup_beta=0.0,
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
    config.execution = defaults.execution()
    config.notes = ()
    return config
