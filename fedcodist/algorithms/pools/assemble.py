"""`assemble` makes an algorithm of pools and of a function of one round."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.pools.cohorts import draw_cohort, draw_slots
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.checks import check_columns
from fedcodist.core.client_states import ClientStates
from fedcodist.core.communication import communication_of
from fedcodist.core.inputs import ClientData, Round, Selection
from fedcodist.core.method import (
    FINE_TUNED,
    SHARED_MODEL,
    ClientModels,
    FederatedAlgorithm,
    FederatedMethod,
    PersonalModel,
    Predictor,
    PrivateCohorts,
    fine_tuned_models,
    single_model,
)
from fedcodist.core.model import Variables
from fedcodist.core.trees import is_finite

PyTree = Any


def assemble(
    name: str,
    pools: Mapping[str, Pool],
    columns: Mapping[str, Any],
    hyper: PyTree,
    round_: Callable[..., Any],
    select_examples: Callable[[jax.Array, jax.Array], dict[str, jax.Array]] = lambda round, key: {},
    data_set_sizes: Mapping[str, int] = {},
    servers: Callable[[PyTree], Mapping[str, PyTree]] = lambda state: state,
    has_server: bool = True,
    hyper_of_methods: Callable[[Any], Mapping[str, PyTree]] = lambda hyper: getattr(
        hyper, "methods", hyper
    ),
    drawn: Mapping[str, Pool] | None = None,
    num_rounds: int | None = None,
    select: Callable[[jax.Array, jax.Array], Selection] | None = None,
) -> FederatedAlgorithm:
    """Makes an algorithm from pools and a function of one round.

    Args:
      name, pools, columns, hyper: as an algorithm's own arguments.
      round_: FederatedAlgorithm.round.
      select_examples: (round, key) -> data set -> indices of the round's examples of other data sets.
      data_set_sizes: data set -> examples that it must have.
      servers: state -> pool -> the method's server; by default the state itself.
      has_server: whether methods' own functions are the server's, and so must fit.
      hyper_of_methods: `hyper` -> pool -> the method's hyper-parameters; by default the field `methods`
        of `hyper`, or else `hyper` itself.
      drawn: the pools whose cohorts are drawn independently, if `pools` are groups of these cohorts.
      num_rounds: the most rounds of a run, if a schedule was made for so many. Methods may have less.
      select: FederatedAlgorithm.select, for servers that deal cohorts to their models. By default every
        pool draws its own, beside `select_examples`.
    """
    check_columns("columns", columns)
    _check_names_of_models(pools)
    lengths = [num_rounds, *(pool.method.num_rounds for pool in pools.values())]
    # This checks the methods, so it comes before their functions are called below.
    communication = {
        n: communication_of(pool.method, columns, has_server) for n, pool in pools.items()
    }

    def init(key: jax.Array) -> dict[str, PyTree]:
        return {n: pool.method.init(keys.derive(key, "init", n)) for n, pool in pools.items()}

    def round_and_finite(
        state: PyTree, client_states: PyTree, round: Round, hyper: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        state, client_states, metrics = round_(state, client_states, round, hyper)
        models = {n: pool.method.variables(servers(state)[n]) for n, pool in pools.items()}
        return (
            state,
            client_states,
            metrics | {f"{n}/finite_model": is_finite(m) for n, m in models.items()},
        )

    def cohort_of_each(round: jax.Array, key: jax.Array) -> Selection:
        clients = {n: _drawn(n, pool, round, key) for n, pool in pools.items()}
        return Selection(clients, select_examples(round, key))

    def predictor(n: str, method: FederatedMethod) -> Predictor:
        return single_model(method.model, lambda state: method.variables(servers(state)[n]))

    def personal(n: str, method: FederatedMethod) -> dict[str, PersonalModel]:
        return _personal_models(n, method, lambda state: servers(state)[n])

    select = select or cohort_of_each
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={
            n: ClientStates(pool.clients, pool.method.init_client_state())
            for n, pool in pools.items()
        },
        select=select,
        round=round_and_finite,
        predictors={n: predictor(n, pool.method) for n, pool in pools.items()},
        communication=communication,
        num_clients=1 + max(int(pool.clients[-1]) for pool in pools.values()),
        data_set_sizes=data_set_sizes,
        personal_models={n: personal(n, pool.method) for n, pool in pools.items()},
        client_models={
            n: client_models(n, pool, servers, hyper_of_methods) for n, pool in pools.items()
        },
        privacy={
            n: cohorts._replace(select=select)
            for n, cohorts in private_cohorts(pools if drawn is None else drawn).items()
        },
        num_rounds=min((length for length in lengths if length is not None), default=None),
    )


def _check_names_of_models(pools: Mapping[str, Pool]) -> None:
    """Raises ValueError if two models would have one name, and so one place in the results."""
    pool_of: dict[str, str] = {}
    for name, pool in pools.items():
        for model in (name, *(f"{name}_{personal}" for personal in pool.method.personal_models)):
            for called in (model, f"{model}{FINE_TUNED}"):
                if called in pool_of:
                    raise ValueError(
                        f"pools must have names whose models differ in name: {called!r} is a model of "
                        f"pool {pool_of[called]!r} and of pool {name!r}."
                    )
                pool_of[called] = name


def _drawn(name: str, pool: Pool, round: jax.Array, key: jax.Array) -> jax.Array:
    """The clients in a round's slots."""
    clients = jnp.asarray(pool.clients)
    if pool.poisson is None:
        return draw_cohort(clients, pool.slots, name, round, key)
    return draw_slots(pool.poisson.eligible(clients, round), pool.slots, name, round, key)


