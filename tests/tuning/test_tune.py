"""The tuner: its space, its trials, and how workers share a study."""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

pytest.importorskip("optuna")

import sqlalchemy
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

import fedcodist.run.experiment
import fedcodist.run.model_evaluation
from fedcodist.algorithms.clients.fed_avg import fed_avg
from fedcodist.config import command_line, data_images, defaults, networks
from fedcodist.config import data as reading
from fedcodist.config import experiment as config_experiment
from fedcodist.config.experiment import build_experiment
from fedcodist.core.method import PersonalModel
from fedcodist.run import launch, programs
from fedcodist.run.divergence import TrainingDiverged
from fedcodist.run.experiment import experiment_programs, run_experiment
from fedcodist.tuning import at_once, held_out, search_space, study, trials, tune, workers
from fedcodist.tuning.search_space import checked_space, overrides, own_values, with_values

ROOT = Path(__file__).parents[2]
CONFIG = "fedcodist/configs/digits_codist.py"
MODELS = ("small", "large")
ALGORITHMS = ("fed_avg", "periodic_codistillation", "merged_codistillation")
SMALL = {
    "rounds": 3,
    "algorithm.steps": 2,
    "data.num_clients": 6,
    "pools.small.cohort_size": 3,
    "pools.large.cohort_size": 2,
    "evaluation.every": 2,
    "evaluation.checkpoint_every": 2,
}


def get_config(algorithm: str = "merged_codistillation", **settings) -> ConfigDict:
    spec = importlib.util.spec_from_file_location("digits_codist", ROOT / CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(algorithm)
    config.update_from_flattened_dict({**SMALL, **settings})
    return config


def with_space(config: ConfigDict, *space) -> ConfigDict:
    config.tuning = dict(space=space)
    return config


def make_plan(config, tmp_path, **options):
    defaults = dict(name="study", trials=4, seed=0, pruner="none", command="the command")
    defaults["determined_by"] = {}
    options = {"storage": tmp_path / "runs" / "tuning.db", **defaults, **options}
    return study.make_plan(config, search_space.search_space(config), **options)


def open_study(plan):
    """The study, and a worker; a worker made before it in this process counts as gone."""
    worker = study.Worker(plan.storage)
    return study.open_study(plan, worker), worker


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Without fsync: these studies need not survive a power failure."""

    def configure(connection, _):
        connection.execute("PRAGMA synchronous = OFF")

    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", configure)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", configure)


# The search space.


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_default_space_is_the_papers(name):
    rate, space = (1e-4, 1e-1, "log"), search_space.search_space(get_config(name))
    both = ("pools.large.client_learning_rate", "pools.small.client_learning_rate")
    expected = {"pools.*.client_learning_rate": (*rate, both)}
    alone = {f"pools.{pool}.server_learning_rate": rate for pool in ("small", "large")}
    for pool in ("small", "large") if name != "fed_avg" else ():
        alone |= {
            f"pools.{pool}.teaching.learning_rate": rate,
            f"pools.{pool}.teaching.decay": (1e-3, 1.0, "log"),
            f"pools.{pool}.teaching.temperature": (0.1, 10.0, "log"),
            f"pools.{pool}.teaching.interpolation": (1e-3, 0.5, "log"),
        }
    if name == "merged_codistillation":
        alone["algorithm.alpha"] = (0.05, 0.95, "linear")
    assert space == expected | {key: (*bounds, (key,)) for key, bounds in alone.items()}


def test_default_bounds_are_wider_where_the_configs_own_rate_is_outside():
    """An SGD server's rate is 1; without it a study would neither begin with it nor find it."""
    config = get_config("fed_avg")
    config.pools.large.server_learning_rate = 1.0
    config.pools.small.client_learning_rate = 1e-5
    space = search_space.search_space(config)
    bounds = {name: (each.low, each.high) for name, each in space.items()}
    assert bounds == {
        "pools.*.client_learning_rate": (pytest.approx(1e-6), 0.1),
        "pools.large.server_learning_rate": (1e-4, 10.0),
        "pools.small.server_learning_rate": (1e-4, 0.1),
    }
    assert search_space.own_values(config, space)["pools.large.server_learning_rate"] == 1.0


def test_a_group_without_a_space_is_the_default_and_other_names_are_refused():
    config = get_config("fed_avg")
    with config.unlocked():
        config.tuning = None
    default = search_space.search_space(get_config("fed_avg"))
    assert search_space.search_space(config) == default
    with config.unlocked(), config.ignore_type():
        config.tuning = ConfigDict({"spaces": (("algorithm.alpha", 0.1, 0.9, "linear"),)})
    with pytest.raises(ValueError, match=r"tuning has one setting, 'space', got 'spaces'"):
        search_space.search_space(config)


def test_levels_of_one_network_share_their_rates():
    space = search_space.search_space(get_config("hetero_fl"))
    assert {name: each.settings for name, each in space.items()} == {
        f"pools.*.{side}_learning_rate": tuple(
            f"pools.{pool}.{side}_learning_rate" for pool in ("large", "small")
        )
        for side in ("client", "server")
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_value_of_a_trial_arrives_in_the_traced_floats_and_nothing_else_changes(name):
    config = get_config(name)
    space = search_space.search_space(config)
    draw = np.random.default_rng(0)
    values = {key: float(draw.uniform(each.low, each.high)) for key, each in space.items()}
    base, ours = build_experiment(config).algorithm, with_values(config, space, values)
    hyper = build_experiment(ours).algorithm.hyper
    assert jax.tree.structure(hyper) == jax.tree.structure(base.hyper)
    methods = hyper
    if name != "fed_avg":
        codistillation = getattr(hyper, "codistillation", hyper)
        methods = codistillation.methods
        for pool, teaching in codistillation.teaching.items():
            for field in ("learning_rate", "decay", "temperature", "interpolation"):
                assert getattr(teaching, field) == values[f"pools.{pool}.teaching.{field}"]
            assert (teaching.weight, teaching.self_teacher_temperature) == (1.0, 1.0)
    if name == "merged_codistillation":
        assert hyper.alpha == dict.fromkeys(("small", "large"), values["algorithm.alpha"])
    for pool, method in methods.items():
        assert method.client_learning_rate == values["pools.*.client_learning_rate"]
        assert method.server_learning_rate == values[f"pools.{pool}.server_learning_rate"]
    tuned = {setting for each in space.values() for setting in each.settings}
    before, after = search_space.flat(config), search_space.flat(ours)
    assert {key for key in before if before[key] != after[key]} == tuned
    assert config == get_config(name)


def test_dimensions_that_a_compiled_program_takes():
    weights = ("pools.*.teaching.weight", 1, 2, "linear")
    config = with_space(get_config(), weights, ("pools.small.alpha", 0.0, 1.0, "linear"))
    assert trial_space(config) == search_space.search_space(config)


def trial_space(config):
    _, hyper_of = held_out.held_out_experiment(config)
    return held_out.trial_space(config, hyper_of)


def test_examples_held_out_of_clients_own_serve_where_there_are_no_held_out_clients(monkeypatch):
    load = reading.load_data

    def without_held_out_clients(settings):
        data = load(settings)
        splits = {name: own for name, own in data.splits.items() if name != "held_out"}
        return data._replace(splits=splits | {"validation": data.splits["held_out"]})

    monkeypatch.setattr(held_out, "load_data", without_held_out_clients)
    experiment, _ = held_out.held_out_experiment(get_config())
    assert set(experiment.splits) == {"validation"} and not experiment.final_splits
    records = [
        {"split": split, "accuracy": accuracy}
        for split, accuracy in (("validation", 0.2), ("clients", 0.9), ("validation", 0.4))
    ]
    assert held_out.held_out_accuracy(records) == pytest.approx(0.3)


def test_tuning_needs_examples_held_out(monkeypatch):
    read = reading.load_data

    def without(settings):
        data = read(settings)
        return data._replace(splits={n: s for n, s in data.splits.items() if n != "held_out"})

    monkeypatch.setattr(held_out, "load_data", without)
    message = (
        r"^data\.name must be of data with a split 'held_out' or 'validation', .* got 'digits'"
    )
    with pytest.raises(ValueError, match=message):
        held_out.held_out_experiment(get_config())


def test_a_config_has_a_space_of_its_own():
    config = with_space(get_config(), ("pools.*.teaching.weight", 1, 2, "linear"))
    assert search_space.search_space(config) == {
        "pools.*.teaching.weight": (
            1.0,
            2.0,
            "linear",
            ("pools.large.teaching.weight", "pools.small.teaching.weight"),
        )
    }


def test_overrides_give_a_run_the_same_config_to_the_last_bit():
    config = get_config()
    space = search_space.search_space(config)
    values = {name: each.low + (each.high - each.low) / 3 for name, each in space.items()}
    given, expected = parsed(overrides(space, values)), with_values(config, space, values)
    assert search_space.flat(given) == search_space.flat(expected)


def parsed(arguments) -> ConfigDict:
    """What the command makes of the small config with overrides."""
    given = [f"--config.{name}={value}" for name, value in SMALL.items()]
    line = ["main", f"--config={ROOT / CONFIG}", *given, *arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=line)
    command_line.parse(line, values, required=("config",))
    return values.config


def test_own_values_are_those_that_the_space_has():
    config = with_space(
        get_config(**{"pools.small.server_learning_rate": 0.02}),
        ("pools.*.client_learning_rate", 0.01, 0.1, "log"),  # at its end
        ("pools.*.server_learning_rate", 0.01, 0.1, "log"),  # pools differ
        ("algorithm.alpha", 0.0, 0.5, "linear"),  # above it
        ("pools.small.alpha", 0.0, 0.5, "linear"),  # none
    )
    assert own_values(config, search_space.search_space(config)) == {
        "pools.*.client_learning_rate": 0.1
    }


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (("pools.smal.alpha", 0, 1, "linear"), ["'pools.smal.alpha'", "'pools.small.alpha'?"]),
        (("pools.*.momentum", 0, 1, "linear"), ["'pools.*.momentum'", "no setting"]),
        (("algorithm.steps", 1, 9, "linear"), ["'algorithm.steps'", "float", "int"]),
        (("nested_pools", 0, 1, "linear"), ["'nested_pools'", "float", "bool"]),
        (("algorithm.alpha", 0.5, 0.5, "linear"), ["algorithm.alpha", "low < high"]),
        (("algorithm.alpha", 0.1, np.inf, "log"), ["algorithm.alpha", "finite"]),
        (("algorithm.alpha", 0, 1, "log"), ["algorithm.alpha", "above 0", "got 0"]),
        (("algorithm.alpha", 0, 1, "cubic"), ["'log' or 'linear'", "'cubic'"]),
        (("algorithm.alpha", 0, 1), ["'log' or 'linear'", "('algorithm.alpha', 0, 1)"]),
        (("algorithm.alpha", "few", 1, "log"), ["'log' or 'linear'", "'few'"]),
    ],
)
def test_spaces_that_make_no_sense(entry, parts):
    config = with_space(get_config(), entry)
    with pytest.raises(ValueError) as caught:
        search_space.search_space(config)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ((), "at least one"),
        ((("algorithm.alpha", 0, 1, "linear"),) * 2, "'algorithm.alpha' twice"),
        (
            (
                ("pools.*.client_learning_rate", 0.1, 1, "log"),
                ("pools.small.client_learning_rate", 0.1, 1, "log"),
            ),
            r"'pools.\*.client_learning_rate' and 'pools.small.client_learning_rate' set",
        ),
    ],
)
def test_spaces_that_contradict_themselves(space, message):
    with pytest.raises(ValueError, match=message):
        search_space.search_space(with_space(get_config(), *space))


