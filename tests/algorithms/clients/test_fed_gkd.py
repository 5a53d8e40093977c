"""FedGKD against plain NumPy in float64, and against what it must reduce to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_gkd import FedGKDHyper, fed_gkd, mean_of_last
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.core.readout import Readout
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES = (5, 2, 7, 3), 3, 4
RATE, EPOCHS, ROUNDS = 0.3, 3, 5
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
MODEL = softmax_regression(FEATURES, CLASSES)
federated = functools.partial(random_clients, SIZES, FEATURES, CLASSES)


def taught(weight=0.7, temperature=2.0, kept=3, training=TRAINING, model=MODEL):
    hyper = FedGKDHyper(RATE, 1.0, weight, temperature)
    return fed_gkd(model, training, kept, optax.sgd, hyper=hyper)


@functools.cache
def averaged(rounds=ROUNDS, epochs=EPOCHS):
    return run(averaging(TRAINING._replace(epochs=epochs)), rounds)[0]


def averaging(training=TRAINING):
    return fed_avg(MODEL, training, optax.sgd, hyper=FedAvgHyper(RATE, 1.0))


def run(method, rounds=ROUNDS, execution=Execution()):
    """The weights after the last round, and the cohorts."""
    pool = Pool(method, np.arange(len(SIZES)), 3)
    algorithm = independent_pools({"pool": pool}, federated().columns, execution)
    experiment = Experiment(
        algorithm, resident_data(federated(), {}), {"train": federated()}, rounds
    )
    trained = run_experiment(experiment, show_progress=False)
    root = jax.random.key(0)
    cohorts = [algorithm.select(n, root).clients["pool"].tolist() for n in range(rounds)]
    return trained.variables["pool"].params["w"][0], cohorts


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def plain_loop(cohorts, weight, temperature, kept):
    w = np.asarray(MODEL.init(None).params["w"], np.float64)
    models = []  # those that clients have trained
    for cohort in cohorts:
        teacher = np.mean(models[-kept:], axis=0) if models else None
        results = []
        for c in cohort:
            rows = slice(sum(SIZES[:c]), sum(SIZES[: c + 1]))
            images = federated().columns["image"][rows].astype(np.float64)
            labels = np.eye(CLASSES)[federated().columns["label"][rows]]
            own = w
            for _ in range(EPOCHS):
                slope = softmax(images @ own) - labels
                if teacher is not None:
                    # d/dz of T^2 KL(q || softmax(z / T)) is T (softmax(z / T) - q).
                    target = softmax(images @ teacher / temperature)
                    pull = softmax(images @ own / temperature) - target
                    slope = slope + weight * temperature * pull
                own = own - RATE * images.T @ slope / len(images)
            results.append(own)
        w = np.average(results, axis=0, weights=[SIZES[c] for c in cohort])
        models.append(w)
    return w


@pytest.mark.parametrize(
    "kept, execution",
    [
        (3, Execution()),
        (1, Execution("vmap", 2)),
        pytest.param(9, Execution(), marks=pytest.mark.slow),
    ],
)
def test_rounds_are_a_plain_loop(kept, execution):
    w, cohorts = run(taught(kept=kept), execution=execution)
    np.testing.assert_allclose(w, plain_loop(cohorts, 0.7, 2.0, kept), rtol=1e-4, atol=1e-6)
    assert np.abs(w - averaged()).max() > 1e-2


def test_without_a_weight_it_is_fed_avg():
    np.testing.assert_allclose(run(taught(weight=0.0))[0], averaged(), rtol=1e-6)


@pytest.mark.slow
def test_nobody_teaches_in_the_first_round():
    np.testing.assert_allclose(run(taught(weight=5.0), rounds=1)[0], averaged(rounds=1), rtol=1e-6)


@pytest.mark.slow
def test_the_received_model_teaches_nothing_in_the_first_step():
    """With M = 1 the client's model is its teacher: their divergence and its gradient are zero."""
    one_step = TRAINING._replace(epochs=1)
    ours, _ = run(taught(5.0, kept=1, training=one_step))
    np.testing.assert_allclose(ours, averaged(epochs=1), rtol=1e-5)


def test_the_mean_is_of_what_clients_have_trained():
    """Counters of steps stay integers, rounded to even."""
    current = Variables({"w": jnp.array([8.0])}, {"count": jnp.array([4])})
    earlier = Variables({"w": jnp.array([[5.0], [2.0]])}, {"count": jnp.array([[3], [2]])})
    for trained, mean, count in ((0, 8.0, 4), (1, 8.0, 4), (2, 6.5, 4), (3, 5.0, 3)):
        found = mean_of_last(current, earlier, jnp.int32(trained))
        np.testing.assert_allclose(found.params["w"], [mean], rtol=1e-6)
        assert found.mutable["count"].dtype == jnp.int32 and found.mutable["count"][0] == count


def test_a_round_without_clients_makes_no_teacher():
    """A Poisson cohort may be empty. The initial model never teaches."""
    method = taught(kept=3)
    server = method.init(jax.random.key(0))
    update = jax.tree.map(jnp.zeros_like, method.broadcast(server).params)
    for weight, trained in ((0.0, 0), (2.0, 1), (0.0, 1)):
        aggregate = Aggregate(update, {}, jnp.float32(weight))
        server = method.server_update(server, aggregate, jnp.int32(0), method.hyper)
        assert server.num_trained == trained
        assert method.broadcast(server).has_learned == float(trained > 0)


def test_a_distilled_model_is_the_current_one():
    """The teachers are then the codistilled models, and FedAvg's model is in no mean."""
    method = taught(kept=2)
    server = method.init(jax.random.key(0))
    earlier = Variables({"w": jnp.full((1, FEATURES, CLASSES), 5.0)}, {})
    server = server._replace(num_trained=jnp.int32(2), earlier=earlier)
    for reset_optimizer in (True, False):
        new = Variables({"w": jnp.full((FEATURES, CLASSES), 2.0)}, {})
        after = method.set_model(server, new, reset_optimizer)
        message = method.broadcast(after)
        np.testing.assert_array_equal(message.params["w"], 2.0)
        np.testing.assert_array_equal(message.teacher.params["w"], 3.5)


def test_the_teacher_is_in_evaluation_mode():
    modes = []

    def apply(variables, batch, *, train=False, key=None, **_):
        modes.append((train, key is not None))
        return MODEL.apply(variables, batch)

    communication_of(taught(model=MODEL._replace(apply=apply)), federated().columns)
    assert set(modes) == {(True, True), (False, False)}


def test_a_client_downloads_two_models_but_where_one_is_kept():
    columns, number = federated().columns, 4
    plain = communication_of(averaging(), columns)
    for kept, models in ((1, 1), (5, 2)):
        found = communication_of(taught(kept=kept), columns)
        assert found.down == models * plain.down + number  # whether it teaches yet
        assert found.up == plain.up


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kept=0), "models_kept must be at least 1, got 0"),
        (dict(weight=-1.0), r"hyper\.distillation_weight must be .*at least 0, got -1.0"),
        (dict(temperature=0.0), r"hyper\.temperature must be .*above 0, got 0.0"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        taught(**options)


def test_models_of_text_have_no_logits():
    def apply(variables, batch, **_):
        return Readout(batch["image"][:, None], variables.params["w"], None, None), {}

    with pytest.raises(TypeError, match=r"must return logits .*, got a Readout"):
        run(taught(model=MODEL._replace(apply=apply)), rounds=1)
