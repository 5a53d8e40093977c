"""A run that starts from another run's end: what depends on that run's rounds or clients begins anew."""

from collections import namedtuple
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_gkd import fed_gkd
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange
from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
from fedcodist.algorithms.graph.multi_headed_distillation import multi_headed_distillation
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.pools.client_ensembles import with_client_ensembles
from fedcodist.algorithms.pools.fed_rolex import fed_rolex
from fedcodist.algorithms.pools.fed_sdd import fed_sdd
from fedcodist.algorithms.pools.fed_sdd_pools import fed_sdd_pools
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.levels import HeteroFLLevel
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_steps import StepTraining
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.restart import restarted
from fedcodist.distillation.settings import Distillation
from fedcodist.models import MLP
from fedcodist.models.multi_headed import multi_headed
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, FEATURES, CLASSES = (4, 4, 4, 4), 3, 2
DATA = random_clients(SIZES, FEATURES, CLASSES)
PUBLIC = {"image": np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)}
TRAINING = LocalTraining(optax.sgd, batch_size=4)
NOTHING = Distillation(0)


def last_state(algorithm, rounds=3, extra=None, **settings):
    data = resident_data(DATA, extra or {})
    experiment = Experiment(algorithm, data, {"train": DATA}, rounds, **settings)
    return run_experiment(experiment, show_progress=False).state


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def pool_of(method=None, cohort=4):
    if method is None:
        method = fed_avg(softmax_regression(FEATURES, CLASSES), TRAINING)
    return Pool(method, np.arange(len(SIZES)), cohort)


def test_scaffold_converges_from_there_too():
    """Two clients of linear regression. With the earlier run's variate it would end far away."""
    generator = np.random.default_rng(0)
    images = np.concatenate([generator.normal(size=(8, 3)) * scale for scale in (1, 2)])
    weights = np.repeat([[1.0, 2, 3], [-1, 0, 4]], 8, axis=0)
    data = type(DATA).from_arrays(
        {"image": np.float32(images), "label": np.float32((images * weights).sum(1))},
        offsets=[0, 8, 16],
    )
    model = from_flax_linen(
        nn.Dense(1, use_bias=False),
        jnp.zeros((1, 3)),
        loss=lambda outputs, batch: 0.5 * (outputs[:, 0] - batch["label"]) ** 2,
        metrics={},
    )
    method = scaffold(model, 2, LocalTraining(batch_size=8, epochs=5), hyper=FedAvgHyper(0.02))
    algorithm = independent_pools({"main": Pool(method, np.arange(2), 2)}, data.columns)
    experiment = Experiment(algorithm, resident_data(data, {}), {"train": data}, 2)
    first = run_experiment(experiment, show_progress=False).state
    last = run_experiment(
        experiment._replace(rounds=400, evaluate_every=400, start=first), show_progress=False
    ).state
    kernel = last["main"].averaging.params["kernel"][0, :, 0]
    of_each = [images[:8], images[8:]]
    gram = sum(part.T @ part for part in of_each)
    target = sum(part.T @ (part @ w) for part, w in zip(of_each, weights[::8], strict=True))
    np.testing.assert_allclose(kernel, np.linalg.solve(gram, target), atol=1e-3)


def test_a_variate_within_other_states_begins_anew():
    method = scaffold(softmax_regression(FEATURES, CLASSES), len(SIZES), TRAINING)
    algorithm = fed_sdd(pool_of(method), DATA.columns, 8, num_models=2, distillation=NOTHING)
    state = last_state(algorithm)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(state.models["main"].variate))
    for server in restarted(algorithm, state).models.values():
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(server.variate))


def build_fed_sdd(pool):
    return fed_sdd(pool, DATA.columns, 8, num_models=2, rounds_kept=4, distillation=NOTHING)


@pytest.mark.parametrize("kind", ["fed_sdd", "of several architectures", "with clients' ensembles"])
def test_fed_sdds_buffer_begins_with_the_present_models(kind):
    if kind == "fed_sdd":
        algorithm = build_fed_sdd(pool_of())
    elif kind == "of several architectures":
        pools = {"a": pool_of(cohort=2)._replace(clients=np.arange(4)), "b": pool_of()}
        algorithm = fed_sdd_pools(
            pools, DATA.columns, 8, num_models=2, rounds_kept=4, distillation=NOTHING
        )
    else:
        algorithm = with_client_ensembles(build_fed_sdd, pool_of(), ["clients"])
    state = last_state(algorithm, rounds=5, seeds=2)
    of_fed_sdd = getattr(state, "fed_sdd", state)
    again = restarted(algorithm, state)
    again = getattr(again, "fed_sdd", again)
    same(again.models, of_fed_sdd.models)
    np.testing.assert_array_equal(again.weights, [[1, 0, 0, 0]] * 2)
    buffers = again.buffers if kind == "of several architectures" else {"": again.buffer}
    for name, buffer in buffers.items():
        groups = [group for group in again.models if group.startswith(name)]
        found = jax.tree.leaves(buffer.params)[0]
        for place, group in enumerate(groups):
            model = jax.tree.leaves(of_fed_sdd.models[group].params)[0]
            np.testing.assert_array_equal(found[:, 0, place], model)


