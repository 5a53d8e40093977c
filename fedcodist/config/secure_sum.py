"""Sums what a method's clients send securely, as a config's `training.secure_sum` says."""

from typing import Any

from ml_collections import ConfigDict

from fedcodist.config.bind import bind
from fedcodist.config.data import Data
from fedcodist.core.method import FederatedMethod
from fedcodist.privacy.secure_sum import secure_sum


def with_secure_sum(
    config: ConfigDict, method: FederatedMethod, num_clients: int, data: Data
) -> FederatedMethod:
    """Returns the method with a secure sum, or as it is if `training.secure_sum` is not set.

    `num_clients` is the largest number of clients whose messages are summed in a round.

    It wraps compressed links and privacy, so that clients clip, compress and mask, and the server adds
    its noise to the sum. Where `training.secure_sum.max_weight` is not set, it is the size of the
    largest client. With privacy it is 1, since weights are then at most 1.

    Raises:
      ValueError, TypeError: names the setting.
    """
    settings = config.training.get("secure_sum")
    if settings is None:
        return method
    if num_clients < 2:
        raise ValueError(
            "training.secure_sum must sum the messages of at least 2 clients, got a cohort_size, or a "
            f"group of a cohort, of {num_clients}."
        )
    given: dict[str, Any] = dict(method=method, num_clients=num_clients)
    if settings.get("max_weight") is None:
        largest = float(data.splits["train"].client_sizes.max())
        given["max_weight"] = 1.0 if method.privacy is not None else largest
    return bind(secure_sum, settings, "training.secure_sum.", **given)
