"""The command that shows who has which examples, on a config of digits."""

import numpy as np
import pytest

from fedcodist.commands import partition
from fedcodist.data.federated_data import FederatedData

CONFIG = """
from ml_collections import ConfigDict

def get_config(run="dirichlet"):
    config = ConfigDict(dict(name="example"))
    config.data = dict(name="digits", num_clients=7, concentration=0.5, seed=0)
    if run == "pathological":
        config.data.partition = dict(name=run, num_clients=10, labels_per_client=2)
    return config
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


def test_it_describes_and_draws_a_configs_clients(config, tmp_path, capsys):
    picture = tmp_path / "folder" / "partition.png"
    command = [f"--config={config}:pathological", f"--plot={picture}"]
    assert partition.main([*command, "--config.data.partition.labels_per_client=3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["clients              10", "examples             899"]
    assert printed[4] == "labels per client    3 to 3, median 3"
    assert printed[5] == f"wrote {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def test_labels_of_candidates_are_left_out():
    columns = {"label": np.array([[1, 0, -1]] * 4, np.int8)}
    data = FederatedData.from_arrays(columns, offsets=[0, 2, 4])
    assert [line.split()[0] for line in partition._description(data, None).splitlines()] == [
        *("clients", "examples", "examples")
    ]
    with pytest.raises(ValueError, match="column 'label' must be integer labels"):
        partition._description(data, "label")


def test_numbers_to_predict_are_no_labels():
    columns = {"label": np.array([0.5, 1.5, -2.0, 0.0], np.float32)}
    data = FederatedData.from_arrays(columns, offsets=[0, 2, 4])
    assert "labels" not in partition._description(data, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "all"], "--split must be one of ['held_out', 'test', 'train'], got 'all'"),
        (["--config.data.seed=-1"], "data.seed must be at least 0, got -1"),
        (["--config.data.sede=1"], "did you mean --config.data.seed?"),
        (["--column", "image"], "column 'image' must be integer labels"),
        (["--column", "lable"], "--column must be one of ['image', 'label'], got 'lable'"),
        (["--plot", "partition.text"], "Format 'text' is not supported"),
        (["--plot", "partition"], "path must end in a format, such as .png, got 'partition'"),
    ],
)
def test_mistakes_are_one_line(config, arguments, message, capsys):
    assert partition.main(["--config", config, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
