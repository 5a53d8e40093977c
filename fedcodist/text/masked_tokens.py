"""Pre-training of BERT's encoder: guess the hidden tokens of a sentence (Devlin et al., 2019).

The result is a start for FedKD's teachers and students where the published weights are not available.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import keys, readout
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_number
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Batch, Model
from fedcodist.core.readout import Readout
from fedcodist.data.bert_tokens import BEGINNING, END, MASKED, BertVocabulary
from fedcodist.text.bert import PAD, Encoder, dense, normalised

_SHOWN_AS_MASK, _SHOWN_AS_ANY = 0.8, 0.1


def masked_language_model(encoder: Encoder) -> Model:
    """A Model that guesses hidden tokens; other models can start from its parameters 'encoder'.

    Batches are those of `hidden_tokens`. A sentence's loss is the mean over its hidden tokens. Metrics
    are `loss` and `accuracy`, both weighted by hidden tokens.
    """

    def loss(outputs: Readout, batch: Batch) -> jax.Array:
        return loss_per_token(outputs, batch)[0]

    def loss_per_token(outputs: Readout, batch: Batch) -> tuple[jax.Array, jax.Array]:
        losses = readout.cross_entropy(outputs, batch["label"])
        return readout.mean_per_example(losses, outputs.weights)

    def accuracy(outputs: Readout, batch: Batch) -> tuple[jax.Array, jax.Array]:
        allowed = jnp.arange(encoder.vocabulary) != PAD
        guessed = readout.most_probable(outputs, allowed) == batch["label"]
        return readout.mean_per_example(guessed * outputs.weights, outputs.weights)

    model = from_flax_linen(
        MaskedLanguageModel(encoder),
        {"tokens": jnp.zeros((1, 2), jnp.int32), "places": jnp.zeros((1, 1), jnp.int32)},
        inputs=("tokens", "places"),
        loss=loss,
        metrics={"loss": loss_per_token, "accuracy": accuracy},
    )
    return model._replace(num_classes=encoder.vocabulary)


def hidden_tokens(vocabulary: BertVocabulary, share: float = 0.15) -> Preprocess:
    """Preprocessing of a column 'tokens' [batch, length] that hides some of each sentence's tokens.

    A share of the tokens but for [CLS], [SEP] and padding is hidden, rounded, but at least one. Of these
    80 % become [MASK], 10 % any token but padding, and 10 % stay. Draws depend only on the key and the
    sentence's position in the batch.

    In the result, 'tokens' has these replacements. 'places' int32 [batch, hidden] has the hidden places,
    -1 for none. 'label' int32 [batch, hidden] has the original tokens there, 0 for none.

    Args:
      vocabulary: of the tokens.
      share: of the tokens, above 0 and at most 1.

    Raises:
      ValueError, TypeError: `share` out of range.
    """
    check_number("share", share, above=0, high=1)
    mask, begins, ends = (vocabulary.number(piece) for piece in (MASKED, BEGINNING, END))

    def preprocess(batch: Batch, key: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        tokens = batch["tokens"].astype(jnp.int32)
        most = max(1, round(share * tokens.shape[1]))

        def hide(tokens: jax.Array, position: jax.Array) -> dict[str, jax.Array]:
            sentence_key = keys.derive(key, "hidden", position)
            may_hide = (tokens != PAD) & (tokens != begins) & (tokens != ends)
            rank = jax.random.uniform(keys.derive(sentence_key, "places"), tokens.shape)
            places = jnp.argsort(jnp.where(may_hide, rank, 2))[:most]
            available = jnp.sum(may_hide)
            wanted = jnp.maximum(1, jnp.round(share * available)).astype(jnp.int32)
            is_hidden = jnp.arange(len(places)) < jnp.minimum(wanted, available)

            label = tokens[places]
            draw = jax.random.uniform(keys.derive(sentence_key, "kind"), label.shape)
            other = jax.random.randint(
                keys.derive(sentence_key, "other"), label.shape, PAD + 1, vocabulary.size
            )
            shown = jnp.where(draw < _SHOWN_AS_MASK + _SHOWN_AS_ANY, other, label)
            shown = jnp.where(draw < _SHOWN_AS_MASK, mask, shown)
            return {
                "tokens": tokens.at[places].set(jnp.where(is_hidden, shown, label)),
                "places": jnp.where(is_hidden, places, -1).astype(jnp.int32),
                "label": jnp.where(is_hidden, label, PAD),
            }

        return {**batch, **jax.vmap(hide)(tokens, positions)}

    return preprocess


class MaskedLanguageModel(nn.Module):
    """An encoder and BERT's head at the hidden places; the output's kernel is the encoder's table."""

    encoder: Encoder

    @nn.compact
    def __call__(self, batch: Mapping[str, jax.Array], *, train: bool = False) -> Readout:
        places = batch["places"]
        states = self.encoder(batch["tokens"], train=train).hidden[-1]
        hidden = jnp.take_along_axis(states, jnp.maximum(places, 0)[..., None], axis=1)
        x = nn.gelu(dense("transform", self.encoder.width, hidden), approximate=False)
        x = normalised("norm", x)
        words = self.encoder.variables["params"]["embeddings"]["words"]
        bias = self.param("bias", nn.initializers.zeros_init(), (self.encoder.vocabulary,))
        return Readout(x, words.T, bias, (places >= 0).astype(x.dtype))
