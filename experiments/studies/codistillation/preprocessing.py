"""Table 1's 4,700 examples with other readings of the paper's preprocessing of images."""

from collections.abc import Sequence

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation import paper_numbers
from experiments.studies.codistillation.ablations import recorded_runs
from experiments.studies.codistillation.findings import deviation_over_seeds, within_seeds
from experiments.studies.codistillation.paper_numbers import MODELS, run_name
from experiments.studies.samples import baseline, sample
from experiments.studies.sections.markdown import estimate, table
from experiments.studies.settings import method_of
from fedcodist.config.registry import BASELINE, METHOD_NAMES

PREPROCESSING = "cifar100_preprocessing"
FED_AVG = run_name(BASELINE, 4700, "")


def compared(records: Sequence[Record], all_records: Sequence[Record]) -> list[str]:
    """A table of FedAvg's runs minus Table 1's, and of methods' minus FedAvg's with the same images.

    `all_records` show the spread over seeds. There is no table without runs to compare.
    """
    rows = []
    for run in recorded_runs(records, PREPROCESSING):
        for place, model in enumerate(MODELS):
            shown = sample(records, PREPROCESSING, run, model)
            if shown is None:
                continue
            method = str(method_of(shown.records[0]))
            if method == BASELINE:
                other, name, paper = sample(records, TABLE_1, FED_AVG, model), "Table 1's", ""
            else:
                other, name = baseline(records, shown.records[0], model), "with the same images"
                cells = (run_name(method, 4700, "in_domain"), FED_AVG)
                above, below = (paper_numbers.TABLE_1[cell][place] for cell in cells)
                paper = f"{above - below:+.2f}"
            if other is not None:
                deviation = deviation_over_seeds(all_records, model)
                ours = within_seeds(shown, other, deviation)
                above_what = f"{METHOD_NAMES[BASELINE]}, {name}"
                rows.append([f"`{run}`", model, above_what, estimate(ours), ours.kind, paper])
    headings = ["Run", "Model", "Compared with", "Difference", "Interval", "Paper's gain"]
    return [table(headings, rows, texts=3)] if rows else []
