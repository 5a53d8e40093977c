"""Submodels: smaller networks cut out of a whole network, and the coordinates that they keep."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.trees import named_leaves

PyTree = Any


class Axis(NamedTuple):
    """An axis of a parameter that runs over units. Its length is outer x units x inner.

    Attributes:
      group: name of the units; all axes of a group lose the same units.
      outer: how often the sequence of all units is repeated, such as once for each position of a
        flattened image.
      inner: coordinates of a unit, such as those of an attention head.
    """

    group: str
    outer: int = 1
    inner: int = 1


# A parameter's name, such as `Dense_0/kernel` -> the units along each of its axes, None for an axis that
# stays whole. Parameters that are not named stay whole.
Units = Mapping[str, tuple[Axis | None, ...]]
Kept = Mapping[str, jax.Array | np.ndarray]  # group -> int32 [units kept]


class Count(NamedTuple):
    """How many units a group has in the whole network and in the smaller one."""

    whole: int
    kept: int


def chain_units(shapes: PyTree, layers: Sequence[str]) -> Units:
    """The units of a chain of layers, without the last: neurons of dense layers, convolutions' filters.

    Args:
      shapes: {layer: {'kernel': [..., inputs, outputs], 'bias': [outputs]}} of the whole network. After
        a convolution a dense layer's inputs are positions x filters.
      layers: the layers' names in the order of the chain.
    """
    units: dict[str, tuple[Axis | None, ...]] = {}
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        kernel = shapes[layer]["kernel"].shape
        inputs = None
        if before is not None:
            inputs = Axis(before, outer=kernel[-2] // shapes[before]["bias"].shape[0])
        outputs = Axis(layer) if layer != layers[-1] else None
        units[f"{layer}/kernel"] = (*[None] * (len(kernel) - 2), inputs, outputs)
        units[f"{layer}/bias"] = (outputs,)
    return units


def check_chain(shapes: PyTree, smaller: PyTree, layers: Sequence[str]) -> None:
    """Raises ValueError unless both are chains of these layers and the smaller one has no more units.

    Args:
      shapes, smaller: the whole network's parameters and the smaller one's, or their shapes.
      layers: the layers' names in the order of the chain.
    """
    for what, tree in (("model", shapes), ("submodel", smaller)):
        have = sorted(named_leaves(tree))
        need = sorted(f"{layer}/{part}" for layer in layers for part in ("kernel", "bias"))
        if have != need:
            odd = sorted(set(have) ^ set(need))[0]
            raise ValueError(
                f"{what} must be a chain of the layers {list(layers)}, each a kernel and a bias; "
                f"{odd!r} does not fit."
            )
    for first, second in itertools.pairwise(layers):
        if shapes[second]["kernel"].shape[-2] % _units_of(shapes, first):
            raise ValueError(f"model's {second!r} must follow {first!r}, but has other inputs.")
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        kernel, shape = shapes[layer]["kernel"].shape, smaller[layer]["kernel"].shape
        least, most = (1, kernel[-1]) if layer != layers[-1] else (kernel[-1], kernel[-1])
        if not least <= shape[-1] <= most:
            raise ValueError(
                f"submodel's {layer!r} must have {least} to {most} units, got {shape[-1]}."
            )
        inputs = kernel[-2]
        if before is not None:
            inputs = inputs // _units_of(shapes, before) * _units_of(smaller, before)
        if shape[:-1] != (*kernel[:-2], inputs):
            raise ValueError(
                f"submodel's {layer!r} must have a kernel of {[*kernel[:-2], inputs, shape[-1]]}, "
                f"got {list(shape)}."
            )


def counts_of(shapes: PyTree, smaller: PyTree, units: Units) -> dict[str, Count]:
    """How many units each group has.

    Args:
      shapes, smaller: the whole network's parameters and the smaller one's, or their shapes.
      units: of the whole network.

    Raises:
      ValueError: the smaller network is not the whole one with fewer units.
    """
    whole, small = named_leaves(shapes), named_leaves(smaller)
    if odd := sorted(whole.keys() ^ small.keys()):
        raise ValueError(f"submodel must have the model's parameters, but {odd[0]!r} does not fit.")
    if odd := sorted(units.keys() - whole.keys()):
        raise ValueError(f"units must be of the model's parameters, got {odd[0]!r}.")
    counts: dict[str, Count] = {}

    def fits(axis: Axis | None, size: int, smaller_size: int) -> bool:
        if axis is None:
            return size == smaller_size
        of_unit = axis.outer * axis.inner
        count = Count(size // of_unit, smaller_size // of_unit)
        if size % of_unit or smaller_size % of_unit or not 1 <= count.kept <= count.whole:
            return False
        return counts.setdefault(axis.group, count) == count

    for name, leaf in whole.items():
        axes, small_shape = units.get(name, (None,) * len(leaf.shape)), small[name].shape
        if not len(axes) == len(leaf.shape) == len(small_shape) or not all(
            map(fits, axes, leaf.shape, small_shape)
        ):
            raise ValueError(
                f"submodel's {name!r} must be the model's {list(leaf.shape)} with fewer units, "
                f"got {list(small_shape)}."
            )
    return counts


def places_of(kept: Kept, shapes: PyTree, units: Units) -> PyTree:
    """Places of the smaller network's coordinates in the whole one: a tree of indices for `jnp.ix_`."""

    def places(axis: Axis | None, size: int) -> jax.Array | np.ndarray:
        if axis is None:
            return np.arange(size)
        blocks = np.arange(axis.outer)[:, None, None] * (size // (axis.outer * axis.inner))
        indices = (blocks + kept[axis.group][:, None]) * axis.inner + np.arange(axis.inner)
        return indices.reshape(-1)

    def indices_of_leaf(name: str, leaf: Any) -> tuple[jax.Array | np.ndarray, ...]:
        axes = units.get(name, (None,) * len(leaf.shape))
        return tuple(map(places, axes, leaf.shape))

    indices_of = [indices_of_leaf(name, leaf) for name, leaf in named_leaves(shapes).items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), indices_of)


def gathered(params: PyTree, places: PyTree) -> PyTree:
    """The smaller network's parameters, taken from those of the whole network."""
    return jax.tree.map(lambda leaf, index: leaf[jnp.ix_(*index)], params, places)


def scattered(smaller: PyTree, places: PyTree, shapes: PyTree) -> PyTree:
    """The smaller network's parameters in their places in the whole network's, zeros elsewhere."""
    return jax.tree.map(
        lambda leaf, index, like: jnp.zeros(like.shape, leaf.dtype).at[jnp.ix_(*index)].set(leaf),
        smaller,
        places,
        shapes,
    )


def with_first_units(params: PyTree, first: Mapping[str, Any], units: Units) -> PyTree:
    """The parameters, with zeros for all units of a group but the first.

    With these parameters, the network computes the same as the smaller one that has only the first
    units.

    Args:
      params: of the whole network.
      first: group -> how many units stay; may be traced.
      units: of the whole network.
    """

    def kept(name: str, leaf: jax.Array) -> jax.Array:
        for place, axis in enumerate(units.get(name, ())):
            if axis is not None:
                size = leaf.shape[place]
                unit = np.arange(size) // axis.inner % (size // (axis.outer * axis.inner))
                shape = [size if other == place else 1 for other in range(leaf.ndim)]
                leaf = jnp.where((unit < first[axis.group]).reshape(shape), leaf, 0)
        return leaf

    leaves = [kept(name, leaf) for name, leaf in named_leaves(params).items()]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _units_of(shapes: PyTree, layer: str) -> int:
    return shapes[layer]["bias"].shape[0]
