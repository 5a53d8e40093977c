"""A user's algorithm or method: what does not fit is an error of one line before anything compiles."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.parties.fed_gen import fed_gen
from fedcodist.algorithms.parties.fed_gh import fed_gh
from fedcodist.algorithms.parties.fed_l2g import fed_l2g
from fedcodist.algorithms.parties.fed_mrl import fed_mrl
from fedcodist.algorithms.parties.fed_proto import fed_proto
from fedcodist.algorithms.parties.groups import PartyGroup
from fedcodist.algorithms.parties.lg_fed_avg import lg_fed_avg
from fedcodist.algorithms.parties.local_only import local_only
from fedcodist.algorithms.parties.party import assemble
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.algorithms.pools.pool_rounds import set_models
from fedcodist.compression.compressed import compressed
from fedcodist.compression.quantisation import quantisation
from fedcodist.core.client_states import ClientStates
from fedcodist.core.communication import communication_of
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.inputs import Selection
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.method import PersonalModel, single_model
from fedcodist.distillation.settings import Distillation, check_distillation
from fedcodist.models.headed import headed
from fedcodist.run.algorithm_checks import check_algorithm
from fedcodist.run.experiment import Experiment, check_experiment, run_experiment
from fedcodist.run.selection_checks import check_selected
from fedcodist.run.sources import StreamedData, resident_data

DATA = random_clients((4, 3, 5), 3, 2)
EXTRA = {"unlabelled": {"image": np.zeros((6, 3), np.float32)}}

# In messages about a look-up.
AT = r" \(test_algorithm_checks\.py, line \d+\), which is not there"


def make_method(make=fed_avg):
    return make(
        softmax_regression(3, 2), LocalTraining(optax.sgd, batch_size=2), server_optimizer=optax.sgd
    )


@functools.cache
def make_algorithm():
    pool = Pool(make_method(), np.arange(3), 2)
    return independent_pools({"main": pool}, DATA.columns)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_of_16_bits_are_refused(dtype):
    """The sum of clients' updates would lose most of its digits, or all of them."""
    network = nn.Dense(2, param_dtype=dtype)
    model = from_flax_linen(network, jnp.zeros((1, 3)))
    method = fed_avg(model, LocalTraining(optax.sgd, batch_size=2))
    message = r"parameters of at least float32, 'bias' is .*fedcodist\.in_bfloat16"
    with pytest.raises(TypeError, match=message):
        communication_of(method, DATA.columns)


@pytest.mark.parametrize(
    ("dtype", "instead"),
    [(jnp.complex64, "real and imaginary parts as two"), (jnp.int32, "it in `mutable`")],
)
def test_parameters_that_are_not_real_are_refused(dtype, instead):
    """The gradient of a complex parameter is its conjugate: the optimizer ascended."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.abs(x @ self.param("w", lambda key: jnp.ones((3, 2), dtype)))

    model = from_flax_linen(Network(), jnp.zeros((1, 3)))
    method = fed_avg(model, LocalTraining(optax.sgd, batch_size=2))
    message = rf"parameters that are real numbers, 'w' is {jnp.dtype(dtype)}: keep {instead}"
    with pytest.raises(TypeError, match=message):
        communication_of(method, DATA.columns)


def test_a_forgotten_init_client_state_is_named():
    method = make_method()

    def looking(message, client_state, data, key, hyper):
        return method.client_update(message, client_state.model, data, key, hyper)

    def returning(*arguments):
        return method.client_update(*arguments)._replace(client_state=jnp.zeros(2))

    for client_update in (looking, returning):
        with pytest.raises((TypeError, ValueError), match=r"client_update .*init_client_state"):
            communication_of(method._replace(client_update=client_update), DATA.columns)


def experiment_of(algorithm, stream=False) -> Experiment:
    data = StreamedData(DATA, EXTRA) if stream else resident_data(DATA, EXTRA)
    return Experiment(algorithm, data, {"test": DATA}, rounds=2)


def changed_round(change):
    """An algorithm whose round changes what another returns."""

    def round_(state, rows, round, hyper):
        inputs = round.inputs
        results = make_algorithm().round(state, rows, round, hyper)
        return change(*results, inputs)

    return make_algorithm()._replace(round=round_)


def with_metrics(**metrics):
    return changed_round(
        lambda state, rows, own, _: (
            state,
            rows,
            own | {k.replace("__", "/"): v for k, v in metrics.items()},
        )
    )


def twice_named(name):
    """An algorithm with a further predictor, whose name may be a personal model's."""
    algorithm = make_algorithm()
    (predictor,) = algorithm.predictors.values()
    personal = PersonalModel(predictor.model, lambda state, _: predictor.variables(state))
    return algorithm._replace(
        predictors={**algorithm.predictors, name: predictor},
        personal_models={"main": {"main_personal": personal}},
    )


