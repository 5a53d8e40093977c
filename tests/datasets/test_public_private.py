"""Public and private sets: sizes, the joint label space, and who has which images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcodist.data.federated_data import FederatedData
from fedcodist.datasets.public_private import (
    CIFAR_COARSE,
    CIFAR_FINE,
    check_joint_labels,
    cifar_public_private,
    digits_public_private,
    joint_labels,
    letters_public_private,
)

SIDE = 2


def cifar(per_fine=40):
    """Prepared folders with images whose pixels hold (index, fine class)."""
    generator = np.random.default_rng(0)

    def split(count, classes, name):
        fine = generator.permutation(np.repeat(np.arange(classes), count)).astype(np.int32)
        image = np.zeros((len(fine), SIDE, SIDE, 3), np.uint8)
        image[:, 0, 0, 0] = fine
        image[:, 0, 0, 1:] = np.stack([np.arange(len(fine)) % 256, np.arange(len(fine)) // 256], 1)
        columns = {"image": image, "label": fine}
        if classes == 100:
            columns["coarse_label"] = (fine * 7 % 20).astype(np.int32)
        return FederatedData.from_arrays(columns, offsets=[0, len(fine)], client_ids=[name])

    return (
        {"train": split(50, 10, "train"), "test": split(5, 10, "test")},
        {"train": split(per_fine, 100, "train"), "test": split(10, 100, "test")},
    )


def test_iid_parties_have_18_images_each_and_share_none():
    data = cifar_public_private(*cifar(), iid=True)
    check_joint_labels(data)
    assert data.private.client_sizes.tolist() == [18] * 10
    assert len(np.unique(data.private.columns["image"].reshape(180, -1), axis=0)) == 180
    for _, columns in data.private.clients():
        assert np.bincount(columns["label"]).tolist() == [0] * 10 + [3] * 6
        np.testing.assert_array_equal(
            columns["image"][:, 0, 0, 0], np.array(CIFAR_FINE)[columns["label"] - 10]
        )
    assert data.num_classes == 16
    assert data.test.num_examples == 6 * 10
    assert sorted(set(data.test.columns["label"].tolist())) == list(range(10, 16))


@pytest.mark.parametrize("paper", [False, True])
def test_non_iid_parties_have_one_fine_class_of_each_superclass(paper):
    data = cifar_public_private(*cifar(), paper_superclasses=paper, seed=3)
    check_joint_labels(data)
    assert data.private.client_sizes.tolist() == [120] * 10
    superclasses = range(6) if paper else CIFAR_COARSE
    owners = {}
    for party, (_, columns) in enumerate(data.private.clients()):
        assert np.bincount(columns["label"]).tolist() == [0] * 10 + [20] * 6
        assert len(np.unique(columns["image"].reshape(120, -1), axis=0)) == 120
        for index, superclass in enumerate(superclasses):
            fine = np.unique(columns["image"][columns["label"] == 10 + index][:, 0, 0, 0])
            expected = [f for f in range(100) if f * 7 % 20 == superclass][party % 5]
            assert fine.tolist() == [expected]
            owners.setdefault(expected, []).append(party)
    assert all(len(parties) == 2 for parties in owners.values())
    assert len(owners) == 30
    # Tests are all images of the superclasses.
    assert data.test.num_examples == 6 * 5 * 10


def letters(per_writer=(20, 30, 17, 25, 40)):
    """Prepared folders of MNIST, and of letters by writer, whose pixels hold (index, label)."""
    sizes = np.array(per_writer)
    rows = int(sizes.sum())
    label = (np.arange(rows) % 8).astype(np.int32)  # a to h
    image = np.stack([np.arange(rows), label], 1).astype(np.uint8).reshape(rows, 1, 2, 1)
    train = FederatedData.from_arrays(
        {"image": image, "label": label},
        offsets=np.cumsum([0, *sizes]),
        client_ids=[f"{100 + w}" for w in range(len(sizes))],
    )
    one = lambda count: FederatedData.from_arrays(
        {"image": image[:count], "label": np.arange(count, dtype=np.int32) % 10},
        offsets=[0, count],
        client_ids=["all"],
    )
    return {"train": one(60), "test": one(20)}, {"train": train, "test": one(40)}


def test_letters_iid():
    data = letters_public_private(*letters(), iid=True, num_parties=4, per_class=2)
    check_joint_labels(data)
    assert data.private.client_sizes.tolist() == [12] * 4
    images = data.private.columns["image"][:, 0, :, 0]
    assert len(np.unique(images, axis=0)) == 48
    np.testing.assert_array_equal(images[:, 1] + 10, data.private.columns["label"])
    for _, columns in data.private.clients():
        assert np.bincount(columns["label"]).tolist() == [0] * 10 + [2] * 6
    # Of 40 tests with ten classes each sixth class and below is private.
    assert data.test.num_examples == 24
    assert sorted(set(data.test.columns["label"].tolist())) == list(range(10, 16))


@pytest.mark.parametrize("seed", range(3))
def test_letters_by_writer(seed):
    """Each party has all of one writer's letters a to f, of writers who have enough of them."""
    public, private = letters()
    data = letters_public_private(public, private, num_parties=3, smallest=15, seed=seed)
    check_joint_labels(data)
    ends = private["train"].offsets
    owners = set()
    for _, columns in data.private.clients():
        rows = columns["image"][:, 0, 0, 0]
        writer = int(np.searchsorted(ends, rows[0], side="right")) - 1
        own = np.arange(ends[writer], ends[writer + 1])
        np.testing.assert_array_equal(np.sort(rows), own[own % 8 < 6])
        np.testing.assert_array_equal(columns["label"], 10 + rows % 8)
        assert len(rows) >= 15
        owners.add(writer)
    assert len(owners) == 3 and 2 not in owners


