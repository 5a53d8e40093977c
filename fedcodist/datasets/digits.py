"""scikit-learn's handwritten digits: 1,797 real images that are part of the installed package."""

from __future__ import annotations

import functools

import numpy as np

from fedcodist.core.checks import check_boolean, check_number
from fedcodist.core.extras import check_installed
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import dirichlet, iid


def load_digits() -> dict[str, np.ndarray]:
    """All digits as columns: `image` uint8 `[1797, 8, 8, 1]` of 0..16, `label` int32 `[1797]`.

    Raises:
      ImportError: scikit-learn is missing; says how to install it.
    """
    check_installed("the digits data set", "sklearn", "digits")
    images, labels = _images_and_labels()
    return {
        "image": images.astype(np.uint8)[..., np.newaxis],
        "label": labels.astype(np.int32),
    }


def load_digits_federated(
    num_clients: int = 30,
    concentration: float = 0.5,
    distillation_fraction: float = 0.2,
    held_out_fraction: float = 0.1,
    test_fraction: float = 0.2,
    seed: int = 0,
    labelled: bool = False,
) -> dict[str, FederatedData]:
    """Digits for codistillation, as four disjoint splits that together hold every image.

    `train` has `num_clients` clients, with Dirichlet(`concentration`) over labels. `distillation` has
    images without labels, or with them where `labelled`. `held_out` is for tuning; the last is `test`.
    These three have one pseudo-client each. The same seed gives the same splits.

    Raises:
      ValueError, TypeError: a fraction outside (0, 1), fractions that leave fewer training images than
        clients, concentration <= 0, or a `labelled` that is not True or False.
      ImportError: scikit-learn is missing.
    """
    check_boolean("labelled", labelled)
    fractions = {
        "distillation": distillation_fraction,
        "held_out": held_out_fraction,
        "test": test_fraction,
    }
    for name, fraction in fractions.items():
        check_number(f"{name}_fraction", fraction, above=0, below=1)
    if sum(fractions.values()) >= 1:
        raise ValueError(f"fractions must sum to less than 1 to leave training data: {fractions}")
    columns = load_digits()
    num_images = len(columns["label"])
    (order,) = iid(num_images, 1, seed)  # all examples, shuffled
    splits = {}
    for name, fraction in fractions.items():
        count = round(fraction * num_images)
        if count < 1:
            raise ValueError(f"{name}_fraction {fraction} of {num_images} images is empty")
        examples, order = np.sort(order[:count]), order[count:]
        table = {key: column[examples] for key, column in columns.items()}
        splits[name] = FederatedData.of_one_client(table, name)
    examples = np.sort(order)
    table = {key: column[examples] for key, column in columns.items()}
    partition = dirichlet(table["label"], num_clients, concentration, seed)
    train = FederatedData.from_arrays(table, partition=partition)
    server = splits["distillation"]
    return {
        "train": train,
        "distillation": server if labelled else server.drop("label"),
        "held_out": splits["held_out"],
        "test": splits["test"],
    }


@functools.cache  # a text file, which takes longer to read than most uses of it
def _images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images, digits.target
