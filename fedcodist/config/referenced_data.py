"""A user's data, `data.name = "my_module:load"`, and a user's preprocessing of any data.

`load` gets as arguments all settings of `data` except those of all data (`OF_ALL`). It gets `seed`,
which also draws the clients of each pool, only if it has such an argument. It returns `Data`, or a
mapping from split to FederatedData. The split "train" has the clients; "distillation", which may be
missing, has the server's unlabelled examples. Splits other than "train" may be plain columns, name ->
array. Networks read the column "image", and losses and metrics read "label".

`data.preprocess` and `data.evaluation_preprocess` are functions (batch, key, positions) -> batch, like
the `preprocess` of `LocalTraining`: the batch is a dictionary of columns [batch, ...], and the key is
for random augmentation. The functions are traced. Preprocessing for evaluation must not be random; by
default it is that of training.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.data_settings import OF_ALL
from fedcodist.config.references import called, function_at, signature_of
from fedcodist.core.batches import Preprocess, check_preprocess
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.splits import federated_splits

PREPROCESSING = ("preprocess", "evaluation_preprocess")


def referenced_data(settings: ConfigDict) -> Any:
    """What the function that `data.name` refers to returns: `Data`, or splits by name.

    Raises:
      ValueError: one line that names the setting, and the line in the function where it fails.
    """
    function = function_at("data.name", settings.name)
    read = {"seed"} & signature_of(function).parameters.keys()
    arguments = {
        name: value
        for name, value in settings.to_dict().items()
        if name in read or name not in OF_ALL
    }
    return called("data.name", settings.name, function, **arguments)


def checked_splits(reference: str, splits: Any) -> dict[str, FederatedData]:
    """The splits that a loading function has returned; plain columns become the data of one client.

    Raises:
      ValueError, TypeError: the function returned something else, or 'train' is missing.
    """
    prefix = f"data.name {reference!r} must return a mapping of splits to FederatedData, or Data"
    if not isinstance(splits, Mapping) or hasattr(splits, "_fields"):
        raise ValueError(f"{prefix}, got {type(splits).__name__}.")
    if "train" not in splits:
        raise ValueError(f"{prefix}, with the clients as 'train', got {sorted(splits)}.")
    if not isinstance(train := splits["train"], FederatedData):
        raise ValueError(f"{prefix}, got {type(train).__name__} for 'train', the clients.")
    others = {name: data for name, data in splits.items() if name != "train"}
    return {"train": train, **federated_splits(f"data.name {reference!r}: splits", others)}


def as_they_are(batch: dict[str, Any], key: Any, positions: Any) -> dict[str, Any]:
    """The preprocessing of data that need none."""
    return batch


def referenced_preprocessing(settings: ConfigDict) -> dict[str, Preprocess]:
    """The functions that `data.preprocess` and `data.evaluation_preprocess` refer to.

    Raises:
      ValueError: names the setting: there is no such function.
      TypeError: names the setting: the function has other arguments.
    """
    functions: dict[str, Preprocess] = {}
    for name in PREPROCESSING:
        if (reference := settings.get(name)) is None:
            continue
        function = function_at(f"data.{name}", reference)
        check_preprocess(f"data.{name} {reference!r}", function)
        functions[name] = function
    if "preprocess" in functions:
        functions.setdefault("evaluation_preprocess", functions["preprocess"])
    return functions
