"""The training loop in-process: metrics lines, callbacks, divergence, resuming, bad settings."""

import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.for_each_client import Execution
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.schedules import constant
from fedcodist.data.federated_data import FederatedData
from fedcodist.run import blocks, metrics_lines, metrics_text, programs, training_loop
from fedcodist.run.checkpoint import load_checkpoint
from fedcodist.run.divergence import TrainingDiverged
from fedcodist.run.experiment import (
    Experiment,
    check_experiment,
    experiment_programs,
    run_experiment,
)
from fedcodist.run.experiment_checks import check_programs, checked_start
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.sources import StreamedData, resident_data

pytestmark = pytest.mark.usefixtures("compile_quickly")

CLIENTS, FEATURES, CLASSES = 4, 3, 2


def make_data(rows_per_client: int = 5, seed: int = 0) -> FederatedData:
    draw = np.random.default_rng(seed)
    image = draw.normal(size=(CLIENTS * rows_per_client, FEATURES)).astype(np.float32)
    label = (image[:, 0] > 0).astype(np.int32)
    offsets = np.arange(CLIENTS + 1) * rows_per_client
    return FederatedData.from_arrays({"image": image, "label": label}, offsets=offsets)


@functools.cache
def make_algorithm(batch_size=2, execution=Execution(), rates=(0.01, 0.1)):
    pools = {
        name: Pool(
            fed_avg(
                from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, FEATURES))),
                LocalTraining(optax.sgd, batch_size=batch_size),
                optax.adam,
                constant,
                FedAvgHyper(rate, 0.1),
            ),
            np.arange(CLIENTS),
            2,
        )
        for name, rate in zip(("slow", "fast"), rates, strict=True)
    }
    return independent_pools(pools, make_data().columns, execution)


def make_experiment(rounds: int = 5, learning_rate: float = 0.1, stream=False, **settings):
    """Two pools and two seeds; one program serves all values of its settings."""
    data, algorithm = make_data(), make_algorithm()
    hyper = dict(algorithm.hyper) | {"fast": FedAvgHyper(learning_rate, 0.1)}
    settings = {"evaluate_every": 2, "evaluation_batch_size": 3, "seeds": 2, "seed": 7} | settings
    return Experiment(
        algorithm._replace(hyper=hyper),
        StreamedData(data) if stream else resident_data(data),
        {"test": make_data(seed=1), "train": data},
        rounds,
        **settings,
    )


@pytest.fixture(scope="module", autouse=True)
def one_compilation():
    """The programs of one algorithm are shared."""
    cache, build = {}, programs.build_programs

    def build_once(algorithm, *settings):
        key = (algorithm.round, *settings)
        cache[key] = cache.get(key) or build(algorithm, *settings)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcodist.run.experiment.build_programs", build_once)
        yield


@pytest.fixture(scope="module")
def outcome(one_compilation):
    calls = []
    outcome = run_experiment(make_experiment(), callbacks=[calls.append, lambda records: None])
    return outcome, calls


def test_a_run_in_memory_returns_every_record(outcome):
    found = [(r["round"], r["model"], r["split"], r["seed"]) for r in outcome[0].records]
    assert sorted(found) == sorted(
        (round, model, split, seed)
        for round in (0, 2, 4, 5)
        for model in ("slow", "fast")
        for split in ("test", "train", "clients")
        for seed in (7, 8)
        if (round, split) != (0, "clients")
    )
    json.dumps(outcome[0].records, allow_nan=False)


def test_final_splits_are_looked_at_once_after_the_last_round(outcome):
    experiment = make_experiment()
    test = {"test": experiment.splits["test"]}
    later = run_experiment(experiment._replace(splits={"train": make_data()}, final_splits=test))
    seen = {(record["round"], record["split"]) for record in later.records}
    assert {split for round, split in seen if round < 5} == {"train", "clients"}
    assert later.summary["final"]["slow"]["test"] == outcome[0].summary["final"]["slow"]["test"]
    with pytest.raises(ValueError, match=r"final_splits must not name .*, got 'test'"):
        run_experiment(experiment._replace(final_splits=test))


