"""The protocol behind `secure_sum`, with real keys, on the host and with all clients in this process.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017,
https://eprint.iacr.org/2017/281, figure 4 without the parts against a malicious server (signatures, and
the round of consistency checks). A compiled simulation has random keys in place of agreed ones, and
clients drop out only before they send vectors; the sum of the integers is the same.
"""

import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from fedcodist.core.checks import check_integer
from fedcodist.core.extras import check_installed
from fedcodist.privacy.secure_sum_bytes import INDEX_BYTES, KEY_BYTES, SEED_BYTES
from fedcodist.privacy.secure_sum_keys import (
    agreed,
    agreed_seed,
    decrypted,
    encrypted,
    mask_of,
    private_key_of,
    public_key_of,
    restored,
    shared,
)


class DropOuts(NamedTuple):
    """Clients that drop out before they share secrets, before they send vectors, or before unmasking."""

    sharing: Collection[int] = ()
    vector: Collection[int] = ()
    unmasking: Collection[int] = ()


class SummedSecurely(NamedTuple):
    """The results of the protocol.

    Attributes:
      total: uint32 [size], the sum modulo 2^bits over the clients whose vectors arrived.
      summed: these clients.
      masked: client -> uint32 [size], the masked vector that the server received.
      bytes_up, bytes_down: client -> bytes of all its messages.
    """

    total: np.ndarray
    summed: list[int]
    masked: dict[int, np.ndarray]
    bytes_up: dict[int, int]
    bytes_down: dict[int, int]


def secure_sum_protocol(
    vectors: Mapping[int, np.ndarray],
    threshold: int,
    bits: int = 32,
    drop_outs: DropOuts = DropOuts(),
) -> SummedSecurely:
    """Sums clients' vectors modulo 2^bits; the server sees no individual vector.

    A client adds to its vector a mask for every other client, which cancels in the sum, and a mask of
    its own. It splits the seed of its own mask and its private key into shares for all clients. In the
    end the remaining clients send shares to the server: of the seed for each client whose vector
    arrived, and of the private key for each client whose vector did not arrive. They never send both for
    the same client.

    Args:
      vectors: client -> unsigned integers [size] below 2^bits, such as those of a `FixedPoint`.
      threshold: how many clients' shares restore a secret. If fewer clients collude with the server,
        they only learn the sum of the others' vectors.
      bits: of a number, at most 32.
      drop_outs: which clients drop out, and when.

    Raises:
      ValueError, TypeError: names the argument and what is allowed, also if fewer than `threshold`
        clients remain.
      ImportError: the extra `secure` is not installed.
    """
    check_installed("the protocol of secure sums", "cryptography", "secure")
    check_installed("the protocol of secure sums", "Cryptodome", "secure")
    clients = _checked_clients(vectors, threshold, bits, drop_outs)
    up, down = (dict.fromkeys(clients, 0) for _ in range(2))

    # Round 0, AdvertiseKeys: every client sends two public keys, which the server forwards.
    advertised = {index: client.public_keys() for index, client in clients.items()}
    for index in clients:
        up[index] += 2 * KEY_BYTES
    # Round 1, ShareKeys: shares of both secrets for all clients, encrypted for their receivers.
    sharing = _left(clients, drop_outs.sharing, threshold)
    inbox: dict[int, dict[int, bytes]] = {index: {} for index in sharing}
    for index in sharing:
        down[index] += (len(advertised) - 1) * (INDEX_BYTES + 2 * KEY_BYTES)
        for receiver, message in clients[index].shares(advertised, threshold).items():
            up[index] += INDEX_BYTES + len(message)
            if receiver in inbox:
                inbox[receiver][index] = message
    # Round 2, MaskedInputCollection: vectors with masks for all clients that have shared their secrets.
    arrived = _left(sharing, drop_outs.vector, threshold)
    masked = {}
    for index in sharing:
        down[index] += sum(INDEX_BYTES + len(message) for message in inbox[index].values())
    for index in arrived:
        message = clients[index].masked_vector(inbox[index])
        up[index] += len(message)
        masked[index] = unpacked(message, len(vectors[index]), bits)
    # Round 4, Unmasking: shares of the seed if a client's vector arrived, else of its private key.
    helping = _left(arrived, drop_outs.unmasking, threshold)
    revealed: dict[int, dict[int, bytes]] = {index: {} for index in sharing}
    for index in arrived:
        down[index] += INDEX_BYTES * len(arrived)
    for index in helping:
        for owner, share in clients[index].revealed_shares(set(arrived)).items():
            up[index] += INDEX_BYTES + len(share)
            revealed[owner][index] = share
    total = _unmasked(masked, advertised, revealed, threshold, bits)
    return SummedSecurely(total, arrived, masked, up, down)


