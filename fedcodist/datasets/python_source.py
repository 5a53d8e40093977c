"""The source of the Python standard library: prose in docstrings and comments, and code.

Every installation of Python has it. Clients are the library's packages and modules.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedcodist.data.sentences import sentences_of

PROSE, CODE = "prose", "code"
DOMAINS = (PROSE, CODE)
STRING = "<string>"

# Tests are not installed everywhere, and the tables of encodings hold no text.
_LEFT_OUT = frozenset(("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"))
_SKIPPED = frozenset(
    (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENCODING)
)
_MARK = re.compile(r"#[#!:\s]*")
_CODING = re.compile(r"#.*coding[:=]|#!")
_RULE = re.compile(r"[-=~*^#_\s]{3,}")


class PythonSource(NamedTuple):
    """The contents of the library.

    Attributes:
      clients: package or module -> domain -> sentences of words.
      sha256: of all files that were read, their names included.
      files: number of files.
      skipped: names of files that are not Python, or not in their declared encoding.
    """

    clients: dict[str, dict[str, list[list[str]]]]
    sha256: str
    files: int
    skipped: tuple[str, ...]


def read_python_source(
    folder: Path | None = None, show: Callable[[str, float], None] = lambda text, fraction: None
) -> PythonSource:
    """Reads a standard library, by default that of the running Python.

    The modules of a package are one client, as is every module outside of packages. Prose is sentences
    of words as in `fedcodist.data.sentences`, without interactive examples in docstrings. Code is
    logical lines of Python's tokens, with strings replaced by `<string>` and without docstrings.

    What the running Python's library does not have is left out, see `left_out_modules`.

    Args:
      folder: holds the library's files.
      show: called with the present stage and the fraction that is done.

    Raises:
      ValueError: there are no source files, as in an installation from a zip archive.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else Path(folder)
    files = _files(folder)
    if not files:
        raise ValueError(f"{folder} holds no source files of Python's standard library")
    clients: dict[str, dict[str, list[list[str]]]] = {}
    digest, skipped = hashlib.sha256(), []
    for number, path in enumerate(files):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        if number % 100 == 0:
            show(f"{number} of {len(files)} files", number / len(files))
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
        try:
            prose, code = prose_and_code(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            skipped.append(name)
            continue
        domains = clients.setdefault(_client(relative), {PROSE: [], CODE: []})
        domains[PROSE] += prose
        domains[CODE] += code
    clients = {
        name: domains for name, domains in clients.items() if domains[PROSE] or domains[CODE]
    }
    return PythonSource(clients, digest.hexdigest(), len(files), tuple(skipped))


def left_out_modules(folder: Path) -> list[str]:
    """Modules and packages in a folder that the running Python's library does not have, sorted.

    They are of another version's library, or were installed later.
    """
    return sorted(
        top.stem
        for top in (folder.iterdir() if folder.is_dir() else ())
        if top.stem not in sys.stdlib_module_names and top.stem not in _LEFT_OUT
        if top.suffix == ".py" or (top / "__init__.py").is_file()
    )


def prose_and_code(content: bytes) -> tuple[list[list[str]], list[list[str]]]:
    """Sentences of one file's docstrings and comments, in their order, and its logical lines.

    Raises SyntaxError, ValueError or RecursionError for what is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of an escape that a string does not have
        tree = ast.parse(content)
    texts = []  # first line and text
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                texts.append((node.body[0].lineno, _without_examples(text)))
    code = []
    try:
        for start, comment, line in _logical_lines(content):
            if comment is not None:
                texts.append((start, comment))
            elif line != [STRING]:  # neither a docstring nor commented-out code
                code.append(line)
    except tokenize.TokenError as error:
        raise SyntaxError(str(error)) from None
    texts.sort(key=lambda item: item[0])  # a comment behind a docstring comes after it
    prose = [sentence for _, text in texts for sentence in sentences_of(text)]
    return prose, code


def _logical_lines(content: bytes) -> Iterator[tuple[int, str | None, list[str]]]:
    """Yields (first line, text of a run of comments or None, tokens of a logical line), in order."""
    line: list[str] = []
    comments: list[str] = []
    first, begun, nested = 0, 0, 0
    # From Python 3.12 on, a formatted string consists of several tokens, from a start to an end.
    f_start = getattr(tokenize, "FSTRING_START", -1)
    f_end = getattr(tokenize, "FSTRING_END", -1)
    t_start, t_end = getattr(tokenize, "TSTRING_START", -1), getattr(tokenize, "TSTRING_END", -1)
    last_comment = -1
    for token in tokenize.tokenize(io.BytesIO(content).readline):
        if token.type == tokenize.COMMENT and not _CODING.match(token.string):
            if comments and token.start[0] != last_comment + 1:
                yield begun, _comment_text(comments), []
                comments = []
            begun = begun if comments else token.start[0]
            comments.append(token.string)
            last_comment = token.start[0]
        if token.type in (f_start, t_start):
            nested += 1
            if nested == 1:
                first = first if line else token.start[0]
                line.append(STRING)
            continue
        if token.type in (f_end, t_end):
            nested -= 1
            continue
        if nested or token.type in _SKIPPED:
            continue
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if line:
                yield first, None, line
            line = []
            continue
        first = first if line else token.start[0]
        line.append(STRING if token.type == tokenize.STRING else token.string)
    if comments:
        yield begun, _comment_text(comments), []


def _comment_text(comments: list[str]) -> str:
    return "\n".join(
        "" if _RULE.fullmatch(comment) else _MARK.sub("", comment, count=1) for comment in comments
    )


def _without_examples(docstring: str) -> str:
    """Removes interactive examples, which are code, and lines of dashes."""
    lines, inside = [], False
    for line in docstring.splitlines():
        text = line.strip()
        inside = text.startswith(">>>") or (inside and bool(text))
        lines.append("" if inside or _RULE.fullmatch(text) else line)
    return "\n".join(lines)


def _files(folder: Path) -> list[Path]:
    """Source files of the standard library in a folder, sorted by name."""
    files = []
    for top in sorted(folder.iterdir()) if folder.is_dir() else ():
        if top.stem not in sys.stdlib_module_names or top.stem in _LEFT_OUT:
            continue
        if top.is_dir():
            inner = top.rglob("*.py")
            files += [p for p in inner if not _LEFT_OUT & set(p.relative_to(folder).parts)]
        elif top.suffix == ".py":
            files.append(top)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _client(relative: Path) -> str:
    """The package of a module, or the module itself where it is in no package."""
    return ".".join(relative.parts[:-1]) or relative.stem
