"""FedMD: parties of any architecture learn their mean logits on public examples.

Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019,
https://arxiv.org/abs/1910.03581.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from fedcodist.algorithms.parties.alignment import (
    Alignment,
    aligned_columns,
    aligned_indices,
    aligned_size,
    checked_alignment,
    checked_weights,
    exchanged_scores,
    message_of_scores,
)
from fedcodist.algorithms.parties.digest_and_revisit import FedMDParty, digest_and_revisit
from fedcodist.algorithms.parties.groups import (
    PartyGroup,
    all_clients,
    by_architecture,
    check_groups,
    check_widths,
    same_for_all,
)
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartiesResult,
    PartyResult,
    PartyUpdate,
    assemble,
    init_models,
    run_parties,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.algorithms.parties.shared_examples import PUBLIC, shared_examples
from fedcodist.core import batches, keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import TARGET
from fedcodist.core.checks import check_number
from fedcodist.core.communication import scores_communication
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining, check_training
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import lasting_state

PyTree = Any
# A party's model, and its weight in the consensus
Sender = tuple[Variables, jax.Array]


def keras_adam(learning_rate: Any) -> optax.GradientTransformation:
    """Adam with Keras' epsilon, as in the released code."""
    return optax.adam(learning_rate, eps=1e-7)


class FedMDHyper(NamedTuple):
    """Floats of FedMD; traced.

    Attributes:
      digest_learning_rate, revisit_learning_rate: of the two optimizers.
      weights: c_k, one per party in the order of clients; only their ratios matter. None: equal weights.
      temperature: T, if probabilities are exchanged.
    """

    digest_learning_rate: Any = 1e-3
    revisit_learning_rate: Any = 1e-3
    weights: Any = None
    temperature: Any = 1.0


def fed_md(
    groups: Mapping[str, PartyGroup],
    alignment: Alignment,
    num_classes: int,
    digest: LocalTraining = LocalTraining(keras_adam, batch_size=256),
    revisit: LocalTraining = LocalTraining(keras_adam, batch_size=5, epochs=4),
    gradient_hook: Callable[[PyTree, PyTree], PyTree] = lambda gradient, params: gradient,
    hyper: FedMDHyper = FedMDHyper(),
    execution: Execution = Execution(),
    name: str = "fed_md",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """FedMD's collaboration, after transfer learning (`local_only`) has trained the parties' models.

    A round is one pass of Algorithm 1's loop. A subset of the public examples is drawn, class by class.
    Every party sends its logits on it, in evaluation mode. Their weighted mean is the consensus. Then
    each party digests: it fits its logits to the consensus with the mean absolute error. Finally it
    revisits its private examples. All parties send before any party learns.

    Args:
      groups: architecture -> its parties.
      alignment: the public examples, and the scores that parties exchange on them.
      num_classes: of the joint label space, public and private classes.
      digest: optimizer, batch size, epochs and preprocessing for public examples. Large batches suit the
        loss, whose gradient does not get smaller near the minimum. With 0 epochs no party learns from
        others. If the preprocessing is random, a round has one view of each example, the same for the
        logits to send and for the digest of all parties.
      revisit: the same for private examples.
      gradient_hook: (gradient, params) -> gradient of digest and revisit, such as a penalty's.
      hyper: learning rates, weights and temperature.
      execution: how parties of one architecture are executed.
      name: the method's name in tables.
      reduce: how the parties' scores become the consensus; by default their weighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_md, locals())
    groups = check_groups(groups)
    reduce = checked_mean(reduce)
    # A logit teaches where a single class's probability would not.
    check_widths(groups, num_classes, least=1 if alignment.exchanged == "logits" else 2)
    check_training("digest", digest, fewest_epochs=0)
    check_training("revisit", revisit, fewest_epochs=0)
    alignment = checked_alignment(alignment, num_classes)
    check_number("hyper.digest_learning_rate", hyper.digest_learning_rate, low=0)
    check_number("hyper.revisit_learning_rate", hyper.revisit_learning_rate, low=0)
    check_number("hyper.temperature", hyper.temperature, above=0)
    weights = checked_weights(hyper.weights, len(all_clients(groups)))

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {PUBLIC: aligned_indices(alignment, round, key)}

    def round_(
        state: dict[str, FedMDParty], client_states: PyTree, round: Round, hyper: FedMDHyper
    ) -> AfterRound:
        view_key = keys.derive(round.key, "view", round.index)
        columns = aligned_columns(alignment, round.inputs.examples[PUBLIC])
        public, preprocess = batches.one_view(columns, digest.preprocess, view_key)
        digest_of_round = digest._replace(preprocess=preprocess)
        scores = exchanged_scores(alignment, hyper.temperature)

        def communicate(
            model: Model, message: None, sender: Sender, data: ClientData, key: jax.Array
        ) -> PartyResult:
            variables, weight = sender
            examples, size = shared_examples(public, data), alignment.inference_batch_size
            return message_of_scores(
                model, variables, weight, examples, digest_of_round, size, scores
            )

        def learn(
            model: Model, consensus: jax.Array, party: FedMDParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            examples = shared_examples(public | {TARGET: consensus}, data)
            rates = (hyper.digest_learning_rate, hyper.revisit_learning_rate)
            trainings = (digest_of_round, revisit)
            return digest_and_revisit(
                model, party, examples, data, key, *trainings, gradient_hook, rates, scores
            )

        def run(
            update: PartyUpdate, message: PyTree, states: Mapping[str, PyTree], purpose: str
        ) -> PartiesResult:
            key = keys.derive(round.key, purpose, round.index)
            return run_parties(groups, update, message, states, round, key, execution, reduce)

        # Algorithm 1, "Communicate": class scores on the public examples, weighted by c_k.
        weights = by_architecture(groups, hyper.weights)
        senders = {name: (party.variables, weights[name]) for name, party in state.items()}
        communicated = run(communicate, None, senders, "communicate")
        # Algorithm 1, "Aggregate": the consensus is the weighted mean of the scores.
        consensus = communicated.combined
        # Algorithm 1, "Digest" and "Revisit".
        learned = run(learn, consensus, state, "client_update")
        return learned.states, client_states, communicated.metrics | learned.metrics

    return assemble(
        name,
        groups,
        hyper._replace(weights=weights),
        lambda key: start(init_models(groups, key), digest, revisit),
        round_,
        lambda state, name: state[name].variables,
        same_for_all(
            groups,
            scores_communication(
                aligned_size(alignment), num_classes, alignment.alignment_size is not None
            ),
        ),
        select_examples,
        {PUBLIC: len(alignment.public_labels)},
    )


def start(
    models: Mapping[str, Variables], digest: LocalTraining, revisit: LocalTraining
) -> dict[str, FedMDParty]:
    """The state before the first round.

    Args:
      models: architecture -> Variables, leaves [group, ...], after transfer learning.
      digest, revisit: as `fed_md` gets them.
    """

    def fresh(name: str, training: LocalTraining, params: PyTree) -> PyTree:
        first = functools.partial(lasting_state, f"{name}.optimizer", training.optimizer)
        return jax.vmap(first)(params)

    parties = {}
    for name, (params, mutable) in models.items():
        revisit_state = fresh("revisit", revisit, params)
        digest_state = fresh("digest", digest, params)
        parties[name] = FedMDParty(Variables(params, mutable), digest_state, revisit_state)
    return parties
