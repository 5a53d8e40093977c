"""Plain text and HTML as sentences of words, as TensorFlow Federated describes Stack Overflow's.

Lower case, ASCII only, punctuation as tokens of its own except apostrophes and hyphens within words,
and addresses of web pages replaced by one token.
"""

from __future__ import annotations

import html.parser
import re

URL = "<url>"

_URL = re.compile(r"(?:https?|ftp)://[^\s<>\"]+|www\.[^\s<>\"]+", re.IGNORECASE)
_WORD = re.compile(rf"{URL}|[a-z0-9_]+(?:['-][a-z0-9_]+)*|[^\sa-z0-9_]")
# A sentence ends at . ! or ? before white space and something that can begin one.
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9`])")
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
# Elements before and after which no sentence goes on.
_BLOCKS = frozenset(
    [f"h{level}" for level in range(1, 7)]
    + ["p", "div", "br", "hr", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "pre"]
    + ["table", "tr", "td", "th"]
)
# What is in them is no prose.
_LEFT_OUT = frozenset(("pre", "script", "style"))


def sentences_of(text: str) -> list[list[str]]:
    """Sentences of words. An empty line ends a sentence; a single line break is a space.

    >>> sentences_of("Don't panic! See http://a.b/c, it is up-to-date.")
    [["don't", 'panic', '!'], ['see', '<url>', 'it', 'is', 'up-to-date', '.']]
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _END.split(" ".join(paragraph.split())):
            if words := words_of(sentence):
                found.append(words)
    return found


def words_of(sentence: str) -> list[str]:
    """The words of one sentence; nothing where there is not one letter or digit in it."""
    plain = _URL.sub(f" {URL} ", sentence.translate(_QUOTES))
    words = _WORD.findall(plain.encode("ascii", "ignore").decode().lower())
    return words if any(word[0].isalnum() or word == URL for word in words) else []


def text_of_html(source: str) -> str:
    """The text of HTML, elements that end a sentence as empty lines; code blocks are left out.

    What cannot be read as an element is text.

    Raises:
      ValueError: declarations that the standard library's parser gives up on.
    """
    reader = _Reader()
    try:
        reader.feed(source)
        reader.close()
    except AssertionError as error:  # of `<![foo[`, for one
        raise ValueError(f"not HTML: {error}") from None
    return "".join(reader.parts)


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.left_out = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        self.left_out += tag in _LEFT_OUT

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")
        if tag in _LEFT_OUT and self.left_out:
            self.left_out -= 1

    def handle_data(self, data: str) -> None:
        if not self.left_out:
            self.parts.append(data)
