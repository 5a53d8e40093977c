"""Values and gradients of the convolution and the pool against XLA's own, and every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fedcodist.models import convolution

SHAPES = st.tuples(st.integers(1, 3), st.integers(3, 9), st.integers(3, 9), st.integers(1, 9))


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def stock_convolution(inputs, kernel, padding):
    return jax.lax.conv_general_dilated(
        inputs, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def stock_pool(inputs):
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(inputs, -np.inf, jax.lax.max, window, window, "VALID")


def normal(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = max(1.0, float(np.max(np.abs(expected))))
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), atol=tolerance * scale
    )


def value_and_gradients(function, *arguments):
    """The output and, for a fixed random cotangent, the gradient of every argument."""

    @jax.jit
    def of(*arguments):
        outputs, pullback = jax.vjp(function, *arguments)
        cotangent = normal(9, *outputs.shape).astype("float32").astype(outputs.dtype)
        return outputs, *pullback(cotangent)

    return of(*arguments)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_derivatives_equal_the_stock_ones(dtype, padding):
    # As in FedL2G: the gradient of a loss after a step along another loss's gradient.
    inputs, kernel = normal(0, 2, 6, 6, 3, dtype=dtype), 0.3 * normal(1, 3, 3, 3, 4, dtype=dtype)

    def after_a_step(convolve, pool, kernel, inputs):
        def loss(kernel, inputs):
            return jnp.mean(jnp.sin(pool(convolve(inputs, kernel, padding))))

        slopes = jax.grad(loss, (0, 1))(kernel, inputs)
        return loss(kernel - 0.5 * slopes[0], inputs - 0.5 * slopes[1])

    ours = functools.partial(after_a_step, convolution.conv3x3, convolution.max_pool_2x2)
    stock = functools.partial(after_a_step, stock_convolution, stock_pool)
    expected = jax.jit(jax.grad(stock, (0, 1)))(kernel, inputs)
    once = jax.jit(jax.grad(ours, (0, 1)))(kernel, inputs)
    by_client = jax.jit(jax.vmap(jax.grad(ours, (0, 1))))(kernel[None], inputs[None])
    tolerance = 1e-10 if dtype == "float64" else 1e-5
    for result in (once, jax.tree.map(lambda slope: slope[0], by_client)):
        for actual, wanted in zip(result, expected, strict=True):
            assert_close(actual, wanted, tolerance)


@settings(max_examples=6)
@given(
    SHAPES,
    st.integers(1, 5),
    st.sampled_from(["SAME", "VALID"]),
    st.sampled_from(["float32", "float64"]),  # two lowerings
    st.integers(0, 2**31),
)
def test_convolution_and_its_gradients_equal_the_stock_one(shape, features, padding, dtype, seed):
    inputs = normal(seed, *shape, dtype=dtype)
    kernel = normal(seed + 1, 3, 3, shape[-1], features, dtype=dtype)
    assert_equals_stock(inputs, kernel, padding)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("width", [7, 8])  # with an even one, two columns at once
@pytest.mark.parametrize("channels", [(8, 16), (16, 16), (16, 17)])
def test_channels_that_fill_a_vector(channels, width, padding):
    inputs = normal(1, 2, 6, width, channels[0], dtype="float32")
    assert_equals_stock(inputs, normal(2, 3, 3, *channels, dtype="float32"), padding)


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 2, 5), (2, 5, 3)])
def test_small_images_are_computed_by_patches(shape):
    inputs = normal(1, *shape, 4, dtype="float32")
    kernel = normal(2, 3, 3, 4, 5, dtype="float32")
    assert_equals_stock(inputs, kernel, "SAME")
    lowered = jax.jit(convolution.conv3x3).lower(inputs, kernel).as_text()
    assert "stablehlo.convolution" not in lowered


@pytest.mark.parametrize("cached", [1, 4, 10])  # examples whose cotangents are in the cache
@pytest.mark.parametrize("batch", [1, 20, 33])
def test_kernel_gradient_in_chunks_of_examples(batch, cached, monkeypatch):
    monkeypatch.setattr(convolution, "_CACHED_VALUES", cached * 6 * 7 * 4)
    inputs = normal(0, batch, 6, 7, 3, dtype="float32")
    kernel = normal(1, 3, 3, 3, 4, dtype="float32")
    assert_equals_stock(inputs, kernel, "SAME")


@given(batch=st.integers(1, 500), window=st.integers(1, 2 * convolution._CACHED_VALUES))
def test_chunks_fit_the_cache_and_are_not_much_smaller(batch, window):
    size = convolution._chunk_size(batch, window)
    most = max(1, convolution._CACHED_VALUES // window)
    assert 1 <= size <= min(batch, most)
    assert size == batch or size == 1 or (size % 2 == 0 and size > most // 2)


def assert_equals_stock(inputs, kernel, padding):
    wide = inputs.astype("float64"), kernel.astype("float64")
    ours = value_and_gradients(lambda x, w: convolution.conv3x3(x, w, padding), inputs, kernel)
    stock = value_and_gradients(lambda x, w: stock_convolution(x, w, padding), *wide)
    for actual, expected in zip(ours, stock, strict=True):
        assert actual.dtype == inputs.dtype
        tolerance = 1e-12 if inputs.dtype == np.float64 else 1e-5
        assert_close(actual.astype("float64"), expected, tolerance)


@settings(max_examples=6)
@given(SHAPES, st.booleans(), st.integers(0, 2**31))
def test_pool_and_its_gradient_equal_the_stock_one_with_ties(shape, ties, seed):
    inputs = normal(seed, *shape)
    if ties:
        inputs = jnp.round(inputs)
    ours = value_and_gradients(convolution.max_pool_2x2, inputs)
    stock = value_and_gradients(stock_pool, inputs)
    for actual, expected in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
@pytest.mark.parametrize("padding", [pytest.param("SAME", marks=pytest.mark.slow), "VALID"])
def test_lower_precisions(dtype, tolerance, padding):
    inputs, kernel = normal(0, 2, 8, 8, 3, dtype=dtype), normal(1, 3, 3, 3, 4, dtype=dtype)

    def network(convolve, pool):
        return lambda x, w: pool(convolve(x, w, padding))

    ours = value_and_gradients(
        network(convolution.conv3x3, convolution.max_pool_2x2), inputs, kernel
    )
    wide = value_and_gradients(
        network(stock_convolution, stock_pool), inputs.astype("float64"), kernel.astype("float64")
    )
    assert ours[0].dtype == ours[1].dtype == ours[2].dtype == dtype
    assert_close(ours[0].astype("float64"), wide[0], tolerance)
    if dtype == "float32":  # in bfloat16 the winner of a window may differ
        assert_close(ours[1].astype("float64"), wide[1], tolerance)
        assert_close(ours[2].astype("float64"), wide[2], tolerance)


def loss(convolve, pool, kernel, inputs, padding="SAME"):
    return jnp.sum(jnp.sin(pool(convolve(inputs, kernel, padding))))


OURS = functools.partial(loss, convolution.conv3x3, convolution.max_pool_2x2)
STOCK = functools.partial(loss, stock_convolution, stock_pool)
BOTH = pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
QUICK = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [pytest.param("float32", 1e-5, marks=pytest.mark.slow), ("float64", 1e-12)],
)


@QUICK
def test_vmapped_over_kernels_under_jit(dtype, tolerance):
    kernels = normal(0, 3, 3, 3, 2, 4, dtype=dtype)
    inputs = normal(1, 3, 2, 6, 6, 2, dtype=dtype)
    ours = jax.jit(jax.vmap(jax.grad(OURS)))(kernels, inputs)
    stock = jax.jit(jax.vmap(jax.grad(STOCK)))(kernels, inputs)
    assert_close(ours, stock, tolerance)
    one_kernel = jax.jit(jax.vmap(jax.grad(OURS), (None, 0)))(kernels[0], inputs)
    stock = jax.jit(jax.vmap(jax.grad(STOCK), (None, 0)))(kernels[0], inputs)
    assert_close(one_kernel, stock, tolerance)


@pytest.mark.parametrize("mapped", [False, True])
def test_on_a_gpu_kernels_of_several_clients_multiply_patches(mapped):
    inputs, kernel = normal(0, 2, 6, 6, 3, dtype="float32"), normal(1, 3, 3, 3, 4, dtype="float32")
    train = jax.grad(lambda *pair: jnp.sum(jnp.sin(convolution.conv3x3(*pair))), (0, 1))
    if mapped:
        inputs, kernel, train = inputs[None], kernel[None], jax.vmap(train)
    lowered = jax.jit(train).trace(inputs, kernel).lower(lowering_platforms=("cuda",))
    assert ("stablehlo.convolution" in lowered.as_text()) == (not mapped)


@BOTH
def test_inside_scan(dtype, tolerance):
    kernel = normal(0, 3, 3, 2, 4, dtype=dtype)
    inputs = normal(1, 3, 2, 6, 6, 2, dtype=dtype)

    def train(loss):
        def step(kernel, inputs):
            return kernel - 0.1 * jax.grad(loss)(kernel, inputs), None

        return jax.jit(lambda kernel: jax.lax.scan(step, kernel, inputs)[0])(kernel)

    assert_close(train(OURS), train(STOCK), tolerance)


@pytest.mark.parametrize(
    ("check_vma", "dtype", "tolerance"),
    [
        (True, "float64", 1e-12),
        (False, "float32", 1e-5),
        pytest.param(True, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param(False, "float64", 1e-12, marks=pytest.mark.slow),
    ],
)
def test_inside_shard_map_with_replicated_kernel(check_vma, dtype, tolerance):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
    kernel = normal(0, 3, 3, 2, 4, dtype=dtype)
    inputs = normal(1, mesh.size * 2, 6, 6, 2, dtype=dtype)

    def local(kernel, inputs):
        gradient = jax.grad(OURS)(kernel, inputs)
        return gradient if check_vma else jax.lax.psum(gradient, "clients")

    over_devices = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=PartitionSpec(),
        check_vma=check_vma,
    )
    ours = jax.jit(over_devices)(kernel, inputs)
    assert_close(ours, jax.jit(jax.grad(STOCK))(kernel, inputs), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_of_inputs_is_not_computed_when_unused(dtype):
    kernel = normal(0, 3, 3, 5, 7, dtype=dtype)
    inputs = normal(1, 2, 6, 6, 5, dtype=dtype)

    def flops(argnums):
        function = jax.grad(lambda w, x: jnp.sum(jnp.sin(convolution.conv3x3(x, w))), argnums)
        return jax.jit(function).lower(kernel, inputs).compile().cost_analysis()["flops"]

    one_convolution = 2 * 2 * 6 * 6 * 9 * 5 * 7
    assert flops((0, 1)) - flops(0) > 0.7 * one_convolution
    assert flops(0) < 2.5 * one_convolution


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: convolution.conv3x3(x, w, "same"), "padding must be .* got 'same'"),
        (lambda x, w: convolution.conv3x3(x[0], w), "inputs must be"),
        (lambda x, w: convolution.conv3x3(x, w[:, :2]), "kernel must be"),
        (lambda x, w: convolution.conv3x3(x, w[:, :, :1]), "kernel must be"),
        (lambda x, w: convolution.conv3x3(x[:, :2], w, "VALID"), "inputs must have H, W >= 3"),
        (lambda x, w: convolution.max_pool_2x2(x[:, :1]), "inputs must be"),
    ],
)
def test_bad_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(0, 1, 4, 4, 2), normal(1, 3, 3, 2, 2))
