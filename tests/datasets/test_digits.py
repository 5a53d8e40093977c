import sys

import numpy as np
import pytest

from fedcodist.datasets.digits import load_digits, load_digits_federated

pytest.importorskip("sklearn")


def test_digits():
    columns = load_digits()
    assert columns["image"].shape == (1797, 8, 8, 1) and columns["image"].dtype == np.uint8
    assert columns["label"].shape == (1797,) and columns["label"].dtype == np.int32
    assert (columns["image"].min(), columns["image"].max()) == (0, 16)
    assert set(columns["label"]) == set(range(10))


def test_splits_hold_every_image_once():
    splits = load_digits_federated(
        num_clients=20,
        concentration=0.3,
        distillation_fraction=0.25,
        held_out_fraction=0.1,
        test_fraction=0.2,
        seed=4,
    )
    assert {name: data.num_clients for name, data in splits.items()} == {
        "train": 20,
        "distillation": 1,
        "held_out": 1,
        "test": 1,
    }
    assert splits["distillation"].num_examples == 449
    assert set(splits["distillation"].columns) == {"image"}
    assert set(splits["train"].columns) == set(splits["test"].columns) == {"image", "label"}
    together = np.concatenate([data.columns["image"] for data in splits.values()])
    images = [
        np.sort(rows.reshape(1797, -1).view("V64").ravel())
        for rows in (together, load_digits()["image"])
    ]
    assert (images[0] == images[1]).all()


def test_labels_stay_with_their_images():
    columns = load_digits()
    label_of = {
        image.tobytes(): label
        for image, label in zip(columns["image"], columns["label"], strict=True)
    }
    for name in ("train", "held_out", "test"):
        data = load_digits_federated(seed=1)[name]
        for image, label in zip(data.columns["image"], data.columns["label"], strict=True):
            assert label_of[image.tobytes()] == label


def test_seed_and_concentration():
    first, again, other = (load_digits_federated(seed=seed) for seed in (0, 0, 1))
    for name, data in first.items():
        np.testing.assert_array_equal(data.offsets, again[name].offsets)
        np.testing.assert_array_equal(data.columns["image"], again[name].columns["image"])
    assert not np.array_equal(first["test"].columns["image"], other["test"].columns["image"])

    def labels_per_client(concentration):
        train = load_digits_federated(num_clients=10, concentration=concentration)["train"]
        return np.mean([len(set(table["label"].tolist())) for _, table in train.clients()])

    assert labels_per_client(0.05) < 6 < 9 < labels_per_client(100.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test_fraction": 0.0}, r"^test_fraction must be above 0 and below 1, got 0\.0"),
        ({"test_fraction": "0.2"}, "^test_fraction must be a number above 0 and .* got '0.2'"),
        ({"labelled": "no"}, "^labelled must be True or False, got 'no'"),
        ({"distillation_fraction": 1.0}, "distillation_fraction"),
        ({"distillation_fraction": 0.9}, "leave training data"),
        ({"held_out_fraction": 1e-6}, "held_out_fraction"),
        ({"num_clients": 2000}, "num_clients"),
        ({"concentration": 0.0}, "concentration"),
        ({"seed": -1}, "seed"),
    ],
)
def test_clear_errors(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_digits_federated(**arguments)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r'pip install "fedcodist\[digits\]"'):
        load_digits()
