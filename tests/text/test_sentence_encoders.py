"""Encoders of one layer against loops in float64; padding, pooling, embeddings from a file."""

import functools

import bert_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_examples import SENTENCES

from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.text.bert import Encoder
from fedcodist.text.bert_weights import load_embeddings, save_encoder
from fedcodist.text.encoder_start import with_embeddings, with_frozen_tables
from fedcodist.text.sentence_classifier import sentence_classifier
from fedcodist.text.sentence_encoders import ConvolutionEncoder, LSTMEncoder, SelfAttentionEncoder

pytestmark = pytest.mark.usefixtures("compile_quickly")

ENCODERS = {
    "convolution": ConvolutionEncoder(11, 8, features=6, window=3, positions=12),
    "lstm": LSTMEncoder(11, 8, hidden=5, positions=12),
    "attention": SelfAttentionEncoder(11, 8, heads=2, head_width=3, positions=12),
}
NETWORKS = [
    ("convolution", "max"),
    ("convolution", "attention"),
    ("lstm", "last"),
    ("lstm", "max"),
    ("lstm", "attention"),
    ("attention", "attention"),
]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def embedded(params, tokens):
    tables = params["embeddings"]
    sums = [
        tables["words"][token] + tables["positions"][place] + tables["types"][0]
        for place, token in enumerate(tokens)
    ]
    return [bert_reference.normalised(row, tables) for row in sums]


def convolution(params, tokens):
    rows = [row * (token > 0) for row, token in zip(embedded(params, tokens), tokens, strict=True)]
    states = []
    for place in range(len(tokens)):
        near = range(place - 1, place + 2)
        window = [rows[n] if 0 <= n < len(rows) else np.zeros_like(rows[0]) for n in near]
        convolved = bert_reference.dense(params["convolution"], np.concatenate(window))
        states.append(np.maximum(convolved, 0))
    return states


def lstm(params, tokens):
    own, states = params["lstm"], []
    hidden = cell = np.zeros(5)
    for row in embedded(params, tokens):
        gates = row @ own["input_kernel"] + hidden @ own["hidden_kernel"] + own["bias"]
        i, g, f, o = gates.reshape(4, 5)
        cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        states.append(hidden)
    return states


def attention(params, tokens):
    rows = embedded(params, tokens)
    query, key, value = (
        [bert_reference.dense(params[name], row) for row in rows]
        for name in ("query", "key", "value")
    )
    real = [place for place, token in enumerate(tokens) if token]
    states = []
    for now in range(len(rows)):
        heard = []
        for head in (slice(0, 3), slice(3, 6)):
            scores = [query[now][head] @ key[place][head] / 3**0.5 for place in real]
            shares = bert_reference.softmax(scores)
            heard.append(sum(s * value[p][head] for s, p in zip(shares, real, strict=True)))
        states.append(np.concatenate(heard))
    return states


def logits(params, states, tokens, pooling):
    real = [state for state, token in zip(states, tokens, strict=True) if token]
    if pooling == "attention":
        pooled = bert_reference.pooled(params["pooling"], states, tokens > 0)
    else:
        pooled = np.max(real, axis=0) if pooling == "max" else real[-1]
    return bert_reference.dense(params["classes"], pooled)


@pytest.mark.parametrize(("kind", "pooling"), NETWORKS)
def test_networks_are_plain_loops(kind, pooling):
    model = sentence_classifier(ENCODERS[kind], classes=3, queries=4, pooling=pooling)
    with jax.enable_x64(True):
        noise = np.random.default_rng(0)
        add = lambda leaf: jnp.asarray(leaf + 0.3 * noise.normal(size=leaf.shape), np.float64)
        params = jax.tree.map(add, model.init(jax.random.key(0)).params)
        found = jax.jit(model.apply)(Variables(params, {}), SENTENCES)[0]
        params, found = jax.tree.map(np.asarray, (params, found))
    for row, tokens in enumerate(SENTENCES["tokens"][:2]):  # the third has no tokens
        states = globals()[kind](params["encoder"], tokens)
        count = int((tokens > 0).sum())
        np.testing.assert_allclose(found.hidden[0][row][:count], states[:count], rtol=1e-9)
        expected = logits(params, states, tokens, pooling)
        np.testing.assert_allclose(found.logits[row], expected, rtol=1e-9)
    assert len(found.attention) == (kind == "attention")
    assert np.isfinite(found.logits).all()


