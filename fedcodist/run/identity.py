"""The identity of a run: its data, its settings, and its functions as far as they can be named.

A run folder stores it in environment.json, so that an edited script does not continue the run of its
earlier version. Data are described by digests (`digests`), and functions as `described_code` says.
"""

import itertools
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedcodist.run.client_splits import all_splits
from fedcodist.run.described_code import described, described_parts
from fedcodist.run.digests import column_digests, column_digests_with_sizes
from fedcodist.run.json_values import json_value
from fedcodist.run.sources import StreamedData

_SHOWN = 8  # entries of a list that are shown in one line
_SETTINGS = (
    "evaluate_every",
    "checkpoint_every",
    "seed",
    "seeds",
    "evaluation_batch_size",
    "evaluate_clients",
)
_PARTS = (
    "round",
    "select",
    "init",
    "predictors",
    "client_states",
    "personal_models",
    "data_set_sizes",
)
# Older run folders have no record of these settings, so they cannot be compared.
_ADDED_LATER = ("hyper", "start")


class Identity(NamedTuple):
    """The identity of a run.

    Attributes:
      content: JSON values: 'rounds', 'prepared', 'data', 'settings', 'algorithm', and 'execution' if
        clients keep states: those on the host have another form in checkpoints than those on the device.
      has_config: whether the run has a config, and descriptions of the code to which it refers. Then
        'settings' and 'algorithm' are not compared, and hyper-parameters and start are not described.
      execution: how the algorithm's clients are executed and whether their data are streamed, which
        belongs to the plan.
    """

    content: dict[str, Any]
    has_config: bool
    execution: dict[str, Any]

    def is_longer(self, theirs: Mapping[str, Any]) -> bool:
        """Whether the run has more rounds than another one's content says."""
        rounds = theirs.get("rounds")
        return isinstance(rounds, int) and rounds < self.content["rounds"]

    def difference(self, theirs: Mapping[str, Any], to_grow: bool = False) -> str | None:
        """The first difference from another run's content; None if it is the same run.

        Args:
          theirs: from environment.json.
          to_grow: whether our config is theirs with more rounds. Then the algorithm must not depend on
            the number of rounds.
        """
        parts = ["prepared", "data"]
        if "execution" in theirs:  # older run folders have no record
            parts.append("execution")
        if not self.has_config:
            parts += ["settings", "algorithm"]
        rounds = theirs.get("rounds")
        until = min(rounds if isinstance(rounds, int) else 0, self.content["rounds"])
        before, now = (
            {part: _without_later_evaluations(until, content.get(part)) for part in parts}
            for content in (theirs, self.content)
        )
        if not self.has_config:
            now["settings"] = _without_unrecorded(before["settings"], now["settings"])
        if difference := first_difference(before, now):
            return difference
        if to_grow and (
            difference := first_difference(
                {"algorithm": theirs.get("algorithm")}, {"algorithm": self.content["algorithm"]}
            )
        ):
            return (
                f"rounds is {theirs.get('rounds')} there and {self.content['rounds']} here, and the "
                f"algorithm depends on it: {difference}"
            )
        return None


def identity_of(
    experiment: Any, has_config: bool = False, prepared: Mapping[str, Any] | None = None
) -> Identity:
    """The identity of an Experiment. The data are read once.

    Args:
      experiment: an Experiment.
      has_config: as in Identity.
      prepared: prepared folder -> checksum; setting -> `described` code that a config refers to.
    """
    settings: dict[str, Any] = {name: getattr(experiment, name) for name in _SETTINGS}
    settings["evaluate_also"] = sorted(int(round) for round in experiment.evaluate_also)
    settings["final_splits"] = sorted(experiment.final_splits)
    for name in ("client_splits", "final_client_splits"):
        if getattr(experiment, name):
            settings[name] = sorted(getattr(experiment, name))
    if experiment.privacy is not None:
        settings["privacy"] = list(experiment.privacy)
    if not has_config:
        settings |= {"hyper": hyper_of(experiment), "start": start_of(experiment)}
    settings |= described("evaluation_preprocess", experiment.evaluation_preprocess)
    algorithm, execution = described_algorithm(experiment.algorithm)
    stream = {"stream": isinstance(experiment.data, StreamedData)}
    keeps_states = any(
        jax.tree.leaves(s.first) for s in experiment.algorithm.client_states.values()
    )
    content = {
        "rounds": experiment.rounds,
        "prepared": dict(prepared or {}),
        "data": _data_digests(experiment),
        "settings": jax.tree.map(json_value, settings),
        "algorithm": algorithm,
        "execution": stream if keeps_states else {},
    }
    execution = {"seeds_loop": experiment.seeds_loop, **execution, **stream}
    return Identity(content, has_config, execution)


def hyper_of(experiment: Any) -> dict[str, Any]:
    """Path -> the values of a hyper-parameter, a number or a list."""
    leaves = jax.tree_util.tree_flatten_with_path(experiment.algorithm.hyper)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tolist() for path, leaf in leaves}


def start_of(experiment: Any) -> list[int]:
    """A checksum of each array of the state from which the run starts."""
    leaves = jax.tree.leaves(experiment.start)
    return [zlib.crc32(np.ascontiguousarray(leaf).tobytes()) for leaf in leaves]


def described_algorithm(algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(JSON values by path; how its clients are executed, which is not among them)."""
    return described_parts({part: getattr(algorithm, part) for part in _PARTS})


def is_same_algorithm(one: Any, other: Any) -> bool:
    """Whether two algorithms are one, but for `hyper`. If not, their descriptions may be the same."""
    return all(getattr(one, part) is getattr(other, part) for part in _PARTS)


def first_difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    """One line about the first difference between two JSON values; None if they are equal."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            missing = "nothing"
            inner = f"{where}.{name}" if where else name
            left, right = theirs.get(name, missing), ours.get(name, missing)
            if difference := first_difference(left, right, inner):
                return difference
        return None
    if theirs == ours:
        return None
    if (
        isinstance(theirs, list)
        and isinstance(ours, list)
        and min(map(len, (theirs, ours))) > _SHOWN
    ):
        pairs = enumerate(itertools.zip_longest(theirs, ours, fillvalue="nothing"))
        place, (left, right) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        return first_difference(left, right, f"{where}[{place}]")
    return f"{where} is {theirs!r} there and {ours!r} here"


def _without_later_evaluations(rounds: int, part: Any) -> Any:
    """A part of the content without evaluations that only the longer of two runs has."""
    if isinstance(part, dict) and isinstance(part.get("evaluate_also"), list):
        part = part | {"evaluate_also": [r for r in part["evaluate_also"] if r < rounds]}
    return part


def _without_unrecorded(theirs: Any, ours: Any) -> Any:
    """Our settings without those of which an older folder has no record."""
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return ours
    return {n: v for n, v in ours.items() if n in theirs or n not in _ADDED_LATER}


def _data_digests(experiment: Any) -> dict[str, Any]:
    data, splits = experiment.data, all_splits(experiment)
    return {
        "clients": column_digests_with_sizes(data.columns, data.sizes),
        "data_sets": {name: column_digests(columns) for name, columns in data.data_sets.items()},
        "splits": {
            name: column_digests_with_sizes(split.columns, split.client_sizes)
            for name, split in splits.items()
        },
    }
