r"""The codistillation paper's domain shift on Stack Overflow: Table 2 and Figure 3.

30,000 users' answers train the small model, 30,000 other users' questions the large one, and the models
teach each other on other users' text of both. All rounds from 2 before a codistillation to 10 after it
are evaluated, in each domain and for every method, besides every tenth: Figure 3 shows what a
codistillation of PeriodicCodist changes and how that is forgotten. A run is a method.

    python datasets/stackoverflow/prepare.py --source stackoverflow.sqlite.lzma \
        --output data/stackoverflow_domains --train-clients 75000
    python -m fedcodist.commands.sweep --config experiments/configs/stackoverflow_domain_shift.py \
        --workdir runs/stackoverflow_domain_shift
    python -m fedcodist.report.tables_domains runs/stackoverflow_domain_shift

The curves are of held-out text, where the paper's are of test text, which is looked at once here, after
the last round. text_domain_shift.py has the same at a size for a CPU. Learning rates are its, not tuned
on these data.
"""

from ml_collections import ConfigDict

from experiments.configs import text_domain_shift
from fedcodist.config.registry import METHODS


def get_runs() -> list[str]:
    """Every method."""
    return list(METHODS)


def get_config(run: str = "periodic_codistillation") -> ConfigDict:
    """Returns one method."""
    if run not in get_runs():
        raise ValueError(f"a run of this config is one of {get_runs()}, got {run!r}.")
    config = text_domain_shift.get_config(f"{run},stackexchange")
    config.name = "stackoverflow_domain_shift"
    config.run = run
    config.rounds = 1500
    config.full_rounds = 1500
    config.data.folder = "data/stackoverflow_domains"
    config.data.domains = dict.fromkeys(config.data.domains, 0.4)  # 30,000 of 75,000 users
    config.algorithm.period = 200
    if run == "merged_codistillation":
        config.algorithm.steps = 32
    config.evaluation.update(every=10, around=dict(before=2, after=10))
    config.evaluation.splits = ("held_out", *config.evaluation.splits)
    config.execution.stream = True  # the unlabelled text alone has gigabytes
    return config
