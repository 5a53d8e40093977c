"""Plain text and HTML as sentences of words, as TensorFlow Federated describes Stack Overflow's.

Lower case, ASCII only, punctuation as tokens of its own except apostrophes and hyphens within words,
and addresses of web pages replaced by one token.
"""

from __future__ import annotations

import html
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
# Elements whose content is no HTML, and what ends each.
_RAW = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE | re.ASCII)
    for name in ("script", "style")
}
# A name and attributes, `name`, `name=value` or `name="value"`. Nothing is given back (`*+`), so that
# reading one costs no more than its length; a quote that is never closed is a character like others.
_TAG = re.compile(
    r"""<(/?)([a-zA-Z][^\s/>]*+)
    (?: [\s/]++ | [^\s/>][^\s/>=]*+ (?:\s*+=\s*+ (?:"[^"]*+"|'[^']*+'|[^\s>"'][^\s>]*+|(?=>)) )?+ )*+
    >""",
    re.VERBOSE,
)
_SECTION = re.compile(
    r"<!\[\s*(?:(cdata|temp|ignore|include|rcdata)|if|else|endif)\b", re.IGNORECASE | re.ASCII
)


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

    What cannot be read as an element is text. Takes time in proportion to the length, whatever the
    source holds: the standard library's parser takes its square for elements that never end.

    Raises:
      ValueError: declarations that HTML does not have, such as of `<![foo[`, and character references
        of thousands of digits.
    """
    parts: list[str] = []
    left_out = position = 0
    while position < len(source):
        start = source.find("<", position)
        text = source[position:] if start < 0 else source[position:start]
        if text and not left_out:
            parts.append(_characters(text))
        if start < 0:
            break
        tag = _TAG.match(source, start)
        if tag is None:
            end = _end_of_other(source, start)
            if end is None:  # nothing ends an element any more
                if not left_out:
                    parts.append(_characters(source[start:]))
                break
            position = end
            if not left_out and position == start + 1:
                parts.append("<")
            continue
        position = tag.end()
        is_end, name = tag[1] == "/", tag[2].lower()
        if name in _BLOCKS:
            parts.append("\n\n")
        if name in _RAW and not is_end:
            # Elements within are text of the script.
            closing = _RAW[name].search(source, position)
            position = len(source) if closing is None else closing.start()
            left_out += 1
        elif name in _LEFT_OUT:
            left_out = max(0, left_out - 1) if is_end else left_out + 1
    return "".join(parts)


def _characters(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError as error:  # of a number with more digits than Python reads
        raise ValueError(f"not HTML: {error}") from None


def _end_of_other(source: str, start: int) -> int | None:
    """Where a comment, a declaration or a sign that begins no element ends; None where it never does."""
    if source.startswith("<!--", start):
        end, length = source.find("-->", start + 4), 3
    elif source.startswith("<![", start):
        section = _SECTION.match(source, start)
        if section is None:
            raise ValueError(f"not HTML: unknown declaration {source[start : start + 20]!r}")
        mark = "]]>" if section[1] else "]>"
        end, length = source.find(mark, section.end()), len(mark)
    elif source.startswith(("<!", "<?", "</"), start):
        end, length = source.find(">", start + 2), 1
    else:
        # A letter begins an element, which has no end here; before anything else it is a mere sign.
        letter = source[start + 1 : start + 2]
        return None if letter.isascii() and letter.isalpha() else start + 1
    return None if end < 0 else end + length