def of_parties_and(name=None, **others):
    """Parties without collaboration, other arguments of `assemble`, and perhaps another predictor."""
    model = softmax_regression(3, 2)
    groups = {"net": PartyGroup(model, np.arange(3))}
    algorithm = local_only(groups, LocalTraining(optax.sgd, batch_size=2))
    variables = lambda state, group: algorithm.predictors[group].variables(state)
    parts = (algorithm.init, algorithm.round, variables, algorithm.communication)
    if name is not None:
        others["other_predictors"] = {
            name: single_model(model, lambda state: variables(state, "net"))
        }
    return assemble("two_answers", groups, algorithm.hyper, *parts, **others)


def to_half(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)


def without_finite(state, rows, metrics, inputs):
    return state, rows, {name: own for name, own in metrics.items() if name != "main/finite"}


def reads_unlabelled(state, rows, metrics, inputs):
    return state, rows, metrics | {"main/mean": jnp.mean(inputs.examples["unlabelled"].indices)}


DENSE = {"params": {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}}


def reads_a_wrong_name(*_):
    raise NameError("name 'undefined_name' is not defined")


def fails(key):
    raise RuntimeError("not ready")


def reads_pixels(state, rows, metrics, inputs):
    return state, rows, metrics | {"main/mean": inputs.examples["unlabelled"].columns["pixels"]}


def network_of_pixels():
    return from_flax_linen(nn.Dense(2), jnp.zeros((1, 3)), inputs="pixels")


def in_turn(clients_of):
    select = lambda round, key: Selection({"main": clients_of(round)}, {})
    return make_algorithm()._replace(select=select)


def of_two_clients():
    """Of clients 0 and 2 of three."""
    return independent_pools({"main": Pool(make_method(), np.array([0, 2]), 2)}, DATA.columns)


def selects(**parts):
    select = make_algorithm().select
    return make_algorithm()._replace(select=lambda round, key: select(round, key).replace(**parts))


def selects_rows(row_of):
    select = make_algorithm().select
    rows_of = lambda round: {"unlabelled": jnp.full((1, 2), row_of(round))}
    return make_algorithm()._replace(
        select=lambda round, key: select(round, key).replace(examples=rows_of(round))
    )


def calls_itself():
    """A round's rows by a function that is closed over itself, and over a variable without a value."""

    def rows(round):
        return 299 if missing is None else rows(round)

    if rows is None:
        missing = None
    return of_parties_and(
        select_examples=lambda round, key: {"unlabelled": jnp.full((1, 2), 299)} if rows else {}
    )


