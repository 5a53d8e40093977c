"""Chooses how many clients a device trains at once: as many as fit into its memory.

The memory that a round needs is read from its compiled program; nothing is run. The chosen program is
compiled again when it is first called, or read from the compilation cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedcodist.core.client_states import HostClientStates, device_client_states
from fedcodist.core.memory import available_bytes
from fedcodist.core.padding_checks import collected_padding
from fedcodist.run.client_splits import all_splits
from fedcodist.run.experiment import Experiment, experiment_programs
from fedcodist.run.placement import all_devices, own_devices, place_inputs
from fedcodist.run.sources import StreamedData, stack_inputs

PyTree = Any


class ChunkSize(NamedTuple):
    """A chosen chunk size.

    Attributes:
      clients: number of clients that a device trains at once.
      needed: bytes that rounds of such chunks, with their data, need on a device.
      available: bytes that they may use there.
    """

    clients: int
    needed: int
    available: int

    def __str__(self) -> str:
        at_once = f"{self.clients} client{'s' if self.clients > 1 else ''} at once"
        return f"{at_once}, {_mib(self.needed)} of the {_mib(self.available)} that a device may use"


def choose_chunk_size(
    experiment_of: Callable[[int], Experiment], processes_here: int = 1
) -> ChunkSize:
    """Chooses the largest chunk whose rounds fit into the memory of every device.

    On an accelerator, 90 % of the memory that JAX may use is available. On a CPU it is half of the
    machine's memory, divided by its devices. The whole memory counts, not the free memory, so that the
    same command makes the same choice again.

    Args:
      experiment_of: chunk size -> the experiment, whose algorithm has `Execution("vmap", chunk size)`.
      processes_here: how many of the run's processes share this machine.

    Raises:
      ValueError: names `chunk_size`, if not even one client fits or the platform does not report memory.
    """
    experiment = experiment_of(1)
    chosen = jax.eval_shape(experiment.algorithm.select, 0, jax.random.key(0)).clients
    cohort = max(clients.shape[0] for clients in chosen.values())
    return largest_that_fits(
        chunk_sizes(-(-cohort // jax.device_count())),
        lambda chunk: needed_bytes(experiment_of(chunk)),
        available_bytes(processes_here),
    )


def chunk_sizes(clients: int) -> list[int]:
    """The chunk sizes worth trying, ascending: the smallest for every number of chunks."""
    return sorted({-(-clients // chunks) for chunks in range(1, clients + 1)})


def largest_that_fits(
    sizes: Sequence[int], bytes_of: Callable[[int], int | float], available: int
) -> ChunkSize:
    """The largest chunk of `sizes` that needs at most `available` bytes.

    Tries the largest first, and then bisects: larger chunks are assumed to need more memory.

    Args:
      sizes: ascending.
      bytes_of: chunk size -> bytes that it needs; expensive.
      available: bytes that it may need.

    Raises:
      ValueError: names `chunk_size`, if not even the smallest fits.
    """
    low, high, chosen = 0, len(sizes) - 1, None
    place = high
    while low <= high:
        needed = bytes_of(sizes[place])
        if needed <= available:
            chosen, low = ChunkSize(sizes[place], int(needed), available), place + 1
        elif place == 0:
            raise ValueError(
                f"chunk_size: not even {sizes[0]} client at a time fits, a round needs "
                f"{_mib(needed)} and a device may use {_mib(available)}; smaller batches, "
                "rematerialised models or streamed data need less."
            )
        else:
            high = place - 1
        place = (low + high) // 2
    assert chosen is not None  # otherwise the loop has raised at place 0
    return chosen


def needed_bytes(experiment: Experiment) -> int | float:
    """Bytes of a device that an experiment's rounds and its evaluated data need.

    The number is infinite if the compiler refuses the program for its size.

    Raises:
      ValueError: names `chunk_size`, if the platform does not report memory.
    """
    try:
        with collected_padding():
            memory = _lowered(experiment).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return math.inf
        raise
    if memory is None:
        raise ValueError("chunk_size must be given: this platform does not tell what rounds need.")
    rounds = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    splits = all_splits(experiment).values()
    return rounds + sum(np.asarray(c).nbytes for data in splits for c in data.columns.values())


def _lowered(experiment: Experiment) -> Any:
    """The lowered program of an experiment's rounds, for arguments given by shape."""
    algorithm, mesh = experiment.algorithm, all_devices()
    programs: Any = experiment_programs(experiment)  # jitted, so they can be lowered
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def replicated(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(lambda tree: tree, tree),
        )

    seeds = replicated(np.zeros(experiment.seeds, np.uint32))
    state = replicated(jax.eval_shape(programs.init, seeds))
    hyper = replicated(jax.tree.map(lambda value: np.asarray(value, float), algorithm.hyper))
    number = np.int32(0)
    if not isinstance(experiment.data, StreamedData):
        client_states = replicated(device_client_states(algorithm.client_states, experiment.seeds))
        data = replicated(experiment.data)
        return programs.train.lower(state, client_states, seeds, number, number, hyper, data)
    # All rounds' buffers have the shapes of the first round's.
    selection = jax.tree.map(np.asarray, programs.select(0, 0))
    inputs_of_seed = experiment.data.read(selection, jax.device_count(), own_devices(mesh))
    inputs = stack_inputs([inputs_of_seed] * experiment.seeds)
    clients = {pool: cohort.clients for pool, cohort in inputs.cohorts.items()}
    client_states = replicated(
        HostClientStates(algorithm.client_states, experiment.seeds).gather(clients)
    )
    inputs = place_inputs(inputs, mesh)
    return programs.train_streamed.lower(state, client_states, seeds, number, hyper, inputs)


def _mib(count: int | float) -> str:
    return f"{count / 2**20:,.0f} MiB"
