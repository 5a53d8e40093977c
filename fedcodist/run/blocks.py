"""Training between evaluations: many rounds per dispatch, or one where data are streamed."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates
from fedcodist.core.devices import from_all_processes
from fedcodist.run.programs import Programs, own_devices, place_inputs, replicate
from fedcodist.run.sources import ResidentData, StreamedData, stack_inputs

PyTree = Any
# The progress display moves at least this often, by ending a block of rounds before an evaluation.
_SECONDS_PER_BLOCK = 2.0


class Trained(NamedTuple):
    """What a round hands to the next.

    Attributes:
      state: the algorithm's, leaves [seeds, ...].
      client_states: what clients keep, on the device; None where that is on the host.
    """

    state: PyTree
    client_states: PyTree


def in_blocks(
    programs: Programs,
    data: ResidentData | StreamedData,
    rounds: int,
    mesh: Mesh | None,
    seeds: jax.Array,
    hyper: PyTree,
    host_client_states: HostClientStates | None,
) -> Callable[[Trained, int, int], tuple[Trained, dict[str, np.ndarray]]]:
    """Training of some rounds at once, for data of either kind.

    Args:
      programs: the experiment's.
      data: resident data run many rounds per dispatch, after the first block about two seconds' worth;
        streamed data one round per dispatch, and always as many as are asked for.
      rounds: of the whole run, so that streaming reads no further.
      mesh: the programs'.
      seeds, hyper: on the devices.
      host_client_states: what clients keep, of streamed data.

    Returns:
      train(trained, first round, at most) -> (trained, history): it trains up to `at most` rounds;
      history is metric -> [seeds, rounds trained] on the host.
    """
    if isinstance(data, StreamedData):
        assert host_client_states is not None
        return _streamed(programs, data, rounds, mesh, seeds, hyper, host_client_states)
    on_devices = replicate(data, mesh)
    rounds_per_second = None

    def train(trained, round, at_most):
        nonlocal rounds_per_second
        count = at_most
        if rounds_per_second is not None:
            count = max(1, min(at_most, int(rounds_per_second * _SECONDS_PER_BLOCK)))
        if at_most > 1:
            count = from_all_processes(count)[0]  # a clock alone would not give all the same
        began = time.monotonic()
        *after, history = programs.train(
            *trained, seeds, np.int32(round), np.int32(count), hyper, on_devices
        )
        history = {name: np.asarray(values)[:, :count] for name, values in history.items()}
        # The first block's time is mostly compilation, so the second one is short.
        rounds_per_second = count / max(time.monotonic() - began, 1e-6)
        return Trained(*after), history

    return train


def _streamed(programs, data, rounds, mesh, seeds, hyper, host_client_states):
    """One round per dispatch; the next round's examples are gathered meanwhile."""
    ahead = None
    host_seeds = [int(seed) for seed in np.asarray(seeds)]
    devices, own = 1 if mesh is None else mesh.size, own_devices(mesh)

    def inputs_from(round):
        def read(at):
            each = [
                data.read(jax.tree.map(np.asarray, programs.select(seed, at)), devices, own)
                for seed in host_seeds
            ]
            return stack_inputs(each)

        return data.ahead(read, range(round, rounds))

    def train(trained, round, at_most):
        nonlocal ahead
        ahead = ahead or inputs_from(round)
        blocks = []
        for index in range(at_most):
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
        history = {
            name: np.concatenate([np.asarray(block[name]) for block in blocks], axis=1)
            for name in blocks[0]
        }
        return trained, history

    return train
