"""Loggers, each read back by its own package; tests of packages that are not installed are skipped."""

import csv
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fedcodist.run.csv_logger import CSVLogger
from fedcodist.run.metrics_lines import scalars
from fedcodist.run.mlflow_logger import MLflowLogger
from fedcodist.run.tensorboard_logger import TensorBoardLogger
from fedcodist.run.tracked_runs import LoggerError, TrackedRuns
from fedcodist.run.wandb_logger import WandbLogger

CONFIG = {
    "name": "the_name",
    "seed": 3,
    "seeds": 2,
    "pools": {"main": {"fraction": 0.5}},
    "t": (1, 2),
}


def evaluation(round):
    """Two seeds; lists and undefined values are logged nowhere."""
    return [
        {
            "round": round,
            "model": "main",
            "split": split,
            "seed": seed,
            "loss": round + seed / 10,
            "undefined": None,
            "per_label_accuracy": [0.5, 0.25],
            "per_client": {"accuracy_min": 0.125, "accuracy_std": None},
        }
        for split in ("held_out", "clients")
        for seed in (3, 4)
    ]


SUMMARY = {"final": {"main": {"test": {"accuracy": [0.75, 0.5], "loss": [None, 2.0]}}}}


def log(logger, rounds, history=()):
    """What a start of a run does, which is killed where it is not finished."""
    if hasattr(logger, "start"):
        logger.start(CONFIG)
    history = list(history)
    for round in rounds:
        history += evaluation(round)
        if isinstance(logger, CSVLogger):
            logger(evaluation(round), history)
        else:
            logger(evaluation(round))


def test_scalars_of_a_line():
    assert scalars(evaluation(2)[1]) == {
        "main/held_out/loss": 2.4,
        "main/held_out/per_client/accuracy_min": 0.125,
    }


def test_csv_is_the_same_after_a_resume(tmp_path):
    log(CSVLogger(tmp_path), [0, 1, 2])
    log(CSVLogger(tmp_path), [2, 3], [*evaluation(0), *evaluation(1)])  # round 2 once more
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["round", "model", "split", "seed", "metric", "value"]
    expected = [
        [str(r["round"]), "main", r["split"], str(r["seed"]), metric, str(value)]
        for round in range(4)
        for r in evaluation(round)
        for metric, value in (("loss", r["loss"]), ("per_client/accuracy_min", 0.125))
    ]
    assert rows[1:] == expected


def test_csv_has_the_whole_name_of_a_metric(tmp_path):
    of_layers = {"round": 1, "model": "main", "split": "clients", "seed": 3}
    of_layers |= {"client_rank/dense1/kernel": 4.0, "client_rank/dense2/kernel": 5.0}
    CSVLogger(tmp_path)([of_layers], [of_layers])
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["metric"]: float(row["value"]) for row in rows} == {
        "client_rank/dense1/kernel": 4.0,
        "client_rank/dense2/kernel": 5.0,
    }


