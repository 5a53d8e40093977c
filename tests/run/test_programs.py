"""Compiled programs: split runs, seeds, devices, hyper-parameters and evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.local_only import local_only
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.schedules import linear_decay
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import load_prepared, save_prepared
from fedcodist.distillation.settings import Distillation
from fedcodist.models.digits import MLP
from fedcodist.run.evaluation import evaluation_split
from fedcodist.run.placement import AXIS, replicate, replicate_data
from fedcodist.run.programs import build_programs
from fedcodist.run.sources import StreamedData, resident_data
from fedcodist.run.stacked import stacked

pytestmark = pytest.mark.usefixtures("compile_quickly")

FEATURES, CLASSES, ROUNDS = 4, 3, 7
SIZES = (3, 9, 1, 7, 4, 2, 5)
UNLABELLED = np.random.default_rng(1).normal(size=(19, FEATURES)).astype(np.float32)


def federated(sizes=SIZES, seed=0) -> FederatedData:
    generator, rows = np.random.default_rng(seed), sum(sizes)
    columns = {
        "image": generator.normal(size=(rows, FEATURES)).astype(np.float32),
        "label": generator.integers(0, CLASSES, rows).astype(np.int32),
    }
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))


def pools():
    def method(hidden):
        return fed_avg(
            from_flax_linen(MLP(hidden=hidden, classes=CLASSES), jnp.zeros((1, FEATURES))),
            LocalTraining(batch_size=4),
            server_optimizer=lambda rate: optax.adam(rate, eps=1e-3),
            schedule=linear_decay(ROUNDS),
            hyper=FedAvgHyper(0.1, 0.05),
        )

    return {
        "small": Pool(method((3,)), np.arange(0, 5), 3),
        "large": Pool(method((4,)), np.arange(3, 7), 2),
    }


@functools.cache
def algorithm(kind):
    columns = federated().columns
    distillation = Distillation(steps=2, batch_size=6, mixup_beta=0)
    arguments = (pools(), columns, len(UNLABELLED), ROUNDS)
    if kind == "merged":
        return merged_codistillation(*arguments, distillation=distillation)
    if kind == "periodic":
        return periodic_codistillation(*arguments, period=3, distillation=distillation)
    return independent_pools(pools(), columns)


@functools.cache
def programs(kind, devices=None, seeds_loop="map", num_seeds=1):
    """Separate programs for each number of seeds, so that compilations can be counted."""
    mesh = devices and Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    return build_programs(algorithm(kind), ROUNDS, mesh, seeds_loop), mesh


def data():
    return resident_data(federated(), {"unlabelled": {"image": UNLABELLED}})


def train(counts=(ROUNDS,), seeds=(0,), hyper=None, kind="merged", devices=None, seeds_loop="map"):
    """Trains in calls of the given numbers of rounds; returns state and history as NumPy."""
    compiled, mesh = programs(kind, devices, seeds_loop, len(seeds))
    hyper = algorithm(kind).hyper if hyper is None else hyper
    put = functools.partial(replicate, mesh=mesh)
    seeds, hyper, resident = put((np.array(seeds, np.uint32), floats(hyper), data()))
    state, rows = compiled.init(seeds), dict.fromkeys(algorithm(kind).client_states)
    first, history = 0, []
    for count in counts:
        state, rows, part = compiled.train(state, rows, seeds, first, count, hyper, resident)
        part = part.unstacked
        for values in part.values():
            assert values.shape == (len(seeds), ROUNDS)
            assert not np.asarray(values[:, count:]).any()
        history.append(jax.tree.map(lambda values, c=count: np.asarray(values[:, :c]), part))
        first += count
    history = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *history)
    assert compiled.init._cache_size() == compiled.train._cache_size() == 1
    return jax.tree.map(np.asarray, state), history


def compilations(kind):
    return programs(kind, None, "map", 1)[0].train._cache_size()


def floats(hyper):
    return jax.tree.map(np.float32, hyper)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), actual, expected
    )


def largest_difference(left, right):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), left, right)))


@functools.cache
def in_one_call(kind):
    return train(kind=kind)


# ------------------------------------------------------------------------------------ one program


@pytest.mark.parametrize("counts", [(1,) * 7, (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", ["merged", pytest.param("periodic", marks=pytest.mark.slow)])
def test_a_run_split_into_calls_has_the_same_bits_and_one_compilation(kind, counts):
    """7 rounds, whether or not that is a multiple of the rounds between evaluations."""
    assert_equal(train(counts, kind=kind), in_one_call(kind))
    assert compilations(kind) == 1


def test_other_numbers_do_not_compile_again_and_do_change_the_run():
    base = algorithm("merged").hyper
    state, _ = in_one_call("merged")

    def with_teaching(**values):
        teaching = {name: TeachingHyper(**values) for name in base.codistillation.teaching}
        return base._replace(codistillation=base.codistillation._replace(teaching=teaching))

    methods = {"small": FedAvgHyper(0.1, 0.05), "large": FedAvgHyper(0.2, 0.01)}
    others = {
        "alpha": base._replace(alpha={"small": 0.2, "large": 0.9}),
        "temperature": with_teaching(temperature=4.0),
        "interpolation": with_teaching(interpolation=0.5),
        "distillation learning rate": with_teaching(learning_rate=0.1),
        "decay": with_teaching(decay=0.9),
        "learning rates": base._replace(
            codistillation=base.codistillation._replace(methods=methods)
        ),
        "skip": base._replace(alpha=dict.fromkeys(base.alpha, 1.0), skip=1.0),
    }
    for name, hyper in others.items():
        assert largest_difference(train(hyper=hyper)[0], state) > 1e-5, name
    assert largest_difference(train(seeds=(5,))[0], state) > 1e-2
    assert compilations("merged") == 1


# ------------------------------------------------------------------------------- seeds and devices


@pytest.mark.slow
def test_seeds_one_after_another_are_single_runs():
    # Programs for one seed and for three are compiled apart: XLA may fuse them differently.
    seeds = (0, 3, 9)
    together = train((3, 4), seeds)
    for index, seed in enumerate(seeds):
        assert_close(
            jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], together), train(seeds=(seed,))
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "periodic"])
def test_seeds_at_once_are_single_runs(kind):
    seeds = (0, 3, 9)
    together = train((3, 4), seeds, kind=kind, seeds_loop="vmap")
    for index, seed in enumerate(seeds):
        assert_close(
            jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], together),
            train(seeds=(seed,), kind=kind),
        )


def test_a_run_on_several_devices_is_the_run_on_one():
    state, history = train((3, 4), devices=3)
    assert_close((state, history), in_one_call("merged"))


@pytest.mark.slow
def test_a_pool_alone_is_the_pool_in_company():
    """The same cohorts, the same batches, the same model: keys follow the pool's name."""
    together = algorithm("fed_avg")
    state, history = train(kind="fed_avg")
    for name, pool in pools().items():
        alone = independent_pools({name: pool}, federated().columns)
        select_alone, select_together = jax.jit(alone.select), jax.jit(together.select)
        for round in range(ROUNDS):
            root = jax.random.key(0)
            cohorts = [each(round, root).clients[name] for each in (select_alone, select_together)]
            np.testing.assert_array_equal(*cohorts)
    compiled = build_programs(alone, ROUNDS)
    seeds = jnp.zeros(1, jnp.uint32)
    lone_state, _, lone_history = compiled.train(
        compiled.init(seeds), {name: None}, seeds, 0, ROUNDS, floats(alone.hyper), data()
    )
    assert_close(lone_state[name], state[name])
    assert_close(lone_history.unstacked, {key: history[key] for key in lone_history})


