"""Loads data for clients on a graph, as in MHD: clients with primary labels, and public examples."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.classes import number_of_classes
from fedcodist.config.config_errors import choice, named
from fedcodist.config.data_prepared import check_columns, prepared_folder, prepared_images
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
      held_out: examples for evaluation during training; None where a data set has none.
      num_classes: declared by the data, or else one more than the largest label of all splits.
    """

    private: FederatedData
    public: FederatedData
    test: FederatedData
    held_out: FederatedData | None
    num_classes: int


def load_primary(settings: ConfigDict) -> PrimaryData:
    """Loads the data that `data.name`, one of PRIMARY, and its settings describe.

    The training images are put into a random order. The last ones, a share of `public_share`, are
    public. The first ones are private: all others, or a share of `private_share`, so that the private
    images do not depend on the number of public ones. With a public share of 1 all images are public:
    the private images are then public too, without their labels.
    """
    read = _digits if settings.name == "digits_primary" else _prepared
    train, test, held_out = read(settings)
    assign = choice("data.assignment", settings.assignment, ASSIGNMENTS)
    count = len(train["label"])
    (order,) = iid(count, 1, settings.seed)
    num_private, num_public = _parts(settings, count)
    private = {name: column[order[:num_private]] for name, column in train.items()}
    public = {name: column[order[count - num_public :]] for name, column in train.items()}
    check_integer("data.num_clients", settings.num_clients, low=1, high=num_private)
    test_data = FederatedData.of_one_client(test, "test")
    held_out_data = None if held_out is None else FederatedData.of_one_client(held_out, "held_out")
    splits = {
        "train": FederatedData.of_one_client(train, "train"),
        settings.get("tested", "test"): test_data,
    }
    if held_out_data is not None:
        splits["held_out"] = held_out_data
    classes = number_of_classes(splits, settings.get("folder"))
    with named("data.labels_"):
        primary = assign(
            classes,
            settings.num_clients,
            settings.labels_per_client,
            settings.seed,
        )
    parts = primary_label_skew(private["label"], primary, settings.skew, settings.seed)
    return PrimaryData(
        FederatedData.from_arrays(private, partition=parts),
        FederatedData.of_one_client(public, "public"),
        test_data,
        held_out_data,
        classes,
    )


def _parts(settings: ConfigDict, count: int) -> tuple[int, int]:
    """How many of `count` training images are private, and how many are public."""
    check_number("data.public_share", settings.public_share, above=0, high=1)
    public = round(settings.public_share * count)
    private = count - public
    if settings.private_share is not None:
        check_number("data.private_share", settings.private_share, above=0, high=1)
        private = round(settings.private_share * count)
    most = count if settings.public_share == 1 else count - public
    if public < 1 or not 1 <= private <= most:
        raise ValueError(
            f"data.public_share and data.private_share must leave both parts some of {count} training "
            f"images, got {settings.public_share} and {settings.private_share}; they overlap only where "
            "the first is 1."
        )
    return private, public


def _digits(settings: ConfigDict) -> tuple[Columns, Columns, Columns | None]:
    """Digits for training and for tests, and held-out ones if `held_out_share` is above 0."""
    check_number("data.test_share", settings.test_share, above=0, high=1)
    share = settings.get("held_out_share") or 0.0
    check_number("data.held_out_share", share, low=0, high=1)
    digits = load_digits()
    count = len(digits["label"])
    (order,) = iid(count, 1, settings.seed)
    num_tests = round(settings.test_share * count)
    check_integer("data.test_share: test images", min(num_tests, count - num_tests), low=1)
    first_train = round((settings.test_share + share) * count)  # after tests and held-out images
    if first_train >= count:
        raise ValueError(
            "data.test_share and data.held_out_share must leave training images, got "
            f"{settings.test_share} and {share}."
        )
    if share and first_train == num_tests:
        raise ValueError(
            f"data.held_out_share must be 0 or leave held-out images, got {share} of {count} images."
        )
    train, test, held_out = (
        {name: column[np.sort(indices)] for name, column in digits.items()}
        for indices in (order[first_train:], order[:num_tests], order[num_tests:first_train])
    )
    return train, test, held_out if first_train > num_tests else None


def _prepared(settings: ConfigDict) -> tuple[Columns, Columns, Columns | None]:
    splits = prepared_folder("data.folder", settings.folder)
    for setting, split in (("folder", "train"), ("tested", settings.tested)):
        if split not in splits:
            raise ValueError(
                f"data.{setting}: the folder {settings.folder} has no split {split!r}, only "
                f"{sorted(splits)}."
            )
    used = {name: splits[name] for name in ("train", settings.tested, "held_out") if name in splits}
    prepared_images("data.folder", settings.folder, used)
    check_columns("data.folder", settings.folder, used, ("label",))
    train, test, held_out = (
        {name: splits[split].columns[name] for name in ("image", "label")}
        if split in splits
        else None
        for split in ("train", settings.tested, "held_out")
    )
    assert train is not None and test is not None
    return train, test, held_out
