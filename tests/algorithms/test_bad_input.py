"""Bad arguments of algorithms and pools: one line names them and says what is allowed."""

import functools

import jax
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.codistillation import TeachingHyper
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.merged_codistillation import merged_codistillation
from fedcodist.algorithms.pools.periodic_codistillation import periodic_codistillation
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.schedules import linear_decay
from fedcodist.data.federated_data import FederatedData
from fedcodist.distillation.settings import Distillation
from fedcodist.models.digits import MLP
from fedcodist.run.sources import resident_data

COLUMNS = {"image": np.zeros((8, 6), np.float32), "label": np.zeros(8, np.int32)}
STEPS = Distillation(steps=2, batch_size=4)


def _method(classes=3, **training):
    return fed_avg(_model(classes), LocalTraining(**training))


@functools.cache
def _model(classes):
    return from_flax_linen(MLP(hidden=(5,), classes=classes), np.zeros((1, 6), np.float32))


def _valid_pools(**changes):
    small = Pool(_method(), np.arange(8), 3)._replace(**changes)
    return {"small": small, "large": Pool(_method(), np.arange(4), 2)}


def _merged(pools=None, num_unlabelled=10, num_rounds=5, **options):
    options = {"distillation": STEPS} | options
    return merged_codistillation(
        pools or _valid_pools(), COLUMNS, num_unlabelled, num_rounds, **options
    )


def _periodic(pools=None, num_unlabelled=10, num_rounds=5, **options):
    options = {"distillation": STEPS, "period": 2} | options
    return periodic_codistillation(
        pools or _valid_pools(), COLUMNS, num_unlabelled, num_rounds, **options
    )


def _assert_one_line(error, *fragments):
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 200
    for fragment in fragments:
        assert fragment in message, message


@pytest.fixture(autouse=True)
def nothing_compiles():
    _method()  # a network's example becomes an array of JAX, which compiles once in a process
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


BUILDERS = pytest.mark.parametrize("build", [_merged, _periodic], ids=["merged", "periodic"])


@pytest.mark.parametrize(
    "build",
    [_merged, _periodic, lambda pools: independent_pools(pools, COLUMNS)],
    ids=["merged", "periodic", "independent"],
)
class TestPools:
    def test_empty(self, build):
        with pytest.raises(ValueError) as error:
            build(_valid_pools(clients=np.array([], int)))
        _assert_one_line(error, "pools['small'].clients", "must not be empty")

    def test_repeated_client(self, build):
        with pytest.raises(ValueError) as error:
            build(_valid_pools(clients=np.array([1, 2, 2, 3])))
        _assert_one_line(error, "pools['small'].clients", "repeat")

    @pytest.mark.parametrize("clients", [[0.0, 1.7], [True, False], [[0, 1], [2, 3]]], ids=str)
    def test_clients_that_are_no_indices(self, build, clients):
        with pytest.raises(TypeError) as error:
            build(_valid_pools(clients=np.array(clients)))
        _assert_one_line(error, "pools['small'].clients", "integers, indices of clients")

    def test_a_name_with_a_slash(self, build):
        pools = _valid_pools()
        with pytest.raises(ValueError) as error:
            build({"en/small": pools["small"], "large": pools["large"]})
        _assert_one_line(error, "pools must have names without '/'", "got 'en/small'")

    def test_variates_of_another_number_of_clients(self, build):
        pools = _valid_pools()
        method = scaffold(pools["small"].method.model, 9)
        with pytest.raises(ValueError) as error:
            build(pools | {"small": pools["small"]._replace(method=method)})
        _assert_one_line(error, "pools['small'].method", "num_clients=8, the pool's, got 9")

    def test_a_cohort_size_that_is_no_integer(self, build):
        with pytest.raises(TypeError) as error:
            build(_valid_pools(cohort_size=2.0))
        _assert_one_line(error, "pools['small'].cohort_size", "an integer", "got 2.0")

    @pytest.mark.parametrize("size", [9, 0, -1])
    def test_cohort_size(self, build, size):
        with pytest.raises(ValueError) as error:
            build(_valid_pools(cohort_size=size))
        _assert_one_line(error, "pools['small'].cohort_size", "between 1 and", "8", f"got {size}")


