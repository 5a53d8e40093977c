"""Ablations: runs that differ from Table 1's in one setting."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation.cells import SPLITS, per_split
from experiments.studies.codistillation.paper_numbers import MODELS, run_name
from experiments.studies.pages import Notes, found
from experiments.studies.samples import groups, sample
from experiments.studies.sections.commands import planned
from experiments.studies.sections.markdown import codes, split_name, table
from experiments.studies.settings import method_of, settings, without
from fedcodist.config.registry import CODISTILLATION


class Ablation(NamedTuple):
    """A heading, the methods that are run, and patterns of the settings that vary."""

    heading: str
    methods: tuple[str, ...]
    varying: tuple[str, ...]


ABLATIONS = {
    "cifar100_alpha": Ablation(
        "α of MergedCodist",
        ("merged_codistillation",),
        ("algorithm.alpha", "algorithm.alpha_schedule"),
    ),
    "cifar100_kl_direction": Ablation(
        "Direction of the KL divergence", CODISTILLATION, ("algorithm.direction",)
    ),
    "cifar100_interpolation": Ablation(
        "Interpolation λ with the student's start",
        CODISTILLATION,
        ("pools.*.teaching.interpolation",),
    ),
    "cifar100_teacher_temperature": Ablation(
        "Temperature of the large model as a teacher",
        CODISTILLATION,
        ("pools.large.teaching.temperature",),
    ),
}


def ablations(records: Sequence[Record], notes: Notes, level: str) -> list[str]:
    """The ablations that have records: runs that differ in one setting, Table 1's default first."""
    parts: list[str] = []
    for experiment, shown in ABLATIONS.items():
        if any(record.experiment == experiment and record.finished for record in records):
            parts += [f"{level}# {shown.heading}", _table(records, experiment, shown)]
            parts.append(found(notes, shown.heading))
    return [f"{level} Ablations", notes["Ablations"], *parts] if parts else []


def _table(records: Sequence[Record], experiment: str, shown: Ablation) -> str:
    runs = recorded_runs(records, experiment)
    rows, alone = [], []
    for method in shown.methods:
        default = run_name(method, 4700, "in_domain")
        varied = [one for one in _shown(records, experiment, runs) if method_of(one) == method]
        if not varied:
            continue
        rows += _default_rows(records, default, varied, shown.varying)
        if not _equals(records, default, varied, shown.varying):
            alone.append(default)
    rows += [[f"`{run}`", *per_split(records, experiment, run)] for run in runs]
    headings = [f"{model}, {split_name(split)}" for model in MODELS for split in SPLITS]
    text = table(["Run", *headings, "Seeds", "Rounds"], rows)
    if alone:
        text += f"\n\nNo equal run in Table 1: {codes(alone)}."
    return text


def recorded_runs(records: Sequence[Record], experiment: str) -> list[str]:
    """The recorded runs of an experiment: first those of its config in its order, then others."""
    recorded = {record.run for record in records if record.experiment == experiment}
    return [
        *(run for run in planned(experiment) if run in recorded),
        *sorted(recorded - set(planned(experiment))),
    ]


def _default_rows(
    records: Sequence[Record], run: str, varied: Sequence[Record], varying: Sequence[str]
) -> list[list[str]]:
    """The run that Table 1 shows, and the runs with which varied runs may be compared."""
    shown = _shown(records, TABLE_1, [run])
    alike = groups(_equals(records, run, varied, varying))
    rows = []
    if not any(record in group for group in alike for record in shown):
        rows.append([f"`{run}` (Table 1)", *per_split(records, TABLE_1, run)])
    return rows + [
        [f"`{run}` (Table 1, equal)", *per_split(group, TABLE_1, run)] for group in alike
    ]


def _shown(records: Sequence[Record], experiment: str, runs: Sequence[str]) -> list[Record]:
    samples = (sample(records, experiment, run, model) for run in runs for model in MODELS)
    by_path = {record.path: record for one in samples if one for record in one.records}
    return list(by_path.values())


def _equals(
    records: Sequence[Record], run: str, varied: Sequence[Record], varying: Sequence[str]
) -> list[Record]:
    """Finished records of Table 1 that differ from a varied run only in the varied settings."""
    wanted = [without(settings(record), varying) for record in varied]
    return [
        record
        for record in records
        if record.finished
        and (record.experiment, record.run) == (TABLE_1, run)
        and without(settings(record), varying) in wanted
    ]