@pytest.mark.parametrize("also", [(1,), (0, 3, 2, 5)])
def test_rounds_evaluated_besides_change_nothing_else(outcome, tmp_path, also):
    experiment = make_experiment(evaluate_also=also, checkpoint_every=2)
    found = run_experiment(experiment, tmp_path)
    models = lambda records: [record for record in records if record["split"] != "clients"]
    assert {record["round"] for record in found.records} == {0, 2, 4, 5} | set(also)
    regular = [record for record in models(found.records) if record["round"] in (0, 2, 4, 5)]
    assert regular == models(outcome[0].records)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} <= {
        f"round_{round:08}.msgpack" for round in (2, 4, 5)
    }


def test_a_run_that_is_evaluated_at_its_end_has_room_for_its_own_rounds(monkeypatch):
    """Some write 10**9, and the metrics of so many rounds would take gigabytes."""
    intervals = []
    monkeypatch.setattr(
        "fedcodist.run.experiment.build_programs",
        lambda algorithm, interval, *others: intervals.append(interval),
    )
    for rounds, every in ((5, 2), (5, 10**9), (5000, 10**9)):
        experiment_programs(make_experiment(rounds, evaluate_every=every))
    assert intervals == [2, 1000, 5000]


def test_programs_of_an_earlier_run_serve_other_seeds_and_floats(outcome):
    experiment = make_experiment(seed=3)
    compiled = experiment_programs(experiment)
    run_experiment(experiment, programs=compiled)
    again = run_experiment(make_experiment(), programs=compiled)
    assert again.records == outcome[0].records
    assert compiled.train._cache_size() == 1


def copied(batch, key, positions):
    return dict(batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(evaluate_every=8), "at most 2 rounds between evaluations, this run has 8"),
        (dict(seeds_loop="vmap"), "same algorithm .*: seeds_loop is 'map' there and 'vmap' here"),
        (dict(evaluation_batch_size=7), "evaluation_batch_size is 3 there and 7 here"),
        (dict(evaluation_preprocess=copied), "evaluation_preprocess"),
        (dict(batch_size=3), r"algorithm\..*training\.batch_size is 2 there and 3 here"),
        (dict(execution=Execution("vmap", 2)), "execution.loop is 'scan' there and 'vmap' here"),
        (dict(hyper_per_seed=True), "hyper_per_seed is True there and False here"),
        # Made anew, with other floats.
        (dict(rates=(0.3, 0.4), evaluate_every=1, seed=3, rounds=9), None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_programs_of_another_experiment_are_refused(settings, message):
    parts = {n: settings[n] for n in ("batch_size", "execution", "rates") if n in settings}
    others = {n: v for n, v in settings.items() if n not in {*parts, "hyper_per_seed"}}
    experiment = make_experiment(**others)
    if parts:
        experiment = experiment._replace(algorithm=make_algorithm.__wrapped__(**parts))
    compiled = experiment_programs(make_experiment(rounds=8))
    if "hyper_per_seed" in settings:
        compiled = compiled._replace(made_of=compiled.made_of._replace(hyper_per_seed=True))
    if message is None:
        check_programs(compiled.made_of, experiment_programs(experiment).made_of)
        return
    with pytest.raises(ValueError, match=rf"^programs .*{message}") as raised:
        run_experiment(experiment, programs=compiled)
    assert "\n" not in str(raised.value)


def test_callbacks_get_the_records_of_each_evaluation(outcome):
    records, calls = outcome[0].records, outcome[1]
    assert [{record["round"] for record in call} for call in calls] == [{0}, {2}, {4}, {5}]
    assert [record for call in calls for record in call] == records


def test_the_first_of_several_processes_alone_writes(outcome, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    calls = []
    other = run_experiment(make_experiment(), tmp_path / "run", callbacks=[calls.append])
    assert not (tmp_path / "run").exists() and calls == []
    assert other.summary["final"] == outcome[0].summary["final"]


def test_variables_have_a_leading_axis_of_seeds(outcome):
    variables = outcome[0].variables
    assert set(variables) == {"slow", "fast"}
    for model in variables.values():
        kernel = model.params["kernel"]
        assert isinstance(kernel, np.ndarray) and kernel.shape == (2, FEATURES, CLASSES)
        assert not np.array_equal(kernel[0], kernel[1])


def test_the_records_are_of_the_variables_that_are_returned(outcome):
    """Loss and accuracies computed here, from the weights, in NumPy."""
    for split, data in (("test", make_data(seed=1)), ("train", make_data())):
        image, label = data.columns["image"], data.columns["label"]
        for model, variables in outcome[0].variables.items():
            for index, seed in enumerate((7, 8)):
                (record,) = [
                    r
                    for r in outcome[0].records
                    if (r["round"], r["model"], r["split"], r["seed"]) == (5, model, split, seed)
                ]
                logits = image @ variables.params["kernel"][index] + variables.params["bias"][index]
                right = logits.argmax(1) == label
                loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(label)), label]
                np.testing.assert_allclose(record["loss"], loss.mean(), rtol=1e-5)
                np.testing.assert_allclose(record["accuracy"], right.mean(), rtol=1e-6)
                per_label = [right[label == each].mean() for each in range(CLASSES)]
                np.testing.assert_allclose(record["per_label_accuracy"], per_label, rtol=1e-6)
                clients = right.reshape(CLIENTS, -1).mean(1)
                expected = {
                    "accuracy_mean": clients.mean(),
                    "accuracy_p10": np.percentile(clients, 10),
                    "accuracy_min": clients.min(),
                    "accuracy_std": clients.std(),
                    "accuracy_worst_tenth": clients.min(),  # of fewer than eleven clients it is one
                }
                assert record["per_client"] == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_is_undefined_for_all_clients_is_null():
    """For example precision where no client's model predicts the class."""
    nowhere = lambda outputs, batch: (jnp.ones(len(outputs)), jnp.zeros(len(outputs)))
    model = from_flax_linen(
        nn.Dense(CLASSES), jnp.zeros((1, FEATURES)), metrics={"precision": nowhere}
    )
    method = fed_avg(model, LocalTraining(optax.sgd, batch_size=2), optax.adam)
    pools = {"main": Pool(method, np.arange(CLIENTS), 2)}
    algorithm = independent_pools(pools, make_data().columns)
    experiment = make_experiment(rounds=1)._replace(algorithm=algorithm)
    for record in run_experiment(experiment).records:
        if record["split"] != "clients":
            assert record["precision"] is None
            assert record["per_client"] == dict.fromkeys(
                f"precision_{kind}" for kind in ("mean", "std", "min", "p10", "worst_tenth")
            )


