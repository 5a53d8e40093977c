"""LEAF's JSON files: FEMNIST, Shakespeare, the synthetic data set and others of that format.

A file has `users`, `num_samples` (of each user) and `user_data`: user -> `{"x": [...], "y": [...]}`. A
split, such as `femnist/data/train`, is a folder of many files with different users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcodist.core.checks import check_boolean, check_integer
from fedcodist.data.columns import check_fixed_width
from fedcodist.data.federated_data import FederatedData


def from_leaf(
    path: str | os.PathLike[str],
    image_shape: Sequence[int] | None = None,
    allow_empty: bool = False,
) -> FederatedData:
    """Reads one split of a LEAF data set; users are the clients, sorted by id.

        train = fc.from_leaf("femnist/data/train", image_shape=(28, 28, 1))
        test = fc.from_leaf("femnist/data/test", image_shape=(28, 28, 1))

    Both have the same users where LEAF's preprocessing was run with `-t sample`.

    Args:
      path: a JSON file, or the folder of a split with several.
      image_shape: (height, width, channels), if `x` are flat images of 0..1, such as FEMNIST's. They
        become a column `image` of uint8 0..255, and `y` becomes the column `label`, as configs read
        them.
      allow_empty: whether users without examples are allowed.

    Returns:
      Columns `x` and `y`: float32 or int32 numbers, or text, such as Shakespeare's 80 characters and the
      next one.

    Raises:
      ValueError: names file and user. A file is not JSON of this format, a user occurs twice, lengths
        differ from `num_samples`, or examples have different shapes.
    """
    check_boolean("allow_empty", allow_empty)
    if image_shape is not None:
        if not isinstance(image_shape, Sequence) or len(image_shape) != 3:
            raise ValueError(
                f"image_shape must be (height, width, channels), got {image_shape!r:.60}"
            )
        for size in image_shape:
            check_integer("image_shape", size, low=1)
    clients: dict[str, dict[str, np.ndarray]] = {}
    file_of: dict[str, Path] = {}
    empty: list[str] = []
    for file in _files(Path(path)):
        for user, examples in _users(file):
            where = f"{file}: user {user!r}"
            if user in file_of:
                raise ValueError(f"{where} is there twice, the first time in {file_of[user]}")
            file_of[user] = file
            if not examples["x"]:
                empty.append(user)
                continue
            try:
                clients[user] = _columns(examples, image_shape)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from None
    if not clients:
        raise ValueError(f"{path} has no examples")
    _make_dtypes_equal(clients)
    of_first = next(iter(clients.values()))
    for user in empty:
        clients[user] = {name: column[:0] for name, column in of_first.items()}
    try:
        return FederatedData.from_client_dict(
            {user: clients[user] for user in sorted(clients)}, allow_empty=allow_empty
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        splits = sorted(folder.name for folder in path.glob("*") if list(folder.glob("*.json")))
        instead = f"; choose one of its folders {splits}" if splits else ""
        raise ValueError(f"{path} must be a JSON file or a folder that holds some{instead}")
    return files


def _users(file: Path) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """(user, x and y) of a file, after checking that it has LEAF's format."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    keys = ("users", "num_samples", "user_data")
    if not isinstance(content, dict) or not set(keys) <= set(content):
        raise ValueError(f"{file} is not LEAF's: it must have {', '.join(keys)}")
    users, counts, user_data = (content[key] for key in keys)
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise ValueError(f"{file}: users and num_samples must be lists of one length")
    if not isinstance(user_data, dict) or {str(user) for user in users} != set(user_data):
        raise ValueError(f"{file}: user_data must have the examples of all users and of no others")
    for user, count in zip(map(str, users), counts, strict=True):
        examples = user_data[user]
        if not isinstance(examples, Mapping) or not all(
            isinstance(examples.get(name), list) for name in ("x", "y")
        ):
            raise ValueError(f"{file}: user {user!r} must have lists x and y")
        lengths = [len(examples[name]) for name in ("x", "y")]
        if lengths != [count, count]:
            raise ValueError(
                f"{file}: user {user!r} has {lengths[0]} x and {lengths[1]} y, num_samples says {count}"
            )
        yield user, {name: examples[name] for name in ("x", "y")}


def _columns(
    examples: Mapping[str, list[Any]], image_shape: Sequence[int] | None
) -> dict[str, np.ndarray]:
    x, y = (_array(name, examples[name]) for name in ("x", "y"))
    if image_shape is None:
        return {"x": x, "y": y}
    pixels = int(np.prod(image_shape))
    if x.dtype.kind not in "if" or x[0].size != pixels:
        raise ValueError(
            f"x must be {pixels} numbers for image_shape {tuple(image_shape)}, got {x.dtype} "
            f"{list(x.shape[1:])}"
        )
    if not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"x must be pixels of 0..1 for image_shape, got {x.min():g} to {x.max():g}"
        )
    image = np.rint(x * 255).astype(np.uint8).reshape(-1, *image_shape)
    return {"image": image, "label": y}


def _array(name: str, values: list[Any]) -> np.ndarray:
    """Numbers as float32 or int32, or text."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be examples of one shape") from None
    if array.dtype.kind == "U":
        check_fixed_width(name, array, values)
        return array
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers or text, got {array.dtype}")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    whole = array.astype(np.int32)
    if not np.array_equal(whole, array):
        raise ValueError(f"{name} must be whole numbers within 32 bits")
    return whole


def _make_dtypes_equal(clients: Mapping[str, dict[str, np.ndarray]]) -> None:
    """Gives all users one dtype: JSON may have 1 for 1.0, so a user's floats may look like integers."""
    for name in next(iter(clients.values())):
        if {columns[name].dtype.kind for columns in clients.values()} == {"i", "f"}:
            for columns in clients.values():
                columns[name] = columns[name].astype(np.float32)
