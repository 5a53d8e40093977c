"""What the command adds to a run folder: a description of the data, and the trained models."""

import json
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedcodist.commands.run import _newest_checkpoint, _tell_of_loggers
from fedcodist.config.data_prepared import data_manifests
from fedcodist.core.method import Predictor
from fedcodist.core.model import Variables
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.run.environment import data_note
from fedcodist.run.export import load_model, save_models, single_models
from fedcodist.run.folder_check import RunFolderError
from fedcodist.run.run_folder import RunFolder


def prepare(folder, examples, **arguments):
    """A prepared folder of one client with so many examples."""
    data = FederatedData.from_arrays(
        {"label": list(range(examples))}, offsets=[0, examples], client_ids=["a"]
    )
    save_prepared(folder, {"train": data}, source="made up", licence="none", arguments=arguments)
    return str(folder)


def test_what_the_manifests_of_both_folders_say(tmp_path):
    near = prepare(tmp_path / "near", 3, seed=7, unverified=False)
    far = prepare(tmp_path / "far", 5, unverified=True)
    settings = ConfigDict({"name": "prepared", "folder": near, "unlabelled_folder": far})
    assert data_manifests(settings) == {
        near: {"source": "made up", "seed": 7, "unverified": False, "num_examples": {"train": 3}},
        far: {"source": "made up", "seed": None, "unverified": True, "num_examples": {"train": 5}},
    }
    settings.unlabelled_folder = None
    assert list(data_manifests(settings)) == [near]
    assert data_manifests(ConfigDict({"name": "digits"})) == {}


def test_the_note_is_added_once_and_stays_when_a_run_is_resumed(tmp_path):
    folder = tmp_path / "run"
    environment = lambda: json.loads((folder / "environment.json").read_text())
    RunFolder(folder).claim({}, {}, change_plan=False)
    before = environment()
    data_note(folder, {"near": {"seed": 7}})([])
    data_note(folder, {"near": {"seed": 8}})([])
    assert environment() == {**before, "data": {"near": {"seed": 7}}}
    RunFolder(folder).claim({}, {}, change_plan=False)
    assert environment()["data"] == {"near": {"seed": 7}}


def test_a_note_that_cannot_be_written_is_the_run_folders_error(tmp_path):
    with pytest.raises(RunFolderError, match=r"environment\.json"):
        data_note(tmp_path / "none", {"near": {}})([])


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    """The logs of its processes are written before a process looks at it."""
    (tmp_path / "file").touch()
    arguments = ["--config=digits_codist:fed_avg", f"--workdir={tmp_path / 'file' / 'run'}"]
    command = [sys.executable, "-m", "fedcodist.commands.run", *arguments, "--processes=2"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == f"error: cannot write {tmp_path / 'file' / 'run'}: Not a directory.\n"


def test_models_are_saved_seed_by_seed_and_ensembles_are_not(tmp_path):
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    # The variables of an ensemble hold its members' weights and mutable state.
    ensemble = Variables({"w": weights[:, None]}, ({}, np.ones((2, 1))))
    models = {"main": Variables({"w": weights}, {}), "ensemble": ensemble}
    one = types.SimpleNamespace(init=lambda key: Variables({"w": jnp.zeros(3)}, {}))
    predictors = {name: Predictor(one, None, None) for name in models}
    algorithm = types.SimpleNamespace(predictors=predictors, communication={"main": None})
    save_models(tmp_path, models, single_models(algorithm, models), first_seed=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "main_seed3.safetensors",
        "main_seed4.safetensors",
    ]
    read = load_model(tmp_path / "main_seed4.safetensors")
    assert read.params["w"].tolist() == [3.0, 4.0, 5.0] and read.mutable == {}


def test_models_of_servers_and_members_are_single():
    """Such as FedRolex's whole network, and FedMRL's parties, which have more than their network."""
    of = lambda size: types.SimpleNamespace(init=lambda key: Variables({"w": jnp.zeros(size)}, {}))
    predictors = {
        "whole": Predictor(of(4), None, None),
        "parties": Predictor(of(3), None, None, members=("a", "b")),
        "joint": Predictor(of(3), None, None, members=("c",)),
    }
    algorithm = types.SimpleNamespace(
        predictors=predictors, communication=dict.fromkeys(("a", "b", "c"))
    )
    seeds = lambda *shape: Variables({"w": np.zeros((2, *shape))}, {})
    joint = Variables({"own": np.zeros((2, 3)), "shared": np.zeros((2, 5))}, {})
    variables = {"whole": seeds(4), "a": seeds(3), "b": seeds(3), "c": joint}
    assert single_models(algorithm, variables) == ["whole", "a", "b", "c"]


def test_the_newest_checkpoint_is_a_phases_before_the_first_round(tmp_path):
    """Restarts that make progress in a phase do not count as a loop."""
    assert _newest_checkpoint(tmp_path) is None
    for part in ("phases/public", "phases/private", "phases/centralised", ""):
        checkpoints = tmp_path / part / "checkpoints"
        checkpoints.mkdir(parents=True)
        for round in (9, 10):
            name = f"round_{round:08d}.msgpack"
            (checkpoints / name).touch()
            assert _newest_checkpoint(tmp_path) == f"{part}/{name}".removeprefix("/")


@pytest.mark.parametrize(
    ("loggers", "evaluations", "is_told"),
    [(("csv",), [], True), (("csv",), [[{"round": 1}]], False), (None, [], False), ([], [], False)],
)
def test_loggers_of_a_finished_run_are_told(loggers, evaluations, is_told, capsys):
    _tell_of_loggers(loggers, evaluations)
    line = "the run was finished already: loggers (csv) get none of its rounds\n"
    assert capsys.readouterr().out == (line if is_told else "")


@pytest.mark.parametrize("damage", ["{", "[]", ""])
def test_a_damaged_environment_is_one_line_for_the_note_on_data(damage, tmp_path):
    (tmp_path / "environment.json").write_text(damage)
    with pytest.raises(RunFolderError, match=r"cannot read .*environment\.json"):
        data_note(tmp_path, {"folder": {}})([])
