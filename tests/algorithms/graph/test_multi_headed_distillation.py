"""MHD against plain NumPy in float64, how far knowledge travels, and what must not change results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.graph.local_only_steps import LocalOnlyStepsHyper, local_only_steps
from fedcodist.algorithms.graph.mhd_costs import memory_for_checkpoints
from fedcodist.algorithms.graph.mhd_exchange import CheckpointExchange, exchange_schedule
from fedcodist.algorithms.graph.mhd_losses import HeadDistillation
from fedcodist.algorithms.graph.multi_headed_distillation import (
    MHDHyper,
    multi_headed_distillation,
)
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.shared_examples import PUBLIC
from fedcodist.core import keys
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_steps import CLIENT_STEPS, StepTraining
from fedcodist.core.memory import available_bytes, host_bytes
from fedcodist.core.model import Variables
from fedcodist.core.shuffling import stream_positions
from fedcodist.data.federated_data import FederatedData
from fedcodist.models import MLP, BatchNormMLP
from fedcodist.models.multi_headed import multi_headed
from fedcodist.models.resnet_imagenet import resnet18, resnet34
from fedcodist.run.blocks import Trained
from fedcodist.run.checkpoint import save_checkpoint
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.placement import replicate
from fedcodist.run.programs import build_programs
from fedcodist.run.resume import start_or_resume, whole_state
from fedcodist.run.run_folder import RunFolder
from fedcodist.run.sources import resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLASSES, FEATURES, CLIENTS = 3, 4, 8
SIZES = (5, 7, 6, 4, 9, 5, 6, 8)
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(sum(SIZES), FEATURES)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, sum(SIZES)).astype(np.int32)
PUBLIC_COLUMNS = {"image": GENERATOR.normal(size=(20, FEATURES)).astype(np.float32)}
EXAMPLE = jnp.zeros((1, FEATURES))
TRAINING = StepTraining(batch_size=3, steps=2)
DISTILLATION = HeadDistillation(batch_size=4, exchange=CheckpointExchange(3))


def exchanging(distillation=DISTILLATION, **options):
    """The same distillation with another exchange of checkpoints."""
    return distillation._replace(exchange=distillation.exchange._replace(**options))


@pytest.fixture
def beside_an_accelerator(monkeypatch):
    """Checkpoints "on the host" are there, which makes no difference to a CPU otherwise."""
    is_on_host = property(lambda exchange: exchange.checkpoints_on == "host")
    monkeypatch.setattr(CheckpointExchange, "is_on_host", is_on_host)


@functools.cache
def mlp(hidden, heads, projection=None):
    return multi_headed(MLP((hidden,), classes=None), EXAMPLE, CLASSES, heads, projection)


def alike(heads=1, clients=CLIENTS):
    return {"net": PartyGroup(mlp(3, heads), np.arange(clients))}


def two(heads=2):
    return {
        "narrow": PartyGroup(mlp(3, heads, 4), np.array([0, 2])),
        "wide": PartyGroup(mlp(5, heads, 4), np.array([3, 1])),
    }


def mhd(groups, graph, num_rounds=5, training=TRAINING, distillation=DISTILLATION, **options):
    return multi_headed_distillation(
        groups, PUBLIC_COLUMNS, graph, num_rounds, training, distillation, **options
    )


class Run:
    """One algorithm's programs, and the data of its clients."""

    def __init__(self, algorithm, devices=None, most=6):
        self.mesh = devices and jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("clients",))
        self.algorithm = algorithm
        self.programs = build_programs(algorithm, most, self.mesh)
        self.seeds = np.zeros(1, np.uint32)

    def start(self):
        return jax.tree.map(np.asarray, self.programs.init(self.seeds))

    def __call__(self, rounds, images=IMAGES, state=None, hyper=None, first=0):
        """(state, metrics) on the host, of the one seed."""
        sizes = SIZES[: self.algorithm.num_clients]
        columns = {"image": images[: sum(sizes)], "label": LABELS[: sum(sizes)]}
        private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
        data = resident_data(private, {PUBLIC: PUBLIC_COLUMNS})
        hyper = self.algorithm.hyper if hyper is None else hyper
        kind = jax.dtypes.canonicalize_dtype(float)
        hyper = jax.tree.map(lambda value: np.asarray(value, kind), hyper)
        state = self.start() if state is None else state
        put = functools.partial(replicate, mesh=self.mesh)
        state, _, metrics = self.programs.train(
            *put((state, {}, self.seeds, np.int32(first), np.int32(rounds), hyper, data))
        )
        one = jax.tree.map(lambda leaf: np.asarray(leaf)[0], (state, metrics))
        return one[0], {name: values[:rounds] for name, values in one[1].items()}


