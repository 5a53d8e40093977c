"""FedKD with teachers of different networks: each party's own model and a shared student learn together.

"Communication-efficient federated learning via knowledge distillation" (Wu, Wu, Lyu, Huang, Xie, 2022).
https://arxiv.org/abs/2108.13323

The paper's teachers have one network (`fed_kd`). That each party may have its own is HtFLlib's version,
https://arxiv.org/abs/2506.03954. The losses are those of `fed_kd`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedcodist.algorithms.clients.fed_kd import FedKDHyper
from fedcodist.algorithms.clients.fed_kd_checks import check_mutual, map_shapes
from fedcodist.algorithms.clients.fed_kd_clients import FedKDClients, FedKDClientState
from fedcodist.algorithms.clients.fed_kd_exchange import STUDENT, epoch_delta
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_widths, same_for_all
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    party_metrics,
    run_parties,
)
from fedcodist.algorithms.parties.reductions import checked_mean
from fedcodist.compression.compressor import Compressor
from fedcodist.core import keys
from fedcodist.core.aggregation import Reduce, as_stored
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_training import LocalTraining, check_training
from fedcodist.core.method import FederatedAlgorithm, single_model
from fedcodist.core.model import Model, Variables, variable_shapes

PyTree = Any


class FedKDParty(NamedTuple):
    """What never leaves a party.

    Attributes:
      variables: its own model, the teacher.
      maps: W^h of the aligned layers.
      optimizers: (state of the optimizer of teacher and maps, state of the student's).
      memory: of the uplink's compressor.
    """

    variables: Variables
    maps: list[jax.Array]
    optimizers: tuple[PyTree, PyTree]
    memory: PyTree


class FedKDPartiesState(NamedTuple):
    """Parties by architecture, leaves [group, ...], the student, and the downlink's memory."""

    models: dict[str, FedKDParty]
    student: Variables
    memory: PyTree


class FedKDPartiesHyper(NamedTuple):
    """Floats; traced.

    Attributes:
      learning_rate: of parties' own models and their maps W^h.
      student_learning_rate: of the student.
      output_weight: of L^d, the divergence between the two models' predictions.
      hidden_weight: of L^h, the distance between their hidden states.
    """

    learning_rate: Any = 1e-3
    student_learning_rate: Any = 1e-3
    output_weight: Any = 1.0
    hidden_weight: Any = 1.0


def fed_kd_parties(
    groups: Mapping[str, PartyGroup],
    student: Model,
    columns: Mapping[str, Any],
    training: LocalTraining = LocalTraining(optax.adam, batch_size=32),
    num_rounds: int = 1,
    uplink: Compressor | None = None,
    downlink: Compressor | None = None,
    mutual: MutualLosses = MutualLosses(),
    hyper: FedKDPartiesHyper = FedKDPartiesHyper(),
    execution: Execution = Execution(),
    name: str = "fed_kd_parties",
    reduce: Reduce | None = None,
) -> FederatedAlgorithm:
    """Each party trains its own model together with a copy of the student; the students are averaged.

    The mean over parties is unweighted. With compressors, parties send the compressed change of their
    student, and the server sends the compressed change of the mean; it continues from the student that
    parties can restore. The paper's compressor is `fedcodist.svd`. (HtFLlib decomposes the students
    themselves.)

    Args:
      groups: architecture -> its parties. Networks of `headed` have the embedding as hidden state.
      student: the shared model. It and the parties' models are aligned as in `fed_kd`.
      columns: the federated data's columns (arrays or shapes), for the widths of W^h.
      training: of both models, on the same batches. Each model has its own optimizer, which continues
        over rounds.
      num_rounds: of the whole training, for compressors that change during it.
      uplink, downlink: compressors; None: no compression in this direction.
      mutual: how the models learn from each other.
      hyper: learning rates, and the weights of L^d and L^h; 0 leaves a term out.
      execution, name: as in `fed_md`.
      reduce: how students' changes and batch statistics are averaged; by default the unweighted mean.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(fed_kd_parties, locals())
    groups = check_groups(groups, (STUDENT,))
    reduce = checked_mean(reduce)
    check_widths(groups, student.num_classes, "student.num_classes")
    check_training("training", training)
    check_integer("num_rounds", num_rounds, low=1)
    check_mutual(mutual, training)
    for field, value in hyper._asdict().items():
        check_number(f"hyper.{field}", value, low=0)
    clients = {
        architecture: FedKDClients(
            teacher=group.model,
            student=student,
            map_shapes=map_shapes(
                group.model,
                student,
                columns,
                training,
                mutual,
                f"groups[{architecture!r}].model",
            ),
            exchange=epoch_delta(training),
            fresh_optimizers=False,
            mutual=mutual,
        )
        for architecture, group in groups.items()
    }

    shapes = variable_shapes(student)
    size = tree_bytes(shapes)
    statistics = tree_bytes(shapes.mutable)  # batch statistics are sent uncompressed

    def init(key: jax.Array) -> FedKDPartiesState:
        first = student.init(keys.derive(key, "init", STUDENT))
        models = init_models(groups, key)

        def party(group: str, teacher: Variables) -> FedKDParty:
            state = clients[group].first_state_of(teacher, first.params)
            memory = uplink.init(first.params) if uplink else ()
            return FedKDParty(teacher, state.maps, state.optimizers, memory)

        parties = {
            group: jax.vmap(lambda teacher, group=group: party(group, teacher))(models[group])
            for group in groups
        }
        return FedKDPartiesState(parties, first, downlink.init(first.params) if downlink else ())

    def round_(
        state: FedKDPartiesState, client_states: PyTree, round: Round, hyper: FedKDPartiesHyper
    ) -> AfterRound:
        progress = (round.index + 1) / num_rounds

        def update(
            model: Model, shared: Variables, party: FedKDParty, data: ClientData, key: jax.Array
        ) -> PartyResult:
            # Groups that share a model have equal settings too.
            of_group = next(clients[name] for name, group in groups.items() if group.model is model)
            client_state = FedKDClientState(
                party.variables, party.maps, party.optimizers, jnp.array(True)
            )
            # Algorithm 1, on each batch: the teacher takes a step along the gradient of L_t, and the
            # student along that of L_s.
            result = of_group.train(shared, client_state, data, key, FedKDHyper(*hyper))
            # The teacher stays here; the student's change is sent, compressed.
            change, memory = result.update, party.memory
            metrics = {}
            if uplink:
                message, memory = uplink.compress(
                    change, memory, keys.derive(key, "uplink"), progress
                )
                metrics["client_bytes_up"] = uplink.payload(message) + statistics
                change = uplink.decompress(message, change)
            after: FedKDClientState = result.client_state
            metrics |= party_metrics(
                after.teacher,
                result.metrics["num_steps"],
                result.metrics["examples"],
                loss=result.metrics["loss"],
            )
            new = FedKDParty(after.teacher, after.maps, after.optimizers, memory)
            return PartyResult(new, metrics, sends=(change, result.mutable))

        key = keys.derive(round.key, "client_update", round.index)
        result = run_parties(
            groups, update, state.student, state.models, round, key, execution, reduce
        )
        # The server averages the changes; parties download the compressed mean.
        change, mutable = result.combined
        metrics, memory = result.metrics, state.memory
        if downlink:
            message, memory = downlink.compress(
                change, memory, keys.derive(key, "downlink"), progress
            )
            change = downlink.decompress(message, change)
            sent_bytes = downlink.payload(message) + statistics
            parties = {metric.rpartition("/")[0] for metric in metrics}
            metrics |= {f"{party}/client_bytes_down": sent_bytes for party in sorted(parties)}
        params = jax.tree.map(jnp.subtract, state.student.params, change)
        new = jax.tree.map(as_stored, Variables(params, mutable), state.student)
        return FedKDPartiesState(result.states, new, memory), client_states, metrics

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, group: state.models[group].variables,
        same_for_all(groups, Communication(down=size, up=size)),
        other_predictors={STUDENT: single_model(student, lambda state: state.student)},
        num_rounds=num_rounds if uplink or downlink else None,
        server=lambda state: state.student,
    )
