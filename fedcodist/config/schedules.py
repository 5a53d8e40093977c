"""`config.schedules`: hyper-parameters that change over the rounds, by their names.

    config.schedules = dict(client_learning_rate=dict(name="exponential_decay", factor=0.99))

A schedule's other settings are arguments of the function called `name`, in SCHEDULES or a reference. It
returns a function (value, round) -> value in that round. If it has an argument `num_rounds` that is not
set, it gets the rounds of the run. A hyper-parameter is a field of the algorithm's `hyper`. Most methods
of clients have `client_learning_rate`, which stands for that of all pools; most methods of parties have
`learning_rate`.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.bind import bind, offered
from fedcodist.config.references import choice_or_reference
from fedcodist.core.method import FederatedAlgorithm
from fedcodist.core.schedules import Schedule, exponential_decay, linear_decay, scheduled

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "exponential_decay": exponential_decay,
    "linear_decay": linear_decay,
}
OFFERS: dict[str, Callable[[ConfigDict], Any]] = {"num_rounds": lambda config: config.rounds}


def with_schedules(algorithm: FederatedAlgorithm, config: ConfigDict) -> FederatedAlgorithm:
    """The algorithm with the schedules that `config.schedules` sets.

    Raises:
      ValueError, TypeError: one line that names the setting and what is allowed.
    """
    schedules = {}
    for name, settings in (config.get("schedules") or {}).items():
        make = choice_or_reference(f"schedules.{name}.name", settings.get("name"), SCHEDULES)
        others = {setting: value for setting, value in settings.items() if setting != "name"}
        own = {argument: offer for argument, offer in OFFERS.items() if argument not in others}
        given = offered(make, own, config)
        schedules[name] = bind(make, others, f"schedules.{name}.", **given)
    return scheduled(algorithm, schedules) if schedules else algorithm
