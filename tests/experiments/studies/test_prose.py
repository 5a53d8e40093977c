"""Differences with an interval that prose names are in a table of the results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
PAIR = re.compile(r"([-+]?\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")
LINK = re.compile(r"results/(\w+\.md)")
PAGES = sorted(RESULTS.glob("*.md"))
# Texts by hand; a paragraph has links to the pages whose numbers it names.
OTHERS = [
    text
    for text in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if text.parent != RESULTS and PAIR.search(text.read_text())
]


def in_tables(pages):
    lines = [line for page in pages for line in page.read_text().splitlines()]
    return [pair for line in lines if line.startswith("|") for pair in PAIR.findall(line)]


def is_rounded(short, long):
    """Whether a number of the text is the table's, with fewer digits and perhaps without its sign."""
    digits = len(short.partition(".")[2])
    return abs(abs(float(short)) - abs(float(long))) <= 0.5 * 10**-digits + 1e-9


def without_source(prose, tables):
    return [
        f"{value} ± {half}"
        for value, half in PAIR.findall(prose)
        if not any(is_rounded(value, a) and is_rounded(half, b) for a, b in tables)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_differences_in_the_prose_of_a_page_are_in_its_tables(page):
    lines = page.read_text().splitlines()
    prose = "\n".join(line for line in lines if not line.startswith("|"))
    assert not without_source(prose, in_tables([page]))


@pytest.mark.parametrize("text", OTHERS, ids=lambda text: str(text.relative_to(ROOT)))
def test_differences_in_other_texts_are_on_the_page_that_they_link(text):
    for part in re.split(r"\n\n|\n- ", text.read_text()):
        linked = [page for page in PAGES if page.name in LINK.findall(part)]
        assert not without_source(part, in_tables(linked)), part


def test_a_number_that_no_table_has_is_noticed():
    tables = [("+1.04", "1.00"), ("-5.22", "1.89")]
    assert without_source("gains 1.0 ± 1.0, loses 5.2 ± 1.9", tables) == []
    assert without_source("gains 1.1 ± 1.0, loses 5.2 ± 1.8", tables) == ["1.1 ± 1.0", "5.2 ± 1.8"]
