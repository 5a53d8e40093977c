"""The identity of a run: a hash of data, settings and functions, the same in every process."""

import functools
import importlib
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from softmax_regression import random_clients, softmax_regression

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.clients.scaffold import scaffold
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.for_each_client import Execution
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.schedules import constant, linear_decay
from fedcodist.data.federated_data import FederatedData
from fedcodist.run import code_names, described_code, digests
from fedcodist.run.digests import digest
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.identity import identity_of
from fedcodist.run.sources import StreamedData, resident_data
from fedcodist.run.stopping import KeepBest

RATE = 0.9
TEST = random_clients((2, 3), 3, 2)


def make_data(shift=0.0, sizes=(4, 3, 5)):
    columns = random_clients(sizes, 3, 2).columns
    columns = {**columns, "image": columns["image"] + np.float32(shift)}
    return FederatedData.from_arrays(columns, offsets=np.cumsum([0, *sizes]))


def with_momentum(momentum):
    return lambda rate: optax.sgd(rate, momentum)


def sgd_or(rate, *, momentum=0.5):
    return optax.sgd(rate, momentum)


def make_experiment(
    optimizer=optax.sgd,
    data=None,
    unlabelled=0.0,
    test=TEST,
    schedule=constant,
    cohort=2,
    clients=3,
    execution=Execution(),
    source=resident_data,
    batch_size=2,
    epochs=1,
    preprocess=lambda batch, key, positions: batch,
    server=optax.sgd,
    model=None,
    rounds=2,
    **settings,
):
    data = data or make_data()
    training = LocalTraining(optimizer, batch_size, epochs, preprocess)
    method = fed_avg(model or softmax_regression(3, 2), training, server, schedule)
    pools = {"main": Pool(method, np.arange(clients), cohort)}
    algorithm = independent_pools(pools, data.columns, execution)
    extra = {"unlabelled": {"image": np.full((4, 3), unlabelled, np.float32)}}
    return Experiment(algorithm, source(data, extra), {"test": test}, rounds, **settings)


def difference(theirs, ours, **options):
    before = json.loads(json.dumps(identity_of(theirs).content))
    return identity_of(ours, **options).difference(before)


