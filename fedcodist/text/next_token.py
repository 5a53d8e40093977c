"""Next-token prediction: turns a network that returns a `Readout` into a `Model`, and continues text.

Text is a column `tokens`, int [examples, T + 1]: the beginning of a sentence, its tokens, its end,
padding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core import keys, readout, sampled_softmax
from fedcodist.core.checks import check_integer, check_number, shown
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.core.readout import Readout
from fedcodist.data.vocabulary import BOS, EOS, PAD

PyTree = Any


def language_model(
    network: Any,
    vocabulary: int,
    expected_length: float = 1.0,
    samples: int = 0,
    adapter: Callable[..., Model] = from_flax_linen,
) -> Model:
    """Makes a Model of a network that predicts the next token.

    Batches are those of `next_tokens`. As in FedJAX, the loss of a sentence is the sum over its tokens
    divided by `expected_length`, so all tokens have the same weight in a client's step. Metrics are
    `loss`, per token, and `accuracy` in the vocabulary, both weighted by tokens.

    A batch has sentences of all lengths. Logits of padding, which would be most of the work, are not
    computed. The layers below do compute padding. With 13.3 of 20 positions to predict, that is 3 % of a
    step of the paper's small LSTM, 8 % of its large one and 20 % of the large transformer's.

    Args:
      network: called as `network(tokens int [B, T])`, returns a Readout.
      vocabulary: number of tokens, the special ones included; the network has as many classes.
      expected_length: mean number of predicted tokens of a sentence; 13.3 for Stack Overflow.
      samples: classes that are sampled for a training step's softmax; 0 takes all classes.
      adapter: `from_flax_linen`, `from_flax_nnx` or `from_haiku`.

    Raises:
      ValueError, TypeError: a number out of range, or a network that returns no Readout, or one of
        another number of classes.
    """
    check_integer("vocabulary", vocabulary, low=5)
    check_integer("samples", samples, low=0)
    check_number("expected_length", expected_length, above=0)

    def loss(outputs: Readout, batch: Batch) -> jax.Array:
        return jnp.sum(_token_losses(outputs, batch), axis=-1) / expected_length

    def mean_loss(outputs: Readout, batch: Batch, mask: jax.Array) -> jax.Array:
        weights = (batch["label"] != PAD) * mask[:, None]
        outputs = outputs._replace(weights=weights.astype(jnp.float32))
        if outputs.samples is None:
            total = readout.total_in_chunks(readout.label_losses, outputs, batch["label"])
        else:
            total = jnp.sum(_sampled(outputs, batch["label"]))
        return total / (expected_length * jnp.maximum(jnp.sum(mask), 1))

    example = jnp.zeros((1, 2), jnp.int32)
    base = adapter(network, example, inputs="tokens", loss=loss)
    _check_readout(base, example, vocabulary)

    def apply(
        variables: Variables,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        **options: Any,
    ) -> tuple[Readout, PyTree]:
        outputs, mutable = base.apply(variables, batch, train=train, key=key, **options)
        if samples and train and key is not None:
            order = tokens_by_frequency(vocabulary)
            drawn = sampled_softmax.draw_classes(keys.derive(key, "samples"), samples, order)
            outputs = outputs._replace(samples=drawn)
        return outputs, mutable

    metrics = {"loss": _loss_per_token, "accuracy": accuracy_in_vocabulary}
    return base._replace(apply=apply, metrics=metrics, num_classes=vocabulary, mean_loss=mean_loss)


def next_tokens(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
    """Preprocessing of a column `tokens` [B, T + 1]: inputs `tokens` and the tokens after them, `label`.

    Both are int32 [B, T].
    """
    tokens = batch["tokens"].astype(jnp.int32)
    return {**batch, "tokens": tokens[:, :-1], "label": tokens[:, 1:]}


def accuracy_in_vocabulary(outputs: Readout, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """FedJAX's accuracy: the share of words that were the most probable word.

    Targets that are padding or a sentence's end do not count. Padding, beginning, end and unknown are
    never predicted, so an unknown word is an error.

    Returns:
      Share per sentence [B] and number of words [B].
    """
    labels = batch["label"]
    classes = jnp.arange(len(outputs.bias))
    is_word = (classes > EOS) & (classes < len(classes) - 1)
    counts = (labels != PAD) & (labels != EOS)
    predicted = readout.most_probable(outputs._replace(weights=counts), is_word)
    return readout.mean_per_example((predicted == labels) & counts, counts)


def tokens_by_frequency(vocabulary: int) -> np.ndarray:
    """Tokens in about the order of their frequency as targets, int [vocabulary].

    Words are numbered by frequency. A sentence's end and the unknown token (the last number) are as
    frequent as the first words. Padding and a sentence's beginning are never targets.
    """
    words = np.arange(max(PAD, BOS, EOS) + 1, vocabulary - 1)
    return np.array([EOS, vocabulary - 1, *words, PAD, BOS])


def position_weights(tokens: jax.Array) -> jax.Array:
    """1 where inputs [B, T] have a next token to predict; 0 for padding and a sentence's end."""
    return ((tokens != PAD) & (tokens != EOS)).astype(jnp.float32)


