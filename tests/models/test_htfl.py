"""HtFLlib's networks: as many parameters as its own, and layers against plain ones."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.trees import parameter_count
from fedcodist.models.googlenet import GoogLeNet
from fedcodist.models.headed import HEAD, Headed, check_heads, embedding_of, headed
from fedcodist.models.htfl import BACKBONES, GROUPS, adaptive_means, htfl_backbone
from fedcodist.models.mobilenet import MobileNetV2
from fedcodist.models.resnet_imagenet import ImageNetResNet, Stem, max_pool_3x3, resnet18

# Of 10 classes and 512 features, counted in HtFLlib's BaseHeadSplit at commit e959261 with torch 2.13.0
# and torchvision 0.28.0. There, the same weights give the same logits as here to 4e-15 (float64) for the
# CNN, GoogLeNet, MobileNetV2, ResNet-8 and ResNet-50.
COUNTS = {
    "htfl_cnn": 878_538,
    "htfl_googlenet": 5_605_034,
    "htfl_mobilenet_v2": 2_229_002,
    "htfl_resnet4": 88_650,
    "htfl_resnet6": 318_794,
    "htfl_resnet8": 1_237_834,
    "htfl_resnet10": 4_910_922,
    "htfl_resnet18": 11_181_642,
    "htfl_resnet34": 21_289_802,
    "htfl_resnet50": 23_513_162,
    "htfl_resnet101": 42_505_290,
    "htfl_resnet152": 58_148_938,
}
DEEP = ("htfl_resnet101", "htfl_resnet152")
IMAGES = jnp.zeros((1, 32, 32, 3))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in DEEP else []) for n in COUNTS],
)
def test_networks_have_as_many_parameters_as_htfllibs(name):
    module = Headed(htfl_backbone(name), classes=10)
    params = jax.eval_shape(module.init, jax.random.key(0), IMAGES)["params"]
    assert parameter_count(params) == COUNTS[name]
    assert params[HEAD]["kernel"].shape == (512, 10)


def test_groups_are_of_networks_that_are_there():
    assert set(BACKBONES) == set(COUNTS)
    assert {name for group in GROUPS.values() for name in group} == set(BACKBONES)
    sizes = {name: len(group) for name, group in GROUPS.items() if name.startswith("htfe")}
    assert all(name.endswith(f"_{size}") for name, size in sizes.items())


@pytest.mark.parametrize(
    ("features", "width"), [(64, 512), (1280, 512), (2048, 512), (512, 512), (5, 3), (3, 7)]
)
def test_adaptive_means_are_those_of_neighbouring_features(features, width):
    x = np.random.default_rng(0).normal(size=(2, features)).astype(np.float32)
    expected = np.empty((2, width))
    for i in range(width):
        first = int(np.floor(i * features / width))
        last = int(np.ceil((i + 1) * features / width))
        expected[:, i] = x[:, first:last].mean(1)
    np.testing.assert_allclose(adaptive_means(jnp.asarray(x), width), expected, atol=2e-6)


def test_the_cnn_is_conv_relu_pool_conv_relu_pool_dense_relu():
    model = headed(htfl_backbone("htfl_cnn"), IMAGES, classes=10)
    variables = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    layers = variables.params["backbone"]["backbone"]
    y = x
    for name in ("conv1", "conv2"):
        y = jax.lax.conv_general_dilated(
            y, layers[name]["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jax.nn.relu(y + layers[name]["bias"])
        size = y.shape[1] // 2
        y = y.reshape(2, size, 2, size, 2, -1).max((2, 4))
    y = y.reshape(2, -1) @ layers["dense"]["kernel"] + layers["dense"]["bias"]
    outputs, _ = model.apply(variables, {"image": x})
    np.testing.assert_allclose(embedding_of(outputs), jax.nn.relu(y), rtol=2e-4, atol=2e-5)


def test_networks_of_a_group_have_heads_of_one_shape():
    models = {n: headed(htfl_backbone(n, 48), IMAGES, 7) for n in GROUPS["htfl_small"]}
    assert check_heads("groups", models) == (48, 7)


def test_dropout_is_on_in_training_alone():
    model = headed(htfl_backbone("htfl_mobilenet_v2"), IMAGES, classes=10)
    variables = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape), jax.eval_shape(model.init, jax.random.key(0))
    )
    x = {"image": jax.random.normal(jax.random.key(1), (4, 32, 32, 3))}
    answer = jax.jit(lambda key: model.apply(variables, x, train=True, key=key)[0].logits)
    first, second, again = (answer(jax.random.key(seed)) for seed in (0, 1, 0))
    assert (first == again).all() and (first != second).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: htfl_backbone("htfl_cnn", 0), "width must be at least 1, got 0"),
        (
            lambda: headed(htfl_backbone("htfl_cnn"), jnp.zeros((1, 28, 28, 1)), 10),
            r"x must be \[B, 32, 32, C\], got \(1, 28, 28, 1\)",
        ),
        (
            lambda: headed(htfl_backbone("htfl_resnet4"), jnp.zeros((1, 8, 8, 1)), 10),
            r"x must be \[B, H, W, C\], H and W multiples of 32",
        ),
        (
            lambda: headed(htfl_backbone("htfl_googlenet"), jnp.zeros((1, 8, 8, 1)), 10),
            r"x must be \[B, H, W, C\], H and W multiples of 32",
        ),
        (
            lambda: headed(htfl_backbone("htfl_mobilenet_v2"), jnp.zeros((1, 8, 8, 1)), 10),
            r"x must be \[B, H, W, C\], H and W multiples of 32",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(make().init, jax.random.key(0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[
            case
            for network in (GoogLeNet, MobileNetV2)
            for case in (
                (lambda n=network: n(classes=0), "classes must be at least 2, got 0"),
                (
                    lambda n=network: n(dropout=1.5),
                    "dropout must be at least 0 and below 1, got 1.5",
                ),
                (
                    lambda n=network: n(dropout=-1.0),
                    "dropout must be at least 0 and below 1, got -1",
                ),
                (
                    lambda n=network: n(dropout="0"),
                    "dropout must be a number at least 0 and below 1",
                ),
            )
        ],
        (lambda: resnet18(classes=0), "classes must be at least 2, got 0"),
        (lambda: ImageNetResNet(3), "blocks must be a list, got 3"),
        (lambda: ImageNetResNet(()), "blocks must not be empty"),
        (lambda: ImageNetResNet((2, 0)), r"blocks\[1\] must be at least 1, got 0"),
        (
            lambda: ImageNetResNet((2,), bottleneck="no"),
            "bottleneck must be True or False, got 'no'",
        ),
    ],
)
def test_sizes_are_checked_when_a_network_is_made(make, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [(8, 12), (4, 4)])
def test_the_stems_layers_are_the_stock_ones_and_have_their_gradients(size):
    draws = np.random.default_rng(0)
    with jax.enable_x64(True):
        x = jnp.asarray(draws.normal(size=(2, *size, 3)))
        kernel = jnp.asarray(draws.normal(size=(7, 7, 3, 5)))

        def ours(x, kernel):
            return max_pool_3x3(Stem(5).apply({"params": {"kernel": kernel}}, x))

        def stock(x, kernel):
            y = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), ((3, 3), (3, 3)), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return nn.max_pool(y, (3, 3), (2, 2), ((1, 1), (1, 1)))

        np.testing.assert_allclose(ours(x, kernel), stock(x, kernel), rtol=1e-12, atol=1e-12)
        gradients = [
            jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), (0, 1))(x, kernel)
            for f in (ours, stock)
        ]
        for own, theirs in zip(*gradients, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-10, atol=1e-10)