def private_cohorts(pools: Mapping[str, Pool]) -> dict[str, PrivateCohorts]:
    """The pools' cohorts, for `calibrated_noise_multiplier` and the accounting of a run.

    Args:
      pools: name -> Pool.

    Returns:
      name -> the pool's clients, noise multiplier and cohorts. Pools without a private method have the
      noise multiplier 0. Empty if no pool has a private method.
    """
    if all(pool.method.privacy is None for pool in pools.values()):
        return {}
    return {
        name: PrivateCohorts(
            clients=pool.clients,
            noise_multiplier=0.0
            if pool.method.privacy is None
            else pool.method.privacy.noise_multiplier,
            cohort_size=int(pool.cohort_size),
            most=None if pool.poisson is None else pool.slots,
            cycle=1 if pool.poisson is None else pool.poisson.cycle,
        )
        for name, pool in pools.items()
    }


def client_models(
    name: str,
    pool: Pool,
    servers: Callable[[PyTree], Mapping[str, PyTree]],
    hyper_of_methods: Callable[[PyTree], Mapping[str, PyTree]],
) -> ClientModels:
    """The models that a pool's clients would use: shared and personal, before and after fine-tuning.

    Args:
      name: the pool's name, also that of the shared model. Personal models are named `<pool>_<name>`,
        and a model after local training `<model>_fine_tuned`.
      pool: its clients and method.
      servers, hyper_of_methods: as in `assemble`.
    """
    method = pool.method
    called = {SHARED_MODEL: name} | {kind: f"{name}_{kind}" for kind in method.personal_models}

    def variables(state: PyTree, client_state: PyTree) -> dict[str, Variables]:
        server = servers(state)[name]
        return {name: method.variables(server)} | {
            called[kind]: personal.variables(server, client_state)
            for kind, personal in method.personal_models.items()
        }

    def fine_tuned(
        state: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> dict[str, Variables]:
        server, hyper_of_pool = servers(state)[name], hyper_of_methods(hyper)[name]
        models = fine_tuned_models(method, server, client_state, data, key, hyper_of_pool)
        return {f"{called[kind]}{FINE_TUNED}": model for kind, model in models.items()}

    networks = {SHARED_MODEL: method.model}
    networks |= {kind: personal.model for kind, personal in method.personal_models.items()}
    predictors = {
        f"{called[kind]}{ending}": single_model(network, lambda values: values)
        for kind, network in networks.items()
        for ending in ("", FINE_TUNED)
    }
    return ClientModels(pool.clients, predictors, variables, fine_tuned)


def _personal_models(
    pool: str, method: FederatedMethod, server: Callable[[PyTree], PyTree]
) -> dict[str, PersonalModel]:
    """`<pool>_<name>` -> the personal models of a pool's clients, which read the algorithm's state.

    Args:
      pool: its name.
      method: the pool's method.
      server: algorithm's state -> the method's server.
    """

    def of_algorithm(model: PersonalModel) -> PersonalModel:
        return model._replace(
            variables=lambda state, client_state: model.variables(server(state), client_state)
        )

    return {f"{pool}_{name}": of_algorithm(model) for name, model in method.personal_models.items()}
