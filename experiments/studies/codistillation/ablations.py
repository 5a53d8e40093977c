"""Ablations: runs that differ from Table 1's in one setting."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.studies.codistillation.paper_numbers import MODELS, run_name
from experiments.studies.pooling import groups, sample
from experiments.studies.records import TABLE_1, Record
from experiments.studies.sections.cells import SPLITS, per_split
from experiments.studies.sections.footnotes import recorded_runs, remarks
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
        "Ablation: α of MergedCodist",
        ("merged_codistillation",),
        ("algorithm.alpha", "algorithm.alpha_schedule"),
    ),
    "cifar100_kl_direction": Ablation(
        "Ablation: direction of the KL divergence", CODISTILLATION, ("algorithm.direction",)
    ),
    "cifar100_interpolation": Ablation(
        "Ablation: interpolation λ with the student's start",
        CODISTILLATION,
        ("pools.*.teaching.interpolation",),
    ),
    "cifar100_teacher_temperature": Ablation(
        "Ablation: temperature of the large model as a teacher",
        CODISTILLATION,
        ("pools.large.teaching.temperature",),
    ),
}


def ablation(records: Sequence[Record], experiment: str) -> list[str]:
    """Runs that differ in one setting, the default of Table 1 first."""
    heading, methods, varying = ABLATIONS[experiment]
    runs = recorded_runs(records, experiment)
    rows, alone = [], []
    for method in methods:
        default = run_name(method, 4700, "in_domain")
        varied = [one for one in _shown(records, experiment, runs) if method_of(one) == method]
        rows += _default_rows(records, default, varied, varying)
        if varied and not _equals(records, default, varied, varying):
            alone.append(default)
    rows += [[f"`{run}`", *per_split(records, experiment, run)] for run in runs]
    headings = [f"{model}, {split_name(split)}" for model in MODELS for split in SPLITS]
    remark = f"Table 1 has no run of {codes(alone)} with the other settings and rounds of these."
    return [
        f"## {heading}",
        "4,700 examples, in-domain. Choices are made on held-out clients. *Equal*: a run of Table 1 "
        "with the settings and rounds of those below, but for what these vary.",
        table(["Run", *headings, "Seeds", "Rounds"], rows),
        *([remark] if alone else []),
        *remarks(records, experiment, runs),
    ]


def _default_rows(
    records: Sequence[Record], run: str, varied: Sequence[Record], varying: Sequence[str]
) -> list[list[str]]:
    """The run that Table 1 shows, and those that the varied runs may be compared with."""
    shown = _shown(records, TABLE_1, [run])
    found = groups(_equals(records, run, varied, varying))
    rows = []
    if not any(record in group for group in found for record in shown):
        rows.append([f"`{run}` (Table 1)", *per_split(records, TABLE_1, run)])
    return rows + [
        [f"`{run}` (Table 1, equal)", *per_split(group, TABLE_1, run)] for group in found
    ]


def _shown(records: Sequence[Record], experiment: str, runs: Sequence[str]) -> list[Record]:
    samples = (sample(records, experiment, run, model) for run in runs for model in MODELS)
    found = {record.path: record for one in samples if one for record in one.records}
    return list(found.values())


def _equals(
    records: Sequence[Record], run: str, varied: Sequence[Record], varying: Sequence[str]
) -> list[Record]:
    """Finished records of Table 1 that differ from a varied run in nothing but what varies."""
    wanted = [without(settings(record), varying) for record in varied]
    return [
        record
        for record in records
        if record.finished
        and (record.experiment, record.run) == (TABLE_1, run)
        and without(settings(record), varying) in wanted
    ]