def by_client(algorithm_groups, state):
    """client -> parameters."""
    learners = getattr(state, "learners", state)
    return {
        int(client): jax.tree.map(lambda leaf, i=i: leaf[i], learners[name].variables.params)
        for name, group in algorithm_groups.items()
        for i, client in enumerate(np.sort(group.clients))
    }


def part(params, head):
    """The logits of head `head` for an embedding."""
    if head == 0:
        return params["main"]
    return jax.tree.map(lambda leaf: leaf[head - 1], params["aux"])


def same(left, right):
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def perturbed(client):
    """The images, with those of one client replaced."""
    images, ends = IMAGES.copy(), np.cumsum([0, *SIZES])
    images[ends[client] : ends[client + 1]] *= -1
    return images


# ---------------------------------------------------------------------------------- plain NumPy


def softmax(logits):
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


def forward(params, images):
    dense = params["backbone"]["Dense_0"]
    hidden = np.maximum(images @ dense["kernel"] + dense["bias"], 0)
    heads = [params["main"]]
    heads += [part(params, k + 1) for k in range(len(params["aux"]["bias"]))]
    logits = np.stack([hidden @ h["kernel"] + h["bias"] for h in heads], axis=1)
    projected = hidden @ params["projection"]["kernel"]
    return hidden, logits, projected


def backward(params, images, slope_logits, slope_projected):
    """The gradient of all parameters, from slopes [B, heads, classes] and [B, width]."""
    hidden, _, _ = forward(params, images)
    heads = [params["main"]]
    heads += [part(params, k + 1) for k in range(len(params["aux"]["bias"]))]
    back = slope_projected @ params["projection"]["kernel"].T
    kernels, biases = [], []
    for head, each in enumerate(heads):
        kernels.append(hidden.T @ slope_logits[:, head])
        biases.append(slope_logits[:, head].sum(0))
        back = back + slope_logits[:, head] @ each["kernel"].T
    back = back * (hidden > 0)
    return {
        "aux": {"bias": np.stack(biases[1:]), "kernel": np.stack(kernels[1:])},
        "backbone": {"Dense_0": {"bias": back.sum(0), "kernel": images.T @ back}},
        "main": {"bias": biases[0], "kernel": kernels[0]},
        "projection": {"kernel": hidden.T @ slope_projected},
    }


def distillation_slopes(own, teachers, embedding_weight, head_weight, separate_levels):
    """Slopes of logits and projected embedding, example by example (equations 2 to 5, "All")."""
    _, logits, projected = own
    slope_logits, slope_projected = np.zeros_like(logits), np.zeros_like(projected)
    batch, heads, _ = logits.shape
    for x in range(batch):
        length = np.sqrt((projected[x] ** 2).sum())
        for _, _, other in teachers if length > 0 else ():
            target = other[x] / (np.sqrt((other[x] ** 2).sum()) or 1)
            unit = projected[x] / length
            # d/da of |a/|a| - b|^2 is 2 (I - a a') (a - b) / |a| with a of length one.
            pull = 2 * (unit - target)
            slope_projected[x] += (pull - unit * (unit @ pull)) / length * embedding_weight / batch
        for k in range(1, heads):
            before, same = (
                [softmax(outputs[x, level]) for outputs in (*(o for _, o, _ in teachers), logits)]
                for level in (k - 1, k)
            )
            for competing in (before, same) if separate_levels else (before + same,):
                surest = max(range(len(competing)), key=lambda n: competing[n].max())
                slope = softmax(logits[x, k]) - competing[surest]
                slope_logits[x, k] += slope * head_weight / batch
    return slope_logits, slope_projected


def plain_run(params, architectures, schedule, rounds, hyper, algorithm, separate_levels):
    """client -> parameters after some rounds; a loop over steps, clients and examples."""
    root = jax.random.key(0)
    own_keys = {c: keys.derive(root, CLIENT_STEPS, c) for c in params}
    starts = np.cumsum([0, *SIZES])
    velocity = jax.tree.map(np.zeros_like, params)
    pools = {c: [params[int(s)] for s in schedule.first_source[c]] for c in params}
    total = rounds * TRAINING.steps
    positions = jax.jit(stream_positions, static_argnums=(2,))
    for round in range(rounds):
        public_rows = np.asarray(algorithm.select(round, root).examples[PUBLIC])
        if round:
            fresh = {c: params[int(schedule.source[round, c])] for c in params}
            for c in params:
                pools[c][schedule.replaced[round, c]] = fresh[c]
        for index in range(TRAINING.steps):
            step = round * TRAINING.steps + index
            new = {}
            for c in params:
                rows = starts[c] + np.asarray(
                    positions(
                        keys.derive(own_keys[c], "private"),
                        step * TRAINING.batch_size,
                        TRAINING.batch_size,
                        SIZES[c],
                    )
                )
                images = IMAGES[rows].astype(np.float64)
                _, logits, projected = forward(params[c], images)
                slope = np.zeros_like(logits)
                one_hot = np.eye(CLASSES)[LABELS[rows]]
                slope[:, 0] = (softmax(logits[:, 0]) - one_hot) / len(rows)
                private = backward(params[c], images, slope, np.zeros_like(projected))

                images = PUBLIC_COLUMNS["image"][public_rows[c, index]].astype(np.float64)
                key = keys.derive(own_keys[c], "step", step, "further", "teachers")
                drawn = jax.random.choice(key, len(pools[c]), (2,), replace=False)
                teachers = [forward(pools[c][int(d)], images) for d in drawn]
                weights = (hyper.embedding_weight, hyper.head_weight)
                slopes = distillation_slopes(
                    forward(params[c], images), teachers, *weights, separate_levels
                )
                public = backward(params[c], images, *slopes)
                rate = hyper.learning_rate * (1 + np.cos(np.pi * step / total)) / 2
                velocity[c] = jax.tree.map(
                    lambda v, a, b: 0.9 * v + a + b, velocity[c], private, public
                )
                new[c] = jax.tree.map(lambda p, v, r=rate: p - r * v, params[c], velocity[c])
            params = new
    return params


