"""Loss and accuracy against loops in float64, sampled training, and generated text."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core import sampled_softmax
from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.model import Variables
from fedcodist.core.readout import Readout
from fedcodist.data.vocabulary import BOS, EOS, PAD
from fedcodist.run.metric_sums import mean
from fedcodist.text import lstm
from fedcodist.text.lstm import LSTMLanguageModel, haiku_lstm, small_lstm
from fedcodist.text.next_token import (
    continuations,
    language_model,
    next_tokens,
    tokens_by_frequency,
)
from fedcodist.text.transformer import Transformer
from tests.core.test_readout import all_shapes

pytestmark = pytest.mark.usefixtures("compile_quickly")

WORDS = 7
VOCABULARY = WORDS + 4
UNKNOWN = VOCABULARY - 1
LENGTH = 6


def rows_of(sentences):
    """As Vocabulary.encode, of words that are tokens already."""
    tokens = np.full((len(sentences), LENGTH + 1), PAD, np.uint16)
    for row, sentence in zip(tokens, sentences, strict=True):
        whole = [BOS, *sentence, EOS][: LENGTH + 1]
        row[: len(whole)] = whole
    return tokens


sentences = st.lists(
    st.lists(st.integers(EOS + 1, UNKNOWN), min_size=1, max_size=9), min_size=4, max_size=4
)


def reference(logits, tokens, expected_length):
    """Loss per sentence, loss per token and accuracy, one target at a time."""
    losses, per_token, right = [], [], []
    for row, sentence in zip(logits, tokens, strict=True):
        own = []
        for scores, target in zip(row, sentence[1:], strict=True):
            if target == PAD:
                continue
            own.append(np.log(np.exp(scores).sum()) - scores[target])
            if target != EOS:
                right.append(EOS + 1 + np.argmax(scores[EOS + 1 : UNKNOWN]) == target)
        losses.append(sum(own) / expected_length)
        per_token += own
    return losses, np.mean(per_token), np.mean(right)


@settings(max_examples=15)
@given(sentences, st.integers(0, 99))
def test_loss_and_accuracy_equal_a_loop(text, seed):
    rng = np.random.default_rng(seed)
    tokens = rows_of(text)
    with jax.enable_x64(True):
        features = rng.normal(size=(4, LENGTH, 4))
        kernel, bias = rng.normal(size=(4, VOCABULARY)), rng.normal(size=VOCABULARY)
        outputs = Readout(*map(jnp.asarray, (features, kernel, bias, np.ones((4, LENGTH)))))
        losses, values = evaluation()(outputs, tokens)
    expected = reference(features @ kernel + bias, tokens, 2.5)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-9)
    np.testing.assert_allclose(values["loss"], expected[1], rtol=1e-6)
    np.testing.assert_allclose(values["accuracy"], expected[2], rtol=1e-6)


def evaluated(model):
    @jax.jit
    def evaluate(outputs, tokens):
        batch = next_tokens({"tokens": tokens}, None, None)
        values = {}
        for name, statistic in model.metrics.items():
            metric = mean(statistic)
            values[name] = metric.compute(metric.evaluate(outputs, batch, jnp.ones(len(tokens))))
        return model.loss(outputs, batch), values

    return evaluate


@functools.cache
def evaluation():
    """`evaluated` with sentences of 2.5 tokens; compiled once for all examples."""
    return evaluated(language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY, 2.5))


NETWORKS = {
    "lstm": LSTMLanguageModel(VOCABULARY, 4, 3, 2),
    "transformer": Transformer(VOCABULARY, 8, 2, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@settings(max_examples=4)
@given(text=sentences)
def test_more_padding_changes_nothing(network, text):
    model = language_model(NETWORKS[network], VOCABULARY, 2.5)
    params = jax.jit(model.init)(jax.random.key(0)).params

    def loss(params, tokens):
        batch = next_tokens({"tokens": tokens}, None, None)
        outputs, _ = model.apply(Variables(params, {}), batch, train=True)
        return model.mean_loss(outputs, batch, jnp.ones(len(tokens)))

    of = jax.jit(jax.value_and_grad(loss))
    tokens = rows_of(text)
    once, more = of(params, tokens), of(params, np.pad(tokens, ((0, 2), (0, 5))))
    # Two more sentences of padding alone count only in the mean over sentences.
    more = jax.tree.map(lambda leaf: leaf * (len(tokens) + 2) / len(tokens), more)
    for one, other in zip(jax.tree.leaves(once), jax.tree.leaves(more), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_an_unknown_word_is_an_error_and_never_predicted():
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY)
    likes = jnp.zeros(VOCABULARY).at[jnp.array([PAD, BOS, EOS, UNKNOWN])].set(9.0).at[5].set(1.0)
    outputs = Readout(
        jnp.zeros((2, LENGTH, 4)), jnp.zeros((4, VOCABULARY)), likes, jnp.ones((2, LENGTH))
    )
    tokens = rows_of([[5, UNKNOWN, 5], [UNKNOWN]])
    assert evaluated(model)(outputs, tokens)[1]["accuracy"] == 2 / 4


def client(tokens):
    size = jnp.int32(len(tokens))
    return ClientData({"tokens": jnp.asarray(tokens)}, jnp.int32(0), size, size, len(tokens), False)


@pytest.mark.parametrize("samples", [pytest.param(0, marks=pytest.mark.slow), 30])
def test_training_learns_a_cycle_of_words(samples):
    words = np.arange(EOS + 1, UNKNOWN)
    tokens = rows_of([np.roll(words, -shift)[:5].tolist() for shift in range(WORDS)] * 4)
    model = language_model(
        LSTMLanguageModel(VOCABULARY, 16, 16, 1), VOCABULARY, LENGTH, samples=samples
    )
    training = LocalTraining(batch_size=7, epochs=60, preprocess=next_tokens)
    trained = jax.jit(
        lambda key: train_client(model, training, model.init(key), client(tokens), key, 2.0)
    )(jax.random.key(0))
    outputs, _ = model.apply(trained.variables, next_tokens({"tokens": tokens}, None, None))
    # The first word of a sentence, one target of five, is anyone's guess.
    assert evaluated(model)(outputs, tokens)[1]["accuracy"] > 0.8
    written = continuations(model, trained.variables, tokens[:, :2], 4)
    np.testing.assert_array_equal(written[:, :6], tokens[:, :6])


def test_a_client_never_has_the_logits_of_its_batch():
    model = language_model(small_lstm(), lstm.VOCABULARY, 13.3)
    training = LocalTraining(batch_size=20, epochs=1, preprocess=next_tokens)
    data = client(np.full((40, 21), EOS + 1, np.uint16))
    key = jax.random.key(0)
    train = lambda variables, key: train_client(model, training, variables, data, key, 0.1)
    program = jax.make_jaxpr(train)(jax.eval_shape(model.init, key), key)
    shapes = {shape for shape in all_shapes(program.jaxpr) if shape[-1:] == (lstm.VOCABULARY,)}
    # A quarter of the positions; embeddings have 96 features.
    assert max(math.prod(shape[:-1]) for shape in shapes) == 20 * 20 // 4


@pytest.mark.parametrize("samples", [0, 8])
def test_the_mean_loss_is_that_of_the_sentences_that_count(samples):
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY, 2.5, samples)
    params = model.init(jax.random.key(0)).params
    tokens = jnp.asarray(rows_of([[3, 4], [5] * 9, [7], [6, 6, 3]]))
    batch = next_tokens({"tokens": tokens}, None, None)

    def mean(params, mask, cheap):
        outputs, _ = model.apply(
            Variables(params, {}), batch, train=True, key=jax.random.key(1), mask=mask
        )
        if cheap:
            return model.mean_loss(outputs, batch, mask)
        return jnp.sum(model.loss(outputs, batch) * mask) / jnp.maximum(jnp.sum(mask), 1)

    of = jax.jit(jax.value_and_grad(mean), static_argnums=2)
    for mask in ([1.0, 0.0, 1.0, 1.0], [0.0] * 4):
        found, expected = of(params, jnp.array(mask), True), of(params, jnp.array(mask), False)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_samples_are_of_tokens_that_are_targets():
    """A sentence's end and the unknown word are the most frequent; padding and beginnings the least."""
    assert sorted(tokens_by_frequency(50)) == list(range(50))
    drawn = sampled_softmax.draw_classes(jax.random.key(0), 100_000, tokens_by_frequency(50))
    counts = np.bincount(drawn, minlength=50)
    assert set(np.argsort(-counts)[:3]) == {EOS, 49, 3}
    assert counts[[PAD, BOS]].max() < counts.max() / 20


