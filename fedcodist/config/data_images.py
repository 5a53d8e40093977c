"""Loads images, the digits or those of a prepared folder, and the unlabelled images of the server."""

import warnings
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.classes import number_of_classes
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data_partition import (
    check_no_all_splits,
    check_no_validation,
    merged,
    repartitioned,
)
from fedcodist.config.data_prepared import prepared_folder, prepared_images
from fedcodist.config.normalisation import normalisation
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_integer
from fedcodist.data import augmentation
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.digits import load_digits_federated

_LARGEST_PIXEL, _LARGEST_DIGIT_PIXEL = 255.0, 16.0
DIGITS_SCALE = augmentation.image_preprocess(
    augmentation.normalise((0.3,), (0.37,), scale=_LARGEST_DIGIT_PIXEL)
)
_DIGITS_CLASSES = 10


class ImageData(NamedTuple):
    """Images of clients and of the server; the fields are those of `fedcodist.config.data.Data`."""

    splits: dict[str, FederatedData]
    unlabelled: np.ndarray
    unlabelled_labels: np.ndarray | None
    preprocess: Preprocess
    evaluation_preprocess: Preprocess
    num_classes: int


def load_digit_images(settings: ConfigDict) -> ImageData:
    """Loads the digits."""
    partition = settings.get("partition")
    check_no_all_splits(settings)
    splits = load_digits_federated(
        # A single client has all examples in the data set's order, to be dealt anew.
        num_clients=1 if partition else settings.num_clients,
        concentration=1.0 if partition else settings.concentration,
        seed=settings.seed,
        labelled=True,
    )
    if partition:
        splits |= repartitioned(splits["train"], partition, settings.seed, _LARGEST_DIGIT_PIXEL)
    server = splits.pop("distillation").columns
    return ImageData(
        splits, server["image"], server["label"], DIGITS_SCALE, DIGITS_SCALE, _DIGITS_CLASSES
    )


def load_prepared_images(settings: ConfigDict) -> ImageData:
    """Loads the images of the prepared folder `data.folder`."""
    splits = prepared_folder("data.folder", settings.folder)
    partition = settings.get("partition")
    if "train" not in splits:
        raise ValueError(f"data.folder {settings.folder} has no split 'train'.")
    with named(f"data.folder {settings.folder}: "):
        classes = number_of_classes(splits, settings.folder)
    if partition and partition.get("all_splits"):
        splits = {"train": merged(splits)}
    if partition:
        check_no_validation(settings, splits)
        seed = settings.get("seed", 0)
        splits |= repartitioned(splits["train"], partition, seed, _LARGEST_PIXEL)
    image_shape = prepared_images("data.folder", settings.folder, splits)
    unlabelled, labels = _unlabelled(settings, splits.pop("distillation", None), image_shape)
    preprocess, evaluation_preprocess = image_preprocess(settings, image_shape)
    return ImageData(splits, unlabelled, labels, preprocess, evaluation_preprocess, classes)


def image_preprocess(
    settings: ConfigDict, image_shape: tuple[int, ...]
) -> tuple[Preprocess, Preprocess]:
    """(preprocessing of training, of evaluation).

    Training takes random crops of the padded image and flips them; evaluation takes the central crop.
    Without augmentation training reads images as evaluation does. Without `data.crop` images are used
    whole. A `data.preprocess` replaces both.
    """
    if settings.get("preprocess") is not None:
        _warn_of_unread(settings)
        return augmentation.image_preprocess(), augmentation.image_preprocess()
    size, padding, image_size = settings.get("crop"), settings.get("padding", 0), image_shape[:2]
    check_integer("data.padding", padding, low=0)
    if size is not None:
        check_integer("data.crop", size, low=1)
    elif padding:
        raise ValueError(f"data.crop must be set for data.padding={padding}.")
    if size is not None and size > min(image_size):
        raise ValueError(f"data.crop must be at most the images' {min(image_size)}, got {size}.")
    draw = choice(
        "data.augmentation",
        settings.get("augmentation", "none"),
        {
            "per_image": lambda transform: transform,
            "per_batch": augmentation.per_batch,
            "none": None,
        },
    )
    if draw is None and padding:
        raise ValueError(
            f"data.padding must be 0 with data.augmentation='none', whose crops are central, got "
            f"{padding}."
        )
    colours = augmentation.normalise(*normalisation(settings, image_shape))
    crops: tuple[Any, ...] = (augmentation.centre_crop(size, size),) if size is not None else ()
    plain = augmentation.image_preprocess(*crops, colours)
    if draw is None:
        return plain, plain
    if size is not None:
        crops = (augmentation.pad(padding), draw(augmentation.random_crop(size, size)))
    train = augmentation.image_preprocess(
        *crops,
        draw(augmentation.random_horizontal_flip),
        colours,
    )
    return train, plain


def _warn_of_unread(settings: ConfigDict) -> None:
    off = {"crop": None, "padding": 0, "augmentation": "none", "mean": None, "deviation": None}
    if unread := [f"data.{n}" for n, o in off.items() if settings.get(n) not in (None, o)]:
        warnings.warn(
            f"{', '.join(unread)} not read: data.preprocess replaces the library's own preprocessing.",
            stacklevel=2,
        )


def _unlabelled(
    settings: ConfigDict, in_domain: FederatedData | None, image_shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The images of the split 'distillation', or of another prepared folder's split 'train'.

    Their labels are included, except those of another folder, whose classes may be different.
    """
    data, folder = in_domain, settings.get("unlabelled_folder")
    if folder is not None:
        splits = prepared_folder("data.unlabelled_folder", folder)
        if "train" not in splits:
            raise ValueError(f"data.unlabelled_folder {folder} has no split 'train'.")
        data = splits["train"]
        shape = prepared_images("data.unlabelled_folder", folder, {"train": data})
        if shape[-1] != image_shape[-1]:
            raise ValueError(
                f"data.unlabelled_folder {folder} must have images of "
                f"{image_shape[-1]} channels, as data.folder has, got {list(shape)}."
            )
        crop = settings.get("crop")
        if crop is None and shape != image_shape:
            raise ValueError(
                f"data.crop must be set where the images of data.unlabelled_folder {folder} have "
                f"another size than those of data.folder: {list(shape)} and {list(image_shape)}."
            )
        if crop is not None and crop > min(shape[:2]):
            raise ValueError(
                f"data.crop must be at most the {min(shape[:2])} of the images of "
                f"data.unlabelled_folder {folder}, got {crop}."
            )
    count = settings.get("num_unlabelled")
    if data is None:  # only methods that distil on the server read these images
        if count is not None:
            raise ValueError(
                f"data.num_unlabelled must be None without unlabelled images, got {count}: "
                f"data.unlabelled_folder is None, and data.folder {settings.folder} has no split "
                "'distillation' or data.partition.all_splits deals it to clients."
            )
        return np.zeros((0, *image_shape), np.uint8), None
    count = data.num_examples if count is None else count
    check_integer("data.num_unlabelled", count, low=1)
    if count > data.num_examples:
        raise ValueError(
            f"data.num_unlabelled must be at most the {data.num_examples} unlabelled images, "
            f"got {count}."
        )
    # Prefixes of one order: a smaller set lies inside every larger one.
    order = np.random.default_rng(settings.get("seed", 0)).permutation(data.num_examples)
    chosen = np.sort(order[:count])
    labels = data.columns.get("label") if folder is None else None
    return data.columns["image"][chosen], None if labels is None else labels[chosen]
