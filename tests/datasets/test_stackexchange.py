"""Reading Posts.xml: good posts, bad posts of every kind, and files that are cut off."""

import os
import time
import tracemalloc
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedcodist.datasets.stackexchange import read_posts

HEAD = b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?>\n<posts>\n'
TAIL = b"</posts>"


def row(number, kind="1", user="7", body="<p>What is a citra hop?</p>"):
    owner = f' OwnerUserId="{user}"' if user else ""
    line = f'  <row Id="{number}" PostTypeId="{kind}" Body={quoteattr(body)}{owner} />\n'
    return line.encode()


def dump(folder, *lines, head=HEAD, tail=TAIL):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "Posts.xml"
    path.write_bytes(head + b"".join(lines) + tail)
    return path


def test_users_questions_and_answers(tmp_path):
    dump(
        tmp_path / "beer",
        row(1, body="<p>One &amp; two. Three?</p>\n<pre><code>code</code></pre>"),
        row(2, "2", "8", body="<p>See <a href='x'>here</a>: http://a.b</p>"),
        row(3, "2", "7", body="Yes."),
    )
    dump(tmp_path / "ai", row(1, user="7"), head=HEAD.replace(b"\n", b"\r\n"))
    posts = read_posts(tmp_path)
    assert posts.users == {
        "ai/7": {"questions": [["what", "is", "a", "citra", "hop", "?"]], "answers": []},
        "beer/7": {
            "questions": [["one", "&", "two", "."], ["three", "?"]],
            "answers": [["yes", "."]],
        },
        "beer/8": {"questions": [], "answers": [["see", "here", ":", "<url>"]]},
    }
    assert posts.read == 4 and posts.skipped == {} and set(posts.sha256) == {"ai", "beer"}


