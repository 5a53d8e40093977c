"""Bytes that a client downloads and uploads, counted from the shapes exchanged.

A method that measures its bytes reports the metrics `client_bytes_up` and `client_bytes_down`, which
replace these in the summary (`run/metrics_lines.py`). `report/costs.py` computes a round's total.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedcodist.core.method_checks import check_method
from fedcodist.core.padding_checks import collected_padding

PyTree = Any


class Communication(NamedTuple):
    """Bytes that a client downloads (`down`) and uploads (`up`) in one participation."""

    down: int
    up: int


def communication_of(
    method: Any, columns: Mapping[str, Any], has_server: bool = True
) -> Communication:
    """Counts one participation's bytes from the shapes that a method exchanges.

    The client uploads the update, the mutable state, the weight and `extra` of its ClientResult.

    Args:
      method: a FederatedMethod.
      columns: the federated data's columns, arrays or shapes.
      has_server: as `check_method` gets it.

    Raises:
      ValueError, TypeError: the method's functions do not fit together, see `check_method`.
    """
    with collected_padding():  # batch statistics are checked later, when clients' sizes are known
        message, result = check_method(method, columns, has_server)
    return Communication(
        down=tree_bytes(message),
        up=tree_bytes((result.update, result.mutable, result.weight, result.extra)),
    )


def scores_communication(count: int, num_classes: int, are_drawn: bool) -> Communication:
    """Scores of public examples, such as probabilities, in both directions.

    Args:
      count: examples of a round.
      num_classes: scores of an example.
      are_drawn: whether a round has a part of the public examples; downloads then have its indices too.
    """
    scores = count * num_classes * np.dtype(np.float32).itemsize
    indices = count * np.dtype(np.int32).itemsize if are_drawn else 0
    return Communication(down=scores + indices, up=scores)


def tree_bytes(tree: PyTree) -> int:
    """The payload of a pytree of arrays or shapes, in bytes."""
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )
