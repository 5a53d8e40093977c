"""FedKD: losses and rounds against plain loops in float64, what they must reduce to, and bad input."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.fed_kd import FedKDHyper, fed_kd
from fedcodist.algorithms.clients.fed_kd_exchange import MAPS, STUDENT, TEACHER
from fedcodist.algorithms.clients.fed_kd_losses import (
    MutualLosses,
    Outputs,
    hidden_distance,
    mutual_losses,
)
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.compression.compressed import compressed
from fedcodist.compression.svd import svd
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.client_states import HostClientStates, device_client_states
from fedcodist.core.communication import tree_bytes
from fedcodist.core.for_each_client import Execution
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Model, Variables, cross_entropy
from fedcodist.core.readout import Readout
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

SIZES, CLASSES, FEATURES, EPOCHS, ROUNDS = (5, 2, 7), 3, 4, 2, 3
HYPER = FedKDHyper(0.05, 0.03, 0.8, 0.6)
START, END = 0.6, 0.95
GENERATOR = np.random.default_rng(0)
COLUMNS = {
    "image": GENERATOR.normal(size=(15, FEATURES)),
    "label": GENERATOR.integers(0, CLASSES, 15).astype(np.int32),
}
# Whole clients as batches, so that the order of examples does not matter to the plain loop.
TRAINING = LocalTraining(optax.adam, batch_size=max(SIZES), epochs=EPOCHS)
# Two layers are aligned: the student's are compared with the teacher's second and fourth.
TEACHER_HIDDEN, STUDENT_HIDDEN = (5, 4, 4, 6), (3, 4)
ALIGNED = TEACHER_HIDDEN[1::2]
DEFAULT = MutualLosses()
VARIANTS = {
    "paper": DEFAULT,
    "sample": MutualLosses(adaptive="sample"),
    "not adaptive": MutualLosses(adaptive="none"),
    "mean over classes": MutualLosses(kl_reduction="elementmean"),
    "one sum": MutualLosses(detach_targets=False),
    "normaliser constant": MutualLosses(detach_normaliser=True),
    "sample constant": MutualLosses(adaptive="sample", detach_normaliser=True),
    "identity": MutualLosses(hidden_map="identity"),
    "authors' code": MutualLosses("batch", "elementmean", "identity", False, False),
}
QUICK = ("sample constant", "authors' code")


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def network(hidden, shows_layers=True, classes=CLASSES) -> Model:
    """A chain of kernels with tanh between; products of two units of a layer take attention's part."""
    widths = [FEATURES, *hidden, classes]

    def init(key):
        draw = np.random.default_rng(np.asarray(hidden).sum())
        shapes = itertools.pairwise(widths)
        return Variables([jnp.asarray(draw.normal(size=shape)) for shape in shapes], {})

    def apply(variables, batch, **_):
        logits, states = forward(variables.params, batch["image"], jnp.tanh)
        if not shows_layers:
            return logits, variables.mutable
        attention = tuple(s[:, None, :2, None] * s[:, None, None, :2] for s in states)
        return LayerOutputs(logits, tuple(states), attention), variables.mutable

    def loss(outputs, batch):
        return cross_entropy(outputs.logits if shows_layers else outputs, batch)

    return Model(init, apply, loss, {}, classes)


def of_positions(model):
    """The model with logits [batch, positions, classes]."""

    def apply(variables, batch, **_):
        outputs, mutable = model.apply(variables, batch)
        return outputs._replace(logits=jnp.stack([outputs.logits] * 2, axis=1)), mutable

    return model._replace(apply=apply)


def forward(kernels, x, tanh=np.tanh):
    states = []
    for kernel in kernels[:-1]:
        x = tanh(x @ kernel)
        states.append(x)
    return x @ kernels[-1], states


LARGE, SMALL = network(TEACHER_HIDDEN), network(STUDENT_HIDDEN)


def first_weights(model):
    return [np.asarray(w, np.float64) for w in model.init(None).params]


def federated(sizes=SIZES):
    columns = {name: column[: sum(sizes)] for name, column in COLUMNS.items()}
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))


def method_of(links=True, num_rounds=ROUNDS, **options):
    options = dict(training=TRAINING, hyper=HYPER) | options
    method = fed_kd(LARGE, SMALL, COLUMNS, **options)
    return compressed(method, num_rounds, svd(START, END), svd(START, END)) if links else method


def run(method, sizes=SIZES, execution=Execution(), rounds=ROUNDS):
    """(the student's kernels, client states, metrics) of the first seed."""
    pool = Pool(method, np.arange(len(sizes)), len(sizes))
    algorithm = independent_pools({"pool": pool}, COLUMNS, execution)
    programs = build_programs(algorithm, rounds)
    rows = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 1))
    seeds, hyper = jnp.zeros(1, jnp.uint32), jax.tree.map(np.float64, algorithm.hyper)
    state, rows, metrics = programs.train(
        programs.init(seeds), rows, seeds, 0, rounds, hyper, resident_data(federated(sizes))
    )
    state, rows, metrics = jax.tree.map(
        lambda leaf: np.asarray(leaf)[0], (state, rows["pool"], metrics)
    )
    return method.variables(state["pool"]).params, getattr(rows, "inner", rows), metrics


@functools.cache
def compressed_run(exchange):
    return run(method_of(exchange=exchange))


# ------------------------------------------------------------------------------ the plain loop


def plain_losses(own, other, maps, images, labels, mutual, hyper=HYPER, base=None):
    """(L_t, L_s), example by example; D is computed with the weights in `base`."""
    log = lambda logits: logits - np.log(np.exp(logits).sum())
    shown = [(forward(own, x), forward(other, x)) for x in images]
    tasks = [(-log(t)[y], -log(s)[y]) for ((t, _), (s, _)), y in zip(shown, labels, strict=True)]
    of_normaliser = tasks if base is None else plain_tasks(*base, images, labels)
    totals = [t + s for t, s in of_normaliser]
    match mutual.adaptive:
        case "batch":
            totals = [np.mean(totals)] * len(totals)
        case "none":
            totals = [1.0] * len(totals)
    found_t, found_s = 0.0, 0.0
    for ((t, states_t), (s, states_s)), (task_t, task_s), d in zip(
        shown, tasks, totals, strict=True
    ):
        p_t, p_s = np.exp(log(t)), np.exp(log(s))
        share = CLASSES if mutual.kl_reduction == "elementmean" else 1
        to_t = sum(p_s * (log(s) - log(t))) / share
        to_s = sum(p_t * (log(t) - log(s))) / share
        hidden = 0.0
        step = len(states_t) // len(states_s)
        for layer, state in enumerate(states_s):
            target = states_t[(layer + 1) * step - 1]
            mapped = state if maps is None else state @ maps[layer]
            hidden += sum((target - mapped) ** 2) / len(target)
            attention = np.outer(target[:2], target[:2]) - np.outer(state[:2], state[:2])
            hidden += np.sum(attention**2) / attention.size
        found_t += task_t + (hyper.output_weight * to_t + hyper.hidden_weight * hidden) / d
        found_s += task_s + (hyper.output_weight * to_s + hyper.hidden_weight * hidden) / d
    return found_t / len(images), found_s / len(images)


def plain_tasks(own, other, images, labels):
    log = lambda logits: logits - np.log(np.exp(logits).sum())
    return [
        (-log(forward(own, x)[0])[y], -log(forward(other, x)[0])[y])
        for x, y in zip(images, labels, strict=True)
    ]


def plain_task(kernels, images, labels):
    """A model's own mean loss."""
    pairs = plain_tasks(kernels, kernels, images, labels)
    return sum(loss for loss, _ in pairs) / len(labels)


def slope(function, arrays):
    """The gradient by complex steps, exact to rounding."""
    found = []
    for index, array in enumerate(arrays):
        own = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            moved = [each.astype(complex) for each in arrays]
            moved[index][at] += 1e-30j
            own[at] = function(moved).imag / 1e-30
        found.append(own)
    return found


def plain_gradients(own, other, maps, images, labels, mutual, hyper=HYPER):
    """(of the teacher and its maps, of the student)."""
    base = (own, other) if mutual.detach_normaliser else None
    many = len(own)
    rest = (images, labels, mutual, hyper, base)
    of = lambda private: (private[:many], private[many:] or None)

    def losses(private, shared):
        kernels, w = of(private)
        return plain_losses(kernels, shared, w, *rest)

    private = [*own, *(maps or [])]
    if mutual.detach_targets:
        return (
            slope(lambda moved: losses(moved, other)[0], private),
            slope(lambda moved: losses(private, moved)[1], other),
        )
    return (
        slope(lambda moved: sum(losses(moved, other)), private),
        slope(lambda moved: sum(losses(private, moved)), other),
    )


class Adam:
    """Kingma and Ba's algorithm 1, with a state per array."""

    def __init__(self, rate):
        self.rate, self.count, self.first, self.second = rate, 0, 0.0, 0.0

    def step(self, arrays, gradients):
        self.count += 1
        first = self.first or [0.0] * len(arrays)
        second = self.second or [0.0] * len(arrays)
        self.first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        self.second = [0.999 * v + 0.001 * g * g for v, g in zip(second, gradients, strict=True)]
        out = []
        for array, m, v in zip(arrays, self.first, self.second, strict=True):
            m, v = m / (1 - 0.9**self.count), v / (1 - 0.999**self.count)
            out.append(array - self.rate * m / (np.sqrt(v) + 1e-8))
        return out


def leading(matrix, share):
    """What is sent of a matrix with a share of its energy."""
    if share >= 1:
        return matrix
    u, sigma, v = np.linalg.svd(matrix, full_matrices=False)
    rank = 1
    while sum(sigma[:rank] ** 2) < share * sum(sigma**2):
        rank += 1
    p, q = matrix.shape
    if rank * (p + 1 + q) >= p * q:
        return matrix
    return (u[:, :rank] * sigma[:rank]) @ v[:rank]


def plain(exchange, sizes=SIZES, shares=None, hyper=HYPER, mutual=DEFAULT):
    """(every client's student, every client's (teacher, maps)) after all rounds."""
    parties = []
    for _ in sizes:
        teacher = first_weights(LARGE)
        maps = [np.eye(*widths) for widths in zip(STUDENT_HIDDEN, ALIGNED, strict=True)]
        optimizers = Adam(hyper.teacher_learning_rate), Adam(hyper.student_learning_rate)
        parties.append([teacher, maps, first_weights(SMALL), optimizers])
    for round in range(ROUNDS):
        share = 1.0
        if shares is not None:
            share = shares[0] + (shares[1] - shares[0]) * (round + 1) / ROUNDS
        sent = []
        for client, party in enumerate(parties):
            teacher, maps, student, (own, shared) = party
            rows = slice(sum(sizes[:client]), sum(sizes[: client + 1]))
            images, labels = COLUMNS["image"][rows], COLUMNS["label"][rows]
            trained = student
            for _ in range(EPOCHS if exchange == "epoch_delta" else 1):
                private, gradient = plain_gradients(
                    teacher, trained, maps, images, labels, mutual, hyper
                )
                private = own.step([*teacher, *maps], private)
                teacher, maps = private[: len(teacher)], private[len(teacher) :]
                if exchange == "epoch_delta":
                    trained = shared.step(trained, gradient)
            party[0], party[1] = teacher, maps
            if exchange == "epoch_delta":
                gradient = [a - b for a, b in zip(student, trained, strict=True)]
            sent.append([leading(matrix, share) for matrix in gradient])
        mean = [np.mean(each, axis=0) for each in zip(*sent, strict=True)]
        for party in parties:
            _, _, student, (_, shared) = party
            if exchange == "epoch_delta":
                change = mean
            else:
                stepped = shared.step(student, mean)
                change = [a - b for a, b in zip(student, stepped, strict=True)]
            party[2] = [w - leading(c, share) for w, c in zip(student, change, strict=True)]
    return [party[2] for party in parties], [party[:2] for party in parties]


def assert_close(found, expected, tolerance=1e-9):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        list(found),
        list(expected),
    )


# -------------------------------------------------------------------------------------- losses


def test_the_paper_is_the_default():
    """Where the authors' code differs, it is asked for."""
    assert MutualLosses() == MutualLosses(
        adaptive="batch",
        kl_reduction="batchmean",
        hidden_map="learned",
        detach_targets=True,
        detach_normaliser=False,
    )


