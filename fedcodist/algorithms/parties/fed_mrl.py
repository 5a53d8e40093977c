"""FedMRL: each party fuses its embedding with that of a small shared model, and both heads read it.

Yi, Yu, Ren, Wang, Liu and Li, "Federated Model Heterogeneous Matryoshka Representation Learning",
2024, https://arxiv.org/abs/2406.00488.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, same_for_all
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
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.local_training import LocalTraining, check_training, train_client
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Batch, Model, Variables, variable_shapes
from fedcodist.models.headed import HEAD, apply_head, check_heads, embedding_of

PyTree = Any
OWN, SHARED, PROJECTOR = "own", "shared", "projector"


class FedMRLParty(NamedTuple):
    """A party's own network, and its projector {"kernel": [small + width, width], "bias": [width]}."""

    variables: Variables
    projector: PyTree


class FedMRLState(NamedTuple):
    """Parties by architecture, leaves [group, ...], and the small shared model."""

    models: dict[str, FedMRLParty]
    shared: Variables


class FedMRLHyper(NamedTuple):
    """Floats of FedMRL; traced.

    Attributes:
      learning_rate: of the own network, the small model and the projector.
      own_weight: of the loss of the party's own head.
      shared_weight: of the loss of the shared head.
    """

    learning_rate: Any = 0.01
    own_weight: Any = 1.0
    shared_weight: Any = 1.0


def fed_mrl(
    groups: Mapping[str, PartyGroup],
    small: Model,
    training: LocalTraining = LocalTraining(),
    hyper: FedMRLHyper = FedMRLHyper(),
    weighted: bool = True,
    execution: Execution = Execution(),
    name: str = "fed_mrl",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Parties train their own network, a copy of a small shared model, and a projector of embeddings.

    The projector maps the two concatenated embeddings to one of the own network's width. The own head
    reads all of it and the shared head its first entries, like a matryoshka doll. The loss is the
    weighted sum of both heads' cross-entropies. Only small models are sent, and the server averages
    them. A party predicts with its own head and the newest small model. (The authors' code evaluates it
    with its own small model, right after local training.) All projectors start from the same values, as
    in the authors' code. Optimizers are fresh in every round. (In the authors' code those of the small
    model and the projector continue, shared by all parties, and gradients are clipped at norm 50.)

    Args:
      groups: architecture -> its parties, networks of `headed` with embeddings of one width.
      small: the shared model of `headed`, whose embedding is at most as wide.
      training: of own network, small model and projector, on the same batches.
      hyper: learning rate and the weights of both losses.
      weighted: whether small models are weighted by parties' numbers of examples, as the authors' code
        means to do (not verified in the paper).
      execution, name: as in `fed_md`.
      reduce: how small models are averaged; by default their weighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_mrl, locals())
    groups = check_groups(groups, (SHARED,))
    reduce = checked_mean(reduce)
    own_width, small_width = _check_widths(groups, small)
    check_training("training", training)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)
    check_number("hyper.own_weight", hyper.own_weight, low=0)
    check_number("hyper.shared_weight", hyper.shared_weight, low=0)
    fused = {
        architecture: group._replace(model=matryoshka(group.model, small, small_width))
        for architecture, group in groups.items()
    }

    def init(key: jax.Array) -> FedMRLState:
        projector = _first_projector(keys.derive(key, "init", PROJECTOR), small_width, own_width)
        parties = {}
        for architecture, variables in init_models(groups, key).items():
            count = len(groups[architecture].clients)
            parties[architecture] = FedMRLParty(variables, _repeated(projector, count))
        return FedMRLState(parties, small.init(keys.derive(key, "init", SHARED)))

    def round_(
        state: FedMRLState, client_states: PyTree, round: Round, hyper: FedMRLHyper
    ) -> AfterRound:
        def update(
            model: Model, shared: Variables, party: FedMRLParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # The party downloads the small model. Its own network, the small model and the projector
            # learn from both heads' losses.
            trained = train_client(
                model,
                training._replace(
                    optimizer=own_optimizers(training.optimizer, (OWN, SHARED, PROJECTOR))
                ),
                _joined(party, shared),
                data,
                key,
                hyper.learning_rate,
                loss_hook=matryoshka_loss(model.loss, small.loss, hyper),
            )
            projector = trained.variables.params[PROJECTOR]
            new_party = FedMRLParty(part_of(trained.variables, OWN), projector)
            metrics = training_metrics(trained)
            # The small model goes back to the server, weighted by the party's examples.
            sends = part_of(trained.variables, SHARED)
            return PartyResult(new_party, metrics, sends, data.size if weighted else 1.0)

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            fused, update, state.shared, state.models, round, key, execution, reduce
        )
        mean = jax.tree.map(as_stored, result.combined, state.shared)
        return FedMRLState(result.states, mean), client_states, result.metrics

    def variables(state: FedMRLState, architecture: str) -> Variables:
        # A party predicts with the newest small model.
        count = len(groups[architecture].clients)
        return _joined(state.models[architecture], _repeated(state.shared, count))

    size = tree_bytes(variable_shapes(small))
    return assemble(
        name,
        fused,
        hyper,
        init,
        round_,
        variables,
        same_for_all(groups, Communication(down=size, up=size)),
        other_predictors={SHARED: single_model(small, lambda state: state.shared)},
        server=lambda state: state.shared,
    )


