"""FedKD of parties against FedKD of clients, FedAvg and training alone; what is sent; bad input."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.algorithms.parties.fed_kd_parties import FedKDPartiesHyper, fed_kd_parties
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.svd import svd
from fedcodist.core.communication import tree_bytes
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import variable_shapes
from fedcodist.data.federated_data import FederatedData
from fedcodist.models.digits import BatchNormMLP
from fedcodist.models.headed import headed

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, CLASSES, ROUNDS = 4, 3, 3
SIZES = (5, 9, 7)
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(sum(SIZES), FEATURES)),
    "label": GENERATOR.integers(0, CLASSES, sum(SIZES)),
}
DATA = FederatedData.from_arrays(COLUMNS, offsets=np.cumsum([0, *SIZES]))
# All examples are one batch, so that their order does not matter.
TRAINING = LocalTraining(optax.adam, batch_size=max(SIZES), epochs=2)
HYPER = FedKDPartiesHyper(0.02, 0.03, 0.7, 0.4)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def network(width, seed) -> fc.Model:
    """A network with the same initial values whatever the key."""
    model = headed(nn.Sequential([nn.Dense(width), nn.tanh]), jnp.zeros((1, FEATURES)), CLASSES)
    first = jax.tree.map(lambda x: x.astype(float), jax.jit(model.init)(jax.random.key(seed)))
    return model._replace(init=lambda key: first)


@functools.cache
def models():
    return {"wide": network(6, 1), "narrow": network(4, 2), "student": network(2, 3)}


def groups(*names):
    """Party i has the i-th network."""
    places = {name: [i for i, own in enumerate(names) if own == name] for name in names}
    return {name: fc.PartyGroup(models()[name], np.array(p)) for name, p in places.items()}


def run(algorithm, rounds=ROUNDS):
    experiment = fc.Experiment(algorithm, fc.resident_data(DATA), {"train": DATA}, rounds=rounds)
    return fc.run_experiment(experiment._replace(evaluate_every=rounds), show_progress=False)


def parties(names, hyper=HYPER, **options):
    return fed_kd_parties(
        groups(*names), models()["student"], COLUMNS, TRAINING, hyper=hyper, **options
    )


def state_of(outcome):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], outcome.state)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), actual, expected
    )


def test_with_one_network_it_is_fed_kd():
    found = state_of(run(parties(["wide"] * 3)))
    method = fc.fed_kd(
        models()["wide"],
        models()["student"],
        COLUMNS,
        TRAINING,
        hyper=fc.FedKDHyper(*HYPER),
    )
    pools = {"main": fc.Pool(method, np.arange(3), 3)}
    outcome = run(fc.independent_pools(pools, COLUMNS))
    # From the second round on, the student depends on the teachers that the clients have kept.
    student = jax.tree.map(lambda leaf: leaf[0], outcome.variables["main"].params)
    assert_close(found.student.params, student)


def test_models_that_do_not_learn_from_each_other_are_fed_avg_and_training_alone():
    hyper = HYPER._replace(output_weight=0.0, hidden_weight=0.0)
    found = state_of(run(parties(["wide", "narrow", "wide"], hyper)))
    alone = run(
        fc.local_only(
            groups("wide", "narrow", "wide"), TRAINING, hyper=fc.LocalOnlyHyper(HYPER.learning_rate)
        )
    )
    for name, party in state_of(alone).items():
        assert_close(found.models[name].variables.params, party.variables.params)
    assert_close(found.student.params, averaged_by_adam(models()["student"]))


def averaged_by_adam(model):
    """After every round the mean of all clients' parameters; each client's Adam keeps its moments."""
    optimizer = optax.adam(HYPER.student_learning_rate)
    params = model.init(jax.random.key(0)).params
    states = [optimizer.init(params) for _ in SIZES]

    @jax.jit
    def step(params, state, examples):
        def loss(params):
            outputs = model.apply(fc.Variables(params, {}), examples)[0]
            return jnp.mean(model.loss(outputs, examples))

        update, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, update), state

    for _ in range(ROUNDS):
        trained = []
        for client in range(len(SIZES)):
            own = params
            for _ in range(TRAINING.epochs):
                own, states[client] = step(own, states[client], DATA.client(client))
            trained.append(own)
        params = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trained)
    return params


def test_full_rank_is_no_compression_and_lower_ranks_are_counted():
    names = ["wide", "narrow", "wide"]
    plain = run(parties(names))
    full = run(parties(names, num_rounds=ROUNDS, uplink=svd(1.0, 1.0), downlink=svd(1.0, 1.0)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        state_of(full).student.params,
        state_of(plain).student.params,
    )
    low = run(parties(names, num_rounds=ROUNDS, uplink=svd(0.2, 0.5), downlink=svd(0.2, 0.5)))
    for way in ("bytes_up_per_participation", "bytes_down_per_participation"):
        for party, about in plain.summary["models"].items():
            assert low.summary["models"][party][way] < about[way], party
            # A matrix of full rank is sent as it is.
            assert full.summary["models"][party][way] >= about[way], party


def test_batch_statistics_are_sent_beside_the_compressed_parameters():
    backbone = nn.Sequential([nn.Dense(2), nn.tanh])
    students = {
        "plain": headed(backbone, jnp.zeros((1, FEATURES)), CLASSES),
        "with statistics": headed(BatchNormMLP((2,), None), jnp.zeros((1, FEATURES)), CLASSES),
    }
    for name, student in students.items():
        shapes = variable_shapes(student)
        assert bool(jax.tree.leaves(shapes.mutable)) == (name == "with statistics")
        algorithm = fed_kd_parties(
            groups("wide", "wide", "wide"),
            student,
            COLUMNS,
            TRAINING,
            num_rounds=1,
            uplink=quantisation(8),
            downlink=quantisation(8),
            hyper=HYPER,
        )
        about = run(algorithm, rounds=1).summary["models"]["wide_0"]
        message, _ = quantisation(8).compress(
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes.params),
            (),
            jax.random.key(0),
            1.0,
        )
        expected = int(quantisation(8).payload(message)) + tree_bytes(shapes.mutable)
        assert about["bytes_up_per_participation"] == expected
        assert about["bytes_down_per_participation"] == expected


def test_compressors_are_told_how_many_of_the_rounds_are_done():
    told, plain = [], quantisation(16)

    def compress(tree, memory, key, progress):
        jax.debug.callback(lambda share: told.append(round(float(share), 6)), progress)
        return plain.compress(tree, memory, key, progress)

    watched = plain._replace(compress=compress)
    run(parties(["wide"] * 3, num_rounds=8, downlink=watched), rounds=2)
    assert sorted(set(told)) == [1 / 8, 2 / 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_rounds=0), "num_rounds must be"),
        (dict(hyper=HYPER._replace(hidden_weight=-1.0)), "hidden_weight must be"),
        (dict(mutual=fc.MutualLosses(adaptive="often")), "mutual.adaptive must be one of"),
        (dict(mutual=fc.MutualLosses(hidden_map="identity")), "mutual.hidden_map must be"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        parties(["wide", "narrow", "wide"], **{"hyper": HYPER, **options})
    assert "\n" not in str(raised.value)


def test_columns_that_do_not_fit_are_one_line():
    for columns, message in (
        ({"image": [[0.0]]}, r"^columns\['image'\] must be an array"),
        ({"picture": np.zeros((2, 3))}, r" looks up 'image', .*: the columns are \['picture'\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message) as error:
            fed_kd_parties(groups("wide", "wide"), models()["student"], columns)
        assert "\n" not in str(error.value)


def test_a_party_that_does_not_fit_the_student_is_named():
    same = {
        "same": fc.PartyGroup(models()["student"], [0]),
        "wide": fc.PartyGroup(models()["wide"], [1]),
    }
    message = (
        r"^groups\['wide'\].model does not fit as a teacher: mutual.hidden_map must be 'learned'"
    )
    with pytest.raises(ValueError, match=message):
        fed_kd_parties(
            same, models()["student"], COLUMNS, mutual=fc.MutualLosses(hidden_map="identity")
        )


def test_no_architecture_may_have_the_students_name():
    with pytest.raises(ValueError, match="student"):
        fed_kd_parties(groups("student", "wide", "wide"), models()["student"], COLUMNS)
