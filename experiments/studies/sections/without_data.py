"""What has a config and no run, since its data are not at hand."""

from collections.abc import Sequence

from experiments.studies.records import Record
from experiments.studies.sections.commands import planned, sweep

WANTING = {
    "stackoverflow_table1": (
        "The Stack Overflow half of the codistillation paper's Table 1 needs TFF's archive."
    ),
    "stackoverflow_domain_shift": (
        "The codistillation paper's Table 2 and Figure 3 on Stack Overflow need TFF's archive."
    ),
    "mind_fed_kd": "FedKD's table 2 on MIND needs the data set and BERT-base's published weights.",
}


def without_data(records: Sequence[Record]) -> list[str]:
    """Each experiment of which nothing was run, what it needs, and its command."""
    run = {record.experiment for record in records}
    lacking = {name: needs for name, needs in WANTING.items() if name not in run}
    if not lacking:
        return []
    parts = ["## Not run for want of their data"]
    for name, needs in lacking.items():
        parts += [needs, sweep(name, planned(name))]
    return parts
