"""`training.secure_sum` of a config: what is built, and mistakes."""

import pytest

from fedcodist.config.experiment import build_experiment
from fedcodist.configs import digits_codist, digits_secure_sum


def built(run, **differs):
    config = digits_secure_sum.get_config(run)
    config.training.secure_sum.update(differs)
    return build_experiment(config).algorithm


def test_the_largest_client_is_the_largest_weight():
    algorithm = built("fed_avg,secure")
    assert algorithm.name == "fed_avg" and "main" in algorithm.predictors
    config = digits_secure_sum.get_config("fed_avg,secure")
    assert config.training.secure_sum.max_weight is None and config.training.secure_sum.bits == 32
    assert digits_secure_sum.get_config("fed_avg").training.get("secure_sum") is None


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (dict(value_range=0.0), r"^training\.secure_sum\.value_range must be above 0"),
        (dict(bits=40), r"^training\.secure_sum\.bits must be at most 32, got 40"),
        (dict(bits=2), r"^training\.secure_sum\.bits must be enough for 8 clients"),
        (dict(max_weight=-1.0), r"^training\.secure_sum\.max_weight must be above 0"),
        (dict(range=1.0), r"^training\.secure_sum\.range is not a setting of secure_sum"),
    ],
)
def test_mistakes_are_one_line(differs, message):
    with pytest.raises(ValueError, match=message) as raised:
        built("fed_avg,secure", **differs)
    assert "\n" not in str(raised.value)


def test_levels_of_one_network_have_none():
    config = digits_codist.get_config("hetero_fl")
    config.training.secure_sum = dict(value_range=1.0)
    with pytest.raises(ValueError, match="training must have neither a method, compression nor"):
        build_experiment(config)
