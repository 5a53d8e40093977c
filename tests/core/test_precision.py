"""Models in bfloat16: close to float32, with parameters and statistics in float32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.flatten_util import ravel_pytree

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.core.precision import in_bfloat16
from fedcodist.models.cnn import small_cnn
from fedcodist.models.resnet import resnet20

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, CLASSES, BATCH = 5, 3, 16


class Smooth(nn.Module):
    """A network without units that rounding switches on or off."""

    @nn.compact
    def __call__(self, x):
        for width in (16, 8):
            x = jnp.tanh(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


NETWORKS = {
    "smooth": (Smooth(), (FEATURES,)),
    "cnn": (small_cnn(classes=CLASSES), (24, 24, 3)),
    "resnet": (resnet20(classes=CLASSES), (32, 32, 3)),
}


@functools.cache
def model_of(name):
    network, shape = NETWORKS[name]
    return from_flax_linen(network, jnp.zeros((1, *shape)))


def batch_of(name, seed):
    draws, shape = np.random.default_rng(seed), NETWORKS[name][1]
    return {
        "image": jnp.asarray(draws.normal(size=(BATCH, *shape)), jnp.float32),
        "label": jnp.asarray(draws.integers(0, CLASSES, BATCH), jnp.int32),
    }


@functools.cache
def gradients(name, precision):
    """Jitted (variables, batch) -> (outputs, mutable, gradient of the mean loss)."""
    model = model_of(name)
    if precision == "bfloat16":
        model = in_bfloat16(model)

    def loss(params, mutable, batch):
        outputs, mutable = model.apply(
            Variables(params, mutable),
            batch,
            train=True,
            key=jax.random.key(0),
            mask=jnp.ones(BATCH),
        )
        return jnp.mean(model.loss(outputs, batch)), (outputs, mutable)

    def of(variables, batch):
        gradient, others = jax.grad(loss, has_aux=True)(*variables, batch)
        return *others, gradient

    return jax.jit(of)


def assert_near(found, expected, share):
    """The error is a small part of the whole, both as long vectors."""
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((found, expected)))
    ours, theirs = (np.asarray(ravel_pytree(tree)[0]) for tree in (found, expected))
    assert 0 < np.linalg.norm(ours - theirs) <= share * np.linalg.norm(theirs)


@given(seed=st.integers(0, 999))
@settings(max_examples=15)
def test_outputs_and_gradients_are_near_float32(seed):
    name = "smooth"
    variables, batch = model_of(name).init(jax.random.key(seed)), batch_of(name, seed)
    found, expected = (gradients(name, p)(variables, batch) for p in ("bfloat16", "float32"))
    # bfloat16 has 8 bits: an error of 0.4% in each operation.
    assert_near(found[0], expected[0], 0.02)
    assert_near(found[2], expected[2], 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_networks_with_convolutions_and_statistics(name):
    variables, batch = model_of(name).init(jax.random.key(0)), batch_of(name, 0)
    found, expected = (gradients(name, p)(variables, batch) for p in ("bfloat16", "float32"))
    # Rounding switches units on and off, and normalisation amplifies that layer by layer.
    assert_near(found[:2], expected[:2], 0.05)
    assert_near(found[2], expected[2], {"cnn": 0.3, "resnet": 0.8}[name])


def products(jaxpr):
    """The types of the operands of all matrix products and convolutions, nested ones too."""
    for equation in jaxpr.eqns:
        if equation.primitive in (lax.dot_general_p, lax.conv_general_dilated_p):
            yield from (variable.aval.dtype.name for variable in equation.invars)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from products(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_of_bfloat16_alone(name):
    variables = jax.eval_shape(model_of(name).init, jax.random.key(0))
    program = jax.make_jaxpr(gradients(name, "bfloat16"))(variables, batch_of(name, 0))
    assert set(products(program.jaxpr)) == {"bfloat16"}
    program = jax.make_jaxpr(gradients(name, "float32"))(variables, batch_of(name, 0))
    assert set(products(program.jaxpr)) == {"float32"}


@pytest.mark.parametrize("name", ["smooth", "resnet"])
def test_a_round_keeps_and_sends_float32(name):
    """Client training in shapes alone: parameters, statistics, updates, losses."""
    method = fed_avg(
        in_bfloat16(model_of(name)), LocalTraining(batch_size=4), hyper=FedAvgHyper(0.1, 1.0)
    )
    one = jnp.int32(BATCH)
    data = ClientData(batch_of(name, 0), jnp.int32(0), one, one, BATCH, False)

    def participate(key):
        message = method.broadcast(method.init(key))
        return message, method.client_update(message, None, data, key, method.hyper)

    message, result = jax.eval_shape(participate, jax.random.key(0))
    for leaf in jax.tree.leaves((message, result.update, result.mutable, result.metrics)):
        assert leaf.dtype in (jnp.float32, jnp.int32), leaf
    for leaf in jax.tree.leaves((result.update, result.mutable, result.metrics["loss"])):
        assert leaf.dtype == jnp.float32


def test_what_is_not_floating_is_left_alone():
    """Tokens above 256 cannot be represented in bfloat16."""
    model = model_of("smooth")._replace(
        apply=lambda variables, batch, **_: (batch["token"].astype(jnp.float32), variables.mutable)
    )
    tokens = jnp.arange(250, 300)
    outputs, _ = in_bfloat16(model).apply(Variables({}, {}), {"token": tokens})
    np.testing.assert_array_equal(outputs, tokens)
