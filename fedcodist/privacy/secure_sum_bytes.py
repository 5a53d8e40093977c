"""Bytes that a client uploads and downloads in one secure sum, as in `secure_sum_protocol`."""

from typing import Any

from fedcodist.core.communication import Communication

KEY_BYTES = 32  # a public key of X25519
SEED_BYTES = 16  # of a client's own mask
INDEX_BYTES = 4
SHARE_BYTES = (
    KEY_BYTES + SEED_BYTES
)  # of a private key, which is as long as a public one, and the seed
CIPHER_BYTES = 12 + 16  # nonce and tag of an encrypted message


def vector_bytes(size: int, bits: int) -> int:
    """Bytes of `size` integers modulo 2^bits, packed."""
    return -(-size * bits // 8)


def agreement_bytes(num_clients: int) -> Communication:
    """Bytes of keys and shares, in addition to the vector, if no client drops out."""
    before, after = sharing_bytes(num_clients), unmasking_bytes(num_clients, 0)
    return Communication(down=before.down + after.down, up=before.up + after.up)


def sharing_bytes(num_clients: int) -> Communication:
    """Bytes of keys and shares before vectors are sent, also of clients who drop out afterwards.

    A client uploads two public keys, and an encrypted share for every other client. It downloads the
    others' keys and encrypted shares with the indices of their senders.
    """
    others = num_clients - 1
    encrypted = INDEX_BYTES + CIPHER_BYTES + SHARE_BYTES
    up = 2 * KEY_BYTES + others * encrypted
    down = others * (INDEX_BYTES + 2 * KEY_BYTES) + others * encrypted
    return Communication(down=down, up=up)


def unmasking_bytes(num_clients: int, dropped: Any) -> Communication:
    """Bytes after vectors are sent, of a client whose vector arrived.

    It uploads a share of the seed of every client whose vector arrived, and of the private key of every
    client who dropped out. It downloads the list of clients whose vectors arrived.

    Args:
      num_clients: how many clients have shared their secrets.
      dropped: how many of them dropped out before their vectors arrived; an integer, traced or not.
    """
    arrived = num_clients - dropped
    up = arrived * (INDEX_BYTES + SEED_BYTES) + dropped * (INDEX_BYTES + KEY_BYTES)
    return Communication(down=arrived * INDEX_BYTES, up=up)
