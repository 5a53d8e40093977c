"""Mean and deviation of a prepared folder's images, by which pixels are normalised for networks."""

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from fedcodist.core.checks import check_number
from fedcodist.data.prepared import manifest

CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
# Data set, as its manifest names it -> mean and deviation of each channel's pixels, divided by 255.
KNOWN: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "CIFAR-10": (CIFAR_MEAN, CIFAR_DEVIATION),
    "CIFAR-100": (CIFAR_MEAN, CIFAR_DEVIATION),
    "MNIST": ((0.1307,), (0.3081,)),
}


def normalisation(
    settings: ConfigDict, image_shape: Sequence[int]
) -> tuple[Sequence[float], Sequence[float]]:
    """(mean, deviation), each with one value per channel.

    They are `data.mean` and `data.deviation` where a config has them, or else `mean` and `deviation`
    among the arguments in the folder's manifest, or else those of its data set in KNOWN.

    Args:
      settings: a config's `data`.
      image_shape: height, width, channels.

    Raises:
      ValueError, TypeError: names the setting: none of these has them, or they are not one value per
        channel.
    """
    arguments = manifest(settings.folder).get("arguments") or {}
    data_set = arguments.get("data_set", "")
    pairs = (
        ("data.", settings.get("mean"), settings.get("deviation")),
        (
            f"data.folder {settings.folder}: the manifest's ",
            arguments.get("mean"),
            arguments.get("deviation"),
        ),
        (f"data.folder {settings.folder}: {data_set}'s ", *KNOWN.get(data_set, (None, None))),
    )
    for where, mean, deviation in pairs:
        if mean is None and deviation is None:
            continue
        if mean is None or deviation is None:
            raise ValueError(f"{where}mean and deviation must both be there, or neither of them.")
        return (
            _of_channels(f"{where}mean", mean, image_shape, {}),
            _of_channels(f"{where}deviation", deviation, image_shape, {"above": 0}),
        )
    raise ValueError(
        "data.mean and data.deviation must be set, a number for each of the images' "
        f"{image_shape[-1]} channels, for pixels divided by 255: nothing tells them of "
        f"data.folder {settings.folder} ({data_set or 'an unknown data set'})."
    )


def _of_channels(
    what: str, values: Any, image_shape: Sequence[int], limits: dict[str, float]
) -> tuple[float, ...]:
    listed = tuple(values) if isinstance(values, tuple | list) else (values,)
    for value in listed:
        check_number(what, value, **limits)
    if len(listed) != image_shape[-1]:
        raise ValueError(
            f"{what} must have a number for each of the {image_shape[-1]} channels of images "
            f"{list(image_shape)}, got {list(listed)}."
        )
    return listed