@pytest.mark.parametrize("name", ["round", "epsilon", "share_per_client", "a/b"])
def test_a_metric_has_no_name_that_lines_have_for_something_else(name):
    metrics = {name: lambda outputs, batch: (jnp.ones(len(outputs)), jnp.ones(len(outputs)))}
    model = from_flax_linen(nn.Dense(CLASSES), jnp.zeros((1, FEATURES)), metrics=metrics)
    pools = {"main": Pool(fed_avg(model, LocalTraining(optax.sgd)), np.arange(CLIENTS), 2)}
    algorithm = independent_pools(pools, make_data().columns)
    with pytest.raises(ValueError, match=rf"^metrics\['{name}'\] of model 'main' must have a name"):
        run_experiment(make_experiment()._replace(algorithm=algorithm))


def test_a_metric_that_some_rounds_lack_is_a_mean_of_the_others():
    values = np.array([[1.0, np.nan, 3.0], [np.nan] * 3, [2.0, np.inf, 1.0]])
    history = [{"a/loss": values[:, :2]}, {"a/loss": values[:, 2:]}]
    found = metrics_lines.training_records(3, history, np.array([5, 6, 7]))
    assert [record["loss"] for record in found] == [2.0, None, None]


def test_the_summary(outcome):
    summary = outcome[0].summary
    assert summary["finished"] and summary["rounds"] == 5 and summary["seconds"] > 0
    assert summary["models"]["fast"]["parameters"] == CLASSES * (FEATURES + 1)
    last = [r for r in outcome[0].records if r["round"] == 5 and r["split"] == "test"]
    for record in last:
        index = record["seed"] - 7
        assert summary["final"][record["model"]]["test"]["loss"][index] == record["loss"]