@pytest.mark.parametrize("teachers", [1, 0])
def test_mhds_teachers_begin_with_the_present_models(teachers):
    """Slots of the earlier run's checkpoints are other ones than those that the new run counts on."""
    network = multi_headed(MLP((3,), classes=None), jnp.zeros((1, FEATURES)), CLASSES, 1)
    graph = ~np.eye(4, dtype=bool)
    algorithm = multi_headed_distillation(
        {"net": PartyGroup(network, np.arange(4))},
        public=PUBLIC,
        graph=graph,
        num_rounds=6,
        training=StepTraining(batch_size=2, steps=1),
        distillation=HeadDistillation(
            teachers=teachers, batch_size=4, exchange=CheckpointExchange(2)
        ),
    )
    state = last_state(algorithm, rounds=6, extra={"public": PUBLIC})
    again = restarted(algorithm, state)
    same(again.learners, state.learners)
    fresh = jax.tree.map(lambda leaf: leaf[None], algorithm.init(jax.random.key(0)))
    np.testing.assert_array_equal(again.buffers, fresh.buffers)
    if teachers:
        assert not np.array_equal(state.buffers, fresh.buffers)
        # The banks hold each client's present model where a new run holds its initial one.
        models = jax.tree.leaves(state.learners["net"].variables)
        initial = jax.tree.leaves(fresh.learners["net"].variables)
        banks = (jax.tree.leaves(tree.banks["net"]) for tree in (again, fresh))
        for model, first, bank, fresh_bank in zip(models, initial, *banks, strict=True):
            for client in range(4):
                is_its = [np.array_equal(slot, first[0, client]) for slot in fresh_bank[0]]
                for slot in np.flatnonzero(is_its):
                    found = np.asarray(bank[0, slot])
                    if np.any(first[0, client]):  # initial biases are all alike
                        np.testing.assert_array_equal(found, model[0, client])


def test_fed_gkd_has_no_teacher_in_the_first_round_of_another_run():
    method = fed_gkd(softmax_regression(FEATURES, CLASSES), TRAINING, models_kept=3)
    algorithm = independent_pools({"main": pool_of(method)}, DATA.columns)
    state = last_state(algorithm)
    assert state["main"].num_trained == 3
    again = restarted(algorithm, state)["main"]
    assert again.num_trained.tolist() == [0]
    same(again._replace(num_trained=state["main"].num_trained), state["main"])


def test_fed_rolex_begins_with_the_first_unit():
    network = from_flax_linen(MLP((4,), CLASSES), jnp.zeros((1, FEATURES)))
    levels = {"all": HeteroFLLevel(network, np.arange(len(SIZES)), 4)}
    layers = ("Dense_0", "Dense_1")
    algorithm = fed_rolex(network, levels, layers, DATA.columns, TRAINING)
    state = last_state(algorithm)
    assert state.window == 3
    again = restarted(algorithm, state)
    assert again.window.tolist() == [0]
    same(again.averaging, state.averaging)


def test_a_start_may_hold_the_same_leaves_in_other_named_tuples():
    algorithm = independent_pools({"all": pool_of()}, DATA.columns)
    state = last_state(algorithm)
    other_type = namedtuple("Other", state["all"]._fields)
    start = {"all": other_type(*state["all"])}
    same(last_state(algorithm, start=start), last_state(algorithm, start=state))


class ForgetsItsType(NamedTuple):
    params: Any
    mutable: Any

    def without_clients(self):
        return (self.params, self.mutable)


def test_another_state_without_clients_is_refused():
    averaging = pool_of().method
    method = averaging._replace(
        init=lambda key: ForgetsItsType(*averaging.variables(averaging.init(key))),
        server_update=lambda server, *_: server,
        set_model=lambda server, new, reset_optimizer: ForgetsItsType(*new),
        gradient=None,
    )
    algorithm = independent_pools({"all": pool_of(method)}, DATA.columns)
    state = last_state(algorithm)
    message = (
        r"^algorithm\.restart and without_clients must return a state as algorithm\.init makes it"
    )
    with pytest.raises(TypeError, match=message) as raised:
        last_state(algorithm, start=state)
    assert "\n" not in str(raised.value)


def test_other_states_stay():
    algorithm = independent_pools({"main": pool_of()}, DATA.columns)
    state = last_state(algorithm)
    same(restarted(algorithm, state), state)