def test_samples_are_drawn_in_training_only():
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY, samples=5)
    variables = model.init(jax.random.key(0))
    batch = next_tokens({"tokens": rows_of([[3, 4]])}, None, None)
    key = jax.random.key(1)
    assert model.apply(variables, batch, key=key)[0].samples is None
    assert model.apply(variables, batch, train=True)[0].samples is None
    assert model.apply(variables, batch, train=True, key=key)[0].samples.shape == (5,)


def test_continuations_end_and_never_hold_what_is_no_word():
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY)
    variables = model.init(jax.random.key(0))
    prompts = np.full((50, 1), BOS)
    write = jax.jit(lambda key: continuations(model, variables, prompts, 20, key))
    written = np.asarray(write(jax.random.key(0)))
    assert written.shape == (50, 21) and (written[:, 0] == BOS).all()
    assert not np.isin(written[:, 1:], (BOS, UNKNOWN)).any()
    for row in written[:, 1:]:
        ended = np.flatnonzero(row == EOS)
        after = ended[0] + 1 if len(ended) else len(row)
        assert (row[after:] == PAD).all() and (row[:after] != PAD).all()
    assert (written == EOS).any() and len(np.unique(written, axis=0)) > 40
    assert np.array_equal(written, write(jax.random.key(0)))


