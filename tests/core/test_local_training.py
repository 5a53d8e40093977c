"""Local training against plain NumPy; padding and hooks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import LocalTraining, train_client
from fedcodist.core.model import Model, Variables
from fedcodist.core.optimizer_factories import lasting_state

FEATURES, ROWS = 3, 40
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(ROWS, FEATURES)).astype(np.float32),
    "label": GENERATOR.normal(size=ROWS).astype(np.float32),
    "row": np.arange(ROWS, dtype=np.int32),
}
START = 5
ZERO = Variables({"weights": jnp.zeros(FEATURES)}, {"seen": jnp.zeros((9, ROWS)), "step": 0})


def regression() -> Model:
    """Least squares that records the examples read in each step."""

    def apply(variables, batch, *, train=False, key=None, mask=None, axis_name=None):
        step = variables.mutable["step"]
        shown = jnp.sum(jax.nn.one_hot(batch["row"], ROWS) * mask[:, None], axis=0)
        mutable = {"seen": variables.mutable["seen"].at[step].add(shown), "step": step + 1}
        return batch["image"] @ variables.params["weights"], mutable

    loss = lambda outputs, batch: (outputs - batch["label"]) ** 2
    return Model(lambda key: ZERO, apply, loss, {}, 2)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("capacity", "ragged"))
def train(training, size, bound, rate=0.1, seed=0, *, capacity=12, ragged=False, **hooks):
    columns = {name: jnp.asarray(column) for name, column in COLUMNS.items()}
    data = ClientData(columns, jnp.asarray(START), size, bound, capacity, ragged)
    return train_client(regression(), training, ZERO, data, jax.random.key(seed), rate, **hooks)


def descend(seen, steps, rate=0.1, gradient_hook=lambda gradient, weights: gradient):
    """Plain gradient descent on the batches that were read."""
    weights, losses = np.zeros(FEATURES), []
    for step in range(steps):
        rows = np.flatnonzero(seen[step])
        inputs, labels = COLUMNS["image"][rows], COLUMNS["label"][rows]
        error = inputs @ weights - labels
        losses.append(np.mean(error**2))
        gradient = 2 * inputs.T @ error / len(rows)
        weights = weights - rate * gradient_hook(gradient, weights)
    return weights, np.mean(losses)


# One program for every size and every number of padded steps.
TRAINING = LocalTraining(batch_size=4, epochs=3)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 11, 12])
@pytest.mark.parametrize("ragged", [False, True])
def test_training_is_gradient_descent_on_every_example_once_per_epoch(size, ragged):
    trained = train(TRAINING, size, 12 if ragged else size, ragged=ragged)
    seen = np.asarray(trained.variables.mutable["seen"])
    per_epoch = -(-size // 4)
    assert trained.num_steps == trained.variables.mutable["step"] == 3 * per_epoch
    assert (seen[3 * per_epoch :] == 0).all()
    for epoch in range(3):
        steps = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert np.flatnonzero(steps.sum(axis=0)).tolist() == list(range(START, START + size))
        assert steps.max() == 1
        assert (steps[:-1].sum(axis=1) == 4).all()
    weights, loss = descend(seen, 3 * per_epoch)
    np.testing.assert_allclose(trained.variables.params["weights"], weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trained.loss, loss, rtol=1e-4)


class Message(NamedTuple):
    params: Any
    mutable: Any
    beside: Any


def test_training_starts_from_a_message_with_further_fields():
    """A method's message may have them, and they are not part of the trained model."""
    columns = {name: jnp.asarray(column) for name, column in COLUMNS.items()}
    data = ClientData(columns, jnp.int32(0), jnp.int32(8), jnp.int32(8), 8, False)
    of = lambda start: jax.eval_shape(
        lambda: train_client(regression(), TRAINING, start, data, jax.random.key(0), 0.1)
    )
    assert of(Message(*ZERO, beside=jnp.ones(2))) == of(ZERO)


def test_no_examples_change_nothing():
    for bound, ragged in ((0, False), (12, True)):
        trained = train(TRAINING, 0, bound, ragged=ragged)
        assert trained.num_steps == 0
        assert trained.loss == 0
        jax.tree.map(np.testing.assert_array_equal, trained.variables, ZERO)


def test_orders_differ_between_epochs_and_keys():
    def order(seed):
        seen = train(TRAINING, 12, 12, seed=seed).variables.mutable["seen"]
        return np.asarray(seen).reshape(3, 3, ROWS)

    first, second = order(0), order(1)
    assert (first != second).any()
    assert (first[0] != first[1]).any()
    np.testing.assert_array_equal(first, order(0))


def test_the_learning_rate_is_traced():
    slow = train(TRAINING, 4, 4, rate=0.02)
    compiled = train._cache_size()
    fast = train(TRAINING, 4, 4, rate=0.2)
    assert train._cache_size() == compiled
    for trained, rate in ((slow, 0.02), (fast, 0.2)):
        weights, _ = descend(np.asarray(trained.variables.mutable["seen"]), 3, rate)
        np.testing.assert_allclose(trained.variables.params["weights"], weights, rtol=1e-4)