def continuations(
    model: Model,
    variables: Variables,
    prompts: jax.Array,
    length: int,
    key: jax.Array | None = None,
    temperature: float = 1.0,
) -> jax.Array:
    """Continues prompts with a model, token by token.

    Args:
      model: a `language_model`.
      variables: its variables.
      prompts: int [B, P], the same length for all, at least 1; usually a beginning of a sentence first.
      length: tokens to write.
      key: draws tokens; without it the most probable token is taken.
      temperature: divides logits before drawing.

    Returns:
      Tokens int32 [B, P + length]; padding after a sentence's end. Unknown words are not written.

    Raises:
      ValueError: other prompts, a token that is not in the vocabulary, or a number out of range.
    """
    check_integer("length", length, low=1)
    check_number("temperature", temperature, above=0)
    given, prompts = prompts, jnp.asarray(prompts)
    is_int = jnp.issubdtype(prompts.dtype, jnp.integer)
    if not is_int or prompts.ndim != 2 or not prompts.shape[1]:
        raise ValueError(
            "prompts must be int [B, P] with P at least 1, "
            f"got {prompts.dtype} {list(prompts.shape)}."
        )
    _check_tokens("prompts", given, model.num_classes)
    start = prompts.shape[1]
    tokens = jnp.pad(prompts.astype(jnp.int32), ((0, 0), (0, length)))
    classes = jnp.arange(model.num_classes)
    allowed = (classes >= EOS) & (classes < model.num_classes - 1)

    def write(index: jax.Array, tokens: jax.Array) -> jax.Array:
        outputs = model.apply(variables, {"tokens": tokens})[0]
        last = outputs.features[:, index - 1]
        logits = readout.logits_of(last, outputs.kernel, outputs.bias) / temperature
        logits = jnp.where(allowed, logits, -jnp.inf)
        if key is None:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            chosen = jax.random.categorical(keys.derive(key, index), logits)
        before = tokens[:, index - 1]
        chosen = jnp.where((before == EOS) | (before == PAD), PAD, chosen)
        return tokens.at[:, index].set(chosen.astype(jnp.int32))

    return jax.lax.fori_loop(start, start + length, write, tokens)


def _check_readout(model: Model, tokens: jax.Array, vocabulary: int) -> None:
    """Checks that the network returns a Readout of `vocabulary` classes."""
    outputs = jax.eval_shape(model.outputs, variable_shapes(model), {"tokens": tokens})
    if not isinstance(outputs, Readout):
        raise TypeError(
            f"network must return a fedcodist.core.readout.Readout, got {shown(outputs, 80)}."
        )
    kernel, bias = (getattr(part, "shape", None) for part in (outputs.kernel, outputs.bias))
    if bias is None or len(bias) != 1 or kernel != (outputs.features.shape[-1], *bias):
        raise ValueError(
            "network must return a Readout with kernel [width, classes] and bias [classes], got "
            f"kernel {kernel} and bias {bias}."
        )
    if bias != (vocabulary,):
        raise ValueError(
            f"vocabulary must be the number of the network's classes, {bias[0]}, got {vocabulary}."
        )


def _check_tokens(name: str, tokens: Any, vocabulary: int) -> None:
    """Checks the range of tokens, of which an embedding takes any number; traced ones have no values."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tokens)):
        return
    values = np.asarray(tokens)
    if values.size and not 0 <= values.min() <= values.max() < vocabulary:
        raise ValueError(
            f"{name} must be tokens in 0..{vocabulary - 1}, the model's vocabulary, got {values.min()} "
            f"to {values.max()}."
        )


def _token_losses(outputs: Readout, batch: Batch) -> jax.Array:
    outputs = outputs._replace(weights=(batch["label"] != PAD).astype(jnp.float32))
    if outputs.samples is None:
        return readout.cross_entropy(outputs, batch["label"])
    return _sampled(outputs, batch["label"])


def _sampled(outputs: Readout, labels: jax.Array) -> jax.Array:
    return sampled_softmax.sampled_cross_entropy(
        outputs, labels, tokens_by_frequency(len(outputs.bias))
    )


def _loss_per_token(outputs: Readout, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return readout.mean_per_example(_token_losses(outputs, batch), batch["label"] != PAD)