def test_no_pools():
    with pytest.raises(ValueError) as error:
        independent_pools({}, COLUMNS)
    _assert_one_line(error, "pools", "at least one")


@BUILDERS
def test_one_pool_cannot_codistill(build):
    with pytest.raises(ValueError) as error:
        build({"small": _valid_pools()["small"]})
    _assert_one_line(error, "pools", "at least two", "['small']")


@BUILDERS
def test_class_counts_differ(build):
    pools = _valid_pools() | {"large": Pool(_method(classes=4), np.arange(4), 2)}
    with pytest.raises(ValueError) as error:
        build(pools)
    _assert_one_line(error, "class counts", "'small': 3", "'large': 4")


@pytest.mark.parametrize("alpha", [-0.1, 1.001, np.nan, np.inf, True])
def test_alpha_outside_its_range(alpha):
    with pytest.raises(ValueError) as error:
        _merged(alpha=alpha)
    _assert_one_line(error, "alpha", "at least 0 and at most 1", f"got {alpha!r}")


@pytest.mark.parametrize("alpha", ["a half", "0.5", None, [0.5], {1, 2}])
def test_alpha_not_a_number(alpha):
    with pytest.raises(TypeError) as error:
        _merged(alpha=alpha)
    _assert_one_line(error, "alpha", "number", f"got {alpha!r}")


def test_alpha_per_pool():
    with pytest.raises(ValueError) as error:
        _merged(alpha={"small": 0.5, "large": 2.0})
    _assert_one_line(error, "alpha['large']", "at most 1", "got 2.0")
    with pytest.raises(ValueError) as error:
        _merged(alpha={"small": 0.5})
    _assert_one_line(error, "alpha", "['small', 'large']", "['small']")


@pytest.mark.parametrize("alpha", [0, 1, 0.5, np.float32(0.5), np.array(0.5)])
def test_alphas_that_are_allowed(alpha):
    assert _merged(alpha=alpha).hyper.alpha == {"small": alpha, "large": alpha}


@BUILDERS
@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", 0.0, "above 0"),
        ("temperature", -1.0, "above 0"),
        ("temperature", np.nan, "above 0"),
        ("self_teacher_temperature", 0.0, "above 0"),
        ("interpolation", 1.5, "at least 0 and at most 1"),
        ("interpolation", -0.5, "at least 0 and at most 1"),
        ("decay", 2.0, "at least 0 and at most 1"),
        ("learning_rate", -0.1, "at least 0"),
        ("learning_rate", np.inf, "at least 0"),
        ("weight", -1.0, "at least 0"),
    ],
)
def test_teaching(build, field, value, allowed):
    with pytest.raises(ValueError) as error:
        build(teaching={"small": TeachingHyper(**{field: value})})
    _assert_one_line(error, f"teaching['small'].{field}", allowed, f"got {value!r}")


def test_students_who_teach_themselves_alone_go_nowhere():
    with pytest.raises(ValueError) as error:
        _merged(teaching={"small": TeachingHyper(interpolation=1.0)})
    _assert_one_line(error, "teaching['small'].interpolation", "below 1")


@pytest.mark.parametrize("hyper", [FedAvgHyper(-0.1, 1.0), FedAvgHyper(0.1, np.nan)], ids=str)
def test_learning_rates(hyper):
    with pytest.raises(ValueError) as error:
        fed_avg(_valid_pools()["small"].method.model, hyper=hyper)
    _assert_one_line(error, "hyper.", "learning_rate must be", "at least 0")


def test_a_decay_over_no_rounds():
    with pytest.raises(ValueError) as error:
        linear_decay(0)
    _assert_one_line(error, "num_rounds", "at least 1", "got 0")


