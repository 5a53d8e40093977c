"""Checks of an experiment's settings, before anything compiles."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedcodist.core.checks import check_integer, check_names, check_several, check_text, shown
from fedcodist.core.restart import restarted
from fedcodist.core.shape_checks import check_same
from fedcodist.core.tracing import strongly_typed
from fedcodist.core.user_functions import traced
from fedcodist.run.algorithm_checks import check_algorithm
from fedcodist.run.client_splits import check_client_splits
from fedcodist.run.data_checks import check_data
from fedcodist.run.described_code import described
from fedcodist.run.identity import described_algorithm, first_difference, is_same_algorithm
from fedcodist.run.metrics_lines import TRAINING
from fedcodist.run.model_checks import check_models
from fedcodist.run.privacy_spent import check_privacy
from fedcodist.run.programs import MadeOf
from fedcodist.run.selection_checks import check_selected, check_selection

PyTree = Any


def check_settings(experiment: Any) -> int:
    """Raises ValueError or TypeError that names the setting or function which is not allowed.

    Args:
      experiment: an Experiment whose splits are FederatedData and ClientSplits.

    Returns:
      Rounds between checkpoints.
    """
    for name in ("rounds", "evaluate_every", "seeds", "evaluation_batch_size", "evaluate_clients"):
        check_integer(name, getattr(experiment, name), low=1)
    most = experiment.algorithm.num_rounds
    if most is not None and experiment.rounds > most:
        raise ValueError(
            f"rounds must be at most the num_rounds={most} for which {experiment.algorithm.name} was "
            f"made, got {experiment.rounds}."
        )
    check_integer("seed", experiment.seed, low=0)
    if experiment.seed + experiment.seeds > 2**31:
        raise ValueError(
            f"seed must leave all seeds below 2**31, got {experiment.seed} and {experiment.seeds} seeds."
        )
    check_several("evaluate_also", experiment.evaluate_also)
    for round in experiment.evaluate_also:
        check_integer("evaluate_also", round, low=0)
        if round > experiment.rounds:
            raise ValueError(
                f"evaluate_also must be rounds up to rounds={experiment.rounds}, got {round}."
            )
    check_text("seeds_loop", experiment.seeds_loop)
    if experiment.seeds_loop not in ("map", "vmap"):
        raise ValueError(f"seeds_loop must be 'map' or 'vmap', got {experiment.seeds_loop!r}.")
    if experiment.algorithm.num_clients > experiment.data.num_clients:
        raise ValueError(
            f"pools name client {experiment.algorithm.num_clients - 1}, but the data has clients "
            f"0 to {experiment.data.num_clients - 1}."
        )
    check_selection(experiment.algorithm, experiment.data)
    check_selected(experiment.algorithm, experiment.data, experiment.rounds, experiment.seed)
    for name, count in experiment.algorithm.data_set_sizes.items():
        lengths = {len(column) for column in experiment.data.data_sets[name].values()}
        if lengths != {count}:
            raise ValueError(
                f"data set {name!r} must have the {count} examples for which "
                f"{experiment.algorithm.name} was made, it has "
                f"{', '.join(map(str, sorted(lengths))) or 'none'}."
            )
    _check_splits(experiment)
    # Clients may be evaluated on their own examples alone.
    if not (experiment.splits or experiment.client_splits or experiment.final_client_splits):
        raise ValueError("splits must name at least one split to evaluate, got none.")
    if both := sorted(set(experiment.splits) & set(experiment.final_splits)):
        raise ValueError(f"final_splits must not name a split that splits has, got {both[0]!r}.")
    check_client_splits(experiment)
    check_privacy(experiment)
    every = experiment.evaluate_every
    if experiment.checkpoint_every is not None:
        every = experiment.checkpoint_every
        check_integer("checkpoint_every", every, low=1)
    if every % experiment.evaluate_every:
        raise ValueError(
            f"checkpoint_every must be a multiple of evaluate_every={experiment.evaluate_every}, "
            f"got {every}."
        )
    padded, input_types = check_algorithm(experiment.algorithm, experiment.data)
    check_models(experiment, padded, input_types)
    check_data(experiment)
    return every


def checked_start(experiment: Any) -> PyTree:
    """`start` as a state of the algorithm, [seeds, ...], whatever named tuples hold its leaves.

    Raises:
      ValueError: it has not the leaves of the algorithm's state, for every seed.
      TypeError: `restart` or `without_clients` makes another state of it.
    """
    algorithm = experiment.algorithm
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), experiment.seeds))
    state = jax.eval_shape(jax.vmap(lambda key: strongly_typed(algorithm.init(key))), keys)
    needed, actual = _leaves(state), _leaves(experiment.start)
    for path in [*needed, *actual]:
        if actual.get(path) != needed.get(path):
            raise ValueError(
                f"start must be a state of this algorithm, [seeds, ...]: at {path} it has "
                f"{actual.get(path, 'nothing')} in place of {needed.get(path, 'nothing')}."
            )
    leaf_at = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(experiment.start)
    }
    start = jax.tree.unflatten(jax.tree.structure(state), [leaf_at[path] for path in needed])
    restart = lambda state: strongly_typed(restarted(algorithm, state))
    check_same(
        "algorithm.restart and without_clients must return a state as algorithm.init makes it",
        state,
        traced("algorithm.restart", restart, state),
    )
    return start


def check_programs(theirs: MadeOf, needed: MadeOf) -> None:
    """Raises ValueError, one line, unless programs made of `theirs` compute what is needed."""
    if theirs.interval < needed.interval:
        raise ValueError(
            f"programs were made for at most {theirs.interval} rounds between evaluations, this run has "
            f"{needed.interval}."
        )
    settings = ("seeds_loop", "evaluation_batch_size", "hyper_per_seed")
    there, here = ({name: getattr(of, name) for name in settings} for of in (theirs, needed))
    name = "evaluation_preprocess"
    if theirs.evaluation_preprocess is not needed.evaluation_preprocess:
        there |= described(name, theirs.evaluation_preprocess)
        here |= described(name, needed.evaluation_preprocess)
    if not is_same_algorithm(theirs.algorithm, needed.algorithm):
        for values, of in ((there, theirs), (here, needed)):
            described_parts, execution = described_algorithm(of.algorithm)
            # Programs get the floats as an argument, whatever the methods hold that they are made of.
            values["algorithm"] = {
                path: part for path, part in described_parts.items() if ".hyper." not in path
            }
            values |= execution
    if difference := first_difference(there, here):
        raise ValueError(
            "programs must be made by experiment_programs of an experiment with the same algorithm and "
            f"evaluation: {difference}."
        )


def _leaves(tree: PyTree) -> dict[str, str]:
    """Path -> dtype and shape of each leaf, as JAX would hold it."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        dtype = array.dtype
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        found[jax.tree_util.keystr(path)] = f"{dtype}{list(array.shape)}"
    return found


def check_storable(name: str, value: Any) -> None:
    """Raises ValueError or TypeError that names the argument unless JSON can hold the mapping."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping by name, got {shown(value)}.")
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{name} must be finite numbers, text, True, False, None, or lists and dictionaries of "
            f"these: {error}."
        ) from None


def _check_splits(experiment: Any) -> None:
    """Raises ValueError for a name that metrics lines do not allow, or a split without examples."""
    for argument in ("splits", "final_splits", "client_splits", "final_client_splits"):
        names = getattr(experiment, argument)
        check_names(argument, names)
        if TRAINING in names:
            raise ValueError(
                f"{argument} must have other names than {TRAINING!r}, which is in the metrics lines of "
                "training."
            )
    for argument in ("splits", "final_splits"):
        for name, data in getattr(experiment, argument).items():
            if not data.num_examples:
                raise ValueError(
                    f"{argument}[{name!r}] must have an example to evaluate, it has none."
                )
