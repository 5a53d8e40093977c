"""DS-FL: parties learn their mean predictions on open (public) examples, sharpened by the server.

Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient
Collaborative Training with Non-IID Private Data", 2021, https://arxiv.org/abs/2008.06180.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_widths, same_for_all
from fedcodist.algorithms.parties.open_examples import (
    OpenExamples,
    checked_size,
    drawing,
    open_communication,
    view_of_round,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartiesResult,
    PartyResult,
    PartyUpdate,
    assemble,
    init_models,
    run_parties,
    training_loss,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.algorithms.parties.shared_examples import (
    PUBLIC,
    all_examples,
    inference,
    shared_examples,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import TARGET, beside_targets
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import LocalTraining, TrainedClient, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Model, Variables
from fedcodist.core.trees import is_finite

PyTree = Any
SERVER = "server"


class DSFLState(NamedTuple):
    """Parties' models by architecture, leaves [group, ...], and the server's model."""

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
    open_examples: OpenExamples,
    local: LocalTraining = LocalTraining(),
    distillation: LocalTraining = LocalTraining(batch_size=100),
    aggregation: str = "era",
    hyper: DSFLHyper = DSFLHyper(),
    execution: Execution = Execution(),
    name: str = "ds_fl",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """In a round parties train locally, predict open examples, and learn the sharpened mean prediction.

    Parties and a model of the server minimise the cross-entropy with this target. Optimizers are fresh
    in every round.

    Args:
      groups: architecture -> its parties.
      server: the server's model.
      open_examples: how many there are, and how many a round takes.
      local: training on private examples.
      distillation: training on the open ones.
      aggregation: 'era' (entropy reduction), softmax(mean / T); or 'sa', the mean itself.
      hyper: learning rates and T.
      execution, name: as in `fed_md`.
      reduce: how probabilities are averaged; by default the unweighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(ds_fl, locals())
    groups = check_groups(groups, (SERVER,))
    reduce = checked_mean(reduce)
    check_widths(groups, server.num_classes, "server.num_classes")
    check_training("local", local)
    check_training("distillation", distillation)
    checked_size(open_examples)
    _check_floats_and_aggregation(hyper, aggregation)

    def init(key: jax.Array) -> DSFLState:
        return DSFLState(init_models(groups, key), server.init(keys.derive(key, "init", SERVER)))

    def round_(
        state: DSFLState, client_states: PyTree, round: Round, hyper: DSFLHyper
    ) -> AfterRound:
        columns, preprocess = view_of_round(round, distillation.preprocess)

        # Local training, then probabilities of the open examples, which the party sends.
        def train(
            model: Model, message: None, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            trained = train_client(model, local, variables, data, key, hyper.learning_rate)
            examples, size = shared_examples(columns, data), open_examples.inference_batch_size
            logits = inference(model, trained.variables, examples, preprocess, size)
            metrics = training_metrics(trained)
            return PartyResult(trained.variables, metrics, jax.nn.softmax(logits))

        # Distillation: the cross-entropy with the target on the open examples.
        def learn(
            model: Model, variables: Variables, examples: ClientData, key: jax.Array
        ) -> TrainedClient:
            return train_client(
                model,
                distillation._replace(preprocess=beside_targets(preprocess)),
                variables,
                examples,
                key,
                hyper.distillation_learning_rate,
                loss_hook=soft_cross_entropy,
            )

        def learn_as_party(
            model: Model, target: jax.Array, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            examples = shared_examples(columns | {TARGET: target}, data)
            taught = learn(model, variables, examples, key)
            metrics = {
                "distillation_loss": training_loss(taught),
                "finite": is_finite(taught.variables),
            }
            return PartyResult(taught.variables, metrics)

        def run(
            update: PartyUpdate, message: PyTree, models: Mapping[str, Variables], purpose: str
        ) -> PartiesResult:
            key = keys.derive(round.key, purpose, round.index)
            return run_parties(groups, update, message, models, round, key, execution, reduce)

        trained = run(train, None, state.models, "client_update")
        # Entropy reduction aggregation (ERA) sharpens the mean; simple aggregation (SA) does not.
        mean = trained.combined
        target = entropy_reduction(mean, hyper.temperature) if aggregation == "era" else mean
        # Every party learns the target, and so does the server's model.
        taught = run(learn_as_party, target, trained.states, "distillation")
        server_key = keys.derive(round.key, "distillation", round.index, SERVER)
        examples = all_examples(columns | {TARGET: target})
        taught_server = learn(server, state.server, examples, server_key)
        state = DSFLState(taught.states, taught_server.variables)
        return state, client_states, trained.metrics | taught.metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name],
        same_for_all(groups, open_communication(open_examples, server.num_classes)),
        drawing(open_examples),
        {PUBLIC: open_examples.num_public},
        {SERVER: single_model(server, lambda state: state.server)},
        server=lambda state: state.server,
    )


def entropy_reduction(mean: jax.Array, temperature: Any) -> jax.Array:
    """softmax(p / T) of mean probabilities [..., classes]; T = 0.1 lowers their entropy."""
    return jax.nn.softmax(mean / temperature)


def soft_cross_entropy(outputs: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Cross-entropy of logits [batch, classes] with the batch's target probabilities."""
    return optax.softmax_cross_entropy(checked_logits(outputs), batch[TARGET])


def _check_floats_and_aggregation(hyper: DSFLHyper, aggregation: str) -> None:
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.distillation_learning_rate", hyper.distillation_learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    if aggregation not in ("era", "sa"):
        raise ValueError(f"aggregation must be 'era' or 'sa', got {aggregation!r}.")