def test_rounds_are_timed_without_the_first_that_compiles(monkeypatch):
    """By a clock on which a second passes from one look to the next."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(looks)))
    monkeypatch.setattr(training_loop, "time", clock)
    trained = []

    def in_blocks(*arguments):
        train = blocks.in_blocks(*arguments)

        def slow_at_first(*arguments):
            for _ in range(1 if trained else 1000):
                next(looks)
            result = train(*arguments)
            trained.append(next(iter(result[1].values())).shape[1])
            return result

        return slow_at_first

    monkeypatch.setattr(training_loop, "in_blocks", in_blocks)
    summary = run_experiment(make_experiment()).summary
    assert trained[0] == 1 and sum(trained) == 5
    assert 0 < summary["seconds_per_round"] < 10 < 1000 < summary["seconds"]


def test_a_finished_run_says_its_final_metrics_and_says_so_again(tmp_path, capsys):
    experiment = make_experiment(rounds=2)
    summary = run_experiment(experiment, tmp_path, name="digits · ours").summary
    first = capsys.readouterr().out.splitlines()
    again = run_experiment(experiment, tmp_path, name="digits · ours").summary
    (second,) = capsys.readouterr().out.splitlines()
    text = metrics_text.final_text(summary["final"], list(experiment.splits)[:1])
    assert text and first[0] == "digits · ours  compiling"
    assert first[-1] == f"digits · ours  finished, 2 rounds  {text}"
    assert second == f"digits · ours  finished already, 2 rounds  {text}"
    assert again["seconds_per_round"] == summary["seconds_per_round"]
    run_experiment(experiment, tmp_path, show_progress=False)
    assert capsys.readouterr().out == ""


def test_a_seed_alone_gives_what_it_gives_among_others(outcome):
    alone = run_experiment(make_experiment(seeds=1, seed=8))
    for model, variables in outcome[0].variables.items():
        for ours, theirs in zip(
            jax.tree.leaves(alone.variables[model]), jax.tree.leaves(variables), strict=True
        ):
            np.testing.assert_allclose(ours[0], theirs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_streamed_data_and_seeds_at_once_give_the_same(outcome):
    other = run_experiment(make_experiment(stream=True, seeds_loop="vmap"))
    for ours, theirs in zip(
        jax.tree.leaves(other.variables), jax.tree.leaves(outcome[0].variables), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(other.records) == len(outcome[0].records)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_last_round_is_evaluated_once(rounds):
    records = run_experiment(make_experiment(rounds)).records
    evaluated = [
        r["round"] for r in records if (r["model"], r["split"], r["seed"]) == ("slow", "test", 7)
    ]
    assert evaluated == {1: [0, 1], 2: [0, 2], 3: [0, 2, 3]}[rounds]


# Resuming in-process; tests/end_to_end/test_resume.py kills real processes.


class Stopped(Exception):
    pass


def stop_at(round):
    def callback(records):
        if records[0]["round"] == round:
            raise Stopped

    return callback


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl")}


@pytest.mark.parametrize("round", [0, 2, 4, 5])
def test_a_run_stopped_after_its_metrics_were_written_goes_on(round, tmp_path):
    settings = {"config": {"name": "test"}, "show_progress": False}
    experiment = make_experiment(checkpoint_every=4)
    whole = run_experiment(experiment, tmp_path / "whole", **settings)
    with pytest.raises(Stopped):
        run_experiment(experiment, tmp_path / "run", callbacks=[stop_at(round)], **settings)
    calls = []
    resumed = run_experiment(experiment, tmp_path / "run", callbacks=[calls.append], **settings)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert resumed.records == whole.records
    # If there was a checkpoint, the run continued from it.
    assert calls[0][0]["round"] == (5 if round == 5 else 0)
    for ours, theirs in zip(
        jax.tree.leaves(resumed.variables), jax.tree.leaves(whole.variables), strict=True
    ):
        assert ours.tobytes() == theirs.tobytes()


def test_seconds_add_up_over_interruptions(tmp_path):
    experiment = make_experiment()
    with pytest.raises(Stopped):
        run_experiment(experiment, tmp_path, callbacks=[stop_at(4)])
    (checkpoint,) = (tmp_path / "checkpoints").glob("round_00000002*")
    before = load_checkpoint(checkpoint.parent, {}).notes["seconds"]
    assert before > 0
    assert run_experiment(experiment, tmp_path).summary["seconds"] > before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run's folder, without a config."""
    folder = tmp_path_factory.mktemp("finished")
    run_experiment(make_experiment(), folder)
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(learning_rate=0.2), "hyper.*client_learning_rate is 0.1.* there and 0.2"),
        (dict(seed=8), "seed is 7 there and 8 here"),
        (dict(seeds=1), "seeds is 2 there and 1 here"),
        (dict(evaluate_every=1), "evaluate_every is 2 there and 1 here"),
    ],
    ids=str,
)
def test_another_experiment_is_told_from_the_first_without_a_config(finished, changes, message):
    """Otherwise it would get the results of the first, since shapes are the same."""
    with pytest.raises(RunFolderError, match=message):
        run_experiment(make_experiment(**changes), finished)


