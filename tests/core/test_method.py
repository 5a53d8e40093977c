"""Predictors, bytes and keys of a method."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick_compilation import QUICK

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.core.communication import communication_of
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import client_key, single_model
from fedcodist.core.user_functions import users_line
from fedcodist.models.digits import MLP

MODEL = from_flax_linen(MLP(hidden=(5,), classes=3), np.zeros((1, 6), np.float32))
METHOD = fed_avg(
    MODEL, LocalTraining(batch_size=10, epochs=2), optax.sgd, hyper=FedAvgHyper(0.3, 0.5)
)
COLUMNS = {
    "image": np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32),
    "label": np.arange(9, dtype=np.int32) % 3,
}


def test_predictor_is_the_model_in_evaluation_mode():
    predictor = single_model(MODEL, METHOD.variables)
    server = jax.jit(METHOD.init, compiler_options=QUICK)(jax.random.key(0))
    variables = predictor.variables(server)
    np.testing.assert_array_equal(
        predictor.predict(variables, COLUMNS), MODEL.apply(variables, COLUMNS)[0]
    )


def test_bytes_follow_the_shapes_exchanged():
    parameters = 6 * 5 + 5 + 5 * 3 + 3
    down, up = communication_of(METHOD, COLUMNS)
    assert (down, up) == (4 * parameters, 4 * parameters + 4)
    halved = METHOD._replace(
        client_update=lambda *arguments: (result := METHOD.client_update(*arguments))._replace(
            update=jax.tree.map(lambda leaf: leaf.astype(jnp.float16), result.update)
        )
    )
    assert communication_of(halved, COLUMNS) == (4 * parameters, 2 * parameters + 4)


def test_a_client_of_two_pools_draws_apart_in_each():
    root = jax.random.key(0)
    small, large = (client_key(root, 3, pool) for pool in ("small", "large"))
    assert not jnp.array_equal(jax.random.key_data(small), jax.random.key_data(large))


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_the_users_line_is_of_no_installed_package(packages):
    user, library = {}, {}
    source = "def fails(*_):\n    raise ValueError('why')\n"
    exec(compile(source, f"/usr/lib/python3/{packages}/optax/functions.py", "exec"), library)
    beside = str(Path(users_line.__code__.co_filename).parents[1]) + "_of_mine/losses.py"
    exec(compile("def loss(f):\n    return f()\n", beside, "exec"), user)
    with pytest.raises(ValueError) as error:
        user["loss"](library["fails"])
    assert users_line(error.value) == "losses.py, line 2"
