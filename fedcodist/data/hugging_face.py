"""Columns from data sets of Hugging Face, with or without a column of natural clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np

from fedcodist.core.extras import install_command
from fedcodist.data.column_choice import column_choice
from fedcodist.data.columns import check_fixed_width
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.pictures import is_picture, pixels

_INSTALL = install_command("hf")
_READ_AT_ONCE = 1000  # examples


@overload
def from_hugging_face(
    source: Any,
    split: str | None = ...,
    columns: Iterable[str] | Mapping[str, str] | None = ...,
    client_column: None = ...,
    **options: Any,
) -> dict[str, np.ndarray]: ...


@overload
def from_hugging_face(
    source: Any,
    split: str | None = ...,
    columns: Iterable[str] | Mapping[str, str] | None = ...,
    *,
    client_column: str,
    **options: Any,
) -> FederatedData: ...


def from_hugging_face(
    source: Any,
    split: str | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    client_column: str | None = None,
    **options: Any,
) -> dict[str, np.ndarray] | FederatedData:
    """Reads a split into columns for a partitioner to deal out, or into the data of natural clients.

    Images become uint8 `[examples, height, width, channels]` (one channel if they are grey), and class
    labels int32. Numbers and text have the types that the data set's features declare.

        columns = fc.from_hugging_face("cifar10", "train", {"image": "img", "label": "label"})
        clients = partition.dirichlet(columns["label"], num_clients=100, concentration=0.3, seed=0)
        train = fc.FederatedData.from_arrays(columns, partition=clients)

    Args:
      source: a `datasets.Dataset`, a `datasets.DatasetDict`, or the name or folder that
        `datasets.load_dataset` takes. A format or transform that was set is not applied.
      split: the split to read; left out for a `Dataset`, which has none.
      columns: the features to read, or a mapping from column to feature; by default all but
        `client_column`.
      client_column: the feature that names the client of each example, text or integers. Clients are
        then sorted by id as text, so 10 comes before 2.
      options: further arguments of `datasets.load_dataset`, such as `name="fine"`, where `source` is a
        name.

    Returns:
      `{column: array [examples, ...]}`; with `client_column` FederatedData.

    Raises:
      ImportError: `datasets` is missing; says what to install.
      ValueError, TypeError: an unknown split or feature, no example, a feature that is no array of one
        shape, a missing value; names feature and example.
    """
    dataset = _split_of(_loaded(source, split, options), split)
    features = getattr(dataset, "features", None)
    if not features or not hasattr(dataset, "__len__"):
        raise TypeError(
            "source must be a name, a datasets.Dataset or a datasets.DatasetDict, got "
            f"{type(dataset).__name__}; a stream is read without streaming=True"
        )
    if client_column is not None and client_column not in features:
        raise ValueError(f"client_column must be one of {sorted(features)}, got {client_column!r}")
    if columns is None:
        columns = [name for name in features if name != client_column]
    feature_of = column_choice(columns, list(features), "feature")
    wanted = set(feature_of.values()) | ({client_column} if client_column is not None else set())
    arrays = _read(dataset, {name: features[name] for name in features if name in wanted})
    table = {column: arrays[feature] for column, feature in feature_of.items()}
    if client_column is None:
        return table
    owners = arrays[client_column]
    if owners.ndim != 1 or owners.dtype.kind not in "UiuS":
        raise TypeError(
            f"client_column {client_column!r} must be text or integers, one of each example, got "
            f"{owners.dtype} {list(owners.shape)}"
        )
    natural_ids = owners if owners.dtype.kind == "S" else owners.astype(str)
    return FederatedData.from_arrays(table, client_of_row=natural_ids)


def is_hugging_face(source: Any) -> bool:
    """Whether an object is a data set of Hugging Face, without importing the package."""
    return hasattr(source, "features") and hasattr(source, "with_format")


def _loaded(source: Any, split: str | None, options: Mapping[str, Any]) -> Any:
    """The data set of a name; anything else unchanged."""
    if not isinstance(source, str):
        if options:
            raise ValueError(
                f"{min(options)} must be left out: only a name is loaded, and source is "
                f"{type(source).__name__}"
            )
        return source
    if split is None:
        raise ValueError(f"split must be given with the name of a data set, {source!r}")
    try:
        from datasets import load_dataset  # type: ignore[attr-defined]
    except ImportError:  # also where `datasets` is a mere folder, as in this project's checkout
        raise ImportError(f"reading {source!r} needs Hugging Face's datasets: {_INSTALL}") from None
    return load_dataset(source, split=split, **options)


def _split_of(source: Any, split: str | None) -> Any:
    if isinstance(source, Mapping):  # a DatasetDict is one
        if split not in source:
            raise ValueError(f"split must be one of {sorted(source)}, got {split!r}")
        return source[split]
    own = getattr(source, "split", None)
    if split is not None and split != own:
        or_own = "" if own is None else f", or be its own, {str(own)!r}"
        raise ValueError(f"split must be left out for a Dataset{or_own}, got {split!r}")
    return source


def _read(dataset: Any, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if len(dataset) == 0:
        raise ValueError("source has no examples")
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in features}
    # Without a format, values are Python objects and pictures PIL images, whatever was set before.
    plain = dataset.with_format(None).select_columns(list(features))
    for start, batch in enumerate(plain.iter(batch_size=_READ_AT_ONCE)):
        for name, feature in features.items():
            piece = _array(name, feature, batch[name], start * _READ_AT_ONCE)
            first = pieces[name][0] if pieces[name] else piece
            if piece.shape[1:] != first.shape[1:]:
                raise _of_another_shape(
                    name, start * _READ_AT_ONCE, piece.shape[1:], first.shape[1:]
                )
            pieces[name].append(piece)
    return {name: np.concatenate(arrays) for name, arrays in pieces.items()}


def _array(name: str, feature: Any, values: list[Any], start: int) -> np.ndarray:
    """The values of some examples, from number `start` on, as one array."""
    is_image = type(feature).__name__ == "Image"
    # A picture that is not decoded is a dictionary, in which only bytes or only a path may be missing.
    lacks = (lambda value: value is None) if is_image else _lacks
    missing = next((index for index, value in enumerate(values) if lacks(value)), None)
    if missing is not None:
        raise ValueError(f"feature {name!r} of example {start + missing} has no value")
    if is_image:
        images = [_image(name, image, start + index) for index, image in enumerate(values)]
        for index, image in enumerate(images):
            if image.shape != images[0].shape:
                raise _of_another_shape(name, start + index, image.shape, images[0].shape)
        return np.stack(images)
    dtype = _declared_dtype(name, feature)
    try:
        array = np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"feature {name!r} must have examples of one shape, in 0-based examples {start} to "
            f"{start + len(values) - 1}: {reason:.120}"
        ) from None
    check_fixed_width(f"feature {name!r}", array, values)
    if array.dtype.kind not in "biufSU":
        raise TypeError(
            f"feature {name!r} must be images, numbers or text, got {feature!r:.80}; choose features "
            "with columns=..."
        )
    return array


def _lacks(value: Any) -> bool:
    """Whether a value is missing, or one within a list or a dictionary."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return value is None
    # Lists of numbers may be long, and their first entry says whether there are lists within.
    holds_more = bool(value) and isinstance(value[0], list | tuple | Mapping)
    return None in value or (holds_more and any(map(_lacks, value)))


