"""Data of one's own, `data.name = "my_module:load"`, and preprocessing of one's own, of whatever data.

`load` gets the settings of `data` beside the ones named below as arguments, `seed`, which also draws
who is in which pool, where it has such an argument. It returns `Data`, or splits by name:
FederatedData, of which "train" are the clients, and "distillation", where there is one, the server's
unlabelled examples. Networks read the column "image", and losses and metrics "label".

`data.preprocess` and `data.evaluation_preprocess` are functions (batch, key, positions) -> batch, as
that of `LocalTraining`: the batch is a dictionary of columns [batch, ...], the key is for random
augmentation. They are traced. That of evaluation must not be random; where it is not set, evaluation
reads as training does.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.references import called, function_at, signature_of
from fedcodist.core.batches import Preprocess
from fedcodist.data.federated_data import FederatedData

# Settings of `data` that are not the loading function's.
_OURS = ("name", "preprocess", "evaluation_preprocess", "partition", "division_per_seed")
PREPROCESSING = ("preprocess", "evaluation_preprocess")


def referenced_data(settings: ConfigDict) -> Any:
    """What the function that `data.name` refers to returns: `Data`, or splits by name.

    Raises:
      ValueError: one line that names the setting, and the line in the function where it fails.
    """
    function = function_at("data.name", settings.name)
    arguments = {name: value for name, value in settings.to_dict().items() if name not in _OURS}
    if "seed" not in signature_of(function).parameters:
        arguments.pop("seed", None)
    return called("data.name", settings.name, function, **arguments)


def checked_splits(reference: str, splits: Any) -> dict[str, FederatedData]:
    """The splits that a loading function has returned.

    Raises:
      ValueError: one line; they are something else, or 'train' is missing.
    """
    prefix = f"data.name {reference!r} must return a mapping of splits to FederatedData, or Data"
    if not isinstance(splits, Mapping) or hasattr(splits, "_fields"):
        raise ValueError(f"{prefix}, got {type(splits).__name__}.")
    for name, data in splits.items():
        if not isinstance(data, FederatedData):
            raise ValueError(f"{prefix}, got {type(data).__name__} for {name!r}.")
    if "train" not in splits:
        raise ValueError(f"{prefix}, with the clients as 'train', got {sorted(splits)}.")
    return dict(splits)


def as_they_are(batch: dict[str, Any], key: Any, positions: Any) -> dict[str, Any]:
    """The preprocessing of data that need none."""
    return batch


def referenced_preprocessing(settings: ConfigDict) -> dict[str, Preprocess]:
    """The functions that `data.preprocess` and `data.evaluation_preprocess` refer to.

    Raises:
      ValueError: one line that names the setting: there is no such function, or it has other
      arguments.
    """
    functions: dict[str, Preprocess] = {}
    for name in PREPROCESSING:
        if (reference := settings.get(name)) is None:
            continue
        function = function_at(f"data.{name}", reference)
        try:
            inspect.signature(function).bind(None, None, None)
        except TypeError:
            raise ValueError(
                f"data.{name} {reference!r} must be a function (batch, key, positions) -> batch, got "
                f"one of {inspect.signature(function)}."
            ) from None
        functions[name] = function
    if "preprocess" in functions:
        functions.setdefault("evaluation_preprocess", functions["preprocess"])
    return functions
