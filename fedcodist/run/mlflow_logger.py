"""MLflow: one run per seed, in the experiment that has the config's name.

If the user has set a tracking URI, as MLFLOW_TRACKING_URI or in Python, runs are logged there. Otherwise
they are logged to a file store, `mlruns/` in the run folder, which
`mlflow ui --backend-store-uri FOLDER/mlruns` shows. A resumed run continues the same MLflow runs.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcodist.run.metrics_lines import Record, scalars
from fedcodist.run.tracked_runs import LoggerError, TrackedRuns, seeds_of

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # that MLflow takes at once
_LONGEST = 500  # characters of a parameter
_IDS = "mlflow_runs.json"


class MLflowLogger:
    """Logs `<model>/<split>/<metric>` with rounds as steps, and the config as parameters.

    Raises:
      ImportError: MLflow is not installed.
    """

    def __init__(self, workdir: Path):
        import mlflow

        self._mlflow, self._workdir = mlflow, workdir
        self._config: dict[str, Any] = {}
        self._ids = TrackedRuns(workdir / _IDS)
        self._client: Any = None
        self._seeds: set[int] = set()

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the store, so that an unreachable store is noticed before training."""
        self._config, uri = dict(config), None
        # A run that was stopped after its last evaluation is finished without logging again.
        self._seeds.update(seeds_of(config))
        if not self._mlflow.is_tracking_uri_set():
            uri = (self._workdir / "mlruns").resolve().as_uri()
            # Otherwise newer versions refuse the only store that needs neither server nor database.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        name = str(config.get("name") or "fedcodist")
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(name)
            self._experiment = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
        except (self._mlflow.MlflowException, OSError) as error:
            raise LoggerError(f"loggers 'mlflow': {error}") from error

    def __call__(self, records: Sequence[Record]) -> None:
        with self._in_one_line():
            self._log(records)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Marks the runs as finished. Seeds of which nothing was logged get no run."""
        with self._in_one_line():
            for run_id in map(self._ids.known, self._seeds):
                if run_id is not None:
                    self._client.set_terminated(run_id)

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """MLflow's errors become a LoggerError that names the file of the runs' identifiers."""
        try:
            yield
        except (self._mlflow.MlflowException, OSError) as error:
            raise LoggerError(
                f"loggers 'mlflow', whose runs are in {self._workdir / _IDS}: {error}"
            ) from error

    def _log(self, records: Sequence[Record]) -> None:
        now = int(1000 * time.time())
        by_seed: dict[int, list[Any]] = {}
        for record in records:
            by_seed.setdefault(record["seed"], []).extend(
                self._mlflow.entities.Metric(tag, value, now, record["round"])
                for tag, value in scalars(record).items()
            )
        for seed, metrics in by_seed.items():
            for first in range(0, len(metrics), _MOST_METRICS):
                part = metrics[first : first + _MOST_METRICS]
                self._client.log_batch(self._run(seed), metrics=part)

    def _run(self, seed: int) -> str:
        self._seeds.add(seed)
        return self._ids.id_of(seed, lambda: self._created(seed))

    def _created(self, seed: int) -> str:
        run = self._client.create_run(
            self._experiment,
            run_name=f"{self._workdir.name}_seed{seed}",
            tags={"run_folder": str(self._workdir), "seed": str(seed)},
        )
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:_LONGEST])
            for name, value in _flat(self._config | {"seed": seed})
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            part = parameters[first : first + _MOST_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=part)
        return run.info.run_id


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
