"""First values of clients on a graph, and effects of MHD's and FedKD's settings in configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from experiments.configs import ade_fed_kd, cifar100_mhd, cifar_fed_kd, mind_fed_kd
from fedcodist.algorithms.clients.fed_kd_losses import (
    MutualLosses,
    Outputs,
    hidden_distance,
    mutual_losses,
)
from fedcodist.algorithms.graph import graphs
from fedcodist.compression.spectra import spectra
from fedcodist.config.experiment import build_experiment
from fedcodist.config.registry import ENTRIES, function_of
from fedcodist.configs import digits_fed_kd, digits_mhd
from fedcodist.core.inputs import ClientData
from fedcodist.core.layer_outputs import LayerOutputs
from fedcodist.core.model import Model, Variables, cross_entropy

pytestmark = pytest.mark.usefixtures("compile_quickly")

# ------------------------------------------------------------------------------ first values


def spread(tree):
    """The largest difference between clients of an architecture."""
    return max(float(np.ptp(leaf, axis=0).max()) for leaf in jax.tree.leaves(tree))


def groups():
    return {
        "a": fc.PartyGroup(linear(), np.arange(3)),
        "b": fc.PartyGroup(linear(), np.array([3, 4])),
    }


def first_spread(algorithm):
    """Of the state before the first round."""
    state = jax.jit(algorithm.init)(jax.random.key(0))
    return {name: spread(learner.variables.params) for name, learner in state.items()}


def test_fed_avg_of_a_graph_starts_from_one_model_and_others_from_their_own():
    common = dict(training=fc.StepTraining(batch_size=2, steps=1))
    averaged = fc.decentralised_fed_avg(groups(), 2, **common)
    assert first_spread(averaged) == {"a": 0, "b": 0}
    apart = fc.decentralised_fed_avg(groups(), 2, same_start=False, **common)
    assert min(first_spread(apart).values()) > 0
    assert min(first_spread(fc.local_only_steps(groups(), 2, **common)).values()) > 0
    assert first_spread(fc.local_only_steps(groups(), 2, same_start=True, **common)) == {
        "a": 0,
        "b": 0,
    }
    taught = lambda **asked: fc.decentralised_periodic_codistillation(
        groups(), fc.PublicAnswers(4, 4), 2, graphs.complete(5), **common, **asked
    )
    assert min(first_spread(taught()).values()) > 0
    assert first_spread(taught(same_start=True)) == {"a": 0, "b": 0}
    # The first client keeps the values that it has in every other method.
    one, other = (
        jax.jit(a.init)(jax.random.key(0))["a"].variables.params for a in (averaged, apart)
    )
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), one, other)


@pytest.mark.parametrize("run", digits_mhd.get_runs())
def test_a_config_says_what_its_clients_start_from(run):
    for asked in (False, True):
        config = digits_mhd.get_config(run)
        if run == "centralised":
            return
        assert config.algorithm.same_start == (run == "decentralised_fed_avg")
        config.algorithm.same_start = asked
        state = jax.jit(build_experiment(config).algorithm.init)(jax.random.key(0))
        learners = getattr(state, "learners", state)
        assert (spread(learners["digits_small"].variables.params) == 0) == asked


def test_a_start_is_true_or_false():
    config = digits_mhd.get_config("local_only_steps")
    with config.ignore_type():
        config.algorithm.same_start = "no"
    with pytest.raises(TypeError, match=r"algorithm.same_start must be True or False, got 'no'"):
        build_experiment(config)


@pytest.mark.parametrize("run", ["fed_avg,s=0", "fed_avg_200,s=100", "larger,fed_avg_small"])
def test_recorded_configs_keep_what_they_started_from(run):
    config = cifar100_mhd.get_config(run)
    assert config.algorithm.name == "decentralised_fed_avg"
    assert config.algorithm.same_start is False


def after_one_mean(same_start):
    config = digits_mhd.get_config("decentralised_fed_avg")
    config.rounds = config.evaluation.every = 1
    config.algorithm.same_start = same_start
    with config.unlocked():
        config.parties.graph = dict(name="complete")
    outcome = fc.run_experiment(build_experiment(config), show_progress=False)
    final = outcome.summary["final"]
    return np.mean([splits["test"]["accuracy"][0] for splits in final.values()])


@pytest.mark.slow
def test_a_mean_of_related_models_is_worth_something():
    """After 25 steps and one mean of all clients, each of which has three digits of ten."""
    assert after_one_mean(True) > after_one_mean(False) + 0.1


# --------------------------------------------------------------------------------------- MHD


def heads_of(rounds):
    """head -> shared accuracy, a mean over clients, on tests."""
    config = digits_mhd.get_config()
    config.rounds = rounds
    config.evaluation.update(every=rounds, checkpoint_every=rounds)
    outcome = fc.run_experiment(build_experiment(config), show_progress=False)
    names = ["accuracy", *(f"accuracy_head_{k}" for k in (1, 2, 3))]
    final = [splits["test"] for splits in outcome.summary["final"].values()]
    return [np.mean([each[name][0] for each in final]) for name in names]


@pytest.mark.slow
def test_later_heads_know_more_digits_than_the_main_one():
    main, first, _, last = heads_of(40)
    assert first > main + 0.05 and last > main + 0.1


def note(monkeypatch, method, seen):
    """Puts the arguments of a method's function into `seen` whenever a config makes it."""
    entry = ENTRIES[method]
    real = function_of(entry)

    @functools.wraps(real)
    def noted(**arguments):
        seen.update(arguments)
        return real(**arguments)

    monkeypatch.setitem(ENTRIES, method, entry._replace(make=noted))


