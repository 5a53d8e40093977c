"""Partly shared networks against plain NumPy in float64, and against what they must reduce to."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from personal_runs import (
    MODEL,
    SIZES,
    assert_same,
    distance,
    federated,
    gradient,
    run,
    step,
    weighted_mean,
)

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_babu import fed_babu
from fedcodist.algorithms.clients.fed_bn import fed_bn
from fedcodist.algorithms.clients.fed_dropout import fed_dropout
from fedcodist.algorithms.clients.fed_gkd import FedGKDHyper, fed_gkd
from fedcodist.algorithms.clients.fed_per import fed_per
from fedcodist.algorithms.clients.fed_prox import FedProxHyper, fed_prox
from fedcodist.algorithms.clients.fed_rep import fed_rep
from fedcodist.algorithms.clients.fetch_sgd import fetch_sgd
from fedcodist.algorithms.clients.lg_fed_avg_one import lg_fed_avg_one
from fedcodist.algorithms.clients.partially_shared import partially_shared
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.fed_df import fed_df
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.error_feedback import with_error_feedback
from fedcodist.compression.quantisation import quantisation
from fedcodist.compression.top_k import top_k
from fedcodist.core.client_states import HostClientStates
from fedcodist.core.communication import communication_of
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.from_nnx import from_flax_nnx
from fedcodist.core.inputs import Examples
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import variable_shapes
from fedcodist.core.parts import choice_of, part, rest
from fedcodist.core.trees import named_leaves
from fedcodist.distillation.loop import distill
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.digits import MLP
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

RATE, EPOCHS = 0.3, 2
TRAINING = LocalTraining(batch_size=max(SIZES), epochs=EPOCHS)  # every step sees the whole client
HYPER = FedAvgHyper(RATE, 1.0)
BOTH, BODY, HEAD = ("body", "head"), ("body",), ("head",)
# name -> (method, layers that stay, layers that are trained pass by pass)
METHODS = {
    "fed_per": (fed_per(MODEL, TRAINING, hyper=HYPER), HEAD, [BOTH] * EPOCHS),
    "fed_rep": (
        fed_rep(MODEL, TRAINING, head_epochs=3, hyper=HYPER),
        HEAD,
        [HEAD] * 3 + [BODY] * EPOCHS,
    ),
    "fed_babu": (fed_babu(MODEL, TRAINING, hyper=HYPER), HEAD, [BODY] * EPOCHS),
    "lg_fed_avg_one": (lg_fed_avg_one(MODEL, TRAINING, hyper=HYPER), BODY, [BOTH] * EPOCHS),
}


def averaging(training=TRAINING):
    return fed_avg(MODEL, training, hyper=HYPER)


@functools.cache
def averaged():
    return run(averaging())


def plain_loop(found, private, passes):
    """(the server's model, clients' personal models) after the rounds of `found`."""
    server, kept = found.first, {}
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            own = {**server, **kept.get(client, {name: found.first[name] for name in private})}
            for layers in passes:
                own = step(own, gradient(own, client), RATE, layers)
            kept[client] = {name: own[name] for name in private}
            results.append(own)
        mean = weighted_mean(results, cohort)
        server = {name: server[name] if name in private else mean[name] for name in server}
    first = {name: found.first[name] for name in private}
    return server, [{**server, **kept.get(client, first)} for client in range(len(SIZES))]


@pytest.mark.parametrize("name", METHODS)
def test_rounds_are_a_plain_loop(name):
    method, private, passes = METHODS[name]
    found = run(method)
    assert sorted({c for cohort in found.cohorts for c in cohort}) == [0, 1, 2, 3]
    server, personal = plain_loop(found, private, passes)
    assert_same(found.model, server)
    assert_same(found.personal, [] if name == "fed_babu" else personal)
    assert method.name == name
    assert distance(found.model, averaged().model) > 1e-2


def test_who_was_in_no_round_has_the_first_private_part():
    found = run(METHODS["fed_per"][0], rounds=1, cohort=2)
    (absent, *_) = set(range(len(SIZES))) - set(found.cohorts[0])
    assert_same(found.personal[absent]["head"], found.first["head"], rtol=0, atol=0)
    assert_same(found.personal[absent]["body"], found.model["body"], rtol=0, atol=0)
    for client in found.cohorts[0]:
        assert distance(found.personal[client]["head"], found.first["head"]) > 1e-3


@pytest.mark.slow
def test_vmap_is_scan():
    method = METHODS["fed_rep"][0]
    one, other = run(method), run(method, execution=Execution("vmap", 2))
    assert_same((one.model, one.personal), (other.model, other.personal), rtol=1e-5)


def test_nothing_private_is_the_method_itself():
    found = run(partially_shared(averaging(), ()))
    assert_same(found.model, averaged().model, rtol=1e-6, atol=1e-7)
    for personal in found.personal:
        assert_same(personal, found.model, rtol=0, atol=0)


def test_fed_babus_head_stays_at_a_server_that_decays_weights():
    """Clients draw the initial head, so the server's must be that one."""
    decaying = lambda rate: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate))
    found = run(fed_babu(MODEL, TRAINING, server_optimizer=decaying, hyper=HYPER))
    assert_same(found.model["head"], found.first["head"], rtol=0, atol=0)
    method = METHODS["fed_babu"][0]
    server = method.init(jax.random.key(3))
    twice = jax.tree.map(lambda leaf: 2 * leaf, method.variables(server))
    after = method.variables(method.set_model(server, twice, True)).params
    assert_same(after["head"], method.variables(server).params["head"], rtol=0, atol=0)
    assert_same(after["body"], twice.params["body"], rtol=0, atol=0)


