"""How a function uses columns, according to its jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.core.labels import class_labels
from fedcodist.run.column_parts import Part
from fedcodist.run.column_uses import Index, column_uses, of_column

OUTPUTS, LABELS = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def uses_of(function, labels=LABELS):
    jaxpr = jax.make_jaxpr(function)(OUTPUTS, labels)
    return column_uses(
        jaxpr, [of_column("outputs", OUTPUTS.shape), of_column("label", labels.shape)]
    )


LOOKED_UP = {
    "cross-entropy": cross_entropy,
    "its gradient": jax.grad(lambda o, y: cross_entropy(o, y).sum()),
    "rematerialised": jax.grad(jax.checkpoint(lambda o, y: cross_entropy(o, y).sum())),
    "an index": lambda o, y: o.T[y],
    "an index beside another": lambda o, y: o[jnp.arange(2), y],
    "under vmap": lambda o, y: jax.vmap(lambda row, label: row[label])(o, y),
    "in a scan": lambda o, y: jax.lax.scan(lambda c, label: (c + o[0][label], None), 0.0, y),
    "in a loop": lambda o, y: jax.lax.fori_loop(0, 2, lambda i, c: c + o[0][y[i]], 0.0),
    "in a branch": lambda o, y: jax.lax.cond(o[0, 0] > 0, lambda: o[0][y], lambda: o[1][y]),
    "sums of segments": lambda o, y: jax.ops.segment_sum(o, y, 3),
    "a scatter": lambda o, y: jnp.zeros(3).at[y].add(1.0),
    "after casts and slices": lambda o, y: o[0][y[1:].astype(jnp.int16).astype(jnp.int32)],
}
COMPARED = {
    "one-hot": lambda o, y: jnp.sum(o * jax.nn.one_hot(y, 3), -1),
    "accuracy": lambda o, y: jnp.argmax(o, -1) == y,
    "with a range": lambda o, y: y[:, None] == jnp.arange(3),
    "with NumPy's range": lambda o, y: y[:, None] == np.arange(3),
    "the best of several": lambda o, y: (jax.lax.top_k(o, 2)[1] == y[:, None]).any(-1),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_labels_that_are_looked_up(name):
    assert uses_of(LOOKED_UP[name]).indices == {Index(Part("label"), 0, 3, False)}


@pytest.mark.parametrize("name", COMPARED)
def test_labels_that_are_compared_with_positions(name):
    assert uses_of(COMPARED[name]).indices == {Index(Part("label"), 0, 3, True)}


def test_a_constant_shift_is_seen_through():
    assert uses_of(lambda o, y: cross_entropy(o, y - 1)).indices == {
        Index(Part("label"), -1, 3, False)
    }
    assert uses_of(lambda o, y: cross_entropy(o, 2 + y)).indices == {
        Index(Part("label"), 2, 3, False)
    }


@pytest.mark.parametrize(
    "function",
    [
        lambda o, y: o.T[jnp.clip(y, 0, 2)],
        lambda o, y: jnp.take(o.T, y, axis=0, mode="clip"),
        lambda o, y: cross_entropy(o, jnp.where(y < 0, 0, y)) * (y >= 0),
        lambda o, y: o.T[y % 3],
        lambda o, y: (o[:, 0] - y) ** 2,
        lambda o, y: (y == 1) & (o[:, 0] > 0),
    ],
)
def test_what_is_made_of_labels_otherwise_is_the_functions_own_affair(function):
    assert not uses_of(function).indices


def test_a_table_is_what_its_argument_indexes():
    """Labels that a table maps are not outputs yet: the table's length is what they must fit."""
    table = jnp.array([0, 0, 1, 1, 2])
    assert uses_of(lambda o, y: cross_entropy(o, table[y])).indices == {
        Index(Part("label"), 0, 5, False)
    }