def test_mhd_s_flags_are_reachable_from_configs(monkeypatch):
    seen = {}
    note(monkeypatch, "multi_headed_distillation", seen)
    config = digits_mhd.get_config()
    build_experiment(config)
    assert (seen["distillation"].reaches_backbone, seen["distillation"].updates_statistics) == (
        True,
        False,
    )
    config.algorithm.update(reaches_backbone=False, updates_statistics=True)
    build_experiment(config)
    assert (seen["distillation"].reaches_backbone, seen["distillation"].updates_statistics) == (
        False,
        True,
    )
    with config.ignore_type():
        config.algorithm.reaches_backbone = "no"
    with pytest.raises(TypeError, match=r"reaches_backbone must be True or False, got 'no'"):
        build_experiment(config)


# ------------------------------------------------------------------------------------- FedKD

DRAWS = np.random.default_rng(0)
BATCH, CLASSES, WIDTH = 4, 3, 5


def plain():
    loss = lambda outputs, batch: cross_entropy(outputs.logits, batch)
    return Model(lambda key: Variables({}, {}), lambda *a, **k: None, loss, {}, CLASSES)


def drawn_layers(seed):
    draws = np.random.default_rng(seed)
    return LayerOutputs(
        jnp.asarray(draws.normal(size=(BATCH, CLASSES)), jnp.float32),
        (jnp.asarray(draws.normal(size=(BATCH, WIDTH)), jnp.float32),),
    )


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("targets", [True, False])
def test_the_normaliser_takes_from_the_task_s_gradient(detached, targets):
    """By jax.grad: the task's part is multiplied by 1 - (KL + L^h) / D^2, the rest divided by D."""
    teacher, student = drawn_layers(1), drawn_layers(2)
    batch = {"label": jnp.asarray([0, 1, 2, 0])}
    weights, mask = (0.7, 0.4), jnp.ones(BATCH)
    mutual = MutualLosses(hidden_map="identity", detach_targets=targets, detach_normaliser=detached)
    losses = mutual_losses(plain(), plain(), mutual, *weights)
    task = lambda logits: jnp.mean(cross_entropy(logits, batch))
    kl = lambda target, own: jnp.mean(
        optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(own), jax.nn.log_softmax(target)
        )
    )
    hidden = jnp.mean((teacher.hidden[0] - student.hidden[0]) ** 2)

    def whole(logits):
        outputs = Outputs(teacher._replace(logits=logits), student, [], mask)
        return jnp.mean(jnp.add(*losses(outputs, batch)))

    def of_teacher(logits):
        """The gradient of (KL + L^h) with weights, through the teacher by L_t or by both losses."""
        total = weights[0] * kl(student.logits, logits) + weights[1] * hidden
        if not targets:
            total += weights[0] * kl(logits, student.logits) + weights[1] * hidden
        return total

    logits = teacher.logits
    d = task(logits) + task(student.logits)
    factor = 1.0 if detached else 1 - of_teacher(logits) / d**2
    gradient = lambda function: jax.jit(jax.grad(function))(logits)
    expected = factor * gradient(task) + gradient(of_teacher) / d
    np.testing.assert_allclose(gradient(whole), expected, rtol=1e-4, atol=1e-6)
    assert detached or factor < 0.9  # it matters here


CONFIGS = {
    digits_fed_kd: "fed_kd",
    cifar_fed_kd: "fed_kd",
    ade_fed_kd: "fed_kd",
    mind_fed_kd: "fed_kd,4",
}


@pytest.mark.parametrize("module", CONFIGS, ids=lambda module: module.__name__.rsplit(".")[-1])
def test_fed_kd_s_configs_state_all_settings_of_its_losses(module):
    config = module.get_config(CONFIGS[module])
    assert set(MutualLosses._fields) <= set(config.training.fed_kd)
    # The runs on the page of results show the ranks of gradients.
    expected = module in (cifar_fed_kd, ade_fed_kd)
    assert config.training.compression.gradient_spectra is expected


def test_fed_kd_s_losses_are_reachable_from_configs(monkeypatch):
    found = {}
    note(monkeypatch, "fed_kd", found)
    config = digits_fed_kd.get_config("fed_kd")
    build_experiment(config)
    assert found["mutual"] == MutualLosses()
    config.training.fed_kd.detach_normaliser = True
    build_experiment(config)
    assert found["mutual"] == MutualLosses(detach_normaliser=True)
    config.training.fed_kd.without_padding = True
    with pytest.raises(ValueError, match=r"without_padding must be False .* teacher .* padding"):
        build_experiment(config)
    # A config without the setting.
    del config.training.fed_kd.without_padding
    build_experiment(config)


