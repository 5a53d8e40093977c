"""FML: each party's own model and its copy of a shared model teach each other.

Shen et al., "Federated Mutual Learning", 2020, https://arxiv.org/abs/2006.16765.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_widths, same_for_all
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce, as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.joint_model import joint_model, joint_variables, own_optimizers, part_of
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.distillation.divergences import kl_divergence

PyTree = Any
MEME, OWN = "meme", "own"


class FMLState(NamedTuple):
    """Parties' own models by architecture, leaves [group, ...], and the shared model, the meme."""

    models: dict[str, Variables]
    meme: Variables


class FMLHyper(NamedTuple):
    """Floats of FML; traced.

    Attributes:
      learning_rate: of both models.
      own_weight: alpha, of the labels in the loss of a party's own model.
      meme_weight: beta, of the labels in the loss of the meme.
    """

    learning_rate: Any = 0.01
    own_weight: Any = 0.5
    meme_weight: Any = 0.5


def momentum(learning_rate: Any) -> optax.GradientTransformation:
    """SGD with momentum 0.9 and weight decay 5e-4, as in the authors' code."""
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(learning_rate, momentum=0.9))


def fml(
    groups: Mapping[str, PartyGroup],
    meme: Model,
    training: LocalTraining = LocalTraining(momentum, batch_size=128, epochs=5),
    hyper: FMLHyper = FMLHyper(),
    execution: Execution = Execution(),
    name: str = "fml",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Each party trains its own model together with a copy of the shared "meme"; memes are averaged.

    The own model's loss is alpha CE + (1 - alpha) KL(meme || own). The meme's loss is
    beta CE + (1 - beta) KL(own || meme). Targets get no gradient. Optimizers are fresh in every round.
    The server computes the unweighted mean of the memes' parameters and mutable state.

    Args:
      groups: architecture -> its parties.
      meme: the shared model.
      training: of both models, on the same batches. The default is from the authors' code, in which the
        learning rate also falls every ten rounds.
      hyper: learning rate, alpha and beta.
      execution, name: as in `fed_md`.
      reduce: how memes are averaged; by default the unweighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fml, locals())
    groups = check_groups(groups, (MEME,))
    reduce = checked_mean(reduce)
    check_widths(groups, meme.num_classes, "meme.num_classes")
    check_training("training", training)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.own_weight", hyper.own_weight, low=0, high=1)
    check_number("hyper.meme_weight", hyper.meme_weight, low=0, high=1)

    def init(key: jax.Array) -> FMLState:
        return FMLState(init_models(groups, key), meme.init(keys.derive(key, "init", MEME)))

    def round_(state: FMLState, client_states: PyTree, round: Round, hyper: FMLHyper) -> AfterRound:
        def update(
            model: Model, shared: Variables, own: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # Fork: the party's copy of the meme is the received one. Then both models minimise L_local
            # and L_meme on the same batches.
            trained = train_client(
                both(model, meme),
                training._replace(optimizer=own_optimizers(training.optimizer, (OWN, MEME))),
                joint_variables({OWN: own, MEME: shared}),
                data,
                key,
                hyper.learning_rate,
                loss_hook=mutual_loss(model, meme, hyper.own_weight, hyper.meme_weight),
            )
            own_after, meme_after = (part_of(trained.variables, part) for part in (OWN, MEME))
            metrics = training_metrics(trained)
            return PartyResult(own_after, metrics, sends=meme_after)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.meme, state.models, round, key, execution, reduce
        )
        # Merge: the new meme is the unweighted mean of the parties' memes.
        mean = jax.tree.map(as_stored, result.combined, state.meme)
        return FMLState(result.states, mean), client_states, result.metrics

    size = tree_bytes(variable_shapes(meme))
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name],
        same_for_all(groups, Communication(down=size, up=size)),
        other_predictors={MEME: single_model(meme, lambda state: state.meme)},
        server=lambda state: state.meme,
    )


def both(own: Model, meme: Model) -> Model:
    """The joint model of both, whose outputs are {'own': outputs, 'meme': outputs}.

    Its loss is the sum of both models' losses. Neither model gets a gradient of the other's loss.
    """
    return joint_model({OWN: own, MEME: meme}, mutual_loss(own, meme, 1.0, 1.0))


def mutual_loss(own: Model, meme: Model, own_weight: Any, meme_weight: Any) -> Any:
    """The sum of both models' losses per example; KL terms have the weights 1 - alpha and 1 - beta."""
    divergence = kl_divergence("forward")

    def loss(outputs: dict[str, Any], batch: Batch) -> jax.Array:
        logits = {part: checked_logits(outputs[part]) for part in (OWN, MEME)}
        target = {part: jax.nn.softmax(jax.lax.stop_gradient(logits[part])) for part in (OWN, MEME)}
        labels = own_weight * checked_loss(own.loss, outputs[OWN], batch)
        labels += meme_weight * checked_loss(meme.loss, outputs[MEME], batch)
        mutual = (1 - own_weight) * divergence(logits[OWN], target[MEME])
        return labels + mutual + (1 - meme_weight) * divergence(logits[MEME], target[OWN])

    return loss
