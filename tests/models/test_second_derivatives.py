"""Networks may be trained by FedL2G and Per-FedAvg, which differentiate a gradient step."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedcodist.models.cnn import small_cnn
from fedcodist.models.emnist import emnist_cnn
from fedcodist.models.fed_md import FedMDNetwork
from fedcodist.models.htfl import GROUPS, htfl_backbone
from fedcodist.models.normalization import BatchNorm
from fedcodist.models.resnet import resnet20

HTFL = dict.fromkeys((*GROUPS["htfl_small"], "htfl_googlenet", "htfl_mobilenet_v2"), (32, 3))
NETWORKS = {
    "small_cnn": (small_cnn, (24, 3)),
    "emnist_cnn": (emnist_cnn, (28, 1)),
    "fed_md": (functools.partial(FedMDNetwork, (4, 6), 0.2, 10), (28, 1)),
    "resnet20": (resnet20, (32, 3)),
    **{name: (functools.partial(htfl_backbone, name), shape) for name, shape in HTFL.items()},
}


def loss_after_a_step(module, variables, inputs, params):
    """The loss after a step of gradient descent, and with the statistics that the network had."""
    keys = {"dropout": jax.random.key(1)}

    def loss(params):
        outputs, _ = module.apply(
            {**variables, "params": params}, inputs, train=True, mutable=["batch_stats"], rngs=keys
        )
        return jnp.mean(jnp.sin(jax.tree.leaves(outputs)[0]))

    slopes = jax.grad(loss)(params)
    return loss(jax.tree.map(lambda value, slope: value - 0.1 * slope, params, slopes))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_gradient_step_has_a_gradient(name):
    make, (size, channels) = NETWORKS[name]
    module, inputs = make(), jnp.zeros((2, size, size, channels))
    variables = jax.eval_shape(module.init, jax.random.key(0), inputs)

    def gradient(variables):
        function = functools.partial(loss_after_a_step, module, variables, inputs)
        return jax.grad(function)(variables["params"])

    assert jax.eval_shape(gradient, variables) == variables["params"]


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = BatchNorm(name="norm")(nn.Dense(4)(x), train=train)
        return nn.Dense(2)(nn.tanh(y))


def test_through_batch_statistics_it_is_that_of_differences():
    with jax.enable_x64(True):
        draw = np.random.default_rng(0).standard_normal
        inputs, module = jnp.asarray(draw((6, 3))), Normalized()
        variables = module.init(jax.random.key(0), inputs, train=True)
        params = jax.tree.map(lambda value: jnp.asarray(draw(value.shape)), variables["params"])
        function = functools.partial(loss_after_a_step, module, variables, inputs)
        way = jax.tree.map(lambda value: jnp.asarray(draw(value.shape)), params)
        moved = lambda by: jax.tree.map(lambda value, step: value + by * step, params, way)
        expected = (function(moved(1e-5)) - function(moved(-1e-5))) / 2e-5
        products = jax.tree.map(lambda a, b: jnp.sum(a * b), jax.grad(function)(params), way)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), expected, rtol=1e-7)
