"""The codistillation paper on CIFAR-100: its Table 1, Figure 4, ablations, and what it claims."""

from collections.abc import Sequence

from experiments.studies.archive import TABLE_1, Record
from experiments.studies.codistillation.ablations import ABLATIONS, ablations
from experiments.studies.codistillation.figure_4 import figure_4
from experiments.studies.codistillation.figure_4_tuning import FIGURE_4_TUNING, figure_4_tuning
from experiments.studies.codistillation.paper_numbers import FIGURE_4
from experiments.studies.codistillation.preprocessing import PREPROCESSING, compared
from experiments.studies.codistillation.table_1 import (
    curves_plot,
    earlier_settings,
    gains_plot,
    table_1,
)
from experiments.studies.codistillation.verdicts import (
    earlier_verdicts,
    short_differences,
    verdict_details,
    verdicts,
)
from experiments.studies.pages import IN_SHORT, Notes, Page, Plots, first_screen, found
from experiments.studies.sections.endings import (
    endings,
    full_length,
    is_short,
    not_run,
    table_of_settings,
)

# How the large model could be brought to the paper's accuracy, and two readings of the preprocessing.
REGULARISATION = "cifar100_regularisation"
LARGE_MODEL = "cifar100_large_model"
STACKOVERFLOW = "stackoverflow_table1"
SEARCHES = {
    REGULARISATION: "Regularisation",
    LARGE_MODEL: "The large model alone",
    PREPROCESSING: "Preprocessing of the images",
}
EXPERIMENTS = (TABLE_1, FIGURE_4, FIGURE_4_TUNING, *ABLATIONS, *SEARCHES, STACKOVERFLOW)


def codistillation(records: Sequence[Record], notes: Notes) -> Page:
    """Main tables of runs of full length, and at the end the same tables of shorter runs."""
    plots: Plots = {}
    full = full_length(records)
    judged = [*verdicts(records), *earlier_verdicts(records)]
    parts = [
        *first_screen("Codistillation", notes, judged),
        *table_1(full, notes, "##", records),
        *gains_plot(full, notes, plots),
        *curves_plot(full, notes, plots),
        found(notes, "Table 1"),
        *earlier_settings(full, notes, records),
        *_all_but_table_1(full, notes, plots, "##", records),
        *verdict_details(records, notes),
    ]
    finished = [record for record in full if record.finished]
    decided = {record.experiment for record in finished} - {TABLE_1}
    # Tables other than Table 1 have short runs only as long as they have none of full length.
    short = [r for r in records if is_short(r) and r.finished and r.experiment not in decided]
    in_full = {record.run for record in finished if record.experiment == TABLE_1}
    of_table_1 = [record for record in short if record.experiment == TABLE_1]
    # Cells that have their full length decide by it; other tables compare with short ones.
    lacks_cells = any(record.run not in in_full for record in of_table_1)
    of_short = [
        *(table_1(short, notes, "###", records) if lacks_cells else ()),
        *_all_but_table_1(short, notes, plots, "###", records),
        *short_differences(records),
    ]
    if lacks_cells:
        of_short += ["### Runs of Table 1 by their settings", table_of_settings(of_table_1)]
    shown = [notes["Short runs"], *of_short] if any(of_short) else []
    parts += endings(records, EXPERIMENTS, shown, notes["Not run"])
    return Page(
        "codistillation",
        "Codistillation of models of several sizes",
        EXPERIMENTS,
        parts,
        plots,
        found(notes, IN_SHORT),
        judged,
        not_run(records, EXPERIMENTS),
    )


def _all_but_table_1(
    records: Sequence[Record],
    notes: Notes,
    plots: Plots,
    level: str,
    all_records: Sequence[Record],
) -> list[str]:
    parts = [
        *figure_4(records, notes, plots, level),
        *figure_4_tuning(records, notes, level),
        *ablations(records, notes, level),
    ]
    for experiment, heading in SEARCHES.items():
        if of_it := [r for r in records if r.experiment == experiment and r.finished]:
            gains = compared(records, all_records) if experiment == PREPROCESSING else []
            parts += [f"{level} {heading}", table_of_settings(of_it), *gains, found(notes, heading)]
    return parts
