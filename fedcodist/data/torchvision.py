"""Images and labels from data sets in torchvision's style, without PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcodist.core.checks import check_not_masked
from fedcodist.data.pictures import is_picture, pixels

_CHANNELS = (1, 3, 4)


def from_torchvision(dataset: Any) -> dict[str, np.ndarray]:
    """Reads a data set of images as columns `image` and `label`, for a partitioner to deal out.

        columns = fc.from_torchvision(torchvision.datasets.CIFAR10("data", download=True))

    Args:
      dataset: has `data` and `targets` (or `labels`), arrays or tensors, as CIFAR10, MNIST and SVHN do;
        its transform is not applied. Or a sequence of pairs (image, label), as ImageFolder is, with
        images of one size after its transform. Pictures of PIL become their colours: those of a palette,
        of inks (CMYK) or YCbCr are RGB, and pixels of one bit are 0 and 255.

    Returns:
      `image` `[examples, height, width, channels]` of the data set's dtype, mostly uint8, and `label`
      int32 `[examples]`. Images with channels first are transposed. Where the first axis and the last
      could both be channels, the last one is taken for them.

    Raises:
      TypeError, ValueError: an object that is neither, or whose images or labels are not of that form;
        names the example.
    """
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if hasattr(dataset, "data") and labels is not None:
        images = _array("data", dataset.data)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        images, labels = _of_pairs(dataset)
    else:
        raise TypeError(
            "dataset must have data and targets (or labels), or be a sequence of pairs (image, label), "
            f"got {type(dataset).__name__}"
        )
    labels = _array("targets", labels)
    if images.ndim not in (3, 4) or images.dtype.kind not in "biuf":
        raise ValueError(
            "data must be images [examples, height, width(, channels)], got "
            f"{images.dtype} {list(images.shape)}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(
            f"targets must be an integer for each of {len(images)} images, got {labels.dtype} "
            f"{list(labels.shape)}"
        )
    whole = labels.astype(np.int32)
    if not np.array_equal(whole, labels):
        raise ValueError(
            f"targets must be integers of 32 bits, got {labels.min()} to {labels.max()}"
        )
    if images.ndim == 3:
        images = images[..., np.newaxis]
    elif images.shape[-1] not in _CHANNELS and images.shape[1] in _CHANNELS:
        images = images.transpose(0, 2, 3, 1)
    return {"image": np.ascontiguousarray(images), "label": whole}


def _of_pairs(dataset: Any) -> tuple[np.ndarray, list[Any]]:
    if len(dataset) == 0:
        raise ValueError("dataset has no examples")
    images: list[np.ndarray] = []
    labels: list[Any] = []
    for index in range(len(dataset)):
        example = dataset[index]
        try:
            image, label = example
        except (TypeError, ValueError):
            raise TypeError(
                f"dataset must hold pairs (image, label), example {index} is none"
            ) from None
        array = _array(f"image {index}", image)
        if images and array.shape != images[0].shape:
            raise ValueError(
                f"image {index} has shape {list(array.shape)}, the first {list(images[0].shape)}: "
                "resize or crop them in the data set's transform"
            )
        images.append(array)
        labels.append(label)
    return np.stack(images), labels


def _array(name: str, value: Any) -> np.ndarray:
    """An array, a tensor (which must not be on an accelerator), a PIL image or a list."""
    if is_picture(value):
        return pixels(value)
    check_not_masked(name, value)
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
