"""Training between evaluations: many rounds per dispatch, or one round if data are streamed."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates
from fedcodist.core.devices import from_all_processes
from fedcodist.core.inputs import Inputs
from fedcodist.run.placement import on_host, own_devices, place_inputs, replicate
from fedcodist.run.programs import Programs
from fedcodist.run.sources import ResidentData, StreamedData, stack_inputs
from fedcodist.run.stacked import Stacked

PyTree = Any
# Blocks of rounds end after about this time, so that the progress display is updated.
_SECONDS_PER_BLOCK = 2.0


class Trained(NamedTuple):
    """The states after a round.

    Attributes:
      state: the algorithm's, leaves [seeds, ...].
      client_states: all clients' states on the device; None where they are on the host.
    """

    state: PyTree
    client_states: PyTree


# (trained, first round, largest number of rounds) -> (trained, metric -> [seeds, rounds trained])
Train = Callable[[Trained, int, int], tuple[Trained, dict[str, np.ndarray]]]


def in_blocks(
    programs: Programs,
    data: ResidentData | StreamedData,
    rounds: int,
    mesh: Mesh | None,
    seeds: jax.Array,
    hyper: PyTree,
    host_client_states: HostClientStates | None,
) -> Train:
    """Returns a function that trains several rounds, on data of either kind.

    Args:
      programs: the experiment's.
      data: resident data on the devices, or streamed data. With resident data, a dispatch has as many
        rounds as take about two seconds. With streamed data, it has one round, and a call trains
        `at_most` rounds. With either kind the first block has one round, so that the end of compilation
        is seen.
      rounds: of the whole run, so that streaming reads no further.
      mesh: the programs'.
      seeds: uint32 [seeds], on the devices.
      hyper: hyper-parameters, on the devices.
      host_client_states: the client states of streamed data; None for resident data.

    Returns:
      train(trained, first round, at_most) -> (trained, history). It trains up to `at_most` rounds.
      `history` is metric -> [seeds, rounds trained] on the host.
    """
    if isinstance(data, StreamedData):
        assert host_client_states is not None
        return _streamed(programs, data, rounds, mesh, seeds, hyper, host_client_states)
    rounds_per_second: float | None = None

    def train(trained: Trained, round: int, at_most: int) -> tuple[Trained, dict[str, np.ndarray]]:
        nonlocal rounds_per_second
        count = 1
        if rounds_per_second is not None:
            count = max(1, min(at_most, int(rounds_per_second * _SECONDS_PER_BLOCK)))
        if at_most > 1:
            count = from_all_processes(count)[0]  # processes' clocks differ
        began = time.monotonic()
        *after, history = programs.train(
            *trained, seeds, np.int32(round), np.int32(count), hyper, data
        )
        of_rounds = jax.tree.map(lambda values: np.asarray(values)[:, :count], history)
        history = of_rounds.unstacked
        # The first block's time is mostly compilation, so the second block is short.
        rounds_per_second = count / max(time.monotonic() - began, 1e-6)
        return Trained(*after), history

    return train


def _streamed(
    programs: Programs,
    data: StreamedData,
    rounds: int,
    mesh: Mesh | None,
    seeds: jax.Array,
    hyper: PyTree,
    host_client_states: HostClientStates,
) -> Train:
    """As `in_blocks`: one round per dispatch, while the next round's examples are gathered."""
    ahead: Iterator[Inputs] | None = None
    host_seeds = [int(seed) for seed in np.asarray(seeds)]
    devices, local = 1 if mesh is None else mesh.size, own_devices(mesh)

    def inputs_from(round: int) -> Iterator[Inputs]:
        def read(index: int) -> Inputs:
            selections = [on_host(programs.select(seed, index)) for seed in host_seeds]
            return stack_inputs([data.read(selection, devices, local) for selection in selections])

        return data.ahead(read, range(round, rounds))

    def train(trained: Trained, round: int, at_most: int) -> tuple[Trained, dict[str, np.ndarray]]:
        nonlocal ahead
        count = at_most if ahead else 1
        ahead = ahead or inputs_from(round)
        blocks: list[Stacked] = []
        for index in range(count):
            if len(blocks) > 1:
                # Dispatches do not wait. Without this, many rounds' examples would be in memory at once.
                jax.block_until_ready(blocks[-2])
            inputs = next(ahead)
            clients = {pool: cohort.clients for pool, cohort in inputs.cohorts.items()}
            client_states = host_client_states.gather(clients)
            state, client_states, history = programs.train_streamed(
                trained.state,
                replicate(client_states, mesh),
                seeds,
                np.int32(round + index),
                hyper,
                place_inputs(inputs, mesh),
            )
            host_client_states.scatter(clients, client_states)
            trained = Trained(state, None)
            blocks.append(history)
        concatenated = lambda *values: np.concatenate(list(map(np.asarray, values)), axis=1)
        return trained, jax.tree.map(concatenated, *blocks).unstacked

    return train
