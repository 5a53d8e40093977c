"""Checks of `private`: its arguments, and messages of clients that cannot be bounded."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedcodist.core.aggregation import ClientResult
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.method import FederatedMethod
from fedcodist.core.trees import named_leaves
from fedcodist.privacy.banded_noise import BandedNoise


def check_private(method: FederatedMethod, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError that names an argument of `private` which is not allowed."""
    check_number("clip", arguments["clip"], above=0)
    if isinstance(noise := arguments["noise_multiplier"], BandedNoise):
        noise.check("noise_multiplier")
    else:
        check_number("noise_multiplier", noise, low=0)
    for name in ("statistics_clip", "extra_clip", "weight_clip"):
        if arguments[name] is not None:
            check_number(name, arguments[name], above=0)
    if arguments["expected_clients"] is not None:
        check_integer("expected_clients", arguments["expected_clients"], low=1)
        if arguments["weight_clip"] is not None:
            raise ValueError(
                "weight_clip must be None with expected_clients (Poisson cohorts), by which sums are "
                "divided in place of the weights."
            )
    if arguments["adaptive"] is not None:
        arguments["adaptive"].check("adaptive")
        if arguments["per_layer"]:
            raise ValueError(
                "per_layer must be False with adaptive (a quantile), which moves one bound."
            )
        if arguments["weight_clip"] is not None:
            raise ValueError(
                "weight_clip must be None with adaptive (a quantile), whose share is of clients."
            )
    if method.privacy is not None:
        raise ValueError("method must not be private already.")
    if method.reduce.mask is not None:
        raise ValueError(
            "method must not be one of a secure sum, which goes around: secure_sum(private(...), ...)."
        )
    if not method.reduce.is_mean:
        raise ValueError(
            "method must sum clients to a weighted mean, so that a bound of each bounds the sum, got "
            f"{method.name}, whose reduction is not one (Reduce.is_mean)."
        )


def check_sends(
    method: FederatedMethod,
    result: ClientResult,
    statistics_clip: float | None,
    extra_clip: float | None,
) -> None:
    """Raises ValueError for a part of the message without a bound, or a bound without such a part."""
    for argument, bound, sent, what in (
        ("statistics_clip", statistics_clip, result.mutable, "mutable state such as statistics"),
        ("extra_clip", extra_clip, result.extra, "more than its update"),
    ):
        has_any = bool(jax.tree.leaves(sent))
        if has_any and bound is None:
            raise ValueError(f"{argument} must be given for {method.name}, which sends {what}.")
        if not has_any and bound is not None:
            raise ValueError(f"{argument} must be None for {method.name}, which sends no {what}.")
    for name, leaf in named_leaves((result.update, result.extra)).items():
        if not jnp.issubdtype(leaf.dtype, np.floating):
            raise ValueError(
                f"method must send floats, whose norm can be bounded, got {leaf.dtype} in {name} of "
                f"{method.name}."
            )
        if leaf.dtype.itemsize < 4:
            raise ValueError(
                f"method must send float32, in which norms and noise are exact enough, got "
                f"{leaf.dtype} in {name} of {method.name}."
            )
    for name, leaf in named_leaves(result.mutable).items():
        if not jnp.issubdtype(leaf.dtype, np.floating):
            raise ValueError(
                f"network must have no whole numbers in its mutable state, which gets noise, got "
                f"{leaf.dtype} in {name}, such as a counter of Haiku's BatchNorm."
            )


def check_same_shapes(method: FederatedMethod, message: Any, result: ClientResult) -> None:
    """Raises ValueError unless updates have the shapes of the parameters, as correlated noise needs."""
    params, update = (
        {name: leaf.shape for name, leaf in named_leaves(tree).items()}
        for tree in (message.params, result.update)
    )
    if params != update:
        raise ValueError(
            f"noise_multiplier must be a number for {method.name}, whose updates have other shapes than "
            "its model."
        )
