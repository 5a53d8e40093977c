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
from jax.sharding import Mesh, PartitionSpec

from fedcodist.core.batches import Preprocess
from fedcodist.core.method import (
    FederatedAlgorithm,
    all_client_models,
)
from fedcodist.core.tracing import strongly_typed
from fedcodist.run import evaluation_programs, training_programs
from fedcodist.run.evaluation import evaluate
from fedcodist.run.over_seeds import OVER_SEEDS
from fedcodist.run.placement import AXIS, SHARDED

PyTree = Any


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
    over_seeds = OVER_SEEDS[seeds_loop]

    def init(seeds: jax.Array) -> PyTree:
        return over_seeds(lambda seed: strongly_typed(algorithm.init(jax.random.key(seed))))(seeds)

    measure = functools.partial(
        evaluate,
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
            training_programs.resident(algorithm, interval, over_seeds, axis, hyper_per_seed),
            donate_argnums=(0, 1),
        ),
        train_streamed=compiled(
            training_programs.streamed(algorithm, over_seeds, axis),
            _streamed_specs,
            donate_argnums=(0, 1),
        ),
        select=jax.jit(lambda seed, round: algorithm.select(round, jax.random.key(seed))),
        evaluate=compiled(evaluation_programs.shared_models(algorithm, over_seeds, measure)),
        finite=compiled(evaluation_programs.finite_models(algorithm, over_seeds)),
        evaluate_personal=compiled(
            evaluation_programs.personal_models(algorithm, over_seeds, measure)
        ),
        evaluate_clients={
            group: compiled(
                evaluation_programs.models_on_clients(
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


def _streamed_specs(*arguments: PyTree) -> tuple[PyTree, ...]:
    """Everything is replicated except the columns of cohorts, which `place_inputs` shards."""
    *others, inputs = jax.tree.map(lambda leaf: PartitionSpec(), arguments)
    cohorts = {
        pool: replace(cohort, columns=dict.fromkeys(cohort.columns, SHARDED))
        for pool, cohort in inputs.cohorts.items()
    }
    return (*others, replace(inputs, cohorts=cohorts))
