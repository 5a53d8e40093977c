"""FedKD's methods, and the panels: groups of clients on which methods are compared."""

from typing import NamedTuple

from experiments.configs.cifar_fed_kd import CENTRALISED, THROUGH_NORMALISER

CIFAR, ADE = "cifar_fed_kd", "ade_fed_kd"
TEACHERS, STUDENT = "main_teachers", "main"


class Method(NamedTuple):
    """A table row: its name, its run, the model that is tested, and its name in plots."""

    name: str
    run: str
    model: str
    style: str = "fed_kd"


LOCAL = Method("Local", "fed_kd,no_mutual", TEACHERS)
FED_AVG = Method("FedAvg, teacher's network", "fed_avg,teacher", STUDENT, "fed_avg")
OF_STUDENT = Method("FedAvg, student's network", "fed_avg,student", STUDENT, "fed_avg")
FED_KD = Method("FedKD", "fed_kd", TEACHERS)
CENTRAL = Method("Centralised", CENTRALISED, TEACHERS)
FML = Method("FML", "fml", TEACHERS, "fml")
FETCH_SGD = Method("FetchSGD", "fetch_sgd", STUDENT, "fetch_sgd")
FED_DROPOUT = Method("Federated Dropout", "fed_dropout", STUDENT, "fed_dropout")
METHODS = (
    LOCAL,
    CENTRAL,
    FED_AVG,
    OF_STUDENT,
    FED_KD,
    FML,
    FETCH_SGD,
    FED_DROPOUT,
)
WHOLE = Method("whole students", "fed_kd,whole", TEACHERS)
PARTS = {
    "fed_kd": "all of them",
    "fed_kd,no_output": "without predictions",
    "fed_kd,no_hidden": "without hidden states (and attention, where there is any)",
    "fed_kd,not_adaptive": "without adaptive weights",
    "fed_kd,no_mutual": "the two task losses alone",
    f"fed_kd,{THROUGH_NORMALISER}": "with a gradient through the divisor",
}
# The paper says of none of these that teachers are worse; its code has the divisor's gradient.
NO_CLAIM = (FED_KD.run, LOCAL.run, f"fed_kd,{THROUGH_NORMALISER}", FML.run)


class Panel(NamedTuple):
    """Methods on the same clients; their runs have the names of FedKD's runs with additions."""

    title: str
    experiment: str
    around: str = "{}"
    metric: str = "accuracy"
    others: tuple[str, ...] = ()  # further metrics, in a table of their own
    remark: str = ""  # in brackets behind the title, in verdicts

    def run(self, run: str) -> str:
        return self.around.format(run)


FEW_CLIENTS, MANY_CLIENTS = 4, 16
FEW = Panel(f"CIFAR-10, CNNs, {FEW_CLIENTS} clients", CIFAR)
MANY = Panel(f"CIFAR-10, CNNs, {MANY_CLIENTS} clients", CIFAR, "{}_16")
RESNETS = Panel(
    "CIFAR-10, ResNets, 4 clients", CIFAR, "resnet,{}", remark="two seeds, older losses"
)
SENTENCES = Panel(
    "ADE corpus, encoders, 4 clients",
    ADE,
    metric="f_score",
    others=("average_precision", "loss"),
    remark="F",
)
PANELS = (FEW, MANY, RESNETS, SENTENCES)
# F depends on a threshold, so sentences are judged without one too.
WITHOUT_THRESHOLD = SENTENCES._replace(metric="average_precision", remark="average precision")
METRICS = {
    "accuracy": "accuracy",
    "f_score": "F of sentences with an effect",
    "average_precision": "average precision",
    "loss": "100 times the loss",
}
