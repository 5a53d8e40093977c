"""Residual networks against a plain implementation that never sees the padded examples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.model import Variables
from fedcodist.core.trees import parameter_count
from fedcodist.models import resnet

MASK = np.array([1.0, 0.0, 1.0, 1.0])  # padding between real examples
NETWORKS = {
    "A, group": resnet.ResNet(blocks=1, classes=5, shortcut="A", norm="group"),
    "B, batch": resnet.ResNet(blocks=2, classes=5),
    "wide, batch": resnet.WideResNet(blocks=2, widening=2, classes=5),
}
SMALL = {
    "ResNet": resnet.ResNet(blocks=1, classes=5),
    "WideResNet": resnet.WideResNet(blocks=1, widening=1, classes=5),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def arbitrary_variables(module):
    """Float64 values, none of which hides a mistake as zeros and ones would."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    rng = np.random.default_rng(0)

    def values(leaf):
        if leaf.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape))
        return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(leaf.size / leaf.shape[-1]))

    variables = jax.tree.map(values, shapes)
    params = variables.pop("params")
    return Variables(params, variables)


def model_of(module):
    return from_flax_linen(module, jnp.zeros((1, 32, 32, 3), "float32"))


# The plain implementation.


def plain_convolution(inputs, kernel, stride=1):
    pad = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        inputs,
        kernel,
        (stride, stride),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


