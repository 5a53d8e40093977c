"""ReLU and dropout by a hash: shares, independence, gradients, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.models.hashed_dropout import relu_and_dropout

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.mark.parametrize("rate", [0.2, 0.3, 0.4])
def test_dropout_keeps_the_mean_and_drops_features_independently(rate):
    """Within a mask, and between masks of different keys."""
    features = jnp.ones((101, 33, 3))
    dropped_out = lambda seed: relu_and_dropout(features, rate, jax.random.key(seed))
    found = np.asarray(jax.vmap(dropped_out)(jnp.arange(6)))
    kept = (found > 0).reshape(6, -1)
    np.testing.assert_allclose(found[found > 0], 1 / (1 - rate), rtol=1e-6)
    error = 4.5 * np.sqrt(rate * (1 - rate) / features.size)  # standard deviations of a share
    assert np.abs(kept.mean(1) - (1 - rate)).max() < error
    both = lambda one, other: abs(np.mean(one & other) - (1 - rate) ** 2)
    for distance in (*2 ** np.arange(13), 3, 33 * 3, 3 * 33 * 10):
        assert both(kept[0, distance:], kept[0, :-distance]) < 2 * error
        # Nor is a mask another one that is shifted.
        assert both(kept[0, distance:], kept[1, :-distance]) < 2 * error
    for seed in range(6):
        for other in range(seed):
            assert both(kept[seed], kept[other]) < 2 * error


def test_gradients_of_dropout_are_those_of_what_is_kept():
    """Negative features and the dropped ones have none, others are scaled as the outputs are."""
    features = jax.random.normal(jax.random.key(0), (50, 8)).at[0].set(0)
    outputs, pull = jax.vjp(lambda x: relu_and_dropout(x, 0.4, jax.random.key(1)), features)
    kept = np.asarray(relu_and_dropout(jnp.ones((50, 8)), 0.4, jax.random.key(1))) > 0
    np.testing.assert_allclose(outputs, np.where(kept, np.maximum(features, 0), 0) / 0.6, rtol=1e-6)
    cotangent = jax.random.normal(jax.random.key(2), (50, 8))
    expected = np.where(kept & (np.asarray(features) > 0), cotangent, 0) / 0.6
    np.testing.assert_allclose(pull(cotangent)[0], expected, rtol=1e-6)


def test_dropout_of_what_devices_share_by_keys_of_their_own():
    """Within a shard_map that checks what varies over devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    features = jnp.arange(1.0, 9)

    def on_a_device(features):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("devices"))
        total = lambda x: jnp.sum(relu_and_dropout(x, 0.5, key))
        return jax.grad(lambda x: jax.lax.psum(total(x), "devices"))(features)

    spec = jax.sharding.PartitionSpec()
    found = jax.jit(jax.shard_map(on_a_device, mesh=mesh, in_specs=spec, out_specs=spec))(features)
    keys = [jax.random.fold_in(jax.random.key(0), device) for device in range(2)]
    own = [jax.grad(lambda x, k=k: relu_and_dropout(x, 0.5, k).sum())(features) for k in keys]
    np.testing.assert_allclose(found, sum(own))
