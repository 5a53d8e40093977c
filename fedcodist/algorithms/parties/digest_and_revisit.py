"""A FedMD party's training in a round: on the consensus of public examples, then on its own examples.

Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019,
https://arxiv.org/abs/1910.03581.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.party import PartyResult, party_metrics, training_loss
from fedcodist.core import keys
from fedcodist.core.batches import TARGET, beside_targets
from fedcodist.core.example_losses import Loss
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, TrainedClient, train_client
from fedcodist.core.model import Batch, Model, Variables

PyTree = Any


class FedMDParty(NamedTuple):
    """A party's state: its model, and the states of its two optimizers, which continue over rounds."""

    variables: Variables
    digest_state: PyTree
    revisit_state: PyTree


def digest_and_revisit(
    model: Model,
    party: FedMDParty,
    public: ClientData,
    private: ClientData,
    key: jax.Array,
    digest: LocalTraining,
    revisit: LocalTraining,
    gradient_hook: Callable[[PyTree, PyTree], PyTree],
    rates: tuple[Any, Any],
    scores: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> PartyResult:
    """Trains a party, first on the consensus of public examples and then on its private examples.

    Args:
      model, party: before the round.
      public: the round's public examples, with the consensus in the column TARGET.
      private: the party's own examples.
      key: the party's in this round.
      digest, revisit, gradient_hook: as in `fed_md`.
      rates: learning rates of digest and revisit.
      scores: logits -> the scores that parties exchange, such as probabilities.
    """

    def error(outputs: Any, batch: Batch) -> jax.Array:
        return mean_absolute_error(scores(checked_logits(outputs)), batch[TARGET])

    def train(
        training: LocalTraining,
        variables: Variables,
        examples: ClientData,
        purpose: str,
        rate: Any,
        loss_hook: Loss | None,
        state: PyTree,
    ) -> TrainedClient:
        if training.epochs == 0:
            nothing = jnp.zeros((), jnp.int32)
            return TrainedClient(variables, nothing, jnp.zeros(()), nothing, state)
        own_key = keys.derive(key, purpose)
        return train_client(
            model, training, variables, examples, own_key, rate, gradient_hook, loss_hook, state
        )

    # Algorithm 1, "Digest": the model approaches the consensus on the public examples.
    rate, state = rates[0], party.digest_state
    digest = digest._replace(preprocess=beside_targets(digest.preprocess))
    digested = train(digest, party.variables, public, "digest", rate, error, state)
    # Algorithm 1, "Revisit": the model is trained on the party's own examples.
    rate, state = rates[1], party.revisit_state
    revisited = train(revisit, digested.variables, private, "revisit", rate, None, state)
    metrics = party_metrics(
        revisited.variables,
        revisited.num_steps,
        revisited.num_examples,
        digest_steps=digested.num_steps,
        digest_loss=training_loss(digested),
        loss=training_loss(revisited),
    )
    after = FedMDParty(revisited.variables, digested.optimizer_state, revisited.optimizer_state)
    return PartyResult(after, metrics)


def mean_absolute_error(scores: jax.Array, consensus: jax.Array) -> jax.Array:
    """The digest's loss per example, a mean over classes; both arguments are [batch, classes]."""
    difference = scores - consensus
    # Not jnp.abs: its gradient at 0 is 1 in JAX. Here it is 0, as in Keras.
    return jnp.mean(difference * jax.lax.stop_gradient(jnp.sign(difference)), axis=-1)