def test_columns_that_are_read_and_asked_about():
    assert uses_of(lambda o, y: o.sum()).read == {"outputs"}
    assert uses_of(lambda o, y: (o.sum(), y)).read == {"outputs", "label"}
    assert not uses_of(lambda o, y: o.sum()).asked
    for ask in (jnp.nan_to_num, jnp.isfinite, lambda o: jnp.where(jnp.isnan(o), 0, o)):
        assert uses_of(lambda o, y, ask=ask: ask(o).sum()).asked == {"outputs"}


def test_vectors_that_are_taken_for_one_hot():
    vectors = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert uses_of(lambda o, y: cross_entropy(o, class_labels(y, 3)), vectors).one_hot == {
        Part("label", ((0, 3),))
    }
    assert not uses_of(lambda o, y: optax.softmax_cross_entropy(o, y), vectors).one_hot


PAIRS = jax.ShapeDtypeStruct((2, 4), jnp.int32)
FOUR, SECOND, ROW = ((0, 4),), ((1, 2),), jnp.zeros(3)
PARTS = {
    "one entry": (lambda y: ROW[y[:, 1]], SECOND),
    "the last one": (lambda y: ROW[y[..., -1]], ((3, 4),)),
    "some": (lambda y: ROW[y[:, 1:3]], ((1, 3),)),
    "one of some": (lambda y: ROW[y[:, 1:3][:, 1:]], ((2, 3),)),
    "of one example": (lambda y: ROW[y[0][1]], SECOND),
    "of transposed entries": (lambda y: ROW[y.T[1]], SECOND),
    "of drawn examples": (lambda y: ROW[y[jnp.argsort(y.sum(1))][:, 1]], SECOND),
    "under vmap": (lambda y: jax.vmap(lambda pair: ROW[pair[1]])(y), SECOND),
    "in a scan": (lambda y: jax.lax.scan(lambda c, pair: (c, ROW[pair[1]]), 0, y), SECOND),
    "after a scan": (lambda y: ROW[jax.lax.scan(lambda c, p: (c, p), 0, y)[1][:, 1]], SECOND),
    "of more axes": (lambda y: ROW[y[None, :, None].reshape(2, 1, 4)[:, 0, 1]], SECOND),
    "of examples side by side": (lambda y: ROW[jnp.concatenate([y, y[:1]])[:, 1]], SECOND),
    "of entries side by side": (
        lambda y: ROW[jnp.concatenate([jnp.minimum(y[:, :1], 2), y[:, 1:]], axis=1)],
        ((1, 4),),
    ),
    "all, in order": (lambda y: ROW[jnp.sort(y, axis=0)[::-1]], FOUR),
    "all, in a row": (lambda y: ROW[y.reshape(-1)], FOUR),
    "all, one after another": (lambda y: jax.lax.scan(lambda c, e: (c, ROW[e]), 0, y.T), FOUR),
    "shifted by one": (lambda y: ROW[jnp.pad(y, ((0, 0), (1, 0)))[:, :-1]], FOUR),
    "some from a computed place on": (
        lambda y: ROW[jax.lax.dynamic_slice_in_dim(y, y.sum(), 2, axis=1)],
        FOUR,
    ),
    "one of reversed": (lambda y: ROW[jnp.flip(y, 1)[:, 1]], None),
    "one of computed place": (lambda y: ROW[y[:, y.sum()]], None),
    "one of a row": (lambda y: ROW[y.reshape(-1)[5]], None),
    "a list": (lambda y: ROW[y[:, np.array([1, 2])]], None),
    "every second one": (lambda y: ROW[y[:, ::2]], None),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_entries_of_an_example_that_are_used(name):
    function, bounds = PARTS[name]
    uses = uses_of(lambda outputs, pairs: function(pairs), PAIRS)
    of_label = {index.part for index in uses.indices if index.entries == 3}
    assert of_label == (set() if bounds is None else {Part("label", bounds)})


def test_a_barrier_keeps_each_of_its_arrays():
    barred = lambda o, y: o.T[jax.lax.optimization_barrier((o, y))[1]]
    assert uses_of(barred).indices == {Index(Part("label"), 0, 3, False)}
