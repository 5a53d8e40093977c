"""The recurrent language models: sizes, a loop in float64, and the same network in Haiku."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.from_haiku import from_haiku
from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.data.vocabulary import BOS, EOS, PAD
from fedcodist.text import lstm
from fedcodist.text.next_token import language_model


def count(model):
    return parameter_count(jax.eval_shape(model.init, jax.random.key(0)).params)


def test_parameter_totals():
    assert count(language_model(lstm.small_lstm(), 10_004)) == 1_984_348
    assert count(language_model(lstm.large_lstm(), 10_004)) == 4_278_644
    # The lower-cased 4k word pieces of the paper's appendix C.2.
    assert count(language_model(lstm.small_lstm(4_004), 4_004)) == 826_348
    assert count(language_model(lstm.large_lstm(4_004), 4_004)) == 1_968_644


def test_haiku_parameter_totals():
    pytest.importorskip("haiku")
    large = lstm.haiku_lstm(embedding=192, hidden=140, layers=2)
    assert count(language_model(lstm.haiku_lstm(), 10_004, adapter=from_haiku)) == 1_984_348
    assert count(language_model(large, 10_004, adapter=from_haiku)) == 4_278_644


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(params, tokens, layers):
    """Token by token: appendix E with Haiku's gates."""
    features = np.zeros((*tokens.shape, params["embedding"]["embedding"].shape[1]))
    for row, sentence in enumerate(tokens):
        states = [(0.0, 0.0)] * layers
        for position, token in enumerate(sentence):
            x = params["embedding"]["embedding"][token]
            for layer in range(layers):
                own = params[f"lstm{layer + 1}"]
                hidden, cell = states[layer]
                hidden = np.zeros(len(own["hidden_kernel"])) + hidden
                gates = x @ own["input_kernel"] + hidden @ own["hidden_kernel"] + own["bias"]
                i, g, f, o = np.split(gates, 4)
                cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
                hidden = sigmoid(o) * np.tanh(cell)
                states[layer] = hidden, cell
                projection = params[f"projection{layer + 1}"]
                x = np.tanh(hidden) @ projection["kernel"] + projection["bias"]
            features[row, position] = x
    return features


def test_equals_a_loop_over_tokens():
    tokens = np.array([[BOS, 5, 3, 8, EOS, PAD], [BOS, 8, 8, 4, 7, 9]])
    with jax.enable_x64(True):
        network = lstm.LSTMLanguageModel(12, embedding=6, hidden=5, layers=2)
        variables = network.init(jax.random.key(0), jnp.asarray(tokens))
        noise = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float64) + 0.1 * noise.normal(size=leaf.shape),
            variables["params"],
        )
        outputs = jax.jit(network.apply)({"params": params}, jnp.asarray(tokens))
    np.testing.assert_allclose(outputs.features, reference(params, tokens, 2), rtol=1e-12)
    assert outputs.kernel is not None and outputs.kernel.shape == (6, 12)
    assert outputs.weights.tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]


def as_flax(params):
    """Parameters of Haiku's network of two layers by the names of the other one."""
    width = params["embed"]["embeddings"].shape[1]

    def layer(number):
        suffix = "" if number == 0 else f"_{number}"
        gates = params[f"lstm{suffix}/linear"]
        projection = params[f"linear{suffix}"]
        return {
            f"lstm{number + 1}": {
                "input_kernel": gates["w"][:width],
                "hidden_kernel": gates["w"][width:],
                "bias": gates["b"],
            },
            f"projection{number + 1}": {"kernel": projection["w"], "bias": projection["b"]},
        }

    output = params["~"]
    return {
        "embedding": {"embedding": params["embed"]["embeddings"]},
        **layer(0),
        **layer(1),
        "output": {"kernel": output["output_kernel"], "bias": output["output_bias"]},
    }


@pytest.mark.slow
def test_initial_weights_are_as_large_as_haikus():
    pytest.importorskip("haiku")
    sizes = 900, 60, 40, 2
    haiku = language_model(lstm.haiku_lstm(*sizes), sizes[0], adapter=from_haiku)
    flax = language_model(lstm.LSTMLanguageModel(*sizes), sizes[0])
    drawn = as_flax(haiku.init(jax.random.key(0)).params), flax.init(jax.random.key(1)).params
    scales = [jax.tree.map(lambda leaf: np.std(leaf), params) for params in drawn]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05), *scales)
    assert scales[0]["embedding"]["embedding"] == pytest.approx(0.88, abs=0.01)


@pytest.mark.slow
def test_the_haiku_network_is_the_same_function():
    pytest.importorskip("haiku")
    haiku = language_model(lstm.haiku_lstm(12, 6, 5, 2), 12, adapter=from_haiku)
    flax = language_model(lstm.LSTMLanguageModel(12, 6, 5, 2), 12)
    params = haiku.init(jax.random.key(0)).params

    batch = {
        "tokens": jnp.array([[BOS, 5, 3, 8], [BOS, 4, EOS, PAD]]),
        "label": jnp.array([[5, 3, 8, 7], [4, EOS, PAD, PAD]]),
    }

    def loss_and_outputs(params, model):
        outputs, _ = model.apply(Variables(params, {}), batch, train=True)
        return model.mean_loss(outputs, batch, jnp.ones(2)), outputs

    both = jax.value_and_grad(loss_and_outputs, has_aux=True)
    found, gradient = both(params, haiku)
    expected = both(as_flax(params), flax)
    same = (found, as_flax(gradient)), expected
    for left, right in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-6)


def test_a_step_of_the_scan_is_one_product():
    network = lstm.LSTM(5)
    x = jnp.zeros((2, 7, 6))
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    traced = jax.make_jaxpr(network.apply)(params, x)
    (scan,) = (each for each in traced.jaxpr.eqns if each.primitive.name == "scan")
    inside = [each.primitive.name for each in scan.params["jaxpr"].jaxpr.eqns]
    assert inside.count("dot_general") == 1


def test_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\], got \(3,\)"):
        lstm.small_lstm().init(jax.random.key(0), jnp.zeros(3, jnp.int32))