class PlainNormalization:
    """Textbook normalisation of whole batches; collects the new running averages."""

    def __init__(self, norm, mutable, train):
        self.group, self.running, self.train = norm == "group", mutable.get("batch_stats"), train
        self.updates = {}

    def __call__(self, x, params, *path):
        if self.group:
            grouped = x.reshape(*x.shape[:3], 2, x.shape[3] // 2)
            mean = grouped.mean((1, 2, 4), keepdims=True)
            var = ((grouped - mean) ** 2).mean((1, 2, 4), keepdims=True)
            x = ((grouped - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
        else:
            running = functools.reduce(lambda tree, key: tree[key], path, self.running)
            mean, var = running["mean"], running["var"]
            if self.train:
                mean = x.mean((0, 1, 2))
                var = ((x - mean) ** 2).mean((0, 1, 2))
            self.updates[path] = {
                "mean": 0.9 * running["mean"] + 0.1 * mean,
                "var": 0.9 * running["var"] + 0.1 * var,
            }
            x = (x - mean) / jnp.sqrt(var + 1e-5)
        return x * params["scale"] + params["bias"]


def plain_network(module, variables, x, train=True):
    params, normalize = variables.params, PlainNormalization(module.norm, variables.mutable, train)
    wide = isinstance(module, resnet.WideResNet)
    x = plain_convolution(x, params["stem"]["kernel"])
    if not wide:
        x = jnp.maximum(normalize(x, params["stem_norm"], "stem_norm"), 0)
    for stage in (1, 2, 3):
        for block in range(1, module.blocks + 1):
            name = f"stage{stage}_block{block}"
            p, stride = params[name], 2 if (stage, block) in ((2, 1), (3, 1)) else 1

            def norm(x, layer, p=p, name=name):
                return normalize(x, p[layer], name, layer)

            if wide:
                active = jnp.maximum(norm(x, "norm1"), 0)
                if "shortcut" in p:
                    x = plain_convolution(active, p["shortcut"]["kernel"], stride)
                y = plain_convolution(active, p["conv1"]["kernel"], stride)
                y = jnp.maximum(norm(y, "norm2"), 0)
                x = x + plain_convolution(y, p["conv2"]["kernel"])
            else:
                y = plain_convolution(x, p["conv1"]["kernel"], stride)
                y = jnp.maximum(norm(y, "norm1"), 0)
                y = norm(plain_convolution(y, p["conv2"]["kernel"]), "norm2")
                if stride == 2 and module.shortcut == "A":
                    x = jnp.concatenate([x[:, ::2, ::2], jnp.zeros_like(x[:, ::2, ::2])], axis=-1)
                elif stride == 2:
                    x = norm(plain_convolution(x, p["shortcut"]["kernel"], 2), "shortcut_norm")
                x = jnp.maximum(x + y, 0)
    if wide:
        x = jnp.maximum(normalize(x, params["output_norm"], "output_norm"), 0)
    x = x.sum((1, 2)) / 64
    return x @ params["output"]["kernel"] + params["output"]["bias"], normalize.updates


# Parameters.


@pytest.mark.parametrize("norm", ["batch", pytest.param("group", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "ten", "hundred"),
    [
        (functools.partial(resnet.resnet8, shortcut="A"), 75_290, 81_140),
        (resnet.resnet8, 78_042, 83_892),
        (functools.partial(resnet.resnet20, shortcut="A"), 269_722, 275_572),
        (resnet.resnet20, 272_474, 278_324),
        pytest.param(
            *(functools.partial(resnet.resnet56, shortcut="A"), 853_018, 858_868),
            marks=pytest.mark.slow,
        ),
        pytest.param(resnet.resnet56, 855_770, 861_620, marks=pytest.mark.slow),
        (resnet.wide_resnet16_2, 691_674, 703_284),
    ],
)
def test_parameter_totals(make, ten, hundred, norm):
    # Tracing the deep one takes a second: of a group-normalised one, 10 classes do.
    for classes, total in [(10, ten), (100, hundred)][: 2 if norm == "batch" else 1]:
        module = make(classes=classes, norm=norm)
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
        assert parameter_count(shapes["params"]) == total
        assert ("batch_stats" in shapes) == (norm == "batch")


def test_initial_kernels_are_he_normal():
    kernel = resnet.Convolution(256).init(jax.random.key(0), jnp.zeros((1, 4, 4, 64)))
    kernel = np.asarray(kernel["params"]["kernel"])
    assert kernel.shape == (3, 3, 64, 256) and abs(kernel.mean()) < 1e-3
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 64)), rtol=0.02)


# The convolution.


@settings(max_examples=10)
@given(
    st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(2, 4), st.integers(1, 5)),
    st.integers(1, 5),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
    st.integers(0, 2**31),
)
def test_convolution_and_its_gradients_equal_the_stock_one(shape, features, size, stride, seed):
    batch, height, width, channels = shape
    inputs = normal(seed, batch, 2 * height, 2 * width, channels)
    kernel = normal(seed + 1, size, size, channels, features)
    cotangent = normal(seed + 2, batch, 2 * height // stride, 2 * width // stride, features)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(convolve, inputs, kernel):
        outputs, pullback = jax.vjp(lambda x, w: convolve(x, w, stride), inputs, kernel)
        return outputs, pullback(cotangent)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-11),
        outputs_and_gradients(resnet.convolve, inputs, kernel),
        outputs_and_gradients(plain_convolution, inputs, kernel),
    )


@pytest.mark.parametrize("size", [1, 3])
def test_strided_convolution_under_transforms(size):
    """Mapped over kernels, in a loop, and over devices with a shared kernel."""
    kernels, inputs = normal(0, 3, size, size, 2, 4), normal(1, 3, 2, 6, 6, 2)

    def loss(convolve, kernel, inputs):
        return jnp.sum(jnp.sin(convolve(inputs, kernel, 2)))

    def everywhere(convolve):
        gradient = jax.grad(functools.partial(loss, convolve))

        def step(kernel, inputs):
            return kernel - 0.1 * gradient(kernel, inputs), None

        mapped = jax.jit(jax.vmap(gradient))(kernels, inputs)
        return mapped, jax.jit(lambda k: jax.lax.scan(step, k, inputs)[0])(kernels[0])

    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    jax.tree.map(close, everywhere(resnet.convolve), everywhere(plain_convolution))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("clients",))
    sharded = jax.shard_map(
        lambda kernel, inputs: jax.grad(functools.partial(loss, resnet.convolve))(
            kernel, inputs[0]
        ),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("clients")),
        out_specs=PartitionSpec(),
    )
    whole = jax.grad(functools.partial(loss, plain_convolution))(
        kernels[0], inputs.reshape(-1, *inputs.shape[2:])
    )
    close(jax.jit(sharded)(kernels[0], inputs), whole)


