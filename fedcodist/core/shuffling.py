"""Random orders and random subsets in closed form, without time or memory per example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# With four rounds, neighbours stay together too often in sets of a few elements, whose halves have one
# or two bits.
_FEISTEL_ROUNDS = 6


def permuted_positions(
    key: jax.Array, positions: jax.Array, size: jax.Array | int, epoch: jax.Array | int = 0
) -> jax.Array:
    """Returns the elements of a random permutation of `range(size)` at `positions`.

    A Feistel network with cycle walking (Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains).
    The permutation exists only as a function, so twenty examples of a hundred million cost twenty
    evaluations. It is for orders of examples and their batches: in sets of 5 to 8 elements some subsets
    of the first places are a quarter more likely than others. Where each subset must be equally likely,
    as with clients and models, take `jax.random.permutation` or `sample_without_replacement`.

    Args:
      key: the permutation's key.
      positions: integers [...] in [0, size); larger ones are taken modulo size.
      size: number of elements, at least 1; traced or not, broadcast against positions.
      epoch: integers broadcast against positions; each epoch has another permutation.

    Returns:
      int32 array of the shape of positions.
    """
    size = jnp.maximum(jnp.asarray(size, jnp.uint32), 1)
    positions = jnp.asarray(positions).astype(jnp.uint32) % size
    epoch = jnp.asarray(epoch).astype(jnp.uint32)
    bits = 32 - jax.lax.clz(size - 1)
    salts = jax.random.bits(key, (2 * _FEISTEL_ROUNDS,), jnp.uint32)
    epoch_salt = _mix(epoch * jnp.uint32(0x9E3779B9) + jnp.uint32(1))
    encrypt = lambda value: _encrypted(value, bits, salts, epoch_salt)
    # The network permutes the next power of two. Values outside `range(size)` are encrypted again until
    # they are inside, which is still a permutation.
    walked = jax.lax.while_loop(
        lambda value: jnp.any(value >= size),
        lambda value: jnp.where(value >= size, encrypt(value), value),
        encrypt(positions),
    )
    return walked.astype(jnp.int32)


def stream_positions(
    key: jax.Array, start: jax.Array | int, count: int, size: jax.Array | int
) -> jax.Array:
    """Returns elements start .. start + count of an endless stream that reshuffles `range(size)`.

    Every pass over the data has another random order. Where a pass ends the next one begins.

    Args:
      key: the stream's key.
      start: index of the first element wanted, traced or not. After 2^32 elements the stream repeats.
      count: number of elements.
      size: number of elements that the stream repeats, traced or not.

    Returns:
      int32 array [count] with values in [0, size).
    """
    index = jnp.asarray(start).astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)
    period = jnp.maximum(jnp.asarray(size, jnp.uint32), 1)
    return permuted_positions(key, index % period, size, epoch=index // period)


def sample_without_replacement(key: jax.Array, population: int, count: int) -> jax.Array:
    """Returns `count` different integers of `range(population)`, every subset equally likely.

    Floyd's algorithm (Bentley and Floyd 1987, A Sample of Brilliance). Its cost grows with count squared
    and not with the population, so a cohort out of a million clients is drawn in microseconds.

    Returns:
      int32 array [count], in no particular order.

    Raises:
      ValueError: names `count` if it is larger than the population.
    """
    if not 1 <= count <= population:
        raise ValueError(f"count must be between 1 and population={population}, got {count}.")
    return _sample(key, population, count)


def stratified_sample(key: jax.Array, labels: np.ndarray, count: int) -> jax.Array:
    """Returns indices of `count` different examples, from every class in proportion to its size.

    Shares are rounded to integers that sum to `count`: up where the fraction is largest, and among equal
    fractions for the first classes.

    Args:
      key: of the draw; sizes per class are the same for every key.
      labels: int [examples], known when the program is built.
      count: at most the number of examples.

    Returns:
      int32 array [count], class by class.

    Raises:
      ValueError: names `count` if it is larger than the number of examples.
    """
    if not 1 <= count <= len(labels):
        raise ValueError(f"count must be between 1 and {len(labels)} examples, got {count}.")
    classes, sizes = np.unique(labels, return_counts=True)
    shares = count * sizes / len(labels)
    counts = np.floor(shares).astype(int)
    largest = np.argsort(counts - shares, kind="stable")
    counts[largest[: count - counts.sum()]] += 1
    # For each drawn example: its class, and its place among the drawn examples of that class.
    group = np.repeat(np.arange(len(classes)), counts)
    place = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    drawn = permuted_positions(
        key, jnp.asarray(place), jnp.asarray(sizes[group]), epoch=jnp.asarray(group)
    )
    by_class = jnp.asarray(np.argsort(labels, kind="stable").astype(np.int32))
    return by_class[jnp.asarray((np.cumsum(sizes) - sizes)[group].astype(np.int32)) + drawn]


# Jitted, so that it is traced once for a shape. Programs have the network many times.
@jax.jit
def _encrypted(
    value: jax.Array, bits: jax.Array, salts: jax.Array, epoch_salt: jax.Array
) -> jax.Array:
    """The Feistel network's permutation of the numbers of `bits` bits."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left_mask = (jnp.uint32(1) << left_bits) - 1
    right_mask = (jnp.uint32(1) << right_bits) - 1
    left, right = value >> right_bits, value & right_mask
    for index in range(_FEISTEL_ROUNDS):
        left ^= _mix(right + salts[2 * index] + epoch_salt) & left_mask
        right ^= _mix(left + salts[2 * index + 1] + epoch_salt) & right_mask
    return (left << right_bits) | right


def _mix(value: jax.Array) -> jax.Array:
    """A 32-bit finaliser: every input bit flips every output bit with probability about one half."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x7FEB352D)
    value = (value ^ (value >> 15)) * jnp.uint32(0x846CA68B)
    return value ^ (value >> 16)


# Jitted for the same reason as `_encrypted`.
@functools.partial(jax.jit, static_argnames=("population", "count"))
def _sample(key: jax.Array, population: int, count: int) -> jax.Array:
    last = jnp.arange(population - count, population, dtype=jnp.int32)
    draws = jax.random.randint(key, (count,), 0, last + 1, dtype=jnp.int32)

    def step(index: jax.Array, chosen: jax.Array) -> jax.Array:
        draw = draws[index]
        taken = jnp.any(chosen == draw)
        return chosen.at[index].set(jnp.where(taken, last[index], draw))

    return jax.lax.fori_loop(0, count, step, jnp.full((count,), -1, jnp.int32))