def _of_another_shape(
    name: str, example: int, shape: tuple[int, ...], first: tuple[int, ...]
) -> ValueError:
    return ValueError(
        f"feature {name!r} of example {example} has shape {list(shape)}, example 0 {list(first)}: "
        "resize or convert them first, with the data set's map()"
    )


def _image(name: str, image: Any, example: int) -> np.ndarray:
    if not is_picture(image):
        raise TypeError(
            f"feature {name!r} of example {example} must be a decoded image, got "
            f"{type(image).__name__}; cast_column(..., datasets.Image()) decodes them"
        )
    array = pixels(image)
    if array.dtype != np.uint8:
        raise TypeError(
            f"feature {name!r} of example {example} must be an image of 8 bits, got mode {image.mode!r}"
        )
    return array if array.ndim == 3 else array[..., np.newaxis]


def _declared_dtype(name: str, feature: Any) -> np.dtype:
    """NumPy's type of a feature: of a class label, a value, or a list or array of values."""
    inner = feature
    while isinstance(inner, list) or hasattr(inner, "feature"):
        inner = inner[0] if isinstance(inner, list) else inner.feature
    if type(inner).__name__ == "ClassLabel":
        return np.dtype(np.int32)
    declared = getattr(inner, "dtype", "none")  # of a dictionary of features
    named = {"string": "U", "large_string": "U", "binary": "S", "large_binary": "S"}
    try:
        return np.dtype(named.get(str(declared), declared))
    except TypeError:
        raise TypeError(
            f"feature {name!r} must be images, numbers or text, got {feature!r:.80}; choose features "
            "with columns=..."
        ) from None