@BUILDERS
def test_teaching_of_unknown_or_silent_pools(build):
    with pytest.raises(ValueError) as error:
        build(teaching={"huge": TeachingHyper()})
    _assert_one_line(error, "teaching", "'huge'", "['small', 'large']")
    with pytest.raises(ValueError) as error:
        build(teaching={"large": TeachingHyper(weight=0.0)})
    _assert_one_line(error, "teaching", "'small'", "above 0")


@BUILDERS
@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"steps": -1}, ("distillation.steps", "at least 0", "got -1")),
        ({"batch_size": 0}, ("distillation.batch_size", "at least 1", "got 0")),
        ({"mixup_beta": -1.0}, ("distillation.mixup_beta", "at least 0", "got -1.0")),
        ({"direction": "both"}, ("direction", "'forward' or 'reverse'", "got 'both'")),
    ],
)
def test_distillation_settings(build, change, fragments):
    with pytest.raises(ValueError) as error:
        build(distillation=STEPS._replace(**change))
    _assert_one_line(error, *fragments)


@BUILDERS
@pytest.mark.parametrize("value", [0, -3])
def test_rounds_and_unlabelled_rows(build, value):
    with pytest.raises(ValueError) as error:
        build(num_rounds=value)
    _assert_one_line(error, "num_rounds", "at least 1", f"got {value}")
    with pytest.raises(ValueError) as error:
        build(num_unlabelled=value)
    _assert_one_line(error, "num_unlabelled", "at least 1", f"got {value}")


@BUILDERS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_rounds": 2.5}, "num_rounds must be an integer of at least 1, got 2.5."),
        ({"num_unlabelled": 9.0}, "num_unlabelled must be an integer of at least 1, got 9.0."),
        (
            {"distillation": STEPS._replace(steps=2.0)},
            "distillation.steps must be an integer of at least 0, got 2.0.",
        ),
        (
            {"distillation": STEPS._replace(optimizer=optax.sgd(0.1))},
            "distillation.optimizer must be a function of the learning rate",
        ),
    ],
)
def test_numbers_and_optimizers_of_another_type(build, options, message):
    with pytest.raises(TypeError) as error:
        build(**options)
    _assert_one_line(error, message)


@pytest.mark.parametrize("period", [2.5, np.nan, "5", None, True])
def test_period_is_an_integer(period):
    with pytest.raises(TypeError) as error:
        _periodic(period=period)
    _assert_one_line(error, f"period must be an integer of at least 1, got {period!r}.")


def test_a_schedule_of_alpha_stays_between_0_and_1():
    with pytest.raises(ValueError) as error:
        _merged(alpha=0.5, alpha_schedule=lambda alpha, round: alpha + 0.2 * round)
    _assert_one_line(error, "alpha_schedule", "between 0 and 1", "got 1.1 in round 3")
    _merged(alpha=1.0, alpha_schedule=lambda alpha, round: alpha * (1 - round / 5))


@pytest.mark.parametrize("period", [0, -200])
def test_period(period):
    with pytest.raises(ValueError) as error:
        _periodic(period=period)
    _assert_one_line(error, "period", "at least 1", f"got {period}")


def test_period_longer_than_the_run_is_a_warning():
    with pytest.warns(UserWarning, match=r"period=6 is longer than the run of 5 rounds") as caught:
        _periodic(period=6)
    assert caught[0].filename == __file__


def test_period_as_long_as_the_run_is_fine(recwarn):
    _periodic(period=5)
    assert not recwarn


@pytest.mark.parametrize("field", ["batch_size", "epochs"])
def test_local_training(field):
    with pytest.raises(ValueError) as error:
        _method(**{field: 0})
    _assert_one_line(error, f"training.{field}", "at least 1", "got 0")


def test_client_without_examples():
    data = FederatedData.from_arrays(
        COLUMNS, offsets=[0, 3, 3, 8], client_ids=["ann", "bob", "cy"], allow_empty=True
    )
    with pytest.raises(ValueError) as error:
        resident_data(data)
    _assert_one_line(error, "client", "'bob'", "at least one example")
