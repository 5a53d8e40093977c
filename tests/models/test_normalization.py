"""Masked batch normalisation against a NumPy reference that drops the padding beforehand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.normalization import BatchNorm

pytestmark = pytest.mark.usefixtures("compile_quickly")


def variables_for(channels, rng):
    return {
        "params": {
            "scale": rng.uniform(0.5, 2, channels).astype("float32"),
            "bias": rng.standard_normal(channels).astype("float32"),
        },
        "batch_stats": {
            "mean": rng.standard_normal(channels).astype("float32"),
            "var": rng.uniform(0.5, 2, channels).astype("float32"),
        },
    }


def reference(variables, x, mask, momentum=0.9, epsilon=1e-5):
    """Outputs for the real examples, and the new running averages, in float64."""
    params, running = variables["params"], variables["batch_stats"]
    x = np.asarray(x, np.float64)[np.asarray(mask, bool)]
    flat = x.reshape(-1, x.shape[-1])
    mean, var = flat.mean(0), flat.var(0)
    outputs = params["scale"] * (x - mean) / np.sqrt(var + epsilon) + params["bias"]
    return outputs, {
        "mean": momentum * running["mean"] + (1 - momentum) * mean,
        "var": momentum * running["var"] + (1 - momentum) * var,
    }


def assert_trees_close(actual, expected, tolerance=1e-4):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        dict(actual),
        dict(expected),
    )


def train(variables, x, mask, **attributes):
    return BatchNorm(**attributes).apply(
        variables, x, train=True, mask=mask, mutable=["batch_stats"]
    )


@settings(max_examples=20)
@given(
    st.lists(st.booleans(), min_size=1, max_size=7).filter(any),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(1, 5),
    st.sampled_from([0.0, 1000.0]),
    st.integers(0, 2**31),
)
def test_train_mode_equals_numpy_without_the_padding(mask, space, channels, offset, seed):
    rng = np.random.default_rng(seed)
    variables, mask = variables_for(channels, rng), np.array(mask)
    real = (rng.standard_normal((len(mask), *space, channels)) + offset).astype("float32")
    padded = np.where(mask.reshape(-1, *[1] * (real.ndim - 1)), real, np.nan)
    expected, running = reference(variables, padded, mask)
    actual, updates = jax.jit(train)(variables, jnp.asarray(padded), jnp.asarray(mask))
    # An offset of 1000 leaves float32 inputs four digits; the statistics must keep those.
    tolerance = 1e-4 if offset == 0 else 3e-2
    np.testing.assert_allclose(actual[mask], expected, rtol=tolerance, atol=tolerance)
    assert_trees_close(updates["batch_stats"], running)


@settings(max_examples=4)
@given(
    st.lists(st.booleans(), min_size=2, max_size=6).filter(any),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 2**31),
)
def test_gradients_are_those_of_the_formula_without_the_padding(mask, space, seed):
    rng, mask = np.random.default_rng(seed), np.array(mask)
    variables, shape = variables_for(3, rng), (len(mask), *space, 3)
    x, weights = rng.standard_normal(shape), rng.standard_normal(shape)

    def ours(params, x):
        outputs, _ = train({**variables, "params": params}, x, jnp.asarray(mask))
        return jnp.sum((weights * outputs)[mask])

    def formula(params, x):
        x, axes = x[mask], tuple(range(len(shape) - 1))
        standard = (x - x.mean(axes)) / jnp.sqrt(x.var(axes) + 1e-5)
        return jnp.sum(weights[mask] * (params["scale"] * standard + params["bias"]))

    with jax.enable_x64(True):
        x, arguments = jnp.asarray(x), variables["params"]
        expected = jax.jit(jax.grad(formula, (0, 1)))(arguments, x)
        found = jax.jit(jax.grad(ours, (0, 1)))(arguments, x)
        for own, other in zip(found, expected, strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), own, other)


def test_no_mask_is_a_mask_of_ones():
    rng = np.random.default_rng(0)
    variables, x = variables_for(3, rng), rng.standard_normal((5, 4, 3)).astype("float32")
    without = train(variables, x, None, momentum=0.7)
    jax.tree.map(
        np.testing.assert_array_equal, without, train(variables, x, jnp.ones(5), momentum=0.7)
    )
    assert_trees_close(
        without[1]["batch_stats"], reference(variables, x, np.ones(5), momentum=0.7)[1]
    )


def test_eval_mode_uses_the_running_averages():
    rng = np.random.default_rng(0)
    variables, x = variables_for(3, rng), rng.standard_normal((5, 3)).astype("float32")
    params, running = variables["params"], variables["batch_stats"]
    expected = params["scale"] * (x - running["mean"]) / np.sqrt(running["var"] + 0.1)
    actual = BatchNorm(epsilon=0.1).apply(variables, x, train=False)
    np.testing.assert_allclose(actual, expected + params["bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [[True, True, False, False], [False] * 4])
def test_padding_has_no_gradient_and_an_empty_batch_changes_nothing(mask):
    rng = np.random.default_rng(0)
    variables, x = variables_for(3, rng), rng.standard_normal((4, 2, 3)).astype("float32")
    mask = jnp.array(mask)

    def loss(params, x):
        outputs, updates = train({**variables, "params": params}, x, mask)
        real = jnp.where(mask[:, None, None], outputs, 0)
        return jnp.sum(jnp.sin(real)), (outputs, updates["batch_stats"])

    (_, (outputs, updates)), (gradient, inputs_gradient) = jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True)
    )(variables["params"], x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((outputs, updates, gradient)))
    np.testing.assert_array_equal(inputs_gradient[~mask], 0)
    if not mask.any():
        jax.tree.map(np.testing.assert_array_equal, dict(updates), variables["batch_stats"])
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), gradient)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_with_unequal_counts_share_exact_statistics(check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
    rng = np.random.default_rng(0)
    variables = variables_for(3, rng)
    x = rng.standard_normal((4 * mesh.size, 2, 3)).astype("float32")
    mask = np.arange(4 * mesh.size) % 4 <= np.arange(4 * mesh.size) // 4  # 1, 2, 3, 4, 4, ... real

    def local(x, mask):
        return train(variables, x, mask, axis_name="clients")

    shards, everywhere = PartitionSpec("clients"), PartitionSpec()
    outputs, updates = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(shards, shards),
            out_specs=(shards, everywhere),
            check_vma=check_vma,
        )
    )(x, mask)
    expected, running = reference(variables, x, mask)
    np.testing.assert_allclose(outputs[mask], expected, rtol=1e-4, atol=1e-4)
    assert_trees_close(updates["batch_stats"], running)


def test_gradient_over_an_axis_equals_that_of_the_whole_batch():
    rng = np.random.default_rng(0)
    variables = variables_for(3, rng)
    x = rng.standard_normal((2, 4, 3)).astype("float32")
    mask = np.array([[True, True, True, False], [True, False, False, False]])

    def loss(x, mask, axis_name):
        outputs, _ = train(variables, x, mask, axis_name=axis_name)
        return jnp.sum(jnp.where(mask[:, None], jnp.sin(outputs), 0))

    over_axis = jax.vmap(lambda x, m: loss(x, m, "devices"), axis_name="devices")
    sharded = jax.jit(jax.grad(lambda x: jnp.sum(over_axis(x, mask))))(x)
    whole = jax.jit(jax.grad(lambda x: loss(x.reshape(8, 3), mask.reshape(8), None)))(x)
    np.testing.assert_allclose(sharded, whole, rtol=1e-4, atol=1e-5)


def test_module_passes_train_mask_and_axis_name_on():
    module = BatchNormMLP(hidden=(4,), classes=3, axis_name="devices")
    x = jax.random.normal(jax.random.key(0), (2, 5, 8, 8, 1))
    mask = jnp.arange(10).reshape(2, 5) < 7
    variables = jax.jit(functools.partial(module.init, train=True))(jax.random.key(1), x[0])
    np.testing.assert_array_equal(variables["batch_stats"]["BatchNorm_0"]["mean"], 0)

    def apply(x, mask):
        return module.apply(variables, x, train=True, mask=mask, mutable=["batch_stats"])

    outputs, updates = jax.jit(jax.vmap(apply, axis_name="devices"))(x, mask)
    single = BatchNormMLP(hidden=(4,), classes=3).apply(
        variables, x.reshape(10, 8, 8, 1)[:7], train=True, mutable=["batch_stats"]
    )
    np.testing.assert_allclose(outputs.reshape(10, 3)[:7], single[0], rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-5),
        updates,
        single[1],
    )
    assert module.apply(variables, x[0]).shape == (5, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BatchNorm(momentum=1.5), "momentum must be .* got 1.5"),
        (lambda: BatchNorm(epsilon=0.0), "epsilon must be > 0, got 0.0"),
        (
            lambda: BatchNorm().init(
                jax.random.key(0), jnp.ones((3, 2)), train=True, mask=jnp.ones(2)
            ),
            r"mask must have shape \(3,\), got \(2,\)",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
