"""FedGH: the server trains a global head on parties' mean embeddings; it replaces the parties' heads.

Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023,
https://arxiv.org/abs/2303.13137.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    check_groups,
    in_client_order,
    same_for_all,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.prototypes import (
    check_prototype_groups,
    class_sums,
    prototype_bytes,
    prototypes_of,
)
from fedcodist.algorithms.parties.shared_heads import with_same_head
from fedcodist.algorithms.parties.training_on_prototypes import (
    ServerTraining,
    as_examples,
    check_server_training,
    on_prototypes,
)
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import (
    LocalTraining,
    check_plain_gradients,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables, cross_entropy, variable_shapes
from fedcodist.models.headed import apply_head, split_head, with_head

PyTree = Any
SERVER = "server"
OWN_HEAD, GLOBAL_HEAD = PREDICT_BY = ("own_head", "global_head")


class FedGHState(NamedTuple):
    """The state between two rounds.

    Attributes:
      models: parties' models after local training, architecture -> leaves [group, ...].
      head: the global head.
      is_trained: bool, whether the server has trained it.
    """

    models: dict[str, Variables]
    head: PyTree
    is_trained: jax.Array


class FedGHHyper(NamedTuple):
    """Floats of FedGH; traced.

    Attributes:
      learning_rate: of local training.
      server_learning_rate: of the head's training.
    """

    learning_rate: Any = 0.01
    server_learning_rate: Any = 0.01


def clipped_momentum(learning_rate: Any) -> optax.GradientTransformation:
    """SGD, momentum 0.9, weight decay 1e-3, gradients of norm at most 50, as in the authors' code."""
    return optax.chain(
        optax.clip_by_global_norm(50.0),
        optax.add_decayed_weights(1e-3),
        optax.sgd(learning_rate, momentum=0.9),
    )


def fed_gh(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(clipped_momentum, batch_size=512, epochs=30),
    server_training: ServerTraining = ServerTraining(),
    predict_by: str = OWN_HEAD,
    hyper: FedGHHyper = FedGHHyper(),
    inference_batch_size: int = 500,
    execution: Execution = Execution(),
    name: str = "fed_gh",
) -> FederatedAlgorithm:
    """Parties train with the server's head; the server trains it on the parties' mean embeddings.

    At the start of a round the global head replaces each party's head, except in the first round, as in
    the authors' code. Then the whole network is trained on the party's examples. The party sends its
    mean embedding of each class that it has, in evaluation mode. The server trains the global head with
    cross-entropy on the mean embeddings of all parties. In the authors' code the server's steps change a
    party's network and never the head; here they change the head, as in the paper. The authors' means
    are means of batch means; here they are means over examples. Optimizers are fresh in every round.

    Args:
      groups: architecture -> its parties, of `headed` models with embeddings of one width.
      num_classes: labels, and outputs of every model.
      training: on private examples. The default is from the authors' code for different networks.
      server_training: of the head on mean embeddings, in a random order.
      predict_by: which head is evaluated: the party's 'own_head' after local training, as in the
        authors' code, or the 'global_head' that the server has trained since.
      hyper: learning rates.
      inference_batch_size: examples per step, at most, when means are computed.
      execution, name: as in `fed_md`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_gh, locals())
    groups = check_groups(groups)
    width = check_prototype_groups(groups, num_classes)
    check_training("training", training)
    check_plain_gradients("fed_gh", training)
    check_server_training(server_training)
    check_choice("predict_by", predict_by, PREDICT_BY)
    check_integer("inference_batch_size", inference_batch_size, low=1)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.server_learning_rate", hyper.server_learning_rate, low=0)
    first = next(iter(groups.values())).model
    head_model = model_of_head(first)

    def init(key: jax.Array) -> FedGHState:
        head = head_model.init(keys.derive(key, "init", SERVER)).params
        return FedGHState(init_models(groups, key), head, jnp.asarray(False))

    def round_(
        state: FedGHState, client_states: PyTree, round: Round, hyper: FedGHHyper
    ) -> AfterRound:
        def update(
            model: Model, head: PyTree, variables: Variables, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # The global head replaces the party's head, from the second round on.
            body, own_head = split_head(variables.params)
            head = jax.tree.map(
                lambda new, own: jnp.where(state.is_trained, new, own), head, own_head
            )
            received = Variables(with_head(body, head), variables.mutable)
            # Local training of extractor and head.
            trained = train_client(model, training, received, data, key, hyper.learning_rate)
            # The local averaged representation of each class that the party has.
            preprocess, size = training.preprocess, inference_batch_size
            means = prototypes_of(
                class_sums(model, trained.variables, data, num_classes, preprocess, size)
            )
            metrics = training_metrics(trained)
            return PartyResult(trained.variables, metrics, reports=means)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(groups, update, state.head, state.models, round, key, execution)
        # The server trains the global head on all parties' representations.
        head = train_client(
            head_model,
            on_prototypes(server_training),
            Variables(state.head, {}),
            as_examples(in_client_order(groups, result.reports)),
            keys.derive(round.key, "client_update", round.index, SERVER),
            hyper.server_learning_rate,
        ).variables.params
        return FedGHState(result.states, head, jnp.asarray(True)), client_states, result.metrics

    def evaluated(state: FedGHState, architecture: str) -> Variables:
        models = state.models[architecture]
        if predict_by == OWN_HEAD:
            return models
        return with_same_head({architecture: models}, state.head)[architecture]

    sizes = Communication(
        down=tree_bytes(variable_shapes(head_model)), up=prototype_bytes(num_classes, width)
    )
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        evaluated,
        same_for_all(groups, sizes),
        server=lambda state: state.head,
    )


def model_of_head(network: Model) -> Model:
    """The head of a `headed` network as a Model, which reads a batch's `embedding`."""

    def init(key: jax.Array) -> Variables:
        return Variables(split_head(network.init(key).params)[1], {})

    def apply(variables: Variables, batch: Batch, **_: Any) -> tuple[jax.Array, PyTree]:
        return apply_head(variables.params, batch["embedding"]), variables.mutable

    return Model(init, apply, cross_entropy, {}, network.num_classes)
