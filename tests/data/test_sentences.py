"""Sentences and words of plain text and of HTML."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedcodist.data.sentences import sentences_of, text_of_html, words_of


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One two. Three?  Four!", ["one two .", "three ?", "four !"]),
        ("It’s up-to-date, isn't it", ["it's up-to-date , isn't it"]),
        ("e.g. this is 3.5", ["e . g . this is 3 . 5"]),
        ("a\nline break\n\nA paragraph", ["a line break", "a paragraph"]),
        ('He said "stop." Then "go"', ['he said " stop . "', 'then " go "']),
        ("It ended (at last.) So did he.", ["it ended ( at last . )", "so did he ."]),
        ("See https://a.b/c?d=1.", ["see <url>"]),
        ("naïve café", ["nave caf"]),
        ("snake_case(x)", ["snake_case ( x )"]),
        ("--- ... !!!", []),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert [" ".join(words) for words in sentences_of(text)] == sentences


@pytest.mark.parametrize(
    "source, text",
    [
        ("<p>a &lt; b &amp; c</p>", "a < b & c"),
        ("one<br>two", "one two"),
        ("<p>x</p><pre><code>y = 1</code></pre>z", "x z"),
        ("<b>bold</b>ly", "boldly"),
        ("<script>bad()</script>good", "good"),
        ("</pre>never opened", "never opened"),
        ("3 < 4 & 5", "3 < 4 & 5"),
        ("<a title='1 > 2' href=x>one</a> <!-- <p> -->two", "one two"),
        ("<a b=don't>one</a> isn't two", "one isn't two"),
        ('one <a b="two</a> three', "one three"),
        ("one <a two", "one <a two"),
        ("<script>if (a < b) '<pre>'</script>good", "good"),
        ("<SCRIPT>bad()</SCRIPT >good<style>bad", "good"),
        ("<pre>bad <script>", ""),
        ("<!DOCTYPE html><?php x ?>good</ >", "good"),
        ("a<![CDATA[b]]>c", "ac"),
    ],
)
def test_html(source, text):
    assert " ".join(text_of_html(source).split()) == text


def test_elements_end_sentences():
    assert sentences_of(text_of_html("<li>One</li><li>two</li>")) == [["one"], ["two"]]


@pytest.mark.parametrize(
    "piece",
    [
        "<a ",
        "<a b='",
        '<a b="',
        "<a/",
        "<p x= ",
        "</a",
        "<!--",
        "<!",
        "<?",
        "<",
        "<![cdata[",
        "<pre>",
        "<script>",
        "<script></scrip",
        "<style",
        "<a b='>",
        "&#",
        "&amp",
        "\n ",
        ".)",
        "www.",
        "\n<a\n=",
    ],
)
def test_time_grows_with_the_length_only(piece):
    """100,000 characters, the longest that are read, in seconds; their square would be minutes."""
    source = piece * (100_000 // len(piece))
    start = time.monotonic()
    sentences_of(text_of_html(source))
    assert time.monotonic() - start < 5


def test_references_of_thousands_of_digits_are_refused():
    with pytest.raises(ValueError, match="not HTML: "):
        text_of_html(f"&#{'9' * 5000};")


@given(st.lists(st.one_of(st.text(), st.sampled_from(["<![", "]]>", "<!--", "</a", "<p", "&#"]))))
@example(["<![foo[bar]]>"])
def test_nothing_breaks_them(parts):
    source = "".join(parts)
    try:
        text = text_of_html(source)
    except ValueError as error:
        assert str(error).startswith("not HTML: ")
        text = source
    for sentence in sentences_of(text):
        assert sentence and all(word == word.lower() and word.isascii() for word in sentence)
        assert not any(set(word) & set(" \n\t") for word in sentence)


@given(st.lists(st.sampled_from(["a", "don't", "<url>", "7", ".", "(", "x-y", "_z"]), min_size=1))
def test_words_are_kept_when_they_are_read_again(words):
    """Splitting is idempotent: what was written with spaces comes back."""
    found = words_of(" ".join(words))
    assert found == (words if any(w not in (".", "(", "_z") for w in words) else [])