def test_cohorts_follow_the_pool_the_round_and_the_seed():
    select = programs("merged", None, "map", 1)[0].select
    chosen = [
        np.asarray(select(seed, round).clients["small"]) for seed in (0, 1) for round in range(7)
    ]
    for same_seed in (chosen[:7], chosen[7:]):
        assert len({tuple(sorted(clients.tolist())) for clients in same_seed}) > 1
    assert any((left != right).any() for left, right in zip(chosen[:7], chosen[7:], strict=True))
    for clients in chosen:
        assert len(set(clients.tolist())) == 3
        assert set(clients.tolist()) <= set(range(5))
    np.testing.assert_array_equal(chosen[0], select(0, 0).clients["small"])


# --------------------------------------------------------------------------------------- evaluation

SPLITS = {"train": federated(), "test": federated((11,), 5), "many": federated((40, 61), 6)}
SPLITS["test"].columns["label"][:] = SPLITS["test"].columns["label"] % 2  # no example of label 2


@pytest.mark.parametrize("seeds_loop", ["map", "vmap"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_told_by_model_and_seed(seeds_loop, value):
    compiled, _ = programs("merged", seeds_loop=seeds_loop, num_seeds=2)
    state = compiled.init(np.arange(2, dtype=np.uint32))
    assert all(np.all(good) for good in compiled.finite(state).values())
    params, build = jax.tree.flatten(state["large"].params)
    state["large"] = state["large"]._replace(
        params=build.unflatten(
            [params[0].at[(1,) + (0,) * (params[0].ndim - 1)].set(value), *params[1:]]
        )
    )
    found = {name: np.asarray(good).tolist() for name, good in compiled.finite(state).items()}
    assert found == {"large": [True, False], "small": [True, True]}


@pytest.fixture(scope="module")
def evaluations():
    """The same two seeds' models on one and on eight devices, in batches that do not divide."""
    results = {}
    for devices in (None, 8):
        mesh = devices and Mesh(np.array(jax.devices()[:devices]), (AXIS,))
        compiled = build_programs(
            algorithm("fed_avg"),
            ROUNDS,
            mesh,
            evaluation_batch_size=4,
            evaluation_preprocess=lambda batch, key, positions: (
                batch | {"image": 2 * batch["image"]}
            ),
        )
        splits = {name: evaluation_split(split) for name, split in SPLITS.items()}
        seeds, splits = replicate((np.arange(2, dtype=np.uint32), splits), mesh)
        state = compiled.init(seeds)
        compiled.evaluate(state, splits)
        other = jax.tree.map(lambda leaf: leaf + 0 * leaf, state)
        results[devices] = jax.tree.map(np.asarray, compiled.evaluate(other, splits))
        assert compiled.evaluate._cache_size() == 1
    return jax.tree.map(np.asarray, state), results


def test_evaluation_is_plain_numpy(evaluations):
    state, results = evaluations
    for split, examples in SPLITS.items():
        labels = examples.columns["label"]
        owners = np.repeat(np.arange(examples.num_clients), examples.client_sizes)
        for name in pools():
            for seed in range(2):
                params = jax.tree.map(lambda leaf, s=seed: leaf[s], state[name].params)
                hidden = 2 * examples.columns["image"] @ params["Dense_0"]["kernel"]
                hidden = np.maximum(hidden + params["Dense_0"]["bias"], 0)
                logits = hidden @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
                correct = (logits.argmax(axis=1) == labels).astype(float)
                shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
                chosen = shifted[np.arange(len(labels)), labels] / shifted.sum(axis=1)
                actual = jax.tree.map(lambda leaf, s=seed: leaf[s], results[None][split][name])
                expected = {
                    "loss": -np.log(chosen).mean(),
                    "accuracy": correct.mean(),
                    "accuracy_per_label": [
                        correct[labels == label].mean() if (labels == label).any() else np.nan
                        for label in range(CLASSES)
                    ],
                }
                if examples.num_clients > 1:
                    expected["accuracy_per_client"] = [
                        correct[owners == client].mean() for client in range(examples.num_clients)
                    ]
                assert actual.keys() == expected.keys()
                for metric, value in expected.items():
                    np.testing.assert_allclose(actual[metric], value, rtol=1e-5)


def test_evaluation_on_eight_devices_is_evaluation_on_one(evaluations):
    _, results = evaluations
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), results[8], results[None]
    )
    assert np.isnan(results[8]["test"]["small"]["accuracy_per_label"][:, 2]).all()