@pytest.mark.parametrize(("platform", "stock"), [("cpu", False), ("cuda", True)])
def test_strided_convolution_is_the_stock_one_only_off_the_cpu(platform, stock):
    traced = jax.jit(lambda x, w: resnet.convolve(x, w, 2)).trace(
        normal(0, 1, 4, 4, 2), normal(1, 3, 3, 2, 3)
    )
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.convolution" in program) == stock
    assert ("stablehlo.dot_general" in program) != stock


# The networks.


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "B, batch")) for n in NETWORKS]
)
def test_training_and_its_gradients_equal_the_plain_network_without_padding(name):
    module = NETWORKS[name]
    variables, images, weights = (
        arbitrary_variables(module),
        normal(1, 4, 32, 32, 3),
        normal(2, 3, 5),
    )
    real = MASK > 0
    images = jnp.where(real[:, None, None, None], images, 1e3)

    def ours(params):
        outputs, mutable = model_of(module).apply(
            Variables(params, variables.mutable), {"image": images}, train=True, mask=MASK
        )
        return jnp.sum(weights * outputs[real]), (outputs[real], mutable)

    def plain(params):
        values = Variables(params, variables.mutable)
        outputs, updates = plain_network(module, values, images[real])
        return jnp.sum(weights * outputs), (outputs, updates)

    run = lambda loss: jax.jit(jax.value_and_grad(loss, has_aux=True))(variables.params)
    (_, (outputs, mutable)), gradient = run(ours)
    (_, (expected, updates)), expected_gradient = run(plain)
    np.testing.assert_allclose(outputs, expected, rtol=1e-9, atol=1e-9)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8 * max(1, np.abs(b).max())),
        gradient,
        expected_gradient,
    )
    assert len(updates) == len(jax.tree.leaves(mutable)) // 2
    for path, expected_averages in updates.items():
        averages = functools.reduce(lambda tree, key: tree[key], path, mutable["batch_stats"])
        for key, value in expected_averages.items():
            np.testing.assert_allclose(averages[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_evaluation_uses_the_running_averages_and_changes_none(name):
    module = SMALL[name]
    variables, images = arbitrary_variables(module), normal(1, 3, 32, 32, 3)
    collections = {"params": variables.params, **variables.mutable}
    outputs, updates = jax.jit(lambda x: module.apply(collections, x, mutable=["batch_stats"]))(
        images
    )
    jax.tree.map(np.testing.assert_array_equal, dict(updates), variables.mutable)
    expected, _ = jax.jit(lambda x: plain_network(module, variables, x, train=False))(images)
    np.testing.assert_allclose(outputs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "ResNet")) for n in SMALL]
)
def test_devices_share_one_batch(name):
    network, images = model_of(SMALL[name]), normal(1, 4, 32, 32, 3)
    variables = arbitrary_variables(SMALL[name])
    apply = functools.partial(network.apply, variables, train=True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("clients",))
    shards = PartitionSpec("clients")
    outputs, mutable = jax.jit(
        jax.shard_map(
            lambda x, mask: apply({"image": x}, mask=mask, axis_name="clients"),
            mesh=mesh,
            in_specs=(shards, shards),
            out_specs=(shards, PartitionSpec()),
        )
    )(images, MASK)
    expected = jax.jit(lambda x, mask: apply({"image": x}, mask=mask))(images, MASK)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9),
        (outputs, dict(mutable)),
        (expected[0], dict(expected[1])),
    )


