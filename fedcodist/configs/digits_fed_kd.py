r"""FedKD on scikit-learn's handwritten digits, with four clients as in its paper.

    fedcodist compare digits_fed_kd

The teacher has 17,226 parameters and the student 2,410. FedKD is compared with FedAvg of either network,
and with variants of itself: students sent without compression, one loss left out, and gradients
exchanged after every batch, with fewer steps than the others have. The clients' teachers and their
shared student are evaluated. Learning rates are not tuned. docs/results/fed_kd.md has results of most of
these on CIFAR-10 and ADE.
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.configs import digits_compression

FED_AVG = {"fed_avg,student": "digits_small", "fed_avg,teacher": "digits_large"}
FED_KD = {
    "fed_kd": {},
    "fed_kd,whole": {},
    "fed_kd,no_output": dict(output_weight=0.0),
    "fed_kd,no_hidden": dict(hidden_weight=0.0),
    "fed_kd,not_adaptive": dict(adaptive="none"),
    "fed_kd,by_step": dict(exchange="step_gradient"),
}


def get_runs() -> list[str]:
    """FedAvg of the student and of the teacher, then FedKD's variants."""
    return [*FED_AVG, *FED_KD]


def get_config(run: str = "fed_kd") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    sends_whole = run in FED_AVG or run == "fed_kd,whole"
    config = digits_compression.get_config("fed_avg" if sends_whole else "fed_avg,svd")
    config.name = "digits_fed_kd"
    config.run = run
    config.training.client_optimizer = "adam"
    config.pools.main.client_learning_rate = 0.003
    if run in FED_AVG:
        config.pools.main.model = FED_AVG[run]
        return config
    config.training.method = "fed_kd"
    config.training.fed_kd = defaults.fed_kd(
        "digits_large",
        0.003,
        teacher_layers=("Dense_0", "Dense_1"),
        student_layers=("Dense_0",),  # beside the teacher's Dense_1
    )
    config.training.fed_kd.update(FED_KD[run])
    config.evaluation.clients = 100  # the most clients of a pool whose teachers are evaluated
    if run == "fed_kd,by_step":  # one batch a round where others train for two epochs
        config.rounds = config.full_rounds = 600
        config.evaluation.every, config.evaluation.checkpoint_every = 50, 200
    return config