@pytest.mark.slow
def test_fed_prox_pulls_a_private_part_to_where_the_round_began():
    prox = fed_prox(MODEL, TRAINING, hyper=FedProxHyper(RATE, 1.0, 2.0))
    found = run(partially_shared(prox, "head"), rounds=2)
    server, kept = found.first, {}
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            start = own = {"body": server["body"], "head": kept.get(client, found.first["head"])}
            for _ in range(EPOCHS):
                pull = jax.tree.map(
                    lambda g, now, then: g + 2.0 * (now - then), gradient(own, client), own, start
                )
                own = step(own, pull, RATE)
            kept[client] = own["head"]
            results.append(own)
        server = {"body": weighted_mean(results, cohort)["body"], "head": server["head"]}
    assert_same(found.model, server)
    assert_same(found.personal[cohort[0]]["head"], kept[cohort[0]])


def test_a_teacher_that_is_sent_has_the_clients_private_part():
    """FedGKD's mean of global models: its body travels, its head is the client's own."""
    gkd = fed_gkd(MODEL, TRAINING, 2, hyper=FedGKDHyper(RATE, 1.0, 0.5, 2.0))
    seen = []

    def client_update(message, *arguments):
        seen.append(message)
        return gkd.client_update(message, *arguments)

    method = partially_shared(gkd._replace(client_update=client_update), "head")
    bytes_of = communication_of(method, federated().columns)
    body = 4 * 4 * 3
    assert bytes_of.down == 2 * body + 4 + 8  # two bodies, whether there is a teacher, the seed
    assert bytes_of.up == body + 4
    kept = jax.tree.structure(variable_shapes(MODEL))
    assert jax.tree.structure(seen[0].teacher) == kept


@pytest.mark.parametrize(("name", "sent"), [("fed_per", 12), ("lg_fed_avg_one", 9)])
def test_private_parameters_do_not_travel(name, sent):
    """Down: the shared part and 8 bytes of the seed; up: the shared part and the weight."""
    bytes_of = communication_of(METHODS[name][0], federated().columns)
    assert bytes_of == (4 * sent + 8, 4 * sent + 4)


def test_a_million_clients_need_memory_for_those_met():
    """A private head of 650 numbers, of clients whose states are on the host."""
    model = from_flax_linen(nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(10)]), jnp.zeros((1, 2)))
    method = fed_per(model, LocalTraining(batch_size=2), private="layers_2")
    count = 1_000_000
    columns = {
        "image": jax.ShapeDtypeStruct((count, 2), np.float32),
        "label": jax.ShapeDtypeStruct((count,), np.int32),
    }
    pools = {"pool": Pool(method, np.arange(count), 20)}
    algorithm = independent_pools(pools, columns)
    states = HostClientStates(algorithm.client_states, seeds=1)
    for round in range(3):
        clients = {"pool": algorithm.select(round, jax.random.key(0)).clients["pool"][None]}
        states.scatter(clients, states.gather(clients))
    owners, kept = states.state()["pool"]
    assert 20 < len(owners) <= 60
    numbers = sum(leaf.size for leaf in jax.tree.leaves(kept.inner)) / len(owners)
    assert numbers == 650
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) < 60 * 2700


