"""`SummedMetric`: a metric that is a function of sums over examples, such as macro-F1."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

PyTree = Any


class SummedMetric(NamedTuple):
    """A metric that is not a mean over examples but can be computed from sums over them.

    Sums are taken over batches, devices and, where there are several, within each client of a split.
    Padding does not count. Both functions are traced, so they must be pure.

    Attributes:
      sums: (outputs, batch) -> pytree of arrays [batch, ...], one entry per example. They are summed
        over the examples; booleans are counted. Sums of integers must stay below 2^31.
      compute: pytree of the sums [...] -> scalar; NaN where the metric is undefined.

    How often a class is predicted, divided by how often it is the label:

    >>> import jax.numpy as jnp
    >>> def sums(outputs, batch):
    ...     return {'predicted': outputs.argmax(-1) == 1, 'actual': batch['label'] == 1}
    >>> ratio = SummedMetric(sums, lambda total: total['predicted'] / total['actual'])
    """

    sums: Callable[[Any, Mapping[str, jax.Array]], PyTree]
    compute: Callable[[PyTree], jax.Array]

    def __call__(self, outputs: Any, batch: Mapping[str, jax.Array]) -> PyTree:
        """`sums`, so that every metric is called in one way."""
        return self.sums(outputs, batch)
