"""The number of classes in a config's data, which is the least number of outputs of its networks."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcodist.data.column_values import least_and_largest
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import manifest

# The `source` in a manifest by `fedcodist prepare` -> number of classes of `label`, including those
# without examples.
SOURCES = {
    "CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html": 10,
    "CIFAR-100, https://www.cs.toronto.edu/~kriz/cifar.html": 100,
    "The MNIST database of handwritten digits, Y. LeCun, C. Cortes, C. Burges": 10,
    "EMNIST, https://www.nist.gov/itl/products-and-services/emnist-dataset": 26,
    "Downsampled ImageNet 32x32, https://image-net.org/download-images": 1000,
    "ADE-Corpus-V2, H. Gurulingappa et al., 2012": 2,
}


def number_of_classes(
    splits: Mapping[str, FederatedData], folder: str | None = None, declared: int | None = None
) -> int:
    """Returns the number that the data declare, or else one more than the largest label of all splits.

    A network needs an output for every class, also for a class of which no client has an example.
    Labels [examples, classes] that are floats, or all 0 or 1 (one-hot, several labels per example), have
    an entry per class. Other labels with several entries per example are classes, such as tags of words.

    Args:
      splits: name -> data; splits without a column `label` are left out.
      folder: the splits' prepared folder. Its manifest may declare the number of classes, by
        `num_classes` among its arguments or by a source of SOURCES.
      declared: the number of classes where it is known beforehand.

    Raises:
      ValueError: names the split and its labels if they are negative, larger than declared, or no whole
        numbers.
    """
    if folder is not None:
        declared = _of_manifest(folder)
    return classes_of_labels(labels_of(splits), declared)


def labels_of(splits: Mapping[str, FederatedData]) -> dict[str, Any]:
    """Name -> labels of the splits that have some."""
    return {name: data.columns["label"] for name, data in splits.items() if "label" in data.columns}


def classes_of_labels(labels: Mapping[str, Any], declared: int | None = None) -> int:
    """As `number_of_classes`, of name -> labels."""
    most, smallest = 0, 0
    for name, least, largest in _label_ranges(labels):
        if least < 0 or (declared is not None and largest >= declared):
            allowed = (
                "0 or more" if declared is None else f"0 to {declared - 1}, as the data declare"
            )
            raise ValueError(
                f"column 'label' of split {name!r} must have labels {allowed}, got {least} to {largest}."
            )
        smallest = min(least, smallest) if most else least
        most = max(most, largest + 1)
    if declared is None and smallest > 0:
        warnings.warn(
            f"labels are {smallest} to {most - 1}, so networks have {most} outputs, of which the first "
            f"{smallest} are of no class: labels count from 0.",
            stacklevel=2,
        )
    return most if declared is None else declared


def _label_ranges(labels_by_split: Mapping[str, Any]) -> Iterable[tuple[str, int, int]]:
    given = {name: labels for name, labels in labels_by_split.items() if len(labels)}
    # All splits have labels of one form: in one of them, all tags of a sequence may be 0 or 1.
    have_vectors = all(_may_be_vectors(labels) for labels in given.values() if _is_table(labels))
    for name, labels in given.items():
        if _is_table(labels) and have_vectors:
            yield name, 0, labels.shape[1] - 1
            continue
        if np.dtype(labels.dtype).kind not in "biu":
            raise ValueError(
                f"column 'label' of split {name!r} must be whole numbers, got {labels.dtype}."
            )
        limits = least_and_largest(labels)
        if limits is not None:
            yield name, *limits


def _is_table(labels: Any) -> bool:
    return labels.ndim == 2 and labels.shape[1] > 1


def _may_be_vectors(labels: Any) -> bool:
    """Whether [examples, entries] may have an entry per class: one-hot, several labels, soft labels."""
    if np.dtype(labels.dtype).kind not in "biu":
        return True
    limits = least_and_largest(labels)
    return limits is None or 0 <= limits[0] <= limits[1] <= 1


def _of_manifest(folder: str) -> int | None:
    content = manifest(folder)
    declared = content["arguments"].get("num_classes")
    if declared is not None:
        if not isinstance(declared, int) or isinstance(declared, bool) or declared < 1:
            raise ValueError(
                f"num_classes of {folder}'s manifest must be an integer of at least 1, got {declared!r}."
            )
        return declared
    return SOURCES.get(content["source"])
