"""The compiled programs of an experiment: initialise, train many rounds, evaluate.

Everything a round does, sampling and reading included, runs inside one `shard_map` over the mesh
axis `clients`; arguments and results are replicated, but for the examples of streamed cohorts, of which
each device has its own clients'. On one device there is no mesh.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedcodist.core.batches import Preprocess
from fedcodist.core.client_states import gather, scatter
from fedcodist.core.inputs import Inputs, Round
from fedcodist.core.method import FederatedAlgorithm, by_member, single_model
from fedcodist.core.model import is_finite
from fedcodist.core.tracing import strongly_typed, traced_once
from fedcodist.run.evaluation import evaluate as evaluate_predictor
from fedcodist.run.sources import ResidentData

PyTree = Any
AXIS = "clients"
_DEALT = PartitionSpec(None, AXIS)  # seeds, then one part per device


class Programs(NamedTuple):
    """Jitted functions; `state` and everything else has a leading axis of seeds.

    Attributes:
      init: seeds uint32 [S] -> state.
      train: (state, states of all clients, seeds, first round, number of rounds, hyper, ResidentData)
        -> (state, client_states, history). History: metric -> [S, interval], of which the first
        `number of rounds` entries are filled. One compilation serves any number of rounds up to the
        interval. Both states are donated.
      train_streamed: (state, states of the cohorts, seeds, round, hyper, Inputs [S, ...]) -> the same,
        for one round of streamed inputs, placed by `place_inputs`.
      select: (seed, round) -> Selection.
      evaluate: (state, split -> EvaluationSplit) -> split -> model -> metric -> [S, ...].
      finite: state -> model -> bool [S], whether all of its numbers are.
      evaluate_personal: (state, pool -> client states [S, clients, ...], pool -> int32 [clients], which
        of these, split -> EvaluationSplit) -> split -> personal model -> metric -> [S, clients, ...].
        One client after another.
    """

    init: Callable[..., Any]
    train: Callable[..., Any]
    train_streamed: Callable[..., Any]
    select: Callable[..., Any]
    evaluate: Callable[..., Any]
    finite: Callable[..., Any]
    evaluate_personal: Callable[..., Any]


def all_devices() -> Mesh | None:
    """A mesh of all devices of all processes along `clients`; None if there is only one."""
    devices = np.array(jax.devices())
    return None if devices.size == 1 else Mesh(devices, (AXIS,))


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Puts a pytree of host arrays on every device; each process supplies its own copy."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(leaf):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, tree)


def own_devices(mesh: Mesh | None) -> list[int]:
    """Where this process's devices are along `clients`."""
    if mesh is None:
        return [0]
    own = jax.process_index()
    return [i for i, device in enumerate(mesh.devices.flat) if device.process_index == own]


