"""Levels of clients that train parts of one network: shared by HeteroFL, FedRolex, FjORD and DepthFL."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.pools.assemble import assemble
from fedcodist.algorithms.pools.pool import Pool, check_pools
from fedcodist.algorithms.pools.pool_rounds import train_pools
from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce, divided_by_holders
from fedcodist.core.checks import check_columns
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import Round
from fedcodist.core.method import FederatedAlgorithm, FederatedMethod
from fedcodist.core.model import Model, Variables, check_stateless, variable_shapes
from fedcodist.core.trees import named_leaves
from fedcodist.models.submodels import gathered, scattered

PyTree = Any


class HeteroFLLevel(NamedTuple):
    """Clients of one complexity level.

    Attributes:
      model: the level's network, with at most as many units per hidden layer as the whole network.
      clients: int [level], the clients' indices in the federated data. Levels may overlap.
      cohort_size: clients drawn per round, without replacement, independently of other levels.
    """

    model: Model
    clients: np.ndarray
    cohort_size: int


class Part(NamedTuple):
    """Which parameters of the whole network a level has.

    Attributes:
      taken: the whole network's parameters -> the level's parameters.
      put_back: a tree of the level's structure -> one of the whole's, 0 where the level has nothing.
    """

    taken: Callable[[PyTree], PyTree]
    put_back: Callable[[PyTree], PyTree]


PartOf = Callable[[PyTree], Part]  # the server's state -> the part that a level has in this round


def part_at_places(places: PyTree, shapes: PyTree) -> Part:
    """The part that consists of some coordinates of every parameter.

    Args:
      places: the coordinates, made by `places_of`.
      shapes: of the whole network's parameters.
    """
    return Part(
        lambda params: gathered(params, places), lambda part: scattered(part, places, shapes)
    )


def part_of_leaves(shapes: PyTree, smaller: PyTree) -> Part:
    """The part that consists of some whole parameters.

    Args:
      shapes, smaller: the shapes of the whole network's and the level's parameters.

    Raises:
      ValueError: names a parameter of the level that the whole network lacks or has in another shape.
    """
    whole, names = named_leaves(shapes), named_leaves(smaller)
    for name, leaf in names.items():
        if name not in whole or whole[name].shape != leaf.shape:
            has = list(whole[name].shape) if name in whole else "none"
            raise ValueError(
                f"submodel's {name!r} must be one of the model's parameters, which has {has}, got "
                f"{list(leaf.shape)}."
            )

    def taken(params: PyTree) -> PyTree:
        known = named_leaves(params)
        return jax.tree.unflatten(jax.tree.structure(smaller), [known[name] for name in names])

    def put_back(part: PyTree) -> PyTree:
        known = named_leaves(part)
        zeros = lambda like: jnp.zeros(like.shape, like.dtype)
        leaves = [known[n] if n in known else zeros(like) for n, like in whole.items()]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return Part(taken, put_back)


def always(part: Part) -> PartOf:
    """A level that has the same part in every round."""
    return lambda server: part


def check_levels(
    model: Model, levels: Mapping[str, HeteroFLLevel], columns: Mapping[str, Any]
) -> None:
    """Raises ValueError or TypeError that names an argument which no method of levels allows."""
    check_stateless("model", model)
    check_columns("columns", columns)
    if not levels:
        raise ValueError("levels must hold at least one level, got none.")


@contextlib.contextmanager
def naming_level(level: str) -> Iterator[None]:
    """Puts the level's name before messages of ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"levels[{level!r}]: {error}") from None


def level_method(
    whole: FederatedMethod, network: Model, part: PartOf, client_update: Any, reduce: Reduce
) -> FederatedMethod:
    """The method of a level's clients; the server is that of the whole network.

    Args:
      whole: FedAvg of the whole network, or a method with such a server.
      network: the level's network.
      part: which parameters of the whole network it has.
      client_update: of a FederatedMethod, for the level's network.
      reduce: made by `mean_and_holders`.
    """

    def variables(server: PyTree) -> Variables:
        return Variables(part(server).taken(whole.variables(server).params), {})

    return whole._replace(
        model=network,
        broadcast=variables,
        client_update=client_update,
        reduce=reduce,
        gradient=None,  # that of `whole` is of the whole network
        variables=variables,
    )


