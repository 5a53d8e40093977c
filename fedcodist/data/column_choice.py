"""The columns that a reader of other data formats makes, and the names from which it reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def column_choice(
    columns: Iterable[str] | Mapping[str, str] | None, available: Sequence[str], kind: str
) -> dict[str, str]:
    """Column -> the name from which it is read.

    Args:
      columns: names, or a mapping from column to name; None for all.
      available: the names in the data.
      kind: the kind of these names for messages, such as "feature".

    Raises:
      ValueError: no name is given, or one that is not available.
    """
    if columns is None:
        columns = available
    if isinstance(columns, str):
        columns = [columns]
    choice = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    for name in choice.values():
        if name not in available:
            raise ValueError(f"columns: no {kind} {name!r}; the {kind}s are {sorted(available)}")
    if not choice:
        raise ValueError("columns must not be empty")
    return choice
