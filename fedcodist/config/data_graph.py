"""From a config's `data` to clients with labels of their own and public examples: MHD's data."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.classes import number_of_classes
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data_prepared import prepared_folder, prepared_images
from fedcodist.core.checks import check_integer, check_number
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import iid
from fedcodist.datasets.digits import load_digits
from fedcodist.datasets.primary_labels import (
    even_primary_labels,
    primary_label_skew,
    random_primary_labels,
)

ASSIGNMENTS: dict[str, Callable[..., np.ndarray]] = {
    "random": random_primary_labels,
    "even": even_primary_labels,
}
PRIMARY = ("digits_primary", "prepared_primary")
Columns = Mapping[str, np.ndarray]


class PrimaryData(NamedTuple):
    """Columns `image` and `label`.

    Attributes:
      private: the clients' examples.
      public: the public ones.
      test: the test set.
      held_out: other examples to watch training by; None where a data set has none.
      num_classes: labels of all splits, or what the data declare.
    """

    private: FederatedData
    public: FederatedData
    test: FederatedData
    held_out: FederatedData | None
    num_classes: int


def load_primary(settings: ConfigDict) -> PrimaryData:
    """Loads what `data.name`, one of PRIMARY, and its settings name.

    Of the training images in a random order the last ones, `public_share`, are public and the first ones
    private: all others, or `private_share` where the private set must not depend on the public one. With
    a public share of 1 all are public, so that private images are seen without their labels too.
    """
    read = _digits if settings.name == "digits_primary" else _prepared
    train, test, held_out = read(settings)
    assign = choice("data.assignment", settings.assignment, ASSIGNMENTS)
    count = len(train["label"])
    (order,) = iid(count, 1, settings.seed)
    private, public = _parts(settings, count)
    owned = {name: column[order[:private]] for name, column in train.items()}
    check_integer("data.num_clients", settings.num_clients, low=1, high=private)
    tables = {"train": _one(train, "train"), settings.get("tested", "test"): _one(test, "test")}
    if held_out is not None:
        tables["held_out"] = _one(held_out, "held_out")
    classes = number_of_classes(tables, settings.get("folder"))
    with named("data.labels_"):
        primary = assign(
            classes,
            settings.num_clients,
            settings.labels_per_client,
            settings.seed,
        )
    parts = primary_label_skew(owned["label"], primary, settings.skew, settings.seed)
    return PrimaryData(
        FederatedData.from_arrays(owned, partition=parts),
        _one({name: column[order[count - public :]] for name, column in train.items()}, "public"),
        _one(test, "test"),
        None if held_out is None else _one(held_out, "held_out"),
        classes,
    )


def _parts(settings: ConfigDict, count: int) -> tuple[int, int]:
    """How many of some training images are private, and how many public."""
    check_number("data.public_share", settings.public_share, above=0, high=1)
    public = round(settings.public_share * count)
    private = count - public
    if settings.private_share is not None:
        check_number("data.private_share", settings.private_share, above=0, high=1)
        private = round(settings.private_share * count)
    most = count if public == count else count - public
    if public < 1 or not 1 <= private <= most:
        raise ValueError(
            f"data.public_share and data.private_share must leave both parts some of {count} training "
            f"images, got {settings.public_share} and {settings.private_share}; they overlap only where "
            "the first is 1."
        )
    return private, public


def _digits(settings: ConfigDict) -> tuple[Columns, Columns, Columns | None]:
    """Digits for training, for tests, and those held out, if `held_out_share` asks for some."""
    check_number("data.test_share", settings.test_share, above=0, high=1)
    share = settings.get("held_out_share") or 0.0
    check_number("data.held_out_share", share, low=0, high=1)
    digits = load_digits()
    count = len(digits["label"])
    (order,) = iid(count, 1, settings.seed)
    tests = round(settings.test_share * count)
    check_integer("data.test_share: test images", min(tests, count - tests), low=1)
    apart = round((settings.test_share + share) * count)  # with what is held out
    if apart >= count:
        raise ValueError(
            "data.test_share and data.held_out_share must leave training images, got "
            f"{settings.test_share} and {share}."
        )
    train, test, held_out = (
        {name: column[np.sort(rows)] for name, column in digits.items()}
        for rows in (order[apart:], order[:tests], order[tests:apart])
    )
    return train, test, held_out if apart > tests else None


def _prepared(settings: ConfigDict) -> tuple[Columns, Columns, Columns | None]:
    splits = prepared_folder("data.folder", settings.folder)
    for setting, split in (("folder", "train"), ("tested", settings.tested)):
        if split not in splits:
            raise ValueError(
                f"data.{setting}: the folder {settings.folder} has no split {split!r}, only "
                f"{sorted(splits)}."
            )
    prepared_images(
        "data.folder", settings.folder, {n: splits[n] for n in ("train", settings.tested)}
    )
    train, test, held_out = (
        {name: splits[split].columns[name] for name in ("image", "label")}
        if split in splits
        else None
        for split in ("train", settings.tested, "held_out")
    )
    assert train is not None and test is not None
    return train, test, held_out


def _one(columns: Columns, name: str) -> FederatedData:
    offsets = [0, len(columns["label"])]
    return FederatedData.from_arrays(dict(columns), offsets=offsets, client_ids=[name])
