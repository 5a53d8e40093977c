"""FedKD from configs: every run is built, mistakes are one line, costs, and the command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import cifar_fed_kd
from fedcodist.commands import compare
from fedcodist.config.compression import COMPRESSORS
from fedcodist.config.experiment import build_experiment
from fedcodist.config.networks import MODELS
from fedcodist.config.passes import LEARNING
from fedcodist.configs import digits_fed_kd
from fedcodist.core.communication import tree_bytes
from fedcodist.report import ranking
from fedcodist.report.entries import read_run
from fedcodist.report.flops import flops_of_run
from fedcodist.report.forward_flops import forward_flops_of
from fedcodist.report.runs import load_run
from fedcodist.run.experiment import run_experiment


@pytest.mark.parametrize("run", digits_fed_kd.get_runs())
def test_every_run_is_built(run):
    algorithm = build_experiment(digits_fed_kd.get_config(run)).algorithm
    first = algorithm.client_states["main"].first
    if run.startswith("fed_avg"):
        assert first is None
        return
    assert algorithm.name == "fed_kd"
    assert hasattr(first, "memory") == (run != "fed_kd,whole")
    row = getattr(first, "inner", first)
    assert tree_bytes(row.teacher) == 4 * 17226
    assert [leaf.shape for leaf in row.maps] == [(32, 64)]


def test_starts_are_fed_avgs():
    """The student's first weights are those of the same network under FedAvg."""
    start = {}
    for run in ("fed_avg,student", "fed_kd"):
        algorithm = build_experiment(digits_fed_kd.get_config(run)).algorithm
        predictor = algorithm.predictors["main"]
        variables = predictor.variables(algorithm.init(jax.random.key(0)))
        logits = predictor.predict(variables, {"image": jnp.ones((2, 8, 8, 1))})
        start[run] = getattr(logits, "logits", logits)
    assert jnp.array_equal(*start.values())


def test_both_networks_are_counted():
    config = digits_fed_kd.get_config("fed_kd").to_dict()
    both = sum(forward_flops_of(MODELS[name]) for name in ("digits_small", "digits_large"))
    assert flops_of_run(config, {"main": 10.0}).clients["main"] == 10 * LEARNING * both


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("teacher", "digits_medium", r"training\.fed_kd\.teacher must be one of"),
        ("teacher", "cnn_small_10", r"training\.fed_kd\.teacher 'cnn_small_10' takes images of"),
        (
            "teacher_layers",
            ("dense", "Dense_1"),
            r"\.teacher_layers: layers must be of .*, got 'dense'",
        ),
        (
            "student_layers",
            ("Dense_0",) * 3,
            r"training\.fed_kd: .*must divide the teacher's 2, got 3",
        ),
        ("hidden_map", "identity", r"training\.fed_kd\.hidden_map must be 'learned' where"),
        ("exchange", "epoch", r"training\.fed_kd\.exchange must be one of"),
        ("output_weight", -1.0, r"training\.fed_kd\.output_weight must be at least 0"),
    ],
)
def test_mistakes_are_one_line(setting, value, message):
    config = digits_fed_kd.get_config("fed_kd")
    config.training.fed_kd[setting] = value
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("configs", [digits_fed_kd, cifar_fed_kd])
def test_a_range_finder_is_a_setting(configs):
    config = configs.get_config("fed_kd")
    compressor = COMPRESSORS["svd"](config.training.compression)
    matrix = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(12, 9)), jnp.float32)}
    program = lambda svd: str(
        jax.make_jaxpr(lambda tree: svd.compress(tree, (), jax.random.key(0), 0.5))(matrix)
    )
    drawing = "erf_inv"  # of normal numbers
    assert drawing not in program(compressor)
    config.update_from_flattened_dict({"training.compression.range_finder": 4})
    assert drawing in program(COMPRESSORS["svd"](config.training.compression))
    config.training.compression.range_finder = 0
    with pytest.raises(ValueError, match=r"^range_finder\.columns must be at least 1, got 0"):
        COMPRESSORS["svd"](config.training.compression)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_quickly")
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    """A checkpoint has teachers, optimizers, what links remember and the count of bytes."""
    config = digits_fed_kd.get_config("fed_kd")
    config.rounds, config.seeds = 4, 1
    config.evaluation.every, config.evaluation.checkpoint_every = 1, 2
    config.training.compression.uplink = "top_k"  # with error feedback: a client's memory
    experiment, settings = build_experiment(config), dict(config={}, show_progress=False)
    whole = run_experiment(experiment, tmp_path / "whole", **settings)
    seen = []

    def stop(records):
        seen.append(records[0]["round"])
        if seen == [0, 1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "run", callbacks=[stop], **settings)
    resumed = run_experiment(experiment, tmp_path / "run", callbacks=[stop], **settings)
    assert seen[4:] == [3, 4]  # it went on from round 2
    assert resumed.records == whole.records
    measured = [each for each in whole.records if each["split"] == "clients"]
    assert all(each["client_bytes_up"] > 0 for each in measured) and len(measured) == 4
    both = (resumed.variables, whole.variables)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *both)))


@pytest.mark.slow
def test_the_comparison_ranks_teachers_by_the_students_measured_bytes(tmp_path, capfd):
    arguments = [
        "--config=fedcodist/configs/digits_fed_kd.py",
        f"--workdir={tmp_path}",
        "--only=fed_avg,student",
        "--only=fed_kd",
        "--only=fed_kd,whole",
        "--config.rounds=8",
        "--config.seeds=1",
        "--config.evaluation.every=4",
        "--config.evaluation.checkpoint_every=4",
    ]
    assert compare.main(arguments) == 0
    output = capfd.readouterr().out
    assert "fed_kd,whole" in output and "shared model" in output
    runs = ("fed_avg,student", "fed_kd", "fed_kd,whole")
    everything = [read_run(run, load_run(tmp_path / run.replace(",", "-"))) for run in runs]
    shown = ranking.ranked([e for each in everything for e in each], runs[0], None)
    entries = {entry.run: entry for entry in shown}
    assert [entries[run].model for run in runs] == ["main", "main_teachers", "main_teachers"]
    whole = 4 * 2410 * 2 * 4 * 8 / 1e6  # floats, both ways, clients, rounds
    assert entries["fed_kd,whole"].megabytes == pytest.approx(whole, rel=2e-3)
    assert entries["fed_kd"].megabytes < 0.9 * whole
    assert entries["fed_kd"].client_flops > 5 * entries["fed_avg,student"].client_flops
    assert min(entry.values[0] for entry in entries.values()) > 50
