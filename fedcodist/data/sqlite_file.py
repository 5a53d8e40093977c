"""Opens SQLite files of other programs without trusting them.

They may be LZMA-compressed. A damaged or malicious file gives an error of one line that names it; it
cannot fill the disk, run for ever or call functions. Client ids become text, whatever type a row stores.
"""

from __future__ import annotations

import contextlib
import lzma
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fedcodist.data.unpacking import check_unpacked

_SQLITE_MAGIC = b"SQLite format 3\0"
_LZMA_MAGICS = (b"\xfd7zXZ\0", b"]\0\0")  # the .xz container and the older .lzma
_LZMA_MEMORY = 1 << 30  # bytes for unpacking; the strongest setting of xz asks for 65 MiB
_BLOCK = 1 << 20
_LARGEST_VALUE = 1 << 28  # bytes of one example
# Instructions of SQLite's machine that a query may take for each byte of the file, after the first ones.
# A row has tens of bytes, and reading it takes tens of instructions.
_STEPS_PER_BYTE = 64
_FIRST_STEPS = 1 << 26
_STEPS_AT_ONCE = 1 << 20

# Ids are sorted, grouped and compared by this expression. A cast would keep the column's collation.
CLIENT_ID = "CAST(client_id AS TEXT) COLLATE BINARY"


class SqliteFile(NamedTuple):
    """An opened file. `sqlite_file` turns SQLite's errors into ValueError that names the file."""

    path: Path
    connection: sqlite3.Connection
    largest: int

    def checked_id(self, client_id: Any) -> str:
        """The id of a row's client. Raises ValueError where it has none."""
        if client_id is None:
            raise ValueError(f"{self.path}: client_id must name a client in every row, got NULL")
        return client_id

    def tables(self) -> dict[str, str]:
        """Tables and views -> the SQL statements that made them."""
        rows = self.query(
            "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view')"
        )
        return {name.lower(): f"{kind}: {sql}" for name, kind, sql in rows}

    def check_table(self, name: str) -> None:
        """Raises ValueError for tables that are computed when they are read: that may never end."""
        made = self.tables().get(name)
        if made is None:
            raise sqlite3.OperationalError(f"no such table: {name}")
        is_plain = made.lower().startswith("table: create table")
        # Columns: number, name, type, not null, default, key, hidden; hidden ones are computed.
        columns = self.query(f"PRAGMA table_xinfo({name})")
        if not is_plain or any(column[6] for column in columns):
            raise ValueError(
                f"{self.path}: {name} must be a table whose columns are stored, not computed"
            )

    def query(self, statement: str, **parameters: Any) -> Iterator[Sequence[Any]]:
        """Yields the rows of a query. Stops it where it takes far longer than reading the file does."""
        left = [self.largest]

        def count() -> bool:
            left[0] -= _STEPS_AT_ONCE
            return left[0] < 0

        self.connection.set_progress_handler(count, _STEPS_AT_ONCE)
        try:
            # `yield from` would close the cursor, even after the connection was closed.
            for row in self.connection.execute(statement, parameters):  # noqa: UP028
                yield row
        except sqlite3.OperationalError:
            if left[0] < 0:
                raise ValueError(
                    f"{self.path} takes far longer to read than a file of its size: it is damaged"
                ) from None
            raise


@contextlib.contextmanager
def sqlite_file(path: Path, holds: str) -> Iterator[SqliteFile]:
    """Opens an SQLite file for reading; a compressed one is unpacked to a temporary file.

    Args:
      path: the file.
      holds: what it should hold, for messages.

    Raises:
      ValueError: names the file; also for what SQLite raises within the block.
    """
    with contextlib.ExitStack() as stack:
        plain = path
        if is_compressed(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            plain = Path(folder) / "examples.sqlite"
            decompress(path, plain)
        try:
            connection = sqlite3.connect(f"file:{quote(str(plain.resolve()))}?mode=ro", uri=True)
            stack.callback(connection.close)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
            connection.execute("PRAGMA trusted_schema = OFF")
            largest = _FIRST_STEPS + _STEPS_PER_BYTE * plain.stat().st_size
            yield SqliteFile(path, connection, largest)
        except sqlite3.Error as error:
            raise ValueError(f"{path} cannot be read as {holds}: {error}") from None


def is_compressed(path: Path) -> bool:
    """Whether a file is LZMA-compressed. Raises ValueError where it is no SQLite database either."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not start.startswith(_LZMA_MAGICS) and start != _SQLITE_MAGIC:
        raise ValueError(f"{path} is neither an SQLite database nor LZMA-compressed")
    return start != _SQLITE_MAGIC


def decompress(path: Path, plain: Path) -> None:
    """Unpacks an LZMA-compressed file.

    Raises:
      ValueError: it is damaged, or unpacks to far more than its size.
    """
    size, written = path.stat().st_size, 0
    try:
        with open(path, "rb") as compressed, open(plain, "wb") as file:
            for block in _unpacked(compressed):
                written += len(block)
                check_unpacked(path, written, size)
                file.write(block)
    except EOFError:
        raise ValueError(f"{path} is cut off: it ends at byte {size:,}, inside LZMA data") from None
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is damaged, it cannot be decompressed: {error}") from None


def _unpacked(compressed: Any) -> Iterator[bytes]:
    """Yields the content of all streams in blocks. Raises EOFError where the last one is cut off."""
    waiting, streams = compressed.read(_BLOCK), 0
    while waiting:
        stream = lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)
        try:
            block = stream.decompress(waiting, _BLOCK)
        except lzma.LZMAError:
            if streams:
                return  # what follows the last stream is not compressed
            raise
        while not stream.eof:
            yield block
            waiting = b""
            if stream.needs_input and not (waiting := compressed.read(_BLOCK)):
                raise EOFError
            block = stream.decompress(waiting, _BLOCK)
        yield block
        waiting, streams = stream.unused_data or compressed.read(_BLOCK), streams + 1
