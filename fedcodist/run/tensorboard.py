"""Logs every scalar of a run for TensorBoard."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def tensorboard(folder: Path) -> Callable[[Sequence[Mapping[str, Any]]], None] | None:
    """A callback that logs all scalars for TensorBoard; None if tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    writer = None

    def log(records: Sequence[Mapping[str, Any]]) -> None:
        nonlocal writer
        # Made at the first metrics line, since a run that is refused must not change its folder.
        writer = writer or SummaryWriter(str(folder))
        for record in records:
            where = f"{record['model']}/{record['split']}/seed{record['seed']}"
            for name, value in record.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{where}/{name}", value, record["round"])
        writer.flush()

    return log
