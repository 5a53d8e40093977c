"""Arguments of another kind than a signature says: one line that names the argument or the field."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedcodist as fc
from fedcodist.algorithms.pools.client_ensembles import with_client_ensembles
from fedcodist.core.checks import check_integer, check_number
from fedcodist.core.inputs import ClientData
from fedcodist.core.local_training import batch_size_for, train_client
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import dirichlet
from fedcodist.models.digits import MLP
from fedcodist.run.experiment import Experiment, check_experiment, run_experiment
from fedcodist.run.sources import StreamedData, resident_data

COLUMNS = {"image": np.zeros((8, 6), np.float32), "label": np.zeros(8, np.int32)}
MODEL = fc.from_flax_linen(MLP(hidden=(5,), classes=3), np.zeros((1, 6), np.float32))
METHOD = fc.fed_avg(MODEL)
POOLS = {"small": fc.Pool(METHOD, np.arange(8), 4), "large": fc.Pool(METHOD, np.arange(4), 2)}
GROUPS = {"a": fc.PartyGroup(MODEL, np.arange(4))}
STEPS = fc.Distillation(steps=2, batch_size=4, mixup_beta=0)
GRAPH = ~np.eye(4, dtype=bool)
MASKED = np.ma.masked_array([0, 1, 2, 3], [0, 0, 1, 0])


def merged(pools=POOLS, columns=COLUMNS, num_rounds=5, **options):
    return fc.merged_codistillation(pools, columns, 10, num_rounds, **options)


def sdd(**options):
    options = {"distillation": STEPS} | options
    return fc.fed_sdd(POOLS["small"], COLUMNS, 10, num_models=2, **options)


def teaching(**options):
    return sdd(teaching=fc.FedSDDTeaching(**options))


def measured(kinds):
    build = lambda pool: fc.fed_sdd(pool, COLUMNS, 10, num_models=2, distillation=STEPS)
    return with_client_ensembles(build, POOLS["small"], kinds)


def df(**options):
    return fc.fed_df(POOLS, COLUMNS, 10, STEPS, **options)


def adjusted(**options):
    return levels(adjustments=fc.HeteroFLAdjustments(**options))


def levels(**options):
    level = {"a": fc.HeteroFLLevel(MODEL, np.arange(8), 2)}
    return fc.hetero_fl(MODEL, level, ["Dense_0", "Dense_1"], COLUMNS, **options)


def be(**options):
    return fc.fed_be(POOLS, COLUMNS, 10, STEPS, averaging=None, **options)


BOOLEANS = {
    "skip_at_alpha_one": merged,
    "scaled": df,
    "teaching.cached": teaching,
    "adjustments.masked": adjusted,
    "with_clients": be,
    "nested": lambda nested: fc.capacity_pools(8, 0.5, 0, nested),
    "balanced": lambda balanced: dirichlet([0, 1], 2, 1.0, 0, balanced=balanced),
    "rate_in_error": lambda **options: fc.fetch_sgd(
        MODEL, sketch_rows=3, sketch_columns=9, k=3, **options
    ),
}


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", ["no", 0, 1, None, 1.5], ids=repr)
def test_text_and_numbers_are_no_booleans(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got "):
        BOOLEANS[name](**{name.rpartition(".")[2]: value})


KINDS = {
    "pools must be a mapping by name": lambda: merged(pools=[1]),
    "pools['small'] must be made by fedcodist.algorithms.pools.pool.Pool": lambda: merged(
        pools={"small": 3}
    ),
    "distillation must be made by fedcodist.distillation.settings.Distillation": lambda: merged(
        distillation=3
    ),
    "training must be made by": lambda: fc.fed_avg(MODEL, optax.sgd),
    "hyper must be made by": lambda: fc.fed_avg(MODEL, hyper=0.1),
    "hyper.client_learning_rate must be a number": lambda: fc.fed_avg(
        MODEL, hyper=fc.FedAvgHyper(client_learning_rate="fast")
    ),
    "hyper.learning_rate must be": lambda: fc.local_only_steps(
        GROUPS, 3, hyper=fc.LocalOnlyStepsHyper(-1)
    ),
    "hyper.learning_rate must be finite": lambda: fc.fd(GROUPS, 3, hyper=fc.FDHyper(np.nan)),
    "execution.chunk_size must be an integer": lambda: merged(execution=fc.Execution("vmap", 2.5)),
    "execution.loop must be": lambda: merged(execution=fc.Execution("pmap")),
    "measured must be several of": lambda: measured("clients"),
    "columns['image'] must be an array": lambda: merged(columns={"image": [1]}),
    "distillation.batch_size must be at most": lambda: merged(
        distillation=STEPS._replace(batch_size=10**9)
    ),
    "distillation.steps must be at most": lambda: merged(distillation=STEPS._replace(steps=10**9)),
    "training.epochs must be at most": lambda: fc.fed_avg(MODEL, fc.LocalTraining(epochs=10**12)),
    "training.steps must be at most": lambda: fc.local_only_steps(
        GROUPS, 3, fc.StepTraining(steps=10**9)
    ),
    "pools['small'].cohort_size must be an integer": lambda: merged(
        pools=POOLS | {"small": POOLS["small"]._replace(cohort_size="all")}
    ),
    "num_clients must be at most": lambda: fc.capacity_pools(10**20, 0.5, 0),
    "option must be 1 or 2": lambda: fc.scaffold(MODEL, 8, option=True),
}


@pytest.mark.parametrize("told", KINDS)
def test_arguments_of_another_kind(told):
    with pytest.raises((TypeError, ValueError)) as error:
        KINDS[told]()
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


AS_TRAINED = fc.LocalTraining()
FUNCTIONS = {
    "training.preprocess": lambda value: fc.fed_avg(MODEL, AS_TRAINED._replace(preprocess=value)),
    "distillation.preprocess": lambda value: merged(distillation=STEPS._replace(preprocess=value)),
    "training.schedule": lambda value: fc.local_only_steps(
        GROUPS, 3, fc.StepTraining(schedule=value)
    ),
    "schedule": lambda value: fc.fed_avg(MODEL, schedule=value),
    "gradient_hook": lambda value: fc.local_only(GROUPS, AS_TRAINED, gradient_hook=value),
    "training.optimizer": lambda value: fc.scaffold(MODEL, 8, AS_TRAINED._replace(optimizer=value)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", ["no", 3, None, [], 1.5], ids=repr)
def test_what_is_no_function(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a function") as error:
        FUNCTIONS[name](value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["preprocess", "schedule"])
def test_functions_of_steps_have_their_arguments(field):
    with pytest.raises(TypeError, match=rf"^training\.{field} must be a function \(.*, got one of"):
        fc.local_only_steps(GROUPS, 3, fc.StepTraining(**{field: lambda only: only}))


LISTS = {
    "measured": measured,
    "layers": lambda value: fc.hetero_fl(
        MODEL, {"a": fc.HeteroFLLevel(MODEL, np.arange(8), 2)}, value, COLUMNS
    ),
    "client_ids": lambda value: FederatedData.from_arrays(
        COLUMNS, offsets=[0, 4, 8], client_ids=value
    ),
    "evaluate_also": lambda value: check_experiment(small_experiment(evaluate_also=value)),
    "callbacks": lambda value: run_experiment(small_experiment(), callbacks=value),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", ["no", 3, 1.5, b"no", np.float32(2)], ids=repr)
def test_what_is_no_list(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be ") as error:
        LISTS[name](value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["no", 0, -1, 1.5, True, None, 10**20], ids=repr)
def test_batches_of_inference(value):
    for method in (
        lambda: fc.fd(GROUPS, 3, inference_batch_size=value),
        lambda: fc.ds_fl(GROUPS, MODEL, fc.OpenExamples(10, 5, value)),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=r"^(open_examples\.)?inference_batch_size must be a"
        ):
            method()


def small_experiment(**options):
    data = FederatedData.from_arrays(COLUMNS, offsets=[0, 4, 8])
    algorithm = fc.independent_pools({"small": fc.Pool(METHOD, np.arange(2), 1)}, COLUMNS)
    settings = dict(rounds=1, evaluate_every=1) | options
    return Experiment(algorithm, resident_data(data), {"test": data}, **settings)


RUNS = {
    "experiment must be an Experiment": lambda: run_experiment(3),
    "algorithm must be what a method": lambda: run_experiment(
        small_experiment()._replace(algorithm=3)
    ),
    "data must be made by resident_data": lambda: run_experiment(
        small_experiment()._replace(data=FederatedData.from_arrays(COLUMNS, offsets=[0, 8]))
    ),
    "seeds_loop must be text": lambda: run_experiment(small_experiment(seeds_loop=np.zeros(3))),
    "workdir must be the path": lambda: run_experiment(small_experiment(), 3),
    "workdir must be the path of a run folder, got 'a": lambda: run_experiment(
        small_experiment(), "a\0b"
    ),
    "config must be a mapping": lambda: run_experiment(small_experiment(), config=3),
    "config must be finite": lambda: run_experiment(small_experiment(), config={"a": np.nan}),
    "plan must be finite numbers, text": lambda: run_experiment(
        small_experiment(), plan={"a": object()}
    ),
    "prepared must be a mapping": lambda: run_experiment(small_experiment(), prepared="x"),
    "change_plan must be True or False": lambda: run_experiment(
        small_experiment(), change_plan="no"
    ),
    "show_progress must be True or False": lambda: run_experiment(
        small_experiment(), show_progress=0
    ),
    "name must be text": lambda: run_experiment(small_experiment(), name=3),
    "callbacks must be functions": lambda: run_experiment(small_experiment(), callbacks=[3]),
    "programs must be made by": lambda: run_experiment(small_experiment(), programs=3),
    "federated must be FederatedData": lambda: resident_data(COLUMNS),
    "federated must be FederatedData, ": lambda: StreamedData(None),
    "data_sets must be columns by name": lambda: resident_data(
        FederatedData.from_arrays(COLUMNS, offsets=[0, 8]), 0
    ),
    "allow_empty must be True or False": lambda: FederatedData.from_arrays(
        COLUMNS, offsets=[0, 8], allow_empty="no"
    ),
    "hyper.weights must not be masked": lambda: fc.fed_md(
        GROUPS, fc.Alignment(np.zeros(9, int), 5), 3, hyper=fc.FedMDHyper(weights=MASKED)
    ),
    "alignment.public_labels must not be masked": lambda: fc.fed_md(
        GROUPS, fc.Alignment(MASKED % 3, 4), 3
    ),
    "graph must not be masked": lambda: fc.decentralised_fed_avg(
        GROUPS, 3, np.ma.masked_equal(GRAPH, 0)
    ),
    "groups['a'].clients must not be masked": lambda: fc.decentralised_fed_avg(
        {"a": fc.PartyGroup(MODEL, MASKED)}, 3, GRAPH
    ),
    "hyper.weights must be numbers": lambda: fc.fed_md(
        GROUPS, fc.Alignment(np.zeros(9, int), 5), 3, hyper=fc.FedMDHyper(weights=[10**400] * 4)
    ),
    "option must be 1 or 2": lambda: fc.scaffold(MODEL, 8, option=np.zeros(3)),
    "method.client_update does not fit": lambda: merged(columns=COLUMNS | {"image": np.zeros(8)}),
}


@pytest.mark.parametrize("told", RUNS)
def test_arguments_of_a_run(told):
    with pytest.raises((TypeError, ValueError)) as error:
        RUNS[told]()
    assert str(error.value).startswith(told) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1.0], np.zeros(1), 1 + 2j, {1}, np.str_("1")], ids=repr
)
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^x must be a number"):
        check_number("x", value)


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**31, 1e39, True, np.True_, np.nan])
def test_numbers_that_no_device_holds(value):
    with pytest.raises(ValueError, match=r"^x must be"):
        check_number("x", value)
    check_number("x", jnp.bfloat16(1.5))


def test_the_ends_of_a_range():
    check_number("x", 0, low=0, below=1)
    for value in (1, 1.0, -0.1):
        with pytest.raises(ValueError, match=rf"^x must be at least 0 and below 1, got {value}\.$"):
            check_number("x", value, low=0, below=1)


def test_integers_beyond_what_python_prints():
    with pytest.raises(ValueError, match=r"^x must be at most 2,147,483,647, got an integer of"):
        check_integer("x", 10**5000, low=1)


def test_very_many_rounds_are_not_looked_at_one_by_one():
    started = time.monotonic()
    merged(num_rounds=10**9, alpha_schedule=lambda alpha, round: alpha * round / 10**9)
    fc.decentralised_fed_avg(GROUPS, 10**9, GRAPH)
    answers = fc.PublicAnswers(10, period=7)
    fc.decentralised_periodic_codistillation(GROUPS, answers, 10**9, GRAPH)
    with pytest.raises(ValueError, match=r"^num_rounds must be at most 2,500,000 for 4 clients"):
        heads = fc.multi_headed(MLP(hidden=(5,), classes=3), jnp.zeros((1, 6)), 3, 1)
        fc.multi_headed_distillation(
            {"a": fc.PartyGroup(heads, np.arange(4))}, COLUMNS, GRAPH, 10**9
        )
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("split", ["a/b", 3])
def test_splits_whose_names_metrics_could_not_tell(split):
    data = FederatedData.from_arrays(COLUMNS, offsets=[0, 4, 8])
    experiment = Experiment(
        fc.independent_pools({"small": fc.Pool(METHOD, np.arange(2), 1)}, COLUMNS),
        resident_data(data),
        {"test": data},
        rounds=1,
        evaluate_every=1,
    )
    for field in ("splits", "final_splits"):
        with pytest.raises((TypeError, ValueError), match=f"^{field} must have names"):
            check_experiment(experiment._replace(**{field: {split: data}}))


def test_a_batch_far_beyond_a_client_is_its_examples():
    draw = np.random.default_rng(0)
    columns = {
        "image": jnp.asarray(draw.normal(size=(6, 6)), jnp.float32),
        "label": jnp.asarray(draw.integers(0, 3, 6)),
    }
    data = ClientData(columns, jnp.int32(1), jnp.int32(5), jnp.int32(5), 5, False)
    start = MODEL.init(jax.random.key(0))

    def trained(batch_size):
        training = fc.LocalTraining(optax.sgd, batch_size, 2)
        return train_client(MODEL, training, start, data, jax.random.key(1), 0.1).variables

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6),
        trained(10**9),
        trained(5),
    )
    assert [batch_size_for(size, 5) for size in (5, 20, 4096, 4097, 10**9)] == [5, 20, 4096, 5, 5]