@pytest.mark.parametrize(
    "variant",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS],
)
def test_gradients_of_every_variant_are_the_plain_loops(variant):
    mutual = VARIANTS[variant]
    widths = ALIGNED if mutual.hidden_map == "identity" else STUDENT_HIDDEN
    small = network(widths)
    own, other = first_weights(LARGE), first_weights(small)
    maps = None
    if mutual.hidden_map == "learned":
        maps = [GENERATOR.normal(size=shape) for shape in zip(widths, ALIGNED, strict=True)]
    images, labels = COLUMNS["image"][:6], COLUMNS["label"][:6]
    padded = {"image": np.concatenate([images, images[:2] + 9]), "label": [*labels, 0, 0]}
    batch = jax.tree.map(jnp.asarray, padded | {"label": np.asarray(padded["label"])})
    mask = jnp.asarray([1.0] * 6 + [0.0] * 2)
    losses = mutual_losses(LARGE, small, mutual, *HYPER[2:])

    def total(params):
        outputs = Outputs(
            LARGE.apply(Variables(params[TEACHER], {}), batch)[0],
            small.apply(Variables(params[STUDENT], {}), batch)[0],
            params[MAPS],
            mask,
        )
        found = losses(outputs, batch)
        return sum(jnp.sum(each * mask) / 6 for each in found), [
            jnp.sum(each * mask) / 6 for each in found
        ]

    params = jax.tree.map(jnp.asarray, {TEACHER: own, MAPS: maps or [], STUDENT: other})
    gradient, values = jax.jit(jax.grad(total, has_aux=True))(params)
    of_private, of_student = plain_gradients(own, other, maps, images, labels, mutual)
    assert_close([*gradient[TEACHER], *gradient[MAPS]], of_private)
    assert_close(gradient[STUDENT], of_student)
    assert_close(values, plain_losses(own, other, maps, images, labels, mutual))


def logits_of(*logits, task=None, mutual=DEFAULT):
    """Losses of models that say these logits, [batch, classes], and nothing else."""
    labels = {"label": jnp.zeros(len(logits[0]), jnp.int32)}
    loss = cross_entropy if task is None else lambda outputs, batch: task
    models = [Model(None, None, loss, {}, CLASSES)] * 2
    outputs = Outputs(*map(jnp.asarray, logits), [], jnp.ones(len(logits[0])))
    return mutual_losses(*models, mutual, 1.0, 1.0)(outputs, labels)


LOGITS = st.lists(st.floats(-5, 5), min_size=2 * CLASSES, max_size=2 * CLASSES).map(
    lambda values: np.array(values).reshape(2, CLASSES)
)


@given(LOGITS, LOGITS)
@settings(max_examples=30)
def test_swapped_roles_swap_the_losses(first, second):
    one, other = logits_of(first, second), logits_of(second, first)
    np.testing.assert_allclose(one.teacher, other.student, rtol=1e-9)
    np.testing.assert_allclose(one.student, other.teacher, rtol=1e-9)


@given(LOGITS, LOGITS, st.floats(0.1, 3))
@settings(max_examples=30)
def test_twice_the_task_losses_halve_the_rest(first, second, task):
    once, twice = (np.full(2, factor * task) for factor in (1, 2))
    rest = logits_of(first, second, task=once).teacher - once
    half = logits_of(first, second, task=twice).teacher - twice
    np.testing.assert_allclose(half, rest / 2, rtol=1e-9, atol=1e-12)


