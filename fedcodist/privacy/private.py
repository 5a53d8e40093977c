"""Client-level differential privacy for any client method: bounded messages, and noise on their sum.

McMahan et al., 2018, Learning Differentially Private Recurrent Language Models,
https://arxiv.org/abs/1710.06963
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core.aggregation import Aggregate, ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.inputs import ClientData
from fedcodist.core.method import FederatedMethod, PersonalModel, PrivateSends, fine_tuned_models
from fedcodist.core.model import Variables
from fedcodist.privacy.adaptive_clipping import AdaptiveClip, moved, remaining_multiplier
from fedcodist.privacy.banded_noise import BandedNoise, NoiseState, first_noise_state
from fedcodist.privacy.clipping import clipped, clipped_weight, has_norm, is_within
from fedcodist.privacy.noised_mean import PrivateAggregate, PrivateMessage, noised_mean
from fedcodist.privacy.private_checks import check_private, check_same_shapes, check_sends

PyTree = Any


class PrivateServer(NamedTuple):
    """The method's server, the clipping bound and the noise.

    Attributes:
      inner: the method's server state.
      clip: float32, the bound of updates.
      noise_multiplier: float32, of the sums; it is in the state so that it is traced.
      noise: the state of noise that is correlated over rounds; None for independent noise.
    """

    inner: PyTree
    clip: jax.Array
    noise_multiplier: jax.Array
    noise: NoiseState | None = None


def private(
    method: FederatedMethod,
    clip: float,
    noise_multiplier: float | BandedNoise,
    expected_clients: int | None = None,
    per_layer: bool = False,
    statistics_clip: float | None = None,
    extra_clip: float | None = None,
    weight_clip: float | None = None,
    adaptive: AdaptiveClip | None = None,
    metrics: bool = True,
) -> FederatedMethod:
    """The method with differentially private sums over clients.

    A client bounds everything that it sends: its update, the change of its mutable state, the method's
    `extra` (SCAFFOLD's variates) and its weight. The server adds Gaussian noise to each sum. Everything
    after that, also distillation between pools, is as private as the sums. With K bounded parts, each
    part's noise has the standard deviation sqrt(K) noise_multiplier x its bound. Together they cost as
    much as one sum with `noise_multiplier`. A run's metrics lines have its cost as `epsilon`, see
    `fedcodist.privacy.accounting`.

    The noise's key cannot be derived from the keys that clients get. Training metrics are not protected.

    A client's variate of SCAFFOLD changes by what the client sends. The server's variate is their mean
    and the noise of all rounds so far.

    `compressed` and `partially_shared` go inside, and a secure sum goes around:
    `secure_sum(private(compressed(method, ...), ...), ...)` bounds the updates that the server restores.

    Args:
      method: any single-model method whose reduction is a weighted mean.
      clip: the bound of an update's norm.
      noise_multiplier: z; 0 only clips. `BandedNoise(z, bands, rounds)` correlates the noise of updates
        and of mutable state over rounds, so that less noise is left in the model.
      expected_clients: the divisor of sums for cohorts of random size: a Poisson pool's `cohort_size`.
        None: the number of clients, which must not depend on the data.
      per_layer: clip each array of an update at its share, clip / sqrt(arrays).
      statistics_clip, extra_clip: the bounds of the change of mutable state, such as batch statistics,
        and of the method's `extra`; each is needed if the method sends such values.
      weight_clip: weights are min(weight, weight_clip) / weight_clip, and their sum gets noise. None:
        all weights are 1. The mean's divisor is the noised sum, or 1 if this is smaller. So if
        `weight_clip` is far above the weights of a whole cohort, the mean is too small.
      adaptive: how `clip` changes; None: it is constant.
      metrics: False: clients send no training metrics.

    Raises:
      ValueError, TypeError: names the argument, also if the method's messages cannot be bounded.
    """
    check_arguments(private, locals())
    check_private(method, locals())
    banded = noise_multiplier if isinstance(noise_multiplier, BandedNoise) else None
    z = multiplier = _multiplier_of(noise_multiplier)
    if adaptive is not None:
        z = remaining_multiplier(multiplier, adaptive.count_deviation)
    of_parts = {"statistics": statistics_clip, "extra": extra_clip, "weight": weight_clip}
    clips = {part: bound for part, bound in of_parts.items() if bound is not None}
    bounds = {part: 1.0 if part == "weight" else bound for part, bound in clips.items()}

    def init(key: jax.Array) -> PrivateServer:
        inner = method.init(key)
        noise = None if banded is None else _first_noise(banded, method.broadcast(inner), clips)
        return PrivateServer(inner, jnp.float32(clip), jnp.float32(z), noise)

    def broadcast(server: PrivateServer) -> PrivateMessage:
        return PrivateMessage(method.broadcast(server.inner), server.clip, server.noise_multiplier)

    def server_message(server: PrivateServer) -> PrivateMessage:
        return broadcast(server)._replace(noise=server.noise)

    def client_update(
        message: PrivateMessage,
        client_state: PyTree,
        data: ClientData,
        key: jax.Array,
        hyper: PyTree,
    ) -> ClientResult:
        result = method.client_update(message.inner, client_state, data, key, hyper)
        check_sends(method, result, statistics_clip, extra_clip)
        if method.after_sending is not None and extra_clip is not None:
            sent = clipped(result.extra, extra_clip)
            after = method.after_sending(result.client_state, result.extra, sent)
            result = result._replace(client_state=after)
        if banded is not None:
            check_same_shapes(method, message, result)
        # A client of which `clipped` makes zeros keeps its state. The memory of an error feedback would
        # otherwise be NaN for ever, or count the message as sent.
        change = _change(message.mutable, result.mutable)
        is_sent = has_norm(result.update) & has_norm(result.extra) & has_norm(change)
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_sent, new, old), result.client_state, client_state
        )
        result = result._replace(client_state=kept)
        return _bounded(result, message, clips, per_layer, adaptive is not None, metrics)

    def server_update(
        server: PrivateServer, aggregate: Aggregate, round: jax.Array, hyper: PyTree
    ) -> PrivateServer:
        extra = aggregate.extra
        if isinstance(extra, PrivateAggregate):
            aggregate = aggregate._replace(extra=extra.inner)
            server = server._replace(noise=extra.noise)
            if adaptive is not None:
                server = server._replace(clip=moved(server.clip, extra.share_within, adaptive))
        inner = method.server_update(server.inner, aggregate, round, hyper)
        return server._replace(inner=inner)

    def after_sending(client_state: PyTree, extra: PyTree, sent: PyTree) -> PyTree:
        if method.after_sending is None:
            return client_state
        if adaptive is not None:  # beside it: whether the update was within the bound
            extra, sent = extra[0], sent[0]
        return method.after_sending(client_state, extra, sent)

    def set_model(server: PrivateServer, new: Variables, reset_optimizer: bool) -> PrivateServer:
        return server._replace(inner=method.set_model(server.inner, new, reset_optimizer))

    return method._replace(
        name=f"private_{method.name}",
        init=init,
        broadcast=broadcast,
        client_update=client_update,
        reduce=noised_mean(method.reduce, bounds, expected_clients, adaptive),
        server_update=server_update,
        variables=lambda server: method.variables(server.inner),
        set_model=set_model,
        personal_models={name: _within(model) for name, model in method.personal_models.items()},
        sends_models=False,  # the server gets only noised sums
        gradient=None,
        fine_tune=lambda server, *rest: fine_tuned_models(method, server.inner, *rest),
        privacy=PrivateSends(
            multiplier,
            expected_clients,
            1 if banded is None else banded.bands,
            adaptive is not None,
            metrics,
        ),
        after_sending=after_sending,
        num_rounds=_most_rounds(method, banded),
        server_message=None if banded is None else server_message,
    )


def _most_rounds(method: FederatedMethod, banded: BandedNoise | None) -> int | None:
    """The most rounds of a run: noise that is correlated is made for so many."""
    if banded is None or banded.bands == 1:
        return method.num_rounds
    return min(banded.rounds, method.num_rounds or banded.rounds)


def _multiplier_of(noise: float | BandedNoise) -> float:
    return float(noise.noise_multiplier if isinstance(noise, BandedNoise) else noise)


def _first_noise(banded: BandedNoise, message: PyTree, clips: Mapping[str, float]) -> NoiseState:
    """The initial state of the noise for updates and, if they are bounded, for statistics."""
    statistics = {"statistics": message.mutable} if "statistics" in clips else {}
    return first_noise_state(banded, {"update": message.params, **statistics})


def _bounded(
    result: ClientResult,
    message: PrivateMessage,
    clips: Mapping[str, float],
    per_layer: bool,
    tells_if_within: bool,
    metrics: bool,
) -> ClientResult:
    """A client's result with bounds on all parts that it sends.

    Args:
      result: of the method.
      message: with the bound of updates.
      clips: 'statistics', 'extra' or 'weight' -> `private`'s bound.
      per_layer, metrics: as in `private`.
      tells_if_within: whether the client also sends whether its update was within the bound.
    """
    change = _change(message.mutable, result.mutable)
    weight, extra = jnp.ones((), jnp.float32), result.extra
    if "weight" in clips:
        weight = clipped_weight(result.weight, clips["weight"]) / clips["weight"]
    if "extra" in clips:
        extra = clipped(extra, clips["extra"])
    if tells_if_within:
        # Andrew et al., algorithm 1: the client sends whether its update was within the bound.
        within = is_within(result.update, message.clip).astype(jnp.float32)
        extra = extra, within - 0.5
    return result._replace(
        update=clipped(result.update, message.clip, per_layer),
        mutable=clipped(change, clips["statistics"]) if "statistics" in clips else change,
        weight=weight,
        extra=extra,
        metrics=dict(result.metrics) if metrics else _sizes_alone(result.metrics),
    )


def _sizes_alone(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Of a client's metrics the bytes of its messages, which whoever transports these sees."""
    sizes = {name: value for name, value in metrics.items() if name.startswith("bytes_")}
    return {"num_steps": jnp.full((), jnp.nan), **sizes}


def _change(before: PyTree, after: PyTree) -> PyTree:
    """The change of mutable state, in float32."""
    return jax.tree.map(
        lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), after, before
    )


def _within(model: PersonalModel) -> PersonalModel:
    """A method's personal model, which reads `private`'s server."""
    return model._replace(
        variables=lambda server, client_state: model.variables(server.inner, client_state)
    )
