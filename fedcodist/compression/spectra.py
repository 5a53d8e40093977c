"""What FedKD's figures show of an uplink: singular values, and the ranks that they need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.compression.svd import as_matrix, matrix_shape, rank_for, threshold
from fedcodist.core.trees import named_leaves

PyTree = Any


def spectra(
    start: float = 0.95, end: float = 0.98
) -> Callable[[PyTree, Any], dict[str, jax.Array]]:
    """For `compressed(observe=...)`: what `svd` with these thresholds meets in a client's update.

    As `compressed(observe_gradient=...)` it shows the same of a batch's gradient, which is what FedKD's
    paper says it sends: an update by Adam, which rescales every entry, needs a far higher rank.

    It costs another decomposition, so it is for looking and not for measuring times.

    Returns:
      (update, progress) -> `rank/<layer>`, int32, the least that keeps the round's share of the energy,
      whether factors are sent or not, and `spectrum/<layer>` [R], singular values in descending order;
      of the layers that `svd` decomposes. A layer is a path such as `Dense_0/kernel`.
    """

    def observe(update, progress):
        found = {}
        for name, leaf in named_leaves(update).items():
            if (shape := matrix_shape(leaf)) is not None:
                values = jnp.linalg.svd(as_matrix(leaf, shape), compute_uv=False)
                found[f"rank/{name}"] = rank_for(values, threshold(start, end, progress))
                found[f"spectrum/{name}"] = values
        return found

    return observe
