"""Keys, seeds, masks and shares of the secure sums' protocol, from cryptographic libraries.

X25519, HKDF, ChaCha20 and AES-GCM are from `cryptography`. Shamir's secret sharing over GF(2^128) is
from `pycryptodomex`. Both are imported when first used.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcodist.privacy.secure_sum_bytes import KEY_BYTES

HALF = 16  # Shamir's scheme shares 16 bytes at a time
NONCE = 12


def shared(secret: bytes, receivers: list[int], threshold: int) -> dict[int, bytes]:
    """Receiver -> its share of a secret (a multiple of 16 bytes); any `threshold` shares restore it."""
    from Cryptodome.Protocol.SecretSharing import Shamir

    halves = [secret[start : start + HALF] for start in range(0, len(secret), HALF)]
    split = [Shamir.split(threshold, len(receivers), half, ssss=False) for half in halves]
    return {
        receiver: b"".join(shares[place][1] for shares in split)
        for place, receiver in enumerate(receivers)
    }


def restored(shares: Mapping[int, bytes], receivers: list[int], threshold: int) -> bytes:
    """The secret, restored from the shares of at least `threshold` receivers."""
    from Cryptodome.Protocol.SecretSharing import Shamir

    used = sorted(shares)[:threshold]
    length = len(shares[used[0]])
    return b"".join(
        Shamir.combine(
            [(1 + receivers.index(i), shares[i][start : start + HALF]) for i in used], ssss=False
        )
        for start in range(0, length, HALF)
    )


def agreed_seed(private_key: Any, public_key: bytes) -> bytes:
    """The seed of the mask of two clients, which each derives from the other's public key."""
    return agreed(private_key, public_key, b"fedcodist masks")


def mask_of(seed: bytes, size: int) -> np.ndarray:
    """A mask, uint32 [size]: the stream of ChaCha20 under a key derived from the seed."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(_derived(seed, b"fedcodist stream"), bytes(16)), mode=None)
    stream = cipher.encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


def private_key_of(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public_key_of(private_key: Any) -> bytes:
    return private_key.public_key().public_bytes_raw()


def agreed(private_key: Any, public_key: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return _derived(private_key.exchange(X25519PublicKey.from_public_bytes(public_key)), purpose)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def encrypted(key: bytes, message: bytes, route: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, message, route)


def decrypted(key: bytes, message: bytes, route: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).decrypt(message[:NONCE], message[NONCE:], route)