WRONG = {
    "no finite": (lambda: changed_round(without_finite), r"the metric 'main/finite'"),
    "finite is no bool": (
        lambda: with_metrics(main__finite=jnp.float32(1)),
        r"'main/finite' as one bool, got float32\[\]",
    ),
    "finite of every client": (
        lambda: with_metrics(main__finite=jnp.ones(2, bool)),
        r"'main/finite' as one bool, got bool\[2\]",
    ),
    "no slash": (
        lambda: with_metrics(loss=jnp.float32(0)),
        r"algorithm.round must name its metrics '<pool>/<metric>', got 'loss'",
    ),
    "a name of what a line is of": (
        lambda: with_metrics(main__round=jnp.float32(0)),
        r"algorithm.round must not name a metric 'round'",
    ),
    "a client beyond the last in a later round": (
        lambda: in_turn(lambda round: 2 * round + jnp.arange(2)),
        r"clients\['main'\] from 0 to 2, none twice, got 3 in round 1\.",
    ),
    "a client twice in a later round": (
        lambda: in_turn(lambda round: jnp.arange(2) // (1 + round)),
        r"got 0 in round 1 twice",
    ),
    "a client of no pool": (
        lambda: of_two_clients()._replace(
            select=lambda round, key: Selection({"main": jnp.array([0, 1])}, {})
        ),
        r"clients\['main'\] from 0 to 2, none twice, got 1 in round 0, which is not of this pool\.",
    ),
    "a key as a client state": (
        lambda: make_algorithm()._replace(
            client_states={"main": ClientStates(np.arange(3), jax.random.key(0))}
        ),
        r"algorithm.client_states must hold arrays that a checkpoint can hold",
    ),
    "text": (
        lambda: with_metrics(main__note="good"),
        r"metrics that are arrays, 'main/note' is str",
    ),
    "a group of metrics": (
        lambda: with_metrics(main__all={"loss": 0.0}),
        r"metrics that are arrays, 'main/all' is dict",
    ),
    "metrics that are keys": (
        lambda: with_metrics(main__key=jax.random.key(0)),
        r"metrics of numbers, 'main/key' is key",
    ),
    "no mapping of metrics": (
        lambda: changed_round(lambda state, rows, metrics, _: (state, rows, [*metrics.values()])),
        r"metrics as a mapping of names, got list",
    ),
    "two results": (
        lambda: changed_round(lambda state, rows, metrics, _: (state, metrics)),
        r"must return three results, \(state, client_states, metrics\), got a tuple of 2",
    ),
    "no result": (
        lambda: changed_round(lambda *_: None),
        r"must return three results, \(state, client_states, metrics\), got nothing",
    ),
    "another dtype": (
        lambda: changed_round(lambda state, *rest: (to_half(state), *rest[:2])),
        r"a state as algorithm.init makes it: at .*it has float16\[3, 2\] in place of float32\[3, 2\]",
    ),
    "another structure": (
        lambda: changed_round(lambda state, *rest: ({"main": state["main"], "n": 1}, *rest[:2])),
        r"a state as algorithm.init makes it: at \['n'\] it has int32\[\] in place of nothing",
    ),
    "other rows": (
        lambda: changed_round(lambda state, rows, *rest: (state, {"main": jnp.zeros(2)}, rest[0])),
        r"client states as it gets them: at \['main'\] it has float32\[2\] in place of nothing",
    ),
    "a data set that select does not name": (
        lambda: changed_round(reads_unlabelled),
        rf"looks up 'unlabelled'{AT}: .* clients of \['main'\] and the data sets \[\]",
    ),
    "a column that the data do not have": (
        lambda: local_only({"net": PartyGroup(network_of_pixels(), np.arange(3))}, LocalTraining()),
        r"looks up 'pixels', which is not there: clients' examples have the columns "
        r"\['image', 'label'\] before preprocessing",
    ),
    "a column that a data set does not have": (
        lambda: selects(examples={"unlabelled": jnp.zeros((1, 2), jnp.int32)})._replace(
            round=changed_round(reads_pixels).round
        ),
        rf"looks up 'pixels'{AT}: .* and 'unlabelled' has \['image'\] before ",
    ),
    "a data set that there is not": (
        lambda: selects(examples={"public": jnp.zeros((1, 2), jnp.int32)}),
        r"data must have the data set 'public'",
    ),
    "places that are no integers": (
        lambda: selects(examples={"unlabelled": jnp.zeros((1, 2))}),
        r"select must return examples\['unlabelled'\] as integers \[..., batch\], got float32\[1, 2\]",
    ),
    "a cohort that is no list": (
        lambda: selects(clients={"main": jnp.int32(0)}),
        r"select must return clients\['main'\] as integers \[cohort\], got int32\[\]",
    ),
    "a client that there is not": (
        lambda: selects(clients={"main": jnp.array([1, 300])}),
        r"select must return clients\['main'\] from 0 to \d+, none twice, got 300 in round 0\.",
    ),
    "a client twice": (
        lambda: selects(clients={"main": jnp.array([1, 1])}),
        r"select must return clients\['main'\] from 0 to \d+, none twice, got 1 in round 0 twice\.",
    ),
    "a row that a data set does not have, in a later round": (
        lambda: selects_rows(lambda round: 299 * round),
        r"examples\['unlabelled'\] from 0 to \d+, or -1 in rounds that read none, got 299 in round 1\.",
    ),
    "a row below -1": (
        lambda: selects_rows(lambda round: -2),
        r"examples\['unlabelled'\] from 0 to \d+, or -1 .*, got -2 in round 0\.",
    ),
    "a row that a data set does not have, by select_examples": (
        lambda: of_parties_and(
            select_examples=lambda round, key: {"unlabelled": jnp.full((1, 2), 299)}
        ),
        r"examples\['unlabelled'\] from 0 to \d+, .*, got 299 in round 0\.",
    ),
    "a row that a data set does not have, where a function calls itself": (
        calls_itself,
        r"examples\['unlabelled'\] from 0 to \d+, .*, got 299 in round 0\.",
    ),
    "no cohort of a pool": (
        lambda: selects(clients={"others": jnp.zeros(2, jnp.int32)}),
        r"clients of every pool of algorithm.client_states, 'main' is missing",
    ),
    "select gives clients alone": (
        lambda: make_algorithm()._replace(select=lambda round, key: {"main": jnp.arange(2)}),
        r"algorithm.select must return a Selection .* got dict",
    ),
    "init of nothing": (
        lambda: make_algorithm()._replace(init=lambda: {}),
        r"algorithm.init does not fit what it is given: .*0 positional arguments",
    ),
    "init is no function": (
        lambda: make_algorithm()._replace(init={"main": 0.0}),
        r"algorithm.init does not fit what it is given: 'dict' object is not callable",
    ),
    "init gives a key": (
        lambda: make_algorithm()._replace(
            init=lambda key: {**make_algorithm().init(key), "draws": key}
        ),
        r"init must return arrays that a checkpoint can hold, got a key at \['draws'\]: keep jax",
    ),
    "init gives text": (
        lambda: make_algorithm()._replace(init=lambda key: {"main": "w"}),
        r"algorithm.init does not fit what it is given: ",
    ),
    "round takes too few": (
        lambda: make_algorithm()._replace(round=lambda state, inputs: (state, {}, {})),
        r"algorithm.round does not fit what it is given: .* positional arguments",
    ),
    "hyper is text": (
        lambda: make_algorithm()._replace(hyper={"main": FedAvgHyper("fast", 1.0)}),
        r"hyper\['main'\]\.client_learning_rate must hold numbers, got 'fast'",
    ),
    "hyper is not a number": (
        lambda: make_algorithm()._replace(hyper={"main": FedAvgHyper(0.1, float("nan"))}),
        r"hyper\['main'\]\.server_learning_rate must hold numbers, got nan",
    ),
    "hyper is text that looks like a number": (
        lambda: make_algorithm()._replace(hyper={"main": FedAvgHyper("0.1", 1.0)}),
        r"hyper\['main'\]\.client_learning_rate must hold numbers, got '0.1'",
    ),
    "hyper that the round needs is missing": (
        lambda: make_algorithm()._replace(
            hyper={"decay": None}, round=lambda state, rows, round, hyper: state * hyper["decay"]
        ),
        r"given \(hyper\['decay'\] is None\) \(test_algorithm_checks\.py, line \d+\): unsupported",
    ),
    "a name that is not there": (
        lambda: make_algorithm()._replace(round=reads_a_wrong_name),
        r"algorithm.round does not fit .* \(test_algorithm_checks\.py, line \d+\): name 'undef",
    ),
    "an error of one's own": (
        lambda: make_algorithm()._replace(init=fails),
        r"algorithm.init does not fit .* \(test_algorithm_checks\.py, line \d+\): not ready",
    ),
    "a branch on a traced value": (
        lambda: make_algorithm()._replace(
            round=lambda state, rows, round, hyper: state if round.index > 1 else rows
        ),
        r"test_algorithm_checks\.py, line \d+\): Attempted boolean conversion .{,60}\.$",
    ),
    "two models of one name": (
        lambda: twice_named("main_personal"),
        r"personal_models\['main'\] must have a name of its own for every model, got 'main_personal'"
        r", which is also a model of algorithm\.predictors\['main_personal'\]",
    ),
    "a model's name with a slash": (
        lambda: twice_named("ma/in"),
        r"predictors\['ma/in'\] must have names without '/', got 'ma/in'",
    ),
    "an other predictor by a party's name": (
        lambda: of_parties_and("net"),
        r"other_predictors must not have the name of an architecture, got 'net'",
    ),
    "a predictor without variables": (
        lambda: make_algorithm()._replace(
            predictors={
                "main": make_algorithm()
                .predictors["main"]
                ._replace(variables=lambda state: state["main"].params)
            }
        ),
        r"predictors\['main'\].variables must return Variables, got dict",
    ),
    "a predictor of another state": (
        lambda: make_algorithm()._replace(
            predictors={
                "main": make_algorithm()
                .predictors["main"]
                ._replace(variables=lambda state: state["best"])
            }
        ),
        rf"predictors\['main'\].variables looks up 'best'{AT}",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_algorithm_is_one_line_before_anything_compiles(case, stream, tmp_path):
    algorithm, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        run_experiment(experiment_of(algorithm(), stream), tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_a_right_one_is_left_alone(stream):
    check_experiment(experiment_of(make_algorithm(), stream))
    check_experiment(experiment_of(selects_rows(lambda round: -1), stream))  # reads no examples
    # Weights of examples and arrays among the metrics are fine, and so are weak types.
    check_experiment(experiment_of(with_metrics(main__share=0.5, main__shares=jnp.ones(3)), stream))


def test_clients_are_selected_a_round_at_a_time():
    """What a selection computes may be large: for all rounds at once it was 10 GB."""

    @jax.custom_batching.custom_vmap
    def large(round):
        return round % 2 + jnp.arange(2)

    @large.def_vmap
    def of_several(*_):
        raise AssertionError("several rounds at once")

    check_selected(in_turn(large), DATA, rounds=3, seed=0)


def test_streamed_shapes_are_those_of_what_is_read():
    selection = Selection(
        {"main": np.array([0, 2], np.int32)}, {"unlabelled": np.zeros((2, 3), np.int32)}
    )
    source = StreamedData(DATA, EXTRA)
    read, shapes = source.read(selection), source.shapes(selection)
    assert jax.tree.structure(read) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(read), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, jax.dtypes.canonicalize_dtype(array.dtype)) == (
            shape.shape,
            shape.dtype,
        )


def test_the_round_is_traced_once_for_the_check_and_for_training(monkeypatch):
    """Of large networks a trace takes seconds. On several devices training has one of its own."""
    monkeypatch.setattr("fedcodist.run.experiment.all_devices", lambda: None)
    traces = []

    def round_(*arguments):
        traces.append(1)
        return make_algorithm().round(*arguments)

    algorithm = make_algorithm()._replace(round=round_)
    experiment = experiment_of(algorithm)._replace(evaluate_every=1)
    check_experiment(experiment)
    assert len(traces) == 1
    check_algorithm(algorithm, experiment.data)
    assert len(traces) == 1
    run_experiment(experiment, show_progress=False)
    assert len(traces) == 1


def of_reduce(**changes):
    """reduce with other fields of its Aggregate."""
    reduce = make_method().reduce

    def finalize(*arguments):
        return reduce.finalize(*arguments)._replace(**changes)

    return {"reduce": reduce._replace(finalize=finalize)}


def test_a_reduction_does_not_replace_what_the_library_measures():
    method = make_method()._replace(**of_reduce(metrics={"client_loss": jnp.ones(())}))
    algorithm = independent_pools({"main": Pool(method, np.arange(3), 2)}, DATA.columns)
    with pytest.raises(ValueError, match=r"reduce must not have 'client_loss' among its Aggregate"):
        check_experiment(experiment_of(algorithm))


def two_results(message, row, data, key, hyper):
    return message.params, message.mutable


def of_client(**changes):
    """client_update with other fields of its ClientResult."""

    def update(message, row, data, key, hyper):
        return make_method().client_update(message, row, data, key, hyper)._replace(**changes)

    return {"client_update": update}


WRONG_METHODS = {
    "two results": (
        {"client_update": two_results},
        r"client_update must return a ClientResult, of update, .* got a tuple of 2",
    ),
    "nothing": (
        {"client_update": lambda *_: None},
        r"client_update must return a ClientResult, of update, .* got nothing",
    ),
    "no steps": (of_client(metrics={"loss": 0.0}), r"metrics with 'num_steps', .* got \['loss'\]"),
    "hyper of nothing": (
        {"hyper": FedAvgHyper(None, 1.0)},
        r"hyper\.client_learning_rate must hold numbers, got None",
    ),
    "images of another shape than the network's": (
        {"client_update": lambda *_: nn.Dense(2).apply(DENSE, jnp.zeros((2, 4)))},
        r"does not fit what it is given, inputs of another shape than the network was made with",
    ),
    "metrics without names": (
        of_client(metrics=[1.0]),
        r"must return metrics by name, .* got list",
    ),
    "a metric of nothing": (
        of_client(metrics={"num_steps": 1, "loss": None}),
        r"client_update must return a number as metrics\['loss'\], got None",
    ),
    "a metric that is text": (
        of_client(metrics={"num_steps": 1, "loss": "low"}),
        r"client_update must return a number as metrics\['loss'\], got 'low'",
    ),
    "a metric that is a dictionary": (
        of_client(metrics={"num_steps": 1, "loss": {"first": 1.0}}),
        r"client_update must return a number as metrics\['loss'\], got \{'first': 1.0\}",
    ),
    "a metric that is a list": (
        of_client(metrics={"num_steps": 1, "loss": [1.0, 2.0]}),
        r"client_update must return a number as metrics\['loss'\], got \[1.0, 2.0\]",
    ),
    "no weight": (
        of_client(weight=None),
        r"client_update must return a number as weight, got None",
    ),
    "a weight per example": (
        of_client(weight=jnp.ones(2)),
        r"weight that is a scalar, got shape \[2\]",
    ),
    "a row that none has": (
        of_client(client_state=jnp.ones(2)),
        r"a client state as method.init_client_state makes it .*none.*: .*float32\[2\]",
    ),
    "an update of other shapes": (
        of_client(update={"w": jnp.ones(5)}),
        r"client_update must return an update of the model's shapes, .* has float32\[5\] in place of ",
    ),
    "an update that would be broadcast": (
        of_client(update={"w": jnp.zeros(())}),
        r"client_update must return an update of the model's shapes, or have sends_models=False",
    ),
    "another column": (
        {"client_update": lambda message, row, data, key, hyper: data.columns["pixels"]},
        rf"client_update looks up 'pixels'{AT}: the columns are \['image', 'label'\]",
    ),
    "init of nothing": ({"init": lambda: 0}, r"method.init does not fit what it is given"),
    "a server's state of nothing": (
        {"init": lambda key: None},
        r"broadcast .* \(the server's state is None: method.init returns none\): 'NoneType' object has",
    ),
    "a client state that needs a key": (
        {"init_client_state": lambda key: None},
        r"method.init_client_state does not fit what it is given: .* missing 1 required positional",
    ),
    "a message without a model": (
        {"broadcast": lambda server: server.params},
        r"broadcast must return what has the model's 'params' and 'mutable', .* got dict",
    ),
    "a server of another structure": (
        {"server_update": lambda server, *_: server.params},
        r"server_update must return a state as method.init makes it",
    ),
    "no aggregate": (
        {"reduce": make_method().reduce._replace(finalize=lambda total, message, key: total)},
        r"method.reduce .finalize must return an Aggregate, got a tuple of 4",
    ),
    "an aggregate with a list of metrics": (
        of_reduce(metrics=[1.0]),
        r"reduce .finalize must return metrics by name, a dictionary, got list",
    ),
    "variables that are parameters": (
        {"variables": lambda server: server.params},
        r"method.variables must return Variables, got dict",
    ),
    "a model that is no server": (
        {"set_model": lambda server, new, reset_optimizer: new},
        r"method.set_model must return a state as method.init makes it",
    ),
}


@pytest.mark.parametrize("case", WRONG_METHODS)
def test_a_wrong_method_is_one_line(case):
    changes, message = WRONG_METHODS[case]
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        pool = Pool(make_method()._replace(**changes), np.arange(3), 2)
        independent_pools({"main": pool}, DATA.columns)
    assert "\n" not in str(raised.value)


PLAIN = softmax_regression(3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"init": lambda key: PLAIN.init(key).params},
            r"model.init must return fedcodist.Variables\(params, mutable\), got dict",
        ),
        ({"init": lambda: None}, r"model.init does not fit what it is given: .*0 positional"),
        (
            {"apply": lambda variables, batch, **_: PLAIN.apply(variables, batch)[0]},
            r"^model.apply must return \(outputs, mutable\), got float32\[2, 2\]",
        ),
    ],
    ids=["init of a dictionary", "init of nothing", "apply of outputs"],
)
@pytest.mark.parametrize("kind", ["clients", "parties"])
def test_a_model_of_wrong_functions_is_one_line(changes, message, kind):
    model, training = PLAIN._replace(**changes), LocalTraining(optax.sgd, batch_size=2)
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        if kind == "clients":
            pool = Pool(fed_avg(model, training), np.arange(3), 2)
            independent_pools({"main": pool}, DATA.columns)
        else:
            algorithm = local_only({"a": PartyGroup(model, np.arange(3))}, training)
            check_experiment(experiment_of(algorithm))
    assert "\n" not in str(raised.value)


