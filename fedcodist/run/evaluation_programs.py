"""Programs that evaluate: shared models, personal models, and models on each client's own examples."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.batches import Preprocess
from fedcodist.core.for_each_client import for_each_client
from fedcodist.core.inputs import ClientData, Cohort
from fedcodist.core.method import (
    ClientModels,
    FederatedAlgorithm,
    PersonalModel,
    Predictor,
    by_member,
    single_model,
)
from fedcodist.core.trees import is_finite
from fedcodist.run.evaluation import EvaluationSplit, evaluate_client
from fedcodist.run.over_seeds import OverSeeds
from fedcodist.run.stacked import Stacked, stacked

PyTree = Any
_OfModels = dict[str, dict[str, jax.Array]]  # model -> metric -> value
_OfSplits = dict[str, _OfModels]
# (predictor, Variables, examples) -> metric -> value
_Measure = Callable[[Predictor, PyTree, EvaluationSplit], dict[str, jax.Array]]


def shared_models(
    algorithm: FederatedAlgorithm, over_seeds: OverSeeds, measure: _Measure
) -> Callable[..., Stacked]:
    """Returns `Programs.evaluate`."""
    predictors = algorithm.predictors

    def evaluate(state: PyTree, splits: Mapping[str, EvaluationSplit]) -> Stacked:
        def evaluate_group(
            names: list[str], variables: Mapping[str, PyTree], examples: EvaluationSplit
        ) -> _OfModels:
            """Evaluates models of one network by one program."""
            predictor = predictors[names[0]]

            def one_model(variables: PyTree) -> dict[str, jax.Array]:
                return measure(predictor, variables, examples)

            if len(names) == 1 and not predictor.members:
                return {names[0]: one_model(variables[names[0]])}
            of_all = variables[names[0]]
            if len(names) > 1:
                variables_of_models = [variables[name] for name in names]
                of_all = jax.tree.map(lambda *leaves: jnp.stack(leaves), *variables_of_models)
                predictor = predictor._replace(members=tuple(names))
            return by_member(names[0], predictor, jax.lax.map(one_model, of_all))

        def one_seed(state: PyTree) -> Stacked:
            variables = {n: predictor.variables(state) for n, predictor in predictors.items()}
            groups = _groups_of_one_network(predictors, variables)
            return stacked(
                {
                    split: {
                        model: values
                        for names in groups
                        for model, values in evaluate_group(names, variables, examples).items()
                    }
                    for split, examples in splits.items()
                }
            )

        return over_seeds(one_seed)(state)

    return evaluate


def finite_models(algorithm: FederatedAlgorithm, over_seeds: OverSeeds) -> Callable[..., Stacked]:
    """Returns `Programs.finite`."""

    def finite(state: PyTree) -> Stacked:
        def one_seed(state: PyTree) -> Stacked:
            by_model: dict[str, jax.Array] = {}
            for name, predictor in algorithm.predictors.items():
                over_members = jax.vmap(is_finite) if predictor.members else is_finite
                by_model |= by_member(name, predictor, over_members(predictor.variables(state)))
            return stacked(by_model)

        return over_seeds(one_seed)(state)

    return finite


def personal_models(
    algorithm: FederatedAlgorithm, over_seeds: OverSeeds, measure: _Measure
) -> Callable[..., _OfSplits]:
    """Returns `Programs.evaluate_personal`."""

    def evaluate_personal(
        state: PyTree,
        client_states: Mapping[str, PyTree],
        places: Mapping[str, jax.Array],
        splits: Mapping[str, EvaluationSplit],
    ) -> _OfSplits:
        def all_clients(
            state: PyTree,
            client_states: PyTree,
            personal: PersonalModel,
            places: jax.Array,
            examples: EvaluationSplit,
        ) -> dict[str, jax.Array]:
            predictor = single_model(
                personal.model, lambda client_state: personal.variables(state, client_state)
            )

            def one_client(place: jax.Array) -> dict[str, jax.Array]:
                client_state = jax.tree.map(lambda leaf: leaf[place], client_states)
                return measure(predictor, predictor.variables(client_state), examples)

            return jax.lax.map(one_client, places)

        def one_seed(state: PyTree, client_states: Mapping[str, PyTree]) -> _OfSplits:
            return {
                split: {
                    name: all_clients(state, states_of_pool, personal, places[pool], examples)
                    for pool, states_of_pool in client_states.items()
                    for name, personal in algorithm.personal_models[pool].items()
                }
                for split, examples in splits.items()
            }

        return over_seeds(one_seed)(state, client_states)

    return evaluate_personal


def models_on_clients(
    models: ClientModels,
    group: str,
    over_seeds: OverSeeds,
    batch_size: int,
    preprocess: Preprocess,
    axis_name: str | None,
) -> Callable[..., Any]:
    """Returns `Programs.evaluate_clients` of one pool or architecture."""

    def evaluate_clients(
        state: PyTree,
        client_states: PyTree,
        places: jax.Array,
        seeds: jax.Array,
        hyper: PyTree,
        tested: Cohort,
        trained: Cohort | None,
    ) -> _OfModels:
        def one_seed(state: PyTree, client_states: PyTree, seed: jax.Array) -> PyTree:
            stored = client_states
            if models.client_states is not None:
                stored = models.client_states(state)
            chosen = jax.tree.map(lambda leaf: leaf[places], stored)
            slots = (chosen, *((trained.starts, trained.sizes) if trained is not None else ()))

            def measured(_: PyTree, slot: PyTree, data: ClientData, key: jax.Array) -> ClientResult:
                client_state, *rows = slot
                variables = models.variables(state, client_state)
                if trained is not None and models.fine_tuned is not None:
                    start, size = rows
                    own = ClientData(trained.columns, start, size, size, trained.capacity, False)
                    variables |= models.fine_tuned(state, client_state, own, key, hyper)
                metrics: Any = {
                    name: evaluate_client(
                        models.predictors[name], values, data, batch_size, preprocess
                    )
                    for name, values in variables.items()
                }
                return ClientResult((), {}, jnp.ones(()), (), metrics)

            key = keys.derive(jax.random.key(seed), "evaluate_clients", group)
            nothing = lambda result, key: ()
            return for_each_client(
                measured, nothing, (), slots, tested, key, axis_name=axis_name
            ).metrics

        return over_seeds(one_seed)(state, client_states, seeds)

    return evaluate_clients


def _groups_of_one_network(
    predictors: Mapping[str, Predictor], variables: Mapping[str, PyTree]
) -> list[list[str]]:
    """The predictors' names, grouped by predictors that differ only in the values of their variables."""
    groups: list[list[str]] = []
    for name, predictor in predictors.items():
        for names in groups:
            first = names[0]
            other = predictors[first]
            if (
                predictor.predict == other.predict
                and predictor.model is other.model
                and not (predictor.members or other.members)
                and _shapes(variables[name]) == _shapes(variables[first])
            ):
                names.append(name)
                break
        else:
            groups.append([name])
    return groups


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
