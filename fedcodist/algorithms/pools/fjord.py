"""FjORD (Horvath et al., 2021): clients train random nested parts of one network, by ordered dropout.

FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout, Samuel
Horvath, Stefanos Laskaridis, Mario Almeida, Ilias Leontiadis, Stylianos I. Venieris, Nicholas D. Lane.
https://arxiv.org/abs/2102.13451
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.clients.fed_avg import client_result, fed_avg, learning_rates
from fedcodist.algorithms.pools.hetero_fl_parts import part_of_level
from fedcodist.algorithms.pools.levels import (
    HeteroFLLevel,
    PartOf,
    algorithm_of_levels,
    always,
    check_levels,
    level_method,
    mean_and_holders,
    naming_level,
)
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number, check_several
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.core.optimizer_factories import OptimizerFactory
from fedcodist.core.schedules import Schedule, constant
from fedcodist.distillation.divergences import kl_divergence, softened, softened_target
from fedcodist.models.submodels import chain_units, counts_of, with_first_units

PyTree = Any
Widths = Sequence[Mapping[str, int]]  # of each network: hidden layer -> its units


class FjordHyper(NamedTuple):
    """Learning rates, alpha (weight of the full network's predictions against labels) and T; traced."""

    client_learning_rate: Any = 0.05
    server_learning_rate: Any = 1.0
    distillation_weight: Any = 1.0
    temperature: Any = 1.0


class OrderedOutputs(NamedTuple):
    """Logits in training: of a level's full network, and of the drawn part of it."""

    full: jax.Array
    drawn: jax.Array


def fjord(
    model: Model,
    levels: Mapping[str, HeteroFLLevel],
    layers: Sequence[str],
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(),
    self_distillation: bool = True,
    server_optimizer: OptimizerFactory = optax.sgd,
    schedule: Schedule = constant,
    hyper: FjordHyper = FjordHyper(),
    execution: Execution = Execution(),
) -> FederatedAlgorithm:
    """HeteroFL whose clients draw in every step a part within their own part, and train it.

    In every step a client draws one of the levels up to its own with equal probability, and trains the
    first units, as many as this level has. So units are ordered by how often they are trained, and every
    part is usable as a network. With `self_distillation` the level's full network is trained on the
    labels too, and teaches the drawn part. The drawn part's loss is 1 - alpha times that of the labels
    plus alpha KL(full || drawn) at temperature T, without a factor T squared. The authors' code in
    Flower's baselines has alpha = 1 and T = 1. The paper's loss for other values is not verified.

    A parameter becomes the mean over the clients whose level has it, weighted by their examples. One
    level with the whole network and alpha = 1, or without distillation, is FedAvg. The levels' own
    networks are evaluated. Only the levels' widths are drawn, and each client's level is fixed.

    Args:
      model, levels, layers, columns, training: as in `hetero_fl`. For any two levels, one must lie
        within the other.
      self_distillation: whether the full network is trained in every step, and teaches the drawn part.
      server_optimizer, schedule, execution: as in `hetero_fl`.
      hyper: learning rates, alpha from 0 to 1 and T above 0.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fjord, locals())
    check_levels(model, levels, columns)
    check_several("layers", layers)
    check_number("hyper.distillation_weight", hyper.distillation_weight, low=0, high=1)
    check_number("hyper.temperature", hyper.temperature, above=0)
    averaging = fed_avg(model, training, server_optimizer, schedule, learning_rates(hyper))
    whole = averaging._replace(hyper=hyper)
    networks: dict[str, Model] = {}
    parts: dict[str, PartOf] = {}
    for level, settings in levels.items():
        with naming_level(level):
            part_at, networks[level] = part_of_level(model, settings.model, layers, scaled=False)
        parts[level] = always(part_at(0))
    widths = _widths(model, networks, layers)
    pools = {}
    for level, settings in levels.items():
        within: list[Mapping[str, int]] = []
        for width in widths.values():
            # Levels of one width are one part to draw.
            if width not in within and _lies_within(width, widths[level]):
                within.append(width)
        network = with_ordered_dropout(networks[level], layers, within, self_distillation)
        update = _client_update(networks[level], network, training, self_distillation)
        method = level_method(whole, networks[level], parts[level], update, mean_and_holders())
        pools[level] = Pool(method, settings.clients, settings.cohort_size)
    return algorithm_of_levels("fjord", whole, pools, parts, columns, hyper, execution)


def with_ordered_dropout(
    network: Model, layers: Sequence[str], widths: Widths, distilled: bool
) -> Model:
    """The network of which training uses a random part: the first units of every hidden layer.

    The parameters before and after an unused unit are multiplied by 0, so they get no gradient. All
    parts have the shapes of the full network, so one compiled program can draw among them.

    Args:
      network: a chain.
      layers: its layers' names in their order.
      widths: the parts, which are equally likely.
      distilled: whether outputs in training are `OrderedOutputs`, or only those of the drawn part.
    """
    units = chain_units(variable_shapes(network).params, layers)
    of_groups = {group: np.array([width[group] for width in widths]) for group in widths[0]}

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        **more: Any,
    ) -> tuple[Any, PyTree]:
        if not train:
            return network.apply(variables, batch, train=train, key=key, **more)
        if key is None:
            raise ValueError("key must not be None in training: it draws the width.")
        drawn = jax.random.randint(keys.derive(key, "width"), (), 0, len(widths))
        first = {group: jnp.asarray(count)[drawn] for group, count in of_groups.items()}
        part = Variables(with_first_units(variables.params, first, units), variables.mutable)
        of_part, mutable = network.apply(part, batch, train=True, key=key, **more)
        if not distilled:
            return of_part, mutable
        full, mutable = network.apply(variables, batch, train=True, key=key, **more)
        return OrderedOutputs(full, of_part), mutable

    return network._replace(apply=apply)


def _client_update(
    network: Model, ordered: Model, training: LocalTraining, distilled: bool
) -> Callable[..., Any]:
    """The `client_update` of a level's clients; `ordered` is its network `with_ordered_dropout`."""
    divergence = kl_divergence("forward")

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FjordHyper,
    ) -> ClientResult:
        alpha, temperature = hyper.distillation_weight, hyper.temperature

        # In every step a width is drawn. The full network learns the labels, and the part of this width
        # learns the full network's predictions.
        def loss(outputs: OrderedOutputs, batch: Batch) -> jax.Array:
            target = softened_target(jax.lax.stop_gradient(outputs.full), temperature)
            towards_full = softened(divergence, temperature, scaled=False)(outputs.drawn, target)
            of_full = checked_loss(network.loss, outputs.full, batch)
            of_drawn = checked_loss(network.loss, outputs.drawn, batch)
            return of_full + (1 - alpha) * of_drawn + alpha * towards_full

        trained = train_client(
            ordered,
            training,
            message,
            data,
            key,
            hyper.client_learning_rate,
            loss_hook=loss if distilled else None,
        )
        return client_result(message, trained, weight=data.size, client_state=client_state)

    return client_update


def _widths(
    model: Model, networks: Mapping[str, Model], layers: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Level -> hidden layer -> its units; raises ValueError unless levels lie within one another."""
    shapes = variable_shapes(model).params
    units = chain_units(shapes, layers)
    widths = {}
    for level, network in networks.items():
        counts = counts_of(shapes, variable_shapes(network).params, units)
        widths[level] = {group: count.kept for group, count in counts.items()}
    for level, width in widths.items():
        for other_level, other_width in widths.items():
            if not (_lies_within(width, other_width) or _lies_within(other_width, width)):
                raise ValueError(
                    f"levels must lie within one another, but {level!r} has {width} units and "
                    f"{other_level!r} {other_width}."
                )
    return widths


def _lies_within(width: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(count <= other[group] for group, count in width.items())
