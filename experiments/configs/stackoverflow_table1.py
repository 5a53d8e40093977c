r"""The Stack Overflow half of the codistillation paper's Table 1.

The table's rows are the method and the unlabelled text, its columns the number of sentences of the users
that can train the large model: 1, 2 or 4 % of the 34,248 users who train the small one. A run is
"method,sentences" or "method,sentences,unlabelled":

                                   143k   296k   612k
    fed_avg                         x      x      x
    periodic_codistillation  in_domain and c4_mod
    merged_codistillation    in_domain and c4_mod

    python -m fedcodist.commands.sweep --config experiments/configs/stackoverflow_table1.py \
        --only "*,296k*" --workdir runs/stackoverflow_table1

The data come from `datasets/stackoverflow/prepare.py` and `datasets/c4_mod/prepare.py`; their cards
explain how. Learning rates are those of text_domain_shift.py and not tuned on these data.
"""

from ml_collections import ConfigDict, config_dict

from experiments.configs import text_domain_shift
from fedcodist.config import defaults
from fedcodist.config.registry import METHODS

# Share of the users; 2 % are the paper's 684.
FRACTIONS = {"143k": 0.01, "296k": 0.02, "612k": 0.04}
UNLABELLED = {"in_domain": None, "c4_mod": "data/c4_mod"}


def get_runs() -> list[str]:
    """Every cell of the table."""
    return [
        f"{method},{sentences}" + (f",{unlabelled}" if unlabelled else "")
        for method in METHODS
        for unlabelled in (("",) if method == "fed_avg" else UNLABELLED)
        for sentences in FRACTIONS
    ]


def get_config(run: str = "merged_codistillation,296k,in_domain") -> ConfigDict:
    """Returns one cell of the table; see `get_runs`."""
    defaults.check_run(run, get_runs())
    method, sentences, *unlabelled = run.split(",")
    config = text_domain_shift.get_config(f"{method},stackexchange")
    config.name = "stackoverflow_table1"
    config.run = run
    config.rounds = 1500
    config.full_rounds = 1500  # what a table's number needs; shorter runs are marked
    config.data = dict(
        name="prepared_text",
        folder="data/stackoverflow",
        unlabelled_folder=config_dict.placeholder(str),  # in place of the other users' sentences
        seed=0,
    )
    for pool, fraction in (("small", 1.0), ("large", FRACTIONS[sentences])):
        del config.pools[pool].domain
        config.pools[pool].fraction = fraction
    config.nested_pools = True  # users of the large model serve the small one too
    config.algorithm.period = 200
    if method == "merged_codistillation":
        config.algorithm.steps = 32
    del config.evaluation.around
    config.evaluation.update(
        every=25, checkpoint_every=25, splits=("held_out",), final_splits=("test",)
    )
    config.execution.stream = True  # the unlabelled text alone has 5 GB
    if method == "fed_avg" and sentences != "296k":
        # FedAvg's small model does not depend on the large model's pool, so the run 296k has it for all.
        del config.pools.small
    if unlabelled == ["c4_mod"]:
        config.data.unlabelled_folder = UNLABELLED["c4_mod"]
    return config