@pytest.mark.parametrize("downlink", [None, quantisation(16)])
def test_what_travels_is_compressed(downlink):
    """An uplink of all entries, and one of 16 bits down, change next to nothing."""
    method = METHODS["fed_per"][0]
    links = compressed(method, 3, with_error_feedback(top_k(1.0)), downlink)
    found, plain = run(links), run(method)
    assert_same((found.model, found.personal), (plain.model, plain.personal), atol=1e-3)
    memory = jax.tree.leaves(links.init_client_state().memory)
    assert [leaf.shape for leaf in memory] == [(4, 3)]  # of the body alone


@pytest.mark.parametrize(
    "around",
    [
        lambda method: partially_shared(method, private="head"),
        lambda method: compressed(method, 3, quantisation(8)),
        lambda method: compressed(partially_shared(method, "head"), 3, quantisation(8)),
    ],
    ids=["partially_shared", "compressed", "both"],
)
def test_a_method_hears_what_was_sent_in_place_of_its_extra(around):
    """Such as a clipped one: its server and its clients' states must agree."""
    method = averaging()._replace(
        init_client_state=lambda: jnp.zeros(3),
        after_sending=lambda client_state, extra, sent: client_state - extra + sent,
    )
    whole = around(method)
    before = whole.init_client_state()
    after = whole.after_sending(before, jnp.ones(3), jnp.full(3, 5.0))
    changed = [
        np.asarray(new - old)
        for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True)
        if not np.array_equal(old, new)
    ]
    np.testing.assert_array_equal(changed, [[4, 4, 4]])
    assert around(averaging()).after_sending is None


@pytest.mark.slow
@pytest.mark.parametrize("codistillation", [periodic_codistillation, merged_codistillation])
def test_pools_of_partly_shared_networks_teach_each_other(codistillation):
    """Their clients' first round is as without a teacher, the models after it are not."""
    columns, models = federated().columns, {}
    pools = {
        name: Pool(METHODS[method][0], np.arange(4), 2)
        for name, method in (("one", "fed_per"), ("other", "fed_babu"))
    }
    more = {"period": 1} if codistillation is periodic_codistillation else {}
    algorithms = {
        "taught": codistillation(
            pools, columns, 5, num_rounds=2, distillation=Distillation(2, 4, mixup_beta=0), **more
        ),
        "alone": independent_pools(pools, columns),
    }
    images = {UNLABELLED: {"image": np.asarray(columns["image"][:5])}}
    for name, algorithm in algorithms.items():
        experiment = Experiment(
            algorithm, resident_data(federated(), images), {"train": federated()}, rounds=2
        )
        models[name] = run_experiment(experiment, show_progress=False).variables
    for pool in pools:
        taught, alone = (models[name][pool].params for name in ("taught", "alone"))
        assert np.abs(taught["body"]["kernel"] - alone["body"]["kernel"]).max() > 1e-3
    heads = [models[name]["other"].params["head"]["kernel"] for name in models]
    np.testing.assert_array_equal(*heads)  # FedBABU's


def test_a_student_learns_with_the_head_that_fed_babu_keeps():
    """The model after a distillation is the student whose loss the distillation reports."""
    method = METHODS["fed_babu"][0]
    server = method.init(jax.random.key(0))
    start, images = method.variables(server), jnp.asarray(federated().columns["image"][:5])
    target = jax.nn.softmax(3 * jax.random.normal(jax.random.key(1), (5, MODEL.num_classes)))
    distilled = distill(
        {"student": method.model},
        {"student": start},
        {"teacher": lambda batch: target},
        lambda name, outputs: outputs["teacher"],
        Examples({"image": images}, jnp.tile(jnp.arange(5), (50, 1))),
        jax.random.key(2),
        {"student": 0.1},
        Distillation(50, 5, mixup_beta=0),
    )
    student = distilled.students["student"]
    kept = method.variables(method.set_model(server, student, False))
    jax.tree.map(np.testing.assert_array_equal, student, kept)
    assert distilled.last_loss["student"] < 0.7 * distilled.first_loss["student"]


