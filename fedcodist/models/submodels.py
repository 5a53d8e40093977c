"""Smaller networks cut out of a whole one: which of its numbers a network of fewer units has."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.trees import named_leaves

PyTree = Any


class Axis(NamedTuple):
    """An axis that runs over units, outer x units x inner numbers long.

    Attributes:
      group: name of the units; all axes of a group lose the same ones.
      outer: how often all units come one after another, such as once for each position of an image
        that became a vector.
      inner: numbers that a unit has, such as an attention head.
    """

    group: str
    outer: int = 1
    inner: int = 1


# A parameter's name, such as `Dense_0/kernel`, -> what each of its axes runs over, None for an axis that
# stays whole. Parameters that are not named stay whole.
Units = Mapping[str, tuple[Axis | None, ...]]
Kept = Mapping[str, jax.Array | np.ndarray]  # group -> int32 [units kept], ascending


class Count(NamedTuple):
    """How many units a group has in the whole network and in the smaller one."""

    whole: int
    kept: int


def chain_units(shapes: PyTree, layers: Sequence[str]) -> Units:
    """The units of a chain of layers but the last: a dense layer's neurons, a convolution's filters.

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
    """Raises one line unless both are chains of these layers, the smaller one of no more units.

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
                f"{what} must be a chain of layers, each a kernel and a bias; {odd!r} does not fit."
            )
    for first, second in itertools.pairwise(layers):
        if shapes[second]["kernel"].shape[-2] % _units_of(shapes, first):
            raise ValueError(f"model's {second!r} must follow {first!r}, but has other inputs.")
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        kernel, own = shapes[layer]["kernel"].shape, smaller[layer]["kernel"].shape
        least, most = (1, kernel[-1]) if layer != layers[-1] else (kernel[-1], kernel[-1])
        if not least <= own[-1] <= most:
            raise ValueError(
                f"submodel's {layer!r} must have {least} to {most} units, got {own[-1]}."
            )
        inputs = kernel[-2]
        if before is not None:
            inputs = inputs // _units_of(shapes, before) * _units_of(smaller, before)
        if own[:-1] != (*kernel[:-2], inputs):
            raise ValueError(
                f"submodel's {layer!r} must have a kernel of {[*kernel[:-2], inputs, own[-1]]}, "
                f"got {list(own)}."
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
    found: dict[str, Count] = {}

    def fits(axis, size, own):
        if axis is None:
            return size == own
        of_unit = axis.outer * axis.inner
        count = Count(size // of_unit, own // of_unit)
        if size % of_unit or own % of_unit or not 1 <= count.kept <= count.whole:
            return False
        return found.setdefault(axis.group, count) == count

    for name, leaf in whole.items():
        axes, own = units.get(name, (None,) * len(leaf.shape)), small[name].shape
        if not len(axes) == len(leaf.shape) == len(own) or not all(
            map(fits, axes, leaf.shape, own)
        ):
            raise ValueError(
                f"submodel's {name!r} must be the model's {list(leaf.shape)} with fewer units, "
                f"got {list(own)}."
            )
    return found


def places_of(kept: Kept, shapes: PyTree, units: Units) -> PyTree:
    """Where the smaller network's numbers are in the whole one: a tree of indices for `jnp.ix_`."""

    def places(axis, size):
        if axis is None:
            return np.arange(size)
        blocks = np.arange(axis.outer)[:, None, None] * (size // (axis.outer * axis.inner))
        own = (blocks + kept[axis.group][:, None]) * axis.inner + np.arange(axis.inner)
        return own.reshape(-1)

    def of_one(name, leaf):
        axes = units.get(name, (None,) * len(leaf.shape))
        return tuple(map(places, axes, leaf.shape))

    each = [of_one(name, leaf) for name, leaf in named_leaves(shapes).items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), each)


def gathered(params: PyTree, places: PyTree) -> PyTree:
    """The smaller network's parameters."""
    return jax.tree.map(lambda leaf, at: leaf[jnp.ix_(*at)], params, places)


def scattered(smaller: PyTree, places: PyTree, shapes: PyTree) -> PyTree:
    """A tree like the whole network's parameters with the smaller one's in their places, else 0."""
    return jax.tree.map(
        lambda leaf, at, like: jnp.zeros(like.shape, leaf.dtype).at[jnp.ix_(*at)].set(leaf),
        smaller,
        places,
        shapes,
    )


def _units_of(shapes: PyTree, layer: str) -> int:
    return shapes[layer]["bias"].shape[0]
