"""Pages of a user's own records show these only."""

import shutil
from pathlib import Path

from experiments.studies.document import Document, load_results, main, render, write
from experiments.studies.own_records import without_missing
from experiments.studies.pages import Page
from experiments.studies.verdicts import OPEN, Verdict

ROOT = Path(__file__).parents[3]
PAGE = """# A study

What it is.

## Claims

### Claim 1

The first: **not enough runs**.

| Difference | Ours | Decided |
| --- | --: | --: |
| one | | runs missing |

## Table 1

Prose of the table.

| Method | 10: ours | 10: paper | 20: ours | 20: paper |
| --- | --: | --: | --: | --: |
| FedAvg | 31.0 | 30.0 | not run | 40.0 |
| FedKD | not run | 50.0 | not run | 60.0 |

## Not run

Commands.
"""


def page(text):
    verdicts = [Verdict("it holds", "held", "Table 1"), Verdict("it is open", OPEN, "Claim 1")]
    return Page("study", "A study", ("study",), [text], {}, "", verdicts, ("run",))


def test_rows_columns_and_sections_that_were_not_run_are_left_out():
    shown = without_missing(page(PAGE))
    assert shown.text == (
        "# A study\n\nWhat it is.\n\n## Table 1\n\nProse of the table.\n\n"
        "| Method | 10: ours | 10: paper |\n| --- | --: | --: |\n| FedAvg | 31.0 | 30.0 |\n"
    )
    assert [verdict.word for verdict in shown.verdicts] == ["held"]
    assert shown.not_run == ()


def test_a_page_of_which_everything_was_run_is_as_it_was():
    whole = "# A study\n\n## Table\n\n| a | b |\n| --- | --: |\n| one | 1.0 |\n"
    assert without_missing(page(whole)).text == whole


def test_folders_of_the_output_are_made(tmp_path):
    output = tmp_path / "new" / "RESULTS.md"
    write(Document({output: "text", tmp_path / "runs.csv": "a,b"}, {}))
    assert output.read_text() == "text"


def test_own_records_of_a_paper_show_no_missing_numbers(tmp_path, capsys):
    runs = tmp_path / "results" / "cifar100_table1"
    runs.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "cifar100_table1" / "fed_avg-3100-2.json", runs)
    document = render(load_results(tmp_path / "results"), tmp_path / "RESULTS.md")
    text = next(t for path, t in document.texts.items() if path.name == "codistillation.md")
    assert "18.79" in text
    assert "runs missing" not in text and "Claim 1" not in text and "| not run |" not in text
    assert main(["--results", str(tmp_path / "results")]) == 0
    assert (tmp_path / "RESULTS.md").is_file()
    assert str(tmp_path / "RESULTS.md") in capsys.readouterr().out
