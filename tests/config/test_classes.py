"""The number of outputs that a config's networks need."""

from pathlib import Path

import numpy as np
import pytest

from fedcodist.commands import prepare
from fedcodist.config.classes import SOURCES, number_of_classes
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared

PREPARE = Path(prepare.__file__).parent


def split(*labels, dtype=np.int32):
    column = np.array(labels, dtype)
    return FederatedData.from_arrays({"label": column}, offsets=[0, len(column)])


def test_labels_of_all_splits_count():
    splits = {"train": split(0, 1), "held_out": split(2), "test": split(4, 0)}
    assert number_of_classes(splits) == 5
    assert number_of_classes(splits, declared=7) == 7


def test_labels_that_count_from_1_are_a_warning():
    """The network would have an output of no class."""
    with pytest.warns(UserWarning, match=r"^labels are 1 to 3, so networks have 4 outputs"):
        assert number_of_classes({"train": split(1, 2), "test": split(3)}) == 4


def test_a_split_without_the_first_label_is_no_warning(recwarn):
    number_of_classes({"train": split(1, 2), "test": split(0)})
    number_of_classes({"train": split(0), "test": split(1, 2)})
    number_of_classes({"train": split(1, 2)}, declared=3)
    assert not recwarn.list


def test_one_hot_and_bool_labels():
    one_hot = FederatedData.from_arrays({"label": np.eye(6)[[0, 1]]}, offsets=[0, 2])
    assert number_of_classes({"train": one_hot}) == 6
    assert number_of_classes({"train": split(False, True, dtype=bool)}) == 2


TAGS = np.arange(40).reshape(2, 20) % 5


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ({"train": TAGS}, 5),
        ({"train": TAGS[:, :3] + 5}, 8),
        ({"train": TAGS, "test": np.minimum(TAGS, 1)}, 5),
        ({"train": TAGS.reshape(2, 4, 5)}, 5),
        ({"train": np.minimum(TAGS.reshape(2, 4, 5), 1)}, 2),
        ({"train": np.minimum(TAGS, 1)}, 20),
        ({"train": TAGS > 1, "test": np.eye(20)}, 20),
        ({"train": np.full((2, 4), 0.25)}, 4),
    ],
    ids=[
        "tags",
        "fewer positions than tags",
        "a split of two tags",
        "a mask",
        "a mask of 0 and 1",
        "several labels",
        "one-hot in another split",
        "soft",
    ],
)
@pytest.mark.filterwarnings("ignore:labels are 5 to 7")
def test_labels_of_several_entries(labels, classes):
    splits = {
        name: FederatedData.from_arrays({"label": column}, offsets=[0, len(column)])
        for name, column in labels.items()
    }
    assert number_of_classes(splits) == classes


@pytest.mark.parametrize(
    ("splits", "declared", "message"),
    [
        ({"test": split(-1, 2)}, None, r"split 'test' must have labels 0 or more, got -1 to 2"),
        ({"train": split(0), "test": split(3)}, 3, r"split 'test' .* 0 to 2, as the data declare"),
        (
            {"test": split(0.5, dtype=float)},
            None,
            r"split 'test' must be whole numbers, got float64",
        ),
    ],
)
def test_labels_that_no_output_can_have(splits, declared, message):
    with pytest.raises(ValueError, match=message):
        number_of_classes(splits, declared=declared)


@pytest.mark.parametrize(
    ("source", "arguments", "classes"),
    [
        ("made up", {}, 3),
        ("made up", {"num_classes": 12}, 12),
        ("CIFAR-100, https://www.cs.toronto.edu/~kriz/cifar.html", {}, 100),
        ("CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html", {}, 10),
        ("CIFAR-100, superclasses of my own", {}, 3),
    ],
)
def test_a_prepared_folder_declares_its_classes(source, arguments, classes, tmp_path):
    splits = {"train": split(0, 2), "test": split(1)}
    folder = tmp_path / "data"
    save_prepared(folder, splits, source=source, licence="none", arguments=arguments)
    assert number_of_classes(splits, str(folder)) == classes


def test_a_declaration_that_is_no_number(tmp_path):
    save_prepared(
        tmp_path / "data",
        {"train": split(0)},
        source="made up",
        licence="none",
        arguments={"num_classes": "ten"},
    )
    with pytest.raises(ValueError, match=r"num_classes of .* must be an integer .*'ten'"):
        number_of_classes({"train": split(0)}, str(tmp_path / "data"))


def test_the_sources_are_those_that_prepare_writes():
    programs = "".join(path.read_text(encoding="utf-8") for path in PREPARE.glob("*.py"))
    assert all(f'"{source}"' in programs for source in SOURCES)
