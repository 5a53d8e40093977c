"""The mean over clients of bounded messages, with Gaussian noise on each sum: `private`'s reduction."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.aggregation import Aggregate, ClientResult, Reduce, as_stored
from fedcodist.core.trees import named_leaves
from fedcodist.privacy.adaptive_clipping import AdaptiveClip
from fedcodist.privacy.banded_noise import NoiseState, correlated
from fedcodist.privacy.clipping import noised, plus_noise, standard_normal

PyTree = Any


class PrivateMessage(NamedTuple):
    """What a client downloads: the method's message, and the public numbers of `PrivateServer`.

    `noise` is None in clients' messages. Only the server's own message has the state of its noise.
    """

    inner: PyTree
    clip: jax.Array
    noise_multiplier: jax.Array
    noise: NoiseState | None = None

    @property
    def params(self) -> PyTree:
        return self.inner.params

    @property
    def mutable(self) -> PyTree:
        return self.inner.mutable


class PrivateAggregate(NamedTuple):
    """`Aggregate.extra` with adaptive clipping or correlated noise.

    Attributes:
      inner: the method's own `extra`.
      share_within: the share of clients within the bound; 0 without adaptive clipping.
      noise: the state of the noise after the round.
    """

    inner: PyTree
    share_within: jax.Array
    noise: NoiseState | None


def noised_mean(
    reduce: Reduce,
    bounds: Mapping[str, float],
    expected_clients: int | None,
    adaptive: AdaptiveClip | None,
) -> Reduce:
    """The reduction of bounded results: adds noise to their sums, and calls `reduce` on the means.

    Args:
      reduce: a weighted mean.
      bounds: 'statistics', 'extra' or 'weight' -> the part's bound; that of updates is in the message.
      expected_clients: the divisor of sums; None: the sum of the clients' weights.
      adaptive: if given, clients also send whether they were within the bound.
    """
    spread = (1 + len(bounds)) ** 0.5

    def prepare(result: ClientResult, key: jax.Array) -> tuple[PyTree, ...]:
        weigh = lambda leaf: leaf * result.weight.astype(leaf.dtype)
        update, change = jax.tree.map(weigh, (result.update, result.mutable))
        return update, change, result.extra, result.weight

    def finalize(total: tuple[PyTree, ...], message: PrivateMessage, key: jax.Array) -> Aggregate:
        update, change, extra, weight = total
        noise_key = keys.derive(key, "noise")
        if adaptive is not None:
            extra, within = extra
        sums = {"update": update, "statistics": change, "extra": extra, "weight": weight}
        draws = {
            part: standard_normal(sums[part], keys.derive(noise_key, part))
            for part in ("update", *bounds)
        }
        noise = message.noise
        if noise is not None:
            draws, noise = correlated(draws, noise)
        deviation = message.noise_multiplier * spread

        def with_noise(part: str, bound: jax.Array | float) -> PyTree:
            return plus_noise(sums[part], deviation * bound, draws[part])

        update = with_noise("update", message.clip)
        count = weight if expected_clients is None else jnp.float32(expected_clients)
        if "statistics" in bounds:
            change = with_noise("statistics", bounds["statistics"])
        if "weight" in bounds:
            # With noise at least the weight of one client: it must not change the mean's sign.
            least = jnp.where(deviation > 0, 1.0, 0.0)
            count = jnp.maximum(with_noise("weight", 1.0), least)
        share_within = jnp.zeros(())
        if adaptive is not None:
            draw = noised(within, adaptive.count_deviation, keys.derive(noise_key, "within"))
            share_within = draw / jnp.maximum(count, 1) + 0.5
            if expected_clients is None:
                # A discarded secure sum gives no count, so the bound does not change.
                share_within = jnp.where(weight > 0, share_within, adaptive.quantile)
        if "extra" in bounds:
            noisy = with_noise("extra", bounds["extra"])
            keep = lambda noisy, exact: jnp.where(weight > 0, noisy, exact)
            extra = jax.tree.map(keep, noisy, extra) if expected_clients is None else noisy

        # For the method's own reduction, the noised means are the result of one client with all weight.
        safe = jnp.where(count > 0, count, 1)
        mean = lambda tree: jax.tree.map(lambda leaf: leaf / safe.astype(leaf.dtype), tree)
        mutable = moved_statistics(message.mutable, mean(change))
        mean_result = ClientResult(mean(update), mutable, count, None, {}, extra)
        aggregate = reduce.finalize(reduce.prepare(mean_result, key), message.inner, key)
        if adaptive is None and noise is None:
            return aggregate
        return aggregate._replace(extra=PrivateAggregate(aggregate.extra, share_within, noise))

    return Reduce(prepare, finalize)


def moved_statistics(mutable: PyTree, change: PyTree) -> PyTree:
    """Mutable state after a noised change, in its own dtypes.

    Variances stay at least 0: leaves named `var...`, such as Flax's, and those of Haiku's `var_ema`.
    """
    new = jax.tree.map(
        lambda old, step: as_stored(old.astype(jnp.float32) + step, old), mutable, change
    )
    leaves, structure = jax.tree.flatten(new)
    kept = [
        jnp.maximum(leaf, 0) if _is_variance(name) else leaf
        for name, leaf in zip(named_leaves(new), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, kept)


def _is_variance(name: str) -> bool:
    """Whether a statistic is a variance, by the path of its leaf; modules may have any names."""
    *modules, leaf = name.split("/")
    return leaf.startswith("var") or modules[-1:] == ["var_ema"]