def test_distances_leave_out_padding():
    """Means over real tokens, by plain loops; what padding holds changes nothing."""
    length, heads = 4, 2
    is_real = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    draw = lambda *shape: DRAWS.normal(size=(BATCH, *shape)).astype(np.float32)
    hidden, maps = [draw(length, WIDTH) for _ in range(2)], []
    attention = [draw(heads, length, length), draw(heads + 1, length, length)]

    def distance(hidden, attention, without=True):
        outputs = [
            LayerOutputs(draw(CLASSES), (h,), (a,), jnp.asarray(is_real))
            for h, a in zip(hidden, attention, strict=True)
        ]
        return np.asarray(hidden_distance(*outputs, maps, without))

    expected = np.zeros(BATCH)
    for example in range(BATCH):
        real = np.flatnonzero(is_real[example])
        if not len(real):
            continue
        expected[example] += np.mean((hidden[0] - hidden[1])[example, real] ** 2)
        means = [each[example].mean(axis=0)[np.ix_(real, real)] for each in attention]
        expected[example] += np.mean((means[0] - means[1]) ** 2)
    np.testing.assert_allclose(distance(hidden, attention), expected, rtol=1e-5, atol=1e-7)
    other = hidden[0] + 100 * ~is_real[..., None]
    np.testing.assert_allclose(distance([other, hidden[1]], attention), expected, rtol=1e-5)
    assert np.abs(distance([other, hidden[1]], attention, False) - expected).max() > 100


# ----------------------------------------------------------------------------------- spectra


def client(count=8, features=6, seed=0):
    draws = np.random.default_rng(seed)
    columns = {
        "image": jnp.asarray(draws.normal(size=(count, features)), jnp.float32),
        "label": jnp.asarray(draws.integers(0, CLASSES, count)),
    }
    one = jnp.int32(count)
    return ClientData(columns, jnp.int32(0), one, one, count, False)


def linear(features=6):
    return Model(
        lambda key: Variables({"w": jax.random.normal(key, (features, CLASSES))}, {}),
        lambda variables, batch, **_: (batch["image"] @ variables.params["w"], {}),
        cross_entropy,
        {},
        CLASSES,
    )


def test_spectra_of_gradients_are_of_a_batch_s_gradient_whatever_the_optimizer():
    """By NumPy: the gradient at what was received, beside the update that Adam made of an epoch."""
    data, model = client(), linear()
    training = fc.LocalTraining(optax.adam, batch_size=8, epochs=5)
    looked = spectra(0.9, 0.9)
    method = fc.compressed(fc.fed_avg(model, training), 1, None, None, looked, looked)
    message = method.broadcast(method.init(jax.random.key(0)))
    row = jax.tree.map(jnp.asarray, method.init_client_state())
    update = lambda key: method.client_update(message, row, data, key, method.hyper).metrics
    metrics = jax.jit(update)(jax.random.key(1))
    w = np.asarray(message.params["w"], np.float64)
    images, labels = (np.asarray(data.columns[name]) for name in ("image", "label"))
    shares = np.exp(images @ w)
    shares /= shares.sum(axis=1, keepdims=True)
    gradient = images.T @ (shares - np.eye(CLASSES)[labels]) / len(images)
    values = np.linalg.svd(gradient, compute_uv=False)
    np.testing.assert_allclose(metrics["gradient_spectrum/w"], values, rtol=1e-4, atol=1e-5)
    kept = np.cumsum(values**2) / np.sum(values**2)
    assert metrics["gradient_rank/w"] == 1 + np.argmax(kept >= 0.9)
    assert np.abs(metrics["spectrum/w"] - values).max() > 1e-2  # that of the update is another


def test_fed_kd_s_gradient_is_what_it_sends_where_it_sends_gradients():
    data = client()
    of = lambda exchange: fc.fed_kd(
        linear(), linear(), data.columns, fc.LocalTraining(optax.adam, batch_size=4), exchange
    )
    by_step, by_epoch = of("step_gradient"), of("epoch_delta")
    message = by_step.broadcast(by_step.init(jax.random.key(0)))
    rows = [jax.tree.map(jnp.asarray, method.init_client_state()) for method in (by_step, by_epoch)]
    update = lambda key: by_step.client_update(message, rows[0], data, key, by_step.hyper).update
    gradient = lambda key: by_epoch.gradient(message, rows[1], data, key, by_epoch.hyper)
    sent, seen = (jax.jit(of)(jax.random.key(1)) for of in (update, gradient))
    np.testing.assert_allclose(seen["w"], sent["w"], rtol=1e-5, atol=1e-7)
    assert np.abs(seen["w"]).max() > 1e-3


def test_who_does_not_tell_a_gradient_is_refused():
    method = fc.fed_avg(linear())._replace(gradient=None)
    with pytest.raises(ValueError, match="observe_gradient must be None for a method that"):
        fc.compressed(method, 1, observe_gradient=spectra())
