"""BERT's encoder: sizes, a loop in float64, padding, dropout, students, frozen tables."""

import functools

import bert_reference
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core.model import Variables, from_flax_linen
from fedcodist.core.trees import parameter_count
from fedcodist.models.submodels import counts_of, gathered, places_of, scattered
from fedcodist.text.bert import Encoder, attend, bert_base, bert_mini
from fedcodist.text.encoder_start import first_layers, with_encoder, with_frozen_tables
from fedcodist.text.encoder_units import encoder_units, narrowed

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


def test_attention_is_the_softmax_of_scaled_products_with_real_positions():
    draws = np.random.default_rng(0)
    queries, keys, values = draws.normal(size=(3, 2, 4, 2, 5)).astype(np.float32)
    is_real = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], bool)
    seen, shares = attend(*map(jnp.asarray, (queries, keys, values, is_real)))
    for head in range(2):
        scores = np.exp(queries[0, :, head] @ keys[0, :, head].T / np.sqrt(5)) * is_real[0]
        expected = scores / scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(shares[0, head], expected, rtol=1e-5)
        here = slice(5 * head, 5 * head + 5)
        np.testing.assert_allclose(seen[0, :, here], expected @ values[0, :, head], atol=1e-5)
    np.testing.assert_allclose(shares[1], 1 / 4)  # padding alone must be finite


@settings(max_examples=10)
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
    """A model of which an encoder is a part."""

    encoder: Encoder

    @nn.compact
    def __call__(self, tokens, train=False):
        return nn.Dense(2)(self.encoder(tokens, train=train).hidden[-1][:, 0])


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
    lone = from_flax_linen(nn.Dense(2), jnp.zeros((1, 3)))
    for start in (with_encoder, with_frozen_tables):
        with pytest.raises(ValueError, match=r"^model must have parameters 'encoder', got \["):
            start(lone, params)


@pytest.mark.slow
def test_frozen_tables_are_no_parameters_and_stay_the_encoders():
    model = from_flax_linen(Part(SMALL), jnp.asarray(TOKENS), inputs="tokens")
    params, batch = noisy(), {"tokens": jnp.asarray(TOKENS)}
    whole = with_encoder(model, params)
    frozen = with_frozen_tables(whole, params)
    started, of_whole = (each.init(jax.random.key(3)) for each in (frozen, whole))
    tables = (11 + 12 + 2) * 8
    assert parameter_count(started.params) == parameter_count(of_whole.params) - tables
    assert set(started.params["encoder"]["embeddings"]) == {"norm"}
    found, expected = (m.apply(v, batch)[0] for m, v in ((frozen, started), (whole, of_whole)))
    np.testing.assert_array_equal(found, expected)
    # All other parameters have the whole network's gradients, the embeddings' normalisation too.
    loss = lambda model: lambda params: jnp.sum(model.apply(Variables(params, {}), batch)[0] ** 2)
    gradient = jax.grad(loss(frozen))(started.params)
    of_all = jax.grad(loss(whole))(of_whole.params)
    of_all["encoder"]["embeddings"] = {"norm": of_all["encoder"]["embeddings"]["norm"]}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradient, of_all
    )
    assert np.abs(gradient["encoder"]["embeddings"]["norm"]["scale"]).min() > 0
    other = {**params, "embeddings": {**params["embeddings"], "words": jnp.zeros((12, 8))}}
    with pytest.raises(
        ValueError, match=r"^encoder's table words must be \[11, 8\], got \[12, 8\]\.$"
    ):
        with_frozen_tables(model, other)


@pytest.mark.slow
def test_a_frozen_table_is_computed_with_in_the_parameters_precision():
    model = from_flax_linen(Part(SMALL), jnp.asarray(TOKENS), inputs="tokens")
    frozen = with_frozen_tables(model, noisy())
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), frozen.init(jax.random.key(0)))
    assert frozen.apply(half, {"tokens": jnp.asarray(TOKENS)})[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_narrowed_encoder_is_the_whole_one_whose_other_units_are_silent():
    params, draws = noisy(), np.random.default_rng(0)
    small = narrowed(SMALL, 0.5)
    assert (small.heads, small.head_width, small.inner_width, small.width) == (1, 4, 16, 8)
    shapes = jax.eval_shape(small.init, jax.random.key(0), jnp.asarray(TOKENS))["params"]
    units = encoder_units(params, heads=2)
    counts = counts_of(params, shapes, units)
    assert set(counts) == {f"layer{n}/{kind}" for n in (0, 1) for kind in ("heads", "inner")}
    assert counts["layer1/heads"] == (2, 1) and counts["layer0/inner"] == (32, 16)
    kept = {group: np.sort(draws.choice(*count, replace=False)) for group, count in counts.items()}
    places = places_of(kept, params, units)
    cut = gathered(params, places)
    assert jax.tree.map(jnp.shape, cut) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    held = scattered(jax.tree.map(jnp.ones_like, cut), places, params)
    silent = jax.tree.map(jnp.multiply, params, held)
    found, expected = encode(cut, TOKENS, small), encode(silent, TOKENS)
    for a, b in zip(found.hidden, expected.hidden, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for layer in (0, 1):
        own = kept[f"layer{layer}/heads"]
        np.testing.assert_allclose(
            found.attention[layer], np.asarray(expected.attention[layer])[:, own], atol=1e-5
        )
    # Some units were dropped.
    assert np.abs(found.hidden[-1] - encode(params, TOKENS).hidden[-1]).max() > 0.1


def test_units_are_found_wherever_an_encoder_stands():
    whole = {"encoder": noisy(), "head": {"kernel": jnp.ones((8, 3))}}
    units = encoder_units(whole, heads=2)
    assert {name.partition("/")[0] for name in units} == {"encoder"}
    assert not any("embeddings" in name or "norm" in name for name in units)
    with pytest.raises(ValueError, match=r"^heads must be a divisor of the 8 numbers of .*, got 3"):
        encoder_units(whole, heads=3)
    with pytest.raises(ValueError, match=r"^share must be at most 1 and above 0, got 0"):
        narrowed(SMALL, 0)


def test_bad_sizes_and_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^width must be a multiple of heads = 3, got 8\.$"):
        Encoder(11, width=8, layers=1, heads=3)
    names = ("vocabulary", "width", "layers", "heads", "positions", "types")
    for name in (*names, "head_width", "inner_width"):
        sizes = dict(vocabulary=11, width=8, layers=1, heads=2) | {name: 0}
        with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0\.$"):
            Encoder(**sizes)
    with pytest.raises(ValueError, match=r"^dropout must be at least 0 and at most 1, got 1\.5\.$"):
        SMALL.clone(dropout=1.5)
    for shape in ((3,), (1, 13)):
        with pytest.raises(ValueError, match=r"^tokens must be \[batch, length\] of at most 12"):
            SMALL.init(jax.random.key(0), jnp.zeros(shape, jnp.int32))
