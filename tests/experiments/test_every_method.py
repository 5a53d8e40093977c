"""Every method that a config can name: types stay, programs compile once, accelerators take them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.config.experiment import build_experiment
from fedcodist.config.registry import METHOD_NAMES
from fedcodist.configs import (
    digits_codist,
    digits_compression,
    digits_fed_kd,
    digits_methods,
    digits_mhd,
    digits_parties,
    digits_personal,
    digits_private,
    digits_submodels,
)
from fedcodist.core.client_states import device_client_states
from fedcodist.run import programs
from fedcodist.run.experiment import run_experiment

pytestmark = pytest.mark.usefixtures("compile_quickly")

# Each run has something that the runs before do not have.
RUNS = [
    (digits_codist, "fed_avg"),
    (digits_codist, "hetero_fl"),
    (digits_codist, "fed_sdd_pools"),
    (digits_codist, "periodic_codistillation"),
    (digits_codist, "merged_codistillation"),
    *((digits_methods, run) for run in digits_methods.get_runs()[1:]),
    *((digits_personal, run) for run in digits_personal.get_runs()[1:]),
    *((digits_submodels, run) for run in digits_submodels.get_runs()[1:]),
    (digits_compression, "fetch_sgd"),
    (digits_compression, "fed_dropout"),
    (digits_compression, "fed_avg,svd"),
    (digits_compression, "fed_avg,quantisation"),
    (digits_compression, "fed_avg,count_sketch"),
    (digits_private, "merged_codistillation,inf"),
    (digits_fed_kd, "fed_kd"),
    (digits_fed_kd, "fed_kd,by_step"),
    *((digits_parties, run) for run in digits_parties.get_runs()),
    *((digits_mhd, run) for run in digits_mhd.get_runs()),
]
FAST = ("fed_avg", "fed_be", "fed_ensemble", "local_only_steps")
LOWERED_FAST = ("scaffold", "decentralised_fed_avg")


def of(module, run):
    config = module.get_config(run)
    config.rounds, config.seeds = 2, 1
    config.evaluation.every, config.evaluation.checkpoint_every = 1, None
    if "phases" in config:
        with config.unlocked():
            del config["phases"]
    return config


def test_every_method_is_here():
    methods = set()
    for module, run in RUNS:
        config = of(module, run)
        methods |= {
            config.algorithm.name,
            *(part for part in run.split(",") if part in METHOD_NAMES),
        }
    assert methods == set(METHOD_NAMES)


@pytest.mark.parametrize(("module", "run"), RUNS, ids=[run for _, run in RUNS])
def test_types_stay_from_the_first_round_on(module, run):
    """Weak types would be strong after a round, and all programs would compile a second time."""
    experiment = build_experiment(of(module, run))
    algorithm, seeds = experiment.algorithm, np.zeros(1, np.uint32)
    compiled = programs.build_programs(algorithm, 1)
    state = jax.eval_shape(compiled.init, seeds)
    hyper = jax.tree.map(lambda value: np.float32(value), algorithm.hyper)
    rows = jax.eval_shape(lambda: device_client_states(algorithm.client_states, 1))
    one = np.int32(1)
    after = jax.eval_shape(compiled.train, state, rows, seeds, one, one, hyper, experiment.data)
    types = lambda tree: jax.tree.map(lambda own: (own.shape, own.dtype, own.weak_type), tree)
    assert types(after[0]) == types(state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, after[:2])))


@pytest.mark.parametrize(
    ("module", "run"),
    [
        pytest.param(module, run, id=run, marks=[] if run in FAST else pytest.mark.slow)
        for module, run in RUNS
    ],
)
def test_each_program_compiles_once(module, run, monkeypatch):
    kept = []
    build = programs.build_programs

    @functools.wraps(build)
    def keep(*arguments):
        kept.append(build(*arguments))
        return kept[0]

    monkeypatch.setattr("fedcodist.run.experiment.build_programs", keep)
    experiment = build_experiment(of(module, run))._replace(final_splits={})
    run_experiment(experiment, show_progress=False)
    (compiled,) = kept
    for name in ("init", "train", "evaluate", "finite", "evaluate_personal"):
        assert getattr(compiled, name)._cache_size() <= 1, name
    assert compiled.train._cache_size() == compiled.evaluate._cache_size() == 1


@pytest.mark.parametrize(
    ("module", "run"),
    [
        pytest.param(module, run, id=run, marks=[] if run in LOWERED_FAST else pytest.mark.slow)
        for module, run in RUNS
    ],
)
def test_each_program_is_lowered_for_accelerators(module, run, monkeypatch):
    """Without a device; calls of the host (`checkpoints_on="host"`) JAX lowers beside one only."""
    lowered = lower_programs(monkeypatch, ("cuda", "tpu"), build_experiment(of(module, run)))
    assert {"init", "train", "evaluate", "finite"} <= lowered


def lower_programs(monkeypatch, platforms, experiment):
    """Lowers the programs of a run where it calls them; results are ones. Returns their names."""
    names = set()

    def stand_in(name, program):
        def call(*arguments):
            traced = program.trace(*arguments)
            traced.lower(lowering_platforms=platforms)
            names.add(name)
            return jax.tree.map(lambda out: jnp.ones(out.shape, out.dtype), traced.out_info)

        return call

    def build(*arguments):
        built = programs.build_programs(*arguments)._asdict()
        of_clients, made_of = built.pop("evaluate_clients"), built.pop("made_of")
        return programs.Programs(
            made_of=made_of,
            **{name: stand_in(name, program) for name, program in built.items()},
            evaluate_clients={
                group: stand_in("evaluate_clients", program)
                for group, program in of_clients.items()
            },
        )

    monkeypatch.setattr("fedcodist.run.experiment.build_programs", build)
    run_experiment(experiment, show_progress=False)
    return names
