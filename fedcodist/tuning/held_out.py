"""A config's experiment for tuning, on held-out examples, and the floats that its trials change."""

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.config_errors import as_settings
from fedcodist.config.data import load_data
from fedcodist.config.division import divided
from fedcodist.config.experiment import build_experiment
from fedcodist.core import keys
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.run.described_code import described
from fedcodist.run.experiment import Experiment, check_experiment
from fedcodist.tuning import search_space

PyTree = Any
HyperOf = Callable[[ConfigDict], PyTree]  # a trial's config -> its algorithm's traced floats
# A trial's value is measured on the first of these splits that the data have.
_HELD_OUT = ("held_out", "validation")


def held_out_experiment(config: ConfigDict) -> tuple[Experiment, HyperOf]:
    """The config's experiment, evaluated on held-out examples only, and a function of a trial's config.

    Returns:
      (Experiment, hyper_of). `hyper_of` maps a trial's config to its algorithm's traced floats. It
      raises ValueError if the trial would also start from another state. The data are loaded once for
      all trials.
    """
    for group in ("phases", "callbacks"):
        if config.get(group):
            raise ValueError(f"{group} must be None for tuning, which only runs the rounds.")
    with as_settings(config):
        config = divided(copy.deepcopy(config))
        data = load_data(config.data)
    split = next((name for name in _HELD_OUT if name in data.splits), None)
    if split is None:
        raise ValueError(
            f"data.name must be of data with a split {' or '.join(map(repr, _HELD_OUT))}, on which "
            f"tuning compares trials, got {config.data.name!r} with {sorted(data.splits)}."
        )
    with config.unlocked(), config.ignore_type():
        config.evaluation.update(splits=(split,), final_splits=())
        config.evaluation.update(client_splits=(), final_client_splits=())
    with as_settings(config):
        experiment = build_experiment(config, data)
        check_experiment(experiment)
    for name, predictor in experiment.algorithm.predictors.items():
        if "accuracy" not in predictor.model.metrics:
            raise ValueError(
                f"tuning needs models with the metric 'accuracy', model {name!r} has "
                f"{list(predictor.model.metrics)}."
            )

    shared = _without_hyper(experiment.algorithm)

    def hyper_of(trial: ConfigDict) -> PyTree:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown once already
            algorithm = build_algorithm(trial, data)
        if _without_hyper(algorithm) != shared:
            raise ValueError(
                "a tuned setting must only change floats of the method's hyper, got one that changes "
                "what init, init_client_state or a model's `variables` makes, which all trials share."
            )
        return algorithm.hyper

    return experiment, hyper_of


def _without_hyper(algorithm: FederatedAlgorithm) -> tuple[str, Mapping[str, Any]]:
    """The functions that do not get `hyper`, as a traced program and its constants.

    They make the first states of the server and of clients, and the models that are evaluated.
    """

    def states_and_models(key: jax.Array) -> PyTree:
        state = algorithm.init(key)
        first = {pool: states.first for pool, states in algorithm.client_states.items()}
        shared = [predictor.variables(state) for predictor in algorithm.predictors.values()]
        personal = [
            model.variables(state, first[pool])
            for pool, models in algorithm.personal_models.items()
            for model in models.values()
        ]
        return state, first, shared, personal

    traced = jax.make_jaxpr(states_and_models)(keys.key_shape())
    # Programs of functions with a derivative of their own have addresses of functions.
    text = re.sub("0x[0-9a-f]+", "", str(traced.jaxpr))
    return text, described("constants", traced.consts)


def held_out_accuracy(records: Sequence[Mapping[str, Any]]) -> float:
    """Mean over models and seeds of one evaluation's accuracies on held-out examples.

    NaN where one of them is undefined.
    """
    accuracies = [record["accuracy"] for record in records if record["split"] in _HELD_OUT]
    return math.nan if None in accuracies else sum(accuracies) / len(accuracies)


def trial_space(config: ConfigDict, hyper_of: HyperOf) -> search_space.Space:
    """The config's search space, as far as it changes what a compiled program takes.

    Raises:
      ValueError: see search_space.search_space and search_space.checked_space.
    """

    def traced(trial: ConfigDict) -> tuple[Any, list[float]]:
        leaves, structure = jax.tree.flatten(hyper_of(trial))
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        return (structure, shapes), [float(x) for leaf in leaves for x in np.ravel(leaf)]

    return search_space.checked_space(config, search_space.search_space(config), traced)
