"""A config's `execution`: every setting has an effect, and errors name the setting."""

import jax
import jax.numpy as jnp
import pytest

from fedcodist.config import execution, experiment
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.data import load_data
from fedcodist.configs import digits_fed_md
from fedcodist.configs.digits_codist import get_config
from fedcodist.core.for_each_client import Execution
from fedcodist.core.rematerialisation import CPU_FLAG
from fedcodist.run import launch
from fedcodist.run.chunk_size import ChunkSize


def config_of(**settings):
    config = get_config()
    with config.ignore_type():
        config.execution.update(settings)
    return config


def program(config):
    """What a client of the large pool computes, as text."""
    algorithm = experiment.build_experiment(config).algorithm
    model = algorithm.predictors["large"].model
    variables = jax.eval_shape(model.init, jax.random.key(0))
    batch = {"image": jnp.zeros((2, 8, 8, 1))}

    def loss(params):
        outputs, _ = model.apply(variables._replace(params=params), batch, train=True)
        return outputs.sum()

    return str(jax.make_jaxpr(jax.grad(loss))(variables.params))


def test_precision_and_rematerialisation_reach_the_models(monkeypatch):
    plain = program(config_of())
    assert "bf16" not in plain and "remat" not in plain and "checkpoint" not in plain
    assert "bf16" in program(config_of(precision="bfloat16"))
    monkeypatch.setattr(execution, "NEEDS_CPU_FLAG", True)
    with pytest.warns(UserWarning, match="execution.rematerialise saves no memory on a CPU"):
        again = program(config_of(rematerialise=True))
    assert "checkpoint" in again or "remat" in again


def test_a_cpu_that_was_told_to_keep_what_is_computed_twice_is_not_warned_of(monkeypatch, recwarn):
    monkeypatch.setattr(execution, "NEEDS_CPU_FLAG", True)
    monkeypatch.setenv("XLA_FLAGS", CPU_FLAG)
    program(config_of(rematerialise=True))
    assert not [each for each in recwarn if "rematerialise" in str(each.message)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loop": "eager"}, "execution.loop must be one of .*'scan', 'vmap'.*'eager'"),
        ({"chunk_size": 0}, "execution.chunk_size must be at least 1, got 0"),
        (
            {"chunk_size": 8},
            "execution.chunk_size must be None with execution.loop='scan', .* got 8",
        ),
        ({"chunk_size": "auto"}, "execution.chunk_size must be an integer of at least 1"),
        ({"precision": "float16"}, "execution.precision must be one of .*'bfloat16'.*'float16'"),
        ({"rematerialise": "yes"}, "execution.rematerialise must be True or False, got 'yes'"),
    ],
)
def test_mistakes(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        experiment.build_experiment(config_of(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(precision="bfloat16"), "execution.precision must be 'float32' for fed_md"),
        (dict(rematerialise=True), "execution.rematerialise must be False for fed_md"),
    ],
)
def test_parties_are_computed_plainly(settings, message):
    config = digits_fed_md.get_config()
    with config.unlocked():
        config.execution.update(settings)
    with pytest.raises(ValueError, match=message):
        build_algorithm(config, load_data(config.data))


def test_a_missing_setting_is_named_with_its_group():
    config = config_of()
    with config.unlocked():
        config.training.compression = dict(uplink="top_k", downlink="top_k")
    with pytest.raises(ValueError, match=r"the config lacks 'training\.compression\.share'"):
        build_algorithm(config, load_data(config.data))


def test_a_config_without_the_newer_settings_is_float32():
    config = get_config()
    with config.unlocked():
        del config.execution.precision, config.execution.rematerialise
    assert program(config) == program(get_config())


def test_one_client_after_another_is_a_chunk_of_one():
    config, chosen = experiment.with_chunk_size(config_of(loop="scan"), None)
    assert chosen is None and execution.execution_of(config) == Execution("scan", 1)


def test_a_chunk_that_is_given_stays():
    config = config_of(loop="vmap", chunk_size=4)
    assert experiment.with_chunk_size(config, None) == (config, None)
    assert execution.execution_of(config) == Execution("vmap", 4)


def test_a_chunk_that_is_not_given_is_chosen(monkeypatch):
    tried, built = [], experiment.build_algorithm

    def build(config, data):
        tried.append(execution.execution_of(config))
        return built(config, data)

    def choose(experiment_of, processes):
        assert processes == 3
        experiment_of(5)
        return ChunkSize(5, 1, 2)

    monkeypatch.setattr(experiment, "build_algorithm", build)
    monkeypatch.setattr(experiment, "choose_chunk_size", choose)
    monkeypatch.setenv(launch.COUNT, "3")
    given = config_of(loop="vmap")
    config, chosen = experiment.with_chunk_size(given, load_data(given.data))
    assert chosen == ChunkSize(5, 1, 2) and tried[-1] == Execution("vmap", 5)
    assert (given.execution.chunk_size, config.execution.chunk_size) == (None, 5)


def test_other_mistakes_are_told_before_a_chunk_is_chosen(monkeypatch):
    monkeypatch.setattr(experiment, "choose_chunk_size", lambda *_: pytest.fail("it compiles"))
    config = config_of(loop="vmap")
    config.evaluation.checkpoint_every = 7
    with pytest.raises(ValueError, match="checkpoint_every must be a multiple"):
        experiment.build_experiment(config)
