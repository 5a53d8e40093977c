"""Secure sums on scikit-learn's handwritten digits: the same models, but more bytes.

    fedcodist compare digits_secure_sum

A run is a method, without or with a secure sum of its clients' messages. The run
`fed_avg,secure_16` has 16 bits in place of 32. docs/secure_sums.md explains the protocol.
"""

from ml_collections import ConfigDict

from fedcodist.config import defaults
from fedcodist.configs import digits_methods

SUMS = {"secure": dict(), "secure_16": dict(bits=16)}


def get_runs() -> list[str]:
    """FedAvg and FedSDD, plain and with secure sums."""
    return [
        *("fed_avg", "fed_avg,secure", "fed_avg,secure_16"),
        *("fed_sdd", "fed_sdd,secure"),
    ]


def get_config(run: str = "fed_avg,secure") -> ConfigDict:
    """Returns one run's experiment."""
    defaults.check_run(run, get_runs())
    name, _, summed = run.partition(",")
    config = digits_methods.get_config(name)
    config.name = "digits_secure_sum"
    config.run = run
    if summed:
        # No coordinate of a client's update is larger here; `client_clipped_share` would show it.
        config.training.secure_sum = defaults.secure_sum(value_range=2.0, **SUMS[summed])
    return config