def test_results_are_stacked_by_shape_and_type_and_come_back():
    results = {
        "b/loss": jnp.float32(1.5),
        "a/loss": jnp.float32(2.5),
        "a/steps": jnp.int32(3),
        "a/spectrum": jnp.arange(4.0),
        "test": {"model": {"loss": jnp.float32(4.5)}},
    }
    few = stacked(results)
    assert sorted(array.shape for array in few.arrays) == [(1,), (3,), (4, 1)]
    doubled = jax.tree.map(lambda array: np.stack([array, 2 * array]), few)  # as over seeds
    for times, back in ((1, few.unstacked), (2, jax.tree.map(lambda a: a[1], dict(doubled)))):
        assert jax.tree.structure(back) == jax.tree.structure(results)
        jax.tree.map(
            lambda a, b, n=times: np.testing.assert_array_equal(a, n * b, strict=True),
            jax.tree.map(np.asarray, back),
            jax.tree.map(np.asarray, results),
        )


def test_a_program_has_few_results_however_many_parties_there_are():
    model = from_flax_linen(MLP(hidden=(3,), classes=CLASSES), jnp.zeros((1, FEATURES)))
    groups = {"net": PartyGroup(model, np.arange(len(SIZES)))}
    alone = local_only(groups, LocalTraining(optax.sgd, batch_size=2))
    programs, seeds = build_programs(alone, ROUNDS), np.arange(1, dtype=np.uint32)
    state = programs.init(seeds)
    hyper = jax.tree.map(np.float32, alone.hyper)
    rest = (seeds, np.int32(0), np.int32(1), hyper, resident_data(federated(), {}))
    *_, history = jax.eval_shape(programs.train, state, {}, *rest)
    assert len(jax.tree.leaves(history)) <= 3 < len(SIZES) <= len(history.places)


