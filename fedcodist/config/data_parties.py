"""From a config's `data` to a public set that everybody has and the parties' private ones."""

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
    """What everybody has.

    Attributes:
      train, test: labelled public examples; of clients on a graph `test` is everybody's.
      preprocess: how public images are read, such as less their own mean image.
      num_classes: of the joint label space.
    """

    train: FederatedData
    test: FederatedData
    preprocess: Preprocess
    num_classes: int


class PartyData(NamedTuple):
    """Private examples, the common test set, others held out (or None), and how images are read."""

    private: FederatedData
    test: FederatedData
    held_out: FederatedData | None
    preprocess: Preprocess
    public: Public


def load_public_private(settings: ConfigDict) -> PartyData:
    """Loads what `data.name`, one of PUBLIC_PRIVATE, and its settings name."""
    data = PUBLIC_PRIVATE[settings.name](settings)
    check_joint_labels(data)
    public = Public(
        data.public, data.public_test, _less(data.public_mean, data.scale), data.num_classes
    )
    preprocess = _less(data.private_mean, data.scale)
    return PartyData(data.private, data.test, data.held_out, preprocess, public)


def _less(mean: np.ndarray, scale: float) -> Preprocess:
    """Pixels divided by the scale, less the mean image; no division by a deviation (FedMD's code)."""
    return augmentation.image_preprocess(augmentation.normalise(mean, (1.0,), scale))


def _digits(settings: ConfigDict) -> PublicPrivate:
    share = settings.get("held_out_share") or 0.0
    check_number("data.held_out_share", share, low=0, high=1)
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
