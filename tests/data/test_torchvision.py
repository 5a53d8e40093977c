"""Objects as torchvision's data sets are, without PyTorch."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedcodist.data import from_torchvision

COLOURED = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), np.uint8)
LABELS = [3, 1, 2, 0, 3, 3]


class Tensor:
    """What the reader sees of a tensor."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def numpy(self):
        return self.values


@pytest.mark.parametrize(
    ("dataset", "images"),
    [
        (SimpleNamespace(data=COLOURED, targets=LABELS), COLOURED),  # CIFAR10
        (SimpleNamespace(data=Tensor(COLOURED[..., 0]), targets=Tensor(LABELS)), COLOURED[..., :1]),
        (SimpleNamespace(data=COLOURED.transpose(0, 3, 1, 2), labels=np.array(LABELS)), COLOURED),
        (list(zip(COLOURED, LABELS, strict=True)), COLOURED),
        (
            [(Tensor(i.transpose(2, 0, 1)), y) for i, y in zip(COLOURED, LABELS, strict=True)],
            COLOURED,
        ),
    ],
)
def test_images_and_labels_become_columns(dataset, images):
    columns = from_torchvision(dataset)
    np.testing.assert_array_equal(columns["image"], images)
    assert columns["image"].dtype == np.uint8 and columns["label"].dtype == np.int32
    assert columns["label"].tolist() == LABELS


def test_pictures_of_pil():
    pil = pytest.importorskip("PIL.Image")
    columns = from_torchvision([(pil.fromarray(COLOURED[0]), 1), (pil.fromarray(COLOURED[1]), 0)])
    np.testing.assert_array_equal(columns["image"], COLOURED[:2])


@pytest.mark.parametrize("mode", ["P", "CMYK", "1"])
def test_pictures_of_other_modes_become_colours(mode):
    """NumPy sees indices of the palette, inks and truth values."""
    pil = pytest.importorskip("PIL.Image")
    pure = COLOURED[0] // 128 * 255
    picture = pil.fromarray(pure[..., 0] if mode == "1" else pure).convert(mode)
    image = from_torchvision([(picture, 0)])["image"]
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image[0], pure[..., :1] if mode == "1" else pure)


def test_pictures_of_16_bits_keep_their_values():
    pil = pytest.importorskip("PIL.Image")
    values = np.array([[0, 300], [60_000, 7]], np.uint16)
    image = from_torchvision([(pil.fromarray(values), 0)])["image"]
    assert image.dtype == np.uint16 and image[0, ..., 0].tolist() == values.tolist()


def test_an_error_of_a_transform_is_told():
    class Transformed(list):
        def __getitem__(self, index):
            return COLOURED[index].reshape(3, 3), 0

    with pytest.raises(ValueError, match="cannot reshape array"):
        from_torchvision(Transformed([0]))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (3, "dataset must have data and targets"),
        ([], "dataset has no examples"),
        ([1], "must hold pairs .image, label., example 0 is none"),
        ([(COLOURED[0], 0), (COLOURED[0, :2], 0)], r"image 1 has shape \[2, 7, 3\]"),
        (SimpleNamespace(data=COLOURED, targets=LABELS[1:]), "an integer for each of 6 images"),
        (SimpleNamespace(data=COLOURED[0, 0], targets=LABELS), "data must be images"),
        (SimpleNamespace(data=np.ma.masked_equal(COLOURED, 0), targets=LABELS), "data must not be"),
        (SimpleNamespace(data=COLOURED, targets=np.ma.masked_equal(LABELS, 0)), "targets must not"),
        ([(np.ma.masked_equal(COLOURED[0], 0), 0)], "image 0 must not be masked"),
        (SimpleNamespace(data=COLOURED, targets=["a"] * 6), "an integer for each of 6 images"),
        (
            SimpleNamespace(data=COLOURED, targets=[0, 1, 2, 3, 4, 2**40]),
            "targets must be integers of 32 bits, got 0 to 1099511627776",
        ),
    ],
)
def test_other_objects_are_one_line(dataset, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        from_torchvision(dataset)
    assert "\n" not in str(error.value)
