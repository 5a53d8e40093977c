"""Posts of the Stack Exchange data dump: a file `Posts.xml` per site, an element `row` per post.

The standard library's streaming XML parser reads the files block by block, so they may be larger than
the memory. Where the XML is broken, reading continues at the next line, so a bad post does not spoil
others.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.parsers import expat
from xml.parsers.expat import errors

from fedcodist.data.sentences import sentences_of, text_of_html

QUESTIONS, ANSWERS = "questions", "answers"
DOMAINS = (QUESTIONS, ANSWERS)
FILE_NAME = "Posts.xml"
# The sites refuse posts of more than 30,000 characters; escaped as XML that is less than 1 MiB.
LONGEST_POST = 1 << 20
# Characters of HTML.
LONGEST_BODY = 100_000

_DOMAIN_OF_TYPE = {"1": QUESTIONS, "2": ANSWERS}
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UNFINISHED = frozenset(
    (
        errors.XML_ERROR_NO_ELEMENTS,
        errors.XML_ERROR_UNCLOSED_TOKEN,
        errors.XML_ERROR_PARTIAL_CHAR,
    )
)
_BLOCK = 1 << 14  # small, because the block after a broken post is read again
_SHOWN = 1 << 26
# Bytes of broken XML that may be read again, in addition to the size of the file. In a malicious file
# every line could make the parser search far ahead in vain.
_READ_AGAIN = 1 << 26


class Posts(NamedTuple):
    """The posts of all sites.

    Attributes:
      users: `<site>/<user id>` -> domain -> sentences of words.
      read: number of posts that are in `users`.
      skipped: reason -> number of posts that are not.
      sha256: site -> checksum of its file.
    """

    users: dict[str, dict[str, list[list[str]]]]
    read: int
    skipped: dict[str, int]
    sha256: dict[str, str]


def read_posts(
    source: Path, show: Callable[[str, float], None] = lambda text, fraction: None
) -> Posts:
    """Reads one site or several.

    Questions are posts of type 1 and answers of type 2; others (wikis, tags) are skipped. So are posts
    that are not well-formed XML or HTML, not UTF-8, longer than 1 MiB or 100,000 characters of HTML,
    without an existing user, or without a sentence. All are counted. Comments may be anywhere outside of
    posts.

    Args:
      source: a `Posts.xml`, a folder that has one, or a folder of such folders. The name of a site is
        that of the folder of its file.
      show: called with the site's name and the fraction of all bytes that is done.

    Raises:
      ValueError: there is no such file, or one that is cut off (with the byte position), is UTF-16,
        declares entities, or is not a dump at all.
    """
    files = _files(Path(source))
    total = sum(path.stat().st_size for path in files.values()) or 1
    users: dict[str, dict[str, list[list[str]]]] = {}
    skipped: Counter[str] = Counter()
    sha256, read, before = {}, 0, 0
    for site, path in files.items():
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            show(site, before / total)
            shown = 0
            for position, attributes in _rows(path, file, digest):
                if position >= shown + _SHOWN:
                    shown = position
                    show(f"{site}, {position >> 20:,} MiB", (before + position) / total)
                post = _post(attributes)
                if isinstance(post, str):
                    skipped[post] += 1
                    continue
                user, domain, sentences = post
                domains = users.setdefault(f"{site}/{user}", {QUESTIONS: [], ANSWERS: []})
                domains[domain] += sentences
                read += 1
        sha256[site] = digest.hexdigest()
        before += path.stat().st_size
    return Posts(users, read, dict(sorted(skipped.items())), sha256)


def _files(source: Path) -> dict[str, Path]:
    if not source.exists():
        raise ValueError(f"--source {source} does not exist")
    if source.is_file():
        return {source.absolute().parent.name: source}
    if (source / FILE_NAME).is_file():
        return {source.absolute().name: source / FILE_NAME}
    files = {path.parent.name: path for path in sorted(source.glob(f"*/{FILE_NAME}"))}
    if not files:
        raise ValueError(f"--source {source} has no {FILE_NAME}, nor has a folder in it")
    return files


def _rows(
    path: Path, file: BinaryIO, digest: hashlib._Hash
) -> Iterator[tuple[int, Mapping[str, str] | str]]:
    """Yields (byte position, attributes) of every post, or (position, the reason for skipping it).

    Raises:
      ValueError: the file does not begin or end as a dump does.
    """
    parser = _Parser(path, 0, is_first=True)
    # Bytes behind the parser's last event, and the number of bytes read so far.
    unread, position = b"", 0
    stop: _Stop | None = None
    is_ended = skips_line = False
    read_again = 0
    while True:
        block = file.read(_BLOCK)
        digest.update(block)
        at_end = not block
        if position == 0 and block.startswith(_UTF16_MARKS):
            raise ValueError(f"{path} is UTF-16, dumps are UTF-8")
        position += len(block)
        if skips_line:
            start = block.find(b"\n") + 1
            if not start and not at_end:
                continue
            block, skips_line = block[start:], False
            parser = _Parser(path, position - len(block))
        unread += block
        while True:
            start = parser.done
            stop = stop or parser.feed(block, at_end)
            for row in parser.rows:
                is_ended = False
                yield row
            parser.rows.clear()
            is_ended = is_ended or parser.is_ended
            unread = unread[parser.done - start :]
            if stop is None and len(unread) > LONGEST_POST:
                stop = _Stop("too long", parser.done, position)
            if stop is None:
                break
            begin, end = stop.begin - parser.done, stop.begin - parser.done
            if stop.reason:  # a broken post ends with its line
                end = unread.find(b"\n", begin) + 1
            if not parser.is_started and not stop.in_prolog:
                if at_end and stop.is_unfinished:
                    raise ValueError(_cut_off(path, position, position))
                raise ValueError(f"{path} is no {FILE_NAME} of a Stack Exchange dump")
            if stop.reason and not end:
                if not at_end:
                    if len(unread) > LONGEST_POST:
                        yield stop.begin, "too long"
                        unread, stop, skips_line = b"", None, True
                    break
                if stop.is_unfinished and not is_ended:
                    inside = parser.line if b"<row" in unread else position
                    raise ValueError(_cut_off(path, inside, position))
                end = len(unread)
            broken = unread[begin:end]
            if stop.reason:
                if b"<row" in broken:
                    is_ended = False
                    yield stop.begin, _reason(stop.reason, broken)
                is_ended = is_ended or broken.rstrip().endswith(b"</posts>")
                read_again += max(0, stop.searched - stop.begin - len(broken))
                if read_again > position + _READ_AGAIN:
                    raise ValueError(
                        f"{path} is damaged in too many places, at last at byte {stop.begin:,}"
                    )
            if at_end and end == len(unread):
                if not is_ended:
                    raise ValueError(_cut_off(path, position, position))
                return
            parser = _Parser(path, stop.begin + len(broken), stop.in_prolog)
            unread = block = unread[end:]
            stop = None


class _Stop(Exception):
    """The end of one parser's part of the file; another parser follows.

    Attributes:
      reason: the error behind `begin`; empty where the next parser starts exactly at `begin`.
      begin: position of the first byte that is not read.
      searched: position up to which the parser has searched.
      is_unfinished: whether the file ends within the element at `begin`.
      in_prolog: whether `<posts>` is still to come.
    """

    def __init__(
        self,
        reason: str,
        begin: int,
        searched: int,
        is_unfinished: bool = False,
        in_prolog: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.begin, self.searched = reason, begin, searched
        self.is_unfinished, self.in_prolog = is_unfinished, in_prolog


class _Parser:
    """Expat from one position of the file on; all but the first begin within `<posts>`.

    Attributes:
      rows: (position, attributes) of the posts since they were taken last, or (position, reason).
      done: position behind the last event; bytes before it are no longer needed.
      line: position of the line that contains `done`.
      is_started, is_ended: whether `<posts>` and `</posts>` were read.
    """

    def __init__(self, path: Path, start: int, is_first: bool = False) -> None:
        self.rows: list[tuple[int, Mapping[str, str] | str]] = []
        self.done = self.line = start
        self.is_started, self.is_ended = not is_first, False
        self._path, self._first, self._depth, self._row = path, start, 0, start
        # An encoding that a file declares is ignored: dumps are UTF-8.
        self._expat = expat.ParserCreate("utf-8")
        self._shift = start
        if not is_first:
            self._expat.Parse(b"<posts>", False)
            self._shift -= len(b"<posts>")
            self._depth = 1
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        # Text, comments and processing instructions, as written in the file.
        self._expat.DefaultHandler = self._other
        self._expat.StartDoctypeDeclHandler = self._doctype
        self._expat.EndDoctypeDeclHandler = self._end_doctype

    def feed(self, content: bytes, is_final: bool) -> _Stop | None:
        """Parses more bytes; returns a stop, or None to continue."""
        try:
            self._expat.Parse(content, is_final)
        except _Stop as stop:
            return stop
        except expat.ExpatError as error:
            searched = self._expat.ErrorByteIndex + self._shift
            message = expat.ErrorString(error.code)
            # An XML declaration may follow a comment, and posts may follow `</posts>`.
            in_prolog = message == errors.XML_ERROR_MISPLACED_XML_PI and not self.is_started
            goes_on = in_prolog or message == errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT
            reason = "" if goes_on and self.done > self._first else "malformed"
            return _Stop(reason, self.done, searched, message in _UNFINISHED, in_prolog)
        return None

    def _position(self) -> int:
        return self._expat.CurrentByteIndex + self._shift

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        begin = self._position()
        if self._depth == 0:
            if name != "posts":
                raise _Stop("malformed", begin, begin)
            self.is_started = True
        elif self._depth > 1:  # an element around it was not closed
            raise _Stop("" if name == "row" else "malformed", begin, begin)
        elif name == "row":
            self._row = begin
            self.rows.append((begin, attributes))
        self._depth += 1
        self.done = begin + 1

    def _end(self, name: str) -> None:
        self.done = self._position()
        self._depth -= 1
        if name == "row" and self.done - self._row > LONGEST_POST:
            self.rows[-1] = (self._row, "too long")
        self.is_ended = self._depth == 0
        if self.is_ended and (self._expat.GetInputContext() or b"").startswith(b"</posts>"):
            self.done += len(b"</posts>")

    def _other(self, text: str) -> None:
        begin = self._position()
        if (
            text.strip()
            and not text.startswith(("<!--", "<?"))
            and self._depth
            and not self.is_ended
        ):
            raise _Stop("malformed", begin, begin)
        self.done = begin + len(text.encode())
        if text.endswith("\n"):
            self.line = self.done

    def _doctype(self, name: str, system: str | None, public: str | None, declares: bool) -> None:
        if declares:
            raise ValueError(
                f"{self._path} declares entities or elements in its document type, which no "
                f"{FILE_NAME} does: refused"
            )

    def _end_doctype(self) -> None:
        # Old dumps name a document type, which is ignored. Another parser begins behind it, so entities
        # are unknown, as in files without a document type.
        behind = self._position() + 1
        raise _Stop("", behind, behind, in_prolog=True)


def _reason(reason: str, broken: bytes) -> str:
    try:
        broken.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return reason


def _cut_off(path: Path, start: int, end: int) -> str:
    inside = f", within the post that begins at byte {start:,}" if start < end else ""
    return f"{path} is cut off: it ends at byte {end:,}{inside}, before </posts>"


def _post(attributes: Mapping[str, str] | str) -> tuple[str, str, list[list[str]]] | str:
    """(user, domain, sentences) of a post's attributes, or why it is skipped."""
    if isinstance(attributes, str):
        return attributes
    domain = _DOMAIN_OF_TYPE.get(attributes.get("PostTypeId", ""))
    if domain is None:
        return "neither question nor answer"
    user = attributes.get("OwnerUserId", "")
    if not (user.isascii() and user.removeprefix("-").isdigit()):
        return "without a user"
    body = attributes.get("Body", "")
    if len(body) > LONGEST_BODY:
        return "too long"
    try:
        sentences = sentences_of(text_of_html(body))
    except ValueError:
        return "malformed"
    return (user, domain, sentences) if sentences else "empty"