def in_float64(tree):
    widen = lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf
    return jax.tree.map(widen, tree)


@pytest.mark.parametrize("separate_levels", [True, False])
def test_ten_steps_of_two_architectures_are_those_of_a_plain_loop(separate_levels):
    rounds = 5
    graph = graphs.directed_cycle(4) | graphs.islands(4, 2)
    distillation = DISTILLATION._replace(
        teachers=2, candidates="same_level_and_self", separate_levels=separate_levels
    )
    hyper = MHDHyper(0.2, 0.7, 1.5)
    groups = two()
    with jax.enable_x64(True):
        algorithm = mhd(groups, graph, rounds, distillation=distillation, hyper=hyper)
        run = Run(algorithm)
        state = in_float64(run.start())
        first = jax.tree.map(lambda leaf: leaf[0], state)
        found, metrics = run(rounds, state=state)
        checked = {name: g._replace(clients=np.sort(g.clients)) for name, g in groups.items()}
        schedule = exchange_schedule(checked, graph, 3, rounds, 0)
        expected = plain_run(
            by_client(groups, first), groups, schedule, rounds, hyper, algorithm, separate_levels
        )
    for client, params in by_client(groups, found).items():
        before = by_client(groups, first)[client]
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, before)
        assert min(max(jax.tree.leaves(moved[name])) for name in moved) > 0.05
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10),
            params,
            expected[client],
        )
    assert all(metrics[f"{party}/finite"].all() for party in algorithm.communication)


# ------------------------------------------------------------------------------ how far it travels


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_head_k_knows_nothing_from_more_than_k_hops_away(seed):
    # With backbones that distillation does not reach. Same-level candidates would go further.
    graph = graphs.random_graph(CLIENTS, 0.1, seed)
    distance = graphs.hops(graph)
    assert (distance > 2).any() and (distance == graphs.UNREACHABLE).any()
    kind = HeadDistillation(
        4, candidates="self", reaches_backbone=False, exchange=CheckpointExchange(2)
    )
    training = StepTraining(batch_size=3, steps=1)
    groups = alike(heads=3)
    run = Run(mhd(groups, graph, 12, training, kind, hyper=MHDHyper(0.3)), most=12)
    plain = by_client(groups, run(12)[0])
    reached = set()
    for changed in range(CLIENTS):
        other = by_client(groups, run(12, perturbed(changed))[0])
        for client in range(CLIENTS):
            hops = distance[client, changed]
            for head in range(4):
                if hops == graphs.UNREACHABLE or head < hops:
                    assert same(part(plain[client], head), part(other[client], head))
                elif not same(part(plain[client], head), part(other[client], head)):
                    reached.add((hops, head))
            if hops:
                assert same(plain[client]["backbone"], other[client]["backbone"])
    assert {(0, 0), (1, 1), (2, 2), (3, 3)} <= reached


def test_knowledge_goes_one_hop_with_each_refresh():
    # Through shared backbones all heads learn of it, but not before the checkpoints are there.
    kind = HeadDistillation(4, exchange=CheckpointExchange(1))
    training = StepTraining(batch_size=3, steps=1)
    groups = alike(heads=1)
    # Where heads weigh no more than the task, the effect over three hops is below float32's rounding.
    hyper = MHDHyper(head_weight=3.0)
    run = Run(mhd(groups, graphs.directed_cycle(CLIENTS), 6, training, kind, hyper=hyper))
    distance = graphs.hops(graphs.directed_cycle(CLIENTS))
    for rounds in (1, 2, 4):
        plain, other = (
            by_client(groups, run(rounds, images)[0]) for images in (IMAGES, perturbed(5))
        )
        for client in range(CLIENTS):
            assert same(plain[client], other[client]) == (distance[client, 5] > rounds - 1)


