"""The small transformers: sizes, a loop in float64, and that no position sees a later one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.trees import parameter_count
from fedcodist.data.vocabulary import BOS, EOS, PAD
from fedcodist.text import transformer

pytestmark = pytest.mark.usefixtures("compile_quickly")

TOKENS = np.array([[BOS, 5, 3, 8, 9, EOS], [BOS, 8, 8, EOS, PAD, PAD]])


def small(dtype=np.float64):
    network = transformer.Transformer(12, width=8, heads=2, blocks=2)
    params = jax.jit(network.init)(jax.random.key(0), jnp.asarray(TOKENS))["params"]
    noise = np.random.default_rng(0)
    return network, jax.tree.map(
        lambda leaf: jnp.asarray(leaf + 0.3 * noise.normal(size=leaf.shape), dtype),
        params,
    )


def test_parameter_totals():
    tokens = jnp.zeros((1, 2), jnp.int32)
    totals = [
        parameter_count(jax.eval_shape(network.init, jax.random.key(0), tokens))
        for network in (transformer.small_transformer(), transformer.large_transformer())
    ]
    assert totals == [2_083_860, 4_178_740]
    assert abs(totals[0] / 1_984_348 - 1) < 0.06 and abs(totals[1] / 4_278_644 - 1) < 0.03


def normalised(x, own):
    centred = x - x.mean()
    return centred / np.sqrt((centred**2).mean() + 1e-6) * own["scale"] + own["bias"]


def dense(x, own):
    return x @ own["kernel"] + own["bias"]


def turned(x, position):
    pairs = x[: len(x) // 2] + 1j * x[len(x) // 2 :]
    turn = np.exp(1j * position * 10_000.0 ** (-np.arange(len(pairs)) / len(pairs)))
    return np.concatenate([(pairs * turn).real, (pairs * turn).imag])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def reference(params, sentence, heads):
    stream = [params["embedding"][token] for token in sentence]
    for block in (params["block1"], params["block2"]):
        width = len(stream[0])
        size = width // heads
        split = [
            dense(normalised(x, block["norm1"]), block["queries_keys_values"]).reshape(3, heads, -1)
            for x in stream
        ]
        after = []
        for now, x in enumerate(stream):
            heard = []
            for head in range(heads):
                query = turned(split[now][0, head], now)
                scores = np.array(
                    [query @ turned(split[t][1, head], t) for t in range(now + 1)]
                ) / np.sqrt(size)
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                heard.append(sum(s * split[t][2, head] for t, s in enumerate(shares)))
            x = x + dense(np.concatenate(heard), block["attention_output"])
            inner = gelu(dense(normalised(x, block["norm2"]), block["dense1"]))
            after.append(x + dense(inner, block["dense2"]))
        stream = after
    return np.stack([normalised(x, params["norm"]) for x in stream])


def test_equals_a_loop_over_positions():
    with jax.enable_x64(True):
        network, params = small()
        outputs = jax.jit(network.apply)({"params": params}, jnp.asarray(TOKENS))
    params = jax.tree.map(np.asarray, params)
    expected = np.stack([reference(params, sentence, 2) for sentence in TOKENS])
    # JAX's attention computes its softmax in float32.
    np.testing.assert_allclose(outputs.features, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs.kernel, params["embedding"].T)


def test_no_position_sees_a_later_one():
    network, params = small(np.float32)
    apply = jax.jit(lambda tokens: network.apply({"params": params}, tokens).features)
    changed = np.array(TOKENS)
    changed[:, 3:] = 7
    np.testing.assert_allclose(apply(TOKENS)[:, :3], apply(changed)[:, :3], rtol=1e-6)
    assert np.abs(apply(TOKENS)[:, 3:] - apply(changed)[:, 3:]).max() > 0.1


def test_bad_sizes_and_tokens_are_refused():
    with pytest.raises(ValueError, match=r"width must be a multiple of 2 heads = 8, got 12"):
        transformer.Transformer(12, width=12, heads=4, blocks=1)
    with pytest.raises(ValueError, match=r"heads must be at least 1, got 0"):
        transformer.Transformer(12, width=8, heads=0, blocks=1)
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\], got \(3,\)"):
        transformer.small_transformer().init(jax.random.key(0), jnp.zeros(3, jnp.int32))