def test_equal_models_leave_the_task_losses():
    variables = LARGE.init(None)
    batch = {name: jnp.asarray(column) for name, column in COLUMNS.items()}
    outputs = LARGE.apply(variables, batch)[0]
    mask = jnp.ones(len(COLUMNS["label"]))
    identity = [jnp.eye(width) for width in TEACHER_HIDDEN]
    found = mutual_losses(LARGE, LARGE, DEFAULT, 1.0, 1.0)(
        Outputs(outputs, outputs, identity, mask), batch
    )
    task = LARGE.loss(outputs, batch)
    np.testing.assert_allclose(found, [task, task], rtol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_perfect_predictions_stay_finite(variant):
    sure = 1e4 * np.eye(CLASSES)[[0, 0]]

    def total(first, second):
        return sum(jnp.sum(each) for each in logits_of(first, second, mutual=VARIANTS[variant]))

    with_gradients = jax.jit(jax.value_and_grad(total, (0, 1)))
    for second in (sure, -sure, np.zeros_like(sure)):
        found = with_gradients(jnp.asarray(sure), jnp.asarray(second))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_layers_of_16_bits_are_compared_in_float32():
    """In bfloat16 the divergence of similar models is mostly rounding, and may be below 0."""

    def draws(generator):
        close = lambda *shape: (1 + 0.1 * generator.normal(size=shape)).astype(jnp.bfloat16)
        return LayerOutputs(close(4, CLASSES), (close(4, 6),))

    generator = np.random.default_rng(0)
    layers = draws(generator), draws(generator)
    batch, task = {"label": jnp.zeros(4, jnp.int32)}, jnp.zeros(4, jnp.float32)
    models = [Model(None, None, lambda outputs, batch: task, {}, CLASSES)] * 2
    losses = mutual_losses(*models, MutualLosses(adaptive="none"), 1.0, 1.0)
    as_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layers)
    of_layers = lambda layers: losses(Outputs(*layers, [], jnp.ones(4)), batch)
    found, expected = jax.jit(lambda *both: list(map(of_layers, both)))(layers, as_float32)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("heads", [2, 3])
def test_attention_maps_are_compared_by_heads_or_by_their_mean(heads):
    logits = np.zeros((2, CLASSES))
    own = [GENERATOR.normal(size=(2, 2, 3, 3)) for _ in range(4)]
    other = [GENERATOR.normal(size=(2, heads, 3, 3)) for _ in range(2)]
    found = hidden_distance(
        LayerOutputs(logits, (), tuple(own)), LayerOutputs(logits, (), tuple(other)), []
    )
    expected = np.zeros(2)
    for example in range(2):
        for layer, target in ((0, own[1]), (1, own[3])):
            a, b = target[example], other[layer][example]
            if heads != 2:
                a, b = sum(a) / 2, sum(b) / heads
            expected[example] += np.mean([(a[at] - b[at]) ** 2 for at in np.ndindex(*np.shape(a))])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# -------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize(
    "exchange", ["epoch_delta", pytest.param("step_gradient", marks=pytest.mark.slow)]
)
def test_rounds_are_a_plain_loop(exchange):
    student, rows, metrics = compressed_run(exchange)
    students, privates = plain(exchange, shares=(START, END))
    for each in students:  # every client's copy is the server's model
        assert_close(student, each)
    for client, (teacher, maps) in enumerate(privates):
        own = lambda leaf, client=client: leaf[client]
        assert_close(jax.tree.map(own, rows.teacher.params), teacher)
        assert_close(jax.tree.map(own, rows.maps), maps)
    # Teachers went their own ways, and something was compressed.
    assert np.abs(rows.teacher.params[0][0] - rows.teacher.params[0][1]).max() > 1e-3
    assert metrics["pool/client_bytes_up"].min() < tree_bytes(student)


@pytest.mark.parametrize(
    ("exchange", "rate"), [("epoch_delta", 1.0), ("step_gradient", HYPER.student_learning_rate)]
)
def test_the_server_steps_along_gradients_at_the_students_rate(exchange, rate):
    """But it takes the mean of the students' changes as it is."""
    training = TRAINING._replace(optimizer=optax.sgd)
    method = method_of(links=False, training=training, exchange=exchange)
    server = method.init(jax.random.key(0))
    before = method.variables(server).params
    ones = jax.tree.map(jnp.ones_like, before)
    after = method.server_update(server, Aggregate(ones, {}, jnp.ones(())), jnp.int32(0), HYPER)
    assert_close(method.variables(after).params, [kernel - rate for kernel in before])


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["epoch_delta", "step_gradient"])
def test_a_threshold_of_one_is_uncompressed(exchange):
    method = method_of(links=False, exchange=exchange)
    student, rows, metrics = run(compressed(method, ROUNDS, svd(1.0, 1.0), svd(1.0, 1.0)))
    expected, expected_rows, _ = run(method)
    assert_close(student, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), rows, expected_rows)
    size = tree_bytes(student)
    assert (metrics["pool/client_bytes_down"] == size + 8).all()  # and the teachers' key
    assert np.ptp(metrics["pool/client_bytes_up"] - size) == 0


