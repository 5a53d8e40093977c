"""The protocol of secure sums with real keys: sums, recovery of who left, bytes, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from scipy import stats

from fedcodist.core.aggregation import ClientResult
from fedcodist.core.model import Variables
from fedcodist.privacy import secure_sum_protocol as protocol
from fedcodist.privacy.secure_sum_bytes import SEED_BYTES, agreement_bytes, vector_bytes
from fedcodist.privacy.secure_sum_keys import (
    agreed_seed,
    decrypted,
    encrypted,
    mask_of,
    private_key_of,
    public_key_of,
    restored,
    shared,
)
from fedcodist.privacy.secure_sum_protocol import (
    DropOuts,
    packed,
    secure_sum_protocol,
    unpacked,
)
from fedcodist.privacy.secure_sum_reduce import secure_sum_reduce

CLIENTS = (2, 5, 6, 9, 30)


def vectors_of(bits, size=40, clients=CLIENTS):
    generator = np.random.default_rng(bits)
    draw = lambda: generator.integers(0, 2**bits, size, dtype=np.uint64).astype(np.uint32)
    return {client: draw() for client in clients}


def plain_sum(vectors, clients, bits):
    total = sum(vectors[client].astype(object) for client in clients)
    return np.array([int(number) % 2**bits for number in total], np.uint64)


@pytest.mark.parametrize("bits", [32, 13])
def test_the_sum_is_the_plain_one(bits):
    vectors = vectors_of(bits)
    found = secure_sum_protocol(vectors, threshold=3, bits=bits)
    np.testing.assert_array_equal(found.total, plain_sum(vectors, CLIENTS, bits))
    assert found.summed == list(CLIENTS)
    told = agreement_bytes(len(CLIENTS))
    assert set(found.bytes_up.values()) == {vector_bytes(40, bits) + told.up}
    assert set(found.bytes_down.values()) == {told.down}


@pytest.mark.parametrize(
    "drop_outs",
    [
        DropOuts(vector=(5,)),
        DropOuts(vector=(2, 30)),
        DropOuts(sharing=(9,), vector=(6,)),
        DropOuts(unmasking=(2, 5)),
        DropOuts(sharing=(2,), unmasking=(30,)),
    ],
    ids=str,
)
def test_masks_of_clients_who_left_are_recovered(drop_outs):
    vectors = vectors_of(24)
    found = secure_sum_protocol(vectors, 3, 24, drop_outs)
    there = [c for c in CLIENTS if c not in (*drop_outs.sharing, *drop_outs.vector)]
    assert found.summed == there
    np.testing.assert_array_equal(found.total, plain_sum(vectors, there, 24))


def test_a_wrong_key_of_who_left_leaves_its_masks(monkeypatch):
    """The check above can fail: what is left of masks is no small error."""
    right = protocol.restored

    def wrong(shares, *arguments):
        secret = right(shares, *arguments)
        return secret if len(secret) == SEED_BYTES else bytes(len(secret))

    monkeypatch.setattr(protocol, "restored", wrong)
    found = secure_sum_protocol(vectors_of(24), 3, 24, DropOuts(vector=(5,)))
    there = [client for client in CLIENTS if client != 5]
    assert (found.total != plain_sum(vectors_of(24), there, 24)).mean() > 0.9


def test_what_the_server_gets_of_a_client_is_uniform():
    vectors = {client: np.full(1 << 15, 77, np.uint32) for client in CLIENTS[:3]}
    masked = secure_sum_protocol(vectors, 2, 32).masked
    p_value = lambda vector: stats.chisquare(np.bincount(vector >> 24, minlength=256)).pvalue
    for vector in masked.values():
        assert p_value(vector) > 1e-4
    assert p_value(sum(masked.values())) > 1e-4  # own masks do not cancel
    assert p_value(vectors[2]) < 1e-9


def test_two_clients_agree_on_one_seed_and_others_on_others():
    keys = [private_key_of(bytes([n] * 32)) for n in (1, 2, 3)]
    seed = lambda a, b: agreed_seed(keys[a], public_key_of(keys[b]))
    assert seed(0, 1) == seed(1, 0)
    assert len({seed(0, 1), seed(0, 2), seed(1, 2)}) == 3
    np.testing.assert_array_equal(mask_of(seed(0, 1), 9)[:5], mask_of(seed(1, 0), 5))


def test_any_threshold_of_shares_restores_a_secret_and_fewer_do_not():
    secret, receivers = bytes(range(32)), [1, 4, 7, 8]
    shares = shared(secret, receivers, threshold=3)
    for some in itertools.combinations(receivers, 3):
        assert restored({r: shares[r] for r in some}, receivers, 3) == secret
    assert restored({r: shares[r] for r in (1, 4)}, receivers, 2) != secret
    assert all(secret[:16] not in share for share in shares.values())


def test_a_share_is_read_by_its_receiver_alone():
    message = encrypted(bytes(32), b"share", b"route")
    assert decrypted(bytes(32), message, b"route") == b"share"
    for key, route in ((bytes([1] * 32), b"route"), (bytes(32), b"other")):
        with pytest.raises(InvalidTag):
            decrypted(key, message, route)


@pytest.mark.parametrize("bits", [2, 7, 13, 31, 32])
def test_packing(bits):
    vector = vectors_of(bits, size=11)[2]
    assert len(packed(vector, bits)) == vector_bytes(11, bits)
    np.testing.assert_array_equal(unpacked(packed(vector, bits), 11, bits), vector)


def test_the_compiled_simulation_sums_the_same_integers():
    bits, clients = 20, jnp.arange(4)
    reduce = secure_sum_reduce(4, 1.0, bits=bits)
    key, generator = jax.random.key(0), np.random.default_rng(0)
    numbers = generator.uniform(-1, 1, (4, 30)).astype(np.float32)
    fixed = [
        reduce.prepare(ClientResult(jnp.asarray(row), {}, jnp.float32(1), None, {}), key)
        for row in numbers
    ]
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    masked = [flat(reduce.mask(tree, clients[i], clients, key)) for i, tree in enumerate(fixed)]
    found = secure_sum_protocol({i: flat(tree) for i, tree in enumerate(fixed)}, 3, bits)
    np.testing.assert_array_equal(found.total, sum(masked) & np.uint32(2**bits - 1))
    assert not any(np.array_equal(found.masked[i], flat(tree)) for i, tree in enumerate(fixed))
    # The aggregate of the protocol's integers is the mean of the numbers.
    leaves, structure = jax.tree.flatten(fixed[0])
    parts = np.split(found.total, np.cumsum([leaf.size for leaf in leaves])[:-1])
    total = jax.tree.unflatten(
        structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    )
    mean = reduce.finalize(jax.tree.map(jnp.asarray, total), Variables({}, {}), key).pseudo_gradient
    np.testing.assert_allclose(mean, numbers.mean(0), atol=1e-5)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (dict(threshold=1), "threshold must be at least 2, got 1"),
        (dict(threshold=6), "threshold must be at most 5, got 6"),
        (dict(bits=40), "bits must be at most 32, got 40"),
        (dict(bits=3), r"vectors\[2\] must be uint32 below 2\^3, got uint32 up to"),
        (dict(drop_outs=DropOuts(vector=(1,))), r"drop_outs\.vector must be clients, got \[1\]"),
        (
            dict(drop_outs=DropOuts(vector=(2, 5, 6))),
            "drop_outs must leave at least the threshold's 3 clients, got 2 left",
        ),
    ],
)
def test_bad_input_is_one_line(differs, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        secure_sum_protocol(vectors_of(8), **(dict(threshold=3, bits=8) | differs))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="vectors must be of one size"):
        secure_sum_protocol({0: np.zeros(2, np.uint32), 1: np.zeros(3, np.uint32)}, 2)
    table = np.zeros((3, 3), np.uint32)
    with pytest.raises(ValueError, match=r"^vectors\[0\] must be \[size\], got shape \[3, 3\]\.$"):
        secure_sum_protocol({0: table, 1: table}, 2)
    with pytest.raises(ValueError, match=r"vectors\[0\] must be uint32 below 2\^8, got int64"):
        secure_sum_protocol({0: [1, 2], 1: [3, 4]}, 2, bits=8)
    with pytest.raises(ValueError, match="vectors must be of at least 2 clients, got 1"):
        secure_sum_protocol({0: np.zeros(2, np.uint32)}, 2)


def test_clients_may_be_named_by_numpys_integers():
    vectors = vectors_of(8)
    named = {np.int64(index): vector for index, vector in vectors.items()}
    np.testing.assert_array_equal(
        secure_sum_protocol(named, threshold=3, bits=8).total,
        secure_sum_protocol(vectors, threshold=3, bits=8).total,
    )
    negative = {-1: vectors.popitem()[1], **vectors}
    with pytest.raises(ValueError, match="client's index must be at least 0, got -1"):
        secure_sum_protocol(negative, threshold=3, bits=8)
