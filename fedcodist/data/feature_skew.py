"""Clients with different features and unchanged labels: noise of different levels, or rotated images.

Both functions take federated data and return it with one column changed, so they work with any
partition.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedcodist.core.checks import check_integer, check_number
from fedcodist.data.federated_data import FederatedData

_QUARTERS = 4  # a full turn, in steps that need no interpolation


def feature_noise(
    data: FederatedData, sigma: float, seed: int, column: str = "image", scale: float | None = None
) -> FederatedData:
    """Adds Gaussian noise to a column; clients with a larger index get more of it.

    The noise of the i-th of N clients (i from 1) has mean 0 and the standard deviation `sigma * i / N`,
    as in section III-B of [NIID-Bench](https://arxiv.org/abs/2102.02079). The paper calls this level the
    variance; its released code uses it as the standard deviation, as here, but with the levels
    `sigma * (i - 1) / (N - 1)`. The noise is drawn once, not anew in every epoch.

    Args:
      data: the clients. Later clients get more noise, so their order matters.
      sigma: level of the last client, in units of `scale`. 0 changes nothing.
      seed: of the draws. A client's noise depends on its index and not on other clients.
      column: numbers `[examples, ...]`. Integers, which must be in 0..`scale`, stay integers: noised
        values are rounded and clipped to this range. Floating ones are not clipped.
      scale: the value that counts as 1: by default 255 for integers and 1 for floating numbers.

    Raises:
      ValueError, TypeError: names the argument; a column that is missing or is no number.
    """
    check_number("sigma", sigma, low=0)
    check_integer("seed", seed, low=0)
    values = _numbers(data, column)
    is_integer = values.dtype.kind in "iu"
    scale = (255.0 if is_integer else 1.0) if scale is None else scale
    check_number("scale", scale, above=0)
    if is_integer and scale > np.iinfo(values.dtype).max:
        raise ValueError(f"scale must be a value that {values.dtype} can hold, got {scale:g}")
    if is_integer and sigma and values.size and not 0 <= values.min() <= values.max() <= scale:
        raise ValueError(
            f"scale must be the largest value that integers of column {column!r} can have, and 0 the "
            f"least, got scale {scale:g} and integers from {values.min()} to {values.max()}"
        )
    changed = np.array(values)
    for index in range(data.num_clients if sigma else 0):
        rng = np.random.default_rng([seed, index])
        block = slice(int(data.offsets[index]), int(data.offsets[index + 1]))
        level = sigma * (index + 1) / data.num_clients * scale
        noised = values[block] + level * rng.standard_normal(values[block].shape)
        changed[block] = np.clip(np.rint(noised), 0, scale) if is_integer else noised
    return _with_column(data, column, changed)


def feature_rotation(
    data: FederatedData, rotations: int, seed: int, column: str = "image"
) -> FederatedData:
    """Rotates all images of a client by a quarter turn, two, three or none.

    This is the feature shift of [IFCA](https://arxiv.org/abs/2006.04088), section 6, rotated MNIST and
    CIFAR: labels are unchanged, and there is a group of clients for each rotation. Groups are drawn at
    random, and their sizes differ by at most one.

    Args:
      data: the clients.
      rotations: 1 to 4 of the angles 0, 90, 180 and 270 degrees, counter-clockwise; with 2 they are 0
        and 180. 1 changes nothing.
      seed: of the draw of groups.
      column: images `[examples, height, width, ...]`, square unless `rotations` is at most 2.

    Raises:
      ValueError, TypeError: names the argument; a column that is missing or holds no such images.
    """
    check_integer("rotations", rotations, low=1, high=_QUARTERS)
    check_integer("seed", seed, low=0)
    images = _numbers(data, column)
    if images.ndim < 3:
        raise ValueError(
            f"column {column!r} must be images [examples, height, width, ...], got "
            f"{list(images.shape)}"
        )
    if rotations > 2 and images.shape[1] != images.shape[2]:
        raise ValueError(
            f"rotations must be at most 2 for images that are not square, {list(images.shape[1:])}, "
            f"got {rotations}"
        )
    step = 2 if rotations == 2 else 1
    # Not the permutation of `capacity_pools` with the same seed: a pool would be of some rotations only.
    dealt = np.random.default_rng([seed, *b"rotations"]).permutation(data.num_clients)
    changed = np.array(images)
    for place, index in enumerate(dealt):
        turns = place % rotations * step
        block = slice(int(data.offsets[index]), int(data.offsets[index + 1]))
        changed[block] = np.rot90(images[block], turns, axes=(1, 2))
    return _with_column(data, column, changed)


def _numbers(data: FederatedData, column: str) -> np.ndarray:
    if not isinstance(data, FederatedData):
        raise TypeError(f"data must be FederatedData, got {type(data).__name__}")
    if column not in data.columns:
        raise ValueError(f"column must be one of {sorted(data.columns)}, got {column!r}")
    values = data.columns[column]
    if values.dtype.kind not in "iuf":
        raise TypeError(f"column {column!r} must be numbers, got {values.dtype}")
    return values


def _with_column(data: FederatedData, column: str, values: Any) -> FederatedData:
    columns = {**data.columns, column: values}
    return FederatedData(columns, data.offsets, data.client_ids, data.allow_empty)