def test_a_server_that_needs_clients_models_refuses():
    pools = {"pool": Pool(METHODS["fed_per"][0], np.arange(4), 2)}
    with pytest.raises(
        ValueError, match=r"^pools\['pool'\]\.method must send changes of whole models"
    ):
        fed_df(pools, federated().columns, 5)


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train=False, mask=None):
        real = None if mask is None else mask[:, None] > 0
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.5)
        x = norm(nn.Dense(3)(x), mask=real)
        return nn.Dense(3)(nn.tanh(x))


@functools.cache
def normalised():
    return from_flax_linen(Normalised(), jnp.zeros((1, 4)))


def test_fed_bns_normalisation_layers_are_each_clients():
    """Scales, shifts and statistics; a plain loop in JAX."""
    model, sizes = normalised(), 4
    data = federated_of_equal(sizes)
    training = LocalTraining(batch_size=sizes, epochs=2)
    method = fed_bn(model, training, hyper=HYPER)
    found = run(method, data=data, cohort=2)
    is_norm = lambda path: "BatchNorm" in path

    def loss(params, mutable, batch):
        outputs, mutable = model.apply(type(start)(params, mutable), batch, train=True)
        return jnp.mean(model.loss(outputs, batch)), mutable

    differentiate = jax.jit(jax.grad(loss, has_aux=True))
    start = model.init(jax.random.key(0))
    start = start._replace(params=jax.tree.map(jnp.float32, found.first))
    server, kept = start, {}
    for cohort in found.cohorts:
        results = []
        for client in cohort:
            rows = slice(sizes * client, sizes * (client + 1))
            batch = {name: column[rows] for name, column in data.columns.items()}
            own = replaced(server, kept.get(client, start), is_norm)
            for _ in range(2):
                slope, mutable = differentiate(*own, batch)
                own = own._replace(
                    params=jax.tree.map(lambda w, g: w - RATE * g, own.params, slope),
                    mutable=mutable,
                )
            kept[client] = own
            results.append(own)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *results)
        server = replaced(mean, start, is_norm)
    assert_same(found.model, server.params, atol=1e-4)
    for client, personal in enumerate(found.personal):
        own = replaced(server, kept.get(client, start), is_norm)
        assert_same(personal, own.params, atol=1e-4)
        assert_same(found.statistics[client], own.mutable, atol=1e-4)
    assert distance(found.statistics[cohort[0]], found.statistics[cohort[1]]) > 0.1
    bytes_of = communication_of(method, data.columns)
    assert bytes_of.up == 4 * (4 * 3 + 3 + 3 * 3 + 3) + 4  # neither scales nor statistics


def replaced(variables, by, is_chosen):
    """The variables, with the chosen leaves of others."""
    chosen = [is_chosen(path) for path in named_leaves(variables)]
    leaves = [
        other if flag else leaf
        for flag, leaf, other in zip(chosen, *map(jax.tree.leaves, (variables, by)), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(variables), leaves)


@functools.cache
def federated_of_equal(size):
    from softmax_regression import random_clients

    return random_clients((size,) * 4, 4, 3)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 3, rngs=rngs)
        self.bn1 = nnx.BatchNorm(3, rngs=rngs)
        self.out = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.bn1(self.first(x)))


def mlp(width):
    return from_flax_linen(MLP((width,), 3), jnp.zeros((1, 4)))


