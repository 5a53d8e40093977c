"""Whether two runs had the same data, so that a difference within seeds means something."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedcodist.report.runs import Run, mapping_of
from fedcodist.report.settings import differing_keys, flatten, shown_setting


class DataOfRun(NamedTuple):
    """What a run folder says of the data.

    Attributes:
      settings: the config's, with dotted names such as `data.num_clients`.
      checksums: of the clients' examples and the split's, by name; runs of earlier versions have none.
    """

    settings: Mapping[str, Any]
    checksums: Mapping[str, Any]


def data_of(run: Run, split: str) -> DataOfRun:
    """The data of a run that is measured on a split."""
    identity = mapping_of(mapping_of(run.environment, "identity"), "data")
    checksums = {
        "clients": identity.get("clients"),
        split: mapping_of(identity, "splits").get(split),
    }
    settings = {"data": mapping_of(run.config, "data")}
    return DataOfRun(flatten(settings), {name: sha for name, sha in checksums.items() if sha})


def other_data(ours: DataOfRun, theirs: DataOfRun) -> str:
    """What one run has in place of another's data; empty if they are the same, or unknown.

    Where both runs have checksums, settings only explain a difference: other settings may have made the
    same examples.
    """
    common = ours.checksums.keys() & theirs.checksums.keys()
    if common and all(ours.checksums[name] == theirs.checksums[name] for name in common):
        return ""
    both = (ours.settings, theirs.settings)
    differing = differing_keys(both)
    if not differing:
        return "other examples" if common else ""
    first, second = (shown_setting(settings, differing[0]) for settings in both)
    return f"{differing[0]} = {first} in place of {second}"