@pytest.mark.parametrize(
    ("setting", "low", "high", "parts"),
    [
        (
            "training.server_epsilon",
            1e-6,
            1e-3,
            ["'training.server_epsilon'", "none of the floats"],
        ),
        ("algorithm.mixup_beta", 1.0, 2.0, ["'algorithm.mixup_beta'", "none of the floats"]),
        ("pools.small.fraction", 0.9, 1.0, ["'pools.small.fraction'", "none of the floats"]),
        (
            "algorithm.alpha",
            0.5,
            1.5,
            ["tuning.space 'algorithm.alpha': algorithm.alpha", "at most 1", "1.5"],
        ),
    ],
)
def test_dimensions_that_a_compiled_program_does_not_take(setting, low, high, parts):
    config = with_space(get_config(), (setting, low, high, "linear"))
    with pytest.raises(ValueError) as caught:
        trial_space(config)
    assert all(part in str(caught.value) for part in parts)


class FirstHyper(NamedTuple):
    client_learning_rate: Any = 0.1
    server_learning_rate: Any = 1.0
    first: Any = 0.5
    scale: Any = 1.0


def keeps_a_number(model, training, hyper: FirstHyper = FirstHyper()):
    """Its clients' first state depends on `first`; its `client_update` on `scale`."""
    method = fed_avg(model, training)

    def client_update(message, client_state, data, key, hyper):
        result = method.client_update(message, None, data, key, hyper)
        return result._replace(client_state=hyper.scale * client_state)

    def init_client_state():
        return jnp.asarray(hyper.first, jnp.float32)

    return method._replace(
        hyper=hyper, client_update=client_update, init_client_state=init_client_state
    )


