"""Trained models as safetensors files, readable without this library."""

import os
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedcodist.core import keys
from fedcodist.core.checks import shown
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Variables
from fedcodist.core.tensor_files import load_tensors, save_tensors


def save_model(
    path: str | os.PathLike[str], variables: Variables, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes parameters and mutable state to one safetensors file.

    Tensors are named by their path, such as `params/Dense_0/kernel` and
    `mutable/batch_stats/BatchNorm_0/mean`. A slash inside a name, as in Haiku's `mlp/~/linear_0`, is
    written as `%2F`, and an integer, as in NNX's lists of layers, as `[0]`.

    Args:
      path: the file.
      variables: nested dictionaries of arrays.
      metadata: strings kept in the file's header.

    Raises:
      TypeError: `variables` are not Variables.
      OSError: the file cannot be written; an existing file stays unchanged.
    """
    if not (hasattr(variables, "params") and hasattr(variables, "mutable")):
        raise TypeError(
            f"variables must be Variables, of params and mutable, got {shown(variables)}."
        )
    if not (folder := Path(path).parent).is_dir():
        raise FileNotFoundError(f"there is no folder {folder} to write {Path(path).name} to.")
    tensors = {
        "/".join((part, *map(_written, keys))) if keys else f"{part}/{_ALONE}": np.asarray(
            leaf, order="C"
        )
        for part, tree in zip(("params", "mutable"), variables, strict=True)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    save_tensors(path, tensors, metadata or {})


def save_models(
    folder: Path, variables: Mapping[str, Variables], models: Iterable[str], first_seed: int
) -> None:
    """Writes `<model>_seed<n>.safetensors` for every model and seed.

    Args:
      folder: where to write; made where it is missing.
      variables: model -> Variables, leaves [seeds, ...].
      models: names of the models to write, such as those of `single_models`.
      first_seed: the first seed's number.

    Raises:
      OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        of_all_seeds = variables[model]
        for index in range(len(jax.tree.leaves(of_all_seeds)[0])):
            path = folder / f"{model}_seed{first_seed + index}.safetensors"
            save_model(path, jax.tree.map(lambda leaf, i=index: leaf[i], of_all_seeds))


def single_models(algorithm: FederatedAlgorithm, variables: Mapping[str, Variables]) -> list[str]:
    """Names of the models that are no ensembles, in the order of `variables`.

    Args:
      algorithm: that trained them.
      variables: model -> Variables, leaves [seeds, ...].
    """
    predictor_of = {
        name: predictor
        for group, predictor in algorithm.predictors.items()
        for name in predictor.members or (group,)
    }

    def is_single(name: str) -> bool:
        network = jax.eval_shape(predictor_of[name].model.init, keys.key_shape())
        # An ensemble's leaves have a further axis, of its members, or there are more leaves.
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(variables[name])]
        return shapes == [leaf.shape for leaf in jax.tree.leaves(network)]

    # A client's model may have more parts than its network, such as FedMRL's.
    return [name for name in variables if name in algorithm.communication or is_single(name)]


def load_model(path: str | os.PathLike[str]) -> Variables:
    """Reads a file of `save_model`, as nested dictionaries of NumPy arrays.

    Raises:
      ValueError: the file is truncated or no safetensors file, or was not written by `save_model`.
    """
    try:
        tensors = load_tensors(path)
    except ValueError as error:
        raise ValueError(f"cannot read a model from {os.fspath(path)}: {error}.") from error
    trees: dict[str, Any] = {"params": {}, "mutable": {}}
    for name, tensor in tensors.items():
        part, *keys = (_read(key) for key in name.split("/"))
        if part not in trees or not keys:
            raise ValueError(f"{os.fspath(path)} holds {name!r}, which is no model of fedcodist.")
        branch = trees[part]
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = tensor
    alone = lambda tree: tree[_ALONE] if isinstance(tree, dict) and _ALONE in tree else tree
    return Variables(alone(trees["params"]), alone(trees["mutable"]))


# In place of a key, where a tree is one array. No key is written so.
_ALONE = "[]"
# Characters that would end a name, or start an integer, are percent-encoded, as in web addresses.
_ESCAPES = {"%": "%25", "/": "%2F", "[": "%5B"}


def _written(step: Any) -> str:
    """A key of a dictionary, a field of a named tuple, or [place] in a list."""
    key = next(getattr(step, name) for name in ("key", "name", "idx") if hasattr(step, name))
    if isinstance(key, int):
        return f"[{key}]"
    return "".join(_ESCAPES.get(character, character) for character in key)


def _read(text: str) -> str | int:
    if text == _ALONE:
        return text
    return int(text[1:-1]) if text.startswith("[") else urllib.parse.unquote(text)
