"""Sums what a method's clients send securely, as a config's `training.secure_sum` says."""

from ml_collections import ConfigDict

from fedcodist.config.bind import bind
from fedcodist.config.data import Data
from fedcodist.core.method import FederatedMethod
from fedcodist.privacy.secure_sum import secure_sum


def with_secure_sum(
    config: ConfigDict, method: FederatedMethod, pool: ConfigDict, data: Data
) -> FederatedMethod:
    """Returns the method with a secure sum, or as it is if `training.secure_sum` is not set.

    It goes around compressed links. The largest weight is the size of the largest client where
    `training.secure_sum.max_weight` is not set.

    Raises:
      ValueError, TypeError: names the setting.
    """
    settings = config.training.get("secure_sum")
    if settings is None:
        return method
    given = dict(method=method, num_clients=pool.cohort_size)
    if settings.get("max_weight") is None:
        given["max_weight"] = float(data.splits["train"].client_sizes.max())
    return bind(secure_sum, settings, "training.secure_sum.", **given)
