"""FCCL: parties correlate their outputs on public examples, and learn from two own earlier models.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022,
https://doi.org/10.1109/CVPR52688.2022.00990.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
from fedcodist.algorithms.parties.public_correlation import (
    PublicBatches,
    checked_steps,
    learn_from_others,
    public_order,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.communication import Communication
from fedcodist.core.example_losses import checked_loss
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.layer_outputs import checked_logits
from fedcodist.core.local_training import (
    LocalTraining,
    check_training,
    train_client,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Batch, Model, Variables
from fedcodist.distillation.divergences import kl_divergence
from fedcodist.distillation.loop import frozen

PyTree = Any


class FCCLParty(NamedTuple):
    """A party's current model, its model after the last round, and its model before the first round."""

    variables: Variables
    last: Variables
    first: Variables


class FCCLState(NamedTuple):
    """Parties by architecture, leaves [group, ...]."""

    models: dict[str, FCCLParty]


class FCCLHyper(NamedTuple):
    """Floats of FCCL; traced.

    Attributes:
      learning_rate: of local training, whose optimizer is fresh in every round.
      public_learning_rate: on public examples.
      off_diagonal: lambda of the correlations of different classes.
      last_weight: of the divergence from the party's model after the last round ("inter-domain").
      first_weight: of the divergence from its model before the first round ("intra-domain").
    """

    learning_rate: Any = 1e-3
    public_learning_rate: Any = 1e-3
    off_diagonal: Any = 0.0051
    last_weight: Any = 1.0
    first_weight: Any = 1.0


def fccl(
    groups: Mapping[str, PartyGroup],
    num_classes: int,
    public: PublicBatches,
    training: LocalTraining = LocalTraining(optax.adam, batch_size=256),
    hyper: FCCLHyper = FCCLHyper(),
    execution: Execution = Execution(),
    name: str = "fccl",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """In a round parties align their outputs on public batches with the mean, and then train locally.

    On a public batch all parties send logits, and the server sends back their mean. Each party takes a
    step on sum_i (1 - C_ii)^2 + lambda sum_{i != j} (1 + C_ij)^2. C_ij is the correlation over the batch
    of its i-th logit with the j-th mean logit: equal classes should agree, different ones be opposed.
    Local training minimises CE + KL(last || model) + KL(first || model). "last" is the party's model at
    the end of the previous round, and "first" its model before the first round. Parties should first be
    trained alone, as in the paper.

    The authors' code computes variances with the divisor B - 1 but correlations with B, and makes a new
    optimizer for every public batch. One of its versions uses the party's last model in the mean. Here
    correlations are exact, the optimizer lasts for a round, and the mean is that of the current models.

    Args:
      groups: architecture -> its parties.
      num_classes: outputs of every model.
      public: the public examples, and how parties learn on them.
      training: on private examples.
      hyper: learning rates and weights.
      execution, name: as in `fed_md`.
      reduce: how parties' logits are averaged; by default the unweighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fccl, locals())
    groups = check_groups(groups)
    reduce = checked_mean(reduce)
    check_widths(groups, num_classes)
    check_training("training", training)
    steps = checked_steps(public)
    for field, value in hyper._asdict().items():
        check_number(f"hyper.{field}", value, low=0)

    def init(key: jax.Array) -> FCCLState:
        models = init_models(groups, key)
        return FCCLState(
            {name: FCCLParty(values, values, values) for name, values in models.items()}
        )

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        return {PUBLIC: public_order(keys.derive(key, "public_order", round), public)}

    def round_(
        state: FCCLState, client_states: PyTree, round: Round, hyper: FCCLHyper
    ) -> AfterRound:
        parties = _begun(state.models, round.index)
        # Learning from others: on every public batch parties send logits, and learn from the mean.
        models = {name: party.variables for name, party in parties.items()}
        models, public_metrics = learn_from_others(
            groups, models, public, round, hyper, execution, reduce
        )
        parties = {name: parties[name]._replace(variables=models[name]) for name in parties}

        # Being oneself: CE + KL(last || model) + KL(first || model) on private examples.
        def train(
            model: Model, message: None, party: FCCLParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            trained = train_client(
                model,
                training,
                party.variables,
                data,
                key,
                hyper.learning_rate,
                loss_hook=dual_loss(model, party, hyper),
            )
            metrics = training_metrics(trained)
            after = party._replace(variables=trained.variables, last=trained.variables)
            return PartyResult(after, metrics)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(groups, train, None, parties, round, key, execution)
        return FCCLState(result.states), client_states, result.metrics | public_metrics

    # The logits of all public batches; their means, and which examples these are of.
    examples = steps * public.public_batch_size
    size = examples * num_classes * np.dtype(np.float32).itemsize
    indices = examples * np.dtype(np.int32).itemsize
    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, name: state.models[name].variables,
        same_for_all(groups, Communication(down=size + indices, up=size)),
        select_examples,
        {PUBLIC: public.num_public},
    )


def dual_loss(model: Model, party: FCCLParty, hyper: FCCLHyper) -> Any:
    """(outputs, batch) -> CE + divergences from the party's last model and its first, per example."""
    divergence = kl_divergence("forward")
    last, first = frozen(model, party.last), frozen(model, party.first)

    def loss(outputs: Any, batch: Batch) -> jax.Array:
        logits = checked_logits(outputs)
        of_last = divergence(logits, jax.nn.softmax(last(batch)))
        of_first = divergence(logits, jax.nn.softmax(first(batch)))
        labels = checked_loss(model.loss, outputs, batch)
        return labels + hyper.last_weight * of_last + hyper.first_weight * of_first

    return loss


def _begun(models: Mapping[str, FCCLParty], round: jax.Array) -> dict[str, FCCLParty]:
    """The parties at the start of a round; in the first round both teachers are the current model."""
    choose = lambda now, kept: jnp.where(round == 0, now, kept)
    return {
        name: FCCLParty(
            party.variables,
            jax.tree.map(choose, party.variables, party.last),
            jax.tree.map(choose, party.variables, party.first),
        )
        for name, party in models.items()
    }
