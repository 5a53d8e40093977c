"""News recommendation as in FedKD: NAML (Wu et al., 2019) with titles that BERT's encoder reads."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.layer_outputs import LayerOutputs, metrics_of_logits, of_logits
from fedcodist.core.model import Model
from fedcodist.text.attentive_pooling import AttentivePooling
from fedcodist.text.bert import PAD, Encoder
from fedcodist.text.ranking import ranking_loss, ranking_metrics

NO_NEWS = -1e9
"""The score of padded candidates; finite, so that divergences of softmaxes are finite."""


def news_recommender(
    encoder: Encoder,
    width: int = 64,
    queries: int = 200,
    dropout: float = 0.2,
    candidates: int = 5,
) -> Model:
    """A Model of `LayerOutputs` that scores candidate news by what a user clicked before.

    Batches have 'candidates' int [batch, candidates, length] and 'history' int [batch, clicks, length],
    titles in tokens; titles of zeros are padding. Labels are those of `ranking`. The number of
    candidates may vary. A user without history gives all news the score 0.

    A layer's hidden states and attention maps are those of the candidates' titles and of the history's
    titles; FedKD adds the distances of both. Both have the same W^h.

    FedKD's teacher and student each have a user encoder, and the student's is sent. In the authors' code
    a client's two models share one, which stays on the client.

    Args:
      encoder: of titles; its parameters are below 'encoder', see `with_encoder`.
      width: of the vectors of news and users.
      queries: width of the queries that pool tokens and news.
      dropout: rate for the encoder's output in training.
      candidates: number in training: the clicked one and the others.

    Raises:
      ValueError, TypeError: a size below 1, or a rate outside of 0 to 1.
    """
    for name, value in (("width", width), ("queries", queries), ("candidates", candidates)):
        check_integer(name, value, low=1)
    check_number("dropout", dropout, low=0, high=1)
    example = {
        "candidates": jnp.zeros((1, candidates, 2), jnp.int32),
        "history": jnp.zeros((1, 1, 2), jnp.int32),
    }
    return from_flax_linen(
        NewsRecommender(encoder, width, queries, dropout),
        example,
        inputs=tuple(example),
        loss=of_logits(ranking_loss),
        metrics=metrics_of_logits(ranking_metrics()),
    )


class NewsRecommender(nn.Module):
    """The network of `news_recommender`, from its two columns to `LayerOutputs`."""

    encoder: Encoder
    width: int
    queries: int
    dropout: float

    @nn.compact
    def __call__(self, batch: Mapping[str, jax.Array], *, train: bool = False) -> LayerOutputs:
        candidates, history = batch["candidates"], batch["history"]
        if candidates.shape[::2] != history.shape[::2]:
            raise ValueError(
                "candidates and history must be of one batch and title length, got "
                f"{list(candidates.shape)} and {list(history.shape)}."
            )
        titles = jnp.concatenate([candidates, history], axis=1)
        encoded = self.encoder(titles.reshape(-1, titles.shape[-1]), train=train)
        drop = nn.Dropout(self.dropout, deterministic=not (train and self.has_rng("dropout")))
        pooling = AttentivePooling(self.queries, name="title_pooling")
        pooled = pooling(drop(encoded.hidden[-1]), encoded.is_real)
        news = nn.Dense(self.width, name="news")(pooled).reshape(*titles.shape[:2], self.width)

        count = candidates.shape[1]
        is_news = jnp.any(titles != PAD, axis=-1)
        reader = AttentivePooling(self.queries, name="user_pooling")
        user = reader(news[:, count:], is_news[:, count:])
        scores = jnp.einsum("bcw,bw->bc", news[:, :count], user)
        scores = jnp.where(is_news[:, :count], scores, NO_NEWS)

        by_title = lambda layer: layer.reshape(*titles.shape[:2], *layer.shape[1:])
        hidden = [by_title(layer) for layer in encoded.hidden]
        is_real = by_title(encoded.is_real)
        heads = [jnp.moveaxis(by_title(layer), 2, 1) for layer in encoded.attention]
        return LayerOutputs(
            scores,
            tuple((states[:, :count], states[:, count:]) for states in hidden),
            tuple((maps[:, :, :count], maps[:, :, count:]) for maps in heads),
            (is_real[:, :count], is_real[:, count:]),
        )