@pytest.mark.slow
def test_one_client_with_a_threshold_of_one_is_local_training():
    method = compressed(method_of(links=False), ROUNDS, svd(1.0, 1.0), svd(1.0, 1.0))
    student, _, _ = run(method, sizes=SIZES[:1])
    assert_close(student, plain("epoch_delta", SIZES[:1])[0][0])


@pytest.mark.slow
def test_without_each_other_the_student_is_fed_avgs_and_teachers_are_alone():
    """Clients of equal size, whose means weigh alike, and batches smaller than a client."""
    sizes, small = (5, 5, 5), TRAINING._replace(optimizer=optax.sgd, batch_size=2)
    hyper = FedKDHyper(0.2, 0.1, 0.0, 0.0)
    student, rows, _ = run(method_of(False, training=small, hyper=hyper), sizes)
    averaging = fed_avg(SMALL, small, optax.sgd, hyper=FedAvgHyper(0.1, 1.0))
    expected, _, _ = run(averaging, sizes)
    assert_close(student, expected)
    # FedAvg of one client goes on from its own model.
    alone = fed_avg(LARGE, small, optax.sgd, hyper=FedAvgHyper(0.2, 1.0))
    assert_close([leaf[0] for leaf in rows.teacher.params], run(alone, sizes[:1])[0])
    # With whole clients as batches, a plain loop without distillation computes every teacher.
    whole = TRAINING._replace(optimizer=optax.sgd)
    _, rows, _ = run(method_of(False, training=whole, hyper=hyper), sizes)
    for client in range(len(sizes)):
        own = slice(5 * client, 5 * client + 5)
        kernels = first_weights(LARGE)
        for _ in range(ROUNDS * EPOCHS):
            loss = lambda moved, own=own: plain_task(
                moved, COLUMNS["image"][own], COLUMNS["label"][own]
            )
            gradients = slope(loss, kernels)
            kernels = [w - 0.2 * g for w, g in zip(kernels, gradients, strict=True)]
        assert_close([leaf[client] for leaf in rows.teacher.params], kernels)
        np.testing.assert_array_equal(rows.maps[0][client], np.eye(3, 4))


@pytest.mark.slow
def test_clients_at_once_are_clients_one_by_one():
    one, rows, _ = compressed_run("epoch_delta")
    two, other_rows, _ = run(method_of(), execution=Execution("vmap", 2))
    assert_close(one, two)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), rows, other_rows)


@pytest.mark.slow
def test_teachers_wait_on_the_host():
    """One of three clients a round, on the device and streamed."""
    found = {}
    for source in (resident_data, StreamedData):
        method = method_of(num_rounds=5)
        algorithm = independent_pools({"pool": Pool(method, np.arange(3), 1)}, COLUMNS)
        experiment = Experiment(
            algorithm, source(federated(), {}), {"train": federated()}, 5, evaluate_every=5
        )
        outcome = run_experiment(experiment, show_progress=False)
        found[source] = outcome.variables["pool"].params
        drawn = [int(algorithm.select(n, jax.random.key(0)).clients["pool"][0]) for n in range(5)]
    assert len(set(drawn)) < len(drawn)  # somebody came back to a teacher
    assert_close(found[resident_data], found[StreamedData], 1e-5)


def test_a_round_needs_memory_for_its_own_teachers_alone():
    """Of a thousand clients, of whom two take part."""
    algorithm = independent_pools({"pool": Pool(method_of(), np.arange(1000), 2)}, COLUMNS)
    store = HostClientStates(algorithm.client_states, 1)
    clients = {"pool": np.array([[3, 900]])}
    rows = store.gather(clients)["pool"]
    teacher = rows.inner.teacher.params
    assert [leaf.shape[:2] for leaf in teacher] == [(1, 2)] * 5
    store.scatter(clients, {"pool": rows})
    assert {leaf.shape[0] for leaf in jax.tree.leaves(store.state()["pool"][1])} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("source", [StreamedData, resident_data])
