"""The tables of TensorFlow Federated's SQLite files: which client has which example.

The table `examples` has the columns `split_name`, `client_id` and `serialized_example_proto`. The table
`client_metadata`, which may be missing, has the number of examples of each client. In SQLite every row
may hold another type, so the id "7" may be text in one row and bytes in another: both are one client.
Clients are in the order of Python's strings, independent of a column's declared type or collation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedcodist.data.sqlite_file import CLIENT_ID, SqliteFile, sqlite_file

_SPLIT = "split_name COLLATE BINARY IN (:split, CAST(:split AS BLOB))"


@contextlib.contextmanager
def sqlite_database(path: Path) -> Iterator[Database]:
    """Opens a file of TFF for reading, plain or LZMA-compressed.

    Raises:
      ValueError: names the file; also for what SQLite raises within the block.
    """
    with sqlite_file(path, "TFF's examples") as file:
        yield Database(file)


class Database(NamedTuple):
    """An opened file with TFF's tables."""

    file: SqliteFile

    def examples(self, split: str, client_id: str | None = None) -> Iterator[tuple[str, bytes]]:
        """Yields (client, serialised example) of a split by client, each in the order of the file."""
        self.file.check_table("examples")
        owned = "" if client_id is None else "AND " + self._is_client(client_id)
        # Rows are sorted without their examples: these may be all of a large file.
        rows = self.file.query(
            f"SELECT {CLIENT_ID}, rowid FROM examples WHERE {_SPLIT} {owned} "
            f"ORDER BY {CLIENT_ID}, rowid",
            split=split,
            client=client_id,
        )
        for owner, row in rows:
            if client_id is None or owner == client_id:
                cursor = self.file.connection.execute(
                    "SELECT CAST(serialized_example_proto AS BLOB) FROM examples WHERE rowid = ?",
                    (row,),
                )
                yield self.file.checked_id(owner), cursor.fetchone()[0] or b""

    def client_sizes(self, split: str) -> dict[str, int] | None:
        """The number of examples of each client in `client_metadata`; None without that table."""
        if "client_metadata" not in self.file.tables():
            return None
        self.file.check_table("client_metadata")
        rows = self.file.query(
            f"SELECT {CLIENT_ID}, SUM(num_examples) FROM client_metadata WHERE {_SPLIT} "
            f"GROUP BY {CLIENT_ID} ORDER BY {CLIENT_ID}",
            split=split,
        )
        return {self.file.checked_id(owner): count for owner, count in rows}

    def client_ids(self, split: str) -> list[str]:
        """The clients that have examples, sorted."""
        self.file.check_table("examples")
        rows = self.file.query(
            f"SELECT DISTINCT {CLIENT_ID} FROM examples WHERE {_SPLIT} ORDER BY {CLIENT_ID}",
            split=split,
        )
        return [self.file.checked_id(owner) for (owner,) in rows]

    def splits(self, table: str) -> list[str]:
        """The names of the splits in a table, sorted."""
        self.file.check_table(table)
        rows = self.file.query(
            f"SELECT DISTINCT CAST(split_name AS TEXT) COLLATE BINARY FROM {table}"
        )
        return sorted(str(name) for (name,) in rows)

    def _is_client(self, client_id: str) -> str:
        # One comparison per stored type: SQLite could not use an index for a cast.
        stored = [":client", "CAST(:client AS BLOB)"]
        with contextlib.suppress(ValueError):
            if str(int(client_id)) == client_id and abs(int(client_id)) < 1 << 63:
                stored.append("CAST(:client AS INTEGER)")
        return f"client_id COLLATE BINARY IN ({', '.join(stored)})"
