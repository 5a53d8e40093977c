"""Bytes that a client uploads and downloads in one secure sum, as in `secure_sum_protocol`."""

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
    """Bytes of keys and shares, in addition to the vector, if no client drops out.

    A client uploads two public keys, an encrypted share for every other client, and finally a share of
    every client's seed. It downloads the others' keys and encrypted shares with the indices of their
    senders, and the list of clients whose vectors arrived.
    """
    others = num_clients - 1
    encrypted = INDEX_BYTES + CIPHER_BYTES + SHARE_BYTES
    up = 2 * KEY_BYTES + others * encrypted + num_clients * (INDEX_BYTES + SEED_BYTES)
    down = others * (INDEX_BYTES + 2 * KEY_BYTES) + others * encrypted + num_clients * INDEX_BYTES
    return Communication(down=down, up=up)