@pytest.mark.slow
def test_islands_keep_what_they_know():
    groups = alike(heads=2)
    kind = exchanging(checkpoints_per_client=1)
    run = Run(mhd(groups, graphs.islands(CLIENTS, 2), distillation=kind))
    plain, other = (by_client(groups, run(5, images)[0]) for images in (IMAGES, perturbed(3)))
    assert [same(plain[c], other[c]) for c in range(CLIENTS)] == [c not in (2, 3) for c in range(8)]


# --------------------------------------------------------------------- what does not change anything


@pytest.mark.slow
def test_without_weights_clients_train_as_if_alone():
    groups = alike(heads=2, clients=4)
    nothing = MHDHyper(0.1, 0.0, 0.0)
    run = Run(mhd(groups, graphs.complete(4), hyper=nothing))
    learnt = by_client(groups, run(5)[0])
    # Bit for bit in one program: the teachers have no effect.
    state = run.start()
    state = state._replace(banks=jax.tree.map(lambda leaf: -leaf, state.banks))
    assert same(learnt, by_client(groups, run(5, state=state)[0]))
    # And to float32's precision in a program without distillation and auxiliary heads.
    alone = alike(heads=0, clients=4)
    apart = by_client(
        alone, Run(local_only_steps(alone, 5, TRAINING, hyper=LocalOnlyStepsHyper(0.1)))(5)[0]
    )
    for client, params in apart.items():
        assert set(params) == {"backbone", "main"}
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            {name: learnt[client][name] for name in params},
            params,
        )
    for client in range(4):  # heads that nobody teaches stay as they were
        first = by_client(groups, jax.tree.map(lambda leaf: leaf[0], run.start()))[client]
        assert same(first["aux"], learnt[client]["aux"])
    # The same program with weights does something else.
    taught = by_client(groups, run(5, hyper=MHDHyper(0.1, 1.0, 3.0))[0])
    assert not same(taught[0]["backbone"], learnt[0]["backbone"])


@pytest.mark.slow
def test_one_client_without_neighbours_chases_its_own_main_head():
    groups = alike(heads=1, clients=1)
    kind = HeadDistillation(8, teachers=0, reaches_backbone=False)
    algorithm = mhd(groups, np.zeros((1, 1)), 60, TRAINING, kind, hyper=MHDHyper(0.2))
    assert algorithm.communication["net"] == (0, 0)
    run = Run(algorithm, most=60)
    state, _ = run(60)
    params = by_client(groups, state)[0]
    alone = Run(local_only_steps(groups, 60, TRAINING, hyper=LocalOnlyStepsHyper(0.2)), most=60)
    apart = by_client(groups, alone(60)[0])[0]
    for name in ("backbone", "main"):  # the main head's way is not touched
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            params[name],
            apart[name],
        )

    def gap(params):
        outputs = mlp(3, 1).apply(Variables(params, {}), PUBLIC_COLUMNS)[0]
        main, auxiliary = np.moveaxis(np.asarray(jax.nn.softmax(outputs.logits)), 1, 0)
        return np.abs(main - auxiliary).mean()

    first = by_client(groups, jax.tree.map(lambda leaf: leaf[0], run.start()))[0]
    assert gap(params) < 0.3 * gap(first | {n: params[n] for n in ("backbone", "main")})


@pytest.mark.slow
def test_running_statistics_are_of_private_batches_unless_asked():
    def statistics(**options):
        network = multi_headed(BatchNormMLP((3,), classes=None), EXAMPLE, CLASSES, 1)
        groups = {"net": PartyGroup(network, np.arange(2))}
        kind = DISTILLATION._replace(**options)
        # No learning: the statistics depend on the batches alone.
        algorithm = mhd(groups, graphs.complete(2), 1, TRAINING, kind, hyper=MHDHyper(0.0))
        return Run(algorithm)(1)[0].learners["net"].variables.mutable

    private = statistics()
    assert same(private, statistics(candidates="same_level"))
    assert not same(private, statistics(updates_statistics=True))


