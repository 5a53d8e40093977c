"""Pages of a user's own records show these only."""

import shutil
from pathlib import Path

from experiments.studies.document import Document, load_results, main, render, write
from experiments.studies.own_records import without_missing
from experiments.studies.pages import Page
from experiments.studies.verdicts import OPEN, Verdict, verdict_table

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


def test_the_title_stays_without_a_decided_verdict():
    verdicts = [Verdict("it is open", OPEN, "Claim 1")]
    of_all = "\n\n".join(verdict_table(verdicts))
    whole = page(f"# A study\n\n{of_all}\n\nWhat it is.\n")._replace(verdicts=verdicts)
    assert without_missing(whole).text == "# A study\n\nWhat it is.\n"


def test_the_title_stays_without_a_section_beneath():
    whole = "# A study\n\nWhat it is.\n\n## Table 1\n\n| a: ours |\n| --: |\n| not run |\n"
    assert without_missing(page(whole)).text == "# A study\n\nWhat it is.\n"


def test_statements_are_counted_without_open_ones():
    known = Verdict("it holds", "held", "Table 1")
    more = Verdict("it holds too", "held", "Table 1", is_main=False)
    verdicts = [known, more, Verdict("it is open", OPEN, "Claim 1")]
    whole = page("# A study\n\n" + "\n\n".join(verdict_table(verdicts)) + "\n\nWhat it is.\n")
    assert "All 3 statements" in whole.text
    text = without_missing(whole._replace(verdicts=verdicts)).text
    assert "All 2 statements: 2 held, 0 did not hold" in text and "it is open" not in text


def test_columns_beside_one_that_was_not_run_go_with_it():
    table = (
        "| Method | 8: ours | 8: over FedAvg | 80: ours | 80: over FedAvg |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| FedKD | not run |  | 32.0 | +1.0 |\n"
    )
    shown = without_missing(page(f"# A study\n\n## Table 1\n\n{table}")).text
    assert "| Method | 80: ours | 80: over FedAvg |" in shown
    assert "| FedKD | 32.0 | +1.0 |" in shown


def test_papers_numbers_of_methods_that_were_not_run_are_left_out(tmp_path):
    runs = tmp_path / "results" / "fedsdd_scaled"
    runs.mkdir(parents=True)
    shutil.copy(next((ROOT / "results" / "fedsdd_scaled").glob("fed_avg*.json")), runs)
    document = render(load_results(tmp_path / "results"), tmp_path / "RESULTS.md")
    text = next(t for path, t in document.texts.items() if path.name == "fed_sdd.md")
    (head,) = [line for line in text.splitlines() if line.startswith("| Method |")]
    assert (
        head
        == "| Method | Main model: ours | Main model: paper | Ensemble: ours | Ensemble: paper |"
    )


def test_a_private_run_has_a_page_with_its_budget_only(tmp_path):
    runs = tmp_path / "results" / "digits_private"
    runs.mkdir(parents=True)
    source = ROOT / "results" / "digits_private"
    shutil.copy(next(iter(sorted(source.glob("fed_avg-8*.json")))), runs)
    document = render(load_results(tmp_path / "results"), tmp_path / "RESULTS.md")
    text = next(t for path, t in document.texts.items() if path.name == "privacy.md")
    assert text.startswith("# Private methods\n")
    assert "| Method | Model | epsilon 8: ours | epsilon 8: over FedAvg |" in text
    assert "no noise: ours" not in text and "All runs have three seeds" not in text


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
