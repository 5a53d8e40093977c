"""Callbacks that get models, stop a run or keep its best models, also in runs that were interrupted."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedcodist.algorithms.clients.fed_avg import FedAvgHyper, fed_avg
from fedcodist.algorithms.pools.independent_pools import independent_pools
from fedcodist.algorithms.pools.pool import Pool
from fedcodist.core.from_linen import from_flax_linen
from fedcodist.core.local_training import LocalTraining
from fedcodist.core.schedules import constant
from fedcodist.data.federated_data import FederatedData
from fedcodist.run import callbacks as callbacks_module
from fedcodist.run import kept, programs, training_loop
from fedcodist.run.callbacks import Decision, call_callbacks
from fedcodist.run.csv_logger import CSVLogger
from fedcodist.run.experiment import Experiment, run_experiment
from fedcodist.run.kept import KeptState
from fedcodist.run.sources import StreamedData, resident_data
from fedcodist.run.stopping import KeepBest, StopEarly

pytestmark = pytest.mark.usefixtures("compile_quickly")
SETTINGS = {"config": {"name": "test"}, "show_progress": False}


class Killed(Exception):
    pass


UNTIMED = {"seconds": 0, "seconds_per_round": 0}  # in place of what a clock measured


def examples(seed):
    draw = np.random.default_rng(seed)
    image = draw.normal(size=(20, 3)).astype(np.float32)
    columns = {"image": image, "label": (image[:, 0] > 0).astype(np.int32)}
    return FederatedData.from_arrays(columns, offsets=np.arange(5) * 5)


@functools.cache
def algorithm():
    method = fed_avg(
        from_flax_linen(nn.Dense(2), jnp.zeros((1, 3))),
        LocalTraining(optax.sgd, batch_size=5),
        optax.sgd,
        constant,
        FedAvgHyper(0.3, 1.0),
    )
    return independent_pools({"main": Pool(method, np.arange(4), 2)}, examples(0).columns)


def experiment(rounds=5, source=resident_data, **settings):
    splits = {"splits": {"train": examples(0)}, "final_splits": {"test": examples(1)}}
    given = {"evaluate_every": 1, "checkpoint_every": 2, "seeds": 2, **splits, **settings}
    return Experiment(algorithm(), source(examples(0)), rounds=rounds, **given)


@pytest.fixture(scope="module", autouse=True)
def one_compilation():
    cache, build = {}, programs.build_programs

    def build_once(algorithm, *settings):
        return cache.setdefault((algorithm.round, *settings), build(algorithm, *settings))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcodist.run.experiment.build_programs", build_once)
        yield


def at(round, decision):
    """A callback that decides in a round."""
    return lambda records: decision if records[0]["round"] == round else None


def killed_at(round):
    def callback(records):
        if records[0]["round"] == round:
            raise Killed

    return callback


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl")}


def same(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_compilation):
    folder = tmp_path_factory.mktemp("whole")
    return run_experiment(experiment(), folder, **SETTINGS), folder


def test_callbacks_get_the_models_where_they_ask_for_them(whole, monkeypatch):
    copies, models_of = [], training_loop.models_on_host
    copied = lambda *arguments: (copies.append(1), models_of(*arguments))[1]
    monkeypatch.setattr(training_loop, "models_on_host", copied)
    seen, lines, told = {}, [], []

    def watch(records, models):
        if records[0]["round"] in (2, 5):
            seen[records[0]["round"]] = models()

    class Watcher:
        def start(self, config):
            told.append(config)

        def __call__(self, records, history):
            lines.append((len(records), len(history)))

        def finish(self, summary):
            told.append(summary)

    outcome = run_experiment(experiment(), callbacks=[watch, Watcher(), lines.append], **SETTINGS)
    assert len(copies) == 2  # those that were asked for
    assert same(seen[5], outcome.variables) and same(outcome.variables, whole[0].variables)
    assert same(seen[2], run_experiment(experiment(rounds=2), show_progress=False).variables)
    assert not same(seen[2], seen[5])
    assert told == [{"name": "test"}, outcome.summary]
    counts = lines[::2]
    assert [all_ for _, all_ in counts] == list(np.cumsum([new for new, _ in counts]))
    assert [records[0]["round"] for records in lines[1::2]] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_nothing_stops_has_the_same_bits(whole, tmp_path):
    watching = [StopEarly("train", patience=6), KeepBest("train", "loss"), lambda records: "stop"]
    outcome = run_experiment(experiment(), tmp_path, callbacks=watching, **SETTINGS)
    assert files(tmp_path) == files(whole[1]) and same(outcome.variables, whole[0].variables)
    assert "stopped" not in outcome.summary and whole[0].kept is None


@pytest.mark.parametrize("round", [0, 3])
def test_a_stopped_run_says_why_and_stays_stopped(round, whole, tmp_path):
    stop, lines = [at(round, Decision(stop="enough"))], []
    outcome = run_experiment(experiment(), tmp_path, callbacks=[*stop, lines.extend], **SETTINGS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped"] == {"round": round, "why": "enough"} and summary["rounds"] == round
    assert summary["finished"] and summary["final"]["main"].keys() == {"train", "test"}
    final = [record for record in outcome.records if record["split"] == "test"]
    assert [record["round"] for record in final] == [round, round] and lines == outcome.records
    before = [record for record in whole[0].records if record["round"] <= round]
    assert [r for r in outcome.records if r["split"] != "test"] == before
    written = files(tmp_path)
    again = run_experiment(experiment(), tmp_path, callbacks=[killed_at(round + 1)], **SETTINGS)
    assert files(tmp_path) == written and same(again.variables, outcome.variables)
    assert again.summary | UNTIMED == outcome.summary | UNTIMED


def test_a_stopped_run_measures_clients_and_splits_once(tmp_path):
    splits = {"splits": {"train": examples(0)}, "final_splits": {"test": examples(1)}}
    clients = {"client_splits": {"own": examples(2)}, "final_client_splits": {"later": examples(3)}}
    outcome = run_experiment(
        experiment(**splits, **clients),
        tmp_path,
        callbacks=[at(2, Decision(stop="enough"))],
        show_progress=False,
    )
    final = outcome.summary["final"]["main"]
    assert final.keys() == {"train", "test", "own", "later"}
    assert {len(values) for split in final.values() for values in split.values()} == {2}


def test_callbacks_are_not_called_with_nothing_after_a_stop(tmp_path):
    seen = []
    callbacks = [at(2, Decision(stop="enough")), lambda records: seen.append(records[0]["round"])]
    run_experiment(experiment(final_splits={}), tmp_path, callbacks=callbacks, **SETTINGS)
    assert seen == [0, 1, 2]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] and summary["stopped"]["round"] == 2
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["round"] for line in lines} == {0, 1, 2}


def test_a_stop_in_the_last_round_is_none(whole, tmp_path):
    outcome = run_experiment(
        experiment(), tmp_path, callbacks=[at(5, Decision(stop="late"))], **SETTINGS
    )
    assert "stopped" not in outcome.summary and files(tmp_path) == files(whole[1])


@pytest.mark.parametrize("killed", [1, 3, 4])
def test_an_interrupted_run_stops_where_the_whole_one_does(killed, tmp_path):
    """Its loss improves by less than 10 in every round."""
    stop = StopEarly("train", "loss", patience=4, min_delta=10.0)
    whole = run_experiment(experiment(), tmp_path / "whole", callbacks=[stop], **SETTINGS)
    assert whole.summary["stopped"]["round"] == 4
    assert "loss on train has not improved for 4 evaluations" in whole.summary["stopped"]["why"]
    with pytest.raises(Killed):
        run_experiment(
            experiment(), tmp_path / "run", callbacks=[stop, killed_at(killed)], **SETTINGS
        )
    again = run_experiment(experiment(), tmp_path / "run", callbacks=[stop], **SETTINGS)
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    assert same(again.variables, whole.variables)
    assert again.summary | UNTIMED == whole.summary | UNTIMED


@pytest.mark.parametrize(
    "source", [resident_data, pytest.param(StreamedData, marks=pytest.mark.slow)]
)
def test_the_best_models_are_kept_and_tested(source, tmp_path):
    keep = [at(1, Decision(keep=True)), at(3, Decision(keep=True))]
    run = functools.partial(run_experiment, experiment(source=source), callbacks=keep, **SETTINGS)
    outcome = run(tmp_path / "run")
    of_three = run_experiment(experiment(rounds=3, source=source), show_progress=False)
    assert outcome.kept.round == 3 and same(outcome.kept.variables, of_three.variables)
    assert outcome.summary["kept"] == {"round": 3, "final": of_three.summary["final"]}
    assert {r["round"] for r in outcome.records if r["split"] == "test"} == {5}
    assert same(run().kept, outcome.kept)  # in memory alone
    with pytest.raises(Killed):
        run(tmp_path / "killed", callbacks=[*keep, killed_at(5)])
    resumed = run(tmp_path / "killed")
    assert same(resumed.kept, outcome.kept)
    assert resumed.summary["kept"] == outcome.summary["kept"]


def test_the_best_models_of_a_run_that_grew_are_tested_once(tmp_path):
    keep = [at(3, Decision(keep=True))]
    run = functools.partial(run_experiment, callbacks=keep, **SETTINGS)
    run(experiment(rounds=3), tmp_path)
    grown = run(experiment(rounds=5), tmp_path)
    kept = grown.summary["kept"]
    assert kept["round"] == 3
    assert {len(v) for split in kept["final"]["main"].values() for v in split.values()} == {2}


def test_a_kept_checkpoint_that_is_gone_is_a_warning(tmp_path):
    run = functools.partial(run_experiment, experiment(), tmp_path, **SETTINGS)
    run(callbacks=[at(3, Decision(keep=True))])
    (path,) = (tmp_path / "checkpoints" / "kept").iterdir()
    assert "kept" in run().summary
    path.unlink()
    with pytest.warns(UserWarning, match="kept round 3 cannot be read"):
        assert "kept" not in run().summary


def test_a_kept_state_is_in_memory_until_it_is_saved_and_in_one_process(tmp_path, monkeypatch):
    whole = lambda: {"w": np.arange(3.0)}
    first, other = KeptState(tmp_path, None, True), KeptState(tmp_path, None, False)
    first.keep(2, whole)
    other.keep(2, lambda: pytest.fail("copied in a process that does not write"))
    first.save()
    assert first._whole is None
    for process in (first, other):
        assert same(process.whole(whole()), whole())
    alone = KeptState(None, None, False)
    alone.keep(2, whole)
    assert same(alone.whole(whole()), whole())
    monkeypatch.setattr(kept, "from_all_processes", lambda value: [value, 0])
    with pytest.warns(UserWarning, match="kept round 2 cannot be read by process 1, so that"):
        assert first.whole(whole()) is None


def test_what_process_0_decides_holds_in_all(monkeypatch):
    sent = []
    monkeypatch.setattr(
        callbacks_module, "from_all_processes", lambda n: (sent.append(n), [3, n])[1]
    )
    assert call_callbacks([], [], dict, []) == Decision("as process 0 decided", keep=True)
    stops = [at(1, Decision("a")), at(1, Decision("b", keep=True)), at(2, Decision("c"))]
    assert call_callbacks(stops, [{"round": 1}], dict, []) == Decision("a; b", keep=True)
    assert sent == [0, 3]


def lines(*values, metric="accuracy", split="held_out", model="main"):
    return [
        {"round": round, "model": model, "split": split, "seed": seed, metric: value}
        for round, of_seeds in enumerate(values)
        for seed, value in enumerate(np.atleast_1d(of_seeds).tolist())
    ]


def decisions(callback, history):
    rounds = sorted({record["round"] for record in history})
    upto = lambda round: [record for record in history if record["round"] <= round]
    return [callback([], history=upto(round)) for round in rounds]


def test_what_a_callback_changes_stays_in_the_callback():
    def careless(records, history):
        for line in (*records, *history):
            line.pop("round")
            line["accuracy"] = 0.0

    records = lines(0.5)
    call_callbacks([careless, careless], records, dict, records)
    assert records == lines(0.5)


def test_callbacks_are_not_called_with_nothing_before_the_last_round(tmp_path):
    seen = []
    only_at_the_end = experiment(
        rounds=2, splits={}, final_splits={}, final_client_splits={"later": examples(3)}
    )
    watch = lambda records: seen.append(records[0]["round"])
    run_experiment(only_at_the_end, tmp_path, callbacks=[watch], **SETTINGS)
    assert seen == [1, 2]  # the first has lines of training alone


def test_a_kept_round_that_was_the_last_has_no_final_client_splits_after_growth(tmp_path):
    keep = [at(3, Decision(keep=True))]
    run = functools.partial(run_experiment, callbacks=keep, **SETTINGS)
    settings = dict(final_splits={}, final_client_splits={"later": examples(3)})
    assert (
        "later" in run(experiment(rounds=3, **settings), tmp_path).summary["kept"]["final"]["main"]
    )
    grown = run(experiment(rounds=5, **settings), tmp_path).summary["kept"]
    assert grown["round"] == 3 and grown["final"]["main"].keys() == {"train"}


def test_an_error_of_a_callback_names_it_and_the_round():
    class Watcher:
        def __call__(self, records):
            raise KeyError("its own message")

    for callback, name in ((killed_at(3), "killed_at.<locals>.callback"), (Watcher(), "Watcher")):
        with pytest.raises((Killed, KeyError)) as error:
            call_callbacks([callback], [{"round": 3}], dict, [])
        assert error.value.__notes__ == [f"The callback {name} raised this after round 3."]


def test_when_to_stop_and_what_to_keep():
    history = lines(0.1, 0.3, 0.2, 0.3, 0.35, 0.1, 0.2)
    stops = lambda *args, **kw: [bool(d.stop) for d in decisions(StopEarly(*args, **kw), history)]
    assert stops(patience=2) == [False, False, False, True, False, False, True]
    assert stops(patience=3) == [False] * 7
    assert stops(patience=2, min_delta=0.06) == [False, False, False, True, True, True, True]
    (*_, last) = decisions(StopEarly(patience=2), history)
    assert last.stop == (
        "accuracy on held_out has not improved for 2 evaluations; it was best in round 4, 0.35"
    )
    (*_, last) = decisions(StopEarly(patience=2), lines(None, None, None))
    assert last.stop == "accuracy on held_out was not defined in 3 evaluations"
    kept = [decision.keep for decision in decisions(KeepBest(), history)]
    assert kept == [True, True, False, False, True, False, False]
    for metric in ("loss", "error", "hidden_distance"):
        falling = lines(3.0, 2.0, 2.5, metric=metric)
        assert [d.keep for d in decisions(KeepBest(metric=metric), falling)] == [True, True, False]
    falling = lines(3.0, 2.0, 2.5, metric="loss")
    opposite = KeepBest(metric="loss", smaller_is_better=False)
    assert [d.keep for d in decisions(opposite, falling)] == [True, False, False]


def test_lines_of_a_history_that_grows_are_read_once():
    reads = []

    class Line(dict):
        def __getitem__(self, name):
            reads.append((self["round"], self["seed"])) if name == "split" else None
            return super().__getitem__(name)

    every = list(map(Line, lines([0.1, 0.3], [0.3, 0.5], [0.2, 0.2], [0.9, None])))
    for callback in (StopEarly(patience=1), KeepBest()):
        reads.clear()
        history, found = [], []
        for round in range(4):
            history += every[2 * round : 2 * round + 2]
            found.append(callback([], history))
        assert len(reads) == len(every)
        assert found == decisions(callback, every)  # each time a list of its own
        assert callback([], history) == found[-1]


def test_a_callback_that_only_reads_gets_the_runs_own_history():
    class Watcher:
        only_reads = True

        def __call__(self, records, history):
            self.seen = history

    history, watcher, other = lines(0.5), Watcher(), Watcher()
    other.only_reads = False
    call_callbacks([watcher, other], history, dict, history)
    assert watcher.seen is history and other.seen is not history
    assert all(one.only_reads for one in (StopEarly, KeepBest, CSVLogger))


def test_means_over_seeds_and_models_and_undefined_values():
    history = lines([0.1, 0.5], [0.4, 0.4], [0.9, None]) + lines(0.9, 0.1, 0.9, model="other")
    assert [d.keep for d in decisions(KeepBest(), history)] == [True, False, False]
    of_main = decisions(KeepBest(model="main"), history)
    assert [d.keep for d in of_main] == [True, True, False]  # an undefined one is never the best
    assert [d.keep for d in decisions(KeepBest(), lines(None, None, 0.1))] == [False, False, True]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (StopEarly("test"), r"^split must be one of \['train'\], .* got 'test'\.$"),
        (KeepBest("train", "f1"), r"^metric must be one of \['accuracy', 'loss'\], got 'f1'\.$"),
        (KeepBest("train", model="x"), r"^model must be one of \['main'\], got 'x'\.$"),
        (StopEarly("train", patience=0), r"^patience must be at least 1, got 0\.$"),
        (StopEarly("train", min_delta=-1), r"^min_delta must be .*at least 0, got -1\.$"),
        (StopEarly(3), r"^split must be text, got 3"),
        (KeepBest, r"^callbacks must be functions of records, got the class KeepBest: call it\.$"),
        (
            lambda records, stop: None,
            r"^callbacks must be functions of records, .* got one of \(records, stop\): missing",
        ),
        (lambda: None, r"^callbacks must be functions of records, .* got one of \(\): too many"),
        (lambda records: True, r"^callbacks must return a Decision, .* or None, got True\.$"),
        (lambda records: np.bool_(True), r"^callbacks must return a Decision, .* or None, got "),
    ],
)
def test_what_does_not_fit_the_experiment_is_one_line(callback, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        run_experiment(experiment(), callbacks=[callback], show_progress=False)
    assert "\n" not in str(error.value)


def test_of_two_best_rounds_only_one_could_be_kept():
    """The second would replace the first without a word."""
    both = [KeepBest("train", "loss"), StopEarly("train"), KeepBest("train", "accuracy")]
    message = r"^callbacks must have at most one that keeps a round, .* got KeepBest\(.*\.$"
    with pytest.raises(ValueError, match=message):
        run_experiment(experiment(), callbacks=both, show_progress=False)
