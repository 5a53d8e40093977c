"""Multi-Headed Distillation (MHD): clients of a graph teach each other's auxiliary heads.

Zhmoginov et al., Decentralized Learning with Multi-Headed Distillation, CVPR 2023,
https://arxiv.org/abs/2211.15774. The paper has no numbered algorithm, so comments name its equations.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph import graphs, mhd_costs, mhd_exchange
from fedcodist.algorithms.graph.mhd_checks import check_networks
from fedcodist.algorithms.graph.mhd_exchange import ExchangeSchedule
from fedcodist.algorithms.graph.mhd_host_checkpoints import HostBanks
from fedcodist.algorithms.graph.mhd_losses import DISTILLATION_LOSSES, HeadDistillation
from fedcodist.algorithms.graph.mhd_public_batches import public_indices, public_term
from fedcodist.algorithms.graph.mhd_teachers import exchanged, teaching
from fedcodist.algorithms.parties.groups import PartyGroup, check_groups, check_no_gap
from fedcodist.algorithms.parties.party import (
    AfterRound,
    PartyResult,
    assemble,
    init_models,
    party_metrics,
    run_parties,
)
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import keys
from fedcodist.core.arguments import check_arguments
from fedcodist.core.checks import check_number
from fedcodist.core.for_each_client import Execution
from fedcodist.core.inputs import ClientData, Round
from fedcodist.core.local_steps import (
    CLIENT_STEPS,
    Learner,
    StepTraining,
    check_step_training,
    start_learners,
    train_steps,
)
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Model, Variables

PyTree = Any
# A client's learner, its checkpoint buffer, and the indices of its public examples [steps, batch]
Client = tuple[Learner, jax.Array, jax.Array]


class MHDHyper(NamedTuple):
    """Floats of MHD; traced.

    Attributes:
      learning_rate: before its decay.
      embedding_weight: nu_emb.
      head_weight: nu_aux. In short runs, weights above 1 kept all heads at chance level.
    """

    learning_rate: Any = 0.03
    embedding_weight: Any = 1.0
    head_weight: Any = 1.0

    def check(self, name: str) -> None:
        """Raises ValueError that names a negative number."""
        for field in self._fields:
            check_number(f"{name}.{field}", getattr(self, field), low=0)


class MHDState(NamedTuple):
    """Clients' models, and the stale checkpoints from which they learn.

    Attributes:
      learners: architecture -> leaves [group, ...].
      buffers: int32 [clients, buffer, 2], (architecture, slot); see ExchangeSchedule.
      banks: architecture -> Variables of stale checkpoints, leaves [slots, ...]; empty if checkpoints
        are on the host.
    """

    learners: dict[str, Learner]
    buffers: jax.Array
    banks: dict[str, Variables]


def multi_headed_distillation(
    groups: Mapping[str, PartyGroup],
    public: Mapping[str, Any],
    graph: Any,
    num_rounds: int,
    training: StepTraining = StepTraining(),
    distillation: HeadDistillation = HeadDistillation(),
    hyper: MHDHyper = MHDHyper(),
    execution: Execution = Execution(),
    name: str = "multi_headed_distillation",
    same_start: bool = False,
) -> FederatedAlgorithm:
    """Clients of a graph teach each other's auxiliary heads on public examples.

    A step minimises the sum of three losses (equations 1 to 5). On private examples it is the main
    head's cross-entropy. On a public batch they are the distance of embeddings from those of stale
    checkpoints in the client's buffer, and every auxiliary head's cross-entropy with the most confident
    of its candidates. The main head gets no distillation. A round is `training.steps` steps (S_P). At
    the beginning of each round but the first, a fresh checkpoint of a neighbour replaces one entry of
    every buffer. Within a round clients are independent, so devices wait for each other once per round.

    Teachers are in evaluation mode, the client itself in training mode on both batches.

    Args:
      groups: architecture -> its clients, together clients 0 to K - 1; models of
        `fedcodist.models.multi_headed`, with the same heads, classes and embedding width.
      public: columns of the data set `public`, arrays or shapes; only shapes are read here.
      graph: see `fedcodist.algorithms.graph.graphs`; an edge from i to j lets i learn from j.
        A graph that changes has an entry per round.
      num_rounds: of the whole run.
      training: optimizer, private batches, S_P, schedule of the learning rate.
      distillation: how clients learn from each other, and exchange checkpoints.
      hyper: learning rate and weights.
      execution: how clients of one architecture are executed. With several architectures use 'scan':
        a vmapped client computes the teachers of all architectures.
      name, same_start: as in `local_only_steps`.

    Raises:
      ValueError, TypeError: names the argument and what is allowed.
    """
    check_arguments(multi_headed_distillation, locals())
    groups = check_groups(groups)
    num_clients = check_no_gap(groups)
    check_step_training(training, num_rounds)
    outputs = check_networks(groups, public, distillation)
    num_public = next(iter(public.values())).shape[0]
    edges = graphs.adjacency(graph, num_clients)
    if distillation.teachers:
        graphs.check_neighbours(edges, name)
    schedule = _schedule(groups, edges, num_rounds, distillation)
    is_on_host = distillation.exchange.is_on_host
    notes = mhd_costs.memory_notes(groups, schedule, distillation.exchange)
    host_banks = HostBanks(schedule, groups) if schedule and is_on_host else None

    def init(key: jax.Array) -> MHDState:
        return start(init_models(groups, key, same_start), training, schedule, is_on_host)

    def select_examples(round: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
        shape = (num_clients, training.steps, distillation.batch_size)
        return {PUBLIC: public_indices(key, round, shape, num_public)}

    def round_(state: MHDState, client_states: PyTree, round: Round, hyper: MHDHyper) -> AfterRound:
        # Every S_P steps a fresh checkpoint of a neighbour replaces one entry of each buffer.
        buffers, banks, checkpoint = exchanged(schedule, host_banks, state, round)
        teach = teaching(groups, schedule, checkpoint)
        public = round.inputs.examples[PUBLIC]

        def update(
            model: Model, message: None, client: Client, data: ClientData, key: jax.Array
        ) -> PartyResult:
            learner, buffer, indices = client
            weights = (hyper.embedding_weight, hyper.head_weight)  # of equations 2 to 5
            # Equation 1: the main head's cross-entropy on a private batch, and the distillation losses
            # on a public one. One optimizer step for their sum.
            learner, losses = train_steps(
                model,
                training,
                learner,
                data,
                key,
                round.index,
                num_rounds,
                hyper.learning_rate,
                public_term(model, public.columns, indices, buffer, teach, distillation, weights),
                DISTILLATION_LOSSES,
            )
            num_examples = training.steps * training.batch_size
            metrics = party_metrics(learner.variables, training.steps, num_examples, **losses)
            return PartyResult(learner, metrics)

        clients = {
            name: (state.learners[name], buffers[group.clients], public.indices[group.clients])
            for name, group in groups.items()
        }
        key = keys.derive(round.key, CLIENT_STEPS)
        result = run_parties(groups, update, None, clients, round, key, execution)
        return MHDState(result.states, buffers, banks), client_states, result.metrics

    def restart(state: MHDState) -> MHDState:
        # Teachers are the present models: the run's exchange of checkpoints is drawn from round 0 on.
        models = {name: learner.variables for name, learner in state.learners.items()}
        return start(models, training, schedule, is_on_host)._replace(learners=state.learners)

    return assemble(
        name,
        groups,
        hyper,
        init,
        round_,
        lambda state, architecture: state.learners[architecture].variables,
        mhd_costs.communication(
            groups,
            schedule,
            num_rounds,
            training.steps,
            distillation,
            outputs,
            sends_embeddings=hyper.embedding_weight != 0,
        ),
        select_examples,
        {PUBLIC: num_public},
        num_rounds=num_rounds,
    )._replace(notes=notes, host_state=host_banks, restart=restart)


def start(
    models: Mapping[str, Variables],
    training: StepTraining,
    schedule: ExchangeSchedule | None,
    on_host: bool = False,
) -> MHDState:
    """The state before the first round: buffers hold the neighbours' given models.

    Args:
      models: architecture -> Variables, leaves [group, ...], for example pre-trained.
      training: as in `multi_headed_distillation`.
      schedule: of the run; None without teachers.
      on_host: whether checkpoints are on the host, where the first round stores them.
    """
    learners = start_learners(training, dict(models))
    if schedule is None:
        num_clients = sum(jax.tree.leaves(model.params)[0].shape[0] for model in models.values())
        return MHDState(learners, jnp.zeros((num_clients, 1, 2), jnp.int32), {})
    banks = {} if on_host else mhd_exchange.first_banks(schedule, models)
    return MHDState(learners, jnp.asarray(schedule.first), banks)


def _schedule(
    groups: Mapping[str, PartyGroup],
    edges: np.ndarray,
    num_rounds: int,
    distillation: HeadDistillation,
) -> ExchangeSchedule | None:
    """The run's exchange of checkpoints; None without teachers."""
    if not distillation.teachers:
        return None
    exchange = distillation.exchange
    size = exchange.checkpoints_per_client or edges.shape[-1]  # N_P
    if distillation.teachers > size:
        raise ValueError(
            f"distillation.teachers must be at most the {size} checkpoints of a buffer, got "
            f"{distillation.teachers}."
        )
    return mhd_exchange.exchange_schedule(groups, edges, size, num_rounds, exchange.seed)
