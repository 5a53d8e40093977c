"""Configs of MHD and its baselines, their data, what they cost, and the tables of heads."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import heads, sweep
from experiments.assembly import build_experiment
from experiments.configs import cifar100_mhd, digits_mhd
from experiments.data import load_data
from experiments.decentralised import DECENTRALISED_METHODS, graph_of
from experiments.flops import flops_of_parties
from experiments.methods import METHOD_NAMES
from fedcodist import graphs
from fedcodist.algorithms.isolated import SHARED
from fedcodist.data.primary_labels import label_frequencies


def digits(run="multi_headed_distillation", **changes):
    config = digits_mhd.get_config(run)
    for path, value in changes.items():
        with config.ignore_type():
            config.update_from_flattened_dict({path.replace("__", "."): value})
    return config


def test_every_method_has_a_run_and_a_name():
    assert set(digits_mhd.get_runs()) == set(DECENTRALISED_METHODS) <= set(METHOD_NAMES)


@pytest.mark.parametrize("run", digits_mhd.get_runs())
def test_runs_of_digits_are_built(run):
    experiment = build_experiment(digits(run))
    algorithm = experiment.algorithm
    models = ["digits_small"] if run == "pooled" else [f"digits_small_{c}" for c in range(8)]
    assert sorted(algorithm.communication) == models
    assert bool(algorithm.notes) == (run == "multi_headed_distillation")
    if run == "pooled":  # all training images, with the labels of the public ones
        assert len(experiment.data.rows[SHARED]["label"]) == 1797 - round(0.3 * 1797)


def test_private_public_and_test_images_are_apart_and_all_there():
    data = load_data(digits().data)
    counts = (
        data.splits["train"].num_examples,
        len(data.unlabelled),
        data.splits["test"].num_examples,
    )
    assert sum(counts) == 1797 and counts[1] == round(0.2 * (1797 - counts[2]))
    frequencies = label_frequencies(data.splits["train"], 10)
    assert (np.sort(frequencies, axis=1)[:, -3:].sum(axis=1) > 0.8).mean() > 0.7
    # A fixed private part does not depend on the public one.
    fixed = [
        load_data(digits(data__private_share=0.7, data__public_share=share).data).splits["train"]
        for share in (0.1, 0.3)
    ]
    np.testing.assert_array_equal(fixed[0].columns["image"], fixed[1].columns["image"])
    even = load_data(digits(data__assignment="even", data__num_clients=10, data__skew=1e9).data)
    assert ((label_frequencies(even.splits["train"], 10) > 0).sum(axis=0) == 3).all()


def test_graphs_by_name():
    config = digits()
    np.testing.assert_array_equal(graph_of(config, 8), graphs.directed_cycle(8))
    with config.unlocked():
        config.parties.graph = dict(name="random", probability=0.5, seed=1)
    np.testing.assert_array_equal(graph_of(config, 8), graphs.random_graph(8, 0.5, 1))


def test_flops_are_counted_from_the_steps():
    forward = 2 * (64 * 32 + 32 * 10)
    examples = {f"digits_small_{c}": 1000.0 for c in range(8)}
    config = digits("separate").to_dict()
    assert flops_of_parties(config, examples, 40).clients["digits_small_0"] == 3 * forward * 1000
    headed = 2 * (64 * 32 + 4 * 32 * 10)
    public = 40 * 25 * 64
    found = flops_of_parties(digits().to_dict(), examples, 40).clients["digits_small_3"]
    assert found == 3 * headed * 1000 + public * (3 * headed + headed)
    config = digits("decentralised_periodic_codistillation").to_dict()
    found = flops_of_parties(config, examples, 40).clients["digits_small_3"]
    assert found == 3 * forward * 1000 + 10 * 512 * 4 * forward


def test_tables_of_heads_are_those_of_the_records(tmp_path: Path):
    config = digits(rounds=4, parties__heads=1)
    (tmp_path / "config.json").write_text(config.to_json())
    data = load_data(config.data)
    generator = np.random.default_rng(0)
    accuracies = generator.random((8, 2, 10))
    lines = [
        {
            "round": 4,
            "model": f"digits_small_{client}",
            "split": "test",
            "seed": 0,
            "accuracy": accuracies[client, 0].mean(),
            "accuracy_head_1": accuracies[client, 1].mean(),
            "per_label_accuracy": accuracies[client, 0].tolist(),
            "per_label_accuracy_head_1": accuracies[client, 1].tolist(),
        }
        for client in range(8)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = heads.read_heads(tmp_path)
    frequencies = label_frequencies(data.splits["train"], 10)
    np.testing.assert_allclose(found.shared[0], accuracies.mean(axis=-1))
    for client in range(8):
        expected = accuracies[client] @ frequencies[client]
        np.testing.assert_allclose(found.private[0, client], expected)
        np.testing.assert_allclose(
            found.on_others[0, client, :, 5], accuracies[client] @ frequencies[5]
        )
    two_away = np.mean([accuracies[c] @ frequencies[(c + 2) % 8] for c in range(8)], axis=0)
    np.testing.assert_allclose(heads.by_hops(found)[2], two_away)
    text = heads.tables(found)
    assert f"{100 * two_away[1]:.1f}" in text.splitlines()[-1]
    assert len(heads.picture(found).axes) >= 3
    assert heads.main([str(tmp_path)]) == 0
    assert heads.main([str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(parties__networks=("digits_small",) * 3), "must be one name or 8, one per client"),
        (dict(parties__networks="resnet"), "parties.networks must be one of"),
        (dict(data__assignment="odd"), r"data.assignment must be one of \['even', 'random'\]"),
        (dict(data__labels_per_client=0), "per_client must be at least 1, got 0"),
        (dict(data__public_share=0.4, data__private_share=0.7), "must leave both parts some"),
        (
            dict(parties__networks=("digits_small",) * 7 + ("digits_large",)),
            "same width of the embedding, got",
        ),
    ],
)
def test_mistakes_in_a_config_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_experiment(digits(**changes))
    assert "\n" not in str(caught.value)


def test_the_scaled_runs_have_the_spec_s_settings():
    runs = cifar100_mhd.get_runs()
    assert len(set(runs)) == len(runs)
    assert len({sweep.run_folder_name(run) for run in runs}) == len(runs)
    for run in runs:
        config = cifar100_mhd.get_config(run)
        assert config.run == run and config.seeds >= 2
        names = config.parties.networks
        assert isinstance(names, str) or len(names) == config.data.num_clients