@pytest.mark.parametrize(("kind", "pooling"), NETWORKS)
def test_padding_changes_nothing_and_gradients_are_finite(kind, pooling):
    model = sentence_classifier(ENCODERS[kind], classes=3, queries=4, pooling=pooling)
    variables = model.init(jax.random.key(0))
    longer = {**SENTENCES, "tokens": np.pad(SENTENCES["tokens"], ((0, 0), (0, 3)))}
    short, long = (model.apply(variables, batch)[0].logits for batch in (SENTENCES, longer))
    np.testing.assert_allclose(short, long, atol=1e-6)

    def loss(params):
        outputs = model.apply(Variables(params, {}), SENTENCES, train=True, key=jax.random.key(1))
        return model.loss(outputs[0], SENTENCES).sum()

    slopes = jax.grad(loss)(variables.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_embeddings_come_from_an_encoders_file(tmp_path):
    encoder = Encoder(vocabulary=11, width=8, layers=2, heads=2, positions=12)
    stored = encoder.init(jax.random.key(3), np.ones((1, 2), np.int32))["params"]
    save_encoder(tmp_path / "encoder.safetensors", stored, {"heads": "2"})
    embeddings = load_embeddings(tmp_path / "encoder.safetensors")
    jax.tree.map(np.testing.assert_array_equal, embeddings, stored["embeddings"])

    plain = sentence_classifier(ENCODERS["lstm"], classes=3, queries=4)
    started = with_embeddings(plain, embeddings)
    variables = started.init(jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal, variables.params["encoder"]["embeddings"], embeddings
    )
    own = plain.init(jax.random.key(0)).params["encoder"]["lstm"]
    jax.tree.map(np.testing.assert_array_equal, variables.params["encoder"]["lstm"], own)

    frozen = with_frozen_tables(started, {"embeddings": embeddings})
    kept = frozen.init(jax.random.key(0))
    assert set(kept.params["encoder"]["embeddings"]) == {"norm"}
    tables = 8 * (11 + 12 + 2)
    assert parameter_count(variables.params) - parameter_count(kept.params) == tables
    outputs = (model.apply(v, SENTENCES)[0] for model, v in ((started, variables), (frozen, kept)))
    np.testing.assert_allclose(*(each.logits for each in outputs), rtol=1e-6)

    other = sentence_classifier(LSTMEncoder(11, 6, positions=12), classes=3)
    message = r"^encoder's parameter norm/bias must be \[6\], got \[8\]\.$"
    with pytest.raises(ValueError, match=message):
        with_embeddings(other, embeddings)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: ConvolutionEncoder(11, 8, window=2), "window must be odd, got 2."),
        (lambda: ConvolutionEncoder(11, 8, features=0), "features must be at least 1, got 0."),
        (lambda: LSTMEncoder(11, 8, hidden=0), "hidden must be at least 1, got 0."),
        (lambda: SelfAttentionEncoder(11, 0), "width must be at least 1, got 0."),
        (
            functools.partial(sentence_classifier, ENCODERS["lstm"], pooling="mean"),
            "pooling must be one of ('attention', 'max', 'last'), got 'mean'.",
        ),
        (
            lambda: sentence_classifier(LSTMEncoder(11, 8, positions=1)),
            "tokens must be [batch, length] of at most 1 positions, got [1, 2].",
        ),
    ],
)
def test_bad_sizes_are_one_line(create, message):
    with pytest.raises(ValueError) as error:
        create()
    assert str(error.value).split("\n")[0] == message
