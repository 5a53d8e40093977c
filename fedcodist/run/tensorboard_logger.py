"""TensorBoard: one writer per seed, so that a chart has the seeds of one metric as its curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcodist.run.metrics_lines import Record, scalars
from fedcodist.run.tracked_runs import LoggerError


class TensorBoardLogger:
    """Writes `tensorboard/seed<n>/` in the run folder, with the tags `<model>/<split>/<metric>`.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, workdir: Path):
        from tensorboardX import SummaryWriter

        self._workdir = workdir
        self._make = lambda seed: SummaryWriter(str(workdir / "tensorboard" / f"seed{seed}"))
        self._writers: dict[int, Any] = {}

    def __call__(self, records: Sequence[Record]) -> None:
        try:
            self._write(records)
        except OSError as error:
            folder = self._workdir / "tensorboard"
            raise LoggerError(f"cannot write {folder}: {error.strerror or error}.") from error

    def _write(self, records: Sequence[Record]) -> None:
        for record in records:
            seed = record["seed"]
            if seed not in self._writers:
                # Opened only with the first metrics line: a refused run must not change its folder.
                self._writers[seed] = self._make(seed)
            for tag, value in scalars(record).items():
                self._writers[seed].add_scalar(tag, value, record["round"])
        for writer in self._writers.values():
            writer.flush()

    def finish(self, summary: Any) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