def place_inputs(inputs: Inputs, mesh: Mesh | None) -> Inputs:
    """Puts streamed inputs [seeds, ...] on the devices: all of them on each, but for the examples of
    cohorts, which were gathered for `own_devices` and of which each gets its part."""
    if mesh is None:
        return replicate(inputs, mesh)
    own = own_devices(mesh)
    sharding = NamedSharding(mesh, _DEALT)

    def deal(leaf):
        parts = dict(zip(own, np.split(leaf, len(own), axis=1), strict=True))
        room = leaf.shape[1] // len(own)
        shape = (leaf.shape[0], room * mesh.size, *leaf.shape[2:])

        def part(index: Any):
            return parts[(index[1].start or 0) // room]

        return jax.make_array_from_callback(shape, sharding, part)

    columns = {pool: jax.tree.map(deal, c.columns) for pool, c in inputs.cohorts.items()}
    others = {pool: replace(cohort, columns={}) for pool, cohort in inputs.cohorts.items()}
    others = replicate(others, mesh)
    cohorts = {pool: replace(others[pool], columns=columns[pool]) for pool in others}
    return Inputs(cohorts, replicate(inputs.examples, mesh))


def build_programs(
    algorithm: FederatedAlgorithm,
    interval: int,
    mesh: Mesh | None = None,
    seeds_loop: str = "map",
    evaluation_batch_size: int = 500,
    evaluation_preprocess: Preprocess = lambda batch, key, positions: batch,
) -> Programs:
    """Builds the programs; nothing compiles before the first call.

    Args:
      algorithm: what to run.
      interval: the largest number of rounds of one call of `train`.
      mesh: devices over which clients, distillation batches and evaluation are dealt.
      seeds_loop: 'map' trains seeds one after another inside the program, 'vmap' at once.
      evaluation_batch_size: examples per device and step in evaluation.
      evaluation_preprocess: (batch, key, positions) -> batch, on the device; draws nothing.
    """
    axis = None if mesh is None else AXIS
    over_seeds = {"map": _map_seeds, "vmap": jax.vmap}[seeds_loop]

    def init(seeds):
        return over_seeds(lambda seed: strongly_typed(algorithm.init(jax.random.key(seed))))(seeds)

    train, train_streamed = _training(algorithm, interval, over_seeds, axis)
    measure = functools.partial(
        evaluate_predictor,
        batch_size=evaluation_batch_size,
        preprocess=evaluation_preprocess,
        axis_name=axis,
    )
    evaluate, finite, evaluate_personal = _evaluation(algorithm, over_seeds, measure)

    def compiled(function, specs=lambda *arguments: PartitionSpec(), **options):
        @functools.wraps(function)
        def dealt(*arguments):
            return jax.shard_map(
                function,
                mesh=mesh,
                in_specs=specs(*arguments),
                out_specs=PartitionSpec(),
                check_vma=False,
            )(*arguments)

        return jax.jit(function if mesh is None else dealt, **options)

    return Programs(
        # It runs once, in no time: half the compilation, and the same bits, for less optimisation.
        init=compiled(init, compiler_options={"xla_backend_optimization_level": 1}),
        train=compiled(train, donate_argnums=(0, 1)),
        train_streamed=compiled(train_streamed, _streamed_specs, donate_argnums=(0, 1)),
        select=jax.jit(lambda seed, round: algorithm.select(round, jax.random.key(seed))),
        evaluate=compiled(evaluate),
        finite=compiled(finite),
        evaluate_personal=compiled(evaluate_personal),
    )


def _training(algorithm, interval, over_seeds, axis):
    """Returns (train, train_streamed) of `Programs`."""

    def train_round(state, client_states, root, index, hyper, inputs):
        round = Round(index, root, inputs, axis)
        state, client_states, metrics = traced_once(algorithm.round)(
            state, client_states, round, hyper
        )
        return *strongly_typed((state, client_states)), metrics

    def train(state, client_states, seeds, first, count, hyper, data: ResidentData):
        def one_seed(state, client_states, seed):
            root = jax.random.key(seed)

            def step(state, client_states, round):
                selection = algorithm.select(round, root)
                own = gather(algorithm.client_states, client_states, selection.clients)
                state, own, metrics = train_round(
                    state, own, root, round, hyper, data.read(selection)
                )
                client_states = scatter(
                    algorithm.client_states, client_states, selection.clients, own
                )
                return state, client_states, metrics

            def one_round(index, carry):
                state, client_states, history = carry
                state, client_states, metrics = step(state, client_states, first + index)
                history = {name: history[name].at[index].set(metrics[name]) for name in history}
                return state, client_states, history

            shapes = jax.eval_shape(step, state, client_states, first)[2]
            history = {n: jnp.zeros((interval, *v.shape), v.dtype) for n, v in shapes.items()}
            return jax.lax.fori_loop(0, count, one_round, (state, client_states, history))

        return over_seeds(one_seed)(state, client_states, seeds)

    def train_streamed(state, client_states, seeds, round, hyper, inputs: Inputs):
        def one_seed(state, client_states, seed, inputs):
            root = jax.random.key(seed)
            state, client_states, metrics = train_round(
                state, client_states, root, round, hyper, inputs
            )
            return state, client_states, jax.tree.map(lambda value: value[None], metrics)

        return over_seeds(one_seed)(state, client_states, seeds, inputs)

    return train, train_streamed


def _evaluation(algorithm, over_seeds, measure):
    """Returns (evaluate, finite, evaluate_personal) of `Programs`.

    Args:
      algorithm: whose models are evaluated.
      over_seeds: turns a function of one seed into one of all seeds.
      measure: (Predictor, Variables, EvaluationSplit) -> metric -> value.
    """

    def evaluate(state, splits):
        def one_predictor(state, name, predictor, examples):
            def one_model(variables):
                return measure(predictor, variables, examples)

            variables = predictor.variables(state)
            if predictor.members:
                return by_member(name, predictor, jax.lax.map(one_model, variables))
            return {name: one_model(variables)}

        def one_seed(state):
            return {
                split: {
                    model: values
                    for name, predictor in algorithm.predictors.items()
                    for model, values in one_predictor(state, name, predictor, examples).items()
                }
                for split, examples in splits.items()
            }

        return over_seeds(one_seed)(state)

    def finite(state):
        def one_seed(state):
            found: dict[str, jax.Array] = {}
            for name, predictor in algorithm.predictors.items():
                over_members = jax.vmap(is_finite) if predictor.members else is_finite
                found |= by_member(name, predictor, over_members(predictor.variables(state)))
            return found

        return over_seeds(one_seed)(state)

    def evaluate_personal(state, client_states, places, splits):
        def all_clients(state, own, kept, places, examples):
            predictor = single_model(
                kept.model, lambda client_state: kept.variables(state, client_state)
            )

            def one_client(place):
                client_state = jax.tree.map(lambda leaf: leaf[place], own)
                return measure(predictor, predictor.variables(client_state), examples)

            return jax.lax.map(one_client, places)

        def one_seed(state, client_states):
            return {
                split: {
                    name: all_clients(state, own, kept, places[pool], examples)
                    for pool, own in client_states.items()
                    for name, kept in algorithm.personal_models[pool].items()
                }
                for split, examples in splits.items()
            }

        return over_seeds(one_seed)(state, client_states)

    return evaluate, finite, evaluate_personal


def _streamed_specs(*arguments):
    """Everything is replicated but the columns of cohorts, which `place_inputs` deals."""
    *others, inputs = jax.tree.map(lambda leaf: PartitionSpec(), arguments)
    cohorts = {
        pool: replace(cohort, columns=dict.fromkeys(cohort.columns, _DEALT))
        for pool, cohort in inputs.cohorts.items()
    }
    return (*others, replace(inputs, cohorts=cohorts))


def _map_seeds(function):
    return lambda *arguments: jax.lax.map(lambda each: function(*each), arguments)