def test_every_normalisation_sums_over_devices():
    """Traced only: without a sum each device would normalise by its own part of the batch."""
    network, images = model_of(resnet.ResNet(1, 5, width=2)), jnp.zeros((4, 32, 32, 3))
    variables = jax.eval_shape(network.init, jax.random.key(0))
    apply = lambda values, x: network.apply(values, {"image": x}, train=True, axis_name="clients")
    shards = PartitionSpec("clients")
    sharded = jax.shard_map(
        apply,
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("clients",)),
        in_specs=(PartitionSpec(), shards),
        out_specs=shards,
        check_vma=False,
    )
    layers = len(jax.tree.leaves(variables.mutable)) // 2  # each has a mean and a variance
    assert str(jax.make_jaxpr(sharded)(variables, images)).count(" = psum") >= layers == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_loss_falls(name):
    network = model_of(SMALL[name])
    images = normal(0, 8, 32, 32, 3).astype("float32")
    batch = {"image": images, "label": jnp.arange(8) % 5}
    variables = jax.jit(network.init)(jax.random.key(0))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state, _):
        variables, moments = state

        def loss(params):
            outputs, mutable = network.apply(
                Variables(params, variables.mutable), batch, train=True
            )
            return jnp.mean(network.loss(outputs, batch)), mutable

        (value, mutable), gradient = jax.value_and_grad(loss, has_aux=True)(variables.params)
        updates, moments = optimizer.update(gradient, moments)
        return (Variables(optax.apply_updates(variables.params, updates), mutable), moments), value

    state = variables, optimizer.init(variables.params)
    _, losses = jax.jit(lambda state: jax.lax.scan(step, state, length=20))(state)
    assert np.isfinite(losses).all() and losses[-1] < 0.3 * losses[0]


def test_without_classes_both_give_the_mean_of_the_last_stage():
    for network, width in ((resnet.ResNet(1, None), 64), (resnet.WideResNet(1, 1, None), 64)):
        images = jnp.zeros((2, 32, 32, 3))
        shapes = jax.eval_shape(lambda n=network: n.init_with_output(jax.random.key(0), images)[0])
        assert shapes.shape == (2, width)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resnet.resnet20(shortcut="C"), "shortcut must be 'A' or 'B', got 'C'"),
        (lambda: resnet.resnet56(norm="layer"), "norm must be 'batch' or 'group', got 'layer'"),
        (lambda: resnet.wide_resnet16_2(norm=None), "norm must be 'batch' or 'group', got None"),
        (lambda: resnet.wide_resnet16_2(classes=1), "classes must be at least 2, got 1"),
        (lambda: resnet.ResNet(0), "blocks must be at least 1, got 0"),
        (lambda: resnet.WideResNet(0, 2), "blocks must be at least 1, got 0"),
        (lambda: resnet.WideResNet(2, 0), "widening must be at least 1, got 0"),
        (
            lambda: resnet.resnet20().init(jax.random.key(0), jnp.zeros((1, 24, 24, 3))),
            r"x must be \[B, 32, 32, 3\], got \(1, 24, 24, 3\)",
        ),
        (
            lambda: resnet.wide_resnet16_2().init(jax.random.key(0), jnp.zeros((32, 32, 3))),
            r"x must be \[B, 32, 32, 3\], got \(32, 32, 3\)",
        ),
        (lambda: resnet.convolve(jnp.zeros((1, 4, 4, 2)), jnp.zeros((3, 3, 2, 2)), 3), "stride"),
        (lambda: resnet.convolve(jnp.zeros((1, 5, 4, 2)), jnp.zeros((3, 3, 2, 2)), 2), "H and W"),
        (lambda: resnet.convolve(jnp.zeros((1, 4, 4, 2)), jnp.zeros((2, 2, 2, 2))), "kernel must"),
        (lambda: resnet.convolve(jnp.zeros((1, 4, 4, 2)), jnp.zeros((1, 1, 3, 2))), "kernel must"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
