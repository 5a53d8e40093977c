"""Columns from the random-access sources of TensorFlow Datasets, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcodist.core.checks import check_not_masked
from fedcodist.core.extras import check_installed
from fedcodist.data.column_choice import column_choice
from fedcodist.data.columns import check_fixed_width


def from_tfds(
    source: Any,
    split: str | None = None,
    columns: Iterable[str] | Mapping[str, str] | None = None,
    data_dir: str | None = None,
) -> dict[str, np.ndarray]:
    """Reads one split into columns, `{name: array [examples, ...]}`, for a partitioner to deal out.

    Columns have the dtypes that the features of the data source declare, else those of the first
    example.

    Args:
      source: the name of a TFDS data set ("cifar100"), which is downloaded and prepared if necessary. Or
        a data source that `tfds.data_source` returned, or another sequence of dicts (then without
        `split`). Or a mapping from split to such a sequence.
      split: the split to read.
      columns: the features to read, or a mapping from column to feature; all features by default.
      data_dir: TFDS's folder. A data set that is not prepared there yet is prepared as ArrayRecord
        files, which can be read in any order.

    Raises:
      ImportError: TFDS is missing; says what to install.
      ValueError, TypeError: an unknown split or feature, no example, or an example unlike the first.
    """
    if isinstance(source, str):
        if split is None:
            raise ValueError(f"split must be given with the name of a data set, {source!r}")
        examples = _named_source(source, split, data_dir)
    elif isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"split must be one of {sorted(source)}, got {split!r}")
        examples = source[split]
    else:
        if split is not None:
            raise ValueError(
                f"split must be left out for a data source of a single split, got {split!r}"
            )
        examples = source
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__"):
        raise TypeError(
            "source must be a name, a data source or a sequence of dicts, "
            f"got {type(examples).__name__}"
        )
    return _read_columns(examples, columns)


def _named_source(name: str, split: str, data_dir: str | None) -> Any:
    check_installed(f"reading {name!r}", "tensorflow_datasets", "tfds")
    import tensorflow_datasets as tfds

    asked = {}
    if data_dir is not None and not tfds.builder(name, data_dir=data_dir).is_prepared():
        # By default TFDS prepares TFRecord files in a given folder, and cannot make a data source of
        # them.
        asked = {"builder_kwargs": {"file_format": "array_record"}}
    try:
        return tfds.data_source(name, split=split, data_dir=data_dir, **asked)
    except NotImplementedError:
        raise ValueError(
            f"data_dir {data_dir} holds {name!r} in files that cannot be read in any order; choose "
            "another one, where it is prepared anew"
        ) from None


def _read_columns(
    examples: Sequence[Mapping[str, Any]], columns: Iterable[str] | Mapping[str, str] | None
) -> dict[str, np.ndarray]:
    num_examples = len(examples)
    if num_examples == 0:
        raise ValueError("source has no examples")
    first = examples[0]
    if not isinstance(first, Mapping):
        raise TypeError(f"source must hold dicts of features, got {type(first).__name__}")
    feature_of = column_choice(columns, list(first), "feature")

    filled: dict[str, Any] = {}
    dtypes = {feature: _declared_dtype(examples, feature) for feature in feature_of.values()}
    for name, feature in feature_of.items():
        value = _as_array(first[feature], name, dtypes[feature])
        # Text varies in width, so its array is made at the end; the rest is filled in place.
        filled[name] = (
            [] if value.dtype.kind in "SU" else np.empty((num_examples, *value.shape), value.dtype)
        )
    shapes = {name: np.shape(first[feature]) for name, feature in feature_of.items()}
    for index in range(num_examples):
        example = first if index == 0 else examples[index]
        if columns is None and (others := set(example) - set(first)):
            raise ValueError(
                f"example {index} has feature {min(others)!r}, which example 0 lacks; choose features "
                "with columns=..."
            )
        for name, feature in feature_of.items():
            if feature not in example:
                raise ValueError(f"example {index} has no feature {feature!r}")
            value = _as_array(example[feature], name, dtypes[feature])
            target = filled[name]
            is_text = isinstance(target, list)
            if value.shape != shapes[name] or is_text != (value.dtype.kind in "SU"):
                raise ValueError(
                    f"feature {feature!r} of example {index} is {value.dtype} {list(value.shape)}, "
                    f"unlike {list(shapes[name])} of example 0; leave it out with columns=..."
                )
            if is_text:
                target.append(value)
            elif value.dtype != target.dtype:
                raise ValueError(
                    f"feature {feature!r} of example {index} is {value.dtype}, "
                    f"but {target.dtype} in example 0"
                )
            else:
                target[index] = value
    return {
        name: np.stack(column) if isinstance(column, list) else column
        for name, column in filled.items()
    }


def _declared_dtype(examples: Any, feature: str) -> np.dtype | None:
    """The dtype that the data source declares for a feature of numbers; None without a declaration.

    Examples hold Python numbers, which do not show whether they were float32 or uint8.
    """
    features = getattr(getattr(examples, "dataset_info", None), "features", None)
    if features is None or feature not in features:
        return None
    declared = getattr(features[feature], "np_dtype", None)
    try:
        dtype = np.dtype(declared) if declared is not None else None
    except TypeError:  # nested features have a dtype each
        return None
    return dtype if dtype is not None and dtype.kind in "biuf" else None


def _as_array(value: Any, name: str, dtype: np.dtype | None = None) -> np.ndarray:
    check_not_masked(f"feature {name!r}", value)
    try:
        array = np.asarray(value, dtype)
    except ValueError:  # rows of different lengths
        array = np.asarray(value, object)
    if array.dtype.kind == "O" and all(isinstance(item, bytes) for item in array.flat):
        array = array.astype(np.bytes_)
    check_fixed_width(f"feature {name!r}", array, value)
    if array.dtype.kind not in "biufSU":
        raise TypeError(
            f"feature {name!r} is not an array of numbers or text but "
            f"{type(value).__name__}; choose features with columns=..."
        )
    return array
