"""Multi-Headed Distillation (Zhmoginov et al., 2023): no server, knowledge moves from head to head."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.algorithms.graph import graphs, mhd_exchange
from fedcodist.algorithms.graph.mhd_exchange import ExchangeSchedule, exchange_schedule
from fedcodist.algorithms.graph.mhd_host_checkpoints import HostBanks
from fedcodist.algorithms.graph.mhd_losses import (
    CANDIDATES,
    CHOICES,
    EMBEDDING_DISTANCES,
    candidates,
    chosen,
    embedding_loss,
    head_loss,
)
from fedcodist.algorithms.parties.party import (
    PARTIES,
    PUBLIC,
    PartyGroup,
    check_groups,
    check_no_gap,
    everybody,
    for_each_party,
    init_models,
    party_names,
    party_predictors,
)
from fedcodist.core import keys
from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import LARGEST_BATCH, check_integer, check_number
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import (
    CLIENT_STEPS,
    Learner,
    StepTraining,
    check_step_training,
    start_learners,
    train_steps,
)
from fedcodist.core.memory import available_bytes, host_bytes
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.model import Variables, is_finite, variable_shapes
from fedcodist.core.shuffling import stream_positions
from fedcodist.models.multi_headed import BACKBONE, HeadedOutputs


class HeadDistillation(NamedTuple):
    """How clients learn from each other.

    Attributes:
      batch_size: public examples per step and client; every client has its own stream of them.
      teachers: Delta, checkpoints drawn from the pool in each step, without replacement. With 0 nobody
        learns from others: a head chases the client's own one before it.
      candidates: whose predictions compete for a head, see `head_distillation.CANDIDATES`. The paper's
        "All" is taken to be "same_level_and_self" with two teachers; it does not say. Head k knows
        what lies at most k hops away with "base" and "self" and where the backbone is not reached; with
        the others, and through the backbone, knowledge travels further.
      choice: of the target among the candidates, "most_confident" or "random".
      embedding_distance: "squared" or "norm", of normalised embeddings.
      checkpoints_per_client: N_P; the number of clients where not given.
      checkpoints_on: where the stale checkpoints are, "device" or "host". On the host they take no
        memory of a device, which fetches one when a step needs it; results are the same. A CPU's memory
        is the host's, and there is no difference.
      reaches_backbone: whether heads' and embeddings' losses change the backbone.
      updates_statistics: whether public batches too update batch normalisation's running averages.
      preprocess: (batch, key, positions) -> batch, of public examples.
    """

    batch_size: int = 512
    teachers: int = 1
    candidates: str = "base"
    choice: str = "most_confident"
    embedding_distance: str = "squared"
    checkpoints_per_client: int | None = None
    checkpoints_on: str = "device"
    reaches_backbone: bool = True
    updates_statistics: bool = False
    preprocess: Preprocess = lambda batch, key, positions: batch


class MHDHyper(NamedTuple):
    """Floats of MHD; traced.

    Attributes:
      learning_rate: before its decay.
      embedding_weight: nu_emb.
      head_weight: nu_aux. Weights above 1 have been seen to hold all heads at chance in short runs.
    """

    learning_rate: Any = 0.03
    embedding_weight: Any = 1.0
    head_weight: Any = 1.0


class MHDState(NamedTuple):
    """Clients' models, and the stale ones that they learn from.

    Attributes:
      learners: architecture -> leaves [group, ...].
      pools: int32 [clients, pool, 2], (architecture, slot); see ExchangeSchedule.
      banks: architecture -> Variables of stale checkpoints, leaves [slots, ...]; empty where these are
        on the host.
    """

    learners: dict[str, Learner]
    pools: jax.Array
    banks: dict[str, Variables]


def multi_headed_distillation(
    groups: Mapping[str, PartyGroup],
    public: Mapping[str, Any],
    graph: Any,
    num_rounds: int,
    training: StepTraining = StepTraining(),
    distillation: HeadDistillation = HeadDistillation(),
    hyper: MHDHyper = MHDHyper(),
    exchange_seed: int = 0,
    memory: int | None = None,
    execution: Execution = Execution(),
    name: str = "multi_headed_distillation",
    same_start: bool = False,
) -> FederatedAlgorithm:
    """Clients of a graph teach each other's auxiliary heads on public examples.

    A step: cross-entropy of the main head on private examples, plus on a public batch the embeddings'
    distance to some stale checkpoints from the client's pool, plus the cross-entropy of every auxiliary
    head from the surest of its candidates (equations 1 to 5). One gradient step. The main head gets no
    distillation. There is no server: a round is `training.steps` steps (S_P), and at the beginning of
    each but the first one entry of every pool becomes a fresh checkpoint of a neighbour. In a round no
    client needs another, so devices wait for each other once in a round.

    Teachers are in inference mode, the client itself in training mode on both batches.

    Args:
      groups: architecture -> its clients, all clients 0 to K - 1; models of
        `fedcodist.models.multi_headed`, with the same heads, classes and width of embedding.
      public: columns of the data set `public`, arrays or shapes; nothing but shapes is read here.
      graph: see `fedcodist.algorithms.graph.graphs`; an edge from i to j lets i learn from j.
        One that changes has an entry per round.
      num_rounds: of the whole run.
      training: optimizer, private batches, S_P, schedule of the learning rate.
      distillation: how clients learn from each other.
      hyper: learning rate and weights.
      exchange_seed: of who gets whose checkpoint when. It is settled before the run, like the partition
        of the examples, and the same for all seeds of a run.
      memory: bytes that the banks may take; `memory_for_checkpoints` where not given.
      execution: how clients of one architecture are executed. With several architectures 'scan' is
        the better one: a vmapped client computes the teachers of all architectures.
      name: the method's name in tables.
      same_start: whether clients of one architecture start from the same values.

    Raises:
      ValueError, TypeError: one line that names the argument and what is allowed.
    """
    check_arguments(multi_headed_distillation, locals())
    groups = check_groups(groups)
    num_clients = check_no_gap(groups)
    check_step_training(training, num_rounds)
    _check_distillation(distillation, hyper)
    if not public or next(iter(public.values())).shape[0] < 1:
        raise ValueError("public must not be empty.")
    heads = _check_outputs(groups, public, distillation.preprocess)
    edges = graphs.adjacency(graph, num_clients)
    schedule = None
    if distillation.teachers:
        graphs.check_neighbours(edges, name)
        checkpoints_per_client = _checkpoints_per_client(distillation, num_clients)
        schedule = exchange_schedule(
            groups, edges, checkpoints_per_client, num_rounds, exchange_seed
        )
    on_host = _is_on_host(distillation)
    memory = memory_for_checkpoints(distillation) if memory is None else memory
    notes = _check_memory(groups, schedule, memory, on_host)
    host_banks: HostBanks | None = None
    if schedule and on_host:
        host_banks = HostBanks(
            schedule, {name: variable_shapes(group.model) for name, group in groups.items()}
        )
    num_public = next(iter(public.values())).shape[0]
    batches = (training.steps, distillation.batch_size)

    def init(key):
        return start(init_models(groups, key, same_start), training, schedule, on_host)

    def select(round, key):
        def indices_of(client):
            return stream_positions(
                keys.derive(key, "public", client),
                jnp.asarray(round, jnp.uint32) * (batches[0] * batches[1]),
                batches[0] * batches[1],
                num_public,
            )

        indices = jax.vmap(indices_of)(jnp.arange(num_clients))
        return everybody(groups, {PUBLIC: indices.reshape(num_clients, *batches)})

    def round_(state, client_states, round, hyper):
        key, inputs, axis_name = round.key, round.inputs, round.axis_name
        pools, banks = state.pools, state.banks
        # (architecture, slot) -> Variables
        checkpoint: Any = lambda name, slot: jax.tree.map(lambda leaf: leaf[slot], banks[name])
        if schedule:
            models = {name: learner.variables for name, learner in state.learners.items()}
            if host_banks:
                pools = mhd_exchange.refresh_pools(schedule, pools, round.index)
                done = host_banks.put(key, round.index, models)
                checkpoint = functools.partial(host_banks.read, key, done)
            else:
                pools, banks = mhd_exchange.refresh(schedule, pools, banks, models, round.index)
        columns, indices = inputs.examples[PUBLIC].columns, inputs.examples[PUBLIC].indices
        teach = _teaching(groups, schedule, checkpoint)

        def update(model, message, own, data, key):
            learner, pool, public_indices = own

            def distill(variables, step, index, key):
                batch = {name: column[public_indices[index]] for name, column in columns.items()}
                batch = distillation.preprocess(
                    batch, keys.derive(key, "input"), jnp.arange(distillation.batch_size)
                )
                drawn = jax.random.choice(
                    keys.derive(key, "teachers"),
                    pool.shape[0],
                    (distillation.teachers,),
                    replace=False,
                )
                teachers = teach(pool[drawn], batch, model, variables)
                return _gradient(model, variables, batch, teachers, heads, distillation, hyper, key)

            learner, metrics = train_steps(
                model,
                training,
                learner,
                data,
                key,
                round.index,
                num_rounds,
                hyper.learning_rate,
                distill,
                ("embedding_loss", "head_loss"),
            )
            metrics |= {
                "num_steps": jnp.asarray(training.steps),
                "client_examples": jnp.asarray(training.steps * training.batch_size),
                "finite": is_finite(learner.variables),
            }
            return ClientResult({}, {}, jnp.ones(()), learner, metrics)

        own = {
            name: (state.learners[name], pools[group.clients], indices[group.clients])
            for name, group in groups.items()
        }
        result = for_each_party(
            groups,
            update,
            None,
            own,
            inputs.cohorts[PARTIES],
            keys.derive(key, CLIENT_STEPS),
            execution,
            axis_name,
        )
        return MHDState(result.own, pools, banks), client_states, result.metrics

    return FederatedAlgorithm(
        name=name,
        hyper=hyper,
        init=init,
        client_states={},
        select=select,
        round=round_,
        predictors=party_predictors(groups, lambda state, name: state.learners[name].variables),
        communication=_communication(groups, schedule, num_rounds),
        num_clients=num_clients,
        data_set_sizes={PUBLIC: num_public},
        notes=notes,
        host_state=host_banks,
    )


def start(
    models: Mapping[str, Variables],
    training: StepTraining,
    schedule: ExchangeSchedule | None,
    on_host: bool = False,
) -> MHDState:
    """The state before the first round: pools hold the neighbours' models as they are.

    Args:
      models: architecture -> Variables, leaves [group, ...], such as what earlier training left.
      training: as `multi_headed_distillation` gets it.
      schedule: the run's; None without teachers.
      on_host: whether checkpoints are on the host, where the first round puts them.
    """
    learners = start_learners(training, dict(models))
    if schedule is None:
        return MHDState(learners, jnp.zeros((_count(models), 1, 2), jnp.int32), {})
    banks = {} if on_host else mhd_exchange.first_banks(schedule, models)
    return MHDState(learners, jnp.asarray(schedule.first), banks)


def memory_for_checkpoints(distillation: HeadDistillation, processes_here: int = 1) -> int:
    """Bytes that the banks may take: what a device may use, or half of the host's memory.

    Args:
      distillation: says where they are.
      processes_here: how many of the run's processes share this machine.
    """
    of = host_bytes if _is_on_host(distillation) else available_bytes
    return of(processes_here)


def _is_on_host(distillation: HeadDistillation) -> bool:
    """Whether programs ask the host for checkpoints. A CPU has them in the same memory anyway, and
    callbacks of its virtual devices have been seen to wait for each other for ever."""
    return distillation.checkpoints_on == "host" and jax.default_backend() != "cpu"


def _gradient(model, variables, batch, teachers, heads, distillation, hyper, key):
    """Of the losses on a public batch, equations 2 to 5: (gradient, mutable state, metrics)."""

    def loss(params):
        own, mutable = model.apply(
            Variables(params, variables.mutable),
            batch,
            train=True,
            key=keys.derive(key, "dropout"),
        )
        apart = embedding_loss(own, teachers, distillation.embedding_distance)
        taught = jnp.zeros(())
        if heads:
            competing = candidates(own, teachers, distillation.candidates)
            choice = chosen(competing, distillation.choice, keys.derive(key, "choice"))
            taught = head_loss(own, competing, choice)
        total = hyper.embedding_weight * apart + hyper.head_weight * taught
        return total, (mutable, {"embedding_loss": apart, "head_loss": taught})

    gradient, (mutable, metrics) = jax.grad(loss, has_aux=True)(variables.params)
    if not distillation.reaches_backbone:
        nothing = jax.tree.map(jnp.zeros_like, gradient[BACKBONE])
        gradient = {**gradient, BACKBONE: nothing}
    if not distillation.updates_statistics:
        mutable = variables.mutable
    return gradient, mutable, metrics


def _teaching(groups, schedule, checkpoint):
    """Returns (entries [teachers, 2], batch, model, variables) -> teachers' outputs [teachers, ...].

    `checkpoint` is (architecture, slot) -> Variables.
    """

    def teach(entries, batch, model, variables):
        shape = jax.eval_shape(lambda: model.apply(variables, batch)[0])
        nothing = lambda *lead: jax.tree.map(
            lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), shape
        )
        if schedule is None:
            return nothing(0)

        def by(name):
            if not schedule.num_slots[name]:  # nobody's teacher, so no entry leads here
                return lambda slot, batch: nothing()
            return lambda slot, batch: groups[name].model.apply(checkpoint(name, slot), batch)[0]

        every = [by(name) for name in groups]
        one = lambda entry: jax.lax.switch(entry[0], every, entry[1], batch)
        return jax.lax.map(one, entries)

    return teach


def _communication(groups, schedule, num_rounds) -> dict[str, Communication]:
    """Bytes of checkpoints received and sent, a mean over the run's rounds, rounded up.

    A client that fills its pool with several copies of one initial model receives it once.
    """
    names = party_names(groups)
    by_client = {
        int(client): (party, tree_bytes(variable_shapes(group.model)))
        for name, group in groups.items()
        for client, party in zip(group.clients, names[name], strict=True)
    }
    down, up = dict.fromkeys(by_client, 0), dict.fromkeys(by_client, 0)
    if schedule:
        for client in by_client:
            received = np.unique(schedule.first_source[client]).tolist()
            received += [c for c in schedule.source[:, client].tolist() if c >= 0]
            for source in received:
                down[client] += by_client[source][1]
                up[source] += by_client[source][1]
    return {
        party: Communication(-(-down[client] // num_rounds), -(-up[client] // num_rounds))
        for client, (party, _) in by_client.items()
    }


def _check_memory(groups, schedule, memory, on_host) -> tuple[str, ...]:
    """What the banks take, for people; raises one line where that is more than there is."""
    if not schedule:
        return ()
    sizes = {name: tree_bytes(variable_shapes(group.model)) for name, group in groups.items()}
    needed = sum(schedule.num_slots[name] * size for name, size in sizes.items())
    parts = ", ".join(
        f"{schedule.num_slots[name]} of {name} with {_mib(size)} each"
        for name, size in sizes.items()
    )
    if needed > memory:
        raise ValueError(
            "distillation.checkpoints_per_client: the checkpoints in clients' pools need "
            f"{_mib(needed)} ({parts}) and may take {_mib(memory)} of "
            f"{'the host' if on_host else 'a device'}; fewer checkpoints or fewer seeds "
            f"need less{'' if on_host else ', and checkpoints_on may be host'}."
        )
    place = " on the host" if on_host else ""
    return (f"checkpoints in the clients' pools: {_mib(needed)}{place} ({parts})",)


def _check_distillation(distillation, hyper) -> None:
    check_integer("distillation.batch_size", distillation.batch_size, low=1, high=LARGEST_BATCH)
    check_integer("distillation.teachers", distillation.teachers, low=0)
    for argument, value, allowed in (
        ("candidates", distillation.candidates, tuple(CANDIDATES)),
        ("choice", distillation.choice, CHOICES),
        ("embedding_distance", distillation.embedding_distance, EMBEDDING_DISTANCES),
        ("checkpoints_on", distillation.checkpoints_on, ("device", "host")),
    ):
        if value not in allowed:
            raise ValueError(f"distillation.{argument} must be one of {allowed}, got {value!r}.")
    for flag in ("reaches_backbone", "updates_statistics"):
        if not isinstance(getattr(distillation, flag), bool):
            raise TypeError(
                f"distillation.{flag} must be True or False, got {getattr(distillation, flag)!r}."
            )
    for weight in ("embedding_weight", "head_weight"):
        check_number(weight, getattr(hyper, weight), low=0)
    check_number("hyper.learning_rate", hyper.learning_rate, low=0)


def _checkpoints_per_client(distillation: HeadDistillation, num_clients: int) -> int:
    size = (
        num_clients
        if distillation.checkpoints_per_client is None
        else distillation.checkpoints_per_client
    )
    check_integer("distillation.checkpoints_per_client", size, low=1)
    if distillation.teachers > size:
        raise ValueError(
            f"distillation.teachers must be at most the {size} checkpoints of a pool, got "
            f"{distillation.teachers}."
        )
    return size


def _check_outputs(groups, public, preprocess) -> int:
    """The number of auxiliary heads; raises one line where architectures do not fit together."""
    found: dict[str, Any] = {}
    for name, group in groups.items():
        batch = {n: jax.ShapeDtypeStruct((1, *c.shape[1:]), c.dtype) for n, c in public.items()}

        def outputs(batch, model=group.model):
            batch = preprocess(batch, jax.random.key(0), jnp.arange(1))
            return model.apply(model.init(jax.random.key(0)), batch)[0]

        found[name] = jax.eval_shape(outputs, batch)
        if not isinstance(found[name], HeadedOutputs):
            raise TypeError(
                f"groups[{name!r}].model must be made by fedcodist.models.multi_headed, got another."
            )
    for what, shape_of, advice in (
        ("classes", lambda outputs: outputs.logits.shape[2], ""),
        ("auxiliary heads", lambda outputs: outputs.logits.shape[1] - 1, ""),
        (
            "width of the embedding",
            lambda outputs: outputs.embedding.shape[1],
            "; multi_headed(..., projection=width) gives them one",
        ),
    ):
        values = {name: shape_of(outputs) for name, outputs in found.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"groups must have models of the same {what}, got {values}{advice}.")
    return next(iter(found.values())).logits.shape[1] - 1


def _count(models: Mapping[str, Variables]) -> int:
    return sum(jax.tree.leaves(each.params)[0].shape[0] for each in models.values())


def _mib(count: int) -> str:
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 100 else f"{size:.3g} MiB"