def test_a_hundred_teachers_need_a_devices_memory_for_those_of_a_round(source):
    """With streamed data teachers are on the host; otherwise these client states are on the device."""
    count = 100
    columns = {
        "image": GENERATOR.normal(size=(count, FEATURES)),
        "label": GENERATOR.integers(0, CLASSES, count).astype(np.int32),
    }
    data = FederatedData.from_arrays(columns, offsets=np.arange(count + 1))
    large, training = network((400,)), LocalTraining(optax.sgd, batch_size=1)
    teacher = tree_bytes(large.init(None))
    method = fed_kd(large, network((2,)), columns, training, hyper=HYPER)
    algorithm = independent_pools({"pool": Pool(method, np.arange(count), 2)}, columns)
    found = []
    measure = lambda records: found.append(sum(leaf.nbytes for leaf in jax.live_arrays()))
    before = sum(leaf.nbytes for leaf in jax.live_arrays())
    experiment = Experiment(
        algorithm,
        source(data, {}),
        {"train": federated()},
        rounds=4,
        evaluate_every=2,
        evaluate_clients=1,
    )
    run_experiment(experiment, show_progress=False, callbacks=[measure])
    needed = (max(found) - before) / teacher
    assert needed > count if source is resident_data else needed < 10


@pytest.mark.slow
def test_a_frozen_tensor_is_not_sent():
    """An optimizer that leaves the first kernel alone, as FedKD leaves embeddings."""
    freezes = lambda rate: optax.chain(optax.sgd(rate), _without_first())
    method = method_of(training=TRAINING._replace(optimizer=freezes))
    student, _, metrics = run(method)
    np.testing.assert_array_equal(student[0], first_weights(SMALL)[0])
    assert np.abs(student[1] - first_weights(SMALL)[1]).max() > 1e-3
    assert (metrics["pool/client_bytes_up"] <= tree_bytes(student[1:]) + 8).all()


def _without_first():
    def update(updates, state, params=None):
        is_student = isinstance(updates, list)
        return ([0 * updates[0], *updates[1:]] if is_student else updates), state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.slow
def test_seeds_have_teachers_of_their_own():
    """A teacher depends on the run's seed, not on the first values of its client state."""
    shapes = [weights.shape for weights in first_weights(LARGE)]
    drawn = LARGE._replace(
        init=lambda key: Variables([jax.random.normal(key, shape) for shape in shapes], {})
    )
    method = fed_kd(drawn, SMALL, COLUMNS, TRAINING, hyper=HYPER)
    algorithm = independent_pools({"pool": Pool(method, np.arange(3), 3)}, COLUMNS)
    programs = build_programs(algorithm, 1)
    rows = jax.tree.map(jnp.asarray, device_client_states(algorithm.client_states, 2))
    seeds, hyper = jnp.arange(2, dtype=jnp.uint32), {"pool": FedKDHyper(0.0, 0.0, 1.0, 1.0)}
    _, rows, _ = programs.train(
        programs.init(seeds), rows, seeds, 0, 1, hyper, resident_data(federated())
    )
    first = np.asarray(rows["pool"].teacher.params[0])
    np.testing.assert_allclose(first[0, 0], first[0, 1], rtol=1e-6)
    assert np.abs(first[0, 0] - first[1, 0]).max() > 0.1


# ----------------------------------------------------------------------------------- bad input


def attending(positions):
    """A network with one attention map of so many positions."""
    inner = network((4,))

    def apply(variables, batch, **arguments):
        outputs, mutable = inner.apply(variables, batch, **arguments)
        shape = (len(batch["image"]), 2, positions, positions)
        return outputs._replace(attention=(jnp.zeros(shape),)), mutable

    return inner._replace(apply=apply)


def reading_two_inputs(hidden):
    """A network that outputs its layers for each of two inputs."""
    inner = network(hidden)

    def apply(variables, batch, **arguments):
        outputs, mutable = inner.apply(variables, batch, **arguments)
        return outputs._replace(hidden=tuple((each, each) for each in outputs.hidden)), mutable

    return inner._replace(apply=apply)


