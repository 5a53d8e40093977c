"""The lines of our code that pages quote are in the files that they name, in this order.

A quote is a block ```py title="<what> in fedcodist/...py"; a line of three dots leaves lines out.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTE = re.compile(r'^```py title="(?:[^"]* in )?(\S+\.py)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def missing(quote, source):
    """The quoted lines that do not come in the source, after those before them."""
    lines, absent, place = [line.strip() for line in source.splitlines()], [], 0
    for line in filter(None, map(str.strip, quote.splitlines())):
        if line == "...":
            continue
        if line in lines[place:]:
            place = lines.index(line, place) + 1
        else:
            absent.append(line)
    return absent


def quotes():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for index, match in enumerate(QUOTE.finditer(page.read_text(encoding="utf-8"))):
            name = f"{page.relative_to(ROOT / 'docs')}-{index}"
            yield pytest.param(*match.groups(), id=name)


@pytest.mark.parametrize(("file", "quote"), list(quotes()))
def test_quoted_lines_are_in_the_code(file, quote):
    assert not missing(quote, (ROOT / file).read_text(encoding="utf-8"))


def test_a_line_that_is_not_there_is_noticed():
    source = "a = 1\nb = 2\nc = 3\n"
    assert missing("a = 1\n...\nc = 3", source) == []
    assert missing("b = 2\na = 1", source) == ["a = 1"]
    assert missing("d = 4", source) == ["d = 4"]
