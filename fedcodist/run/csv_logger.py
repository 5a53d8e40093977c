"""All scalars of a run in one table, `metrics.csv` in its folder, with a table row per value."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedcodist.run.metrics_lines import WHAT_IS_MEASURED, Record, scalars
from fedcodist.run.tracked_runs import LoggerError


class CSVLogger:
    """Columns: round, model, split, seed, metric, value. Written anew when a stopped run goes on."""

    only_reads = True

    def __init__(self, workdir: Path):
        self._path = workdir / "metrics.csv"
        self._is_new = True

    def __call__(self, records: Sequence[Record], history: Sequence[Record]) -> None:
        if not self._is_new:
            self._write("a", records)
            return
        # An earlier start that was killed may have written rounds that are now trained again.
        self._write("w", history)
        self._is_new = False

    def _write(self, mode: str, records: Iterable[Record]) -> None:
        try:
            self._write_rows(mode, records)
        except OSError as error:
            raise LoggerError(f"cannot write {self._path}: {error.strerror}.") from error

    def _write_rows(self, mode: str, records: Iterable[Record]) -> None:
        with open(self._path, mode, newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if mode == "w":
                rows.writerow([*WHAT_IS_MEASURED, "metric", "value"])
            for record in records:
                measured = [record[name] for name in WHAT_IS_MEASURED]
                where = f"{record['model']}/{record['split']}/"
                for tag, value in scalars(record).items():
                    # A metric's name may have "/" too, as that of a layer.
                    rows.writerow([*measured, tag.removeprefix(where), value])