@pytest.mark.parametrize("prompts", [np.zeros((2, 0), int), np.array([BOS]), np.ones((2, 1))])
def test_prompts_without_a_token_are_refused(prompts):
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY)
    with pytest.raises(ValueError, match=r"^prompts must be int \[B, P\] with P at least 1, got "):
        continuations(model, None, prompts, 1)


@pytest.mark.parametrize(
    "prompts", [[[BOS, VOCABULARY]], np.array([[-1, BOS]]), np.array([[2**40]])]
)
def test_prompts_outside_the_vocabulary_are_refused(prompts):
    model = language_model(LSTMLanguageModel(VOCABULARY, 4, 3, 1), VOCABULARY)
    message = rf"^prompts must be tokens in 0\.\.{VOCABULARY - 1}, .*, got {np.min(prompts)} to "
    with pytest.raises(ValueError, match=message):
        continuations(model, None, prompts, 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"vocabulary": 4}, "vocabulary must be at least 5, got 4"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"expected_length": 0}, "expected_length must be above 0, got 0"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        language_model(None, **{"vocabulary": VOCABULARY, **arguments})


class WithBias(nn.Module):
    """A network whose readout has any bias."""

    bias: tuple[int, ...] | None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, 4)(tokens)
        bias = None if self.bias is None else jnp.zeros(self.bias)
        return Readout(x, jnp.zeros((4, VOCABULARY)), bias, jnp.ones(tokens.shape))


@pytest.mark.parametrize("bias", [None, (), (1,), (VOCABULARY + 1,)])
def test_readouts_whose_bias_does_not_fit_are_refused(bias):
    with pytest.raises(ValueError, match=r"^network must return a Readout with kernel .* and bias"):
        language_model(WithBias(bias), VOCABULARY)
    assert language_model(WithBias((VOCABULARY,)), VOCABULARY).num_classes == VOCABULARY


@pytest.mark.parametrize("vocabulary", [VOCABULARY - 1, VOCABULARY + 1])
@pytest.mark.parametrize("library", ["flax", "haiku"])
def test_a_vocabulary_other_than_the_networks_is_refused(library, vocabulary):
    message = rf"^vocabulary must be the .* classes, {VOCABULARY}, got {vocabulary}\.$"
    if library == "haiku":
        pytest.importorskip("haiku")
        network, options = haiku_lstm(VOCABULARY, 4, 3), {"adapter": from_haiku}
    else:
        network, options = LSTMLanguageModel(VOCABULARY, 4, 3, 1), {"samples": 5}
    with pytest.raises(ValueError, match=message):
        language_model(network, vocabulary, **options)


def test_a_network_without_a_readout_is_refused():
    with pytest.raises(TypeError, match=r"^network must return a .*Readout, got ShapeDtypeStruct"):
        language_model(nn.Embed(VOCABULARY, VOCABULARY), VOCABULARY)