def matryoshka(own: Model, small: Model, small_width: int) -> Model:
    """A party's networks and projector as one model, which predicts with the own head.

    Its outputs are LayerOutputs with the own head's logits. `hidden` is the shared head's logits and the
    fused embedding.
    """
    both = joint_model({OWN: own, SHARED: small}, own.loss)

    def apply(variables: Variables, batch: Batch, **arguments: Any) -> tuple[LayerOutputs, PyTree]:
        params = variables.params
        outputs, mutable = both.apply(variables, batch, **arguments)
        # The small model's embedding comes first, and its head reads the first entries.
        shared, of_own = embedding_of(outputs[SHARED], "small"), embedding_of(outputs[OWN])
        joined = jnp.concatenate([shared, of_own], axis=-1)
        embedding = apply_head(params[PROJECTOR], joined)
        logits = apply_head(params[OWN][HEAD], embedding)
        of_shared = apply_head(params[SHARED][HEAD], embedding[..., :small_width])
        return LayerOutputs(logits, (of_shared, embedding)), mutable

    return own._replace(apply=apply, mean_loss=None)


def matryoshka_loss(own: Any, small: Any, hyper: FedMRLHyper) -> Any:
    """The weighted sum of both heads' losses per example, for the outputs of `matryoshka`."""

    def loss(outputs: LayerOutputs, batch: Batch) -> jax.Array:
        of_shared = LayerOutputs(outputs.hidden[0], outputs.hidden[1:])
        labels = hyper.own_weight * checked_loss(own, outputs, batch)
        return labels + hyper.shared_weight * checked_loss(small, of_shared, batch)

    return loss


def _joined(party: FedMRLParty, shared: Variables) -> Variables:
    joint = joint_variables({OWN: party.variables, SHARED: shared})
    return joint._replace(params=joint.params | {PROJECTOR: party.projector})


def _first_projector(key: jax.Array, small_width: int, own_width: int) -> PyTree:
    kernel = jax.nn.initializers.lecun_normal()(key, (small_width + own_width, own_width))
    return {"kernel": kernel, "bias": jnp.zeros(own_width)}


def _repeated(tree: PyTree, count: int) -> PyTree:
    """The same values for each of a group, leaves [group, ...]."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *jnp.shape(leaf))), tree)


def _check_widths(groups: Mapping[str, PartyGroup], small: Model) -> tuple[int, int]:
    """(width of the parties' embeddings, width of the small model's embedding)."""
    models = {architecture: group.model for architecture, group in groups.items()}
    own_width, classes = check_heads("groups", models)
    small_width, small_classes = check_heads("small", {SHARED: small})
    if small_classes != classes:
        raise ValueError(
            f"small must have the {classes} outputs that parties' models have, got {small_classes}."
        )
    if small_width > own_width:
        raise ValueError(
            f"small must have an embedding of at most the {own_width} that parties' have, whose first "
            f"entries its head reads, got {small_width}."
        )
    return own_width, small_width
