"""Programs that train: many rounds on resident data, or one round of streamed cohorts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.client_states import gather, scatter
from fedcodist.core.inputs import Inputs, Round
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.tracing import strongly_typed, traced_once
from fedcodist.run.over_seeds import OverSeeds
from fedcodist.run.sources import ResidentData
from fedcodist.run.stacked import stacked

PyTree = Any
# (state, client states, metrics)
_AfterRounds = tuple[PyTree, PyTree, Mapping[str, jax.Array]]


def resident(
    algorithm: FederatedAlgorithm,
    interval: int,
    over_seeds: OverSeeds,
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


def streamed(
    algorithm: FederatedAlgorithm, over_seeds: OverSeeds, axis: str | None
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
