"""Trials that are trained at once: one program with a leading axis of trials.

An accelerator has room for many small models. All trials have the experiment's seed and differ only in
the algorithm's traced floats. No trial is pruned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedcodist.core.client_states import device_client_states
from fedcodist.run.blocks import Trained, in_blocks
from fedcodist.run.evaluation import evaluation_split
from fedcodist.run.experiment import Experiment, longest_block
from fedcodist.run.metrics_lines import FINITE
from fedcodist.run.placement import all_devices, replicate, replicate_data
from fedcodist.run.programs import Programs, build_programs
from fedcodist.run.sources import ResidentData

PyTree = Any


def programs_at_once(experiment: Experiment) -> Programs:
    """The programs of `accuracies_at_once`; nothing compiles yet.

    Raises:
      ValueError: names the setting that prevents training several trials at once.
    """
    if not isinstance(experiment.data, ResidentData):
        raise ValueError("--at_once needs data on the device: execution.stream must be False.")
    if experiment.seeds != 1:
        raise ValueError(f"--at_once needs trials of one seed, got seeds={experiment.seeds}.")
    for part, why in (
        ("personal_models", "clients have personal models, which only single trials evaluate"),
        ("host_state", "states lie on the host, where trials of one seed would share them"),
        ("privacy", "a budget may end a trial early"),
    ):
        value = getattr(experiment.algorithm, part)
        # Pools without personal models have an entry too.
        if any(value.values()) if isinstance(value, Mapping) else value is not None:
            raise ValueError(f"--at_once must be 1 for {experiment.algorithm.name}: {why}.")
    return build_programs(
        experiment.algorithm,
        longest_block(experiment),
        all_devices(),
        "vmap",
        experiment.evaluation_batch_size,
        experiment.evaluation_preprocess,
        hyper_per_seed=True,
    )


def accuracies_at_once(
    experiment: Experiment, programs: Programs, hypers: Sequence[PyTree]
) -> np.ndarray:
    """Trains all trials and evaluates them after the last round.

    Args:
      experiment: what every trial runs; with one split, of held-out examples.
      programs: `programs_at_once(experiment)`.
      hypers: each trial's `algorithm.hyper`.

    Returns:
      Each trial's accuracy on the split, the mean of its models, float [trials]; NaN where a trial's
      update was not finite.
    """
    trials, mesh = len(hypers), all_devices()
    seeds = replicate(np.full(trials, experiment.seed, np.uint32), mesh)
    stacked = jax.tree.map(lambda *floats: np.asarray(floats, np.float32), *hypers)
    client_states = device_client_states(experiment.algorithm.client_states, trials)
    trained = Trained(programs.init(seeds), replicate(client_states, mesh))
    data, hyper = replicate_data(experiment.data, mesh), replicate(stacked, mesh)
    train = in_blocks(programs, data, experiment.rounds, mesh, seeds, hyper, None)
    round, is_finite = 0, np.ones(trials, bool)
    while round < experiment.rounds:
        at_most = min(experiment.evaluate_every, experiment.rounds - round)
        trained, history = train(trained, round, at_most)
        for metric, values in history.items():
            if metric.rpartition("/")[2] in FINITE:
                is_finite &= values.all(axis=1)
        round += next(iter(history.values())).shape[1]
    # A round's metrics do not tell of what the method did to the models after they were measured.
    of_models = programs.finite(trained.state).unstacked
    is_finite &= np.all([np.asarray(values) for values in of_models.values()], axis=0)
    splits = {name: evaluation_split(examples) for name, examples in experiment.splits.items()}
    (models,) = programs.evaluate(trained.state, replicate_data(splits, mesh)).values()
    accuracy = np.mean([np.asarray(values["accuracy"]) for values in models.values()], axis=0)
    return np.where(is_finite, accuracy, np.nan)