def test_numbers_may_be_numpys(tmp_path):
    """Settings and summary are written as JSON."""
    settings = dict(seed=np.int64(7), rounds=np.int32(1), evaluate_every=np.int64(1))
    run_experiment(make_experiment(**settings), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 1


def test_several_labels_of_an_example_have_no_accuracy_per_label():
    """Grouped by the largest entry, an example would count for its first label alone."""
    labels = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 1, 0]], np.float32)
    images = np.random.default_rng(0).normal(size=(4, FEATURES)).astype(np.float32)
    data = FederatedData.from_arrays({"image": images, "label": labels}, offsets=[0, 2, 4])
    loss = lambda outputs, batch: jnp.sum((outputs - batch["label"]) ** 2, axis=-1)
    exact = lambda outputs, batch: (
        jnp.all((outputs > 0.5) == (batch["label"] > 0.5), axis=-1) * 1.0,
        jnp.ones(len(outputs)),
    )
    model = from_flax_linen(
        nn.Dense(3), jnp.zeros((1, FEATURES)), loss=loss, metrics={"accuracy": exact}
    )
    pool = Pool(fed_avg(model, LocalTraining(batch_size=2)), np.arange(2), 2)
    algorithm = independent_pools({"main": pool}, data.columns)
    outcome = run_experiment(Experiment(algorithm, resident_data(data), {"test": data}, 1))
    (line,) = [r for r in outcome.records if r["round"] == 1 and r["split"] == "test"]
    assert "accuracy" in line and "per_label_accuracy" not in line


def test_another_start_is_told_from_the_first(finished):
    state = run_experiment(make_experiment()).state
    with pytest.raises(RunFolderError, match="start is"):
        run_experiment(make_experiment(start=state), finished)


def test_fewer_rounds_than_there_are_checkpoints_of(finished):
    with pytest.raises(RunFolderError, match="a checkpoint of round 5, beyond rounds=3"):
        run_experiment(make_experiment(rounds=3), finished)


def test_a_run_does_not_end_at_a_checkpoint_from_its_middle(tmp_path):
    """Its final splits were not evaluated there. After a run that ended there they were."""
    run = lambda rounds, *callbacks: run_experiment(
        make_experiment(rounds), tmp_path, callbacks=callbacks, show_progress=False
    )
    with pytest.raises(Stopped):
        run(5, stop_at(4))
    before = contents(tmp_path)
    message = "a checkpoint of round 2, in the middle of a run of 5 rounds: rounds must be above 2"
    with pytest.raises(RunFolderError, match=message) as raised:
        run(2)
    assert "\n" not in str(raised.value) and contents(tmp_path) == before
    assert run(4).summary["rounds"] == 4
    with pytest.raises(Stopped):
        run(6, stop_at(6))
    assert run(4).summary["rounds"] == 4


def test_a_start_serves_several_runs():
    """Training frees the memory of its input, but not of arrays that the caller still uses."""
    state = run_experiment(make_experiment()).state
    one, other = (run_experiment(make_experiment(start=state)) for _ in range(2))
    assert one.records == other.records
    jax.tree.map(np.asarray, state)


def test_preprocessing_of_evaluation_may_make_a_batch_anew():
    only = lambda batch, key, positions: {"image": batch["image"], "label": batch["label"]}
    outcome = run_experiment(make_experiment(evaluation_preprocess=only))
    assert outcome.records == run_experiment(make_experiment()).records


