"""A backbone with several heads, backbones without an output layer, and the ResNets of ImageNet."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.metrics import accuracy
from fedcodist.core.trees import parameter_count
from fedcodist.models import CNN, MLP, BatchNormMLP, FedMDNetwork, FullyConnected, ResNet
from fedcodist.models.multi_headed import HeadedOutputs, multi_headed
from fedcodist.models.resnet_imagenet import resnet18, resnet34

IMAGES = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
BATCH = {"image": jnp.asarray(IMAGES), "label": jnp.array([0, 1, 2, 0, 1])}


def shapes(model):
    return jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))


def test_heads_are_linear_maps_of_one_embedding():
    model = multi_headed(MLP((4,), classes=None), IMAGES[:1], 3, heads=2, projection=7)
    variables = model.init(jax.random.key(0))
    outputs, mutable = model.apply(variables, BATCH)
    params = jax.tree.map(np.asarray, variables.params)
    dense = params["backbone"]["Dense_0"]
    embedding = np.maximum(IMAGES @ dense["kernel"] + dense["bias"], 0)
    heads = [(params["main"]["kernel"], params["main"]["bias"])]
    heads += list(zip(params["aux"]["kernel"], params["aux"]["bias"], strict=True))
    expected = np.stack([embedding @ kernel + bias for kernel, bias in heads], axis=1)
    np.testing.assert_allclose(outputs.logits, expected, atol=1e-5)
    projected = embedding @ params["projection"]["kernel"]
    np.testing.assert_allclose(outputs.embedding, projected, atol=1e-5)
    assert outputs.logits.shape == (5, 3, 3) and model.num_classes == 3 and mutable == {}

    main = from_flax_linen(MLP((4,), classes=3), IMAGES[:1])
    np.testing.assert_allclose(
        model.loss(outputs, BATCH), main.loss(jnp.asarray(expected[:, 0]), BATCH), atol=1e-5
    )
    for head, name in enumerate(("accuracy", "accuracy_head_1", "accuracy_head_2")):
        right, weights = model.metrics[name](outputs, BATCH)
        np.testing.assert_array_equal(right, expected[:, head].argmax(-1) == BATCH["label"])
        assert weights.tolist() == [1] * 5


def test_without_auxiliary_heads_there_are_no_parameters_of_them_and_the_rest_is_the_same():
    backbone = MLP((4,), classes=None)
    alone, several = (multi_headed(backbone, IMAGES[:1], 3, heads=m) for m in (0, 3))
    first, second = (model.init(jax.random.key(1)).params for model in (alone, several))
    assert set(first) == {"backbone", "main"} and set(second) == {"backbone", "main", "aux"}
    jax.tree.map(np.testing.assert_array_equal, first, {n: second[n] for n in first})
    assert alone.apply(alone.init(jax.random.key(1)), BATCH)[0].logits.shape == (5, 1, 3)
    assert parameter_count(second) - parameter_count(first) == 3 * (4 * 3 + 3)
    # Heads start apart: no gradient could part two that are alike.
    kernel = second["aux"]["kernel"]
    assert np.abs(kernel[0] - kernel[1]).min() > 0
    assert abs(np.std(kernel) - 0.5) < 0.2  # variance 1 / fan-in, of one head's inputs


def test_train_and_mask_reach_the_backbone():
    model = multi_headed(BatchNormMLP((4,), classes=None), IMAGES[:1], 3, heads=1)
    variables = model.init(jax.random.key(0))
    mask = jnp.array([1.0, 1.0, 1.0, 0.0, 0.0])
    outputs, mutable = model.apply(variables, BATCH, train=True, mask=mask)
    few, same = model.apply(variables, {"image": BATCH["image"][:3]}, train=True)
    np.testing.assert_allclose(outputs.logits[:3], few.logits, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mutable, same)
    outputs, unchanged = model.apply(variables, BATCH)
    jax.tree.map(np.testing.assert_array_equal, unchanged, variables.mutable)
    assert np.abs(outputs.logits[:3] - few.logits).max() > 1e-3


@pytest.mark.parametrize(
    ("network", "shape", "width"),
    [
        pytest.param(
            *(lambda classes: MLP((5, 4), classes=classes), (8, 8, 1), 4), marks=pytest.mark.slow
        ),
        (lambda classes: BatchNormMLP((5,), classes=classes), (8, 8, 1), 5),
        pytest.param(
            *(lambda classes: CNN((2, 3, 3), (6, 9), classes, 24), (24, 24, 3), 9),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(lambda classes: ResNet(1, classes, width=4), (32, 32, 3), 16), marks=pytest.mark.slow
        ),
        (lambda classes: FedMDNetwork((2, 3), 0.0, classes), (8, 8, 1), 27),
        pytest.param(
            *(lambda classes: FullyConnected(7, classes), (8, 8, 1), 7), marks=pytest.mark.slow
        ),
    ],
)
def test_networks_without_classes_return_what_the_output_layer_gets(network, shape, width):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, *shape)), jnp.float32)
    whole = network(3)
    variables = whole.init(jax.random.key(0), x)
    params = dict(variables["params"])
    output = params.pop(list(params)[-1] if "output" not in params else "output")
    others = {name: value for name, value in variables.items() if name != "params"}
    embedding = network(None).apply({"params": params, **others}, x)
    assert embedding.shape == (2, width)
    logits = embedding @ output["kernel"] + output.get("bias", 0)
    np.testing.assert_allclose(logits, whole.apply(variables, x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "count"), [(resnet18, 11_689_512), (resnet34, 21_797_672)])
def test_imagenet_resnets_have_the_papers_parameters(network, count):
    example = jnp.zeros((1, 224, 224, 3))
    assert parameter_count(shapes(from_flax_linen(network(), example)).params) == count
    sizes = [
        parameter_count(shapes(multi_headed(network(classes=None), example, 1000, m)).params)
        for m in (0, 1, 4)
    ]
    assert sizes == [count, count + 513_000, count + 4 * 513_000]


@pytest.mark.slow
def test_imagenet_resnet_halves_the_image_five_times():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 32, 3)), jnp.float32)
    network = resnet18(classes=None)
    variables = network.init(jax.random.key(0), x)
    assert network.apply(variables, x).shape == (2, 512)
    embedding, mutable = network.apply(variables, x, train=True, mutable=["batch_stats"])
    assert np.isfinite(embedding).all()
    assert mutable["batch_stats"]["stem_norm"]["mean"].shape == (64,)
    with pytest.raises(ValueError, match="multiples of 32, got"):
        jax.eval_shape(network.init, jax.random.key(0), x[:, :40])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: multi_headed(MLP((4,), classes=None), IMAGES[:1], 1),
            "classes must be at least 2",
        ),
        (
            lambda: multi_headed(MLP((4,), classes=None), IMAGES[:1], 3, heads=-1),
            "heads must be at least 0, got -1",
        ),
        (
            lambda: multi_headed(MLP((4,), classes=None), IMAGES[:1], 3, heads=1.5),
            "heads must be an integer of at least 0, got 1.5",
        ),
        (
            lambda: multi_headed(MLP((4,), classes=None), IMAGES[:1], 3, projection=0),
            "projection must be at least 1, got 0",
        ),
        (
            lambda: multi_headed(nn.Dense(3), jnp.zeros((1, 2, 2)), 3),
            r"backbone must return \[batch, width\], got \(1, 2, 3\)",
        ),
        (lambda: ResNet(1, width=3), "width must be an even number of at least 2, got 3"),
    ],
)
def test_bad_numbers_are_one_clear_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_outputs_lead_with_the_logits():
    assert HeadedOutputs._fields[0] == "logits"  # a Model reads its number of classes off them


def test_auxiliary_heads_have_the_accuracy_of_the_main_head():
    """Not one of column `label`, which there may not be."""
    model = multi_headed(
        nn.Dense(4),
        jnp.zeros((1, 6)),
        classes=3,
        heads=1,
        loss=lambda logits, batch: jnp.zeros(len(logits)),
        metrics={"accuracy": accuracy("y")},
    )
    assert list(model.metrics) == ["accuracy", "accuracy_head_1"]
    batch = {"image": BATCH["image"], "y": jnp.array([2, 1, 0, 2, 2])}
    outputs, _ = model.apply(model.init(jax.random.key(0)), batch)
    for head, metric in enumerate(model.metrics.values()):
        right = outputs.logits[:, head].argmax(-1) == batch["y"]
        np.testing.assert_array_equal(metric(outputs, batch)[0], right)
