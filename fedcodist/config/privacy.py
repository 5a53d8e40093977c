"""Makes a config's methods private as its `training.privacy` says."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.algorithms.pools.cohorts import PoissonCohort
from fedcodist.config.bind import bind
from fedcodist.config.config_errors import choice, named
from fedcodist.core.checks import check_integer
from fedcodist.core.method import FederatedMethod, PrivateCohorts
from fedcodist.privacy.accounting import PrivacyBudget, calibrated_noise_multiplier
from fedcodist.privacy.adaptive_clipping import AdaptiveClip
from fedcodist.privacy.banded_noise import BandedNoise
from fedcodist.privacy.example_level import example_private
from fedcodist.privacy.private import private


class ConfiguredPrivacy(NamedTuple):
    """What all pools of a config have in common.

    Attributes:
      settings: `training.privacy`.
      noise_multiplier: of every pool; BandedNoise for noise that is correlated over rounds.
      poisson: how cohorts are drawn; None for a fixed size.
    """

    settings: ConfigDict
    noise_multiplier: float | BandedNoise
    poisson: PoissonCohort | None


def privacy_of(config: ConfigDict, clients: Mapping[str, np.ndarray]) -> ConfiguredPrivacy | None:
    """The privacy that a config asks for; None where `training.privacy` is not set.

    Without a `noise_multiplier` it is the least with which all rounds fit into the budget `epsilon`.

    Args:
      config: the experiment's.
      clients: pool -> the indices of its clients.

    Raises:
      ValueError, TypeError, ImportError: names the setting.
    """
    settings = config.training.get("privacy")
    if settings is None:
        return None
    poisson = choice(
        "training.privacy.sampling",
        settings.sampling,
        {"poisson": PoissonCohort(settings.get("most")), "fixed": None},
    )
    if poisson is None and settings.get("most") is not None:
        raise ValueError(
            "training.privacy.most must not be set for sampling='fixed', whose cohorts have one size, "
            f"got {settings.most}."
        )
    bands = _bands_of(settings)
    if poisson is not None:
        poisson = poisson._replace(cycle=bands or 1)
        for name, indices in clients.items():
            poisson.check_pool(f"pools[{name!r}]", len(indices), config.pools[name].cohort_size)
    else:
        for name, indices in clients.items():
            size = config.pools[name].cohort_size
            check_integer(f"pools[{name!r}].cohort_size", size, low=1, high=len(indices))

    def configured(z: float) -> ConfiguredPrivacy:
        noise = z if bands is None else BandedNoise(z, bands, config.rounds)
        return ConfiguredPrivacy(settings, noise, poisson)

    noise_multiplier = settings.get("noise_multiplier")
    if noise_multiplier is not None:
        return configured(noise_multiplier)
    if settings.get("epsilon") is None:
        raise ValueError(
            "training.privacy must have a noise_multiplier, or an epsilon from which it follows."
        )
    pools = {}
    for name, indices in clients.items():
        size = config.pools[name].cohort_size
        pools[name] = PrivateCohorts(indices, 0.0, size)
        if poisson is not None:
            most = poisson.slots(len(indices), size)
            pools[name] = pools[name]._replace(most=most, cycle=poisson.cycle)
    with named("training.privacy."):
        noise_multiplier = calibrated_noise_multiplier(
            settings.epsilon, settings.delta, config.rounds, pools, settings.get("accountant")
        )
    return configured(noise_multiplier)


def _bands_of(settings: ConfigDict) -> int | None:
    """The bands of noise that is correlated over rounds; None for independent noise."""
    is_banded = choice(
        "training.privacy.noise",
        settings.get("noise", "independent"),
        {"independent": False, "banded": True},
    )
    bands = settings.get("bands")
    if not is_banded:
        if bands is not None:
            raise ValueError(
                f"training.privacy.bands must not be set for noise='independent', got {bands}."
            )
        return None
    if bands is None:
        raise ValueError("training.privacy.bands must be set for noise='banded'.")
    if settings.sampling != "poisson":
        raise ValueError(
            "training.privacy.sampling must be 'poisson' for noise='banded', whose clients can be drawn "
            f"in one of {bands} rounds, got {settings.sampling!r}."
        )
    return bands


def with_privacy(
    privacy: ConfiguredPrivacy | None, method: FederatedMethod, cohort_size: int | None = None
) -> FederatedMethod:
    """The method with clipped messages and noised sums, or the same method if `privacy` is None."""
    if privacy is None:
        return method
    settings, adaptive = privacy.settings, None
    if settings.get("quantile") is not None:
        adaptive = AdaptiveClip(
            settings.quantile, settings.clip_learning_rate, settings.count_deviation
        )
    with named("training.privacy."):
        return private(
            method,
            settings.clip,
            privacy.noise_multiplier,
            expected_clients=None if privacy.poisson is None else cohort_size,
            per_layer=settings.per_layer,
            statistics_clip=settings.get("statistics_clip"),
            extra_clip=settings.get("extra_clip"),
            weight_clip=settings.get("weight_clip"),
            adaptive=adaptive,
            metrics=settings.metrics,
        )


def example_privacy_of(config: ConfigDict) -> Callable[..., Any] | None:
    """The privacy of single examples in clients' gradients; None without `training.example_privacy`."""
    settings = config.training.get("example_privacy")
    if settings is None:
        return None
    return bind(example_private, settings, "training.example_privacy.")


def budget_of(config: ConfigDict) -> PrivacyBudget | None:
    """The run's budget; None without `training.privacy` and, of parties, `algorithm.privacy`."""
    settings = config.get("training", {}).get("privacy") or config.algorithm.get("privacy")
    if settings is None:
        return None
    return PrivacyBudget(settings.delta, settings.get("epsilon"), settings.get("accountant"))
