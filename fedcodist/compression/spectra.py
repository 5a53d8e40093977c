"""Metrics of updates' singular values and of the ranks that they need, as in FedKD's figures."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.compression.compressor import Progress
from fedcodist.compression.svd import as_matrix, check_thresholds, matrix_shape, rank_for, threshold
from fedcodist.core.trees import named_leaves

PyTree = Any


def spectra(
    start: float = 0.95, end: float = 0.98
) -> Callable[[PyTree, Progress], dict[str, jax.Array]]:
    """Metrics of the spectra of a client's update, for `compressed(observe=...)`.

    With `compressed(observe_gradient=...)` they are those of a batch's gradient, which FedKD sends
    according to its paper (Wu et al. 2022, https://arxiv.org/abs/2108.13323). An update by Adam, which
    rescales every entry, needs a far higher rank. The metrics cost a further decomposition, so do not
    measure times with them.

    Args:
      start: first energy threshold, as in `svd`.
      end: last energy threshold, as in `svd`.

    Raises:
      ValueError, TypeError: names the threshold that is not allowed.

    Returns:
      (update, progress) -> metrics of the layers that `svd` decomposes. `rank/<layer>`, int32, is the
      least rank that keeps the round's share of the energy, even if factors are not sent.
      `spectrum/<layer>` [R] are singular values in descending order. A layer is a path, such as
      `Dense_0/kernel`.
    """

    check_thresholds(start, end)

    def observe(update: PyTree, progress: Progress) -> dict[str, jax.Array]:
        metrics = {}
        for name, leaf in named_leaves(update).items():
            if (shape := matrix_shape(leaf)) is not None:
                values = jnp.linalg.svd(as_matrix(leaf, shape), compute_uv=False)
                metrics[f"rank/{name}"] = rank_for(values, threshold(start, end, progress))
                metrics[f"spectrum/{name}"] = values
        return metrics

    return observe
