"""Clients that drop out of a secure sum, after masks are agreed on and before their vectors arrive.

The vectors of the others still have the masks that they share with a client who dropped out. If enough
clients are left, the server restores that client's key from shares and takes these masks away. A
compiled round has no keys to restore. There the client itself adds these masks, and no numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedcodist.core import keys
from fedcodist.core.checks import check_number
from fedcodist.privacy.secure_sum_bytes import sharing_bytes, unmasking_bytes

LEAST_THRESHOLD = 2  # a sum of one vector would be this vector


class Attendance(NamedTuple):
    """How many clients take part in a secure sum; of one client, or summed over several.

    Attributes:
      there: int32 scalar, the clients who agreed on masks.
      dropped: int32 scalar, those of them whose vectors did not arrive.
    """

    there: jax.Array
    dropped: jax.Array


def check_dropout(dropout: float) -> None:
    """Raises ValueError or TypeError that names the argument unless it is a number in [0, 1)."""
    check_number("dropout", dropout, low=0, below=1)


def drops_out(client: jax.Array, key: jax.Array, dropout: float) -> jax.Array:
    """Whether a client drops out of a round, a scalar bool.

    Args:
      client: int32 scalar, its index.
      key: the round's, the same for all clients: the masks of one depend on which others drop out.
      dropout: the probability, independently for every client and round.
    """
    return jax.random.uniform(keys.derive(key, "dropout", client)) < dropout


def partners(client: jax.Array, clients: jax.Array, key: jax.Array, dropout: float) -> jax.Array:
    """The clients whose masks with this client it has to add, int32 [slots], -1 for all others.

    A client whose vector arrives adds masks with all. One who drops out adds masks with those whose
    vectors arrive: these are the masks that the server takes away. A mask of two clients who both drop
    out is in no vector.
    """
    dropped = jax.vmap(lambda other: drops_out(other, key, dropout))(clients)
    return jnp.where(drops_out(client, key, dropout) & dropped, -1, clients)


def threshold_of(there: Any) -> Any:
    """How many of the clients who agreed on masks must be left: more than half, and at least 2.

    With half of them, a server could restore a client's key with one half and its seed with the other,
    and so unmask that client's vector. `threshold` of `secure_sum_protocol` may be another number.
    """
    return jnp.maximum(there // 2 + 1, LEAST_THRESHOLD)


def is_discarded(attendance: Attendance) -> jax.Array:
    """Whether too few clients are left to remove the masks, a scalar bool."""
    return attendance.there - attendance.dropped < threshold_of(attendance.there)


def dropout_metrics(
    attendance: Attendance, num_clients: int, bytes_of_vector: int
) -> dict[str, jax.Array]:
    """A round's metrics of clients who drop out, float32 scalars; NaN in a round without clients.

    `client_bytes_up` is the mean over all clients. Those who drop out have uploaded keys and shares. The
    others have also uploaded vectors and, unless the sum is discarded, the shares that remove masks.

    Args:
      attendance: summed over the round's clients.
      num_clients: the largest number of clients, of which keys and shares are counted.
      bytes_of_vector: of a masked vector.
    """
    discarded = is_discarded(attendance)
    counted = jnp.where(attendance.there > 0, attendance.there, jnp.nan)  # float32
    share = attendance.dropped / counted
    unmasking = unmasking_bytes(num_clients, attendance.dropped).up
    of_arrived = bytes_of_vector + jnp.where(discarded, 0, unmasking)
    return {
        "client_dropped_share": share,
        "client_bytes_up": sharing_bytes(num_clients).up + (1 - share) * of_arrived,
        "sum_discarded": jnp.where(attendance.there > 0, discarded, jnp.nan),
    }
