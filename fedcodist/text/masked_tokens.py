"""Pre-training of BERT's encoder: guess the tokens of a sentence that are hidden (Devlin et al., 2019).

What comes out is a start for the encoders of FedKD's teachers and students, where the weights that its
paper starts from are not to be had.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedcodist.core import keys, readout
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import check_number
from fedcodist.core.model import Model, from_flax_linen
from fedcodist.core.readout import Readout
from fedcodist.data.bert_tokens import BEGINNING, END, MASKED, BertVocabulary
from fedcodist.text.bert import PAD, Encoder, dense, normalised

_SHOWN_AS_MASK, _SHOWN_AS_ANY = 0.8, 0.1


def masked_language_model(encoder: Encoder) -> Model:
    """A Model that guesses hidden tokens; its parameters 'encoder' are what other models start from.

    Batches are what `hidden_tokens` makes. A sentence's loss is the mean over its hidden tokens; metrics
    are `loss` and `accuracy`, both weighted by hidden tokens.
    """

    def loss(outputs, batch):
        return _mean_of_hidden(readout.cross_entropy(outputs, batch["label"]), outputs)[0]

    def loss_per_token(outputs, batch):
        return _mean_of_hidden(readout.cross_entropy(outputs, batch["label"]), outputs)

    def accuracy(outputs, batch):
        allowed = jnp.arange(encoder.vocabulary) != PAD
        guessed = readout.most_probable(outputs, allowed) == batch["label"]
        return _mean_of_hidden(guessed * outputs.weights, outputs)

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

    Of the tokens that are not special, the share, rounded, but at least one are hidden. Of these 80 %
    are shown as [MASK], 10 % as any token but padding, and 10 % as they are. Draws depend on the key and
    the sentence's position in the batch alone.

    A batch's 'tokens' are then what is shown; 'places' int32 [batch, hidden] where tokens are hidden, -1
    for none; and 'label' int32 [batch, hidden] what they are, 0 for none.

    Args:
      vocabulary: of the tokens.
      share: of the tokens, above 0 and at most 1.

    Raises:
      ValueError, TypeError: share out of range.
    """
    check_number("share", share, above=0, high=1)
    mask, begins, ends = (vocabulary.number(piece) for piece in (MASKED, BEGINNING, END))

    def preprocess(batch, key, positions):
        tokens = batch["tokens"].astype(jnp.int32)
        most = max(1, round(share * tokens.shape[1]))

        def of_one(tokens, position):
            own = keys.derive(key, "hidden", position)
            may_hide = (tokens != PAD) & (tokens != begins) & (tokens != ends)
            rank = jax.random.uniform(keys.derive(own, "places"), tokens.shape)
            places = jnp.argsort(jnp.where(may_hide, rank, 2))[:most]
            available = jnp.sum(may_hide)
            wanted = jnp.maximum(1, jnp.round(share * available)).astype(jnp.int32)
            is_hidden = jnp.arange(len(places)) < jnp.minimum(wanted, available)

            label = tokens[places]
            draw = jax.random.uniform(keys.derive(own, "kind"), label.shape)
            other = jax.random.randint(
                keys.derive(own, "other"), label.shape, PAD + 1, vocabulary.size
            )
            shown = jnp.where(draw < _SHOWN_AS_MASK + _SHOWN_AS_ANY, other, label)
            shown = jnp.where(draw < _SHOWN_AS_MASK, mask, shown)
            return {
                "tokens": tokens.at[places].set(jnp.where(is_hidden, shown, label)),
                "places": jnp.where(is_hidden, places, -1).astype(jnp.int32),
                "label": jnp.where(is_hidden, label, PAD),
            }

        return {**batch, **jax.vmap(of_one)(tokens, positions)}

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


def _mean_of_hidden(values: jax.Array, outputs: Readout) -> tuple[jax.Array, jax.Array]:
    """The mean of values [batch, hidden] per sentence, and how many tokens it is of."""
    number = jnp.sum(outputs.weights, axis=-1)
    return jnp.sum(values, axis=-1) / jnp.maximum(number, 1), number