class _Client:
    """A client: its vector, its secrets, and the shares of other clients' secrets that it keeps."""

    def __init__(self, index: int, vector: np.ndarray, bits: int):
        self.index, self.vector, self.bits = index, vector, bits
        self.seed = os.urandom(SEED_BYTES)
        self.mask_key, self.channel_key = (private_key_of(os.urandom(KEY_BYTES)) for _ in range(2))
        self.others: dict[int, tuple[bytes, bytes]] = {}
        self.kept: dict[int, bytes] = {}  # owner -> its share of the private key and of the seed

    def public_keys(self) -> tuple[bytes, bytes]:
        """The public keys of the channel for shares, and of the masks."""
        return public_key_of(self.channel_key), public_key_of(self.mask_key)

    def shares(
        self, advertised: Mapping[int, tuple[bytes, bytes]], threshold: int
    ) -> dict[int, bytes]:
        """Receiver -> its shares of the private key and of the seed, encrypted."""
        self.others = {i: keys for i, keys in advertised.items() if i != self.index}
        secret = self.mask_key.private_bytes_raw() + self.seed
        for receiver, share in shared(secret, sorted(advertised), threshold).items():
            self.kept[receiver] = share
        own = self.kept.pop(self.index)
        sent = {
            receiver: encrypted(self._channel(receiver), share, _route(self.index, receiver))
            for receiver, share in self.kept.items()
        }
        self.kept = {self.index: own}
        return sent

    def masked_vector(self, messages: Mapping[int, bytes]) -> bytes:
        """The vector plus its own mask, and the masks for all clients that sent their shares."""
        for owner, message in messages.items():
            route = _route(owner, self.index)
            self.kept[owner] = decrypted(self._channel(owner), message, route)
        total = self.vector + mask_of(self.seed, len(self.vector))
        for other in messages:
            seed = agreed_seed(self.mask_key, self.others[other][1])
            total = total + _signed(mask_of(seed, len(total)), self.index, other)
        return packed(total & _modulus(self.bits), self.bits)

    def revealed_shares(self, arrived: set[int]) -> dict[int, bytes]:
        """Owner -> the share of its seed if its vector arrived, and of its private key if not."""
        return {
            owner: share[KEY_BYTES:] if owner in arrived else share[:KEY_BYTES]
            for owner, share in self.kept.items()
        }

    def _channel(self, other: int) -> bytes:
        return agreed(self.channel_key, self.others[other][0], b"fedcodist shares")


def packed(vector: np.ndarray, bits: int) -> bytes:
    """Integers below 2^bits without the bits that are always 0."""
    all_bits = np.unpackbits(vector.astype(">u4").view(np.uint8)).reshape(-1, 32)
    return np.packbits(all_bits[:, 32 - bits :].reshape(-1)).tobytes()


def unpacked(message: bytes, size: int, bits: int) -> np.ndarray:
    """The inverse of `packed`, uint32 [size]."""
    own = np.unpackbits(np.frombuffer(message, np.uint8), count=size * bits).reshape(size, bits)
    all_bits = np.concatenate([np.zeros((size, 32 - bits), np.uint8), own], axis=1)
    return np.packbits(all_bits.reshape(-1)).view(">u4").astype(np.uint32)


def _unmasked(
    masked: Mapping[int, np.ndarray],
    advertised: Mapping[int, tuple[bytes, bytes]],
    revealed: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    bits: int,
) -> np.ndarray:
    """The server's part: the sum without the own masks, and without the masks for drop-outs."""
    total = np.sum(list(masked.values()), axis=0, dtype=np.uint32)
    receivers = sorted(advertised)
    for owner, shares in revealed.items():
        secret = restored(shares, receivers, threshold)
        if owner in masked:
            total = total - mask_of(secret, len(total))
            continue
        for other in masked:  # these vectors still have the masks for the owner, who dropped out
            seed = agreed_seed(private_key_of(secret), advertised[other][1])
            total = total - _signed(mask_of(seed, len(total)), other, owner)
    return total & _modulus(bits)


def _checked_clients(
    vectors: Mapping[int, np.ndarray], threshold: int, bits: int, drop_outs: DropOuts
) -> dict[int, _Client]:
    check_integer("bits", bits, low=2, high=32)
    if len(vectors) < 2:
        raise ValueError(f"vectors must be of at least 2 clients, got {len(vectors)}.")
    check_integer("threshold", threshold, low=2, high=len(vectors))
    for index in vectors:
        check_integer("vectors: a client's index", index, low=0, high=256**INDEX_BYTES - 1)
    vectors = {index: np.asarray(vector) for index, vector in vectors.items()}
    for index, vector in vectors.items():
        if vector.ndim != 1:
            raise ValueError(f"vectors[{index}] must be [size], got shape {list(vector.shape)}.")
    sizes = {len(vector) for vector in vectors.values()}
    if len(sizes) > 1:
        raise ValueError(f"vectors must be of one size, got {sorted(sizes)}.")
    for index, vector in vectors.items():
        if vector.dtype != np.uint32 or (vector > _modulus(bits)).any():
            raise ValueError(
                f"vectors[{index}] must be uint32 below 2^{bits}, got {vector.dtype} up to "
                f"{vector.max()}."
            )
    for field, leaving in drop_outs._asdict().items():
        if unknown := set(leaving) - set(vectors):
            raise ValueError(f"drop_outs.{field} must be clients, got {sorted(unknown)}.")
    return {index: _Client(index, vector, bits) for index, vector in sorted(vectors.items())}


def _left(clients: Collection[int], leaving: Collection[int], threshold: int) -> list[int]:
    left = [index for index in clients if index not in leaving]
    if len(left) < threshold:
        raise ValueError(
            f"drop_outs must leave at least the threshold's {threshold} clients, got {len(left)} left."
        )
    return left


def _modulus(bits: int) -> np.uint32:
    return np.uint32(2**bits - 1)


def _signed(mask: np.ndarray, index: int, other: int) -> np.ndarray:
    """The mask with a sign: of two clients, the one with the smaller index adds it."""
    return mask if index < other else np.uint32(0) - mask


def _route(sender: int, receiver: int) -> bytes:
    return int(sender).to_bytes(INDEX_BYTES) + int(receiver).to_bytes(INDEX_BYTES)
