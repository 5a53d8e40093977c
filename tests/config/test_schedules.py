"""`config.schedules`, by names and by references."""

import sys

import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.config.experiment import build_experiment
from fedcodist.config.referenced_code import described_references
from fedcodist.config.schedules import with_schedules
from fedcodist.config.settings import check_settings
from fedcodist.configs import digits_codist
from fedcodist.core.inputs import Inputs, Round

ROUNDS, RATE = 8, 0.4
OWN = """
def in_steps(every):
    return lambda value, round: value * 0.5 ** (round // every)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module of a user's."""
    (tmp_path / "own_schedules.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_schedules"
    sys.modules.pop("own_schedules", None)


@pytest.fixture(scope="module")
def algorithm():
    """FedAvg of the digits, whose round returns the hyper-parameters that it gets."""
    made = build_experiment(digits_codist.get_config("fed_avg")).algorithm
    return made._replace(round=lambda state, client_states, round, hyper: hyper)


def rates(algorithm, schedules, rounds):
    """The clients' learning rates of the pool "small" in these rounds."""
    made = with_schedules(algorithm, ConfigDict({"rounds": ROUNDS, "schedules": schedules}))
    hyper = {
        name: pool._replace(client_learning_rate=RATE) for name, pool in algorithm.hyper.items()
    }
    of_round = lambda index: made.round(None, None, Round(index, None, Inputs({}, {})), hyper)
    return [float(of_round(index)["small"].client_learning_rate) for index in rounds]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(name="exponential_decay", factor=0.5), [0.4, 0.2, 0.1]),
        (dict(name="linear_decay"), [0.4, 0.35, 0.3]),  # of ROUNDS
        (dict(name="linear_decay", num_rounds=2), [0.4, 0.2, 0.0]),
        (dict(name="own_schedules:in_steps", every=2), [0.4, 0.4, 0.2]),
    ],
)
def test_rounds_get_the_values_of_the_schedule(own, algorithm, settings, expected):
    schedules = dict(client_learning_rate=settings)
    check_settings(ConfigDict({"schedules": schedules}))
    np.testing.assert_allclose(rates(algorithm, schedules, (0, 1, 2)), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        (
            dict(client_learning_rate=dict(name="cosine")),
            r"^schedules\.client_learning_rate\.name must be one of \['exponential_decay', "
            r"'linear_decay'\] or package.module:function, got 'cosine'",
        ),
        (
            dict(client_learning_rate=dict(factor=0.9)),
            r"^schedules\.client_learning_rate\.name must be one of .* got None",
        ),
        (
            dict(client_learning_rate=dict(name="exponential_decay")),
            r"lacks 'schedules\.client_learning_rate\.factor'",
        ),
        (
            dict(client_learning_rate=dict(name="exponential_decay", factor=2)),
            r"^schedules\.client_learning_rate\.factor must be",
        ),
        (
            dict(client_learning_rate=dict(name="exponential_decay", factr=0.9)),
            r"^schedules\.client_learning_rate\.factr is not a setting of exponential_decay",
        ),
        (
            dict(learning_rate=dict(name="linear_decay")),
            r"^schedules must be of hyper-parameters of .*\['client_learning_rate', "
            r"'server_learning_rate'\], got 'learning_rate'",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(schedules, message):
    config = digits_codist.get_config("fed_avg")
    config.schedules = schedules
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


def test_a_schedule_of_ones_own_is_part_of_the_runs_identity(own):
    config = digits_codist.get_config("fed_avg")
    config.schedules = dict(client_learning_rate=dict(name=f"{own}:in_steps", every=2))
    assert "schedules.client_learning_rate.name" in described_references(config)
