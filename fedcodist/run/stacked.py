"""Many small results of a program as a few arrays.

A thousand parties have thousands of metrics. A loop carries one array much faster than thousands, and a
result of its own for each of them would take most of the time that the program needs to compile.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["places", "structure"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class Stacked(Mapping[str, PyTree]):
    """A dictionary of results whose leaves of one shape and type are stacked along the last axis.

    As a pytree it has the few arrays. There may be axes before the results' own, such as one of seeds.
    As a mapping it is the dictionary itself.

    Attributes:
      arrays: [..., leaves of one kind].
      places: of each leaf, in the order of `structure`: which array, and which place in it.
      structure: the dictionary's.
    """

    arrays: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    structure: jax.tree_util.PyTreeDef

    @functools.cached_property
    def unstacked(self) -> dict[str, PyTree]:
        """The dictionary."""
        leaves = [self.arrays[kind][..., place] for kind, place in self.places]
        return jax.tree.unflatten(self.structure, leaves)

    def __getitem__(self, name: str) -> PyTree:
        return self.unstacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.unstacked)

    def __len__(self) -> int:
        return len(self.unstacked)


def stacked(results: Mapping[str, PyTree]) -> Stacked:
    """The results, a dictionary of arrays or of further dictionaries, as few arrays."""
    leaves, structure = jax.tree.flatten(dict(results))
    kinds: dict[Any, list[jax.Array]] = {}
    places = []
    for leaf in map(jnp.asarray, leaves):
        alike = kinds.setdefault((leaf.shape, leaf.dtype), [])
        places.append((list(kinds).index((leaf.shape, leaf.dtype)), len(alike)))
        alike.append(leaf)
    arrays = tuple(jnp.stack(alike, axis=-1) for alike in kinds.values())
    return Stacked(arrays, tuple(places), structure)
