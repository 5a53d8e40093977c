"""BERT's encoder: sizes, a loop in float64, padding, dropout, students, tables that stay."""

import functools

import bert_reference
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.model import from_flax_linen, parameter_count
from fedcodist.models.bert import (
    Encoder,
    bert_base,
    bert_mini,
    first_layers,
    frozen_tables,
    with_encoder,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")

TOKENS = np.array([[2, 7, 5, 9, 3], [2, 8, 3, 0, 0], [0, 0, 0, 0, 0]])
SMALL = Encoder(vocabulary=11, width=8, layers=2, heads=2, positions=12)


@functools.cache
def noisy(dtype=np.float32):
    """Parameters none of which is 0 or 1."""
    params = jax.jit(SMALL.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    noise = np.random.default_rng(0)
    add = lambda leaf: jnp.asarray(leaf + 0.4 * noise.normal(size=leaf.shape), dtype)
    return jax.tree.map(add, params)


def encode(params, tokens, network=SMALL, **options):
    return network.apply({"params": params}, jnp.asarray(tokens), **options)


def test_parameter_totals():
    tokens = jnp.zeros((1, 2), jnp.int32)
    of = lambda network: parameter_count(jax.eval_shape(network.init, jax.random.key(0), tokens))
    assert of(bert_base()) == 108_891_648
    assert of(bert_base(layers=3)) - of(bert_base(layers=2)) == 7_087_872
    assert of(bert_mini(100, layers=2)) - of(bert_mini(100, layers=1)) == 789_760


def test_equals_a_loop_over_sentences():
    with jax.enable_x64(True):
        params = noisy(np.float64)
        encoded = jax.jit(encode)(params, TOKENS)
    params = jax.tree.map(np.asarray, params)
    for row, tokens in enumerate(TOKENS):
        hidden, attention = bert_reference.encode(params, tokens, heads=2)
        for found, expected in zip(encoded.hidden, hidden, strict=True):
            np.testing.assert_allclose(found[row], expected, rtol=1e-9, atol=1e-10)
        for found, expected in zip(encoded.attention, attention, strict=True):
            np.testing.assert_allclose(found[row], expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(encoded.is_real, TOKENS != 0)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=5), st.sampled_from([5, 8, 12]))
def test_more_padding_changes_nothing(tokens, length):
    params, size = noisy(), len(tokens)
    rows = np.zeros((1, 5), int), np.zeros((1, length), int)
    for row in rows:
        row[0, :size] = tokens
    short, long = (jax.jit(encode)(params, row) for row in rows)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(short.hidden, long.hidden, strict=True):
        close(a[:, :size], b[:, :size])
    for a, b in zip(short.attention, long.attention, strict=True):
        close(a[:, :, :size, :size], b[:, :, :size, :size])
        assert not np.any(b[..., size:])


def test_types_are_added():
    params, kinds = noisy(), np.array([[0, 0, 1, 1, 1]] * 3)
    plain = encode(params, TOKENS).hidden[-1]
    same = encode(params, TOKENS, types=np.zeros_like(TOKENS)).hidden[-1]
    np.testing.assert_array_equal(same, plain)
    table = params["embeddings"]["types"]
    swapped = {**params, "embeddings": {**params["embeddings"], "types": table[::-1]}}
    others = [encode(swapped, TOKENS, types=1 - kinds), encode(params, TOKENS, types=kinds)]
    np.testing.assert_allclose(others[0].hidden[-1], others[1].hidden[-1], rtol=1e-6)
    assert np.abs(others[1].hidden[-1] - plain).max() > 0.1


def test_training_with_a_key_drops_out():
    params, rngs = noisy(), {"dropout": jax.random.key(1)}
    still = encode(params, TOKENS).hidden[-1]
    np.testing.assert_array_equal(encode(params, TOKENS, train=True).hidden[-1], still)
    moved = encode(params, TOKENS, train=True, rngs=rngs).hidden[-1]
    again = encode(params, TOKENS, train=True, rngs=rngs).hidden[-1]
    assert np.abs(moved - still).max() > 0.01
    np.testing.assert_array_equal(moved, again)
    network = SMALL.clone(dropout=0.0)
    none = encode(params, TOKENS, network, train=True, rngs=rngs).hidden[-1]
    np.testing.assert_array_equal(none, still)


def test_a_student_is_the_first_layers():
    params = noisy()
    student = encode(first_layers(params, 1), TOKENS, SMALL.clone(layers=1))
    np.testing.assert_allclose(student.hidden[0], encode(params, TOKENS).hidden[0], rtol=1e-6)
    for layers in (0, 3):
        with pytest.raises(ValueError, match=rf"^layers must be in 1\.\.2, got {layers}\.$"):
            first_layers(params, layers)


class Part(nn.Module):
    """Something of which an encoder is a part."""

    encoder: Encoder

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(2)(self.encoder(tokens).hidden[-1])


def test_models_start_from_an_encoder():
    model = from_flax_linen(Part(SMALL), jnp.asarray(TOKENS), inputs="tokens")
    params = noisy()
    started = with_encoder(model, params).init(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, started.params["encoder"], params)
    drawn = model.init(jax.random.key(3)).params["Dense_0"]
    jax.tree.map(np.testing.assert_array_equal, started.params["Dense_0"], drawn)
    with pytest.raises(
        ValueError, match=r"^encoder's parameter layer1/\S+ must be \[.*\], got none"
    ):
        with_encoder(model, first_layers(params, 1))
    with pytest.raises(ValueError, match=r"^encoder's parameter layer2/\S+ must be absent, got \["):
        with_encoder(model, {**params, "layer2": params["layer1"]})


def test_frozen_tables_get_no_updates_and_no_moments():
    params = {"teacher": {"encoder": noisy(), "head": jnp.ones(3)}, "maps": [jnp.eye(2)]}
    optimizer = frozen_tables(optax.adam)(0.1)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    tables = (11 + 12 + 2) * 8
    assert parameter_count(state) == 2 * (parameter_count(params) - tables) + 1
    plain = optax.adam(0.1)
    expected, _ = plain.update(params, plain.init(params), params)
    own = expected["teacher"]["encoder"]["embeddings"]
    for name in ("words", "positions", "types"):
        own[name] = jnp.zeros_like(own[name])
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_bad_sizes_and_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^width must be a multiple of heads = 3, got 8\.$"):
        Encoder(11, width=8, layers=1, heads=3)
    for shape in ((3,), (1, 13)):
        with pytest.raises(ValueError, match=r"^tokens must be \[batch, length\] of at most 12"):
            SMALL.init(jax.random.key(0), jnp.zeros(shape, jnp.int32))