BAD = {
    "malformed": b'  <row Id="1" PostTypeId="1" Body="<p>unescaped</p>" OwnerUserId="7" />\n',
    "not UTF-8": b'  <row Id="1" PostTypeId="1" Body="caf\xe9" OwnerUserId="7" />\n',
    "too long": row(1, body="long " * 300_000),
    "without a user": row(1, user=""),
    "neither question nor answer": row(1, "5"),
    "empty": row(1, body="<p>...</p>"),
}
# In other ways.
ALSO_BAD = {
    "malformed": [row(1, body="One.<![foo[bar]]>"), b"x" + row(1), row(1).replace(b">\n", b"\n")],
    "too long": [row(1, body="<!--" * 25_001)],
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_post_is_counted_and_spoils_no_other(tmp_path, reason):
    dump(tmp_path, row(1), BAD[reason], BAD[reason], row(2, user="9"))
    posts = read_posts(tmp_path / "Posts.xml")
    assert posts.skipped == {reason: 2}
    assert posts.read == 2 and [user.split("/")[1] for user in posts.users] == ["7", "9"]


@pytest.mark.parametrize("reason", ALSO_BAD)
def test_other_bad_posts_are_counted_too(tmp_path, reason):
    posts = read_posts(dump(tmp_path, row(1), *ALSO_BAD[reason], row(2)))
    assert posts.skipped == {reason: len(ALSO_BAD[reason])} and posts.read == 2


def test_posts_on_the_lines_of_the_first_and_last_element(tmp_path):
    one, two = row(1).strip(), row(2, user="9").strip()
    posts = read_posts(dump(tmp_path, one + b"\n", two, head=HEAD.rstrip(b"\n")))
    assert list(posts.users) == [f"{tmp_path.name}/7", f"{tmp_path.name}/9"] and posts.read == 2


def test_a_post_over_several_lines_is_read_as_xml_says(tmp_path):
    """A line break within a value is a space, unless it is written as a reference; so is one between."""
    broken = row(1).replace(b"citra ", b"citra\n").replace(b" PostTypeId", b"\n  PostTypeId")
    lines = row(2, body="One").replace(b"One", b"One&#xA;&#xA;Two")
    posts = read_posts(dump(tmp_path, broken, lines))
    assert posts.users[f"{tmp_path.name}/7"]["questions"] == [
        ["what", "is", "a", "citra", "hop", "?"],
        ["one"],
        ["two"],
    ]
    assert posts.skipped == {}


DECLARATION = b'<?xml version="1.0" encoding="utf-8"?>\n'
HEADERS = {
    "no declaration": b"<posts>\n",
    "blank lines before it": b"\n \n" + DECLARATION + b"<posts>\n",
    "a comment of one line": DECLARATION + b"<!-- for your own use -->\n<posts>\n",
    "a comment of several lines": DECLARATION + b"<!--\n  For your own use.\n-->\n<posts>\n",
    "text on its first line": DECLARATION + b"<!-- Terms.\nMore terms. -->\n<posts>\n",
    "a comment before the declaration": b"<!-- Terms.\n -->\n" + DECLARATION + b"<posts>\n",
    "elements in the comment": DECLARATION
    + b"<!--\n<posts>\n"
    + row(7)
    + b"</posts>\n-->\n<posts>\n",
    "a document type": DECLARATION + b"<!DOCTYPE posts SYSTEM 'posts.dtd'>\n<posts>\n",
    "an instruction": DECLARATION + b'<?xml-stylesheet\n href="a"?>\n<posts>\n',
    "attributes of the first element": DECLARATION + b'<posts\n xmlns:x="y">\n',
    "all on one line": DECLARATION.strip() + b"<!-- Terms. --><posts>",
    "comments between posts": DECLARATION + b"<posts>\n<!-- one\n two -->\n",
}


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("header", HEADERS)
def test_every_header_is_read(tmp_path, header, mark, newline):
    content = HEADERS[header] + row(1) + row(2, user="9") + TAIL + b"\n<!-- the\nend -->\n"
    path = dump(tmp_path, head=mark + content.replace(b"\n", newline), tail=b"")
    posts = read_posts(path)
    assert posts.read == 2 and posts.skipped == {}
    assert list(posts.users) == [f"{tmp_path.name}/7", f"{tmp_path.name}/9"]


def test_a_file_without_line_breaks_is_read(tmp_path):
    rows = [row(number).strip() for number in range(200)]
    assert read_posts(dump(tmp_path, *rows, head=b"<posts>")).read == 200


@pytest.mark.parametrize(
    "declared",
    [
        b'<!DOCTYPE posts [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>\n',
        b'<!-- a\n --><!DOCTYPE posts SYSTEM "posts.dtd" [<!ENTITY a SYSTEM "file:///etc/passwd">]>\n',
        b"<!DOCTYPE posts [<!ELEMENT posts ANY>]>\n",
    ],
)
def test_entities_are_refused(tmp_path, declared):
    path = dump(tmp_path, row(1), head=DECLARATION + declared + b"<posts>\n")
    with pytest.raises(ValueError, match="declares entities or elements") as error:
        read_posts(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "head", [HEAD, DECLARATION + b"<!DOCTYPE posts SYSTEM 'posts.dtd'>\n<posts>\n"]
)
def test_an_entity_that_nobody_declared_is_malformed(tmp_path, head):
    posts = read_posts(dump(tmp_path, row(1).replace(b"citra", b"&citra;"), row(2), head=head))
    assert posts.skipped == {"malformed": 1} and posts.read == 1


@pytest.mark.parametrize(
    "line", ["<?x\n", "<row a='\n", "<row>\n", "<a>", "<!--\n", "x\n", "<row a=>\n"]
)
def test_what_is_made_to_be_slow_is_not(tmp_path, line):
    path = dump(tmp_path, line.encode() * 10_000)
    start = time.monotonic()
    try:
        assert read_posts(path).read == 0
    except ValueError as error:
        assert "damaged in too many places" in str(error)
    assert time.monotonic() - start < 20


def test_memory_does_not_grow_with_the_file(tmp_path):
    rows = b"".join(row(number, "5") for number in range(200))
    small, large = dump(tmp_path / "small", rows), dump(tmp_path / "large", rows * 100)

    def peak(path):
        tracemalloc.start()
        try:
            read_posts(path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(large) < peak(small) + 100_000 < large.stat().st_size


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_that_is_cut_off_is_told_with_the_position(tmp_path, data):
    whole = dump(tmp_path / "whole", row(1), row(2, "2"), BAD["malformed"]).read_bytes()
    size = data.draw(st.integers(len(HEAD) - 8, len(whole) - 1))
    path = dump(tmp_path / "cut", head=whole[:size], tail=b"")
    with pytest.raises(ValueError, match=f"is cut off: it ends at byte {size:,}"):
        read_posts(path)


def test_the_post_that_is_cut_is_told(tmp_path):
    path = dump(tmp_path, row(1), row(2)[:30], tail=b"")
    begins = len(HEAD + row(1))
    with pytest.raises(
        ValueError, match=rf"within the post that begins at byte {begins:,}, before"
    ):
        read_posts(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=60), max_size=8))
@example([b"</posts>"])
def test_any_bytes_between_posts_are_survived(tmp_path, garbage):
    lines = [b"  <row " + g.replace(b"\n", b" ") + b"\n" for g in garbage]
    posts = read_posts(dump(tmp_path, row(1), *lines, row(2)))
    assert posts.read + sum(posts.skipped.values()) == 2 + len(lines) and posts.read >= 2


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is cut off: it ends at byte 0"),
        ("<posts>".encode("utf-16"), "is UTF-16, dumps are UTF-8"),
        (b"<html>", "is no Posts.xml of a Stack Exchange dump"),
        (b"\x00" * 100, "is no Posts.xml of a Stack Exchange dump"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_posts(dump(tmp_path, head=content, tail=b""))


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_posts(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no Posts.xml, nor has a folder in it"):
        read_posts(tmp_path)


@pytest.mark.skipif("FEDCODIST_DATA" not in os.environ, reason="needs the real sites")
def test_every_post_of_the_real_sites_is_read_or_counted():
    folder = Path(os.environ["FEDCODIST_DATA"]) / "stackexchange"
    posts = read_posts(folder)
    rows = sum(path.read_bytes().count(b"<row ") for path in folder.glob("*/Posts.xml"))
    assert posts.read + sum(posts.skipped.values()) == rows
    assert posts.read > 0.9 * rows and set(posts.skipped) <= set(BAD)
