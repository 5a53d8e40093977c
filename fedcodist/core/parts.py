"""Splits a tree by its leaves' names into the chosen leaves and the rest, and joins them again.

A part has the tree's structure with None in place of the leaves that are not in it. None holds no
array, so a part takes the memory and the bytes of its own leaves alone.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from fedcodist.core.checks import shown
from fedcodist.core.model import Variables
from fedcodist.core.trees import named_leaves

PyTree = Any
# A pattern, several of them, or (path, such as 'Dense_0/kernel') -> whether the leaf is chosen.
Chosen = str | Sequence[str] | Callable[[str], bool]


def choice_of(argument: str, chosen: Chosen, variables: Variables) -> Callable[[str], bool]:
    """Makes a function (path of a leaf) -> whether the leaf is chosen.

    A pattern chooses the leaves in whose path it matches one name, or several names that follow each
    other: 'head' chooses `head/kernel`, '*Norm*' the scale in `backbone/BatchNorm_0/scale`, and
    'Dense_1/bias' that bias. `*`, `?` and `[...]` work as in file names. Case matters.

    Args:
      argument: the name of the argument `chosen`, for messages.
      chosen: patterns, or a function.
      variables: a model's, arrays or shapes. Paths in Flax linen's mutable state begin with its
        collection, such as `batch_stats/BatchNorm_0/mean`.

    Raises:
      TypeError, ValueError: names the argument, if it is neither patterns nor a function, or if a
        pattern matches nothing.
    """
    if callable(chosen):
        return chosen
    patterns = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"{argument} must be patterns of layers' names or a function of a path, got "
            f"{shown(chosen)}."
        )
    paths = [*named_leaves(variables.params), *named_leaves(variables.mutable)]
    for pattern in patterns:
        if not any(_matches(pattern, path) for path in paths):
            names = sorted({path.rpartition("/")[0] or path for path in paths})
            raise ValueError(
                f"{argument} must be patterns of names in the model, {pattern!r} matches none of "
                f"{shown(names, 300)}."
            )
    return lambda path: any(_matches(pattern, path) for pattern in patterns)


def part(tree: PyTree, is_chosen: Callable[[str], bool]) -> PyTree:
    """The chosen leaves of a tree."""
    return jax.tree.map(lambda leaf, flag: leaf if flag else None, tree, flags(tree, is_chosen))


def rest(tree: PyTree, is_chosen: Callable[[str], bool]) -> PyTree:
    """The leaves of a tree that are not chosen."""
    return part(tree, lambda path: not is_chosen(path))


def joined(first: PyTree, second: PyTree) -> PyTree:
    """The leaves of the first part, and of the second one where the first has none."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        first,
        second,
        is_leaf=lambda node: node is None,
    )


def flags(tree: PyTree, is_chosen: Callable[[str], bool]) -> PyTree:
    """Whether each leaf is chosen, a tree of bools."""
    chosen = [bool(is_chosen(path)) for path in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), chosen)


def _matches(pattern: str, path: str) -> bool:
    names = path.split("/")
    runs = (
        "/".join(names[start:end])
        for start in range(len(names))
        for end in range(start + 1, len(names) + 1)
    )
    return any(fnmatchcase(run, pattern) for run in runs)
