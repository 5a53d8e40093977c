"""Splits as federated data: plain columns become the data of one client."""

from collections.abc import Mapping
from typing import Any

from fedcodist.data.columns import check_numbers
from fedcodist.data.federated_data import FederatedData


def federated_splits(name: str, splits: Mapping[str, Any]) -> dict[str, FederatedData]:
    """Splits as federated data. Plain columns become the data of one client, named as the split.

    Raises:
      TypeError, ValueError: names the split that is neither.
    """
    if not isinstance(splits, Mapping):
        raise TypeError(f"{name} must be a mapping from names to data, got {type(splits).__name__}")
    federated = {
        split: federated_split(f"{name}[{split!r}]", split, data) for split, data in splits.items()
    }
    for split, data in federated.items():
        check_numbers(f"{name}[{split!r}]", data.columns)
    return federated


def federated_split(where: str, split: Any, data: Any) -> FederatedData:
    """A split as federated data; plain columns become the data of one client, named as the split.

    Args:
      where: what messages call the split.
      split: its name.
      data: FederatedData, or columns by name.

    Raises:
      TypeError, ValueError: data that are neither.
    """
    if isinstance(data, FederatedData):
        return data
    if not isinstance(data, Mapping):
        raise TypeError(
            f"{where} must be FederatedData, or columns as a mapping from name to array, "
            f"got {type(data).__name__}"
        )
    try:
        return FederatedData.of_one_client(data, str(split))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