@pytest.mark.slow
def test_teachers_are_in_inference_mode_and_clients_in_training_mode():
    network = multi_headed(BatchNormMLP((3,), classes=None), EXAMPLE, CLASSES, 1)
    groups = {"net": PartyGroup(network, np.arange(2))}
    constant = StepTraining(optax.sgd, batch_size=3, steps=1, schedule=lambda rate, done: rate)
    kind = HeadDistillation(4, exchange=CheckpointExchange(1))
    algorithm = mhd(groups, graphs.complete(2), 1, constant, kind, hyper=MHDHyper(0.1, 0.5, 2.0))
    run = Run(algorithm)
    state = run.start()
    learner = state.learners["net"]
    # Running averages that are not those of any batch.
    moved = lambda variables: variables._replace(
        mutable=jax.tree.map(lambda leaf: leaf + np.float32(0.7), variables.mutable)
    )
    state = state._replace(
        learners={"net": learner._replace(variables=moved(learner.variables))},
        banks={"net": moved(state.banks["net"])},
    )
    found = by_client(groups, run(1, state=state)[0])[0]

    root = jax.random.key(0)
    models = state.learners["net"].variables
    own, other = (jax.tree.map(lambda leaf, c=c: leaf[0, c], models) for c in (0, 1))
    private_key = keys.derive(root, CLIENT_STEPS, 0, "private")
    rows = np.asarray(stream_positions(private_key, 0, 3, SIZES[0]))
    private = {"image": IMAGES[rows], "label": LABELS[rows]}
    seen = np.asarray(algorithm.select(0, root).examples[PUBLIC])[0, 0]
    public = {"image": PUBLIC_COLUMNS["image"][seen]}

    def after(teacher_trains):
        theirs = network.apply(other, public, train=teacher_trains)[0]

        def loss(params):
            mine = Variables(params, own.mutable)
            outputs, _ = network.apply(mine, private, train=True)
            total = jnp.mean(network.loss(outputs, private))
            outputs, _ = network.apply(mine, public, train=True)
            unit = lambda vector: vector / jnp.linalg.norm(vector, axis=-1, keepdims=True)
            apart = jnp.sum((unit(outputs.embedding) - unit(theirs.embedding)) ** 2, axis=-1)
            mains = jnp.stack([theirs.logits[:, 0], outputs.logits[:, 0]])
            competing = jax.nn.softmax(jax.lax.stop_gradient(mains))
            surest = jnp.argmax(competing.max(axis=-1), axis=0)
            target = competing[surest, jnp.arange(4)]
            taught = -jnp.sum(target * jax.nn.log_softmax(outputs.logits[:, 1]), axis=-1)
            return total + 0.5 * jnp.mean(apart) + 2.0 * jnp.mean(taught)

        return jax.tree.map(lambda a, b: a - 0.1 * b, own.params, jax.grad(loss)(own.params))

    apart = lambda a, b: max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)))
    assert apart(found, after(False)) < 1e-5 < 1e-3 < apart(found, after(True))


@pytest.mark.slow
def test_an_architecture_may_be_nobody_s_teacher():
    groups = {
        "net": PartyGroup(mlp(3, 1), np.array([0, 1])),
        "pupil": PartyGroup(mlp(3, 1), np.array([2])),
    }
    graph = np.array([[0, 1, 0], [1, 0, 0], [1, 1, 0]])
    algorithm = mhd(groups, graph, 2)
    assert "0 of pupil" in algorithm.notes[0]
    run = Run(algorithm)
    state, metrics = run(2)
    assert metrics["pupil/finite"].all()
    first = by_client(groups, jax.tree.map(lambda leaf: leaf[0], run.start()))
    assert not same(first[2]["aux"], by_client(groups, state)[2]["aux"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "execution"), [(None, Execution()), (4, Execution()), (None, Execution("vmap", 2))]
)
def test_checkpoints_may_be_on_the_host(devices, execution, beside_an_accelerator):
    groups, graph = two(heads=1), graphs.directed_cycle(4) | graphs.islands(4, 2)
    kind = DISTILLATION._replace(teachers=2)
    expected, _ = Run(mhd(groups, graph, distillation=kind))(5)
    kind = exchanging(kind, checkpoints_on="host")
    algorithm = mhd(groups, graph, distillation=kind, execution=execution)
    run = Run(algorithm, devices)
    assert run.start().banks == {} and " on the host (" in algorithm.notes[0]
    found, _ = run(5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found.learners, expected.learners)
    # The host's copy equals what would be on the device.
    _, banks = algorithm.host_state.state()
    for name, bank in expected.banks.items():
        jax.tree.map(lambda a, b: close(a[0], b), banks[name], jax.tree.leaves(bank))
    # Other seeds have other stored checkpoints.
    run.seeds = np.ones(1, np.uint32)
    run(1)
    assert [len(leaf) for leaf in algorithm.host_state.state()[1]["wide"]] == [2] * 7


def test_a_cpu_s_memory_is_the_hosts():
    algorithm = mhd(alike(), graphs.complete(8), distillation=exchanging(checkpoints_on="host"))
    assert algorithm.host_state is None and "host" not in algorithm.notes[0]


