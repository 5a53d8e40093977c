"""The page of heterogeneous networks: gains are between runs on equal data."""

from pathlib import Path

from experiments.studies.archive import load_records
from experiments.studies.document import HERE
from experiments.studies.heterogeneous.page import heterogeneous
from experiments.studies.pages import read_notes

ROOT = Path(__file__).parents[3]
EXPERIMENT = "digits_heterogeneous"


def test_no_gain_between_runs_on_other_data():
    of_runs = {
        record.run: record
        for record in load_records(ROOT / "results")
        if record.experiment == EXPERIMENT and record.run in ("fd", "local_only")
    }
    notes = read_notes(HERE / "heterogeneous" / "notes.md", False)
    run, alone = of_runs["fd"], of_runs["local_only"]
    other = alone._replace(config={**alone.config, "data": {**alone.config["data"], "seed": 7}})
    for baseline, is_told in ((alone, False), (other, True)):
        page = heterogeneous([run, baseline], notes).text
        (line,) = [line for line in page.splitlines() if line.startswith("| FD |")]
        assert ("no runs with equal settings" in line) == is_told
