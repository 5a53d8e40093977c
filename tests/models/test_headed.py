"""Networks of an embedding and a linear head."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from never_in_training import REFUSAL, NeverInTraining

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.exits import Exits, with_exits
from fedcodist.models.fed_md import FedMDNetwork, FullyConnected
from fedcodist.models.headed import (
    HEAD,
    apply_head,
    check_heads,
    embedding_of,
    headed,
    split_head,
    with_head,
)
from fedcodist.models.multi_headed import multi_headed

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 1)), jnp.float32)


def test_logits_are_the_heads_of_the_embedding():
    model = headed(FullyConnected(16, None), IMAGES[:1], classes=3, width=5)
    variables = model.init(jax.random.key(0))
    outputs, _ = model.apply(variables, {"image": IMAGES})
    assert embedding_of(outputs).shape == (4, 5) and model.num_classes == 3
    expected = np.asarray(embedding_of(outputs)) @ np.asarray(variables.params[HEAD]["kernel"])
    np.testing.assert_allclose(outputs.logits, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        apply_head(variables.params[HEAD], embedding_of(outputs)), outputs.logits, rtol=1e-6
    )


def test_a_head_is_taken_out_and_put_in():
    model = headed(FullyConnected(16, None), IMAGES[:1], classes=3)
    params = model.init(jax.random.key(0)).params
    body, head = split_head(params)
    assert HEAD not in body and set(with_head(body, head)) == set(params)


def test_a_backbone_with_batch_statistics_is_told_of_training():
    model = headed(FedMDNetwork((4, 4), 0.2, None), IMAGES[:1], classes=4, width=6)
    variables = model.init(jax.random.key(0))
    batch = {"image": IMAGES}
    _, mutable = model.apply(variables, batch, train=True, key=jax.random.key(1), mask=jnp.ones(4))
    before, after = jax.tree.leaves(variables.mutable), jax.tree.leaves(mutable)
    assert before and any((old != new).any() for old, new in zip(before, after, strict=True))


def test_heads_of_one_shape_are_asked_for():
    wide = headed(FullyConnected(16, None), IMAGES[:1], classes=3, width=5)
    narrow = headed(FullyConnected(8, None), IMAGES[:1], classes=3, width=5)
    other = headed(FullyConnected(8, None), IMAGES[:1], classes=3)
    plain = from_flax_linen(FullyConnected(8, 3), IMAGES[:1])
    assert check_heads("groups", {"wide": wide, "narrow": narrow}) == (5, 3)
    with pytest.raises(ValueError, match="groups must have models whose heads have one shape"):
        check_heads("groups", {"wide": wide, "other": other})
    with pytest.raises(ValueError, match=r"groups must have models with a linear head.*'plain'"):
        check_heads("groups", {"wide": wide, "plain": plain})


def test_bad_sizes_are_named():
    for arguments, message in ((dict(classes=1), "classes"), (dict(classes=3, width=0), "width")):
        with pytest.raises(ValueError, match=message):
            headed(nn.Dense(8), jnp.zeros((1, 4)), **arguments)
    for arguments, message in (
        (dict(classes=3.0), "classes"),
        (dict(classes=3, width="5"), "width"),
    ):
        with pytest.raises(TypeError, match=f"^{message} must be an integer of at least "):
            headed(nn.Dense(8), jnp.zeros((1, 4)), **arguments)
    with pytest.raises(ValueError, match=r"backbone must return \[batch, width\]"):
        headed(nn.Conv(8, (3, 3)), IMAGES[:1], classes=3)


class Both(nn.Module):
    """Reads two columns, and has no parameter `train`."""

    @nn.compact
    def __call__(self, batch):
        return nn.Dense(4)(jnp.concatenate([batch["image"], batch["age"]], axis=-1))


EXAMPLE_OF_BOTH = {"image": jnp.zeros((1, 3)), "age": jnp.zeros((1, 1))}


@pytest.mark.parametrize(
    "make",
    [
        lambda inputs: headed(Both(), EXAMPLE_OF_BOTH, 3, inputs=inputs),
        lambda inputs: multi_headed(Both(), EXAMPLE_OF_BOTH, 3, heads=1, inputs=inputs),
        lambda inputs: with_exits(Exits([Both()], classes=3), EXAMPLE_OF_BOTH, inputs=inputs),
    ],
    ids=["headed", "multi_headed", "with_exits"],
)
def test_a_backbone_may_read_several_columns(make):
    model = make(("image", "age"))
    variables = model.init(jax.random.key(0))
    batch = lambda age: {"image": jnp.ones((2, 3)), "age": age}
    logits = lambda age: model.apply(variables, batch(age))[0].logits
    assert set(model.inputs) == {"image", "age"}
    assert not np.allclose(logits(jnp.zeros((2, 1))), logits(jnp.ones((2, 1))))


def test_a_part_whose_dropout_would_never_be_on_is_refused():
    with pytest.raises(ValueError, match=rf"^backbone {REFUSAL}"):
        headed(NeverInTraining(), IMAGES[:1], 3)
    # A Sequential does not pass `train` on to its layers.
    flat = lambda x: x.reshape(len(x), -1)
    for layer in (
        BatchNormMLP((4,), None),
        nn.BatchNorm(use_running_average=True),
        nn.Dropout(0.5, deterministic=True),
    ):
        with pytest.raises(ValueError, match=rf"^backbone {REFUSAL} and pass it to its layers"):
            headed(nn.Sequential([flat, layer]), IMAGES[:1], 3)
    headed(nn.Sequential([flat, nn.Dense(4), nn.relu]), IMAGES[:1], 3)
