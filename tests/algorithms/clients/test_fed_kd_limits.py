"""What FedKD is with some of it left out: FML, or nothing at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_one_device import CLASSES as LABELS
from on_one_device import FEATURES as INPUTS
from on_one_device import on_one_device
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.clients.fed_kd_losses import MutualLosses
from fedcodist.algorithms.parties.fml import FMLHyper, fml
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.svd import svd
from fedcodist.core.communication import tree_bytes
from fedcodist.core.inputs import Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, EXAMPLES, FEATURES, CLASSES, ROUNDS = 3, 4, 5, 3, 3
DRAWS = np.random.default_rng(0)
COLUMNS = {
    "image": DRAWS.normal(size=(CLIENTS * EXAMPLES, FEATURES)).astype(np.float32),
    "label": DRAWS.integers(0, CLASSES, CLIENTS * EXAMPLES).astype(np.int32),
}
DATA = FederatedData.from_arrays(COLUMNS, offsets=EXAMPLES * np.arange(CLIENTS + 1))
# Whole clients as batches: the order of examples does not matter.
TRAINING = LocalTraining(functools.partial(optax.sgd, momentum=0.9), EXAMPLES, epochs=2)


def network(width) -> Model:
    """A model with the same first weights for every key."""
    draws = np.random.default_rng(width)
    shapes = ((FEATURES, width), (width, CLASSES))
    kernels = [draws.normal(size=shape).astype(np.float32) for shape in shapes]

    def apply(variables, batch, **_):
        first, second = variables.params
        return jnp.tanh(batch["image"] @ first) @ second, variables.mutable

    init = lambda key: Variables(list(map(jnp.asarray, kernels)), {})
    return Model(init, apply, cross_entropy, {}, CLASSES)


TEACHER, STUDENT = network(8), network(6)


def run(algorithm, rows):
    """(state, client states, metrics) after some rounds in which all clients take part."""
    data, root, metrics = resident_data(DATA), jax.random.key(0), {}
    state, once = algorithm.init(root), jax.jit(algorithm.round)
    for round in range(ROUNDS):
        inputs = data.read(algorithm.select(round, root))
        state, rows, metrics = once(state, rows, Round(round, root, inputs), algorithm.hyper)
    return state, rows, metrics


def run_fed_kd(method):
    algorithm = independent_pools({"pool": Pool(method, np.arange(CLIENTS), CLIENTS)}, COLUMNS)
    first = jax.tree.map(lambda leaf: jnp.stack([leaf] * CLIENTS), method.init_client_state())
    state, rows, metrics = run(algorithm, {"pool": first})
    rows = getattr(rows["pool"], "inner", rows["pool"])
    return method.variables(state["pool"]).params, rows, metrics


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [True, False])
def test_with_fresh_optimizers_and_predictions_alone_it_is_fml(fresh):
    """FML's losses with weights of a half are half of FedKD's; momentum tells old states from new."""
    method = fed_kd(
        TEACHER,
        STUDENT,
        COLUMNS,
        TRAINING,
        fresh_optimizers=fresh,
        mutual=MutualLosses(adaptive="none"),
        hyper=FedKDHyper(0.05, 0.05, 1.0, 0.0),
    )
    student, rows, _ = run_fed_kd(method)
    groups = {"own": PartyGroup(TEACHER, np.arange(CLIENTS))}
    state, _, _ = run(fml(groups, STUDENT, TRAINING, FMLHyper(0.1, 0.5, 0.5)), {})
    if fresh:
        assert_close(student, state.meme.params)
        assert_close(rows.teacher.params, state.models["own"].params)
        assert rows.optimizers == ((), ())
    else:
        assert np.abs(student[0] - state.meme.params[0]).max() > 1e-3


@pytest.mark.slow
def test_fresh_optimizers_forget_in_rounds_of_one_batch_too():
    """With gradients exchanged, teachers' momentum alone is the clients'."""
    found = {}
    for fresh in (True, False):
        method = fed_kd(
            TEACHER,
            STUDENT,
            COLUMNS,
            TRAINING,
            "step_gradient",
            fresh,
            hyper=FedKDHyper(0.05, 0.05),
        )
        found[fresh] = run_fed_kd(method)[1].teacher.params
    assert np.abs(found[True][0] - found[False][0]).max() > 1e-3


@pytest.mark.parametrize(
    "exchange", ["epoch_delta", pytest.param("step_gradient", marks=pytest.mark.slow)]
)
def test_without_learning_nothing_moves_and_nothing_is_a_nan(exchange):
    """SVD sends nothing of deltas that are zero; gradients are sent nevertheless."""
    method = fed_kd(TEACHER, STUDENT, COLUMNS, TRAINING, exchange, hyper=FedKDHyper(0.0, 0.0))
    student, rows, metrics = run_fed_kd(compressed(method, ROUNDS, svd(), svd()))
    jax.tree.map(np.testing.assert_array_equal, student, STUDENT.init(None).params)
    for own, first in zip(rows.teacher.params, TEACHER.init(None).params, strict=True):
        np.testing.assert_array_equal(own, np.stack([first] * CLIENTS))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((rows, metrics)))
    assert metrics["pool/client_bytes_down"] == 8  # the teachers' key
    nothing = metrics["pool/client_bytes_up"] == 4  # the weight
    assert nothing == (exchange == "epoch_delta")
    assert metrics["pool/client_bytes_up"] <= tree_bytes(student) + 4


def test_columns_that_jax_narrows_give_no_warning(recwarn):
    columns = {name: np.asarray(column, np.float64) for name, column in COLUMNS.items()}
    columns["label"] = np.asarray(COLUMNS["label"], np.int64)
    with jax.enable_x64(False):
        fed_kd(TEACHER, STUDENT, columns, TRAINING)
    assert not [each for each in recwarn if "Explicitly requested dtype" in str(each.message)]


def test_clients_without_examples_have_no_weight():
    model = softmax_regression(INPUTS, LABELS)
    columns = random_clients((3,), INPUTS, LABELS).columns
    training, hyper = LocalTraining(batch_size=3), FedKDHyper(0.05, 0.05)
    method = fed_kd(model, model, columns, training, hyper=hyper)
    alone, _ = on_one_device(method, [3], rounds=1)
    with_others, _ = on_one_device(method, [3, 0, 0], rounds=1)
    np.testing.assert_allclose(with_others, alone, rtol=1e-5)
    assert np.abs(alone - model.init(jax.random.key(0)).params["w"]).max() > 1e-3