def test_the_last_argument_of_set_model_may_have_any_name():
    method = make_method()
    renamed = method._replace(
        set_model=lambda server, model, reset: method.set_model(server, model, reset)
    )
    communication_of(compressed(renamed, 2, downlink=quantisation(8)), DATA.columns)
    server = renamed.init(jax.random.key(0))
    pools = {"main": Pool(renamed, np.arange(3), 2)}
    set_models(pools, {"main": server}, {"main": renamed.variables(server)})


def test_rows_of_a_method_are_checked():
    method = scaffold(softmax_regression(3, 2), 3, LocalTraining(optax.sgd, batch_size=2))
    communication_of(method, DATA.columns)
    with pytest.raises(TypeError, match=r"a client state as method.init_client_state makes it"):

        def client_update(*arguments):
            result = method.client_update(*arguments)
            halves = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), result.client_state)
            return result._replace(client_state=halves)

        communication_of(method._replace(client_update=client_update), DATA.columns)


OPTIMIZERS = {
    "text": ("sgd", "got 'sgd'"),
    "a rate": (0.1, "got 0.1"),
    "none": (None, "got None"),
    "made": (optax.sgd(0.1), "got an optimizer already made"),
    "line search": (optax.lbfgs, "got one that also needs values of the loss"),
    "of nothing": (lambda: optax.sgd(0.1), "got one that fails with it: .*0 positional arguments"),
    "no optimizer": (lambda rate: "sgd", "got one that returns str"),
    "noise": (
        lambda rate: optax.noisy_sgd(rate, key=0),
        "got one that keeps a random key, as optax.add_noise does",
    ),
    "a function of a function": (lambda rate: optax.sgd, "got one that returns function"),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
@pytest.mark.parametrize("place", ["training", "server", "distillation"])
def test_what_is_no_optimizer_is_one_line(case, place):
    optimizer, message = OPTIMIZERS[case]
    model, training = softmax_regression(3, 2), LocalTraining(optax.sgd, batch_size=2)
    with pytest.raises(TypeError, match=f"a function of the learning rate, .*{message}") as raised:
        if place == "training":
            fed_avg(model, training._replace(optimizer=optimizer))
        elif place == "server":
            fed_avg(model, training, server_optimizer=optimizer)
        else:
            check_distillation(Distillation(2, optimizer=optimizer), 8)
    assert "\n" not in str(raised.value)


def test_what_a_pool_keeps_is_stacked_for_its_cohort():
    """Client states of Python numbers, as init_client_state may return them."""

    def round_(state, rows, round, hyper):
        state, _, metrics = make_algorithm().round(state, {"main": None}, round, hyper)
        return state, {"main": rows["main"] + 1}, metrics

    rows = {"main": ClientStates(np.arange(3), 0.0)}
    check_algorithm(
        make_algorithm()._replace(round=round_, client_states=rows), resident_data(DATA, EXTRA)
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            lambda server, own: own,
            r"^algorithm\.personal_models\['main'\]\['main_own'\]\.variables must return Variables",
        ),
        (
            lambda server, own: server.w,
            r"^algorithm\.personal_models\['main'\]\['main_own'\]\.variables does not fit",
        ),
    ],
)
def test_a_wrong_personal_model_is_one_line(variables, message):
    model = softmax_regression(3, 2)
    method = scaffold(model, 3, LocalTraining(optax.sgd, batch_size=2))
    method = method._replace(personal_models={"own": PersonalModel(model, variables)})
    algorithm = independent_pools({"main": Pool(method, np.arange(3), 2)}, DATA.columns)
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        check_experiment(experiment_of(algorithm))
    assert "\n" not in str(raised.value)


