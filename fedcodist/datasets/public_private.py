"""Public and private examples with a joint label space: the data of FedMD and similar methods.

The classes of the public set come first, then those of the parties' private sets. All parties and the
common test set share this joint space, so one output layer covers both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedcodist.core.checks import (
    check_boolean,
    check_integer,
    check_not_masked,
    check_number,
    check_several,
    shown,
)
from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.digits import load_digits

# CIFAR-100's fine classes of the paper's iid experiment: apple, baby, chair, porcupine, sea, sunflower.
CIFAR_FINE = (0, 2, 20, 63, 71, 82)
# The coarse classes of its other experiment, as in the released code. (The paper names 0 to 5.)
CIFAR_COARSE = (0, 1, 7, 9, 12, 18)
CIFAR_COARSE_OF_PAPER = (0, 1, 2, 3, 4, 5)
FINE_PER_COARSE = 5
LETTERS = (0, 1, 2, 3, 4, 5)  # a to f, the private classes beside MNIST


class PublicPrivate(NamedTuple):
    """Columns `image` and `label` of each data set; labels are in the joint space.

    Attributes:
      public, public_test: one pseudo-client each.
      private: the parties.
      test: the common test set, with private classes only.
      num_public_classes: labels below this number are public, the others private.
      num_classes: of both.
      public_mean, private_mean: float32 [height, width, channel], the mean image of each data set's
        training images, divided by `scale`.
      scale: the largest value of a pixel.
      held_out: like `test`, with other examples, for evaluation during training; None without any.
    """

    public: FederatedData
    public_test: FederatedData
    private: FederatedData
    test: FederatedData
    num_public_classes: int
    num_classes: int
    public_mean: np.ndarray
    private_mean: np.ndarray
    scale: float
    held_out: FederatedData | None = None


def joint_labels(labels: np.ndarray, classes: Sequence[int], first: int) -> np.ndarray:
    """Labels in the joint space: classes[i] becomes first + i.

    Args:
      labels: int [examples].
      classes: different classes, in the order of their new labels.
      first: the new label of the first one.

    Returns:
      int32 [examples]; -1 for labels that are not among the classes, and for negative ones.

    Raises:
      ValueError: a class occurs twice or is negative.
    """
    check_not_masked("labels", labels)
    check_not_masked("classes", classes)
    wanted = np.asarray(classes)
    if wanted.size == 0 or wanted.min() < 0 or len(np.unique(wanted)) < wanted.size:
        raise ValueError(f"classes must be different and at least 0, got {list(classes)}.")
    table = np.full(max(int(wanted.max()), int(np.max(labels, initial=0))) + 1, -1, np.int32)
    table[wanted] = first + np.arange(wanted.size)
    labels = np.asarray(labels)
    return np.where(labels >= 0, table[labels], np.int32(-1))


def check_joint_labels(data: PublicPrivate) -> None:
    """Raises ValueError unless public and private labels are in their parts of the joint space.

    Parties with different public classes, or with private labels in the public part, would disagree on
    the meaning of an output.
    """
    first, end = data.num_public_classes, data.num_classes
    for name, split, low, high in (
        ("public", data.public, 0, first),
        ("public_test", data.public_test, 0, first),
        ("private", data.private, first, end),
        ("test", data.test, first, end),
        *([("held_out", data.held_out, first, end)] if data.held_out else []),
    ):
        for client, columns in split.clients():
            labels = columns["label"]
            wrong = labels[(labels < low) | (labels >= high)]
            if wrong.size:
                raise ValueError(
                    f"{name} labels must be {low} to {high - 1} of the joint label space, client "
                    f"{client!r} has {int(wrong[0])}."
                )


def digits_public_private(
    num_parties: int = 6,
    per_class: int = 3,
    public_classes: Sequence[int] = (0, 1, 2, 3, 4, 5),
    test_fraction: float = 0.3,
    seed: int = 0,
    held_out_fraction: float = 0.0,
) -> PublicPrivate:
    """scikit-learn's digits: some classes are public, the others the parties' private classes.

    Parties hold `per_class` images of each private class, no image twice. The other images of private
    classes are the common test set, except for a share of `held_out_fraction` for evaluation during
    training. `test_fraction` of the public images are for tests.

    Raises:
      ValueError, TypeError: classes that are no digits, shares that leave a data set without images, or
        fewer images than the parties need.
    """
    check_several("public_classes", public_classes)
    public_classes = list(public_classes)
    is_integer = [isinstance(digit, int | np.integer) for digit in public_classes]
    private_classes = [digit for digit in range(10) if digit not in public_classes]
    are_digits = all(is_integer) and set(public_classes) <= set(range(10))
    count = len(public_classes)
    if not are_digits or not private_classes or not 0 < count == len(set(public_classes)):
        raise ValueError(
            "public_classes must be integers, some digits and not all of them, none twice, got "
            f"{shown(public_classes)}."
        )
    check_number("test_fraction", test_fraction, above=0, below=1)
    check_number("held_out_fraction", held_out_fraction, low=0, below=1)
    check_integer("seed", seed, low=0)
    digits = load_digits()
    generator = np.random.default_rng(seed)
    first = len(public_classes)
    public = joint_labels(digits["label"], public_classes, 0)
    private = joint_labels(digits["label"], private_classes, first)
    public_examples = generator.permutation(np.flatnonzero(public >= 0))
    tests = round(test_fraction * len(public_examples))
    if not 0 < tests < len(public_examples):
        raise ValueError(
            f"test_fraction must leave images for tests and for training, got {test_fraction} of "
            f"{len(public_examples)} public images."
        )
    dealt = disjoint_parts(private, range(first, 10), num_parties, per_class, seed)
    left = np.setdiff1d(np.flatnonzero(private >= 0), np.concatenate(dealt))
    if not len(left):
        raise ValueError(
            "per_class must leave private images for the test set, got "
            f"{per_class} for each of {num_parties} parties."
        )
    watched = round(held_out_fraction * len(left))
    if watched == len(left) or (held_out_fraction and not watched):
        empty = "the test set" if watched else "the held-out set"
        raise ValueError(
            f"held_out_fraction must leave images for {empty}, got {held_out_fraction} of "
            f"{len(left)} private images."
        )
    left = generator.permutation(left) if watched else left
    held_out = None
    if watched:
        held_out = _pseudo_client(digits["image"], private, np.sort(left[:watched]), "held_out")
    scale = 16.0
    return PublicPrivate(
        public=_pseudo_client(digits["image"], public, np.sort(public_examples[tests:]), "public"),
        public_test=_pseudo_client(
            digits["image"], public, np.sort(public_examples[:tests]), "public_test"
        ),
        private=_dealt(digits["image"], private, dealt),
        test=_pseudo_client(digits["image"], private, np.sort(left[watched:]), "test"),
        num_public_classes=first,
        num_classes=10,
        public_mean=_mean_image(digits["image"][public_examples[tests:]], scale),
        # The training images of the private data are those of the parties.
        private_mean=_mean_image(digits["image"][np.concatenate(dealt)], scale),
        scale=scale,
        held_out=held_out,
    )


def cifar_public_private(
    cifar10: Mapping[str, FederatedData],
    cifar100: Mapping[str, FederatedData],
    iid: bool = False,
    num_parties: int = 10,
    per_class: int | None = None,
    paper_superclasses: bool = False,
    num_public: int | None = None,
    seed: int = 0,
) -> PublicPrivate:
    """CIFAR-10 is public, six classes of CIFAR-100 are private (section 4 of the paper).

    With `iid` the private classes are six fine classes, and parties share no image. Otherwise they are
    six superclasses; of each, party i has images of one fine class, at place i mod 5 of the sorted list.
    So every fifth party has the same fine class, and two parties may have the same image.

    Args:
      cifar10: splits 'train' and 'test' of a prepared folder.
      cifar100: the same, with column `coarse_label`.
      iid: which of the two experiments.
      num_parties: number of parties.
      per_class: images of each party and class; by default 3 with `iid` and 20 without.
      paper_superclasses: superclasses 0 to 5, which the paper names, in place of the released code's.
      num_public: number of public training images, drawn at random; all by default.
      seed: of the draws.

    Raises:
      ValueError, TypeError: a split or a column is missing, there are fewer images than the parties
        need, or a value that must be True or False is not.
    """
    check_boolean("iid", iid)
    check_boolean("paper_superclasses", paper_superclasses)
    _check_splits("cifar10", cifar10, {"image", "label"})
    _check_splits("cifar100", cifar100, {"image", "label", "coarse_label"})
    train, test = (cifar100[split].columns for split in ("train", "test"))
    if per_class is None:
        per_class = 3 if iid else 20
    if iid:
        column, classes = "label", CIFAR_FINE
    else:
        column = "coarse_label"
        classes = CIFAR_COARSE_OF_PAPER if paper_superclasses else CIFAR_COARSE
    first = 10
    labels, test_labels = (joint_labels(split[column], classes, first) for split in (train, test))
    joint = range(first, first + len(classes))
    if iid:
        dealt = disjoint_parts(labels, joint, num_parties, per_class, seed)
    else:
        dealt = fine_class_parts(labels, train["label"], joint, num_parties, per_class, seed)
    public = _some(cifar10["train"].keep(("image", "label")), num_public, seed)
    scale = 255.0
    return PublicPrivate(
        public=public,
        public_test=cifar10["test"].keep(("image", "label")),
        private=_dealt(train["image"], labels, dealt),
        test=_pseudo_client(test["image"], test_labels, np.flatnonzero(test_labels >= 0), "test"),
        num_public_classes=first,
        num_classes=first + len(classes),
        public_mean=_mean_image(public.columns["image"], scale),
        private_mean=_mean_image(train["image"], scale),
        scale=scale,
    )


def letters_public_private(
    mnist: Mapping[str, FederatedData],
    emnist: Mapping[str, FederatedData],
    iid: bool = False,
    num_parties: int = 10,
    per_class: int = 3,
    smallest: int = 18,
    seed: int = 0,
) -> PublicPrivate:
    """MNIST is public, EMNIST's letters a to f are private (section 4 of the paper).

    With `iid` parties have `per_class` images of each letter, and share none. Otherwise each party has
    all of these letters that one writer wrote.

    Args:
      mnist: splits 'train' and 'test' of a prepared folder.
      emnist: the same; a client of 'train' is a writer.
      iid: which of the two experiments.
      num_parties: number of parties.
      per_class: with `iid`, images of each party and letter.
      smallest: without `iid`, the number of images that a writer must have to be a party.
      seed: of the draws.

    Raises:
      ValueError, TypeError: a split or a column is missing, there are fewer images or writers than the
        parties need, or `iid` is not True or False.
    """
    check_boolean("iid", iid)
    _check_splits("mnist", mnist, {"image", "label"})
    _check_splits("emnist", emnist, {"image", "label"})
    first, train, test = 10, emnist["train"], emnist["test"].columns
    labels = joint_labels(train.columns["label"], LETTERS, first)
    test_labels = joint_labels(test["label"], LETTERS, first)
    joint = range(first, first + len(LETTERS))
    if iid:
        dealt = disjoint_parts(labels, joint, num_parties, per_class, seed)
    else:
        dealt = writers_parts(labels, train.offsets, num_parties, smallest, seed)
    scale = 255.0
    return PublicPrivate(
        public=mnist["train"].keep(("image", "label")),
        public_test=mnist["test"].keep(("image", "label")),
        private=_dealt(train.columns["image"], labels, dealt),
        test=_pseudo_client(test["image"], test_labels, np.flatnonzero(test_labels >= 0), "test"),
        num_public_classes=first,
        num_classes=first + len(LETTERS),
        public_mean=_mean_image(mnist["train"].columns["image"], scale),
        private_mean=_mean_image(train.columns["image"], scale),
        scale=scale,
    )


def disjoint_parts(
    labels: np.ndarray, classes: Sequence[int], num_parties: int, per_class: int, seed: int
) -> list[np.ndarray]:
    """Every party's examples, `per_class` of each class, drawn without replacement and disjoint.

    Raises:
      ValueError: a class has too few examples.
    """
    _check_parts(num_parties, per_class)
    check_integer("seed", seed, low=0)
    generator = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_parties)]
    for label in classes:
        available = _enough(labels == label, num_parties * per_class, f"class {label}")
        drawn = generator.choice(available, num_parties * per_class, replace=False)
        for party, examples in enumerate(np.split(drawn, num_parties)):
            parts[party].append(examples)
    return [np.concatenate(examples) for examples in parts]


def fine_class_parts(
    labels: np.ndarray,
    fine_labels: np.ndarray,
    classes: Sequence[int],
    num_parties: int,
    per_class: int,
    seed: int,
) -> list[np.ndarray]:
    """Every party's examples: `per_class` of each class, all of one fine class within it.

    Party i has the fine class at place i mod 5 of the class's sorted list. Each party draws without
    replacement, independently of the others.

    Raises:
      ValueError: a class does not have five fine classes, or one of these has too few examples.
    """
    _check_parts(num_parties, per_class)
    check_integer("seed", seed, low=0)
    fine = {label: np.unique(fine_labels[labels == label]) for label in classes}
    for label, fine_labels_of in fine.items():
        if len(fine_labels_of) != FINE_PER_COARSE:
            raise ValueError(
                f"class {label} must have {FINE_PER_COARSE} fine classes, it has {len(fine_labels_of)}."
            )
    parts = []
    for party in range(num_parties):
        generator = np.random.default_rng([seed, party])
        chosen = [fine[label][party % FINE_PER_COARSE] for label in classes]
        parts.append(
            np.concatenate(
                [
                    generator.choice(
                        _enough(fine_labels == fine_label, per_class, f"fine class {fine_label}"),
                        per_class,
                        replace=False,
                    )
                    for fine_label in chosen
                ]
            )
        )
    return parts


def writers_parts(
    labels: np.ndarray, offsets: np.ndarray, num_parties: int, smallest: int, seed: int
) -> list[np.ndarray]:
    """Every party's examples: all those of one writer that have a label (not -1).

    The examples of writer i are offsets[i] to offsets[i + 1]. Writers are drawn from those with enough
    examples.

    Raises:
      ValueError: there are too few such writers.
    """
    for name, value in (("num_parties", num_parties), ("smallest", smallest)):
        check_integer(name, value, low=1)
    check_integer("seed", seed, low=0)
    parts = [
        start + np.flatnonzero(labels[start:end] >= 0) for start, end in itertools.pairwise(offsets)
    ]
    enough = [examples for examples in parts if len(examples) >= smallest]
    if len(enough) < num_parties:
        raise ValueError(
            f"num_parties must be at most the {len(enough)} writers of {smallest} images or more, "
            f"got {num_parties}."
        )
    chosen = np.random.default_rng(seed).choice(len(enough), num_parties, replace=False)
    return [enough[writer] for writer in chosen]


def _check_splits(name: str, splits: Mapping[str, FederatedData], columns: set[str]) -> None:
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{name} must have a split {split!r}, it has {sorted(splits)}.")
        if missing := columns - set(splits[split].columns):
            raise ValueError(f"{name}'s split {split!r} has no column {min(missing)!r}.")


def _check_parts(num_parties: int, per_class: int) -> None:
    for name, value in (("num_parties", num_parties), ("per_class", per_class)):
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"{name} must be at least 1, got {value}: a private set is never empty."
            )
        check_integer(name, value, low=1, high=10_000)


def _enough(chosen: np.ndarray, needed: int, what: str) -> np.ndarray:
    examples = np.flatnonzero(chosen)
    if len(examples) < needed:
        raise ValueError(
            f"per_class must be smaller: parties need {needed} images of {what}, there are "
            f"{len(examples)}."
        )
    return examples


def _some(data: FederatedData, count: int | None, seed: int) -> FederatedData:
    """A number of random examples, in their order; all without a number."""
    total = data.num_examples
    if count is None:
        return data
    check_integer("num_public", count, low=1)
    check_integer("seed", seed, low=0)
    if count > total:
        raise ValueError(f"num_public must be at most the {total} public images, got {count}.")
    # Another random stream than those of the first ten parties, whose images are drawn with this seed.
    examples = np.sort(np.random.default_rng([seed, 10]).permutation(total)[:count])
    return _pseudo_client(data.columns["image"], data.columns["label"], examples, "public")


def _pseudo_client(
    images: np.ndarray, labels: np.ndarray, examples: np.ndarray, name: str
) -> FederatedData:
    columns = {"image": images[examples], "label": labels[examples]}
    return FederatedData.of_one_client(columns, name)


def _dealt(images: np.ndarray, labels: np.ndarray, parts: Sequence[np.ndarray]) -> FederatedData:
    # A partition would not give the same example to two parties.
    examples = np.concatenate(parts)
    columns = {"image": images[examples], "label": labels[examples]}
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *map(len, parts)]))


def _mean_image(images: np.ndarray, scale: float) -> np.ndarray:
    return np.asarray(np.mean(images, axis=0, dtype=np.float64) / scale, np.float32)