OTHERS = {
    "batch size": (dict(batch_size=1), r"training\.batch_size is 2 there and 1 here"),
    "epochs": (dict(epochs=20), r"training\.epochs is 1 there and 20 here"),
    "cohort": (dict(cohort=1), r"pools\['main'\]\.cohort_size is 2 there and 1 here"),
    "clients": (
        dict(clients=2),
        r"pools\['main'\]\.clients is \['int32', 0, 1, 2\] there and .* 1\]",
    ),
    "momentum": (
        dict(optimizer=lambda rate: optax.sgd(rate, 0.9)),
        r"optimizer is 'optax.sgd' there",
    ),
    "adam": (dict(optimizer=optax.adam), r"is 'optax.sgd' there and 'optax.adam' here"),
    "server": (
        dict(server=optax.adam),
        r"is 'optax.sgd' there and 'optax.adam' here",
    ),
    "schedule": (
        dict(schedule=linear_decay(2)),
        r"schedule is 'fedcodist.constant' there and 'fedcodist",
    ),
    "data": (dict(data=make_data(1.0)), r"data\.clients\.image is 'float32\[12, 3\] \w+' there"),
    "who has them": (dict(data=make_data(sizes=(3, 4, 5))), r"data\.clients\.sizes of clients is"),
    "data of nobody": (dict(unlabelled=1.0), r"data\.data_sets\.unlabelled\.image is 'float32"),
    "test split": (dict(test=random_clients((2, 4), 3, 2)), r"data\.splits\.test\.image is "),
    "evaluation batch": (
        dict(evaluation_batch_size=7),
        r"settings\.evaluation_batch_size is 500 .* 7",
    ),
    "preprocessing": (
        dict(preprocess=lambda batch, key, positions: {**batch, "image": batch["image"] * 2}),
        r"preprocess\.code",
    ),
    "preprocessing of evaluation": (
        dict(evaluation_preprocess=lambda batch, key, positions: dict(batch)),
        r"evaluation_preprocess",
    ),
    "final splits": (dict(final_splits={"last": TEST}), r"splits.* is "),
    "clients evaluated": (
        dict(evaluate_clients=3),
        r"settings\.evaluate_clients is 100 there and 3",
    ),
    "evaluated besides": (dict(evaluate_also=(1,)), r"settings\.evaluate_also"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_experiment_is_named(case):
    settings, message = OTHERS[case]
    found = difference(make_experiment(), make_experiment(**settings))
    assert found is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)
    assert "\n" not in found and " at 0x" not in found


def test_the_same_experiment_made_anew_has_no_difference():
    assert difference(make_experiment(), make_experiment()) is None
    momentum = lambda: make_experiment(optimizer=with_momentum(0.9))
    assert difference(momentum(), momentum()) is None
    # How it is executed belongs to the plan.
    vmapped = make_experiment(execution=Execution("vmap", 2), source=StreamedData)
    assert difference(make_experiment(), vmapped) is None
    assert identity_of(vmapped).execution["execution"] == {"loop": "vmap", "chunk_size": 2}


class Scale:
    """A user's callable."""

    def __init__(self, by):
        self.by = by
        self._calls = []

    def __call__(self, batch, key, positions):
        return {**batch, "image": batch["image"] * self.by}


class Wide(nn.Module):
    """A user's network."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(self.width)(x)))


class Deep(nn.Module):
    """The same fields, another network."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.tanh(nn.Dense(self.width)(x)))


Deep.__name__ = Deep.__qualname__ = "Wide"
described = lambda value: _entries(value)


def _entries(value):
    return json.loads(json.dumps(described_code.described("f", value)))


def scaled_by(array):
    return lambda batch, key, positions: {**batch, "image": batch["image"] * array}


DIFFERENT = {
    "closures": (with_momentum(0.9), with_momentum(0.5)),
    "constants": (lambda rate: optax.sgd(rate, 0.9), lambda rate: optax.sgd(rate, 0.5)),
    "names": (lambda rate: optax.adam(rate), lambda rate: optax.sgd(rate)),
    "operators": (lambda rate: rate + 2.0, lambda rate: rate - 2.0),
    "comparisons": (lambda rate: rate < 2.0, lambda rate: rate > 2.0),
    "order of arguments": (lambda a, b: max(a, b), lambda a, b: max(b, a)),
    "defaults": (lambda rate, m=0.5: (rate, m), lambda rate, m=0.9: (rate, m)),
    "inner functions": (lambda r: lambda x: x + 1, lambda r: lambda x: x + 3),
    "partials": (functools.partial(sgd_or, momentum=0.1), functools.partial(sgd_or, momentum=0.2)),
    "positional partials": (functools.partial(optax.sgd, 0.1), functools.partial(optax.sgd, 0.2)),
    "optimizers": (optax.sgd(0.1, 0.9), optax.sgd(0.1)),
    "rates of optimizers": (optax.adam(0.1), optax.adam(0.2)),
    "chains": (
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.chain(optax.clip(2.0), optax.sgd(0.1)),
    ),
    "schedules": (optax.cosine_decay_schedule(0.1, 10), optax.cosine_decay_schedule(0.1, 20)),
    "objects": (Scale(1.0), Scale(2.0)),
    "methods": (Scale(1.0).__call__, Scale(2.0).__call__),
    "modules": (Wide(3), Wide(4)),
    "code of classes": (Wide(3), Deep(3)),
    "compiled functions": (jax.jit(with_momentum(0.9)), jax.jit(with_momentum(0.5))),
    "small arrays": (scaled_by(np.float32([1, 2])), scaled_by(np.float32([1, 3]))),
    "large arrays": (scaled_by(np.arange(99.0)), scaled_by(np.arange(99.0)[::-1])),
    "arrays on the device": (scaled_by(jnp.arange(99)), scaled_by(-jnp.arange(99))),
    "keys": (scaled_by(jax.random.key(0)), scaled_by(jax.random.key(1))),
    "types of arrays": (scaled_by(np.float32([1])), scaled_by(np.float64([1]))),
    "not a number": (with_momentum(float("nan")), with_momentum(float("inf"))),
    "sets": (with_momentum({"a", "b"}), with_momentum({"a", "c"})),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_functions_are_known_by_what_they_hold(case):
    one, other = DIFFERENT[case]
    assert described(one) == described(one)
    assert described(one) != described(other)
    assert " at 0x" not in json.dumps(described(one))


def test_a_package_of_ones_own_may_be_called_experiments(monkeypatch, tmp_path):
    def sgd(rate):
        return optax.sgd(rate)

    importlib.import_module("experiments")
    sgd.__module__ = "experiments.optimizers"
    assert code_names.is_library(sgd)  # of the checkout
    theirs = types.ModuleType("experiments")
    theirs.__file__ = str(tmp_path / "experiments" / "__init__.py")
    for file in (theirs.__file__, None):
        theirs.__file__ = file
        monkeypatch.setitem(sys.modules, "experiments", theirs)
        assert not code_names.is_library(sgd)


def test_a_variable_of_the_module_that_code_reads(monkeypatch):
    uses_rate = lambda rate: optax.sgd(rate, RATE)
    before = described(uses_rate)
    monkeypatch.setitem(globals(), "RATE", 0.5)
    assert described(uses_rate) != before


def test_another_module_of_the_users_that_code_reads(monkeypatch):
    """`import helper` and `helper.inner.factor(x)` are as `from helper import factor`."""
    outer, inner = types.ModuleType("helper"), types.ModuleType("helper.inner")
    outer.inner, inner.factor, inner.SCALE = inner, lambda x: 2.0 * x, 1.0
    variables = {"helper": outer, "optax": optax}
    calls = eval("lambda x: helper.inner.factor(x)", variables)
    reads = eval("lambda rate: optax.sgd(rate * helper.inner.SCALE)", variables)
    before = described(calls), described(reads)
    assert (described(calls), described(reads)) == before
    monkeypatch.setattr(inner, "factor", lambda x: 3.0 * x)
    monkeypatch.setattr(inner, "SCALE", 0.5)
    assert described(calls) != before[0] and described(reads) != before[1]
    assert not any("optax.sgd" in path for path in described(reads))


def test_what_calls_itself_ends():
    def countdown(n):
        return countdown(n - 1) if n else 0

    assert described(countdown)["f.countdown"] == "as f"


def test_notes_that_an_object_takes_are_no_difference():
    scale = Scale(1.0)
    before = described(scale)
    scale._calls.append(3)
    assert described(scale) == before


ELSEWHERE = """
import json, sys
sys.path[:0] = [{tests!r}, {reference!r}]
import test_identity as here
print(json.dumps([here.described(one) for one, _ in here.DIFFERENT.values()]))
print(json.dumps(here.identity_of(here.make_experiment(optimizer=here.with_momentum(0.9))).content))
"""


def test_another_process_finds_the_same(monkeypatch):
    tests = Path(__file__).parent
    program = ELSEWHERE.format(tests=str(tests), reference=str(tests.parent / "reference"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("PYTHONPATH", str(tests.parents[1]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    assert theirs[0] == [described(one) for one, _ in DIFFERENT.values()]
    ours = make_experiment(optimizer=with_momentum(0.9))
    assert identity_of(ours).difference(theirs[1]) is None


def test_digests(monkeypatch, tmp_path):
    draw = np.random.default_rng(0)
    values = draw.normal(size=(100, 7)).astype(np.float32)
    assert digest(values) == digest(np.asfortranarray(values)) == digest(jnp.asarray(values))
    np.save(tmp_path / "values.npy", values)
    assert digest(np.load(tmp_path / "values.npy", mmap_mode="r")) == digest(values)
    for other in (
        values[:99],
        values.T,
        values.astype(np.float64),
        np.where(values > 2, 0, values),
    ):
        assert digest(other) != digest(values)
    assert digest(np.array(["a", "b"])) != digest(np.array(["a", "c"]))
    assert digest(jnp.zeros(3, jnp.bfloat16)).startswith("bfloat16[3] ")
    assert digest(np.zeros((0, 3))) and digest(np.float32(1))
    # Of a column that is too large to be read whole, the first and the last block always count.
    monkeypatch.setattr(digests, "_BLOCK", 280)
    monkeypatch.setattr(digests, "_DIGESTED_WHOLE", 280 * 3)
    sampled = digest(values)
    for place in (0, -1):
        other = values.copy()
        other[place, place] += 1
        assert digest(other) != sampled


# Run folders.


def run(folder, config=None, **settings):
    rounds = settings.pop("rounds", 2)
    prepared = settings.pop("prepared", None)
    experiment = make_experiment(rounds=rounds, **settings)
    return run_experiment(experiment, folder, config, show_progress=False, prepared=prepared)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory, compile_quickly):
    folder = tmp_path_factory.mktemp("first") / "run"
    run(folder)
    return folder


@pytest.fixture
def finished(first_run, tmp_path):
    """The folder of a run; each test has a copy."""
    return shutil.copytree(first_run, tmp_path / "run")


def test_a_work_directory_refuses_another_experiment(finished):
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    for settings, message in OTHERS.values():
        with pytest.raises(
            RunFolderError, match=f"belongs to another config: .*{message}"
        ) as raised:
            run(finished, **settings)
        assert "\n" not in str(raised.value)
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before


def test_a_run_that_grows_is_unfinished_until_it_ends(finished):
    assert (finished / "summary.json").exists()

    def killed(records):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(make_experiment(rounds=4), finished, callbacks=[killed], show_progress=False)
    assert not (finished / "summary.json").exists()
    assert run(finished, rounds=4).summary["rounds"] == 4


def test_a_refused_start_leaves_a_finished_run_as_it_is(finished):
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    with pytest.raises(RunFolderError, match="another execution plan"):
        run_experiment(
            make_experiment(rounds=4), finished, plan={"processes": 7}, show_progress=False
        )
    with pytest.raises(RunFolderError, match="a checkpoint of round 2, beyond rounds=1"):
        run(finished, rounds=1)
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before


def test_a_finished_run_that_is_started_again_is_only_read(finished):
    for rounds in (2, 3, 3):
        run(finished, rounds=rounds)
    resumed = json.loads((finished / "environment.json").read_text())["resumed"]
    assert [bool(start.get("only_reads")) for start in resumed] == [True, False, True]


def test_what_keeps_the_best_round_stays_the_same(tmp_path, compile_quickly):
    """Another callback would give models that the first one had kept, or none."""

    def start(*callbacks, rounds=2, name="run"):
        return run_experiment(
            make_experiment(rounds=rounds, evaluate_every=1),
            tmp_path / name,
            callbacks=callbacks,
            show_progress=False,
        )

    kept = start(KeepBest("test", "loss")).kept
    assert kept.round == start().kept.round
    # A start in another precision would compute other metrics of the kept models.
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary["kept"]["final"]["main"]["test"]["loss"] = [7.0]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    again = start(KeepBest("test", "loss"))
    assert again.kept.round == kept.round
    assert again.summary["kept"]["final"]["main"]["test"]["loss"] == [7.0]
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    message = r"run whose models are kept by KeepBest\(split='test', metric='loss'.*, not by "
    with pytest.raises(RunFolderError, match=f"{message}KeepBest.*smaller_is_better=False"):
        start(KeepBest("test", "loss", smaller_is_better=False))
    with pytest.raises(RunFolderError, match=f"{message}no callback"):
        start(rounds=3)
    now = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    assert before == now
    assert start(KeepBest("test", "loss"), rounds=3).kept is not None
    start(name="without")
    with pytest.raises(RunFolderError, match="kept by no callback, not by KeepBest"):
        start(KeepBest("test", "loss"), name="without")


def test_more_rounds_of_a_finished_run(finished, tmp_path_factory):
    longer = run(finished, rounds=4, evaluate_also=(3,))
    assert longer.summary["rounds"] == 4
    whole = run(tmp_path_factory.mktemp("whole"), rounds=4)
    for left, right in zip(*(jax.tree.leaves(own.state) for own in (longer, whole)), strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(RunFolderError, match=r"training\.epochs is 1 there and 2 here"):
        run(finished, rounds=6, epochs=2, evaluate_also=(3,))


def test_more_rounds_where_something_depends_on_their_number(tmp_path, compile_quickly):
    run(tmp_path, schedule=linear_decay(2))
    with pytest.raises(RunFolderError, match=r"num_rounds is 2 there and 4 here"):
        run(tmp_path, rounds=4, schedule=linear_decay(4))


CONFIG = {"name": "mine", "rounds": 2, "algorithm": {"decay": None}}


def test_with_a_config_it_and_the_data_count(tmp_path, compile_quickly):
    run(tmp_path, CONFIG, prepared={"clients": "abc"})
    with pytest.raises(RunFolderError, match=r"data\.clients\.image is 'float32"):
        run(tmp_path, CONFIG, data=make_data(1.0), prepared={"clients": "abc"})
    with pytest.raises(RunFolderError, match=r"prepared\.clients is 'abc' there and 'def' here"):
        run(tmp_path, CONFIG, prepared={"clients": "def"})
    with pytest.raises(RunFolderError, match="name is 'mine' there and 'yours' here"):
        run(tmp_path, CONFIG | {"name": "yours"}, prepared={"clients": "abc"})
    run(tmp_path, CONFIG, prepared={"clients": "abc"})


def test_a_config_of_code_that_nothing_describes(tmp_path, compile_quickly):
    """In Python, a config's own network may have changed, or a part of the experiment."""
    run(tmp_path, CONFIG)
    with pytest.raises(RunFolderError, match=r"training\.epochs is 1 there and 2 here"):
        run(tmp_path, CONFIG, epochs=2)
    with pytest.raises(RunFolderError, match=r"evaluate_every is 10 there and 2 here"):
        run(tmp_path, CONFIG, evaluate_every=2)
    run(tmp_path, CONFIG, epochs=2, prepared={})  # the descriptions say that nothing has changed


def at_rate(rate):
    experiment = make_experiment()
    hyper = {"main": FedAvgHyper(rate, 1.0)}
    return experiment._replace(algorithm=experiment.algorithm._replace(hyper=hyper))


def test_hyper_parameters_and_the_start_are_settings():
    found = difference(at_rate(0.1), at_rate(0.5))
    assert found == "settings.hyper.['main'].client_learning_rate is 0.1 there and 0.5 here"
    started = make_experiment(start={"w": np.ones(3, np.float32)})
    assert difference(make_experiment(), started).startswith("settings.start is [] there and [")
    assert difference(at_rate(0.1), at_rate(0.5), has_config=True) is None
    # An older folder does not tell them.
    older = identity_of(at_rate(0.1)).content
    for name in ("hyper", "start"):
        del older["settings"][name]
    assert identity_of(started).difference(older) is None


def test_a_config_from_python_tells_neither_hyper_nor_execution(finished):
    (finished / "config.json").write_text(json.dumps(CONFIG))
    for experiment, message in (
        (at_rate(0.5), "another config: settings.hyper.*client_learning_rate is .* and 0.5"),
        (
            make_experiment(seeds_loop="vmap"),
            "execution plan: seeds_loop is 'map' there and 'vmap'",
        ),
    ):
        with pytest.raises(RunFolderError, match=message):
            run_experiment(experiment, finished, CONFIG, show_progress=False)


def test_a_config_that_does_not_tell_its_rounds(tmp_path, compile_quickly):
    run(tmp_path, {"lr": 0.1}, schedule=linear_decay(2))
    with pytest.raises(RunFolderError, match=r"schedule\.num_rounds is 2 there and 4 here"):
        run(tmp_path, {"lr": 0.1}, rounds=4, schedule=linear_decay(4))
    with pytest.raises(RunFolderError, match="belongs to another config: lr is"):
        run(tmp_path, {"name": "mine"}, rounds=4)


def test_a_config_with_more_rounds(tmp_path, compile_quickly):
    run(tmp_path, CONFIG, prepared={})
    with pytest.raises(
        RunFolderError,
        match=r"rounds is 2 there and 4 here, and the algorithm depends on it: algorithm\..*schedule",
    ):
        run(tmp_path, CONFIG | {"rounds": 4}, rounds=4, schedule=linear_decay(4), prepared={})
    with pytest.raises(RunFolderError, match="decay is None there and 1 here"):
        run(tmp_path, CONFIG | {"rounds": 4, "algorithm": {"decay": 1}}, rounds=4)
    with pytest.raises(RunFolderError, match="rounds is 2 there and 1 here"):
        run(tmp_path, CONFIG | {"rounds": 1}, rounds=1)
    assert run(tmp_path, CONFIG | {"rounds": 4}, rounds=4).summary["rounds"] == 4
    assert json.loads((tmp_path / "config.json").read_text())["rounds"] == 4


def edited(folder, **parts):
    environment = json.loads((folder / "environment.json").read_text()) | parts
    kept = {name: part for name, part in environment.items() if part is not None}
    (folder / "environment.json").write_text(json.dumps(kept))


def test_a_finished_run_without_its_checkpoints_is_not_lost(finished):
    shutil.rmtree(finished / "checkpoints")
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    for rounds in (2, 4):
        with pytest.raises(RunFolderError, match="is finished, but has no checkpoints") as raised:
            run(finished, rounds=rounds)
        assert "\n" not in str(raised.value)
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before
    (finished / "summary.json").unlink()
    assert run(finished).summary["rounds"] == 2
    assert (finished / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


def test_devices_are_part_of_the_plan(finished):
    plan = json.loads((finished / "environment.json").read_text())["plan"]
    devices = jax.device_count()
    assert (plan["processes"], plan["devices"], plan["platform"]) == (1, devices, "cpu")
    edited(finished, plan=plan | {"devices": devices + 1})
    message = f"execution plan: devices is {devices + 1} there and {devices} here"
    with pytest.raises(RunFolderError, match=message):
        run(finished)


def test_a_folder_of_an_earlier_version_goes_on(finished):
    edited(finished, identity=None, plan={})
    run(finished)
    with pytest.raises(RunFolderError, match="batch_size is 2 there and 1 here"):
        run(finished, batch_size=1)


@pytest.mark.parametrize("damage", [[], "text", {"rounds": 2}, {"rounds": "two", "data": 3}])
def test_a_damaged_identity_is_one_line(damage, finished):
    edited(finished, identity=damage)
    with pytest.raises(RunFolderError, match=r"no identity|another config") as raised:
        run(finished)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(execution=Execution("vmap", 2)), r"execution\.loop is 'scan' there and 'vmap' here"),
        (dict(seeds_loop="vmap"), r"seeds_loop is 'map' there and 'vmap' here"),
        (dict(source=StreamedData), r"stream is False there and True here"),
    ],
)
def test_how_it_is_executed_is_the_plan(settings, message, finished):
    with pytest.raises(RunFolderError, match=f"another execution plan: {message}.*--change_plan"):
        run(finished, **settings)
    experiment = make_experiment(**settings)
    run_experiment(experiment, finished, change_plan=True, show_progress=False)


def test_a_chunk_size_of_numpy_can_be_stored(tmp_path):
    execution = Execution("vmap", np.int64(2))
    run(tmp_path, execution=execution)
    run(tmp_path, execution=execution)


def test_client_states_stay_where_they_are(tmp_path):
    """Checkpoints of states on the host have another form than those on the device."""

    def with_states(stream, rounds):
        method = scaffold(softmax_regression(3, 2), 3, LocalTraining(batch_size=2))
        algorithm = independent_pools({"main": Pool(method, np.arange(3), 2)}, make_data().columns)
        data = (StreamedData if stream else resident_data)(make_data())
        experiment = Experiment(algorithm, data, {"test": TEST}, rounds)
        run_experiment(
            experiment, tmp_path, config={}, prepared={}, change_plan=stream, show_progress=False
        )

    with_states(stream=False, rounds=1)
    with pytest.raises(RunFolderError, match=r"execution\.stream is False there and True here"):
        with_states(stream=True, rounds=2)
    with_states(stream=False, rounds=2)


MACHINE = ("x64", "jaxlib", "device", "matmul_precision", "prng", "prng_is_partitionable")


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine_belongs_to_the_plan(name, finished):
    environment = json.loads((finished / "environment.json").read_text())
    (environment["versions"] if name == "jaxlib" else environment)[name] = "another"
    edited(finished, **environment)
    with pytest.raises(RunFolderError, match=f"{name} is 'another' there and .*--change_plan"):
        run(finished)
    run_experiment(make_experiment(), finished, change_plan=True, show_progress=False)
    run(finished)
    # Of a folder that does not say so, nobody knows.
    unknown = dict.fromkeys(("versions", "resumed", *MACHINE))
    edited(finished, **unknown)
    run(finished)


def test_a_run_without_x64_is_not_gone_on_with_under_it(finished):
    with jax.enable_x64(True), pytest.raises(RunFolderError) as raised:
        run(finished)
    line = str(raised.value)
    assert "another execution plan: x64 is False there and True here" in line
    assert "--change_plan" in line and "\n" not in line
