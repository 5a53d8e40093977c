r"""The codistillation paper's domain shift (table 2, figure 3) on freely available text.

Clients of one domain train the small model, clients of another domain train the large one, and the
models teach each other on unlabelled text of both. A run is "method,text"; the texts are

    python_source    prose (docstrings and comments) to the small model, code to the large one
    stackexchange    answers to the small model, questions to the large one, as in the paper

"method,text,600" has 600 rounds in place of 200, which merging needs on Stack Exchange.

    python datasets/python_source/prepare.py --output data/python_source \
        --vocabulary 4000 --max-examples 100
    python datasets/stackexchange/prepare.py --source FOLDER --output data/stackexchange \
        --vocabulary 4000 --max-examples 50
    python -m fedcodist.commands.sweep --config experiments/configs/text_domain_shift.py \
        --workdir runs/text_domain_shift --config.seeds=3 --at-once 2
    python -m fedcodist.report.tables_domains runs/text_domain_shift

The paper has 30,000 users in each pool of Stack Overflow, 10,000 words and 1,500 rounds. Here there are
a few hundred users and 4,000 words. Other settings are those of python_source_codist.py, which comes
with the package. Outcome: between prose and code, MergedCodist transfers knowledge and keeps it;
PeriodicCodist transfers it in each codistillation and then forgets it (docs/results/domain_shift.md).
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.config.registry import METHODS
from fedcodist.configs import python_source_codist

# Domains of the small and of the large model.
TEXTS = {"python_source": python_source_codist.DOMAINS, "stackexchange": ("answers", "questions")}
MORE_ROUNDS = 600  # paper: 1,500
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
    config = python_source_codist.get_config(method)
    config.name = "text_domain_shift"
    config.run = run
    if more:
        config.rounds = config.full_rounds = int(more[0])
        config.algorithm.period = config.rounds * 3 // 10
    if text == "stackexchange":
        domains = TEXTS[text]
        config.data.folder = "data/stackexchange"
        config.data.domains = dict.fromkeys(domains, 0.35)  # not all users have text of both
        config.pools.small.domain, config.pools.large.domain = domains
        config.evaluation.splits = tuple(f"held_out_{domain}" for domain in domains)
        config.evaluation.final_splits = ("test", *(f"test_{domain}" for domain in domains))
    return config