@pytest.mark.slow
def test_a_killed_run_with_checkpoints_on_the_host_goes_on_with_the_same_bits(
    tmp_path, beside_an_accelerator
):
    sizes = SIZES[:3]
    columns = {"image": IMAGES[: sum(sizes)], "label": LABELS[: sum(sizes)]}
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
    test = FederatedData.from_arrays(columns, offsets=[0, sum(sizes)])

    def run(folder, callbacks=()):
        # As in a new process, nothing is on the host yet.
        kind = exchanging(checkpoints_on="host", checkpoints_per_client=2)
        algorithm = mhd(alike(heads=1, clients=3), graphs.complete(3), 6, distillation=kind)
        data = resident_data(private, {PUBLIC: PUBLIC_COLUMNS})
        experiment = Experiment(algorithm, data, {"test": test}, 6, evaluate_every=2, seeds=2)
        return run_experiment(experiment, folder, callbacks=callbacks, show_progress=False)

    def killed(records):
        if records[0]["round"] == 4:
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", [killed])
    again = run(tmp_path / "killed")
    assert same(whole.variables, again.variables)
    assert whole.records == again.records


def test_a_resumed_run_has_the_checkpoints_that_lay_on_the_host(tmp_path, beside_an_accelerator):
    """Without a round: as in a new process, nothing is on the host before the run is resumed."""
    kind = exchanging(checkpoints_on="host", checkpoints_per_client=2)
    columns = {"image": IMAGES[:3], "label": LABELS[:3]}
    private = FederatedData.from_arrays(columns, offsets=np.arange(4))

    def before():
        algorithm = mhd(alike(heads=1, clients=3), graphs.complete(3), 6, distillation=kind)
        data = resident_data(private, {PUBLIC: PUBLIC_COLUMNS})
        return Experiment(algorithm, data, {}, 6)

    killed, again = before(), before()
    run = jax.random.key_data(jax.random.key(3))[None]
    draws = np.random.default_rng(0)
    of_run = lambda leaf: draws.normal(size=(1, *leaf.shape[1:])).astype(leaf.dtype)
    banks = jax.tree.map(of_run, killed.algorithm.host_state.shapes()[1])
    killed.algorithm.host_state.restore((np.asarray(run), banks))
    folder, programs = RunFolder(tmp_path), build_programs(again.algorithm, 1)
    seeds = np.zeros(1, np.uint32)
    trained = Trained(programs.init(seeds), {})
    saved = whole_state(killed.algorithm, trained, None)
    save_checkpoint(folder.checkpoints, 2, saved, {"metrics_length": 0})
    assert len(again.algorithm.host_state.state()[0]) == 0
    _, round, _ = start_or_resume(programs, seeds, None, folder, again, None)
    runs, found = again.algorithm.host_state.state()
    assert round == 2 and np.array_equal(runs, run)
    assert same(found, banks) and len(jax.tree.leaves(banks)) > 1
    # A run that begins has none of those of earlier runs, and so have its checkpoints.
    start_or_resume(programs, seeds, None, None, again, None)
    runs, found = again.algorithm.host_state.state()
    assert len(runs) == 0 and not any(map(len, jax.tree.leaves(found)))


@pytest.mark.parametrize(
    ("devices", "execution"),
    [
        pytest.param(8, Execution(), marks=pytest.mark.slow),
        pytest.param(2, Execution("vmap", 3), marks=pytest.mark.slow),
        pytest.param(None, Execution("vmap", 8), marks=pytest.mark.slow),
    ],
)
def test_devices_and_vmap_compute_the_same(devices, execution):
    state, metrics = plain_outcome()
    run = Run(mhd(alike(heads=2), graphs.complete(CLIENTS), execution=execution), devices)
    found, found_metrics = run(5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, found, state)
    jax.tree.map(close, found_metrics, metrics)


@functools.cache
def plain_outcome():
    return Run(mhd(alike(heads=2), graphs.complete(CLIENTS)))(5)


@pytest.mark.slow
def test_a_run_in_two_parts_ends_with_the_same_bits():
    groups = alike(heads=1, clients=3)
    run = Run(mhd(groups, graphs.complete(3)))
    whole, _ = run(5)
    half, _ = run(2)
    rest, _ = run(3, state=jax.tree.map(lambda leaf: leaf[None], half), first=2)
    assert same(whole, rest)


@pytest.mark.slow
def test_a_graph_that_changes_is_followed():
    groups = alike(heads=1, clients=4)
    first = graphs.islands(4, 2)
    changing = np.stack([first, first, first, graphs.directed_cycle(4), graphs.directed_cycle(4)])
    kind = exchanging(checkpoints_per_client=1)
    run = Run(mhd(groups, changing, 5, distillation=kind))
    for rounds, reached in ((3, {2, 3}), (4, {1, 2, 3})):
        plain, other = (by_client(groups, run(rounds, i)[0]) for i in (IMAGES, perturbed(2)))
        assert {c for c in range(4) if not same(plain[c], other[c])} == reached


# --------------------------------------------------------------------------------- end to end, limits