def test_tensorboard_has_a_writer_per_seed_and_one_tag_for_all(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    logger = TensorBoardLogger(tmp_path)
    assert not list(tmp_path.iterdir())  # nothing before the first line
    log(logger, [0, 5])
    logger.finish(SUMMARY)
    for seed in (3, 4):
        (path,) = (tmp_path / "tensorboard" / f"seed{seed}").iterdir()
        content, found, start = path.read_bytes(), {}, 0
        while start < len(content):
            length = int.from_bytes(content[start : start + 8], "little")
            event = event_pb2.Event.FromString(content[start + 12 : start + 12 + length])
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            start += length + 16
        assert found == {
            (f"main/{split}/{metric}", round): pytest.approx(value)
            for split in ("held_out", "clients")
            for round in (0, 5)
            for metric, value in (("loss", round + seed / 10), ("per_client/accuracy_min", 0.125))
        }


def test_a_folder_of_tensorboard_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(LoggerError, match=r"^cannot write .*tensorboard: Not a directory\.$"):
        TensorBoardLogger(tmp_path)(evaluation(0))


@pytest.mark.parametrize("content", [b'{"0": "a', b"[]", b"\xff", None])
def test_damaged_identifiers_of_runs_are_one_line(content, tmp_path):
    path = tmp_path / "runs.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for call in (lambda ids: ids.known(0), lambda ids: ids.id_of(0, lambda: "x")):
        with pytest.raises(LoggerError, match=r"^cannot read .*runs\.json: ") as error:
            call(TrackedRuns(path))
        assert "\n" not in str(error.value)


def leveldb_records(content, before):
    """The records of a W&B file, a LevelDB log: blocks of 32 KiB, where long records are cut."""
    place, parts = 0, []
    while place + 7 <= len(content):
        left = 2**15 - (before + place) % 2**15
        if left < 7:  # no room for a header
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'fedcodist[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)

    def whole_run(path):
        """The records of a finished run. W&B's own process may still write after `finish`."""
        for _ in range(300):
            content = path.read_bytes()[7:]
            records = [Record.FromString(record) for record in leveldb_records(content, 7)]
            if records and records[-1].HasField("exit"):
                return records
            time.sleep(0.1)
        raise AssertionError(f"{path} has no end")

    killed = WandbLogger(tmp_path)
    log(killed, [0, 1])
    for run in killed._runs.values():
        run.finish()  # as at the process's end
    resumed = WandbLogger(tmp_path)
    log(resumed, [1, 2])
    resumed.finish(SUMMARY)
    ids = json.loads((tmp_path / "wandb_runs.json").read_text())
    assert ids.keys() == {"3", "4"}
    for index, (seed, run_id) in enumerate(ids.items()):
        # W&B adds -1 to the name of a folder that it has made within the same second.
        logged, about, final = [], [], {}
        for path in sorted(tmp_path.glob(f"wandb/*-{run_id}*/run-{run_id}.wandb")):
            for record in whole_run(path):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                logged += [items] if items else []
                about += [record.run] if record.HasField("run") else []
                for item in record.summary.update:
                    final[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        expected = [(round, round + int(seed) / 10) for round in (0, 1, 1, 2)]
        assert [(i["round"], i["main/held_out/loss"]) for i in logged] == expected
        assert {(run.project, run.run_group, run.display_name) for run in about} == {
            ("the_name", tmp_path.name, f"{tmp_path.name}_seed{seed}")
        }
        config = {item.key: json.loads(item.value_json) for item in about[0].config.update}
        assert config["seed"] == int(seed) and config["pools"] == {"main": {"fraction": 0.5}}
        assert final["main/test/accuracy"] == [0.75, 0.5][index]
        assert ("main/test/loss" in final) == (index == 1)


@pytest.mark.slow
def test_weights_and_biases_without_a_login_is_one_line(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        LoggerError, match=r"^loggers 'wandb': No API key .* WANDB_MODE=offline"
    ) as e:
        WandbLogger(tmp_path).start(CONFIG)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_mlflow_on_a_file_store(tmp_path, monkeypatch):
    reason = "MLflow is not installed: pip install 'fedcodist[mlflow]'"
    mlflow = pytest.importorskip("mlflow", reason=reason)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    log(MLflowLogger(tmp_path), [0, 1])
    resumed = MLflowLogger(tmp_path)
    log(resumed, [1, 2])
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("the_name")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"RUNNING"}
    resumed.finish(SUMMARY)
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_name for run in runs} == {f"{tmp_path.name}_seed{n}" for n in (3, 4)}
    for run in runs:
        seed = int(run.data.tags["seed"])
        history = client.get_metric_history(run.info.run_id, "main/held_out/loss")
        found = sorted((metric.step, metric.value) for metric in history)
        np.testing.assert_allclose(found, [(r, r + seed / 10) for r in (0, 1, 1, 2)])
        parameters = {"name": "the_name", "seed": str(seed), "seeds": "2", "t": "(1, 2)"}
        assert run.data.params == parameters | {"pools.main.fraction": "0.5"}
        assert run.info.status == "FINISHED" and run.data.tags["run_folder"] == str(tmp_path)


def test_a_run_that_was_stopped_after_its_last_evaluation_is_finished_in_mlflow(
    tmp_path, monkeypatch
):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    log(MLflowLogger(tmp_path), [0])
    resumed = MLflowLogger(tmp_path)
    log(resumed, [])
    resumed.finish(SUMMARY)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("the_name")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]


def test_a_run_that_finished_without_mlflow_leaves_no_empty_runs_in_it(tmp_path, monkeypatch):
    """A logger that is named for a finished run gets none of its rounds."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    logger = MLflowLogger(tmp_path)
    log(logger, [])
    logger.finish(SUMMARY)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("the_name")
    assert not client.search_runs([experiment.experiment_id])
    assert not (tmp_path / "mlflow_runs.json").exists()


@pytest.mark.slow
def test_mlflow_goes_where_the_user_has_set(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    (tmp_path / "run").mkdir()
    log(MLflowLogger(tmp_path / "run"), [0])
    assert not (tmp_path / "run" / "mlruns").exists()
    assert mlflow.MlflowClient().get_experiment_by_name("the_name") is not None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://x")
    with pytest.raises(LoggerError, match=r"^loggers 'mlflow': ") as error:
        MLflowLogger(tmp_path).start(CONFIG)
    assert "\n" not in str(error.value)


def test_errors_of_mlflow_during_a_run_are_one_line(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")

    def gone(*arguments, **named):
        raise mlflow.MlflowException("Run 'x'\nnot found")

    logger = MLflowLogger(tmp_path)
    logger._client = SimpleNamespace(log_batch=gone, set_terminated=gone)
    logger._ids = SimpleNamespace(id_of=lambda seed, create: "x", known=lambda seed: "x")
    line = {"round": 1, "model": "main", "split": "test", "seed": 0, "accuracy": 0.5}
    for call in (lambda: logger([line]), lambda: logger.finish({})):
        with pytest.raises(
            LoggerError, match=r"^loggers 'mlflow', .*mlflow_runs\.json: Run 'x' not"
        ):
            call()
