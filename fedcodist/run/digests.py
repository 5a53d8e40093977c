"""Digests of data: an array's dtype, shape and a checksum of its values, in one line of text."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcodist.data.column_values import give_back_pages

# Of larger columns only blocks, evenly spread over them, are digested.
_DIGESTED_WHOLE = 2**30
_BLOCK = 2**24


def digest(array: Any) -> str:
    """An array's dtype, shape and a checksum of its values, as text."""
    values = np.asarray(array)
    if values.dtype.kind in "OSU":
        values = np.frombuffer("\0".join(map(str, values.reshape(-1))).encode(), np.uint8)
    entries, checksum = np.atleast_1d(values), hashlib.sha256()
    length = max(1, _BLOCK * len(entries) // max(1, entries.nbytes))
    blocks, most = -(-len(entries) // length), _DIGESTED_WHOLE // _BLOCK
    for block in range(blocks) if blocks <= most else np.linspace(0, blocks - 1, most).astype(int):
        part = np.ascontiguousarray(entries[block * length : (block + 1) * length])
        checksum.update(part.reshape(-1).view(np.uint8).data)
    return f"{np.asarray(array).dtype}{list(np.shape(array))} {checksum.hexdigest()[:16]}"


def column_digests(columns: Mapping[str, Any]) -> dict[str, str]:
    """Name -> the digest of a column."""
    digests = {name: digest(column) for name, column in columns.items()}
    give_back_pages(columns)
    return digests


def column_digests_with_sizes(columns: Mapping[str, Any], sizes: Any) -> dict[str, str]:
    """As `column_digests`, and a digest of the clients' numbers of examples."""
    return {**column_digests(columns), "sizes of clients": digest(np.asarray(sizes, np.int64))}
