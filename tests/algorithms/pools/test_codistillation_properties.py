"""What must hold of PeriodicCodist and MergedCodist whatever the data: the spec's property tests.

All runs share one small federation. The large model has batch normalisation, so that batch
statistics are checked along with parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick_compilation import QUICK
from softmax_regression import softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools import codistillation
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import TrainedPools
from fedcodist.core.aggregation import Aggregate
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Examples, Inputs, Round
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.loop import Distilled, frozen
from fedcodist.distillation.settings import Distillation
from fedcodist.distillation.unlabelled_batches import UNLABELLED
from fedcodist.models.digits import MLP, BatchNormMLP
from fedcodist.run.sources import resident_data

# Compiling is most of this file's time; the programs are too small for optimisation to pay.
SIZES = (3, 9, 4, 7, 2, 5, 1, 8)
TOTAL = 6
ROOT = jax.random.key(7)
DISTILLATION = Distillation(steps=2, batch_size=8, mixup_beta=0)
NETWORKS = {
    "small": MLP(hidden=(5,), classes=3),
    "large": BatchNormMLP(hidden=(8,), classes=3),
}
TEACHING = {
    "small": TeachingHyper(0.02, 0.3, 0.2, 1.0, 2.0),
    "large": TeachingHyper(0.01, 0.5, 0.1, 3.0, 0.5),
}


def _sgd(rate):
    return optax.sgd(rate)


def _adam(rate):
    return optax.adam(rate, eps=1e-5)


def _halving(alpha, round):
    return alpha * 0.5**round


@functools.cache
def _codistillation_data():
    generator = np.random.default_rng(1)
    rows = sum(SIZES)
    data = FederatedData.from_arrays(
        {
            "image": generator.normal(size=(rows, 6)).astype(np.float32),
            "label": generator.integers(0, 3, rows).astype(np.int32),
        },
        offsets=np.concatenate([[0], np.cumsum(SIZES)]),
    )
    unlabelled = generator.normal(size=(13, 6)).astype(np.float32)
    return data, jax.tree.map(jnp.asarray, resident_data(data, {UNLABELLED: {"image": unlabelled}}))


def _two_pools(client=_sgd, server=_adam, server_rate=0.03):
    methods = {
        name: fed_avg(
            from_flax_linen(network, jnp.zeros((1, 6))),
            LocalTraining(client, batch_size=4, epochs=1),
            server,
            hyper=FedAvgHyper(0.1, server_rate),
        )
        for name, network in NETWORKS.items()
    }
    return {
        "small": Pool(methods["small"], np.arange(8), 3),
        "large": Pool(methods["large"], np.array([1, 2, 4, 5, 7]), 3),
    }


def _codistill_algorithm(name):
    """Algorithms are 'method' or 'method sgd', the server optimizer; SGD has learning rate 1."""
    columns = _codistillation_data()[0].columns
    pools = _two_pools(server=_sgd, server_rate=1.0) if "sgd" in name else _two_pools()
    common = {"distillation": DISTILLATION, "teaching": TEACHING}
    no_steps = common | {"distillation": DISTILLATION._replace(steps=0)}
    match name.split():
        case ["independent", *_]:
            return independent_pools(pools, columns)
        case ["merged"]:
            return merged_codistillation(pools, columns, 13, TOTAL, **common)
        case ["merged", "sgd"]:
            return merged_codistillation(
                pools, columns, 13, TOTAL, alpha=0.7, alpha_schedule=_halving, **common
            )
        case ["never", *_]:
            with pytest.warns(UserWarning, match="period=7 is longer than the run of 6 rounds"):
                return periodic_codistillation(pools, columns, 13, TOTAL, period=7, **common)
        case ["periodic", "without", "steps", *_]:
            return periodic_codistillation(pools, columns, 13, TOTAL, period=2, **no_steps)
    raise ValueError(name)


def test_a_schedule_of_other_arguments_is_one_line():
    pools, columns = _two_pools(), _codistillation_data()[0].columns
    with pytest.raises(TypeError, match=r"^alpha_schedule must be a function \(alpha, round\)"):
        merged_codistillation(pools, columns, 13, TOTAL, alpha_schedule=lambda alpha: alpha)


@functools.cache
def _codistill_program(name):
    return _compiled(_codistill_algorithm(name))


def _compiled(algorithm):
    """Returns the algorithm and (state, round, hyper) -> state, one program."""
    resident = _codistillation_data()[1]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def one_round(state, round, hyper):
        inputs = resident.read(algorithm.select(round, ROOT))
        state, _, metrics = algorithm.round(
            state, dict.fromkeys(state), Round(round, ROOT, inputs), hyper
        )
        return state, metrics

    def step(state, round, hyper):
        state, metrics = one_round(state, round, hyper)
        assert all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(state))
        assert all(metrics[f"{pool}/finite"] for pool in state)
        return state

    return algorithm, step


@functools.cache
def _fresh_state(name):
    return jax.jit(_codistill_algorithm(name).init, compiler_options=QUICK)(ROOT)


def _run_rounds(name, rounds=TOTAL, hyper=None, state=None):
    algorithm, step = _codistill_program(name)
    state = (
        _fresh_state("independent sgd" if "sgd" in name else "independent")
        if (state is None)
        else state
    )
    for round in range(rounds):
        state = step(state, round, algorithm.hyper if hyper is None else hyper)
    return state


def _with_alpha(name, alpha, skip=0.0):
    hyper = _codistill_program(name)[0].hyper
    return hyper._replace(alpha={pool: float(alpha) for pool in hyper.alpha}, skip=float(skip))


def _with_teaching(name, **changes):
    hyper = _codistill_program(name)[0].hyper
    return {pool: t._replace(**changes) for pool, t in hyper.codistillation.teaching.items()}


def _assert_trees_close(actual, expected, rtol=1e-4, atol=2e-4):
    """Biases before batch normalisation have no gradient but rounding, which Adam enlarges."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def _distance(left, right):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, left, right)))


