"""The costs of MHD's checkpoints: memory on the device or the host, and bytes that clients exchange."""

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange, ExchangeSchedule
from fedcodist.algorithms.graph.mhd_losses import CANDIDATES, HeadDistillation
from fedcodist.algorithms.parties.groups import PartyGroup, party_names
from fedcodist.core.communication import Communication, tree_bytes
from fedcodist.core.memory import available_bytes, host_bytes
from fedcodist.core.model import variable_shapes
from fedcodist.models.multi_headed import HeadedOutputs

_PROBABILITY_BYTES = 4


def memory_for_checkpoints(exchange: CheckpointExchange, processes_here: int = 1) -> int:
    """Bytes that the banks may take: `available_bytes` of a device, or `host_bytes` of this machine.

    Args:
      exchange: says where checkpoints are kept.
      processes_here: how many of the run's processes share this machine.
    """
    bytes_of = host_bytes if exchange.is_on_host else available_bytes
    return bytes_of(processes_here)


def memory_notes(
    groups: Mapping[str, PartyGroup],
    schedule: ExchangeSchedule | None,
    exchange: CheckpointExchange,
) -> tuple[str, ...]:
    """An algorithm's `notes`: the memory of the banks. There are none without a schedule.

    Raises:
      ValueError: the banks need more than `exchange.memory`.
    """
    if not schedule:
        return ()
    sizes = {name: tree_bytes(variable_shapes(group.model)) for name, group in groups.items()}
    needed = sum(schedule.num_slots[name] * size for name, size in sizes.items())
    breakdown = ", ".join(
        f"{schedule.num_slots[name]} of {name} with {_mib(size)} each"
        for name, size in sizes.items()
    )
    allowed = memory_for_checkpoints(exchange) if exchange.memory is None else exchange.memory
    on_host = exchange.is_on_host
    if needed > allowed:
        raise ValueError(
            "distillation.exchange.checkpoints_per_client: the checkpoints in clients' buffers need "
            f"{_mib(needed)} ({breakdown}) and may take {_mib(allowed)} of "
            f"{'the host' if on_host else 'a device'}; fewer checkpoints or fewer seeds "
            f"need less{'' if on_host else ', and checkpoints_on may be host'}."
        )
    place = " on the host" if on_host else ""
    return (f"checkpoints in the clients' buffers: {_mib(needed)}{place} ({breakdown})",)


def communication(
    groups: Mapping[str, PartyGroup],
    schedule: ExchangeSchedule | None,
    num_rounds: int,
    steps: int,
    distillation: HeadDistillation,
    outputs: HeadedOutputs,
    sends_embeddings: bool,
) -> dict[str, Communication]:
    """Bytes received and sent, a mean over the run's rounds, rounded up.

    Bytes are those of checkpoints, or with `top_predictions` those of the predictions that a live
    exchange would send.

    Args:
      groups, schedule, num_rounds: of the run; the schedule is None without teachers.
      steps: per round.
      distillation: how clients learn.
      outputs: shapes of one client's outputs, logits [batch, 1 + heads, classes].
      sends_embeddings: whether the embeddings' loss has a weight other than 0.
    """
    if schedule is None or distillation.top_predictions is None:
        return _checkpoint_bytes(groups, schedule, num_rounds)
    per_example = _prediction_bytes(distillation, outputs, sends_embeddings)
    received = steps * distillation.batch_size * distillation.teachers * per_example
    shares = _teaching_shares(schedule, num_rounds)
    names = party_names(groups)
    return {
        party: Communication(received, math.ceil(received * shares[client]))
        for name, group in groups.items()
        for client, party in zip(group.clients.tolist(), names[name], strict=True)
    }


def _checkpoint_bytes(
    groups: Mapping[str, PartyGroup], schedule: ExchangeSchedule | None, num_rounds: int
) -> dict[str, Communication]:
    """Bytes of checkpoints; a client receives an initial model only once, even for several entries."""
    names = party_names(groups)
    party_and_size = {
        int(client): (party, tree_bytes(variable_shapes(group.model)))
        for name, group in groups.items()
        for client, party in zip(group.clients, names[name], strict=True)
    }
    down, up = dict.fromkeys(party_and_size, 0), dict.fromkeys(party_and_size, 0)
    if schedule:
        for client in party_and_size:
            sources = np.unique(schedule.first_source[client]).tolist()
            sources += [c for c in schedule.source[:, client].tolist() if c >= 0]
            for source in sources:
                size = party_and_size[source][1]
                down[client] += size
                up[source] += size
    return {
        party: Communication(-(-down[client] // num_rounds), -(-up[client] // num_rounds))
        for client, (party, _) in party_and_size.items()
    }


def _prediction_bytes(
    distillation: HeadDistillation, outputs: HeadedOutputs, sends_embeddings: bool
) -> int:
    """A teacher's bytes per example: probabilities with their classes' indices, and the embedding."""
    _, levels, classes = outputs.logits.shape
    # Heads k - 1 teach heads k, so the last head is sent only if candidates include the same level.
    same_level, _ = CANDIDATES[distillation.candidates]
    levels_sent = levels if same_level and levels > 1 else levels - 1
    count = distillation.top_predictions or classes
    # If all probabilities are sent, they need no indices of classes.
    index_bytes = 0 if count == classes else np.min_scalar_type(classes - 1).itemsize
    of_embedding = tree_bytes(outputs.embedding) if sends_embeddings else 0
    return levels_sent * count * (_PROBABILITY_BYTES + index_bytes) + of_embedding


def _teaching_shares(schedule: ExchangeSchedule, num_rounds: int) -> list[Fraction]:
    """For each client, the expected number of clients that it teaches, a mean over a run's rounds.

    Clients draw teachers uniformly from their buffers, so the shares of buffer entries are counted.
    """
    buffers = schedule.first_source.copy()
    clients = np.arange(len(buffers))
    entries = np.zeros(len(buffers), np.int64)  # of all buffers and rounds, by their source
    for round in range(num_rounds):
        renewed = schedule.source[round] >= 0
        replaced = schedule.replaced[round, renewed]
        buffers[clients[renewed], replaced] = schedule.source[round, renewed]
        entries += np.bincount(buffers.ravel(), minlength=len(buffers))
    return [Fraction(int(count), buffers.shape[1] * num_rounds) for count in entries]


def _mib(count: int) -> str:
    size = count / 2**20
    return f"{size:,.0f} MiB" if size >= 100 else f"{size:.3g} MiB"
