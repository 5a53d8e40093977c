"""The inputs of a network: the columns of a batch that it reads, and an example of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys
from fedcodist.core.checks import shown
from fedcodist.core.shape_checks import shape_of
from fedcodist.core.user_functions import traced

Inputs = str | tuple[str, ...]  # the column that a network reads, or its columns


def network_inputs(batch: Mapping[str, jax.Array], inputs: Inputs) -> Any:
    """What the network gets of a batch: a column, or a dictionary of several."""
    return batch[inputs] if isinstance(inputs, str) else {name: batch[name] for name in inputs}


def as_batch(example: Any, inputs: Inputs) -> Mapping[str, Any]:
    """The example of a network's inputs as columns by name."""
    return {inputs: example} if isinstance(inputs, str) else example


def checked_example(example: Any, inputs: Inputs) -> Any:
    """The example of a network's inputs, as JAX has them.

    Raises:
      TypeError: the example has no arrays with a batch axis, or `inputs` does not name its columns.
      ValueError: `inputs` names other columns.
    """
    for leaf in example.values() if isinstance(example, Mapping) else [example]:
        if not len(getattr(leaf, "shape", ())) or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"example must be an array [batch, ...], such as jnp.zeros((1, 28, 28, 1)), got "
                f"{shown(leaf)}."
            )
    # JAX warns where it initialises with NumPy's float64.
    to_jax = lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    example = jax.tree.map(to_jax, example)
    _check_names(example, inputs)
    return example


def check_takes_example(start: Callable[[jax.Array], Any], example: Any, inputs: Inputs) -> None:
    """Raises ValueError or TypeError that names the example if the network fails with it. Only traces.

    Args:
      start: key -> anything; gives the example to the network.
      example, inputs: of `checked_example`.
    """
    columns = as_batch(example, inputs).items()
    shapes = ", ".join(f"{name!r}: {shape_of(column)}" for name, column in columns)
    traced("the network", start, keys.key_shape(), given=f"the example {{{shapes}}}")


def _check_names(example: Any, inputs: Inputs) -> None:
    """Raises TypeError or ValueError unless `example` has the columns that `inputs` names."""
    if isinstance(inputs, str):
        if isinstance(example, Mapping):
            raise TypeError(
                f"inputs must name all columns of example, {tuple(example)}, got {inputs!r}."
            )
        return
    if not isinstance(example, Mapping):
        raise TypeError(
            f"example must be a dictionary of the columns that inputs={inputs!r} names, got an array "
            f"{list(example.shape)}."
        )
    if set(inputs) != set(example):
        raise ValueError(
            f"inputs must name the columns of example, {tuple(example)}, got {tuple(inputs)}."
        )
