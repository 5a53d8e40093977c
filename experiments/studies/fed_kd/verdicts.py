"""What the FedKD paper says, judged on each panel."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.fed_kd.comparisons import differences_of, sample_of
from experiments.studies.fed_kd.panels import (
    FED_AVG,
    FED_DROPOUT,
    FED_KD,
    FETCH_SGD,
    FEW,
    FEW_CLIENTS,
    LOCAL,
    MANY,
    MANY_CLIENTS,
    NO_CLAIM,
    OF_STUDENT,
    PARTS,
    RESNETS,
    SENTENCES,
    STUDENT,
    TEACHERS,
    WITHOUT_THRESHOLD,
    Method,
)
from experiments.studies.samples import common_seeds
from experiments.studies.sections.commands import planned
from experiments.studies.verdicts import DID_NOT_HOLD, Verdict, judge

LOWER_START = (Method("", "fed_kd,0.8-1", TEACHERS), Method("", "fed_kd,0.95-1", TEACHERS))


def verdicts_of(records: Sequence[Record]) -> list[Verdict]:
    """The paper's statements in each group of clients; the first group's are the main ones."""
    student, own_student = (method._replace(model=STUDENT) for method in (FED_KD, LOCAL))
    claims = [
        ("teachers are better than those that learn alone", FED_KD, LOCAL, "above 0"),
        ("teachers are as good as FedAvg of their network", FED_KD, FED_AVG, "about 0 or above"),
        ("teachers are better than FedAvg of the student's network", FED_KD, OF_STUDENT, "above 0"),
        ("teachers are better than FetchSGD", FED_KD, FETCH_SGD, "above 0"),
        ("teachers are better than Federated Dropout", FED_KD, FED_DROPOUT, "above 0"),
        ("teachers are better than their student", FED_KD, student, "above 0"),
        ("the student is better than without mutual learning", student, own_student, "above 0"),
    ]
    of_all = len(claims)
    claims += [
        (f"teachers are worse {text}", Method(text, run, TEACHERS), FED_KD, "below 0")
        for run, text in PARTS.items()
        if run not in NO_CLAIM
    ]
    lower = "teachers are worse if the energy threshold starts at 0.8 in place of 0.95"
    claims.append((lower, *LOWER_START, "below 0"))
    verdicts = []
    for panel in (FEW, MANY, RESNETS, WITHOUT_THRESHOLD, SENTENCES):
        for number, (text, plus, minus, expected) in enumerate(claims):
            if panel.run(plus.run) in planned(panel.experiment):
                differences = differences_of(records, panel, plus, minus)
                shown = [] if isinstance(differences, str) else differences
                title = f"{panel.title} ({panel.remark})" if panel.remark else panel.title
                verdict = judge(f"{title}: {text}", shown, expected, panel.title)
                # What contradicts the paper is never only counted.
                is_of_group = number < of_all and panel != SENTENCES
                is_main = panel == FEW or is_of_group or verdict.word == DID_NOT_HOLD
                again = title if panel.remark else ""
                verdicts.append(verdict._replace(is_main=is_main, again=again))
    by_number = [
        ("teachers are as good", FED_KD, "about 0"),
        ("FedAvg of the student's network is worse", OF_STUDENT, "below 0"),
    ]
    for text, method, expected in by_number:
        text = f"{FEW.title}: {text} with {MANY_CLIENTS} clients, as many steps each"
        verdicts.append(judge(text, _by_more_clients(records, method), expected, MANY.title))
    return verdicts


def _by_more_clients(records: Sequence[Record], method: Method) -> list[float]:
    """A method with many clients less itself with few, if clients take as many steps in both."""
    many, few = (sample_of(records, panel, method) for panel in (MANY, FEW))
    if not (many and few) or few.rounds * MANY_CLIENTS != many.rounds * FEW_CLIENTS:
        return []
    return [a - b for a, b in common_seeds(many, few)]