def test_padded_steps_do_not_reach_the_optimizers_state():
    """Adam counts its steps; a padded one must not be counted, nor decay the moments."""
    training = LocalTraining(optax.adam, batch_size=4, epochs=2)
    exact, padded = train(training, 5, 5), train(training, 5, 12, ragged=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), exact, padded)


def test_the_optimizers_state_goes_on_where_it_is_given():
    """Two calls of one epoch are one call of two; a fresh Adam would make other steps."""
    training = LocalTraining(lambda rate: optax.adam(rate), batch_size=12)
    together = run(training._replace(epochs=2))
    first = run(training)
    second = run(training, start=first.variables, optimizer_state=first.optimizer_state)
    fresh = run(training, start=first.variables)
    weights = [np.asarray(t.variables.params["weights"]) for t in (second, together, fresh)]
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)
    assert np.abs(weights[2] - weights[1]).max() > 1e-3
    assert second.optimizer_state[0].count == 2


def run(training, size=11, start=ZERO, **hooks):
    columns = {name: jnp.asarray(column) for name, column in COLUMNS.items()}
    data = ClientData(columns, jnp.asarray(START), jnp.asarray(size), jnp.asarray(size), 12, False)
    return jax.jit(
        lambda: train_client(regression(), training, start, data, jax.random.key(0), 0.1, **hooks)
    )()


def test_a_gradient_hook_adds_its_term():
    trained = run(TRAINING, gradient_hook=lambda g, p: jax.tree.map(lambda a, b: a + b, g, p))
    weights, _ = descend(
        np.asarray(trained.variables.mutable["seen"]), 9, gradient_hook=lambda g, w: g + w
    )
    np.testing.assert_allclose(trained.variables.params["weights"], weights, rtol=1e-4, atol=1e-6)


def test_a_loss_hook_replaces_the_models_loss():
    """Half the squared error is half the learning rate."""
    trained = run(TRAINING, loss_hook=lambda outputs, batch: 0.5 * (outputs - batch["label"]) ** 2)
    weights, _ = descend(np.asarray(trained.variables.mutable["seen"]), 9, rate=0.05)
    np.testing.assert_allclose(trained.variables.params["weights"], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            {"gradient_hook": lambda gradient, params: None},
            r"^gradient_hook must return a gradient: at \['weights'\] it has nothing in place of",
        ),
        (
            {"gradient_hook": lambda gradient, params: {"weights": jnp.zeros(1)}},
            r"^gradient_hook must return a gradient: at \['weights'\] it has float32\[1\]",
        ),
        (
            {"loss_hook": lambda outputs, batch: jnp.mean(outputs)},
            r"^loss_hook must have one number per example, \[batch\] = \[4\], got float32\[\]",
        ),
    ],
)
def test_a_hook_that_returns_something_else_is_named(hooks, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run(TRAINING, **hooks)


def test_preprocessing_sees_raw_columns_and_positions_and_a_new_key_each_step():
    def preprocess(batch, key, positions):
        assert batch["row"].dtype == jnp.int32
        noise = jax.random.uniform(key)
        return batch | {
            "image": jnp.stack([positions * 1.0, jnp.full(4, noise), jnp.zeros(4)], axis=1),
            "label": jnp.zeros(4),
        }

    # The loss is the sum of weights' outputs: its gradient is the mean of the inputs.
    training = LocalTraining(batch_size=4, epochs=1, preprocess=preprocess)
    trained = run(training, size=12, loss_hook=lambda outputs, batch: outputs)
    weights = np.asarray(trained.variables.params["weights"]) / -0.1
    np.testing.assert_allclose(weights[0], 3 * 1.5, rtol=1e-5)
    first = run(training, size=4, loss_hook=lambda outputs, batch: outputs)
    noise = float(first.variables.params["weights"][1]) / -0.1
    assert 0 < noise < 1
    assert abs(weights[1] - 3 * noise) > 1e-3


@pytest.mark.parametrize(
    "factory",
    [
        optax.inject_hyperparams(optax.adam),
        lambda rate: optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(rate)),
    ],
)
def test_optimizers_that_last_over_rounds_may_not_keep_their_rate(factory):
    """Otherwise they stay at the rate of their first state."""
    params = {"w": jnp.ones(3)}
    with pytest.raises(
        ValueError, match=r"^training.optimizer must not keep its learning"
    ) as error:
        lasting_state("training.optimizer", factory, params)
    assert "\n" not in str(error.value)
    lasting_state("training.optimizer", optax.adam, params)


def test_training_without_an_epoch_is_refused():
    with pytest.raises(ValueError, match=r"^training.epochs must be at least 1, got 0"):
        train_client(regression(), TRAINING._replace(epochs=0), ZERO, None, None, 0.1)