class NormBlock(nn.Module):
    """Its name has 'Norm' in it, and it is not only a normalisation layer."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))


class InBlocks(nn.Module):
    @nn.compact
    def __call__(self, x, *, train: bool = False):
        return nn.Dense(3)(NormBlock(name="BlockNorm")(x, train))


def in_blocks():
    return from_flax_linen(InBlocks(), jnp.zeros((1, 4)))


def test_fed_bn_shares_the_other_layers_of_a_block_of_layers():
    method = fed_bn(in_blocks())
    sent = named_leaves(method.broadcast(method.init(jax.random.key(0))).params)
    assert sorted(sent) == [
        "BlockNorm/Dense_0/bias",
        "BlockNorm/Dense_0/kernel",
        "Dense_0/bias",
        "Dense_0/kernel",
    ]
    hk = pytest.importorskip("haiku")
    from fedcodist.core.from_haiku import from_haiku

    class HaikuNorm(hk.Module):
        def __call__(self, x, is_training):
            return hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), is_training)

    network = lambda x, is_training: hk.Linear(3, name="out")(HaikuNorm()(x, is_training))
    method = fed_bn(from_haiku(network, jnp.zeros((1, 4))))
    message = method.broadcast(method.init(jax.random.key(0)))
    assert sorted(named_leaves(message.params)) == [
        "haiku_norm/linear/b",
        "haiku_norm/linear/w",
        "out/b",
        "out/w",
    ]
    assert not jax.tree.leaves(message.mutable)  # its moving averages are of the layer too


def test_patterns_choose_names_in_flax_nnx_and_haiku():
    chosen = lambda model, pattern: sorted(
        path
        for tree in variable_shapes(model)
        for path in named_leaves(part(tree, choice_of("private", pattern, variable_shapes(model))))
    )
    of_nnx = from_flax_nnx(lambda rngs: Nnx(rngs), jnp.zeros((1, 4)))
    assert chosen(of_nnx, "bn*") == ["bn1/bias", "bn1/mean", "bn1/scale", "bn1/var"]
    assert chosen(of_nnx, ["out", "first/bias"]) == ["first/bias", "out/bias", "out/kernel"]
    assert chosen(normalised(), "*[Nn]orm*") == [
        "BatchNorm_0/bias",
        "BatchNorm_0/scale",
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
    ]
    assert chosen(normalised(), lambda path: path == "Dense_1/bias") == ["Dense_1/bias"]
    assert chosen(normalised(), "Dense_1/kernel") == ["Dense_1/kernel"]
    hk = pytest.importorskip("haiku")
    from fedcodist.core.from_haiku import from_haiku

    of_haiku = from_haiku(
        lambda x, is_training: hk.Linear(3, name="out")(
            hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), is_training)
        ),
        jnp.zeros((1, 4)),
    )
    assert chosen(of_haiku, "out") == ["out/b", "out/w"]
    assert chosen(of_haiku, "batch_norm")[:2] == [
        "batch_norm/offset",
        "batch_norm/scale",
    ]
    assert len(chosen(of_haiku, "batch_norm")) == 2 + 6  # three values of two moving averages


def test_the_two_parts_make_the_whole():
    tree = {"a": {"x": 1, "y": 2}, "b": [3, 4]}
    is_chosen = lambda path: path in ("a/x", "b/1")
    assert part(tree, is_chosen) == {"a": {"x": 1, "y": None}, "b": [None, 4]}
    assert rest(tree, is_chosen) == {"a": {"x": None, "y": 2}, "b": [3, None]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fed_per(MODEL, private="haed"),
            r"^private must be patterns .*'haed' matches none",
        ),
        (
            lambda: fed_per(MODEL, private=("head", 3)),
            r"^private must be patterns of layers' names",
        ),
        (lambda: fed_per(MODEL, private="*"), r"^private must leave parameters to share"),
        (lambda: lg_fed_avg_one(MODEL, shared="haed"), r"^shared must be patterns .*'haed'"),
        (lambda: fed_rep(MODEL, head_epochs=0), r"^head_epochs must be at least 1, got 0"),
        (lambda: fed_bn(MODEL), r"^private must be patterns .*orm\*' matches none of"),
        (lambda: fed_bn(in_blocks(), private="Block*"), r"^private must be patterns .*'Block\*'"),
        (
            lambda: lg_fed_avg_one(MODEL, shared=lambda path: False),
            r"^shared must choose parameters, it chooses none",
        ),
        (
            lambda: lg_fed_avg_one(MODEL, shared="*"),
            r"^shared must leave out parameters, it .* all",
        ),
        (
            lambda: partially_shared(
                fed_dropout(mlp(4), mlp(2), ("Dense_0", "Dense_1")),
                "Dense_1",
            ),
            r"^method must be one whose server takes the mean of its clients' models, got fed_dropout",
        ),
        (
            lambda: partially_shared(scaffold(MODEL, 4), "head"),
            r"^method must exchange nothing like the parameters but models, got scaffold, which sends "
            "'variate'",
        ),
        (
            lambda: partially_shared(fetch_sgd(MODEL), "head"),
            r"^method's clients must send the received model minus the trained one, got fetch_sgd",
        ),
        (
            lambda: partially_shared(compressed(averaging(), 3, quantisation(8)), "head"),
            r"^method must send its whole model .*: what wraps it, such as compressed, comes after",
        ),
        (
            lambda: partially_shared(fed_per(MODEL), "body"),
            r"^method must have no personal model 'personal', got fed_per",
        ),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        make()
    assert "\n" not in str(error.value)
