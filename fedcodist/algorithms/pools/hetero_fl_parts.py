"""HeteroFL's nested networks: which part of the whole network a level has, its scaling and training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.module import InterceptorContext

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, client_result, uniform_weight
from fedcodist.algorithms.pools.levels import Part, part_at_places
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.batches import Preprocess
from fedcodist.core.inputs import ClientData
from fedcodist.core.label_counts import label_counts
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.models.submodels import chain_units, check_chain, counts_of, places_of

PyTree = Any


def part_of_level(
    model: Model, level: Model, layers: Sequence[str], scaled: bool
) -> tuple[Callable[[Any], Part], Model]:
    """A level's part of the whole network.

    Args:
      model, level: the whole network and the level's, which has fewer units in its hidden layers.
      layers: the layers' names in their order.
      scaled: whether the level's layers are scaled by their shares of units.

    Returns:
      (part_at, network): a function from the index of the first unit to the part that begins there in
      every hidden layer, and continues with unit 0 after the last unit; and the level's network.

    Raises:
      ValueError: networks that are not chains, or do not fit together.
    """
    shapes, smaller = variable_shapes(model).params, variable_shapes(level).params
    check_chain(shapes, smaller, layers)
    units = chain_units(shapes, layers)
    counts = counts_of(shapes, smaller, units)
    shares = {group: count.kept / count.whole for group, count in counts.items()}

    def part_at(first: int | jax.Array) -> Part:
        # In NumPy (unless `first` is a JAX array), so that it is a constant of the program.
        kept = {group: (np.arange(n.kept) + first) % n.whole for group, n in counts.items()}
        return part_at_places(places_of(kept, shapes, units), shapes)

    return part_at, scaled_by_share(level, shares) if scaled else level


def masked_update(network: Model, training: LocalTraining, masked: bool) -> Callable[..., Any]:
    """The `client_update` of a level's clients.

    Args:
      network: the level's.
      training, masked: as in `hetero_fl`.
    """

    def client_update(
        message: Variables,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: FedAvgHyper,
    ) -> ClientResult:
        classes, loss = None, None
        if masked:
            # Masked cross-entropy: logits of classes without examples at the client are set to 0.
            classes = classes_of(data, network.num_classes, training.preprocess)
            loss = lambda outputs, batch: network.loss(jnp.where(classes > 0, outputs, 0), batch)
        trained = train_client(
            network, training, message, data, key, hyper.client_learning_rate, loss_hook=loss
        )
        return client_result(message, trained, uniform_weight(data), client_state, extra=classes)

    return client_update


def classes_of(data: ClientData, classes: int, preprocess: Preprocess) -> jax.Array:
    """Which classes a client has examples of, float [classes] of 0 and 1; see `label_counts`."""
    return (label_counts(data, classes, preprocess) > 0).astype(jnp.float32)


def scaled_by_share(model: Model, shares: Mapping[str, float]) -> Model:
    """The model with each layer's outputs divided by the layer's share of units.

    With a share r of the units, the sum that the next layer computes is about r of its usual size. It
    does not matter whether the ReLU or pooling that follows is part of the layer's module, because both
    commute with the scaling.

    Args:
      model: of a Flax linen network.
      shares: name of a direct submodule of the network -> its share.

    Raises:
      ValueError: the network does not call a submodule of this name.
    """
    called = set()

    def divide(
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        outputs = call(*arguments, **keywords)
        path = context.module.path
        if context.method_name != "__call__" or len(path) != 1 or path[0] not in shares:
            return outputs
        called.add(path[0])
        return outputs / shares[path[0]]

    def apply(variables: Variables, batch: Batch, **more: Any) -> tuple[Any, PyTree]:
        with nn.intercept_methods(divide):
            outputs = model.apply(variables, batch, **more)
        if missing := sorted(shares.keys() - called):
            raise ValueError(
                "adjustments.scaled must be False for a network that does not call "
                f"{missing[0]!r} as a Flax linen module of its own."
            )
        return outputs

    return model._replace(apply=apply)
