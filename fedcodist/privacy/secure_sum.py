"""Secure sums in any method: the server sees only the sum of clients' messages.

A client rounds the numbers that it sends to multiples of a step. For every other client of the cohort it
adds a mask, which the other client subtracts. A masked vector is uniformly distributed for everyone who
does not know the masks. The sum of all masked vectors is the sum of the integers. The protocol itself,
with keys, is `secure_sum_protocol`.

What is hidden. The updates, batch statistics, weights and `extra` of individual clients are hidden. The
sum is not hidden: from the sum of two clients each can compute the other's. Metrics, which a simulation
writes for its user, are not hidden either. If a Poisson cohort has a single client, it sends zeros, and
the model stays as if nobody took part. What the client keeps, such as SCAFFOLD's variate, changes as if
it had been summed. In a private cohort it sends its result, which the noise hides.

Bytes. They are those of vectors, keys and shares, as in `secure_sum_protocol`. A masked vector cannot be
compressed. So the upload of `secure_sum(compressed(...))` is counted in full, and only fewer `bits` make
it smaller.

Dropout. Some clients agree on masks and train, but their vectors do not arrive. The sum is that of the
others: the server restores the keys of who dropped out and takes their masks away. For this more than
half of the cohort's n clients must be left, floor(n / 2) + 1, and at least 2. Otherwise the sum is
discarded, and the server goes on as after a cohort without clients: with SGD the model stays as it is,
while an optimizer with momentum still moves it. `client_bytes_up` is the mean over clients who dropped
out, with keys and shares alone, and the others, with the shares that restore keys. `client_bytes_down`
is as if nobody dropped out. A client who dropped out keeps its new client state, and its training
metrics count. So SCAFFOLD's server misses the change of its variate, and an error feedback takes its
message as arrived.

Private methods. Around them numbers are rounded towards zero, so that no norm grows beyond its clip. In
`secure_sum(private(...), dropout=...)` the sum of those who are left gets the noise, and its divisor is
the weight of those who are left. A discarded sum counts as 0 and gets noise too, which moves the model
if `weight_clip` is set. (An adaptive clip and SCAFFOLD's variates stay.) Epsilon is counted as if nobody
dropped out. For Poisson cohorts this would be too little: how many clients take part decides whether a
sum is discarded. So `dropout` is refused for them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedcodist.core.aggregation import ClientResult
from fedcodist.core.arguments import check_arguments
from fedcodist.core.communication import tree_bytes
from fedcodist.core.inputs import ClientData
from fedcodist.core.method import FederatedMethod, fine_tuned_models
from fedcodist.core.model import Variables
from fedcodist.privacy.secure_sum_bytes import agreement_bytes
from fedcodist.privacy.secure_sum_reduce import bounded, bytes_up, exceeds, fixed_point_reduce

PyTree = Any


def secure_sum(
    method: FederatedMethod,
    num_clients: int,
    value_range: float,
    max_weight: float,
    bits: int = 32,
    masks: bool = True,
    dropout: float = 0.0,
) -> FederatedMethod:
    """The method in which all that clients send is summed as integers modulo 2^bits with pairwise masks.

    A client rounds the numbers that it sends to multiples of a step. For `value_range` r, `max_weight`
    w and n clients the step is max(r, 1) w / floor((2^(bits - 1) - 1) / n). If nothing is clipped, the
    sum differs from the exact one by at most n / 2 steps and float32's rounding.

    A number out of range would wrap around, so it is clipped to the range, and a weight to `max_weight`.
    A client with NaN makes the sum NaN, as without a secure sum, and the run reports it. FedDF and FedBE
    need the clients' models and raise ValueError for this method. For noise on the sum use `private`.

    Metrics are `client_clipped_share`, the share of the cohort with clipped numbers, and with `dropout`
    `client_dropped_share` and `sum_discarded`, 1 in a round whose sum was discarded.

    What the sum hides, what dropout changes, and how bytes are counted: see the module
    `fedcodist.privacy.secure_sum` and docs/secure_sums.md.

    Args:
      method: any method of one model, compressed or not.
      num_clients: the largest number of clients in a cohort, at least 2.
      value_range: the largest magnitude of a number that a client sends, before it is weighted. That of
        a number in `extra` is 1 if `value_range` is smaller.
      max_weight: the largest weight of a client, such as its number of examples.
      bits: of a number in the sum, 3 to 32; more clients need more.
      masks: whether masks are drawn. Without them the model is the same to the bit, and a round, which
        otherwise draws a mask for every two clients, is faster.
      dropout: the probability in [0, 1) that a client drops out after masks are agreed on, independently
        for every client and round.

    Raises:
      ValueError, TypeError: names the argument and what is allowed, also if `bits` are too few.
    """
    check_arguments(secure_sum, locals())
    if method.reduce.mask is not None:
        raise ValueError("method must not be one of a secure sum already.")
    if dropout and method.privacy is not None and method.privacy.expected_clients is not None:
        raise ValueError(
            "dropout must be 0 for a private method with expected_clients, for Poisson cohorts: how "
            f"many clients take part decides whether a sum is discarded, got {dropout}."
        )
    reduce = fixed_point_reduce(
        method.reduce,
        num_clients,
        value_range,
        max_weight,
        bits,
        masks,
        dropout,
        is_private=method.privacy is not None,
    )
    agreement = agreement_bytes(num_clients)

    def client_update(
        message: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> ClientResult:
        result = method.client_update(message, client_state, data, key, hyper)
        down = result.metrics.get("bytes_down", tree_bytes(message))
        metrics = {**result.metrics, "bytes_down": jnp.int32(down + agreement.down)}
        if dropout:
            # The upload depends on who is left, so the reduction measures it.
            metrics.pop("bytes_up", None)
        else:
            prepared = jax.eval_shape(reduce.prepare, result, key)
            metrics["bytes_up"] = jnp.int32(bytes_up(prepared, num_clients, bits))
        if method.privacy is None or method.privacy.tells_metrics:
            is_clipped = exceeds(result, value_range, max_weight)
            metrics["clipped_share"] = is_clipped.astype(jnp.float32)
        if method.after_sending is not None:
            sent = bounded(result, value_range, max_weight).extra
            after = method.after_sending(result.client_state, result.extra, sent)
            result = result._replace(client_state=after)
        return result._replace(metrics=metrics)

    def fine_tune(
        server: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> dict[str, Variables]:
        return fine_tuned_models(method, server, client_state, data, key, hyper)

    return method._replace(
        client_update=client_update,
        reduce=reduce,
        fine_tune=fine_tune,
        sends_models=False,  # the server cannot compute clients' models from their sum
    )