def test_models_of_one_network_are_evaluated_as_each_alone():
    """Two pools of one network, and one of another that has as many parameters in other shapes."""
    method = pools()["small"].method
    three = {name: Pool(method, np.arange(0, 5), 3) for name in ("first", "second")}
    three["other"] = pools()["large"]
    together = independent_pools(three, federated().columns)
    programs, seeds = build_programs(together, ROUNDS), np.arange(2, dtype=np.uint32)
    state = programs.init(seeds)
    split = {"test": evaluation_split(federated())}
    found = programs.evaluate(state, split)["test"]
    assert list(found) == sorted(three)
    assert not np.allclose(found["first"]["loss"], found["second"]["loss"])
    for name, pool in three.items():
        alone = independent_pools({name: pool}, federated().columns)
        part = {name: state[name]}
        expected = build_programs(alone, ROUNDS).evaluate(part, split)["test"][name]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found[name], expected
        )


def test_a_network_of_two_precisions_is_evaluated_twice():
    """Stacked with the float32 ones, weights of bfloat16 would be float32."""
    alone = independent_pools({"small": pools()["small"]}, federated().columns)
    predictor = alone.predictors["small"]
    half = lambda state: jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), predictor.variables(state)
    )
    both = alone._replace(
        predictors={"small": predictor, "half": predictor._replace(variables=half)}
    )
    seeds, split = np.arange(1, dtype=np.uint32), {"test": evaluation_split(federated())}
    state = build_programs(alone, ROUNDS).init(seeds)
    lowered = build_programs(both, ROUNDS).evaluate.lower(state, split).as_text()
    assert lowered.count("dot_general") == 4
    found = build_programs(both, ROUNDS).evaluate(state, split)["test"]
    assert found["half"]["loss"] != found["small"]["loss"]


def test_what_cohorts_share_they_share_within_transformations():
    data_sets = {"unlabelled": {"image": UNLABELLED}}
    selection = algorithm("merged").select(0, jax.random.key(0))
    inputs = resident_data(federated(), data_sets).read(selection)
    seen = []

    def look(inputs):
        seen.append([cohort.columns for cohort in inputs.cohorts.values()])
        return inputs

    for transform in (
        jax.jit,
        lambda f: lambda x: jax.eval_shape(f, x),
        lambda f: jax.jit(jax.jit(f)),
    ):
        after = transform(look)(inputs)
        seen.append([cohort.columns for cohort in after.cohorts.values()])
    assert all(first is second for first, second in seen)
    # Streamed cohorts, whose examples lie in buffers of their own, do not.
    apart = StreamedData(federated(), data_sets).read(jax.tree.map(np.asarray, selection))
    jax.jit(look)(apart)
    assert seen[-1][0] is not seen[-1][1]


@pytest.mark.parametrize("devices", [None, 1])
def test_a_prepared_folder_is_read_where_it_is(devices, tmp_path):
    save_prepared(tmp_path, {"train": federated()}, source="made up", licence="none", arguments={})
    data = resident_data(load_prepared(tmp_path)["train"])
    mesh = None if devices is None else Mesh(np.array(jax.devices()[:1]), (AXIS,))
    placed = replicate_data(data, mesh)
    for name, column in data.columns.items():
        on_device = placed.columns[name].addressable_data(0)
        np.testing.assert_array_equal(on_device, column)
        assert on_device.unsafe_buffer_pointer() == column.ctypes.data, name
