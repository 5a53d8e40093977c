"""Posts of the Stack Exchange data dump: a file `Posts.xml` per site, a line per post.

The files are read line by line, so one bad post spoils no other; what is kept of them is in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.parsers import expat

from fedcodist.data.sentences import sentences_of, text_of_html

QUESTIONS, ANSWERS = "questions", "answers"
DOMAINS = (QUESTIONS, ANSWERS)
FILE_NAME = "Posts.xml"
# The sites refuse posts of more than 30,000 characters; escaped as XML that is less than 1 MiB.
LONGEST_POST = 1 << 20
# Characters of HTML: what parsing takes may grow with their square.
LONGEST_BODY = 100_000

_DOMAIN_OF_TYPE = {"1": QUESTIONS, "2": ANSWERS}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 1 << 16
_SHOWN = 1 << 26


class Posts(NamedTuple):
    """What was read.

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

    Questions are posts of type 1 and answers of type 2; others (wikis, tags) are skipped, and so are
    posts that are not well-formed XML or HTML, not UTF-8, longer than 1 MiB or 100,000 characters of
    HTML, without a user who still exists, or without a sentence. All are counted.

    Args:
      source: a `Posts.xml`, a folder that has one, or a folder of such folders; the site's name is
        that of the file's folder.
      show: called with the site's name and the fraction of all bytes that is done.

    Raises:
      ValueError: there is no such file, or one that is cut off (with the byte position), is UTF-16 or
        not such a file at all.
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
            for position, line in _post_lines(path, file, digest):
                if position >= shown + _SHOWN:
                    shown = position
                    show(f"{site}, {position >> 20:,} MiB", (before + position) / total)
                post = _post(line)
                if isinstance(post, str):
                    skipped[post] += 1
                    continue
                user, domain, sentences = post
                own = users.setdefault(f"{site}/{user}", {QUESTIONS: [], ANSWERS: []})
                own[domain] += sentences
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


def _post_lines(path: Path, file: BinaryIO, digest) -> Iterator[tuple[int, bytes | None]]:
    """(byte position, line) of every post; None for lines that are too long.

    Raises ValueError where the file does not begin or end as a dump does.
    """
    position, started, ended = 0, False, False
    while line := file.readline(LONGEST_POST + 1):
        digest.update(line)
        start, is_whole = position, line.endswith(b"\n")
        position += len(line)
        if start == 0:
            if line.startswith(_UTF16_MARKS):
                raise ValueError(f"{path} is UTF-16, dumps are UTF-8")
            line = line.removeprefix(_BYTE_ORDER_MARK)
        is_long = len(line) > LONGEST_POST
        while not is_whole and (rest := file.readline(_BLOCK)):
            digest.update(rest)
            position += len(rest)
            is_whole = rest.endswith(b"\n")
        content = line.strip()
        if not started:
            started = content.startswith(b"<posts")
            # The file may end within these words.
            known = content.startswith((b"<?xml", b"<!")) or (
                not is_whole and any(word.startswith(content) for word in (b"<?xml", b"<posts"))
            )
            if content and not started and not known:
                raise ValueError(f"{path} is no {FILE_NAME} of a Stack Exchange dump")
            content = content.partition(b">")[2].strip()  # what stands behind it on its line
        if started and content:
            # A broken post may hold these words too: posts behind them are read.
            ended = content.endswith(b"</posts>") or (ended and b"<row" not in content)
            content = content.removesuffix(b"</posts>").rstrip()
            if not is_whole and not ended:
                inside = content.startswith(b"<row")
                raise ValueError(_cut_off(path, start if inside else position, position))
            if b"<row" in content:  # other lines are what a broken one left
                yield start, None if is_long else content
    if not ended:
        raise ValueError(_cut_off(path, position, position))


def _cut_off(path: Path, start: int, end: int) -> str:
    inside = f", within the post that begins at byte {start:,}" if start < end else ""
    return f"{path} is cut off: it ends at byte {end:,}{inside}, before </posts>"


def _post(line: bytes | None) -> tuple[str, str, list[list[str]]] | str:
    """(user, domain, sentences) of a line, or why it is skipped."""
    if line is None:
        return "too long"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    attributes: dict[str, str] = {}
    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler = lambda name, found: attributes.update(found)
    try:
        parser.Parse(line, True)
    except expat.ExpatError:
        return "malformed"
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
