"""The codistillation paper's small and large recurrent language models (appendix E)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.readout import Readout
from fedcodist.text.next_token import position_weights

# FedJAX's: 10,000 words, padding, beginning and end of a sentence, unknown words.
VOCABULARY = 10_004


def small_lstm(vocabulary: int = VOCABULARY) -> "LSTMLanguageModel":
    """One layer of 70 units, embeddings of 96: 1,984,348 parameters for 10,004 tokens."""
    return LSTMLanguageModel(vocabulary, embedding=96, hidden=70, layers=1)


def large_lstm(vocabulary: int = VOCABULARY) -> "LSTMLanguageModel":
    """Two layers of 140 units, embeddings of 192: 4,278,644 parameters for 10,004 tokens."""
    return LSTMLanguageModel(vocabulary, embedding=192, hidden=140, layers=2)


class LSTMLanguageModel(nn.Module):
    """Embedding, layers of LSTM, tanh, a linear map back to the embedding's size, and the output layer.

    The output layer does not share the embedding's weights. Initial weights are drawn as in Haiku, in
    which FedJAX's model is written. Called with tokens int [B, T]; returns a `Readout` of [B, T,
    embedding], where position t predicts token t + 1.
    """

    vocabulary: int
    embedding: int
    hidden: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Readout:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got {tokens.shape}")
        draw = nn.initializers.truncated_normal
        x = nn.Embed(self.vocabulary, self.embedding, embedding_init=draw(1.0), name="embedding")(
            tokens
        )
        for layer in range(self.layers):
            x = jnp.tanh(LSTM(self.hidden, name=f"lstm{layer + 1}")(x))
            linear = draw(self.hidden**-0.5)
            x = nn.Dense(self.embedding, kernel_init=linear, name=f"projection{layer + 1}")(x)
        kernel, bias = _Output(self.vocabulary, name="output")(x.shape[-1])
        return Readout(x, kernel, bias, position_weights(tokens))


class LSTM(nn.Module):
    """Long short-term memory over [B, T, features]; returns the hidden states [B, T, hidden].

    Gates are in the order input, candidate, forget, output, with 1 added to the forget gate (Jozefowicz
    et al., 2015). The inputs of all positions are multiplied at once, so a step of the scan is one
    product of the hidden state with a [hidden, 4 hidden] kernel. Initial states are zero.
    """

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = 4 * self.hidden
        # The deviation of both kernels follows from all inputs that a gate sums over.
        scale = (x.shape[-1] + self.hidden) ** -0.5
        draw = nn.initializers.truncated_normal(scale)
        inputs = self.param("input_kernel", draw, (x.shape[-1], width))
        recurrent = self.param("hidden_kernel", draw, (self.hidden, width))
        bias = self.param("bias", nn.initializers.zeros_init(), (width,))
        x, inputs, recurrent, bias = nn.dtypes.promote_dtype(x, inputs, recurrent, bias)
        gates = jnp.swapaxes(x @ inputs + bias, 0, 1)  # time first, as the scan reads it

        def step(
            carry: tuple[jax.Array, jax.Array], gates: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            hidden, cell = carry
            i, g, f, o = jnp.split(gates + hidden @ recurrent, 4, axis=-1)
            cell = nn.sigmoid(f + 1) * cell + nn.sigmoid(i) * jnp.tanh(g)
            hidden = nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((len(x), self.hidden), gates.dtype)
        _, hidden = jax.lax.scan(step, (zeros, zeros), gates)
        return jnp.swapaxes(hidden, 0, 1)


def haiku_lstm(
    vocabulary: int = VOCABULARY, embedding: int = 96, hidden: int = 70, layers: int = 1
) -> Callable[[jax.Array], Readout]:
    """The same network made of Haiku's layers, for `from_haiku`; by default the small one."""

    def network(tokens: jax.Array) -> Readout:
        import haiku as hk

        x = hk.Embed(vocabulary, embedding)(tokens)
        for _ in range(layers):
            core = hk.LSTM(hidden)
            x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
            x = hk.Linear(embedding)(jnp.tanh(x))
        kernel = hk.get_parameter(
            "output_kernel",
            (embedding, vocabulary),
            init=hk.initializers.TruncatedNormal(embedding**-0.5),
        )
        bias = hk.get_parameter("output_bias", (vocabulary,), init=jnp.zeros)
        return Readout(x, kernel, bias, position_weights(tokens))

    return network


class _Output(nn.Module):
    """The parameters of a dense layer, which the loss applies."""

    classes: int

    @nn.compact
    def __call__(self, width: int) -> tuple[jax.Array, jax.Array]:
        draw = nn.initializers.truncated_normal(width**-0.5)
        kernel = self.param("kernel", draw, (width, self.classes))
        return kernel, self.param("bias", nn.initializers.zeros_init(), (self.classes,))