def _params(state):
    return {name: server.params for name, server in state.items()}


@pytest.mark.parametrize("name", ["never", "merged"])
def test_networks_of_32_bits_are_codistilled_where_jax_has_64(name):
    algorithm, resident = _codistill_algorithm(name), _codistillation_data()[1]

    def one_round():
        state, inputs = algorithm.init(ROOT), resident.read(algorithm.select(0, ROOT))
        now = Round(jnp.int32(0), ROOT, inputs)
        return state, algorithm.round(state, dict.fromkeys(state), now, algorithm.hyper)[0]

    with jax.enable_x64(True):
        before, after = jax.eval_shape(one_round)
    assert jax.tree.map(lambda leaf: leaf.dtype, before) == jax.tree.map(
        lambda leaf: leaf.dtype, after
    )


# alpha = 1, long periods and no steps: FedAvg.


def test_alpha_one_with_and_without_distillation_is_the_same_bit_for_bit():
    executed = _run_rounds("merged", hyper=_with_alpha("merged", 1, skip=0))
    switched_off = _run_rounds("merged", hyper=_with_alpha("merged", 1, skip=1))
    for left, right in zip(jax.tree.leaves(executed), jax.tree.leaves(switched_off), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_skip_leaves_distillation_in_where_an_alpha_is_below_one():
    skip = _with_alpha("merged", 1, skip=1)
    mixed = skip._replace(alpha={"small": 1.0, "large": 0.5})
    assert (
        _distance(
            _params(_run_rounds("merged", hyper=mixed))["large"],
            _params(_run_rounds("merged", hyper=skip))["large"],
        )
        > 1e-3
    )


def test_alpha_one_is_federated_averaging():
    merged = _run_rounds("merged", hyper=_with_alpha("merged", 1))
    _assert_trees_close(merged, _run_rounds("independent"))


def test_alpha_below_one_is_not_federated_averaging():
    merged, plain = _run_rounds("merged"), _run_rounds("independent")
    for name in NETWORKS:
        assert _distance(merged[name].params, plain[name].params) > 1e-2


@pytest.mark.slow
def test_a_period_longer_than_the_run_is_federated_averaging():
    _assert_trees_close(_run_rounds("never"), _run_rounds("independent"))


@pytest.mark.slow
def test_no_steps_with_a_plain_server_is_federated_averaging():
    _assert_trees_close(
        _run_rounds("periodic without steps sgd"), _run_rounds("independent sgd"), atol=2e-6
    )


def test_no_steps_with_adam_differs_only_by_the_reset_of_moments():
    algorithm, step = _codistill_program("independent")
    state = _fresh_state("independent")
    pools = _two_pools()
    for round in range(TOTAL):
        state = step(state, round, algorithm.hyper)
        if round % 2:
            state = {
                name: pool.method.set_model(
                    state[name], pool.method.variables(state[name]), reset_optimizer=True
                )
                for name, pool in pools.items()
            }
    reset = _run_rounds("periodic without steps")
    _assert_trees_close(reset, state)
    assert _distance(_params(reset), _params(_run_rounds("independent"))) > 1e-2
    assert all(int(server.optimizer_state[0].count) == 0 for server in reset.values())


# What a round does with the results of training and of distillation.


def _with_stand_ins(monkeypatch, build, server=_sgd, server_rate=1.0, **options):
    """Two linear pools' (first state, round by index, models that were distilled so far).

    Neither is done: clients' pseudo-gradients are 1 everywhere, and students end 2 above their start.
    """
    distilled = []

    def train(pools, state, *_):
        ones = {name: jax.tree.map(jnp.ones_like, state[name].params) for name in pools}
        aggregates = {name: Aggregate(each, {}, jnp.ones(())) for name, each in ones.items()}
        return TrainedPools(aggregates, {name: f"{name}, new" for name in pools}, {}, {}, {})

    def teach(pools, starts, *_):
        distilled.append({name: variables.params["w"] for name, variables in starts.items()})
        students = {
            name: variables._replace(params={"w": variables.params["w"] + 2})
            for name, variables in starts.items()
        }
        losses = dict.fromkeys(pools, jnp.zeros(()))
        return Distilled(students, losses, losses)

    monkeypatch.setattr(f"{build.__module__}.train_pools", train)
    monkeypatch.setattr(f"{build.__module__}.codistill", teach)
    method = fed_avg(
        *(softmax_regression(6, 3), LocalTraining(), server), hyper=FedAvgHyper(0.1, server_rate)
    )
    pools = {name: Pool(method, np.arange(8), 2) for name in ("small", "large")}
    columns = _codistillation_data()[0].columns
    algorithm = build(pools, columns, 13, TOTAL, distillation=DISTILLATION, **options)
    start = {name: method.init(ROOT) for name in pools}

    def round_at(index):
        round = Round(jnp.int32(index), ROOT, Inputs({}, {}))
        with jax.disable_jit():  # nothing is compiled, and what is distilled has values
            return algorithm.round(start, dict.fromkeys(pools, "old"), round, algorithm.hyper)

    return start, round_at, distilled


@pytest.mark.parametrize(
    ("build", "options"), [(merged_codistillation, {}), (periodic_codistillation, {"period": 2})]
)
def test_clients_keep_what_local_training_leaves_them(monkeypatch, build, options):
    """Such as SCAFFOLD's variates, in rounds with distillation and without."""
    _, round_at, distilled = _with_stand_ins(monkeypatch, build, **options)
    for index in (0, 1):
        _, kept, _ = round_at(index)
        assert kept == {"small": "small, new", "large": "large, new"}
    assert distilled


def test_alpha_is_that_of_the_round(monkeypatch):
    """The direction is opposite to the pseudo-gradient: 1 is FedAvg exactly, and 0 is its reverse."""
    start, round_at, _ = _with_stand_ins(
        *(monkeypatch, merged_codistillation),
        alpha_schedule=lambda alpha, round: alpha * round,
        alpha=1.0 / (TOTAL - 1),
    )
    for index in (0, 1, TOTAL - 1):
        state, _, _ = round_at(index)
        for name in start:
            moved = state[name].params["w"] - start[name].params["w"]
            np.testing.assert_allclose(moved, 1 - 2 * index / (TOTAL - 1), rtol=1e-4)


def test_students_of_the_updated_models_replace_them_and_servers_start_afresh(monkeypatch):
    start, round_at, distilled = _with_stand_ins(
        *(monkeypatch, periodic_codistillation, _adam, 0.5), period=2
    )
    (first, *_), (second, *_) = round_at(0), round_at(1)
    (asked,) = distilled
    for name, server in start.items():
        # The first step of Adam has the length of the learning rate.
        updated = server.params["w"] - 0.5
        np.testing.assert_allclose(first[name].params["w"], updated, atol=1e-4)
        np.testing.assert_allclose(asked[name], updated, atol=1e-4)
        np.testing.assert_allclose(second[name].params["w"], updated + 2, atol=1e-4)
        moments = jax.tree.leaves(second[name].optimizer_state)
        assert moments and not any(np.any(leaf) for leaf in moments)
        assert int(first[name].optimizer_state[0].count) == 1


# What the merged server consumes.


@pytest.mark.parametrize("round", [0, 2])
def test_the_distillation_part_has_the_length_of_the_pseudo_gradient(round):
    """With server SGD of rate 1 a round subtracts Delta; in FedAvg's program it subtracts g."""
    start = _fresh_state("independent sgd")
    algorithm, step = _codistill_program("merged sgd")
    plain, plain_step = _codistill_program("independent sgd")
    merged_state, plain_state = (
        step(start, round, algorithm.hyper),
        plain_step(start, round, plain.hyper),
    )
    alpha = 0.7 * 0.5**round
    for name in NETWORKS:
        before = start[name].params
        gradient = jax.tree.map(jnp.subtract, before, plain_state[name].params)
        delta = jax.tree.map(jnp.subtract, before, merged_state[name].params)
        length = float(optax.tree.norm(gradient))
        scaled = jax.tree.map(lambda leaf: alpha * leaf, gradient)
        assert _distance(delta, scaled) == pytest.approx((1 - alpha) * length, rel=1e-4)
        assert float(optax.tree.norm(delta)) <= length * (1 + 1e-5)
        assert length > 0.01


def test_students_that_stay_leave_alpha_times_the_pseudo_gradient():
    """Learning rate 0: no direction to rescale, and nothing is divided by zero."""
    hyper = _codistill_program("merged sgd")[0].hyper
    still = hyper._replace(
        codistillation=hyper.codistillation._replace(
            teaching=_with_teaching("merged sgd", learning_rate=0.0)
        )
    )
    start = _fresh_state("independent sgd")
    merged = _run_rounds("merged sgd", rounds=1, hyper=still)
    plain = _run_rounds("independent sgd", rounds=1)
    for name in NETWORKS:
        expected = jax.tree.map(
            lambda before, after: before + 0.7 * (after - before),
            start[name].params,
            plain[name].params,
        )
        _assert_trees_close(merged[name].params, expected, atol=2e-6)


def test_merged_keeps_the_clients_batch_statistics():
    merged = _run_rounds("merged sgd", rounds=1)
    plain = _run_rounds("independent sgd", rounds=1)
    start = _fresh_state("independent sgd")
    _assert_trees_close(merged["large"].mutable, plain["large"].mutable, atol=2e-6)
    assert _distance(merged["large"].mutable, start["large"].mutable) > 1e-3


@pytest.mark.slow
def test_a_model_that_is_replaced_has_its_students_batch_statistics():
    """As it ends distillation, and not as its clients left it. Here parameters stay."""
    still = {name: TeachingHyper(learning_rate=0.0) for name in NETWORKS}
    periodic = periodic_codistillation(
        _two_pools(server=_sgd, server_rate=1.0),
        _codistillation_data()[0].columns,
        13,
        TOTAL,
        period=1,
        distillation=DISTILLATION,
        teaching=still,
    )
    found = _compiled(periodic)[1](_fresh_state("independent sgd"), 0, periodic.hyper)
    plain = _run_rounds("independent sgd", rounds=1)
    _assert_trees_close(found["large"].params, plain["large"].params, atol=2e-6)
    model, expected = _two_pools()["large"].method.model, plain["large"].mutable
    images = _codistillation_data()[1].data_sets[UNLABELLED]["image"]
    for rows in periodic.select(0, ROOT).examples[UNLABELLED]:
        variables = Variables(plain["large"].params, expected)
        batch = {"image": images[rows]}
        _, expected = model.apply(variables, batch, train=True, mask=jnp.ones(len(rows)))
    _assert_trees_close(found["large"].mutable, expected, atol=2e-6)
    assert _distance(expected, plain["large"].mutable) > 1e-2


@pytest.mark.parametrize("name", ["merged", "periodic"])
def test_unlabelled_examples_are_an_endless_stream(name):
    """Codistillations go on where the one before stopped: no example twice before all had their turn."""
    columns, rounds = _codistillation_data()[0].columns, 12
    common = {"distillation": DISTILLATION, "teaching": TEACHING}
    if name == "merged":
        algorithm, at = merged_codistillation(_two_pools(), columns, 13, rounds, **common), range(5)
    else:
        algorithm = periodic_codistillation(_two_pools(), columns, 13, rounds, period=3, **common)
        at = range(2, rounds, 3)
    select = jax.jit(lambda round: algorithm.select(round, ROOT).examples[UNLABELLED])
    drawn = np.concatenate([np.asarray(select(round)).reshape(-1) for round in at])
    passes = [drawn[start : start + 13] for start in range(0, len(drawn) - 12, 13)]
    assert len(passes) > 3
    assert all(sorted(each) == list(range(13)) for each in passes)
    assert passes[0].tolist() != passes[1].tolist()


def test_teachers_and_starts_are_in_evaluation_mode():
    """A teacher normalises by its running averages, not by the statistics of the batch."""
    model = from_flax_linen(NETWORKS["large"], jnp.zeros((1, 6)))
    variables = model.init(ROOT)
    images = jnp.asarray(np.random.default_rng(2).normal(2.0, 3.0, size=(8, 6)), jnp.float32)
    asked = frozen(model, variables)
    one_by_one = jnp.concatenate([asked({"image": image[None]}) for image in images])
    np.testing.assert_allclose(asked({"image": images}), one_by_one, atol=1e-5)
    in_training, _ = model.apply(variables, {"image": images}, train=True, mask=jnp.ones(8))
    assert np.abs(np.asarray(in_training - one_by_one)).max() > 0.1


def test_codistillation_asks_teachers_in_evaluation_mode():
    """Its losses are divergences of students in training from teachers in evaluation mode."""
    pools, mask = _two_pools(), jnp.ones(8)
    models = {name: pool.method.model for name, pool in pools.items()}
    images = np.random.default_rng(2).normal(2.0, 3.0, size=(8, 6)).astype(np.float32)
    batch = {"image": jnp.asarray(images)}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def found():
        starts = {name: model.init(ROOT) for name, model in models.items()}
        logits = [
            {name: models[name].apply(starts[name], batch, **options)[0] for name in models}
            for options in ({}, {"train": True, "mask": mask})
        ]
        unlabelled = {UNLABELLED: Examples(batch, jnp.arange(8)[None])}
        distilled = codistillation.codistill(
            pools,
            starts,
            Round(0, ROOT, Inputs({}, unlabelled)),
            dict.fromkeys(pools, TeachingHyper(learning_rate=0.0, interpolation=0.3)),
            DISTILLATION._replace(steps=1),
            TOTAL,
        )
        return jax.tree.map(jax.nn.log_softmax, logits), distilled.first_loss

    (asked, learning), losses = jax.tree.map(np.float64, found())
    for student, other in (("small", "large"), ("large", "small")):
        target = 0.7 * np.exp(asked[other]) + 0.3 * np.exp(asked[student])
        expected = (target * (np.log(target) - learning[student])).sum(-1).mean()
        assert losses[student] == pytest.approx(expected, rel=1e-4)
    assert np.abs(np.exp(learning["large"]) - np.exp(asked["large"])).max() > 0.1


def test_rates_end_where_the_run_was_to_end(monkeypatch):
    """Rounds beyond `num_rounds` would have negative ones else."""
    rates = []
    monkeypatch.setattr(
        codistillation, "distill", lambda **arguments: rates.append(arguments["learning_rates"])
    )
    unread = Inputs({}, {UNLABELLED: None})
    for round in (0, 3, TOTAL, 10 * TOTAL):
        codistillation.codistill(
            _two_pools(),
            dict.fromkeys(NETWORKS),
            Round(round, ROOT, unread),
            TEACHING,
            DISTILLATION,
            TOTAL,
        )
    small = [float(each["small"]) for each in rates]
    assert small == pytest.approx([0.02, 0.02 * 0.65, 0.02 * 0.3, 0.02 * 0.3])


@pytest.mark.parametrize("name", ["merged", pytest.param("periodic", marks=pytest.mark.slow)])
def test_losses_of_distillation_are_metrics(name):
    """Of rounds that have one: divergences from the targets, before the first step and the last."""
    columns = _codistillation_data()[0].columns
    common = {"distillation": DISTILLATION, "teaching": TEACHING}
    if name == "merged":
        algorithm = merged_codistillation(_two_pools(), columns, 13, TOTAL, **common)
    else:
        algorithm = periodic_codistillation(_two_pools(), columns, 13, TOTAL, period=2, **common)
    resident = _codistillation_data()[1]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def metrics_of(state, round):
        inputs = resident.read(algorithm.select(round, ROOT))
        rows = dict.fromkeys(state)
        return algorithm.round(state, rows, Round(round, ROOT, inputs), algorithm.hyper)[2]

    first, second = (metrics_of(_fresh_state("independent"), round) for round in (0, 1))
    for pool in NETWORKS:
        of_both = [f"{pool}/distillation_loss_{which}" for which in ("first", "last")]
        assert all(0 < second[metric] < 3 for metric in of_both)
        assert second[of_both[0]] != second[of_both[1]]
        assert np.isnan(first[of_both[0]]) == (name == "periodic")


def test_pools_draw_the_same_cohorts_alone_and_together():
    columns = _codistillation_data()[0].columns
    pools = _two_pools()
    algorithms = (
        independent_pools({"large": pools["large"]}, columns),
        _codistill_algorithm("merged"),
    )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def draw(round):
        return [algorithm.select(round, ROOT).clients["large"] for algorithm in algorithms]

    cohorts = [[np.asarray(drawn).tolist() for drawn in draw(round)] for round in range(4)]
    assert all(alone == together for alone, together in cohorts)
    assert len({tuple(alone) for alone, _ in cohorts}) > 1


def test_pools_of_the_same_clients_draw_independently():
    """A client may be in the cohorts of both pools in one round."""
    columns = _codistillation_data()[0].columns
    pools = {
        name: pool._replace(clients=np.arange(8), cohort_size=3)
        for name, pool in _two_pools().items()
    }
    select = jax.jit(independent_pools(pools, columns).select, compiler_options=QUICK)
    drawn = [select(round, ROOT).clients.values() for round in range(20)]
    both = [[set(np.asarray(cohort).tolist()) for cohort in cohorts] for cohorts in drawn]
    shared = [len(set.intersection(*cohorts)) for cohorts in both]
    assert min(shared) < 3 and max(shared) > 0
    # Of three of eight clients, 9/8 are expected to be in the other cohort too.
    assert 0.5 < np.mean(shared) < 1.8


# Symmetry.


@pytest.mark.parametrize("method", ["merged", pytest.param("periodic", marks=pytest.mark.slow)])
def test_swapping_the_pools_swaps_the_outcome(method):
    """Both pools have the same network and clients; with full batches the order does not matter."""
    columns = _codistillation_data()[0].columns
    training = LocalTraining(batch_size=9)
    model = from_flax_linen(NETWORKS["small"], jnp.zeros((1, 6)))
    pools = {
        name: Pool(fed_avg(model, training, _sgd), np.arange(8), 8) for name in ("first", "second")
    }
    if method == "merged":
        algorithm = merged_codistillation(pools, columns, 13, TOTAL, distillation=DISTILLATION)
    else:
        algorithm = periodic_codistillation(
            pools, columns, 13, TOTAL, period=1, distillation=DISTILLATION
        )
    _, step = _compiled(algorithm)
    hyper = _asymmetric(algorithm.hyper)
    state = jax.jit(algorithm.init, compiler_options=QUICK)(ROOT)
    swapped = _swap(state)
    for round in range(2):
        state, swapped = step(state, round, hyper), step(swapped, round, _swap(hyper))
    _assert_trees_close(swapped, _swap(state), rtol=1e-4, atol=1e-5)
    assert _distance(state["first"].params, state["second"].params) > 0.1


def _asymmetric(hyper):
    methods = {"first": FedAvgHyper(0.1, 1.0), "second": FedAvgHyper(0.2, 0.5)}
    teaching = dict(zip(("first", "second"), TEACHING.values(), strict=True))
    if hasattr(hyper, "alpha"):
        codistillation = hyper.codistillation._replace(methods=methods, teaching=teaching)
        return hyper._replace(codistillation=codistillation, alpha={"first": 0.3, "second": 0.8})
    return hyper._replace(methods=methods, teaching=teaching)


def _swap(tree):
    """Exchanges what belongs to 'first' and to 'second', at any depth."""
    if isinstance(tree, dict) and set(tree) == {"first", "second"}:
        return {"first": tree["second"], "second": tree["first"]}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_swap(part) for part in tree])
    return tree


