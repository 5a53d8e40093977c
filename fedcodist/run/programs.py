"""The compiled programs of an experiment: initialise, train many rounds, evaluate.

A whole round, with sampling and reading, runs inside one `shard_map` over the mesh axis `clients`.
Arguments and results are replicated, except the examples of streamed cohorts: every device has only
those of its own clients. On one device there is no mesh.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.batches import Preprocess
from fedcodist.core.client_states import gather, scatter
from fedcodist.core.for_each_client import for_each_client
from fedcodist.core.inputs import ClientData, Cohort, Inputs, Round
from fedcodist.core.method import (
    ClientModels,
    FederatedAlgorithm,
    PersonalModel,
    Predictor,
    all_client_models,
    by_member,
    single_model,
)
from fedcodist.core.tracing import strongly_typed, traced_once
from fedcodist.core.trees import is_finite
from fedcodist.run.evaluation import EvaluationSplit, evaluate_client
from fedcodist.run.evaluation import evaluate as evaluate_predictor
from fedcodist.run.placement import AXIS, SHARDED
from fedcodist.run.sources import ResidentData
from fedcodist.run.stacked import Stacked, stacked

PyTree = Any
# a function of one seed -> a function of all seeds, on a further leading axis
_OverSeeds = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
# (state, client states, metrics)
_AfterRounds = tuple[PyTree, PyTree, Mapping[str, jax.Array]]
_OfModels = dict[str, dict[str, jax.Array]]  # model -> metric -> value
_OfSplits = dict[str, _OfModels]
# (predictor, Variables, examples) -> metric -> value
_Measure = Callable[[Predictor, PyTree, EvaluationSplit], dict[str, jax.Array]]


class MadeOf(NamedTuple):
    """What programs were made of: the arguments of `build_programs`."""

    algorithm: FederatedAlgorithm
    interval: int
    seeds_loop: str
    evaluation_batch_size: int
    evaluation_preprocess: Preprocess
    hyper_per_seed: bool


class Programs(NamedTuple):
    """Jitted functions. States, metrics and inputs have a leading axis of S seeds.

    Metrics are `Stacked`, which is a mapping from their names.

    Attributes:
      init: seeds uint32 [S] -> state.
      train: (state, states of all clients, seeds, first round, number of rounds, hyper, ResidentData)
        -> (state, client_states, history). `history` is metric -> [S, interval], whose first
        `number of rounds` entries are filled. One compilation serves any number of rounds up to the
        interval. Both states are donated.
      train_streamed: (state, states of the cohorts, seeds, round, hyper, Inputs [S, ...]) -> (state,
        client_states, history) of one round of streamed inputs, placed by `place_inputs`.
      select: (seed, round) -> Selection.
      evaluate: (state, split -> EvaluationSplit) -> split -> model -> metric -> [S, ...].
      finite: state -> model -> bool [S], whether all of the model's parameters are finite.
      evaluate_personal: (state, pool -> client states [S, n, ...], pool -> int32 [clients], indices of
        those to evaluate, split -> EvaluationSplit) -> split -> personal model -> metric ->
        [S, clients, ...]. Clients are evaluated one after another.
      evaluate_clients: pool or architecture -> (state, client states [S, n, ...], int32 [clients] each
        client's place among them, seeds, hyper, test Cohort, training Cohort or None) -> model ->
        metric -> [S, clients]. With a training Cohort fine-tuned models are measured too.
      made_of: tells whether they fit an experiment.
    """

    init: Callable[..., Any]
    train: Callable[..., Any]
    train_streamed: Callable[..., Any]
    select: Callable[..., Any]
    evaluate: Callable[..., Any]
    finite: Callable[..., Any]
    evaluate_personal: Callable[..., Any]
    evaluate_clients: Mapping[str, Callable[..., Any]]
    made_of: MadeOf


def build_programs(
    algorithm: FederatedAlgorithm,
    interval: int,
    mesh: Mesh | None = None,
    seeds_loop: str = "map",
    evaluation_batch_size: int = 500,
    evaluation_preprocess: Preprocess = lambda batch, key, positions: batch,
    hyper_per_seed: bool = False,
) -> Programs:
    """Builds the programs; nothing compiles before the first call.

    Args:
      algorithm: what to run.
      interval: the largest number of rounds of one call of `train`.
      mesh: devices that share clients, distillation batches and evaluation.
      seeds_loop: 'map' trains seeds one after another inside the program, 'vmap' at once.
      evaluation_batch_size: examples per device and step in evaluation.
      evaluation_preprocess: (batch, key, positions) -> batch, on the device; must not be random.
      hyper_per_seed: whether `train` takes leaves of `hyper` with a leading axis [S]. A tuner then
        trains several trials at once, each with its own settings.
    """
    axis = None if mesh is None else AXIS
    loops: dict[str, _OverSeeds] = {"map": _map_seeds, "vmap": jax.vmap}
    over_seeds = loops[seeds_loop]

    def init(seeds: jax.Array) -> PyTree:
        return over_seeds(lambda seed: strongly_typed(algorithm.init(jax.random.key(seed))))(seeds)

    measure = functools.partial(
        evaluate_predictor,
        batch_size=evaluation_batch_size,
        preprocess=evaluation_preprocess,
        axis_name=axis,
    )

    def compiled(
        function: Callable[..., Any],
        specs: Callable[..., Any] = lambda *arguments: PartitionSpec(),
        **options: Any,
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def dealt(*arguments: PyTree) -> PyTree:
            return jax.shard_map(
                function,
                mesh=mesh,
                in_specs=specs(*arguments),
                out_specs=PartitionSpec(),
                check_vma=False,
            )(*arguments)

        return jax.jit(function if mesh is None else dealt, **options)

    return Programs(
        # `init` runs once and is fast. With less optimisation it compiles in half the time, and its
        # results have the same bits.
        init=compiled(init, compiler_options={"xla_backend_optimization_level": 1}),
        train=compiled(
            _training(algorithm, interval, over_seeds, axis, hyper_per_seed), donate_argnums=(0, 1)
        ),
        train_streamed=compiled(
            _streamed_training(algorithm, over_seeds, axis), _streamed_specs, donate_argnums=(0, 1)
        ),
        select=jax.jit(lambda seed, round: algorithm.select(round, jax.random.key(seed))),
        evaluate=compiled(_evaluation(algorithm, over_seeds, measure)),
        finite=compiled(_finite_check(algorithm, over_seeds)),
        evaluate_personal=compiled(_personal_evaluation(algorithm, over_seeds, measure)),
        evaluate_clients={
            group: compiled(
                _evaluation_on_clients(
                    models,
                    group,
                    over_seeds,
                    evaluation_batch_size,
                    evaluation_preprocess,
                    axis,
                )
            )
            for group, models in all_client_models(algorithm).items()
        },
        made_of=MadeOf(
            algorithm,
            interval,
            seeds_loop,
            evaluation_batch_size,
            evaluation_preprocess,
            hyper_per_seed,
        ),
    )


def _training(
    algorithm: FederatedAlgorithm,
    interval: int,
    over_seeds: _OverSeeds,
    axis: str | None,
    hyper_per_seed: bool,
) -> Callable[..., _AfterRounds]:
    """Returns `Programs.train`."""

    def train(
        state: PyTree,
        client_states: PyTree,
        seeds: jax.Array,
        first: jax.Array,
        count: jax.Array,
        hyper: PyTree,
        data: ResidentData,
    ) -> _AfterRounds:
        def one_seed(
            state: PyTree, client_states: PyTree, seed: jax.Array, hyper: PyTree = hyper
        ) -> _AfterRounds:
            root = jax.random.key(seed)

            def step(state: PyTree, client_states: PyTree, round: jax.Array) -> _AfterRounds:
                selection = algorithm.select(round, root)
                cohort_states = gather(algorithm.client_states, client_states, selection.clients)
                state, cohort_states, metrics = _train_round(
                    algorithm,
                    state,
                    cohort_states,
                    Round(round, root, data.read(selection), axis),
                    hyper,
                )
                client_states = scatter(
                    algorithm.client_states, client_states, selection.clients, cohort_states
                )
                return state, client_states, metrics

            def one_round(index: jax.Array, carry: _AfterRounds) -> _AfterRounds:
                state, client_states, history = carry
                state, client_states, metrics = step(state, client_states, first + index)
                put = lambda values, new: values.at[index].set(new)
                return state, client_states, jax.tree.map(put, history, stacked(metrics))

            shapes = jax.eval_shape(
                lambda *now: stacked(step(*now)[2]), state, client_states, first
            )
            room = lambda values: jnp.zeros((interval, *values.shape), values.dtype)
            history = jax.tree.map(room, shapes)
            return jax.lax.fori_loop(0, count, one_round, (state, client_states, history))

        of_seeds = (state, client_states, seeds) + ((hyper,) if hyper_per_seed else ())
        return over_seeds(one_seed)(*of_seeds)

    return train


def _streamed_training(
    algorithm: FederatedAlgorithm, over_seeds: _OverSeeds, axis: str | None
) -> Callable[..., _AfterRounds]:
    """Returns `Programs.train_streamed`."""

    def train_streamed(
        state: PyTree,
        client_states: PyTree,
        seeds: jax.Array,
        round: jax.Array,
        hyper: PyTree,
        inputs: Inputs,
    ) -> _AfterRounds:
        def one_seed(
            state: PyTree, client_states: PyTree, seed: jax.Array, inputs: Inputs
        ) -> _AfterRounds:
            state, client_states, metrics = _train_round(
                algorithm,
                state,
                client_states,
                Round(round, jax.random.key(seed), inputs, axis),
                hyper,
            )
            return state, client_states, jax.tree.map(lambda value: value[None], stacked(metrics))

        return over_seeds(one_seed)(state, client_states, seeds, inputs)

    return train_streamed


def _train_round(
    algorithm: FederatedAlgorithm,
    state: PyTree,
    client_states: PyTree,
    round: Round,
    hyper: PyTree,
) -> _AfterRounds:
    state, client_states, metrics = traced_once(algorithm.round)(state, client_states, round, hyper)
    return *strongly_typed((state, client_states)), metrics


def _evaluation(
    algorithm: FederatedAlgorithm, over_seeds: _OverSeeds, measure: _Measure
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


def _finite_check(algorithm: FederatedAlgorithm, over_seeds: _OverSeeds) -> Callable[..., Stacked]:
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


def _personal_evaluation(
    algorithm: FederatedAlgorithm, over_seeds: _OverSeeds, measure: _Measure
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


def _evaluation_on_clients(
    models: ClientModels,
    group: str,
    over_seeds: _OverSeeds,
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


def _streamed_specs(*arguments: PyTree) -> tuple[PyTree, ...]:
    """Everything is replicated except the columns of cohorts, which `place_inputs` shards."""
    *others, inputs = jax.tree.map(lambda leaf: PartitionSpec(), arguments)
    cohorts = {
        pool: replace(cohort, columns=dict.fromkeys(cohort.columns, SHARDED))
        for pool, cohort in inputs.cohorts.items()
    }
    return (*others, replace(inputs, cohorts=cohorts))


def _map_seeds(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    return lambda *arguments: jax.lax.map(lambda of_seed: function(*of_seed), arguments)