def test_other_seeds_give_other_images():
    images = [
        cifar_public_private(*cifar(), seed=seed).private.columns["image"] for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(images[0], images[1])
    assert (images[0] != images[2]).any()


def test_some_public_images():
    """A random part that depends on the seed, as do private images and the public mean."""
    public, private = cifar()
    parts = [cifar_public_private(public, private, num_public=100, seed=seed) for seed in (0, 0, 1)]
    every = {image.tobytes() for image in public["train"].columns["image"]}
    for data in parts:
        own = data.public.columns
        assert len(own["label"]) == 100
        assert len({image.tobytes() for image in own["image"]} & every) == 100
        np.testing.assert_array_equal(own["image"][:, 0, 0, 0], own["label"])
        np.testing.assert_allclose(
            data.public_mean, own["image"].astype(np.float64).mean(0) / 255, rtol=1e-6
        )
    images = [data.public.columns["image"] for data in parts]
    np.testing.assert_array_equal(images[0], images[1])
    assert (images[0] != images[2]).any()
    whole = cifar_public_private(public, private)
    np.testing.assert_array_equal(parts[0].private.columns["image"], whole.private.columns["image"])


def test_each_data_set_has_its_own_mean_image():
    public, private = cifar()
    data = cifar_public_private(public, private)
    for split, mean in ((public, data.public_mean), (private, data.private_mean)):
        assert mean.shape == (SIDE, SIDE, 3)
        images = split["train"].columns["image"].astype(np.float64)
        np.testing.assert_allclose(mean, images.mean(0) / 255, rtol=1e-6)


def test_digits():
    data = digits_public_private(num_parties=5, per_class=4)
    check_joint_labels(data)
    assert data.private.client_sizes.tolist() == [16] * 5
    for _, columns in data.private.clients():
        assert np.bincount(columns["label"]).tolist() == [0] * 6 + [4] * 4
    splits = (data.public, data.public_test, data.private, data.test)
    assert sum(split.num_examples for split in splits) == 1797
    assert data.private_mean.shape == (8, 8, 1)
    swapped = digits_public_private(public_classes=(9, 8), num_parties=1, per_class=1)
    images = swapped.public.columns["image"][swapped.public.columns["label"] == 0]
    assert 100 < len(images) < 180  # nines, of which some are tests


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10, unique=True), st.integers(0, 20))
def test_labels_are_looked_up(classes, first):
    """Classes are replaced at once: a class that was replaced already is not replaced again."""
    labels = np.arange(31)
    found = joint_labels(labels, classes, first)
    assert joint_labels([-1, *labels], classes, first).tolist() == [-1, *found]
    for label in labels.tolist():
        assert found[label] == (first + classes.index(label) if label in classes else -1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: joint_labels(np.zeros(1, int), (1, 1), 0), "classes must be different"),
        (lambda: joint_labels(np.ma.masked_equal([0, 1], 1), (0, 1), 0), "labels must not be mask"),
        (
            lambda: joint_labels([0, 1], np.ma.masked_equal([0, 1], 1), 0),
            "classes must not be mask",
        ),
        (lambda: digits_public_private(public_classes=range(10)), "some digits and not all"),
        (lambda: digits_public_private(public_classes=()), r"^public_classes must be .* got \[\]"),
        (
            lambda: digits_public_private(public_classes=(1, 1)),
            r"^public_classes must be .* none twice, got \[1, 1\]",
        ),
        (lambda: digits_public_private(per_class=200), r"^per_class must be smaller: parties need"),
        (lambda: digits_public_private(seed=-1), "seed must be at least 0, got -1"),
        (lambda: cifar_public_private(*cifar(), seed=None), "seed must be an integer"),
        (lambda: letters_public_private(*letters(), seed=-1), "seed must be at least 0, got -1"),
        (lambda: digits_public_private(per_class=0), "per_class must be at least 1, got 0"),
        (lambda: digits_public_private(per_class="3"), "per_class must be an integer .* got '3'"),
        (lambda: digits_public_private(num_parties=2.5), "num_parties must be an integer"),
        (lambda: digits_public_private(num_parties=99), "parties need 297 images of class"),
        (
            lambda: digits_public_private(test_fraction=1.5),
            "test_fraction must be above 0 and below 1",
        ),
        (
            lambda: digits_public_private(test_fraction="0.3"),
            "test_fraction must be a number above 0",
        ),
        (
            lambda: digits_public_private(test_fraction=1e-9),
            "test_fraction must leave images for tests and for training, got 1e-09 of 1083 public",
        ),
        (
            lambda: digits_public_private(held_out_fraction=0.9999),
            "held_out_fraction must leave images for the test set, got 0.9999 of 642 private images",
        ),
        (
            lambda: digits_public_private(held_out_fraction=1e-9),
            "held_out_fraction must leave images for the held-out set, got 1e-09 of 642 private images",
        ),
        (
            lambda: digits_public_private(6, 30, public_classes=range(9)),
            "per_class must leave private images for the test set, got 30 for each of 6 parties",
        ),
        (
            lambda: digits_public_private(public_classes=(0.0, 1.0, 2.0)),
            r"public_classes must be integers, some digits .* got \[0\.0, 1\.0, 2\.0\]",
        ),
        (lambda: digits_public_private(public_classes="012"), "public_classes must be a list"),
        (lambda: cifar_public_private({}, {}, iid="no"), "iid must be True or False, got 'no'"),
        (
            lambda: cifar_public_private({}, {}, paper_superclasses="no"),
            "paper_superclasses must be True or False, got 'no'",
        ),
        (lambda: letters_public_private({}, {}, iid="no"), "iid must be True or False, got 'no'"),
        (
            lambda: cifar_public_private(*cifar(per_fine=19)),
            "parties need 20 images of fine class",
        ),
        (
            lambda: cifar_public_private(cifar()[0], cifar()[0]),
            "cifar100's split 'train' has no column 'coarse_label'",
        ),
        (
            lambda: cifar_public_private(*cifar(), num_public=501),
            "num_public must be at most the 500 public images, got 501",
        ),
        (lambda: cifar_public_private({}, {}), "cifar10 must have a split 'train'"),
        (lambda: letters_public_private(letters()[0], {}), "emnist must have a split 'train'"),
        (
            lambda: letters_public_private(
                {name: split.keep(("image",)) for name, split in letters()[0].items()}, letters()[1]
            ),
            "mnist's split 'train' has no column 'label'",
        ),
        (
            lambda: letters_public_private(*letters(), num_parties=4, smallest=20),
            "num_parties must be at most the 2 writers of 20 images or more, got 4",
        ),
        (lambda: letters_public_private(*letters(), smallest=0), "smallest must be at least 1"),
        (
            lambda: letters_public_private(*letters(), iid=True, num_parties=40),
            "parties need 120 images of class 10",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_public_classes_that_differ():
    """A party whose public examples have a class that the others do not know as public."""
    data = digits_public_private(num_parties=2)
    data.public.columns["label"][3] = 7
    with pytest.raises(
        ValueError, match=r"public labels must be 0 to 5 .* 'public' has 7"
    ) as error:
        check_joint_labels(data)
    assert "\n" not in str(error.value)


def test_a_private_label_that_is_public():
    data = digits_public_private(num_parties=2)
    data.private.columns["label"][-1] = 4
    with pytest.raises(ValueError, match=r"private labels must be 6 to 9 .* client '1' has 4"):
        check_joint_labels(data)