def made(teacher=LARGE, student=SMALL, **options):
    return lambda: fed_kd(teacher, student, COLUMNS, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (made(exchange="epoch"), "exchange must be one of .*'step_gradient'.*, got 'epoch'"),
        (made(mutual=MutualLosses(adaptive="x")), "mutual.adaptive must be one of .*, got 'x'"),
        (made(mutual=MutualLosses(kl_reduction="sum")), "mutual.kl_reduction must be one of"),
        (made(mutual=MutualLosses(hidden_map="x")), "mutual.hidden_map must be one of"),
        (
            made(training=TRAINING._replace(differentiate=lambda loss: jax.value_and_grad(loss))),
            "mutual.adaptive must be 'sample' or 'none' with training.differentiate, .*, got 'batch'",
        ),
        (made(hyper=FedKDHyper(hidden_weight=-1)), "hyper.hidden_weight must be .*at least 0"),
        (made(hyper=FedKDHyper(float("nan"))), "hyper.teacher_learning_rate must be finite"),
        (
            made(network((5, 4, 4)), network((4, 4))),
            "student's number of layers with hidden states must divide the teacher's 3, got 2",
        ),
        (made(SMALL, LARGE), "must divide the teacher's 2, got 4"),
        (made(LARGE, network((3,), shows_layers=False)), "must divide the teacher's 4, got 0"),
        (
            made(network((3,)), network((8,)), mutual=MutualLosses(hidden_map="identity")),
            "mutual.hidden_map must be 'learned' where widths differ, got 'identity' for a "
            "student's 8 and a teacher's 3",
        ),
        (
            made(LARGE, network((3,), classes=4)),
            "teacher and student must have as many classes, got 3 and 4",
        ),
        (made(of_positions(LARGE), LARGE), r"teacher .* logits .*, got float64\[1, 2, 3\]"),
        (made(LARGE, of_positions(LARGE)), r"student .* logits .*, got float64\[1, 2, 3\]"),
        (made(network((3,), classes=1), network((3,), classes=1)), "give a network of one logit"),
        (
            made(attending(3), attending(2)),
            "student's attention maps must be of the teacher's positions",
        ),
        (
            made(reading_two_inputs((5,)), network((3,))),
            "student must have hidden states for as many inputs as the teacher, 2, got 1",
        ),
        (made(training=TRAINING._replace(epochs=0)), "training.epochs must be at least 1"),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_student_wider_than_its_teacher_has_a_map():
    method = fed_kd(network((3,)), network((8,)), COLUMNS)
    assert method.init_client_state().maps[0].shape == (8, 3)


@pytest.mark.slow
def test_networks_of_logits_alone_have_no_hidden_term():
    large, small = (network((width,), shows_layers=False) for width in (5, 3))
    method = fed_kd(large, small, COLUMNS, TRAINING, hyper=HYPER)
    assert method.init_client_state().maps == []
    student, _, _ = run(method, rounds=1)
    assert np.isfinite(student[0]).all()


def test_clients_optimizers_may_not_keep_their_rate():
    training = LocalTraining(optax.inject_hyperparams(optax.sgd))
    method = fed_kd(LARGE, SMALL, COLUMNS, training, hyper=HYPER)
    with pytest.raises(ValueError, match=r"^training\.optimizer must not keep its learning rate"):
        method.init_client_state()
    with pytest.raises(ValueError, match=r"^training\.optimizer must not keep its learning rate"):
        fed_kd(LARGE, SMALL, COLUMNS, training, hyper=HYPER, exchange="step_gradient")


def test_a_language_model_is_refused_by_name():
    as_readout = lambda x: Readout(x, jnp.zeros((x.shape[-1], 2)), jnp.zeros(2), jnp.ones(len(x)))
    readout = lambda variables, batch, **_: (as_readout(batch["image"]), {})
    for teacher, student, name in (
        (LARGE, SMALL._replace(apply=readout), "student"),
        (LARGE._replace(apply=readout), SMALL, "teacher"),
    ):
        with pytest.raises(TypeError, match=f"^{name} must return logits .*, got a Readout"):
            fed_kd(teacher, student, COLUMNS, TRAINING, hyper=HYPER)
