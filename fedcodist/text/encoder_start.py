"""Models that start from the parameters of a given encoder, with trained or fixed embedding tables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.core.trees import named_leaves
from fedcodist.text.bert import TABLES

PyTree = Any


def with_encoder(model: Model, encoder: PyTree) -> Model:
    """The model with given initial values of its parameters 'encoder'.

    Raises:
      ValueError: the model has no encoder, or parameters of other names or shapes.
    """

    def init(key: jax.Array) -> Variables:
        params, mutable = model.init(key)
        return Variables({**params, "encoder": jax.tree.map(jnp.asarray, encoder)}, mutable)

    _check_shapes(_encoder_of(model), encoder)
    return model._replace(init=init)


def with_embeddings(model: Model, embeddings: PyTree) -> Model:
    """The model with given initial values of its encoder's embeddings alone.

    Raises:
      ValueError: the model has no encoder, or embeddings of other names or shapes.
    """

    def init(key: jax.Array) -> Variables:
        params, mutable = model.init(key)
        given = {"embeddings": jax.tree.map(jnp.asarray, embeddings)}
        return Variables({**params, "encoder": {**params["encoder"], **given}}, mutable)

    _check_shapes(_encoder_of(model)["embeddings"], embeddings)
    return model._replace(init=init)


def with_frozen_tables(model: Model, encoder: PyTree) -> Model:
    """The model with fixed embedding tables, those of a given encoder, which are no longer parameters.

    So clients do not train, send or store the tables; they are constants of the program, as in FedKD.
    The embeddings' normalisation is trained.

    Args:
      model: its parameters 'encoder' are an `Encoder`'s.
      encoder: parameters of an encoder with as many tokens, positions and types.

    Raises:
      ValueError: the model has no encoder, or a table of another shape.
    """
    tables = {name: np.asarray(encoder["embeddings"][name]) for name in TABLES}
    shapes = _encoder_of(model)
    for name, table in tables.items():
        if (expected := shapes["embeddings"][name].shape) != table.shape:
            raise ValueError(
                f"encoder's table {name} must be {list(expected)}, got {list(table.shape)}."
            )

    def with_embeddings(params: PyTree, embeddings: PyTree) -> PyTree:
        return {**params, "encoder": {**params["encoder"], "embeddings": embeddings}}

    def init(key: jax.Array) -> Variables:
        params, mutable = model.init(key)
        embeddings = params["encoder"]["embeddings"]
        trained = {name: leaf for name, leaf in embeddings.items() if name not in TABLES}
        return Variables(with_embeddings(params, trained), mutable)

    def apply(variables: Variables, batch: Batch, **options: Any) -> tuple[Any, PyTree]:
        trained = variables.params["encoder"]["embeddings"]
        dtype = trained["norm"]["scale"].dtype
        stay = {name: jnp.asarray(table, dtype) for name, table in tables.items()}
        params = with_embeddings(variables.params, {**trained, **stay})
        return model.apply(Variables(params, variables.mutable), batch, **options)

    return model._replace(init=init, apply=apply)


def first_layers(params: PyTree, layers: int) -> PyTree:
    """An encoder's embeddings and first layers: the start of FedKD's student.

    Raises:
      ValueError: there are not that many layers.
    """
    names = [f"layer{layer}" for layer in range(layers)]
    if not 1 <= layers < len(params):
        raise ValueError(f"layers must be in 1..{len(params) - 1}, got {layers}.")
    return {name: params[name] for name in ("embeddings", *names)}


def _encoder_of(model: Model) -> PyTree:
    """Shapes of the model's parameters 'encoder'."""
    params = variable_shapes(model).params
    if "encoder" not in params:
        raise ValueError(f"model must have parameters 'encoder', got {sorted(params)}.")
    return params["encoder"]


def _check_shapes(expected: PyTree, given: PyTree) -> None:
    expected, given = (
        {name: list(leaf.shape) for name, leaf in named_leaves(params).items()}
        for params in (expected, given)
    )
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"encoder's parameter {name} must be {expected.get(name, 'absent')}, "
                f"got {given.get(name, 'none')}."
            )