def starts_from_a_number(model, training, hyper: FirstHyper = FirstHyper()):
    """Its server's first state depends on `first`."""
    method = fed_avg(model, training)

    def init(key):
        state = method.init(key)
        return state._replace(params=jax.tree.map(lambda leaf: hyper.first * leaf, state.params))

    return method._replace(hyper=hyper, init=init)


def blends_a_number(model, training, hyper: FirstHyper = FirstHyper()):
    """Its personal model, which is evaluated, depends on `first`."""
    method = fed_avg(model, training)

    def blended(server, client_state):
        scaled = jax.tree.map(lambda leaf: hyper.first * leaf, server.params)
        return method.variables(server)._replace(params=scaled)

    return method._replace(hyper=hyper, personal_models={"blend": PersonalModel(model, blended)})


@pytest.mark.parametrize("method", ["keeps_a_number", "starts_from_a_number", "blends_a_number"])
def test_floats_that_functions_without_hyper_read_are_refused(method):
    """Trials share what these make, so that all would have the config's value."""
    config = get_config("fed_avg")
    with config.unlocked():
        config.training = defaults.training(
            method=f"{__name__}:{method}", **{method: dict(first=0.5, scale=1.0)}
        )
    scale = (f"training.{method}.scale", 0.5, 1.0, "linear")
    assert list(trial_space(with_space(config, scale))) == [scale[0]]
    first = (f"training.{method}.first", 0.1, 1.0, "log")
    message = rf"^tuning\.space 'training\.{method}\.first': .* changes what init, init_client"
    with pytest.raises(ValueError, match=message) as raised:
        trial_space(with_space(config, first))
    assert "\n" not in str(raised.value)


def test_a_space_that_is_no_list():
    config = get_config()
    with config.unlocked():
        config.tuning = dict(space=3)
    with pytest.raises(TypeError, match=r"^tuning\.space must be a list of \(setting, low"):
        search_space.search_space(config)


def test_a_setting_that_another_hangs_on():
    config = get_config()
    with config.ignore_type():
        config.training.server_epsilon = config.pools.small.get_ref("server_learning_rate") * 1e-3
    space = {"x": search_space.Dimension(1e-3, 1e-1, "log", ("pools.small.server_learning_rate",))}
    with pytest.raises(ValueError, match=r"'x', which also changes 'training.server_epsilon'"):
        checked_space(config, space, small_server_rate)


def small_server_rate(config):
    return "structure", [config.pools.small.server_learning_rate]


def test_a_float_that_is_none_in_the_config_needs_another_program():
    name = "pools.small.teaching.label_interpolation"
    config = with_space(get_config("periodic_codistillation"), (name, 0.1, 0.9, "linear"))
    _, hyper_of = built()

    def with_label_interpolation(trial):
        return hyper_of(trial), trial.pools.small.teaching.label_interpolation

    with pytest.raises(ValueError, match=rf"'{name}', .* as the config's None, 0.1 does not"):
        held_out.trial_space(config, with_label_interpolation)
    config.pools.small.teaching.label_interpolation = 0.2
    assert list(held_out.trial_space(config, with_label_interpolation)) == [name]


def test_floats_of_several_parties_are_searched():
    config = with_space(get_config(), ("algorithm.alpha", 0.1, 0.9, "linear"))
    alphas = held_out.trial_space(config, lambda trial: np.full(3, trial.algorithm.alpha))
    assert list(alphas) == ["algorithm.alpha"]
    with pytest.raises(ValueError, match="none of the floats"):
        held_out.trial_space(config, lambda trial: np.ones(3))


def test_a_default_space_loses_what_a_method_does_not_have():
    config = get_config("fed_avg")
    config.training.method = "fed_kd"
    space = search_space.search_space(config)
    kept = checked_space(config, space, small_server_rate)
    assert list(kept) == ["pools.small.server_learning_rate"]
    with pytest.raises(ValueError, match=r"tuning.space must be set for fed_kd"):
        checked_space(config, space, lambda config: ("structure", [1.0]))
    config = with_space(config, ("pools.large.server_learning_rate", 0.1, 0.9, "linear"))
    with pytest.raises(ValueError, match="trials of fed_kd may differ"):
        checked_space(config, search_space.search_space(config), small_server_rate)


# Real trials.


