"""Any method whose server sees the sum of what clients send, and nothing of a single client."""

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
from fedcodist.privacy.secure_sum_reduce import bytes_up, exceeds, fixed_point_reduce

PyTree = Any


def secure_sum(
    method: FederatedMethod,
    num_clients: int,
    value_range: float,
    max_weight: float,
    bits: int = 32,
    masks: bool = True,
) -> FederatedMethod:
    """The method, but all that clients send is summed as integers modulo 2^bits under pairwise masks.

    A client rounds what is summed to multiples of a step and adds a mask for each other client of the
    cohort, which that client subtracts. What arrives at the server is uniformly distributed for
    everyone who does not know the masks; their sum is that of the integers. With `value_range` r,
    `max_weight` w and n clients the step is max(r, 1) w / floor((2^(bits - 1) - 1) / n). A sum differs
    from the plain one by at most n / 2 steps and float32's rounding, so long as nothing is clipped.

    A number out of range would wrap around, so it is clipped to the range, and a weight to `max_weight`.
    The metric `client_clipped_share` is the share of the cohort in whom that happened. A client with NaN
    makes the sum NaN, as without a secure sum, and the run reports it.

    Hidden are single clients' updates, batch statistics, weights and `extra`. The sum itself is not, nor
    are metrics, which a simulation writes for its user: the sum of two clients tells each of them the
    other's. Noise on the sum is `private`'s. FedDF and FedBE need clients' models and refuse the method.

    A masked vector cannot be compressed: around `compressed` the way up is counted in full, so bits are
    what makes it shorter. Bytes are the vectors', keys and shares, as in `secure_sum_protocol`.

    Args:
      method: any method of one model, compressed or not.
      num_clients: the most clients of a cohort, at least 2.
      value_range: the largest magnitude of a number that a client sends, before it is weighted.
      max_weight: the largest weight of a client, such as the examples of the largest.
      bits: of a number in the sum, 2 to 32.
      masks: whether masks are drawn. The model is the same to the bit without them, and the round, which
        draws one mask for every two clients, is faster.

    Raises:
      ValueError, TypeError: names the argument and what is allowed; a range that `bits` cannot hold.
    """
    check_arguments(secure_sum, locals())
    if method.reduce.mask is not None:
        raise ValueError("method must not be one of a secure sum already.")
    reduce = fixed_point_reduce(method.reduce, num_clients, value_range, max_weight, bits, masks)
    agreement = agreement_bytes(num_clients)

    def client_update(
        message: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> ClientResult:
        result = method.client_update(message, client_state, data, key, hyper)
        prepared = jax.eval_shape(reduce.prepare, result, key)
        down = result.metrics.get("bytes_down", tree_bytes(message))
        metrics = {
            "bytes_up": jnp.int32(bytes_up(prepared, num_clients, bits)),
            "bytes_down": jnp.int32(down + agreement.down),
            "clipped_share": exceeds(result, value_range, max_weight).astype(jnp.float32),
        }
        return result._replace(metrics=result.metrics | metrics)

    def fine_tune(
        server: PyTree, client_state: PyTree, data: ClientData, key: jax.Array, hyper: PyTree
    ) -> dict[str, Variables]:
        return fine_tuned_models(method, server, client_state, data, key, hyper)

    return method._replace(
        client_update=client_update,
        reduce=reduce,
        fine_tune=fine_tune,
        sends_models=False,  # a server cannot tell clients' models from their sum
    )
