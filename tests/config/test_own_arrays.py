"""From arrays to the launcher: `fc.save_prepared`, a config file, an experiment."""

import sys

import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

import fedcodist as fc
from fedcodist.commands import run
from fedcodist.config import command_line
from fedcodist.config.experiment import build_experiment
from fedcodist.core import child_processes
from fedcodist.data import iid, pathological

CONFIG = """
from fedcodist.config import defaults

def get_config():
    config = defaults.experiment("own_arrays", rounds=1)
    config.data = dict(
        name="prepared", folder="", unlabelled_folder=None, num_unlabelled=None, crop=24, padding=0,
        augmentation="per_image", seed=0,
        partition=dict(name="shards", num_clients=4, shards_per_client=2, feature_rotations=2),
    )
    config.training = defaults.training()
    config.pools = defaults.one_pool("cnn_small", 2, 0.1)
    config.nested_pools = True
    config.algorithm = dict(name="fed_avg")
    config.evaluation = defaults.evaluation(1, 1, splits=("test",), final_splits=())
    config.execution = defaults.execution(processes=1)
    return config
"""


@pytest.fixture
def arguments(tmp_path):
    """The launcher's, for a config of arrays that were made here."""
    draws = np.random.default_rng(0)
    columns = {
        "image": draws.integers(0, 256, (60, 24, 24, 3), np.uint8),
        "label": np.repeat(np.arange(5, dtype=np.int32), 12),
    }
    train = fc.FederatedData.from_arrays(columns, partition=pathological(columns["label"], 6, 2, 0))
    apart = fc.FederatedData.from_arrays(columns, partition=iid(60, 1, 0))
    fc.save_prepared(
        tmp_path / "data",
        {"train": train, "test": apart, "distillation": apart.drop("label")},
        source="made in a test",
        licence="none",
        arguments={"mean": [0.5] * 3, "deviation": [0.25] * 3, "num_classes": 100},
    )
    (tmp_path / "config.py").write_text(CONFIG)
    return [f"--config={tmp_path / 'config.py'}", f"--config.data.folder={tmp_path / 'data'}"]


def test_arrays_become_an_experiment(arguments):
    values = flags.FlagValues()
    given = ["program", *arguments]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=given)
    command_line.parse(given, values, required=("config",))
    experiment = build_experiment(values.config)
    assert experiment.data.num_clients == 4 and sum(experiment.data.sizes) == 60
    assert experiment.data.columns["image"].shape == (60, 24, 24, 3)


@pytest.mark.slow
def test_the_launcher_trains_on_them(arguments, tmp_path):
    command = [sys.executable, "-m", run.__name__, *arguments, f"--workdir={tmp_path / 'run'}"]
    assert child_processes.run(command).returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()
