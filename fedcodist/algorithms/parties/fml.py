"""FML (Shen et al., 2020): each party's own model and its copy of a shared one teach each other."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.parties.party import (
    PARTIES,
    PartyGroup,
    check_groups,
    check_widths,
    everybody,
    for_each_party,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult, as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Model, Variables, is_finite, variable_shapes
from fedcodist.distillation.loop import kl_divergence

PyTree = Any
MEME, OWN = "meme", "own"


class FMLState(NamedTuple):
    """Every party's own model by architecture, leaves [group, ...], and the shared one."""

    models: dict[str, Variables]
    meme: Variables


class FMLHyper(NamedTuple):
    """Floats of FML; traced.

    Attributes:
      learning_rate: of both models.
      own_weight: alpha, of the labels in a party's own model's loss.
      meme_weight: beta, of the labels in the shared one's.
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
) -> FederatedAlgorithm:
    """Parties fork the shared "meme" model; it and their own learn together; memes are averaged.

    Own model: alpha CE + (1 - alpha) KL(meme || own). Meme: beta CE + (1 - beta) KL(own || meme).
    Targets get no gradient. Optimizers are fresh in every round; the server takes the plain mean of
    parameters and mutable state.

    Args:
      groups: architecture -> its parties.
      meme: the shared model.
      training: of both models, on the same batches. The default is the authors' code's, whose learning
        rate also falls every ten rounds.
      hyper: learning rate, alpha and beta.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(fml, locals())
    groups = check_groups(groups, (MEME,))
    check_widths(groups, meme.num_classes, "meme.num_classes")
    check_training("training", training)
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("own_weight", hyper.own_weight, low=0, high=1)
    check_number("meme_weight", hyper.meme_weight, low=0, high=1)

    def init(key):
        return FMLState(init_models(groups, key), meme.init(keys.derive(key, "init", MEME)))

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name

        def update(model, shared, own, data, key):
            trained = train_client(
                both(model, meme),
                training,
                Variables(
                    {OWN: own.params, MEME: shared.params}, {OWN: own.mutable, MEME: shared.mutable}
                ),
                data,
                key,
                hyper.learning_rate,
                loss_hook=mutual_loss(model, meme, hyper.own_weight, hyper.meme_weight),
            )
            after = {
                part: Variables(trained.variables.params[part], trained.variables.mutable[part])
                for part in (OWN, MEME)
            }
            metrics = {
                "loss": trained.loss,
                "num_steps": trained.num_steps,
                "client_examples": trained.num_examples,
                "finite": is_finite(trained.variables),
            }
            return ClientResult(after[MEME], {}, jnp.ones(()), after[OWN], metrics)

        result = for_each_party(
            groups,
            update,
            state.meme,
            state.models,
            inputs.cohorts[PARTIES],
            keys.derive(key, "client_update", round.index),
            execution,
            axis_name,
        )
        mean = jax.tree.map(
            lambda leaf, old: as_stored(leaf / result.weight.astype(leaf.dtype), old),
            result.update,
            state.meme,
        )
        return FMLState(result.own, mean), client_states, result.metrics

    size = tree_bytes(variable_shapes(meme))
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=lambda round, key: everybody(groups, {}),
        round=round_,
        predictors={
            **party_predictors(groups, lambda state, name: state.models[name]),
            MEME: single_model(meme, lambda state: state.meme),
        },
        communication=same_for_all(groups, Communication(down=size, up=size)),
        num_clients=num_clients(groups),
    )


def both(own: Model, meme: Model) -> Model:
    """The two models as one, whose outputs are {'own': outputs, 'meme': outputs}.

    Its loss is the sum of both models'; neither gets a gradient of the other's.
    """
    models = {OWN: own, MEME: meme}

    def apply(variables, batch, **arguments):
        outputs, mutable = {}, {}
        key = arguments.pop("key", None)
        for part, model in models.items():
            outputs[part], mutable[part] = model.apply(
                Variables(variables.params[part], variables.mutable[part]),
                batch,
                key=None if key is None else keys.derive(key, part),
                **arguments,
            )
        return outputs, mutable

    def init(key):
        found = {part: model.init(keys.derive(key, part)) for part, model in models.items()}
        return Variables(
            {part: each.params for part, each in found.items()},
            {part: each.mutable for part, each in found.items()},
        )

    return Model(init, apply, mutual_loss(own, meme, 1.0, 1.0), {}, own.num_classes)


def mutual_loss(own: Model, meme: Model, own_weight: Any, meme_weight: Any) -> Any:
    """The loss of both models per example: labels by their weights, each other by what is left."""
    divergence = kl_divergence("forward")

    def loss(outputs, batch):
        logits = {part: logits_of(each) for part, each in outputs.items()}
        target = {
            part: jax.nn.softmax(jax.lax.stop_gradient(each)) for part, each in logits.items()
        }
        labels = own_weight * checked_loss(own.loss, outputs[OWN], batch)
        labels += meme_weight * checked_loss(meme.loss, outputs[MEME], batch)
        mutual = (1 - own_weight) * divergence(logits[OWN], target[MEME])
        return labels + mutual + (1 - meme_weight) * divergence(logits[MEME], target[OWN])

    return loss