class Untouchable:
    """Test data that must not be read."""

    def __getattr__(self, name):
        raise AssertionError(f"the test split was read: {name}")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A study of four real trials, and the splits that were evaluated meanwhile."""
    config = with_space(
        get_config(),
        ("pools.*.client_learning_rate", 1e-3, 1e-1, "log"),
        ("pools.large.server_learning_rate", 1e-4, 1e35, "log"),
        ("algorithm.alpha", 0.05, 0.95, "linear"),
    )
    evaluated, built = [], []
    build = programs.build_programs
    load, split = data_images.load_digits_federated, fedcodist.run.model_evaluation.evaluation_split
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            data_images,
            "load_digits_federated",
            lambda **arguments: load(**arguments) | {"test": Untouchable()},
        )
        patch.setattr(
            fedcodist.run.model_evaluation,
            "evaluation_split",
            lambda data: evaluated.append(data) or split(data),
        )
        patch.setattr(
            "fedcodist.run.experiment.build_programs",
            lambda *given: built.append(build(*given)) or built[-1],
        )
        # Compiled in half the time.
        patch.setattr("fedcodist.run.experiment.all_devices", lambda: None)
        plan = make_plan(config, tmp_path_factory.mktemp("real"))
        opened, worker = open_study(plan)
        for rate in (1e35, 3e-3):
            values = (0.05, rate, 0.3)
            opened.enqueue_trial(dict(zip(plan.space, values, strict=True)))
        tuned = held_out.held_out_experiment(config)
        counts, compilations = trials.run_trials(config, *tuned, plan, opened, worker)
    images = load(num_clients=6, concentration=0.3, seed=0)["held_out"].columns
    return SimpleNamespace(
        plan=plan,
        study=opened,
        counts=counts,
        compilations=compilations,
        evaluated=evaluated,
        programs=built,
        held_out=images,
    )


@pytest.mark.slow
def test_trials_share_one_compiled_program(real):
    (compiled,) = real.programs
    assert real.compilations == compiled.train._cache_size() == 1
    assert compiled.evaluate._cache_size() == compiled.init._cache_size() == 1
    assert real.counts.total() == 4
    assert study.summary(real.study)["workers"] == [
        {"device": jax.devices()[0].device_kind, "trials": 4, "compilations": 1}
    ]


def test_test_data_are_never_read_nor_evaluated(real):
    assert len(real.evaluated) == 4
    for data in real.evaluated:
        np.testing.assert_array_equal(data.columns["image"], real.held_out["image"])


def test_a_trial_that_diverges_is_pruned_and_says_why(real):
    diverged = real.study.trials[1]
    assert diverged.state == TrialState.PRUNED
    assert "non-finite update" in diverged.user_attrs["reason"]
    assert "pool 'large'" in diverged.user_attrs["reason"]


def test_the_first_trial_is_the_config(real):
    assert real.study.trials[0].params == {
        "pools.*.client_learning_rate": 0.1,
        "pools.large.server_learning_rate": 0.01,
        "algorithm.alpha": 0.7,
    }


def test_every_evaluation_is_reported(real):
    assert list(real.study.trials[0].intermediate_values) == [0, 2, 3]


@pytest.mark.slow
def test_the_value_is_the_accuracy_of_a_run_with_the_trials_parameters(real, monkeypatch):
    """A trial with other values of traced settings than those of the compiled programs."""
    monkeypatch.setattr("fedcodist.run.experiment.all_devices", lambda: None)
    trial = real.study.trials[2]
    config = parsed(overrides(real.plan.space, trial.params))
    outcome = run_experiment(build_experiment(config), show_progress=False)
    final = [outcome.summary["final"][model]["held_out"]["accuracy"] for model in MODELS]
    assert trial.value == pytest.approx(np.mean(final), abs=1e-6)
    # The same without the experiment's own evaluation.
    images, correct = (real.held_out["image"] / 16 - 0.3) / 0.37, []
    for model in MODELS:
        network, _ = networks.MODELS[f"digits_{model}"]
        params = jax.tree.map(lambda leaf: leaf[0], outcome.variables[model].params)
        logits = network().apply({"params": params}, images.astype(np.float32))
        correct.append(np.mean(np.argmax(logits, -1) == real.held_out["label"]))
    # Two logits may be equal but for the last bit.
    assert trial.value == pytest.approx(np.mean(correct), abs=1 / len(images))


# Trials that train nothing: the accuracy is a function of alpha and the round.

BUILD = held_out.held_out_experiment


@functools.cache
def built():
    return BUILD(get_config())


@pytest.fixture
def pretend(monkeypatch):
    """Replaces training. `pretend.accuracy(alpha, round)` may raise; `pretend.trained` are alphas."""
    pretended = SimpleNamespace(accuracy=lambda alpha, round: alpha * round / 9, trained=[])

    def build(config):
        experiment, _ = built()
        hyper = experiment.algorithm.hyper

        def hyper_of(trial):
            return hyper._replace(alpha=dict.fromkeys(MODELS, trial.algorithm.alpha))

        return experiment._replace(rounds=config.rounds), hyper_of

    def run(experiment, programs, callbacks, show_progress):
        alpha = experiment.algorithm.hyper.alpha["small"]
        pretended.trained.append(alpha)
        for round in range(experiment.rounds + 1):
            accuracy = pretended.accuracy(alpha, round)
            record = {"round": round, "split": "held_out", "accuracy": accuracy}
            for callback in callbacks:
                callback([record, {"round": round, "split": "clients", "client_loss": 1.0}])

    # Building an experiment takes a tenth of a second.
    monkeypatch.setattr(held_out, "held_out_experiment", build)
    monkeypatch.setattr(trials, "run_experiment", run)
    return pretended


def alpha_config(**settings):
    bounds = ("algorithm.alpha", 0.1, 0.9, "linear")
    return with_space(get_config(**{"rounds": 9, "evaluation.every": 1, **settings}), bounds)


def run_study(plan, config=None):
    """Runs all missing trials of the plan in a new worker; returns the study and the counts."""
    opened, worker = open_study(plan)
    config = config or alpha_config()
    tuned = held_out.held_out_experiment(config)
    counts, _ = trials.run_trials(config, *tuned, plan, opened, worker)
    return opened, counts


def parameters(opened):
    return [trial.params for trial in opened.trials]


def test_a_study_that_was_stopped_goes_on_as_if_it_had_not_been(pretend, tmp_path):
    config = alpha_config()
    whole, counts = run_study(make_plan(config, tmp_path / "whole", trials=12))
    assert counts == {"finished": 12}
    first, _ = run_study(make_plan(config, tmp_path, trials=5))
    before = [(trial.number, trial.datetime_complete) for trial in first.trials]
    pretend.trained.clear()
    second, counts = run_study(make_plan(config, tmp_path, trials=12))
    assert counts == {"finished": 7} and len(pretend.trained) == 7
    assert [(trial.number, trial.datetime_complete) for trial in second.trials[:5]] == before
    assert parameters(second) == parameters(whole)
    _, counts = run_study(make_plan(config, tmp_path, trials=12))
    assert counts.total() == 0


def test_a_study_does_not_go_on_with_other_data_or_code(pretend, tmp_path):
    of = lambda **changed: {"data": {"clients": {"image": "a"}}, "code": {}, **changed}
    run_study(make_plan(alpha_config(), tmp_path, trials=2, determined_by=of()))
    for changed, message in (
        (
            of(data={"clients": {"image": "b"}}),
            "other data or code: data.clients.image is 'a' there",
        ),
        (of(code={"parties.networks": "new"}), "other data or code: code.parties.networks"),
    ):
        with pytest.raises(ValueError, match=message):
            open_study(make_plan(alpha_config(), tmp_path, trials=3, determined_by=changed))
    opened, _ = run_study(make_plan(alpha_config(), tmp_path, trials=3, determined_by=of()))
    assert len(opened.trials) == 3


def test_trials_are_within_bounds_and_differ_with_the_seed(pretend, tmp_path):
    draws = {}
    for seed in (0, 1):
        plan = make_plan(alpha_config(), tmp_path / str(seed), trials=6, seed=seed)
        draws[seed] = [params["algorithm.alpha"] for params in parameters(run_study(plan)[0])]
        assert all(0.1 <= alpha <= 0.9 for alpha in draws[seed])
        assert draws[seed][0] == 0.7  # the config's
        assert len(set(draws[seed])) == 6
    assert not set(draws[0][1:]) & set(draws[1][1:])


def test_the_sampler_finds_good_values(pretend, tmp_path):
    pretend.accuracy = lambda alpha, round: 1 - (alpha - 0.3) ** 2
    config = alpha_config(rounds=1)
    opened, _ = run_study(make_plan(config, tmp_path, trials=30), config)
    later = [trial.params["algorithm.alpha"] for trial in opened.trials[15:]]
    assert np.median(np.abs(np.array(later) - 0.3)) < 0.1
    assert study.best_trial(opened).params["algorithm.alpha"] == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    "pruner",
    ["median", *(pytest.param(each, marks=pytest.mark.slow) for each in ("hyperband", "none"))],
)
def test_pruning(pruner, pretend, tmp_path):
    opened, counts = run_study(make_plan(alpha_config(), tmp_path, trials=14, pruner=pruner))
    assert (counts["pruned"] > 0) == (pruner != "none")
    assert counts.total() == 14
    for trial in opened.trials:
        last = max(trial.intermediate_values)
        # The last round is past pruning.
        assert (trial.state == TrialState.PRUNED) == (last < 9)
        assert trial.value == trial.intermediate_values[last]
        if last < 9:
            assert trial.user_attrs["reason"] == f"accuracy {trial.value:.4f} in round {last}"
    if pruner == "median":
        pruned = [trial for trial in opened.trials if trial.state == TrialState.PRUNED]
        assert min(trial.number for trial in pruned) >= 5
        assert min(max(trial.intermediate_values) for trial in pruned) >= 2


def test_a_divergence_is_a_pruned_trial(pretend, tmp_path, capsys):
    def accuracy(alpha, round):
        if alpha < 0.7 and round == 1:
            raise TrainingDiverged("non-finite update in round 1, pool 'small', seed 0")
        return alpha

    pretend.accuracy = accuracy
    opened, counts = run_study(make_plan(alpha_config(), tmp_path, trials=12))
    low = [trial for trial in opened.trials if trial.params["algorithm.alpha"] < 0.7]
    assert counts["pruned"] == len(low) > 0
    assert {trial.state for trial in low} == {TrialState.PRUNED}
    assert all("pool 'small'" in trial.user_attrs["reason"] for trial in low)
    assert "pruned: non-finite update in round 1" in capsys.readouterr().out


def test_an_error_fails_the_trial_and_is_not_hidden(pretend, tmp_path):
    def accuracy(alpha, round):
        raise RuntimeError("out of memory")

    pretend.accuracy = accuracy
    with pytest.raises(RuntimeError, match="out of memory"):
        run_study(make_plan(alpha_config(), tmp_path))
    del pretend.accuracy
    pretend.accuracy = lambda alpha, round: alpha
    opened, counts = run_study(make_plan(alpha_config(), tmp_path))
    assert counts["finished"] == 4
    assert [trial.state for trial in opened.trials[:2]] == [TrialState.FAIL, TrialState.COMPLETE]
    assert study.summary(opened)["trials"][0]["reason"] == "stopped by an error"


# A worker that is killed while it draws a trial.


def drawn_parameters(plan, killed_at=None, drawn=()):
    """Parameters of all finished trials; `killed_at` of them precede a kill that leaves `drawn`."""
    opened, worker = open_study(plan)
    found = []
    while True:
        if len(found) == killed_at:
            killed_at = None
            opened.sampler = study._sampler(opened, plan)
            opened.ask({name: FloatDistribution(*plan.space[name][:2]) for name in drawn})
            continue
        trial = study.next_trial(opened, plan, worker, "cpu")
        if trial is None:
            return found
        found.append(trial.params)
        study.finish(opened, trial, worker, 0.5, TrialState.COMPLETE, None, 1)


@pytest.mark.parametrize("killed_at", [0, 2])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_kill_while_a_trial_is_drawn_changes_no_trial(killed_at, number, tmp_path):
    names = ("algorithm.alpha", "pools.*.client_learning_rate")
    config = with_space(get_config(), *((name, 0.05, 0.9, "linear") for name in names))
    whole = drawn_parameters(make_plan(config, tmp_path / "whole"))
    assert whole[0] == dict(zip(names, (0.7, 0.1), strict=True))
    killed = drawn_parameters(make_plan(config, tmp_path), killed_at, names[:number])
    assert killed == whole


def test_a_repeated_trial_that_is_drawn_during_a_kill_is_repeated_again(tmp_path):
    plan = make_plan(alpha_config(), tmp_path, trials=3)
    opened, worker = open_study(plan)
    study.next_trial(opened, plan, worker, "cpu")
    # The next worker takes the first one's trial, and is killed too.
    opened, worker = open_study(plan)
    study._fail_abandoned(opened, worker)
    opened.ask()
    assert drawn_parameters(plan) == drawn_parameters(
        make_plan(alpha_config(), tmp_path / "whole", trials=3)
    )


# Several workers.

WORKER = f"""
import pickle, sys, time
sys.path.insert(0, {str(ROOT)!r})
from fedcodist.tuning import study
with open(sys.argv[1], "rb") as file:
    plan = pickle.load(file)
