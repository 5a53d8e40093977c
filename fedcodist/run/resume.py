"""What a run starts from: its newest checkpoint or its beginning, the same on all machines."""

import json
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fedcodist.core.client_states import HostClientStates, device_client_states
from fedcodist.core.devices import from_all_processes
from fedcodist.core.method import FederatedAlgorithm, HostState
from fedcodist.core.restart import restarted
from fedcodist.run.blocks import Trained
from fedcodist.run.checkpoint import Checkpoint, load_checkpoint, set_damaged_aside
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.placement import replicate
from fedcodist.run.programs import Programs
from fedcodist.run.run_folder import RunFolder

PyTree = Any


def check_same_run(config: Any, plan: Any, identity: Any = None) -> None:
    """Raises RunFolderError if processes were started differently, before they wait for each other."""
    for value, what in (
        ([config, plan], "config or execution plan"),
        (identity, "experiment or data"),
    ):
        starts = from_all_processes(zlib.crc32(json.dumps(value, default=str).encode()) >> 1)
        for process, start in enumerate(starts):
            if start != starts[0]:
                raise RunFolderError(
                    f"process {process} was given another {what} than process 0: the "
                    "same command must run on all machines."
                )


def start_or_resume(
    programs: Programs,
    seeds: jax.Array,
    mesh: Mesh | None,
    folder: RunFolder | None,
    experiment: Any,
    host_client_states: HostClientStates | None,
) -> tuple[Trained, int, dict[str, Any]]:
    """(Trained, round, notes) of the newest checkpoint, or of the run's start if there is none.

    Client states and algorithm states on the host are restored too.
    """
    notes: dict[str, Any] = {
        "seconds": 0.0,
        "metrics_length": 0,
        "timed_rounds": 0,
        "timed_seconds": 0.0,
    }
    if experiment.start is None:
        state = programs.init(seeds)
    else:
        # A copy: training donates its input's memory, and another run may start from the same state.
        first = restarted(experiment.algorithm, experiment.start)
        state = replicate(jax.tree.map(np.array, first), mesh)
    client_states: PyTree = None
    if host_client_states is None:
        client_states = device_client_states(experiment.algorithm.client_states, experiment.seeds)
    host_state = experiment.algorithm.host_state
    expected = whole_state_shapes(state, client_states, host_client_states, host_state)
    saved = load_checkpoint(folder.checkpoints, expected) if folder else None
    if folder:
        _check_same_round(saved.round if saved else 0, folder)
        if jax.process_index() == 0:
            _warn_of_damaged(
                set_damaged_aside(folder.checkpoints, saved.round if saved else 0), saved
            )
    if folder is None or saved is None:
        if host_state:
            host_state.clear()
        if folder:
            if folder.remove_summary():
                warnings.warn(
                    f"{folder.path} was finished but has no checkpoint any more: it is run again from "
                    "the beginning.",
                    stacklevel=2,
                )
            folder.keep_metrics(0)
        return Trained(state, replicate(client_states, mesh)), 0, notes
    if saved.round < experiment.rounds and "stopped" not in saved.notes:
        folder.remove_summary()
    folder.keep_metrics(saved.notes["metrics_length"])
    state, client_states = saved.state[:2]
    if host_state:
        host_state.restore(saved.state[2])
    if host_client_states:
        host_client_states.restore(client_states)
        client_states = None
    return Trained(*replicate((state, client_states), mesh)), saved.round, notes | saved.notes


def whole_state(
    algorithm: FederatedAlgorithm, trained: Trained, host_client_states: HostClientStates | None
) -> tuple[PyTree, ...]:
    """All that a checkpoint holds of the training."""
    client_states = host_client_states.state() if host_client_states else trained.client_states
    on_host = algorithm.host_state
    return (trained.state, client_states, *((on_host.state(),) if on_host else ()))


def whole_state_shapes(
    state: PyTree,
    client_states: PyTree,
    host_client_states: HostClientStates | None,
    host_state: HostState | None,
) -> tuple[PyTree, ...]:
    """The shapes of a checkpoint's state."""
    of_clients = host_client_states.shapes() if host_client_states else _shapes(client_states)
    return (_shapes(state), of_clients, *((host_state.shapes(),) if host_state else ()))


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _check_same_round(round: int, folder: RunFolder) -> None:
    """Raises RunFolderError if processes would continue from different checkpoints."""
    rounds = from_all_processes(round)
    for process, other in enumerate(rounds):
        if other != rounds[0]:
            raise RunFolderError(
                f"run folder {folder.path}: process 0 finds a checkpoint of round {rounds[0]}, process "
                f"{process} of round {other} (0: none); all machines must share the folder."
            )


def _warn_of_damaged(damaged: Sequence[Path], saved: Checkpoint | None) -> None:
    if damaged:
        warnings.warn(
            f"{damaged[0].parent}: {', '.join(path.name for path in damaged)} cannot be read as a "
            "checkpoint and now lies in the folder 'damaged' there: training goes on from "
            f"{f'round {saved.round}' if saved else 'the beginning'}.",
            stacklevel=2,
        )
