"""Classifies sentences: BERT's encoder, attentive pooling and a dense layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import metrics as metrics_lib
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.layer_outputs import LayerOutputs, of_logits
from fedcodist.core.model import Model, cross_entropy, from_flax_linen
from fedcodist.text.attentive_pooling import AttentivePooling
from fedcodist.text.bert import Encoder


def sentence_classifier(
    encoder: Encoder, classes: int = 2, queries: int = 200, dropout: float = 0.2
) -> Model:
    """FedKD's network for tweets, a Model of `LayerOutputs`.

    Batches have 'tokens' int [batch, length], 0 for padding, and 'label' int [batch].

    Args:
      encoder: its parameters are below 'encoder', see `with_encoder`.
      classes: number of classes.
      queries: width of the pooling's query.
      dropout: rate for the encoder's output in training.

    Raises:
      ValueError, TypeError: a size below 1, or a rate outside of 0 to 1.
    """
    for name, value in (("classes", classes), ("queries", queries)):
        check_integer(name, value, low=1)
    check_number("dropout", dropout, low=0, high=1)
    return from_flax_linen(
        SentenceClassifier(encoder, classes, queries, dropout),
        jnp.zeros((1, 2), jnp.int32),
        inputs="tokens",
        loss=of_logits(cross_entropy),
        metrics={"accuracy": of_logits(metrics_lib.accuracy())},
    )


class SentenceClassifier(nn.Module):
    """The network of `sentence_classifier`, from tokens to `LayerOutputs`."""

    encoder: Encoder
    classes: int
    queries: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> LayerOutputs:
        encoded = self.encoder(tokens, train=train)
        drop = nn.Dropout(self.dropout, deterministic=not (train and self.has_rng("dropout")))
        pooling = AttentivePooling(self.queries, name="pooling")
        pooled = pooling(drop(encoded.hidden[-1]), encoded.is_real)
        logits = nn.Dense(self.classes, name="classes")(pooled)
        return LayerOutputs(logits, encoded.hidden, encoded.attention, encoded.is_real)
