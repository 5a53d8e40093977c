"""Names that were changed since records in results/ were written; the files stay as they are."""

import re
from collections.abc import Mapping
from typing import Any

# Methods, and the runs and phases that are named after them.
METHODS = {"isolated": "local_only", "separate": "local_only_steps", "pooled": "centralised"}
PARTS_OF_RUNS = {**METHODS, "pooled_longer": "centralised_longer"}
# Settings by their whole path; settings in a renamed group are renamed with it.
SETTINGS = {
    "algorithm.pool_size": "algorithm.checkpoints_per_client",
    "phases.pooled": "phases.centralised",
    "phases.pooled_bound": "phases.centralised_bound",
    "training.fetch_sgd.rows": "training.fetch_sgd.sketch_rows",
    "training.fetch_sgd.columns": "training.fetch_sgd.sketch_columns",
    "training.fetch_sgd.count": "training.fetch_sgd.k",
    "training.fetch_sgd.examples": "training.fetch_sgd.examples_per_round",
}


def renamed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a record with today's names; values of unexpected types are left unchanged."""
    changed = dict(record)
    if isinstance(config := record.get("config"), dict):
        changed["config"] = _config(config)
    if isinstance(run := record.get("run"), str):
        changed["run"] = _run(run)
    if isinstance(command := record.get("command"), str):
        changed["command"] = re.sub(r"(?<=\.py:)\S+", lambda found: _run(found.group()), command)
    if isinstance(phases := record.get("phases"), dict):
        changed["phases"] = {METHODS.get(name, name): phase for name, phase in phases.items()}
    return changed


def _config(config: dict[str, Any]) -> dict[str, Any]:
    changed = _settings(config, "")
    if isinstance(run := config.get("run"), str):
        changed["run"] = _run(run)
    if isinstance(algorithm := changed.get("algorithm"), dict):
        name = algorithm.get("name")
        changed["algorithm"] = algorithm | {"name": METHODS.get(name, name)} if name else algorithm
    return changed


def _settings(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    changed = {}
    for name, value in settings.items():
        path = SETTINGS.get(f"{prefix}{name}", f"{prefix}{name}")
        is_group = isinstance(value, dict)
        changed[path.rpartition(".")[2]] = _settings(value, f"{path}.") if is_group else value
    return changed


def _run(run: str) -> str:
    return ",".join(PARTS_OF_RUNS.get(part, part) for part in run.split(","))