def test_edited_metrics_are_refused(tmp_path):
    run_experiment(make_experiment(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="truncated or edited"):
        run_experiment(make_experiment(), tmp_path)


# What is not finite.


def test_a_pseudo_gradient_that_is_not_finite_names_round_pool_and_seed(tmp_path):
    with pytest.raises(TrainingDiverged, match="round 1, pool 'fast', seed 7:") as raised:
        run_experiment(make_experiment(learning_rate=1e38), tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "summary.json").exists()


def test_a_server_update_that_is_not_finite_is_never_a_checkpoint(tmp_path):
    """The pseudo-gradient was finite: a codistillation can end like that."""
    experiment = make_experiment(rounds=4)

    def round_(state, rows, round, hyper):
        state, rows, metrics = make_algorithm().round(state, rows, round, hyper)
        fast = jax.tree.map(
            lambda leaf: (
                jnp.where(round.index == 3, jnp.nan, leaf)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
            ),
            state["fast"],
        )
        return dict(state) | {"fast": fast}, rows, metrics

    experiment = experiment._replace(algorithm=experiment.algorithm._replace(round=round_))
    with pytest.raises(TrainingDiverged, match="by round 4, model 'fast', seed 7"):
        run_experiment(experiment, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        "round_00000002.msgpack"
    ]
    assert '"round": 4' not in (tmp_path / "metrics.jsonl").read_text()


# Settings.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "rounds must be at least 1, got 0"),
        ({"rounds": 2.5}, TypeError, "rounds must be an integer of at least 1, got 2.5"),
        ({"rounds": True}, TypeError, "rounds must be an integer of at least 1, got True"),
        ({"seeds": 0}, ValueError, "seeds must be at least 1, got 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**31 - 1}, ValueError, r"seeds below 2\*\*31, got 2147483647 and 2 seeds"),
        ({"evaluate_every": 0}, ValueError, "evaluate_every must be at least 1, got 0"),
        (
            {"evaluate_also": (2, 6)},
            ValueError,
            "evaluate_also must be rounds up to rounds=5, got 6",
        ),
        ({"evaluate_also": (-1,)}, ValueError, "evaluate_also must be at least 0, got -1"),
        ({"evaluation_batch_size": 0}, ValueError, "evaluation_batch_size must be at least 1"),
        ({"seeds_loop": "scan"}, ValueError, "seeds_loop must be 'map' or 'vmap', got 'scan'"),
        ({"checkpoint_every": 3}, ValueError, "a multiple of evaluate_every=2, got 3"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_one_line_before_anything_compiles(settings, error, message, tmp_path):
    experiment = make_experiment()._replace(**settings)
    with pytest.raises(error, match=message) as raised:
        run_experiment(experiment, tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_is_no_longer_than_the_schedules_of_its_algorithm():
    experiment = make_experiment()
    enough = experiment._replace(algorithm=experiment.algorithm._replace(num_rounds=5))
    check_experiment(enough)
    check_experiment(enough._replace(rounds=4))
    message = "rounds must be at most the num_rounds=5 for which fed_avg was made, got 6"
    with pytest.raises(ValueError, match=message):
        check_experiment(enough._replace(rounds=6))


@pytest.mark.parametrize("stream", [False, True])
def test_rows_that_the_algorithm_was_told_of(stream):
    """With a larger number the last example would be drawn again and again without an error."""
    select = lambda round, key: (
        make_algorithm()
        .select(round, key)
        .replace(examples={"unlabelled": jnp.zeros((2, 3), jnp.int32)})
    )
    rows = {"unlabelled": {"image": np.zeros((7, FEATURES), np.float32)}}
    data = StreamedData(make_data(), rows) if stream else resident_data(make_data(), rows)
    experiment = make_experiment()._replace(data=data)
    algorithm = experiment.algorithm._replace(select=select, data_set_sizes={"unlabelled": 9})
    with pytest.raises(
        ValueError, match=r"'unlabelled' must have the 9 examples .* it has 7"
    ) as raised:
        check_experiment(experiment._replace(algorithm=algorithm))
    assert "\n" not in str(raised.value)
    check_experiment(
        experiment._replace(algorithm=algorithm._replace(data_set_sizes={"unlabelled": 7}))
    )


@pytest.mark.parametrize(
    "argument", ["splits", "final_splits", "client_splits", "final_client_splits"]
)
def test_no_split_has_the_name_in_the_lines_of_training(argument):
    with pytest.raises(ValueError, match=rf"^{argument} must have other names than 'clients'") as r:
        check_experiment(make_experiment()._replace(**{argument: {"clients": make_data()}}))
    assert "\n" not in str(r.value)


def test_no_splits():
    with pytest.raises(ValueError, match="splits must name at least one"):
        check_experiment(make_experiment()._replace(splits={}))
    nothing = {name: column[:0] for name, column in make_data().columns.items()}
    empty = FederatedData(nothing, np.array([0, 0]), ("a",), allow_empty=True)
    with pytest.raises(ValueError, match=r"^splits\['test'\] must have an example to evaluate"):
        check_experiment(make_experiment()._replace(splits={"test": empty}))
    # Clients' own examples are enough.
    own = make_experiment()._replace(splits={}, final_client_splits={"own": make_data()})
    assert run_experiment(own, show_progress=False).clients["own"]


@pytest.mark.parametrize(("checkpoint_every", "expected"), [(None, 2), (2, 2), (6, 6)])
def test_rounds_between_checkpoints(checkpoint_every, expected):
    assert check_experiment(make_experiment(checkpoint_every=checkpoint_every)) == expected


def test_a_run_may_start_from_an_earlier_phase():
    """Here from the initial models of other seeds, whose evaluations they then have."""
    experiment = make_experiment(rounds=1)
    compiled = experiment_programs(experiment)
    start = jax.tree.map(np.asarray, compiled.init(np.array([3, 4], np.uint32)))
    found = run_experiment(experiment._replace(start=start), show_progress=False)
    expected = run_experiment(make_experiment(rounds=1, seed=3), show_progress=False)
    losses = [
        [r["loss"] for r in each.records if r["round"] == 0 and r["split"] == "test"]
        for each in (found, expected)
    ]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="start must be a state of this algorithm") as error:
        run_experiment(make_experiment(seeds=1, start=start), show_progress=False)
    assert "\n" not in str(error.value)


def test_a_wrong_start_is_told_before_a_folder_is_claimed(tmp_path):
    start = experiment_programs(make_experiment(rounds=1)).init(np.array([3, 4], np.uint32))
    whole_numbers = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(np.int32) if leaf.dtype == np.float32 else leaf, start
    )
    message = r"^start must be a state .* has int32\[.*\] in place of float32\["
    with pytest.raises(ValueError, match=message):
        run_experiment(make_experiment(start=whole_numbers), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()
    # What JAX holds as float32 may be given as float64.
    doubles = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) if leaf.dtype == np.float32 else leaf, start
    )
    checked_start(make_experiment(start=doubles))


@pytest.mark.parametrize("name", ["callbacks", "evaluate_also"])
def test_what_is_used_up_when_it_is_read_is_refused(name):
    with pytest.raises(TypeError, match=f"^{name} must be a list, got "):
        if name == "callbacks":
            run_experiment(make_experiment(), callbacks=iter([print]), show_progress=False)
        else:
            check_experiment(make_experiment(evaluate_also=iter([1])))


def test_damaged_newest_checkpoints_are_told_and_set_aside(tmp_path):
    with pytest.raises(Stopped):
        run_experiment(make_experiment(), tmp_path, callbacks=[stop_at(4)])
    folder = tmp_path / "checkpoints"
    for round in (98, 99):
        (folder / f"round_{round:08d}.msgpack").write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match=r"round_00000098\.msgpack, .* goes on from round 2\."):
        run_experiment(make_experiment(), tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "damaged",
        "round_00000004.msgpack",
        "round_00000005.msgpack",
    ]


