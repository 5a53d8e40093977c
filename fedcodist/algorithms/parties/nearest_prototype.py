"""Parties of FedProto and FedTGP that predict with the nearest prototype in place of their head."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import PartyGroup, party_names
from fedcodist.algorithms.parties.prototypes import Prototypes
from fedcodist.core.layer_outputs import LayerOutputs, checked_logits
from fedcodist.core.method import Predictor
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.models.headed import embedding_of

PyTree = Any
HEAD_PREDICTS, PROTOTYPE_PREDICTS = PREDICT_BY = ("head", "prototype")


def prototype_predictors(
    groups: Mapping[str, PartyGroup],
    models: Callable[[PyTree, str], Variables],
    prototypes: Callable[[PyTree], Prototypes],
) -> dict[str, Predictor]:
    """Predictors of parties that predict with the nearest prototype in place of their head.

    The logits are minus the squared distances. A class without a prototype is farther than all others.
    While there are no prototypes at all, the head predicts.

    Args:
      groups: architecture -> its parties.
      models: (algorithm state, architecture) -> Variables, leaves [group, ...].
      prototypes: algorithm state -> global prototypes.
    """
    names = party_names(groups)

    def predictor(name: str, model: Model) -> Predictor:
        def variables(state: PyTree) -> Variables:
            params, mutable = models(state, name)
            count = len(names[name])
            repeat = lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape))
            return Variables(params, (mutable, jax.tree.map(repeat, prototypes(state))))

        def predict(values: Variables, batch: Batch) -> LayerOutputs:
            mutable, nearest_of = values.mutable
            outputs = model.apply(Variables(values.params, mutable), batch)[0]
            embedding = embedding_of(outputs)
            by_prototype = nearness(embedding, nearest_of)
            is_any = jnp.any(nearest_of.has_class > 0)
            logits = jnp.where(is_any, by_prototype, checked_logits(outputs))
            return LayerOutputs(logits, outputs.hidden)

        clients = tuple(groups[name].clients.tolist())
        return Predictor(model, variables, predict, names[name], clients)

    return {name: predictor(name, group.model) for name, group in groups.items()}


def nearness(embedding: jax.Array, prototypes: Prototypes) -> jax.Array:
    """Minus the squared distances [batch, classes] of embeddings [batch, width] to prototypes.

    For a class without a prototype it is one less than the smallest of the others.
    """
    gap = embedding[:, None] - prototypes.vectors
    near = -jnp.sum(gap**2, axis=-1)
    has_class = prototypes.has_class > 0
    farthest = jnp.min(jnp.where(has_class, near, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(has_class, near, farthest - 1)