@pytest.mark.slow
def test_every_head_of_every_client_is_evaluated_and_bytes_are_counted():
    groups = two(heads=2)
    algorithm = mhd(groups, graphs.directed_cycle(4), 4, hyper=MHDHyper(0.1))
    sizes = SIZES[:4]
    columns = {"image": IMAGES[: sum(sizes)], "label": LABELS[: sum(sizes)]}
    private = FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))
    test = FederatedData.from_arrays(columns, offsets=[0, sum(sizes)])
    outcome = run_experiment(
        Experiment(algorithm, resident_data(private, {PUBLIC: PUBLIC_COLUMNS}), {"test": test}, 4),
        show_progress=False,
    )
    records = [r for r in outcome.records if r["split"] == "test" and r["round"] == 4]
    assert {r["model"] for r in records} == {"narrow_0", "narrow_2", "wide_1", "wide_3"}
    for record in records:
        for name in ("accuracy", "accuracy_head_1", "accuracy_head_2"):
            assert 0 <= record[name] <= 1
            assert len(record[f"per_label_{name}"]) == CLASSES
    # On a cycle each client gets its one neighbour's checkpoint, first and in each of three refreshes.
    size = {
        name: sum(leaf.size * 4 for leaf in jax.tree.leaves(group.model.init(jax.random.key(0))))
        for name, group in groups.items()
    }
    for party, source in (("narrow_0", "wide"), ("wide_1", "narrow"), ("wide_3", "narrow")):
        assert algorithm.communication[party] == (size[source], size[party.split("_")[0]])


@pytest.mark.parametrize(
    ("count", "candidates", "embedding_weight"),
    [(1, "base", 1.0), (2, "same_level_and_self", 0.0), (CLASSES, "base", 0.0)],
)
def test_bytes_of_predictions_are_those_of_a_live_exchange(count, candidates, embedding_weight):
    rounds, graph, seed = 6, graphs.random_graph(5, 0.6, 1), 3
    groups = alike(heads=2, clients=5)
    exchange = CheckpointExchange(3, seed=seed)
    kind = HeadDistillation(
        4, teachers=2, candidates=candidates, top_predictions=count, exchange=exchange
    )
    algorithm = mhd(groups, graph, rounds, distillation=kind, hyper=MHDHyper(0.1, embedding_weight))
    # Of one example: of each head that teaches, probabilities and one byte for each one's class.
    heads = 3 if candidates == "same_level_and_self" else 2
    of_example = heads * count * (4 if count == CLASSES else 5) + 3 * 4 * (embedding_weight > 0)
    # Draw by draw: each pair of a buffer's entries is as likely.
    schedule = exchange_schedule(groups, graph, 3, rounds, seed)
    sent = np.zeros(5)
    buffers = schedule.first_source.copy()
    for round in range(rounds):
        for client in range(5):
            if schedule.source[round, client] >= 0:
                buffers[client, schedule.replaced[round, client]] = schedule.source[round, client]
            for pair in ((0, 1), (0, 2), (1, 2)):
                for source in buffers[client, list(pair)]:
                    sent[source] += TRAINING.steps * 4 * of_example / 3
    down = TRAINING.steps * 4 * 2 * of_example
    for client in range(5):
        expected = (down, np.ceil(sent[client] / rounds - 1e-6))
        assert algorithm.communication[f"net_{client}"] == expected


def test_banks_are_announced_and_refused_where_they_do_not_fit(beside_an_accelerator):
    groups, graph = alike(heads=1, clients=4), graphs.complete(4)
    algorithm = mhd(groups, graph)
    assert algorithm.notes[0].startswith("checkpoints in the clients' buffers: 0.00")
    bank = jax.eval_shape(algorithm.init, jax.random.key(0)).banks["net"]
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(bank))
    mhd(groups, graph, distillation=exchanging(memory=needed))
    with pytest.raises(
        ValueError, match=r"checkpoints_per_client: the checkpoints in clients' buffers need .* MiB"
    ):
        mhd(groups, graph, distillation=exchanging(memory=needed - 1))
    kind = exchanging(checkpoints_on="host")
    assert memory_for_checkpoints(kind.exchange, 2) == host_bytes(2) == host_bytes() // 2
    assert memory_for_checkpoints(DISTILLATION.exchange, 2) == available_bytes(2) < host_bytes(2)
    mhd(groups, graph, distillation=exchanging(kind, memory=needed))
    with pytest.raises(
        ValueError, match=r"checkpoints_per_client: .* MiB of the host; fewer checkpoints"
    ) as caught:
        mhd(groups, graph, distillation=exchanging(kind, memory=needed - 1))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_papers_networks_learn_from_each_other_without_a_projection():
    """Shapes alone: three ResNet-18 and a ResNet-34, four heads, images of 224 x 224."""
    example = jnp.zeros((1, 224, 224, 3))
    small, large = (
        multi_headed(make(classes=None), example, 1000, heads=4) for make in (resnet18, resnet34)
    )
    groups = {
        "resnet18": PartyGroup(small, np.arange(1, 4)),
        "resnet34": PartyGroup(large, np.array([0])),
    }
    public = {"image": jax.ShapeDtypeStruct((5000, 224, 224, 3), np.uint8)}
    kind = HeadDistillation(
        preprocess=lambda batch, key, positions: {"image": jnp.asarray(batch["image"], float)}
    )
    algorithm = multi_headed_distillation(
        groups, public, graphs.complete(4), 300, StepTraining(), exchanging(kind, memory=2**40)
    )
    # Its parameters, four heads more, and batch normalisation's averages of 8,512 channels.
    whole = 4 * (21_797_672 + 4 * 513_000 + 2 * 8_512)
    assert f"of resnet34 with {whole / 2**20:,.3g} MiB" in algorithm.notes[0]
    with pytest.raises(ValueError, match=r"buffers need .* MiB .* may take 256 MiB of a device"):
        multi_headed_distillation(
            groups, public, graphs.complete(4), 300, StepTraining(), exchanging(kind, memory=2**28)
        )


