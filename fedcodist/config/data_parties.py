"""Loads the public examples that all parties have, and each party's private ones."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.data_prepared import prepared_folder
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_number
from fedcodist.data import augmentation
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.public_private import (
    PublicPrivate,
    check_joint_labels,
    cifar_public_private,
    digits_public_private,
    letters_public_private,
)


class Public(NamedTuple):
    """Examples that all parties, or all clients on a graph, have.

    Attributes:
      train: labelled public examples.
      test: labelled public examples for tests; for clients on a graph, the test set.
      preprocess: how public images are read, for example with their mean image subtracted.
      num_classes: of the joint label space.
      evaluation_preprocess: how they are read in evaluation; None: as in training.
    """

    train: FederatedData
    test: FederatedData
    preprocess: Preprocess
    num_classes: int
    evaluation_preprocess: Preprocess | None = None


class PartyData(NamedTuple):
    """Private, test, held-out (or None) and public examples, and how private images are read."""

    private: FederatedData
    test: FederatedData
    held_out: FederatedData | None
    preprocess: Preprocess
    public: Public


def load_public_private(settings: ConfigDict) -> PartyData:
    """Loads the data that `data.name`, one of PUBLIC_PRIVATE, and its settings describe."""
    data = PUBLIC_PRIVATE[settings.name](settings)
    check_joint_labels(data)
    public = Public(
        data.public, data.public_test, _centred(data.public_mean, data.scale), data.num_classes
    )
    preprocess = _centred(data.private_mean, data.scale)
    return PartyData(data.private, data.test, data.held_out, preprocess, public)


def _centred(mean: np.ndarray, scale: float) -> Preprocess:
    """Divides pixels by the scale and subtracts the mean image, as FedMD's code, without a deviation."""
    return augmentation.image_preprocess(augmentation.normalise(mean, (1.0,), scale))


def _digits(settings: ConfigDict) -> PublicPrivate:
    share = settings.get("held_out_share") or 0.0
    check_number("data.held_out_share", share, low=0, below=1)
    return digits_public_private(
        settings.num_parties, settings.per_class, seed=settings.seed, held_out_fraction=share
    )


def _cifar(settings: ConfigDict) -> PublicPrivate:
    return cifar_public_private(
        prepared_folder("data.public_folder", settings.public_folder),
        prepared_folder("data.folder", settings.folder),
        settings.iid,
        settings.num_parties,
        settings.get("per_class"),
        settings.paper_superclasses,
        settings.get("num_public"),
        settings.seed,
    )


def _letters(settings: ConfigDict) -> PublicPrivate:
    return letters_public_private(
        prepared_folder("data.public_folder", settings.public_folder),
        prepared_folder("data.folder", settings.folder),
        settings.iid,
        settings.num_parties,
        settings.per_class,
        settings.smallest,
        settings.seed,
    )


PUBLIC_PRIVATE: dict[str, Callable[[ConfigDict], PublicPrivate]] = {
    "digits_public_private": _digits,
    "cifar_public_private": _cifar,
    "letters_public_private": _letters,
}
