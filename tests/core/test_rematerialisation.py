"""Rematerialised models: the same gradients from less memory."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.model import Variables
from fedcodist.core.rematerialisation import CPU_FLAG, NEEDS_CPU_FLAG, rematerialised
from fedcodist.models.normalization import BatchNorm

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, CLASSES, BATCH, LAYERS = 6, 3, 8, 32


class Layers(nn.Module):
    """Dense layers with all that a network may have: statistics, dropout, a way around."""

    count: int
    width: int = FEATURES

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        for _ in range(self.count):
            before = x
            x = BatchNorm()(nn.Dense(self.width)(x), train=train, mask=mask)
            x = before + nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


def batch_of(seed: int, size: int = BATCH):
    draws = np.random.default_rng(seed)
    return {
        "image": jnp.asarray(draws.normal(size=(size, FEATURES)), jnp.float32),
        "label": jnp.asarray(draws.integers(0, CLASSES, size), jnp.int32),
    }


def loss_and_gradient(model, variables, batch, key, mask):
    def loss(params):
        variables_now = Variables(params, variables.mutable)
        outputs, mutable = model.apply(variables_now, batch, train=True, key=key, mask=mask)
        return jnp.sum(model.loss(outputs, batch) * mask), (outputs, mutable)

    return jax.value_and_grad(loss, has_aux=True)(variables.params)


@functools.cache
def programs(count):
    """A model, and the losses and gradients of itself and of what it is rematerialised to."""
    model = from_flax_linen(Layers(count), jnp.zeros((1, FEATURES)))
    both = (model, rematerialised(model))
    return model, *(jax.jit(functools.partial(loss_and_gradient, each)) for each in both)


@given(count=st.sampled_from([0, 4]), seed=st.integers(0, 99), masked=st.integers(0, BATCH - 1))
@settings(max_examples=20)
def test_values_and_gradients_are_the_models(count, seed, masked):
    model, expected, found = programs(count)
    mask = (jnp.arange(BATCH) >= masked).astype(jnp.float32)
    arguments = (model.init(jax.random.key(0)), batch_of(seed), jax.random.key(seed), mask)
    assert_close(found(*arguments), expected(*arguments))


def test_evaluation_is_the_models():
    model = from_flax_linen(Layers(2), jnp.zeros((1, FEATURES)))
    variables, batch = model.init(jax.random.key(0)), batch_of(0)
    found, expected = (each.apply(variables, batch) for each in (rematerialised(model), model))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected):
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


def trained_clients(model, batch_size=4):
    """Three clients at once; returns the function and its arguments."""
    columns, sizes = batch_of(0, 24), jnp.array([8, 8, 8])

    def train(variables, key):
        def one(start, size, key):
            data = ClientData(columns, start, size, jnp.int32(8), 8, ragged=True)
            return train_client(
                model, LocalTraining(batch_size=batch_size), variables, data, key, 0.1
            )

        keys = jax.random.split(key, 3)
        return jax.vmap(one)(jnp.array([0, 8, 16]), sizes, keys).variables

    return train, (model.init(jax.random.key(0)), jax.random.key(1))


@pytest.mark.slow
def test_clients_that_are_trained_at_once_are_the_same():
    model = from_flax_linen(Layers(2), jnp.zeros((1, FEATURES)))
    both = [trained_clients(each) for each in (model, rematerialised(model))]
    expected, found = (jax.jit(train)(*arguments) for train, arguments in both)
    assert_close(found, expected)


class Deep(nn.Module):
    """Layers whose activations are far larger than their parameters."""

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = jnp.tanh(nn.Dense(FEATURES)(x))
        return nn.Dense(CLASSES)(x)


def test_the_gradient_of_a_deep_network_takes_less_memory():
    name, passes = CPU_FLAG.removeprefix("--").split("=")

    def bytes_of(model, options):
        batch, key = batch_of(0, 2048), jax.random.key(0)
        variables = model.init(key)
        step = jax.jit(lambda v: loss_and_gradient(model, v, batch, key, jnp.ones(2048))[1])
        compiled = step.lower(variables).compile(compiler_options=options)
        return compiled.memory_analysis().temp_size_in_bytes

    model = from_flax_linen(Deep(), jnp.zeros((1, FEATURES)))
    before, after = (bytes_of(each, {name: passes}) for each in (model, rematerialised(model)))
    assert before > LAYERS * 2048 * FEATURES * 4
    assert after < 0.6 * before
    without_flag = bytes_of(rematerialised(model), {})
    assert without_flag > 0.9 * before if NEEDS_CPU_FLAG else without_flag < 0.6 * before


@pytest.mark.slow
def test_a_network_of_one_operation_stays_whole():
    model = from_flax_linen(Layers(1), jnp.zeros((1, FEATURES)))
    apply = jax.jit(model.apply, static_argnames=("train", "axis_name"))
    once = rematerialised(model._replace(apply=apply))
    arguments = (model.init(jax.random.key(0)), batch_of(0), jax.random.key(1), jnp.ones(BATCH))
    expected, found = (loss_and_gradient(each, *arguments) for each in (model, once))
    assert_close(found, expected)