ISLAND = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mhd(alike(clients=3), ISLAND), "client 2 has none"),
        (lambda: mhd(alike(clients=3), graphs.complete(4)), "an edge from 0 to 3"),
        (
            lambda: mhd(alike(clients=3), np.stack([graphs.complete(3)] * 4)),
            "each of the run's 5 rounds, it has those of 4",
        ),
        (
            lambda: mhd(
                {
                    "a": PartyGroup(mlp(3, 1), np.array([0])),
                    "b": PartyGroup(mlp(5, 1), np.array([1])),
                },
                graphs.complete(2),
            ),
            r"same width of the embedding, got .'a': 3, 'b': 5.; multi_headed\(..., projection",
        ),
        (
            lambda: mhd(
                {
                    "a": PartyGroup(mlp(3, 1), np.array([0])),
                    "b": PartyGroup(mlp(3, 2), np.array([1])),
                },
                graphs.complete(2),
            ),
            "same auxiliary heads, got",
        ),
        (
            lambda: mhd({"a": PartyGroup(mlp(3, 1), np.array([0, 2]))}, graphs.complete(3)),
            "clients 0 to 2 without a gap, it has 2 of them",
        ),
        (
            lambda: mhd(
                alike(), graphs.complete(8), distillation=DISTILLATION._replace(teachers=4)
            ),
            "teachers must be at most the 3 checkpoints of a buffer, got 4",
        ),
        (
            lambda: mhd(
                alike(), graphs.complete(8), distillation=DISTILLATION._replace(top_predictions=4)
            ),
            "top_predictions must be at most 3, got 4",
        ),
        (
            lambda: mhd(
                alike(), graphs.complete(8), distillation=DISTILLATION._replace(top_predictions=0)
            ),
            "top_predictions must be at least 1, got 0",
        ),
        (
            lambda: mhd(
                alike(), graphs.complete(8), distillation=DISTILLATION._replace(candidates="all")
            ),
            r"candidates must be one of \['base', .*, got 'all'",
        ),
        (
            lambda: mhd(
                alike(),
                graphs.complete(8),
                distillation=exchanging(checkpoints_on="gpu"),
            ),
            r"checkpoints_on must be one of \['device', 'host'\], got 'gpu'",
        ),
        (
            lambda: mhd(alike(), graphs.complete(8), hyper=MHDHyper(head_weight=-1.0)),
            "head_weight must be at least 0",
        ),
        (
            lambda: multi_headed_distillation(
                alike(), {"image": np.zeros((0, 4))}, graphs.complete(8), 5
            ),
            "public must not be empty",
        ),
        (
            lambda: multi_headed_distillation(
                alike(), {"image": [[0.0] * 4]}, graphs.complete(8), 5
            ),
            r"public\['image'\] must be an array",
        ),
        (
            lambda: multi_headed_distillation(
                alike(), {"picture": np.zeros((2, 4))}, graphs.complete(8), 5
            ),
            r"groups\['net'\]\.model\.apply looks up 'image', .*: public has the columns \['picture'\]",
        ),
        (
            lambda: mhd(
                alike(),
                graphs.complete(8),
                distillation=DISTILLATION._replace(preprocess=lambda batch: batch),
            ),
            "distillation.preprocess must be a function",
        ),
        (
            lambda: mhd(alike(), graphs.complete(8), training=StepTraining(optax.sgd(0.1))),
            "optimizer must be a function of the learning rate",
        ),
        (lambda: mhd(alike(), graphs.complete(8), num_rounds=0), "num_rounds must be at least 1"),
        (
            lambda: local_only_steps(alike(), 5, TRAINING, num_shared=0),
            "num_shared must be at least 1",
        ),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_empty_private_set_is_one_clear_line():
    columns = {"image": IMAGES[:5], "label": LABELS[:5]}
    with pytest.raises(ValueError, match="'1'") as caught:
        resident_data(FederatedData.from_arrays(columns, offsets=[0, 5, 5]))
    assert "\n" not in str(caught.value)