# Optimizers and bytes.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["merged", pytest.param("periodic", marks=pytest.mark.slow)])
def test_any_optimizer_runs_on_clients_and_server(method):
    def client(rate):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    pools = _two_pools(client, lambda rate: optax.yogi(rate), 0.01)
    pools["large"] = pools["large"]._replace(
        method=_two_pools(
            lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
            lambda rate: optax.adamw(rate, weight_decay=1e-2),
            0.01,
        )["large"].method
    )
    columns = _codistillation_data()[0].columns
    distillation = DISTILLATION._replace(optimizer=lambda rate: optax.lion(rate))
    if method == "merged":
        algorithm = merged_codistillation(pools, columns, 13, 2, distillation=distillation)
    else:
        algorithm = periodic_codistillation(
            pools, columns, 13, 2, period=2, distillation=distillation
        )
    _, step = _compiled(algorithm)
    start = state = jax.jit(algorithm.init, compiler_options=QUICK)(ROOT)
    for round in range(2):
        state = step(state, round, algorithm.hyper)
    for name in pools:
        assert _distance(state[name].params, start[name].params) > 1e-3


@pytest.mark.parametrize("name", ["independent", "merged", "never"])
def test_bytes_of_one_participation(name):
    communication = _codistill_algorithm(name).communication
    small = 6 * 5 + 5 + 5 * 3 + 3
    # Scale and bias are parameters; the running mean and variance are sent too.
    large = 6 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    statistics = 2 * 8
    assert communication["small"] == (4 * small, 4 * small + 4)
    assert communication["large"] == (4 * (large + statistics), 4 * (large + statistics) + 4)