def test_where_all_checkpoints_are_damaged_training_begins_again(tmp_path):
    expected = run_experiment(make_experiment(), tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="goes on from the beginning"):
        found = run_experiment(make_experiment(), tmp_path)
    assert found.records == expected.records
    assert len(list((tmp_path / "checkpoints").glob("round_*"))) == 2


def test_edited_records_are_one_line(tmp_path):
    run_experiment(make_experiment(), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines.replace('"model"', '"modal"'))
    with pytest.raises(RunFolderError, match=r"cannot read .*line 1 is no record") as raised:
        run_experiment(make_experiment(), tmp_path)
    assert "\n" not in str(raised.value)


def test_a_weakly_typed_state_compiles_each_program_once():
    """A weak type such as that of `jnp.full(shape, 0.5)`, which is strong after a round."""
    algorithm = make_algorithm()

    def weak(key):
        weak_half = lambda leaf: jnp.full(leaf.shape, 0.5) if leaf.dtype == jnp.float32 else leaf
        return jax.tree.map(weak_half, algorithm.init(key))

    assert any(leaf.weak_type for leaf in jax.tree.leaves(jax.eval_shape(weak, jax.random.key(0))))
    experiment = make_experiment()
    experiment = experiment._replace(
        algorithm=experiment.algorithm._replace(
            init=weak, round=lambda *arguments: algorithm.round(*arguments)
        )
    )
    compiled = experiment_programs(experiment)
    run_experiment(experiment, programs=compiled)
    for name in ("init", "train", "evaluate", "finite"):
        assert getattr(compiled, name)._cache_size() == 1, name
