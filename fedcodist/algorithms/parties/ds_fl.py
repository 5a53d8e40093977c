"""DS-FL (Itahara et al., 2021): parties exchange probabilities of open examples, made more certain."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedcodist.algorithms.parties.party import (
    PARTIES,
    PUBLIC,
    PartyGroup,
    check_groups,
    check_widths,
    everybody,
    for_each_party,
    inference,
    init_models,
    num_clients,
    party_predictors,
    same_for_all,
    shared_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import logits_of
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Model, Variables, is_finite
from fedcodist.core.shuffling import permuted_positions

PyTree = Any
SERVER = "server"


class DSFLState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], and the server's own."""

    models: dict[str, Variables]
    server: Variables


class DSFLHyper(NamedTuple):
    """Learning rates, and the temperature that sharpens; traced."""

    learning_rate: Any = 0.1
    distillation_learning_rate: Any = 0.1
    temperature: Any = 0.1


def ds_fl(
    groups: Mapping[str, PartyGroup],
    server: Model,
    num_public: int,
    local: LocalTraining = LocalTraining(),
    distillation: LocalTraining = LocalTraining(batch_size=100),
    open_size: int | None = 1000,
    aggregation: str = "era",
    hyper: DSFLHyper = DSFLHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "ds_fl",
) -> FederatedAlgorithm:
    """A round: local training; probabilities of open examples; their mean, sharpened; all learn it.

    Parties and a model of the server minimise the cross-entropy with the target. Optimizers are fresh
    in every round. Labels of open examples are not used.

    Args:
      groups: architecture -> its parties.
      server: the server's model.
      num_public: rows of the data set `public`.
      local: training on private examples.
      distillation: training on the open ones.
      open_size: open examples of a round, drawn anew; None takes all and sends no indices.
      aggregation: 'era', softmax(mean / T), entropy reduction, or 'sa', the mean itself.
      hyper: learning rates and T.
      inference_batch_size: examples per step while probabilities are computed.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(ds_fl, locals())
    groups = check_groups(groups, (SERVER,))
    check_widths(groups, server.num_classes, "server.num_classes")
    check_training("local", local)
    check_training("distillation", distillation)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_integer("num_public", num_public, low=1)
    count = num_public if open_size is None else open_size
    check_integer("open_size", count, low=1)
    if count > num_public:
        raise ValueError(
            f"open_size must be at most the {num_public} public examples, got {count}."
        )
    check_number("learning_rate", hyper.learning_rate, low=0)
    check_number("distillation_learning_rate", hyper.distillation_learning_rate, low=0)
    check_number("temperature", hyper.temperature, above=0)
    if aggregation not in ("era", "sa"):
        raise ValueError(f"aggregation must be 'era' or 'sa', got {aggregation!r}.")

    def init(key):
        return DSFLState(init_models(groups, key), server.init(keys.derive(key, "init", SERVER)))

    def select(round, key):
        indices = jnp.arange(count)
        if open_size is not None:
            indices = permuted_positions(keys.derive(key, "open", round), indices, num_public)
        return everybody(groups, {PUBLIC: indices[None]})

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name

        def train(model, message, variables, data, key):
            trained = train_client(model, local, variables, data, key, hyper.learning_rate)
            shared = shared_examples(examples, data)
            logits = inference(
                model, trained.variables, shared, distillation.preprocess, inference_batch_size
            )
            metrics = {
                "loss": trained.loss,
                "num_steps": trained.num_steps,
                "client_examples": trained.num_examples,
            }
            return ClientResult(
                jax.nn.softmax(logits), {}, jnp.ones(()), trained.variables, metrics
            )

        def learn(model, target, variables, data, key):
            shared = shared_examples(examples | {"target": target}, data)
            taught = train_client(
                model,
                distillation,
                variables,
                shared,
                key,
                hyper.distillation_learning_rate,
                loss_hook=soft_cross_entropy,
            )
            finite = is_finite(taught.variables)
            metrics = {"distillation_loss": taught.loss, "finite": finite}
            return ClientResult({}, {}, jnp.ones(()), taught.variables, metrics)

        cohort, public = inputs.cohorts[PARTIES], inputs.examples[PUBLIC]
        examples = {column: values[public.indices[0]] for column, values in public.columns.items()}
        run = lambda update, message, own, purpose: for_each_party(
            groups,
            update,
            message,
            own,
            cohort,
            keys.derive(key, purpose, round.index),
            execution,
            axis_name,
        )
        trained = run(train, None, state.models, "client_update")
        mean = trained.update / trained.weight
        target = sharpened(mean, hyper.temperature) if aggregation == "era" else mean
        taught = run(learn, target, trained.own, "distillation")
        everyone = jnp.asarray(count, jnp.int32)
        all_of_them = ClientData(
            examples, jnp.zeros((), jnp.int32), everyone, everyone, count, False
        )
        own_key = keys.derive(key, "distillation", round.index, SERVER)
        server_model = learn(server, target, state.server, all_of_them, own_key)
        metrics = trained.metrics | taught.metrics
        return DSFLState(taught.own, server_model.client_state), client_states, metrics

    def variables_of(state, name):
        return state.models[name]

    floats = count * server.num_classes * np.dtype(np.float32).itemsize
    indices = 0 if open_size is None else count * np.dtype(np.int32).itemsize
    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=select,
        round=round_,
        predictors={
            **party_predictors(groups, variables_of),
            SERVER: single_model(server, lambda state: state.server),
        },
        communication=same_for_all(groups, Communication(down=floats + indices, up=floats)),
        num_clients=num_clients(groups),
        data_set_sizes={PUBLIC: num_public},
    )


def sharpened(mean: jax.Array, temperature: Any) -> jax.Array:
    """softmax(p / T) of mean probabilities [..., classes]; at T = 0.1 their entropy falls."""
    return jax.nn.softmax(mean / temperature)


def soft_cross_entropy(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Cross-entropy of logits [batch, classes] with the batch's target probabilities."""
    return optax.softmax_cross_entropy(logits_of(outputs), batch["target"])
