"""Cells with both models."""

from collections.abc import Sequence

from experiments.studies.archive import Record
from experiments.studies.codistillation.paper_numbers import MODELS
from experiments.studies.samples import sample
from experiments.studies.sections.cells import absence, accuracy
from experiments.studies.sections.markdown import rounds_of

SPLITS = ("test", "held_out")


def both_models(records: Sequence[Record], experiment: str, run: str) -> str:
    """'33.86 ± 0.21 / 33.15 ± 0.30 (3 seeds)', or why there is nothing."""
    samples = [sample(records, experiment, run, model) for model in MODELS]
    if not any(samples):
        return absence(records, experiment, run)
    texts = [accuracy(shown) if shown else absence(records, experiment, run) for shown in samples]
    counts = [str(len(shown.seeds)) for shown in samples if shown]
    distinct = "/".join(counts if len(set(counts)) > 1 else counts[:1])
    return f"{' / '.join(texts)} ({distinct} seed{'' if distinct == '1' else 's'})"


def per_split(records: Sequence[Record], experiment: str, run: str) -> list[str]:
    """Each model's accuracy on each of SPLITS, seeds and rounds."""
    samples = [
        sample(records, experiment, run, model, split) for model in MODELS for split in SPLITS
    ]
    if not any(samples):
        return [absence(records, experiment, run), *[""] * (len(samples) + 1)]
    texts = [accuracy(shown) if shown else "" for shown in samples]
    last = [shown for shown in samples if shown][-1]
    return [*texts, str(len(last.seeds)), rounds_of(last.rounds, last.full_rounds)]
