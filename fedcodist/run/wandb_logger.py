"""Weights & Biases: one run per seed, in a group with the run folder's name.

Environment variables such as WANDB_MODE=offline and WANDB_PROJECT are read by the package; by default
the project has the config's name. Files are in `wandb/` of the run folder. A resumed run continues the
same W&B runs.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcodist.run.metrics_lines import Record, scalars
from fedcodist.run.tracked_runs import LoggerError, TrackedRuns, final_scalars, seeds_of


class WandbLogger:
    """Logs `<model>/<split>/<metric>` over the axis `round`, and final metrics as the runs' summaries.

    Raises:
      ImportError: wandb is not installed.
    """

    def __init__(self, workdir: Path):
        import wandb

        self._wandb, self._workdir = wandb, workdir
        self._config: dict[str, Any] = {}
        self._ids = TrackedRuns(workdir / "wandb_runs.json")
        self._runs: dict[int, Any] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the runs of the config's seeds, so that a missing login is found before training."""
        self._config = dict(config)
        for seed in seeds_of(config):
            self._run(seed)

    def __call__(self, records: Sequence[Record]) -> None:
        by_seed: dict[int, dict[str, float]] = {}
        for record in records:
            by_seed.setdefault(record["seed"], {"round": record["round"]}).update(scalars(record))
        for seed, values in by_seed.items():
            self._run(seed).log(values)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the runs, with the final metrics as their summaries."""
        first = min(self._runs, default=0)
        for seed, run in self._runs.items():
            run.summary.update(final_scalars(summary, seed - first))
            run.finish()

    def _run(self, seed: int) -> Any:
        if seed not in self._runs:
            try:
                self._runs[seed] = self._wandb.init(
                    dir=str(self._workdir),
                    project=os.environ.get("WANDB_PROJECT") or self._config.get("name"),
                    group=self._workdir.name,
                    name=f"{self._workdir.name}_seed{seed}",
                    id=self._ids.id_of(seed, lambda: secrets.token_hex(8)),
                    resume="allow",
                    config={**self._config, "seed": seed},
                    reinit="create_new",
                )
            except (self._wandb.Error, OSError) as error:
                raise LoggerError(
                    f"loggers 'wandb': {error} WANDB_MODE=offline logs without an account."
                ) from error
            # A resumed run may train and log rounds again; W&B's own steps cannot go back.
            self._runs[seed].define_metric("*", step_metric="round")
        return self._runs[seed]
