r"""The codistillation paper's domain shift on Stack Overflow: Table 2 and Figure 3.

Answers of 30,000 users train the small model, questions of 30,000 other users train the large one, and
the models teach each other on other users' text of both kinds. Besides every tenth round, all rounds
from 2 before a codistillation to 10 after it are evaluated, in each domain and for every method. Figure
3 shows what a codistillation of PeriodicCodist changes and how this is forgotten. A run is a method.

    python datasets/stackoverflow/prepare.py --source stackoverflow.sqlite.lzma \
        --output data/stackoverflow_domains --train-clients 75000
    python -m fedcodist.commands.sweep --config experiments/configs/stackoverflow_domain_shift.py \
        --workdir runs/stackoverflow_domain_shift
    python -m fedcodist.report.tables_domains runs/stackoverflow_domain_shift

Curves are of held-out text (in the paper, of test text). Test text is used once here, after the last
round. text_domain_shift.py is the same experiment at a size for a CPU. Learning rates are those of that
file and not tuned on these data. docs/results/domain_shift.md has the paper's numbers.
"""

from ml_collections import ConfigDict

from experiments.configs import text_domain_shift
from fedcodist.config import defaults
from fedcodist.config.registry import METHODS


def get_runs() -> list[str]:
    """Every method."""
    return list(METHODS)


def get_config(run: str = "periodic_codistillation") -> ConfigDict:
    """Returns one method."""
    defaults.check_run(run, get_runs())
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
