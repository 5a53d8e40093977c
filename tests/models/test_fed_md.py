"""FedMD's networks: the paper's parameter counts, and a plain implementation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.model import Variables, from_flax_linen
from fedcodist.core.trees import parameter_count
from fedcodist.models import fed_md
from fedcodist.models.fed_md import TABLE_1, TABLE_2, FedMDNetwork, FullyConnected, Shape

# Trainable parameters of table 1 with 16 outputs, for images 28x28x1 and 32x32x3.
TABLE_1_PARAMETERS = [
    (989_440, 1_221_120),
    (1_483_392, 1_829_760),
    (1_977_344, 2_438_400),
    (1_285_888, 1_519_872),
    (2_568_704, 3_032_064),
    (366_464, 367_616),
    (283_328, 284_480),
    (580_416, 582_720),
    (233_728, 236_032),
    (316_864, 319_168),
]
# Of table 2, for images 32x32x3.
TABLE_2_PARAMETERS = [
    *(1_221_120, 319_168, 64_768, 83_072, 111_040),
    *(367_616, 284_480, 582_720, 236_032, 101_824),
]


def count(shape, *image):
    network = FedMDNetwork(shape.widths, shape.dropout)
    variables = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, *image)))
    assert parameter_count(variables["batch_stats"]) == 2 * sum(shape.widths)
    return parameter_count(variables["params"])


@pytest.mark.parametrize("index", range(10))
def test_parameters_of_table_1(index):
    counts = count(TABLE_1[index], 28, 28, 1), count(TABLE_1[index], 32, 32, 3)
    assert counts == TABLE_1_PARAMETERS[index]


@pytest.mark.parametrize("index", range(10))
def test_parameters_of_table_2(index):
    assert count(TABLE_2[index], 32, 32, 3) == TABLE_2_PARAMETERS[index]


def by_layers(widths):
    """Kernels, biases, two parameters of normalisation per feature, and 16 outputs per pixel."""
    sizes = {2: (3, 3), 3: (3, 2, 3), 4: (3, 2, 3, 3)}[len(widths)]
    pixels = 15 * 15 if len(widths) == 2 else 3 * 3
    channels = (3, *widths)
    layers = sum(
        k * k * before * after + 3 * after
        for k, before, after in zip(sizes, channels[:-1], channels[1:], strict=True)
    )
    return layers + pixels * widths[-1] * 16


def test_both_tables_are_the_sums_of_their_layers():
    assert [by_layers(shape.widths) for shape in TABLE_1] == [rgb for _, rgb in TABLE_1_PARAMETERS]
    assert [by_layers(shape.widths) for shape in TABLE_2] == TABLE_2_PARAMETERS


def test_the_tables_agree_where_the_paper_says_so():
    assert [TABLE_2[k] for k in (0, 5, 6, 7, 8)] == [TABLE_1[k] for k in (0, 5, 6, 7, 8)]
    assert fed_md.narrower(TABLE_1, 4)[3] == Shape((64, 64), 0.3)


# --------------------------------------------------------------------------- plain NumPy


def plain_convolution(x, layer, stride, same):
    kernel = np.asarray(layer["kernel"], np.float64)
    k = kernel.shape[0]
    if same:
        x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = ((n - k) // stride + 1 for n in x.shape[1:3])
    outputs = np.zeros((len(x), rows, columns, kernel.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            window = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
            outputs[:, i, j] = np.tensordot(window, kernel, 3)
    return outputs + np.asarray(layer["bias"])


def plain_pool(x, stride):
    """Averages over pixels inside the image; with stride 2 over whole windows only."""
    size = x.shape[1] // 2 if stride == 2 else x.shape[1]
    outputs = np.zeros((len(x), size, size, x.shape[-1]))
    for i in range(size):
        for j in range(size):
            window = x[:, i * stride : i * stride + 2, j * stride : j * stride + 2]
            outputs[:, i, j] = window.mean((1, 2))
    return outputs


def plain_network(variables, x, widths, train):
    """Logits, and the running averages after a step where there is one."""
    params, running, after = variables.params, variables.mutable["batch_stats"], {}

    def block(x, index, stride, same):
        x = plain_convolution(x, params[f"conv{index}"], stride, same)
        norm, old = params[f"norm{index}"], running[f"norm{index}"]
        mean, var = old["mean"], old["var"]
        if train:
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            after[f"norm{index}"] = {
                "mean": 0.99 * old["mean"] + 0.01 * mean,
                "var": 0.99 * old["var"] + 0.01 * var,
            }
        x = (x - mean) / np.sqrt(var + 1e-3) * norm["scale"] + norm["bias"]
        return np.maximum(x, 0)

    x = plain_pool(block(x, 1, 1, True), 1)
    if len(widths) == 2:
        x = block(x, 2, 2, False)
    else:
        x = block(plain_pool(block(x, 2, 2, False), 2), 3, 2, False)
    if len(widths) == 4:
        x = block(x, 4, 1, True)
    return x.reshape(len(x), -1) @ np.asarray(params["output"]["kernel"]), after


@pytest.mark.parametrize(
    "widths, size", [((3, 4), 8), ((3, 4), 7), ((3, 4, 2), 14), ((3, 4, 2, 3), 14)]
)
def test_the_network_is_the_plain_one(widths, size):
    """Padded examples are left out: the plain network never sees them."""
    with jax.enable_x64(True):
        model = from_flax_linen(FedMDNetwork(widths, 0.0, 5), jnp.zeros((1, size, size, 2)))
        generator = np.random.default_rng(0)
        variables = jax.tree.map(
            lambda leaf: (
                jnp.asarray(generator.uniform(0.5, 1.5, leaf.shape))
                if leaf.ndim == 1
                else jnp.asarray(generator.normal(size=leaf.shape))
            ),
            jax.eval_shape(model.init, jax.random.key(0)),
        )
        images = generator.normal(size=(4, size, size, 2))
        batch, mask = {"image": jnp.asarray(images)}, jnp.array([1.0, 1.0, 1.0, 0.0])
        for train in (False, True):
            logits, mutable = jax.jit(model.apply, static_argnames="train")(
                variables, batch, train=train, mask=mask
            )
            expected, after = plain_network(variables, images[:3], widths, train)
            np.testing.assert_allclose(logits[:3], expected, rtol=1e-5, atol=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            mutable["batch_stats"],
            after,
        )


@pytest.mark.parametrize("widths, size", [((3, 4), 8), ((3, 4, 2, 3), 14)])
def test_gradients_are_the_plain_networks_differences(widths, size):
    """Along random directions of parameters and images, in training."""
    with jax.enable_x64(True):
        model = from_flax_linen(FedMDNetwork(widths, 0.0, 5), jnp.zeros((1, size, size, 2)))
        generator = np.random.default_rng(0)
        draw = lambda like: generator.normal(size=like.shape)
        variables = jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))
        images, cotangent = generator.normal(size=(3, size, size, 2)), generator.normal(size=(3, 5))

        def loss(params, images):
            logits, _ = model.apply(
                Variables(params, variables.mutable), {"image": images}, train=True
            )
            return jnp.sum(jnp.sin(logits) * cotangent)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables.params, jnp.asarray(images))
        for _ in range(3):
            direction = jax.tree.map(draw, gradient)

            def plain(step, direction=direction):
                params, moved = jax.tree.map(
                    lambda leaf, way: leaf + step * way, (variables.params, images), direction
                )
                moved_variables = Variables(params, variables.mutable)
                logits, _ = plain_network(moved_variables, moved, widths, True)
                return np.sum(np.sin(logits) * cotangent)

            expected = (plain(1e-6) - plain(-1e-6)) / 2e-6
            products = jax.tree.map(lambda leaf, way: np.sum(leaf * way), gradient, direction)
            assert sum(jax.tree.leaves(products)) == pytest.approx(expected, rel=1e-5)


def test_every_block_drops_features_by_a_key_of_its_own(monkeypatch):
    calls, real = [], fed_md.relu_and_dropout

    def watched(features, rate, key):
        calls.append((rate, tuple(jax.random.key_data(key).tolist())))
        return real(features, rate, key)

    monkeypatch.setattr(fed_md, "relu_and_dropout", watched)
    model = from_flax_linen(FedMDNetwork((2, 2, 2), 0.3, 3), jnp.zeros((1, 12, 12, 1)))
    variables = model.init(jax.random.key(0))
    calls.clear()
    model.apply(variables, {"image": jnp.ones((2, 12, 12, 1))}, train=True, key=jax.random.key(1))
    assert [rate for rate, _ in calls] == [0.3] * 3
    assert len({key for _, key in calls}) == 3


def test_bytes_are_the_same_as_floats():
    network = FedMDNetwork((2, 2), 0.0, 3)
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 1), np.uint8)
    variables = network.init(jax.random.key(0), images)
    as_floats = network.apply(variables, images.astype(np.float32))
    np.testing.assert_array_equal(network.apply(variables, images), as_floats)


def test_a_mask_of_another_shape_is_refused():
    network, images = FedMDNetwork((2, 2), 0.0, 3), jnp.ones((4, 5, 5, 1))
    variables = jax.eval_shape(network.init, jax.random.key(0), images)
    with pytest.raises(ValueError, match=r"mask must have shape \(4,\), got \(3,\)"):
        jax.eval_shape(
            lambda v: network.apply(v, images, train=True, mask=jnp.ones(3), mutable=True),
            variables,
        )


def test_the_fourth_convolution_keeps_the_size():
    network = FedMDNetwork((2, 2, 2, 3), 0.0, 5)
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    assert shapes["params"]["conv4"]["kernel"].shape == (3, 3, 2, 3)
    assert shapes["params"]["output"]["kernel"].shape == (3 * 3 * 3, 5)


def test_dropout_is_for_training_only():
    model = from_flax_linen(FedMDNetwork((4, 4), 0.5, 3), jnp.zeros((1, 6, 6, 1)))
    variables, batch = model.init(jax.random.key(0)), {"image": jnp.ones((2, 6, 6, 1))}
    draw = jax.jit(
        lambda seed, train: model.apply(variables, batch, train=train, key=jax.random.key(seed)),
        static_argnums=1,
    )
    assert (draw(0, False)[0] == draw(1, False)[0]).all()
    assert (draw(0, True)[0] != draw(1, True)[0]).any()


@pytest.mark.parametrize("network", [FedMDNetwork((2, 3), 0.1, 4), FullyConnected(3, 4)], ids=str)
def test_the_penalty_is_of_the_output_layer_alone(network):
    params = network.init(jax.random.key(0), jnp.ones((1, 5, 5, 1)))["params"]
    penalised = lambda p: 1e-2 * jnp.sum(p["output"]["kernel"] ** 2)
    zeros = jax.tree.map(jnp.zeros_like, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        fed_md.output_penalty(1e-2)(zeros, params),
        jax.grad(penalised)(params),
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FedMDNetwork((8,)), r"widths must be two to four positive numbers, got \(8,\)"),
        (lambda: FedMDNetwork((8, 8), dropout=1.0), r"^dropout must be .* below 1, got 1\.0"),
        (lambda: FedMDNetwork((8, 0)), r"widths\[1\] must be at least 1, got 0"),
        (lambda: FedMDNetwork((8, 2.5)), r"widths\[1\] must be an integer of at least 1, got 2.5"),
        (lambda: fed_md.narrower(TABLE_1, 0), "divisor must be at least 1, got 0"),
        (
            lambda: fed_md.narrower(TABLE_1, 65),
            "divisor must be at most 64, the features of the narr",
        ),
        (lambda: FedMDNetwork((8, 8), classes=1), "classes must be at least 2, got 1"),
        (lambda: FullyConnected(0), "hidden must be at least 1, got 0"),
        (lambda: FullyConnected(4, classes=1), "classes must be at least 2, got 1"),
        (
            lambda: FedMDNetwork((8, 8, 8)).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1))),
            r"H, W >= 12 for widths \(8, 8, 8\)",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_init_has_no_state_to_hide():
    variables = from_flax_linen(FedMDNetwork((2, 2)), jnp.zeros((1, 6, 6, 1))).init(
        jax.random.key(0)
    )
    assert isinstance(variables, Variables)
    bound = np.sqrt(6 / (9 * 1 + 9 * 2))  # Glorot's, of a 3x3 kernel from 1 to 2 features
    kernel = np.abs(variables.params["conv1"]["kernel"])
    assert 0.5 * bound < kernel.max() <= bound