def algorithm_of_levels(
    name: str,
    whole: FederatedMethod,
    pools: Mapping[str, Pool],
    parts: Mapping[str, PartOf],
    columns: Mapping[str, Any],
    hyper: PyTree,
    execution: Execution,
    hyper_of_round: Callable[[PyTree, jax.Array], PyTree] = lambda hyper, round: hyper,
) -> FederatedAlgorithm:
    """An algorithm in which every level's clients train a part of one network.

    For every parameter the server's pseudo-gradient is the mean over the clients that had it, and 0 if
    no client had it. The levels' own networks are evaluated.

    Args:
      name, columns, hyper, execution: as an algorithm's own arguments.
      whole: the method of the whole network; its server is the algorithm's state.
      pools: level -> its clients and their `level_method`.
      parts: level -> which parameters it has.
      hyper_of_round: (hyper, round) -> the clients' hyper-parameters in a round.
    """
    pools = check_pools(pools, "levels")
    shapes = variable_shapes(whole.model).params
    same = lambda value: dict.fromkeys(pools, value)

    def round_(
        state: PyTree, client_states: PyTree, round: Round, hyper: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        # Every level's clients train their part of the one network.
        of_clients = same(hyper_of_round(hyper, round.index))
        trained = train_pools(pools, same(state), client_states, round, of_clients, execution)
        # Each parameter moves by the mean over the clients that had it; others keep the old value.
        of_round = {level: part(state) for level, part in parts.items()}
        update = mean_over_levels(trained.aggregates, of_round, shapes)
        weight = jnp.sum(jnp.stack([aggregate.weight for aggregate in trained.aggregates.values()]))
        state = whole.server_update(state, Aggregate(update, {}, weight), round.index, hyper)
        return state, trained.client_states, trained.metrics

    # If a level has the whole network, initial values are as in a pool with its name (other methods).
    is_whole = lambda pool: variable_shapes(pool.method.model).params == shapes
    start = [level for level, pool in pools.items() if is_whole(pool)][-1:] or ["whole"]
    algorithm = assemble(
        name,
        pools,
        columns,
        hyper,
        round_,
        servers=same,
        has_server=False,
        hyper_of_methods=same,
    )
    return algorithm._replace(init=lambda key: whole.init(keys.derive(key, "init", start[0])))


def mean_over_levels(
    aggregates: Mapping[str, Aggregate], parts: Mapping[str, Part], shapes: PyTree
) -> PyTree:
    """The mean of every parameter of the whole network over the clients that had it; 0 if none had it.

    Args:
      aggregates: level -> the mean over its clients. `extra` is the number of clients that had each
        parameter, or the sum of their weights, in a shape that broadcasts to the parameter's.
      parts: level -> which parameters it has.
      shapes: of the whole.
    """
    total = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    holders = total
    for level, aggregate in aggregates.items():
        held = jax.tree.map(
            lambda leaf, by: jnp.broadcast_to(by, leaf.shape),
            aggregate.pseudo_gradient,
            aggregate.extra,
        )
        weighted_sum = jax.tree.map(jnp.multiply, aggregate.pseudo_gradient, held)
        add = lambda tree, part, level=level: jax.tree.map(
            jnp.add, tree, parts[level].put_back(part)
        )
        total, holders = add(total, weighted_sum), add(holders, held)
    return divided_by_holders(total, holders)


def mean_and_holders(last: str | None = None) -> Reduce:
    """The weighted mean of every parameter over a level's clients that had it, and their weights' sum.

    A client has all of its network's parameters. But if its `extra` says which classes it has, it only
    has the output layer's parameters of these classes.

    Args:
      last: the output layer's name; None if clients do not send which classes they have.
    """

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
        held = jax.tree.map(lambda leaf: result.weight.astype(leaf.dtype), result.update)
        if result.extra is not None:
            held |= {last: jax.tree.map(lambda leaf: leaf * result.extra, held[last])}
        return jax.tree.map(jnp.multiply, result.update, held), held, result.weight

    def finalize(total: PyTree, message: PyTree, key: jax.Array) -> Aggregate:
        update, held, weight = total
        return Aggregate(divided_by_holders(update, held), message.mutable, weight, held)

    return Reduce(prepare, finalize, is_mean=last is None)
