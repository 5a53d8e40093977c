"""FedL2G: the server learns one guiding vector per label, so that training towards it helps parties.

Zhang, Liu, Hua, Cao and Yang, "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
Learning", 2024, https://arxiv.org/abs/2410.06490.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_widths, same_for_all
from fedcodist.algorithms.parties.guiding_vectors import (
    LabelSlopes,
    guided_loss,
    guiding_gradients,
    study_and_quiz,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    if_here,
    init_models,
    run_parties,
    training_metrics,
)
from fedcodist.algorithms.parties.reductions import checked_sums
from fedcodist.algorithms.parties.shared_examples import without_examples
from fedcodist.core import keys, padding_checks
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_choice, check_integer, check_number
from fedcodist.core.communication import Communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import (
    LocalTraining,
    check_plain_gradients,
    check_training,
    drawn_examples,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.models.headed import check_heads, embedding_of

PyTree = Any
GUIDED = {"embeddings": embedding_of, "logits": checked_logits}


class FedL2GParty(NamedTuple):
    """A party's model, and its client index, so that it always holds out the same quiz examples."""

    variables: Variables
    number: jax.Array


class FedL2GState(NamedTuple):
    """Parties by architecture, leaves [group, ...], and the guiding vectors [labels, width]."""

    models: dict[str, FedL2GParty]
    vectors: jax.Array


class FedL2GHyper(NamedTuple):
    """Floats of FedL2G; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      study_learning_rate: of the trial step from which the vectors learn; in the paper it is
        `learning_rate`.
      server_learning_rate: of the guiding vectors.
      weight: of the guiding loss; 1 in the paper.
    """

    learning_rate: Any = 0.01
    study_learning_rate: Any = 0.01
    server_learning_rate: Any = 1.0
    weight: Any = 1.0


def fed_l2g(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    training: LocalTraining = LocalTraining(batch_size=10),
    guided: str = "embeddings",
    quiz_size: int = 10,
    warm_up: int = 50,
    hyper: FedL2GHyper = FedL2GHyper(),
    execution: Execution = Execution(),
    name: str = "fed_l2g",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Local training pulls outputs towards a vector per label, which the server learns.

    A party holds out a few of its examples, the quiz set; the others are its study set. It trains on the
    study set with the loss CE + w MSE(output, v_y). Then it makes a trial step of this loss on a study
    batch, and computes its cross-entropy on the quiz set after this step. It sends the gradient of this
    cross-entropy with respect to the vectors. For each label the server takes a step along the mean
    gradient of the parties that have this label in their study batch. The initial vectors are drawn from
    a standard normal distribution. In the first `warm_up` rounds only the vectors are trained.

    Args:
      groups: architecture -> its parties; networks of `headed` where embeddings are guided.
      num_classes: labels, and outputs of every model.
      training: on the study set; its batch size is also that of the study batch.
      guided: 'embeddings' (the paper's FedL2G-f) or 'logits' (FedL2G-l).
      quiz_size: examples held out; at most half of a party's.
      warm_up: rounds.
      hyper: learning rates and the guiding loss's weight.
      execution, name: as in `fed_md`.
      reduce: how gradients are summed; by default `sums`. It must return sums.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_l2g, locals())
    groups = check_groups(groups)
    check_widths(groups, num_classes)
    check_training("training", training)
    check_plain_gradients("fed_l2g", training)
    width = _guided_width(groups, num_classes, guided)
    check_integer("quiz_size", quiz_size, low=1)
    check_integer("warm_up", warm_up, low=0)
    for field, value in hyper._asdict().items():
        check_number(f"hyper.{field}", value, low=0)
    reduce = checked_sums(reduce)

    def init(key: jax.Array) -> FedL2GState:
        vectors = jax.random.normal(keys.derive(key, "init", "vectors"), (num_classes, width))
        parties = {
            architecture: FedL2GParty(
                variables, jnp.asarray(groups[architecture].clients, jnp.int32)
            )
            for architecture, variables in init_models(groups, key).items()
        }
        return FedL2GState(parties, vectors)

    def round_(
        state: FedL2GState, client_states: PyTree, round: Round, hyper: FedL2GHyper
    ) -> AfterRound:
        trains = round.index >= warm_up

        def update(
            model: Model, vectors: jax.Array, party: FedL2GParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            quiz_key = keys.derive(round.key, "quiz", party.number)
            study, quiz = study_and_quiz(data, quiz_size, quiz_key)

            # Local training on the study set: CE + MSE(output, v_y).
            loss = guided_loss(model, vectors, GUIDED[guided], hyper.weight)
            with padding_checks.leaving_out(quiz_size):
                trained = train_client(
                    model,
                    training,
                    party.variables,
                    without_examples(study, trains),
                    key,
                    hyper.learning_rate,
                    loss_hook=loss,
                )
            # Learning to guide: a trial step on a study batch, and the gradient of the loss on the quiz
            # set after it.
            batch = drawn_examples(study, training.batch_size, keys.derive(key, "study"))

            def gradients() -> LabelSlopes:
                return guiding_gradients(
                    model,
                    trained.variables,
                    vectors,
                    study=batch,
                    quiz=quiz,
                    training=training,
                    read_outputs=GUIDED[guided],
                    weight=hyper.weight,
                    learning_rate=hyper.study_learning_rate,
                    key=key,
                )

            metrics = training_metrics(trained)
            after = party._replace(variables=trained.variables)
            return PartyResult(after, metrics, if_here(data, gradients))

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.vectors, state.models, round, key, execution, reduce
        )
        # The server moves each label's vector along the mean gradient of the parties that have it.
        total = result.combined
        mean = total.slopes / jnp.maximum(total.has_label, 1)[:, None]
        vectors = state.vectors - hyper.server_learning_rate * mean
        return FedL2GState(result.states, vectors), client_states, result.metrics

    scalar = np.dtype(np.float32).itemsize
    # Download: the vectors. Upload: their gradients, and which labels have one.
    down, up = num_classes * width * scalar, num_classes * (width + 1) * scalar
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name].variables,
        same_for_all(groups, Communication(down=down, up=up)),
        server=lambda state: state.vectors,
    )


def _guided_width(groups: Mapping[str, PartyGroup], num_classes: int, guided: str) -> int:
    check_choice("guided", guided, sorted(GUIDED))
    if guided == "logits":
        return num_classes
    return check_heads("groups", {name: group.model for name, group in groups.items()})[0]
