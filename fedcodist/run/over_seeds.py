"""A function of one seed as a function of several seeds, on a further leading axis."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

PyTree = Any
OverSeeds = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


def map_seeds(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Seeds one after another, inside the program."""
    return lambda *arguments: jax.lax.map(lambda of_seed: function(*of_seed), arguments)


OVER_SEEDS: Mapping[str, OverSeeds] = {"map": map_seeds, "vmap": jax.vmap}
