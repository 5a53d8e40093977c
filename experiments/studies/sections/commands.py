"""The commands that make the missing runs of a table."""

import importlib
import shlex
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from experiments.studies.archive import Record
from experiments.studies.sections.markdown import rounds_of
from experiments.studies.settings import flat, settings


def planned(experiment: str) -> list[str]:
    """The runs of the experiment's config file; empty if there is none."""
    module = _config(experiment)
    return module.get_runs() if module and hasattr(module, "get_runs") else []


def sweep(
    experiment: str, runs: Iterable[str], suffix: str = "", overrides: Sequence[str] = ()
) -> str:
    """The command for these runs, with the work folder runs/<experiment><suffix>."""
    runs = dict.fromkeys(runs)
    named = [] if set(runs) >= set(planned(experiment)) else runs
    config = f"experiments/configs/{experiment}.py"
    if (module := _config(experiment)) and module.__name__.startswith("fedcodist."):
        config = experiment  # by its name
    arguments = [
        f"--config {config}",
        *(f'--only "{run}"' for run in named),
        *map(shlex.quote, overrides),
        f"--workdir runs/{experiment}{suffix}",
    ]
    lines = ["python -m fedcodist.commands.sweep", *(f"    {argument}" for argument in arguments)]
    return "```\n" + " \\\n".join(lines) + "\n```"


def full_lengths(records: Iterable[Record]) -> list[str]:
    """For records with fewer rounds than their numbers need, the commands for the same runs in full.

    They have the records' settings and seeds, even if the config file has changed.
    """
    alike: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for record in records:
        if record.rounds < record.full_rounds and record.run in planned(record.experiment):
            rounds = rounds_of(record.rounds, record.full_rounds)
            key = (record.experiment, rounds, _overrides(record))
            alike.setdefault(key, []).append(record.run)
    parts = []
    for number, ((experiment, rounds, overrides), runs) in enumerate(alike.items(), start=1):
        # Each has its own work folder, since a run folder belongs to one config.
        suffix = "_full" if number == 1 else f"_full_{number}"
        command = sweep(experiment, runs, suffix, overrides)
        parts.append(f"{rounds} rounds. At full length:\n\n{command}")
    return parts


def _overrides(record: Record) -> tuple[str, ...]:
    """Overrides that turn the config file's config into the record's, at full length."""
    module = _config(record.experiment)
    present = flat(module.get_config(record.run).to_dict()) if module else {}
    wanted: dict[str, Any] = {
        **settings(record),
        "seed": record.seeds[0],
        "seeds": len(record.seeds),
        "rounds": record.full_rounds,
    }
    # A switch that the config did not have when the record was made was off.
    recorded = flat(record.config)
    switches = (name for name, value in present.items() if value is True and name not in recorded)
    wanted |= dict.fromkeys(switches, False)
    return tuple(
        f"--config.{name}={value}"
        for name, value in wanted.items()
        if name in present and present[name] != value
    )


def _config(experiment: str) -> ModuleType | None:
    """The experiment's config file, of this project or of the library."""
    for room in ("experiments", "fedcodist"):
        name = f"{room}.configs.{experiment}"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    return None
