"""Plain text and HTML as sentences of words, as TensorFlow Federated describes Stack Overflow's.

Words are lower case and ASCII. Punctuation marks are tokens, except apostrophes and hyphens within
words. Addresses of web pages become one token.
"""

from __future__ import annotations

import html
import re

URL = "<url>"

_URL = re.compile(r"(?:https?|ftp)://[^\s<>\"]+|www\.[^\s<>\"]+", re.IGNORECASE)
_WORD = re.compile(rf"{URL}|[a-z0-9_]+(?:['-][a-z0-9_]+)*|[^\sa-z0-9_]")
# A sentence ends at . ! or ? and what it closes, before white space and something that can begin one.
# Typographic quotes and ellipses, which are replaced later, do not close, begin or end one.
_END = re.compile(r"(?<=[.!?])([\"')\]]*)\s+(?=[\"'(\[]*[A-Z0-9`])")
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "..."})
# Elements before and after which no sentence goes on.
_BLOCKS = frozenset(
    [f"h{level}" for level in range(1, 7)]
    + ["p", "div", "br", "hr", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "pre"]
    + ["table", "tr", "td", "th"]
)
# Elements without prose.
_LEFT_OUT = frozenset(("pre", "script", "style"))
# Elements whose content is no HTML -> the pattern that ends them.
_RAW = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE | re.ASCII)
    for name in ("script", "style")
}
# A name and attributes, `name`, `name=value` or `name="value"`. Possessive quantifiers (`*+`) avoid
# backtracking, so the time is linear. A quote that is never closed is an ordinary character.
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
    """Text as sentences of words. An empty line ends a sentence; a single line break is a space.

    >>> sentences_of("Don't panic! See http://a.b/c, it is up-to-date.")
    [["don't", 'panic', '!'], ['see', '<url>', 'it', 'is', 'up-to-date', '.']]
    """
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        # What closes a sentence stays with it; a space ends it.
        for sentence in _END.sub(r"\1\n", " ".join(paragraph.split())).split("\n"):
            if words := words_of(sentence):
                sentences.append(words)
    return sentences


def words_of(sentence: str) -> list[str]:
    """The words of one sentence; empty where none begins with a letter or digit."""
    plain = _URL.sub(f" {URL} ", sentence.translate(_QUOTES))
    words = _WORD.findall(plain.encode("ascii", "ignore").decode().lower())
    return words if any(word[0].isalnum() or word == URL for word in words) else []


def text_of_html(source: str) -> str:
    """The text of HTML without its code blocks. Elements that end a sentence become empty lines.

    Anything that cannot be read as an element is text. The time is proportional to the length of the
    source. (The time of the standard library's parser is quadratic for elements that never end.)

    Raises:
      ValueError: declarations that HTML does not have, such as `<![foo[`, or character references of
        thousands of digits.
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
            if end is None:  # no element ends in the rest
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
    """The end of a comment, a declaration or a "<" that begins no element; None without an end."""
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
        # Before a letter "<" begins an element that never ends; elsewhere it is an ordinary character.
        letter = source[start + 1 : start + 2]
        return None if letter.isascii() and letter.isalpha() else start + 1
    return None if end < 0 else end + length
