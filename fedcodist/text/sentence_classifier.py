"""Classifies sentences: an encoder, pooling over positions and a dense layer."""

from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import metrics as metrics_lib
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs, metrics_of_logits, of_logits
from fedcodist.core.model import Model, cross_entropy
from fedcodist.text.attentive_pooling import AttentivePooling
from fedcodist.text.bert import Encoder
from fedcodist.text.sentence_encoders import ConvolutionEncoder, LSTMEncoder, SelfAttentionEncoder

Pooling = Literal["attention", "max", "last"]


def sentence_classifier(
    encoder: Encoder | ConvolutionEncoder | LSTMEncoder | SelfAttentionEncoder,
    classes: int = 2,
    queries: int = 200,
    dropout: float = 0.2,
    pooling: Pooling = "attention",
) -> Model:
    """FedKD's network for tweets, a Model of `LayerOutputs`.

    Batches have 'tokens' int [batch, length], 0 for padding, and 'label' int [batch].

    Args:
      encoder: its parameters are below 'encoder', see `with_encoder`.
      classes: number of classes.
      queries: width of the pooling's query.
      dropout: rate for the encoder's output in training.
      pooling: "attention" of one learnt query; "max" of the tokens' states; or "last", the state at the
        last token. A sentence without tokens gives finite numbers.

    Raises:
      ValueError, TypeError: a size below 1, a rate outside of 0 to 1, or another pooling.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {get_args(Pooling)}, got {pooling!r}.")
    for name, value in (("classes", classes), ("queries", queries)):
        check_integer(name, value, low=1)
    check_number("dropout", dropout, low=0, high=1)
    return from_flax_linen(
        SentenceClassifier(encoder, classes, queries, dropout, pooling),
        jnp.zeros((1, 2), jnp.int32),
        inputs="tokens",
        loss=of_logits(cross_entropy),
        metrics=metrics_of_logits({"accuracy": metrics_lib.accuracy()}),
    )


class SentenceClassifier(nn.Module):
    """The network of `sentence_classifier`, from tokens to `LayerOutputs`."""

    encoder: nn.Module
    classes: int
    queries: int
    dropout: float
    pooling: Pooling = "attention"

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> LayerOutputs:
        encoded = self.encoder(tokens, train=train)
        drop = nn.Dropout(self.dropout, deterministic=not (train and self.has_rng("dropout")))
        states = drop(encoded.hidden[-1])
        if self.pooling == "attention":
            pooled = AttentivePooling(self.queries, name="pooling")(states, encoded.is_real)
        elif self.pooling == "max":
            least = jnp.finfo(states.dtype).min
            largest = jnp.max(jnp.where(encoded.is_real[..., None], states, least), axis=1)
            pooled = jnp.where(jnp.any(encoded.is_real, axis=1)[:, None], largest, 0)
        else:
            last = jnp.maximum(jnp.sum(encoded.is_real, axis=1) - 1, 0)
            pooled = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
        logits = nn.Dense(self.classes, name="classes")(pooled)
        return LayerOutputs(logits, encoded.hidden, encoded.attention, encoded.is_real)