worker = study.Worker(plan.storage)
opened = study.open_study(plan, worker)
"""
ONE_TRIAL = "study.next_trial(opened, plan, worker, 'cpu'); print(flush=True); time.sleep(60)"
ALL_TRIALS = """
while trial := study.next_trial(opened, plan, worker, "cpu"):
    for round in range(3):
        study.report(trial, worker, round, 0.5)
    study.finish(opened, trial, worker, 0.5, study.TrialState.COMPLETE, None, 1)
"""


def start_worker(plan, program):
    import pickle

    plan.storage.parent.mkdir(parents=True, exist_ok=True)
    path = plan.storage.with_suffix(".plan")
    path.write_bytes(pickle.dumps(plan))
    return subprocess.Popen(
        [sys.executable, "-c", WORKER + program, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_workers_trial_is_failed_and_run_again(pretend, tmp_path):
    plan = make_plan(alpha_config(), tmp_path, trials=3)
    other = start_worker(plan, ONE_TRIAL)
    other.stdout.readline()
    opened, worker = open_study(plan)
    # It is alive, so no other worker takes its trial.
    mine = study.next_trial(opened, plan, worker, "cpu")
    assert [trial.state for trial in opened.trials] == [TrialState.RUNNING] * 2
    other.kill()
    other.communicate()
    study.finish(opened, mine, worker, 0.5, TrialState.COMPLETE, None, 1)
    opened, counts = run_study(plan)
    states = [trial.state for trial in opened.trials]
    assert states == [TrialState.FAIL] + [TrialState.COMPLETE] * 3
    # The config's values are a trial too.
    alphas = [params["algorithm.alpha"] for params in parameters(opened)]
    assert alphas[0] == alphas[2] == 0.7 and len(set(alphas)) == 3
    assert counts == {"finished": 2}
    # What is drawn does not depend on a kill.
    whole, _ = run_study(make_plan(alpha_config(), tmp_path / "whole", trials=3))
    assert [params["algorithm.alpha"] for params in parameters(whole)] == [
        0.7,
        alphas[1],
        alphas[3],
    ]


@pytest.mark.slow
def test_workers_that_start_together_share_the_trials(tmp_path):
    plan = make_plan(alpha_config(), tmp_path, trials=9)
    workers = [start_worker(plan, ALL_TRIALS) for _ in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, "")
    opened = study.load_study(plan.storage, plan.name)
    assert [trial.state for trial in opened.trials] == [TrialState.COMPLETE] * 9
    alphas = [trial.params["algorithm.alpha"] for trial in opened.trials]
    assert alphas[0] == 0.7 and len(set(alphas)) == 9
    assert len({trial.user_attrs["worker"]["number"] for trial in opened.trials}) > 1


@pytest.mark.slow
def test_a_worker_waits_for_the_last_trials_of_others(tmp_path):
    """It can then take over a trial whose worker is gone."""
    plan = make_plan(alpha_config(), tmp_path, trials=1)
    other = start_worker(plan, ONE_TRIAL)
    other.stdout.readline()
    waiting = start_worker(plan, ALL_TRIALS)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=2)
    other.kill()
    assert waiting.wait(timeout=20) == 0
    for process in (other, waiting):
        process.communicate()
    states = [trial.state for trial in study.load_study(plan.storage, plan.name).trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


# What a study is made of.


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"algorithm.steps": 3}, ["another config", "algorithm.steps is 2 there and 3 here"]),
        ({"data.num_clients": 7}, ["data.num_clients is 6 there and 7 here"]),
        ({"seeds": 2}, ["seeds is 1 there and 2 here"]),
        ({"execution.precision": "bfloat16"}, ["execution.precision is 'nothing' there and 'bfl"]),
    ],
)
def test_a_study_of_another_config(change, parts, tmp_path):
    open_study(make_plan(alpha_config(), tmp_path))
    with pytest.raises(ValueError) as caught:
        open_study(make_plan(alpha_config(**change), tmp_path))
    assert all(part in str(caught.value) for part in ["study 'study'", "tuning.db", *parts])


def test_a_study_of_another_space(tmp_path):
    open_study(make_plan(alpha_config(), tmp_path))
    other = with_space(alpha_config(), ("algorithm.alpha", 0.1, 0.8, "linear"))
    with pytest.raises(ValueError, match=r"another search space: algorithm.alpha is \[0.1, 0.9, "):
        open_study(make_plan(other, tmp_path))
    other = with_space(alpha_config(), ("pools.small.alpha", 0.1, 0.9, "linear"))
    with pytest.raises(ValueError, match=r"another search space: .* there and 'nothing' here"):
        open_study(make_plan(other, tmp_path))


@pytest.mark.parametrize(
    "change",
    [{"algorithm.alpha": 0.2}, {"execution.stream": True}, {"evaluation.splits": ("test",)}],
)
def test_what_a_study_may_be_continued_with(change, tmp_path):
    open_study(make_plan(alpha_config(), tmp_path))
    opened, _ = open_study(make_plan(alpha_config(**change), tmp_path, trials=9))
    # The first trial is the first command's, once.
    assert [trial.state for trial in opened.trials] == [TrialState.WAITING]


def test_the_command_of_a_study_begins_with_its_first_trial(tmp_path):
    commands = []
    for alpha, command in ((0.7, "first"), (0.2, "begins otherwise"), (0.7, "goes on")):
        config = alpha_config(**{"algorithm.alpha": alpha})
        opened, _ = open_study(make_plan(config, tmp_path, command=command))
        commands.append(opened.user_attrs["command"])
    assert commands == ["first", "first", "goes on"]


@pytest.mark.parametrize("option", [{"seed": 2}, {"pruner": "median"}], ids=repr)
def test_a_study_of_other_options(option, tmp_path):
    """Its command would not reproduce it."""
    open_study(make_plan(alpha_config(), tmp_path))
    (name,) = option
    with pytest.raises(ValueError, match=rf"other options: --{name} is .* there and .* here"):
        open_study(make_plan(alpha_config(), tmp_path, **option))


def test_a_study_of_an_earlier_release_goes_on(tmp_path):
    """It does not say what later releases compare."""
    made, _ = open_study(make_plan(alpha_config(), tmp_path, determined_by={"data": 1}))
    earlier = {
        name: part for name, part in made.user_attrs["made_of"].items() if name != "sampling"
    }
    made.set_user_attr("made_of", earlier)
    plan = make_plan(alpha_config(), tmp_path, seed=2, determined_by={"data": 1, "prepared": 3})
    open_study(plan)
    with pytest.raises(ValueError, match="other data or code"):
        open_study(plan._replace(determined_by={"data": 2}))


def test_studies_in_one_file_are_independent(pretend, tmp_path):
    run_study(make_plan(alpha_config(), tmp_path, name="one", trials=2))
    config = alpha_config(**{"algorithm.steps": 5})
    opened, counts = run_study(make_plan(config, tmp_path, name="two", trials=3))
    assert counts.total() == len(opened.trials) == 3


def test_a_study_of_someone_elses(tmp_path):
    import optuna

    storage = tmp_path / "tuning.db"
    theirs = optuna.create_study(storage=f"sqlite:///{storage}", study_name="study")
    theirs.ask()
    with pytest.raises(ValueError, match="not made by this command"):
        open_study(make_plan(alpha_config(), tmp_path, storage=storage))


# The summary.


def test_the_summary_holds_all_that_is_worth_keeping(pretend, tmp_path):
    config = alpha_config(rounds=30)
    pretend.accuracy = lambda alpha, round: alpha * round / 30
    opened, _ = run_study(make_plan(config, tmp_path, trials=8, pruner="median"), config)
    found = json.loads(json.dumps(study.summary(opened), allow_nan=False))
    assert found["study"] == "study" and found["algorithm"] == "merged_codistillation"
    assert found["command"] == "the command" and found["rounds"] == 30
    assert found["states"]["finished"] + found["states"]["pruned"] == 8
    assert found["space"] == {"algorithm.alpha": {"low": 0.1, "high": 0.9, "scale": "linear"}}
    best = max((t for t in found["trials"] if t["state"] == "finished"), key=lambda t: t["value"])
    assert found["best_trial"] == best["number"]
    exact = found["best_parameters"]["algorithm.alpha"]
    assert found["best_value"] == exact
    made_of = opened.user_attrs["made_of"]
    for method, server, told in (
        ("fetch_sgd", "fed_avg", "fetch_sgd"),
        ("fed_avg", "fed_df", "fed_df"),
        ("fed_prox", "fed_sdd", "fed_sdd"),
    ):
        config = made_of["config"] | {"training.method": method, "algorithm.name": server}
        opened.set_user_attr("made_of", made_of | {"config": config})
        assert study.summary(opened)["algorithm"] == told
    assert best["parameters"]["algorithm.alpha"] == pytest.approx(exact, rel=1e-5)
    assert {"commit", "date"} <= set(found)
    for trial in found["trials"]:
        rounds = list(map(int, trial["by_round"]))
        assert len(rounds) <= 10 and rounds == sorted(rounds) and rounds[0] == 0
        assert trial["by_round"][str(rounds[-1])] == trial["value"]
        assert trial["seconds"] >= 0
        assert all(len(f"{value:.15g}") <= 8 for value in trial["parameters"].values())


# The command.


def refused(arguments, capsys, *parts):
    __tracebackhide__ = True
    assert tune.main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    assert not captured.out
    assert all(part in captured.err for part in parts), captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--study must be given"]),
        (["--study=x"], ["--storage must be given"]),
        (["--study=x", "--storage=no/x.db"], ["--config must be given"]),
        (["--config=none.py"], ["--config", "existing file", "'none.py'"]),
        (["ALL", "--trials=0"], ["--trials", "at least 1", "0"]),
        (["ALL", "--trials=few"], ["--trials=few", "int"]),
        (["ALL", "--processes=0"], ["--processes", "at least 1"]),
        (["ALL", "--seed=-1"], ["--seed", "at least 0", "-1"]),
        (["ALL", "--pruner=best"], ["--pruner=best", "median"]),
        (["ALL", "--trails=4"], ["trails"]),
        (["ALL", "--config.round=4"], ["--config.round", "did you mean --config.rounds?"]),
        (["ALL", "--storage=mysql://here"], ["--storage", "SQLite", "'mysql://here'"]),
        (["ALL", f"--storage={ROOT}"], ["--storage", "is a folder"]),
        (["ALL", f"--output={ROOT}"], ["--output", "is a folder"]),
        (["--summary", "--study=x", "--storage=no/x.db"], ["--storage", "existing", "no/x.db"]),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_mistakes_in_the_command(arguments, parts, capsys):
    if arguments[:1] == ["ALL"]:
        given = [f"--config={ROOT / CONFIG}", "--study=x", "--storage=no/x.db"]
        arguments = given + arguments[1:]
    refused(arguments, capsys, *parts)
    assert not Path("no").exists()


def test_without_optuna_there_is_a_hint(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    given = [f"--config={ROOT / CONFIG}", "--study=x", "--storage=no/x.db"]
    refused(given, capsys, "optuna", 'pip install "fedcodist[tune]"')


def test_help(capsys):
    assert tune.main(["tune", "--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("--trials", "--storage", "--summary"))


def test_the_summary_of_a_study(pretend, tmp_path, capsys):
    plan = make_plan(alpha_config(), tmp_path)
    run_study(plan)
    given = ["--summary", f"--storage={plan.storage}"]
    capsys.readouterr()
    assert tune.main(["tune", *given, "--study=study"]) == 0
    printed = json.loads(capsys.readouterr().out)
    output = tmp_path / "deep" / "study.json"
    assert tune.main(["tune", *given, "--study=study", f"--output={output}"]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert json.loads(output.read_text())["trials"] == printed["trials"]
    refused([*given, "--study=other"], capsys, "--study", "tuning.db", "'other'")
    bad = tmp_path / "bad.db"
    bad.write_text("this is no data base, but a text that is long enough to be taken for one" * 9)
    refused(["--summary", "--study=x", f"--storage={bad}"], capsys, "not a database")


@pytest.fixture
def as_worker(monkeypatch):
    """Makes this process the only worker of a command; yields what it prints when it is ready."""
    is_ready, ready = os.pipe()
    monkeypatch.setenv(launch.RANK, "0")
    monkeypatch.setenv(launch.COUNT, "1")
    monkeypatch.setenv("FEDCODIST_TUNE_READY", str(ready))
    monkeypatch.setattr(workers, "_end_with_the_supervisor", lambda: None)
    monkeypatch.setattr(command_line, "show_warnings", lambda shown: None)
    yield
    os.close(is_ready)
    os.close(ready)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "config.tuning = dict(space=(('training.server_epsilon', 1e-6, 1e-3, 'log'),))",
            ["'training.server_epsilon'", "none of the floats"],
        ),
        (
            "config.tuning = dict(space=(('pools.*.rate', 1e-6, 1e-3, 'log'),))",
            ["'pools.*.rate'", "no setting"],
        ),
        ("config.rounds = 0", ["rounds", "at least 1"]),
        ("del config.evaluation", ["the config lacks 'evaluation'"]),
        ("config.algorithm.name = 'codist'", ["algorithm.name", "'codist'"]),
    ],
)
def test_mistakes_in_the_config(line, parts, as_worker, capsys, tmp_path):
    path = tmp_path / "config.py"
    source = (ROOT / CONFIG).read_text()
    path.write_text(source.replace("    return config\n", f"    {line}\n    return config\n"))
    given = [f"--config={path}", "--study=x", f"--storage={tmp_path / 'x.db'}"]
    refused(given, capsys, *parts)
    assert not (tmp_path / "x.db").exists()


@pytest.mark.slow
def test_a_worker_loads_its_data_once(pretend, as_worker, monkeypatch, tmp_path):
    loaded, load = [], data_images.load_digits_federated

    def load_digits_federated(**arguments):
        loaded.append(arguments)
        return load(**arguments)

    monkeypatch.setattr(data_images, "load_digits_federated", load_digits_federated)
    monkeypatch.setattr(held_out, "held_out_experiment", BUILD)
    settings = [f"--config.{name}={value}" for name, value in SMALL.items()]
    given = [f"--config={ROOT / CONFIG}", "--study=x", f"--storage={tmp_path / 'x.db'}"]
    assert tune.main(["tune", *given, "--trials=3", *settings]) == 0
    assert len(set(pretend.trained)) == 3
    assert len(loaded) == 1


# The whole command.


def whole_command(tmp_path, *arguments):
    settings = [f"--config.{name}={value}" for name, value in SMALL.items()]
    where = [f"--storage={tmp_path / 'tuning.db'}", "--study=digits"]
    return [
        *(sys.executable, "-m", "fedcodist.tuning.tune", f"--config={CONFIG}", *where),
        *(*settings, *arguments),
    ]


@pytest.fixture
def environment(tmp_path_factory):
    """A user's shell; conftest.py's eight devices are for tests in-process."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_", "FEDCODIST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_the_command(environment, tmp_path):
    output = tmp_path / "results" / "digits.json"
    line = whole_command(tmp_path, "--processes=2", "--trials=6", f"--output={output}")
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(output.read_text())
    assert found["states"]["finished"] + found["states"]["pruned"] == 6
    # One worker may have made all trials before the other has started.
    assert {worker["compilations"] for worker in found["workers"]} == {1}
    assert sum(worker["trials"] for worker in found["workers"]) == 6
    said = [text for text in done.stdout.splitlines() if re.match(r"worker \d: ", text)]
    compiled = sorted(int(text.rpartition(" ")[2]) for text in said)
    assert compiled == [len(found["workers"]) - 1, 1]
    # The printed arguments give main the same accuracy.
    arguments = [text.strip(" \\") for text in done.stdout.splitlines() if "    --config." in text]
    given = [argument for argument in line[4:] if argument.startswith("--config.")]
    run = [sys.executable, "-m", "experiments.main", line[3], f"--workdir={tmp_path / 'run'}"]
    subprocess.run([*run, *given, *arguments], cwd=ROOT, env=environment, check=True)
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]
    accuracies = [final[model]["held_out"]["accuracy"][0] for model in MODELS]
    assert np.mean(accuracies) == pytest.approx(found["best_value"], abs=1e-6)


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(environment, tmp_path):
    line = whole_command(tmp_path, "--processes=2", "--trials=1000")
    process = subprocess.Popen(
        # A shell's background jobs ignore SIGINT, and so would what they start.
        [
            *(sys.executable, "-c"),
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
            "os.execv(sys.argv[1], sys.argv[1:])",
            *line,
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "trial 3 " not in process.stdout.readline():
        assert process.poll() is None
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (launch.INTERRUPTED, "")
    assert output.endswith("interrupted: the same command goes on with the study.\n")
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    before = study.load_study(tmp_path / "tuning.db", "digits").trials
    done = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in before)
    line[-1] = f"--trials={done + 2}"
    subprocess.run(line, cwd=ROOT, env=environment, check=True, capture_output=True)
    after = study.load_study(tmp_path / "tuning.db", "digits").trials
    assert not any(trial.state == TrialState.RUNNING for trial in after)
    ended = [trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in after]
    assert sum(ended) == done + 2


@pytest.mark.slow
def test_workers_end_with_a_command_that_is_killed(environment, tmp_path):
    line = whole_command(tmp_path, "--processes=2", "--trials=1000")
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    while "trial 3 " not in process.stdout.readline():
        assert process.poll() is None
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_the_rest_to_the_others(environment, tmp_path):
    line = whole_command(tmp_path, "--processes=2", "--trials=40", "--pruner=none")
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    while "trial 3 " not in process.stdout.readline():
        assert process.poll() is None
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "worker 1 was stopped by SIGKILL" in output
    trials = study.load_study(tmp_path / "tuning.db", "digits").trials
    assert sum(trial.state == TrialState.COMPLETE for trial in trials) == 40
    assert sum(trial.state == TrialState.FAIL for trial in trials) <= 1


def test_models_without_an_accuracy_are_refused_before_a_trial(monkeypatch):
    build = config_experiment.build_experiment

    def without_accuracy(config, data):
        made = build(config, data)
        predictors = {
            name: own._replace(
                model=own.model._replace(metrics={"auc": own.model.metrics["accuracy"]})
            )
            for name, own in made.algorithm.predictors.items()
        }
        return made._replace(algorithm=made.algorithm._replace(predictors=predictors))

    monkeypatch.setattr(held_out, "build_experiment", without_accuracy)
    with pytest.raises(
        ValueError, match=r"needs models with the metric 'accuracy', model .*\['auc'\]"
    ):
        held_out.held_out_experiment(get_config())


@pytest.mark.slow  # two programs
def test_trials_at_once_are_those_of_one_after_another(tmp_path):
    config = with_space(get_config("fed_avg"), ("pools.*.client_learning_rate", 1e-3, 1.0, "log"))

    experiment, hyper_of = held_out.held_out_experiment(config)
    plan = make_plan(config, tmp_path, trials=5)
    opened, worker = open_study(plan)
    counts, compilations = trials.run_trials_at_once(
        at_once.programs_at_once(experiment),
        3,
        config,
        experiment,
        hyper_of,
        plan,
        opened,
        worker,
    )
    # The second call has a trial twice, so that its program is the first's.
    assert counts["finished"] == 5 and compilations == 1
    together = [(trial.params, trial.value) for trial in opened.trials]
    assert len({tuple(params.items()) for params, _ in together}) == 5
    space = search_space.search_space(config)
    one_by_one = experiment_programs(experiment)
    for params, value in together:
        hyper = hyper_of(with_values(config, space, params))
        alone = experiment._replace(algorithm=experiment.algorithm._replace(hyper=hyper))
        records = run_experiment(alone, programs=one_by_one, show_progress=False).records
        final = [record for record in records if record["round"] == experiment.rounds]
        # Of 72 held-out images a sum in another order may turn one.
        assert value == pytest.approx(held_out.held_out_accuracy(final), abs=0.015)


def test_what_is_not_finite_at_once_is_pruned_alone(tmp_path):
    config = with_space(get_config("fed_avg"), ("pools.*.client_learning_rate", 1e-3, 1e30, "log"))
    experiment, hyper_of = held_out.held_out_experiment(config)
    space = search_space.search_space(config)
    rates = (0.1, 1e30)
    hypers = [hyper_of(with_values(config, space, dict.fromkeys(space, rate))) for rate in rates]
    programs_of_both = at_once.programs_at_once(experiment)
    accuracies = at_once.accuracies_at_once(experiment, programs_of_both, hypers)
    assert np.isfinite(accuracies[0]) and np.isnan(accuracies[1])
    # A method's metrics may be from before its last change of the models.
    finite = SimpleNamespace(unstacked={"main": np.array([False, True])})
    changed = programs_of_both._replace(finite=lambda state: finite)
    accuracies = at_once.accuracies_at_once(experiment, changed, hypers)
    assert np.isnan(accuracies).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"seeds": 2}, "one seed, got seeds=2"), ({"execution.stream": True}, "execution.stream")],
)
def test_trials_that_cannot_be_trained_at_once_are_refused(settings, message):
    experiment, _ = held_out.held_out_experiment(get_config("fed_avg", **settings))
    with pytest.raises(ValueError, match=message):
        at_once.programs_at_once(experiment)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("personal_models", r"--at_once must be 1 for .*personal models"),
        ("host_state", r"--at_once must be 1 for .*on the host"),
        ("privacy", r"--at_once must be 1 for .*a budget"),
    ],
)
def test_methods_that_cannot_be_trained_at_once_are_refused(part, message):
    experiment, _ = held_out.held_out_experiment(get_config("fed_avg"))
    algorithm = experiment.algorithm._replace(**{part: {"main": object()}})
    with pytest.raises(ValueError, match=message):
        at_once.programs_at_once(experiment._replace(algorithm=algorithm))


@pytest.mark.parametrize("group", ["phases", "callbacks"])
def test_what_tuning_would_not_run_is_refused(group):
    config = get_config("fed_avg")
    with config.unlocked():
        config[group] = {"one": {"name": "stop_early"}}
    with pytest.raises(ValueError, match=rf"^{group} must be None for tuning"):
        held_out.held_out_experiment(config)
