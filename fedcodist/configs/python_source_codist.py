r"""Codistillation across domains of text: the Python standard library's prose and code; no download.

Docstrings and comments of some modules train the small model, code of other modules trains the large
one, and the models teach each other on unlabelled text of both kinds. Besides every twentieth round, the
rounds around each codistillation are evaluated, to show what it changes and how this is forgotten. A run
is a method.

    fedcodist prepare python_source --output data/python_source --vocabulary 4000 --max-examples 100
    fedcodist run python_source_codist:merged_codistillation
    python -m fedcodist.report.tables_domains runs/python_source_codist/merged_codistillation

The learning rates were chosen from four pairs that were tried with FedAvg. The runs
`*,python_source` of experiments/configs/text_domain_shift.py have these settings and three seeds:
MergedCodist lifts the small model by 9.2 points on code and the large one by 4.7 on prose
(docs/results/domain_shift.md).
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.config.registry import METHODS

DOMAINS = ("prose", "code")  # of the small and of the large model


def get_runs() -> list[str]:
    """FedAvg and both ways of codistillation."""
    return list(METHODS)


def get_config(run: str = "merged_codistillation") -> ConfigDict:
    """Returns one method's experiment."""
    defaults.check_run(run, get_runs())
    config = defaults.experiment("python_source_codist", 200, run)  # paper: 1,500 rounds

    config.data = dict(
        name="prepared_text",
        folder="data/python_source",
        domains=dict.fromkeys(DOMAINS, 0.45),  # shares of the users, disjoint
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
        for pool, domain in zip(("small", "large"), DOMAINS, strict=True)
    }
    config.nested_pools = False

    config.algorithm = defaults.codistillation(
        run,
        # Of PeriodicCodist; paper: 200. The last codistillation is a tenth of the rounds before the end.
        period=config.rounds * 3 // 10,
        # In a round, MergedCodist uses as many unlabelled sentences as the clients' own ones.
        steps=200 if run == "periodic_codistillation" else 8,
        mixup_beta=0.0,
    )
    config.evaluation = dict(
        every=20,
        # Rounds around each multiple of the period that are evaluated, whatever the method.
        around=dict(before=1, after=4),
        batch_size=100,
        checkpoint_every=40,
        splits=tuple(f"held_out_{domain}" for domain in DOMAINS),
        final_splits=("test", *(f"test_{domain}" for domain in DOMAINS)),
    )
    config.execution = defaults.execution()
    config.notes = ()
    return config