class OwnHead(nn.Module):
    """A network with a layer of the name of `headed`'s head, which returns logits alone."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.relu(nn.Dense(4, name="body")(x)))


OWN_HEAD = from_flax_linen(OwnHead(), jnp.zeros((1, 3)))
OWN_GROUPS = {"own": PartyGroup(OWN_HEAD, np.arange(3))}
HEADED = headed(nn.Dense(4), jnp.zeros((1, 3)), 2)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: fed_proto(OWN_GROUPS, 2), "groups or pools"),
        (lambda: fed_gh(OWN_GROUPS, 2), "groups or pools"),
        (lambda: fed_l2g(OWN_GROUPS, 2), "groups or pools"),
        (lambda: fed_mrl(OWN_GROUPS, HEADED), "groups or pools"),
        (lambda: fed_mrl({"own": PartyGroup(HEADED, np.arange(3))}, OWN_HEAD), "small"),
    ],
)
def test_methods_of_embeddings_need_models_that_return_them(make, argument):
    message = (
        f"^{argument} must have models with a linear head, as `headed` makes them, whose outputs"
    )
    with pytest.raises(ValueError, match=message) as raised:
        check_experiment(experiment_of(make()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [lg_fed_avg, fed_gen])
def test_methods_of_heads_take_networks_that_return_logits_alone(make):
    check_experiment(experiment_of(make(OWN_GROUPS)))
