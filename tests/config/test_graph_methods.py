"""Configs of MHD and its baselines, their data, what they cost, and the tables of heads."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.configs import cifar100_mhd, cifar_fed_md_small, cifar_mhd_fed_md
from fedcodist.algorithms.graph import graphs
from fedcodist.algorithms.parties.local_only import SHARED
from fedcodist.commands import compare, sweep
from fedcodist.config import graph_methods
from fedcodist.config.algorithm import build_algorithm
from fedcodist.config.data import Data, load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.config.graph_methods import BACKBONES, graph_of, image_shape
from fedcodist.config.registry import DECENTRALISED, ENTRIES, GRAPH
from fedcodist.configs import digits_mhd
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.datasets.primary_labels import label_frequencies
from fedcodist.report import ranking, tables_heads
from fedcodist.report.entries import read_run
from fedcodist.report.flops import flops_of_parties
from fedcodist.report.runs import load_run
from fedcodist.run.experiment import check_experiment, run_experiment


def digits(run="multi_headed_distillation", **changes):
    config = digits_mhd.get_config(run)
    for path, value in changes.items():
        with config.ignore_type():
            config.update_from_flattened_dict({path.replace("__", "."): value})
    return config


def test_every_method_has_a_run_and_a_name():
    on_graphs = {name for name, entry in ENTRIES.items() if entry.kind == GRAPH}
    assert set(digits_mhd.get_runs()) == on_graphs


@pytest.mark.slow
@pytest.mark.parametrize("run", digits_mhd.get_runs())
def test_runs_of_digits_are_built(run):
    experiment = build_experiment(digits(run))
    algorithm = experiment.algorithm
    models = ["digits_small"] if run == "centralised" else [f"digits_small_{c}" for c in range(8)]
    assert sorted(algorithm.communication) == models
    assert bool(algorithm.notes) == (run == "multi_headed_distillation")
    if run == "centralised":  # all training images, with the labels of the public ones
        assert len(experiment.data.data_sets[SHARED]["label"]) == 1797 - round(0.3 * 1797)


def test_private_public_and_test_images_are_apart_and_all_there():
    data = load_data(digits().data)
    counts = (
        data.splits["train"].num_examples,
        len(data.unlabelled),
        data.splits["test"].num_examples + data.splits["held_out"].num_examples,
    )
    assert sum(counts) == 1797 and counts[1] == round(0.2 * (1797 - counts[2]))
    assert data.splits["held_out"].num_examples == round(0.3 * 1797) - round(0.2 * 1797)
    frequencies = label_frequencies(data.splits["train"], 10)
    assert (np.sort(frequencies, axis=1)[:, -3:].sum(axis=1) > 0.8).mean() > 0.7
    # A fixed private part does not depend on the public one.
    fixed = [
        load_data(digits(data__private_share=0.7, data__public_share=share).data).splits["train"]
        for share in (0.1, 0.3)
    ]
    np.testing.assert_array_equal(fixed[0].columns["image"], fixed[1].columns["image"])
    # All images may be public, without their labels; clients keep what they have.
    both = load_data(digits(data__private_share=0.8, data__public_share=1.0).data)
    np.testing.assert_array_equal(
        both.splits["train"].columns["image"], data.splits["train"].columns["image"]
    )
    assert len(both.unlabelled) == 1797 - counts[2]
    even = load_data(digits(data__assignment="even", data__num_clients=10, data__skew=1e9).data)
    assert ((label_frequencies(even.splits["train"], 10) > 0).sum(axis=0) == 3).all()


def test_test_images_of_clients_are_not_public():
    config = digits(data__public_share=1.0, data__private_share=0.5, data__client_test_share=0.25)
    with pytest.raises(
        ValueError, match=r"^data\.client_test_share must be None with data\.public"
    ):
        load_data(config.data)


@pytest.mark.parametrize("run", ["decentralised_fed_avg", "local_only_steps"])
def test_methods_that_read_no_public_images_need_none(run):
    config = digits(run)
    with config.ignore_type():
        config.data = ConfigDict(dict(name="digits", num_clients=8, concentration=10.0, seed=0))
    check_experiment(build_experiment(config))


def test_graphs_by_name():
    config = digits()
    np.testing.assert_array_equal(graph_of(config, 8), graphs.directed_cycle(8))
    with config.unlocked():
        config.parties.graph = dict(name="random", probability=0.5, seed=1)
    np.testing.assert_array_equal(graph_of(config, 8), graphs.random_graph(8, 0.5, 1))


def changing(*names, every=20, **changes):
    """Digits' MHD on one graph after another."""
    config = digits(**changes)
    with config.unlocked():
        described = tuple(dict(name=name, **own) for name, own in names)
        config.parties.graph = dict(name="time_varying", graphs=described, every=every)
    return config


def test_a_graph_that_changes_by_name():
    config = changing(("directed_cycle", {}), ("islands", {"size": 2}))
    # As a run folder has it.
    read_back = type(config)(json.loads(config.to_json()))
    expected = [graphs.directed_cycle(8)] * 20 + [graphs.islands(8, 2)] * 20
    for each in (config, read_back):
        np.testing.assert_array_equal(graph_of(each, 8), expected)
    algorithm = build_experiment(config).algorithm
    assert len(algorithm.communication) == 8
    # Client 3 has other teachers in the second half of the run, but of equal size.
    examples = {f"digits_small_{c}": 1000.0 for c in range(8)}
    found = flops_of_parties(config.to_dict(), examples, 40)
    assert found == flops_of_parties(digits().to_dict(), examples, 40)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([("directed_cycle", {})], "of each of the run's 40 rounds, it has those of 20"),
        ([], "graphs must hold at least one graph"),
        ([("ring", {})] * 2, r"parties.graph.graphs\[0\].name must be one of"),
        (
            [("islands", {"size": 3})] * 2,
            r"parties\.graph\.graphs\[0\]\.size must divide the 8 clients",
        ),
        (
            [("islands", {})] * 2,
            r"graph.graphs\[0\] must have 'size' where its name is 'islands': it has name, size\.",
        ),
        (
            [("complete", {"size": 2})] * 2,
            r"graphs\[0\] must not have 'size' where its name is 'complete': it has name\.",
        ),
        ([("random", {"seed": 2})] * 2, r"graphs\[0\] must have 'probability' where its name is"),
    ],
)
def test_mistakes_in_a_graph_that_changes_are_one_line(names, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_experiment(changing(*names))
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_no_group_is_one_line():
    config = changing(("complete", {}))
    with config.unlocked():
        config.parties.graph.graphs = ("complete",)
    message = (
        r"^parties\.graph\.graphs\[0\] must be a graph's name and settings, .* got 'complete'\."
    )
    with pytest.raises(TypeError, match=message):
        build_experiment(config)


def test_a_complete_graph_of_fed_avg_has_no_settings_either():
    config = digits("decentralised_fed_avg")
    with config.unlocked():
        config.parties.graph = dict(name="complete", size=3)
    with pytest.raises(ValueError, match=r"must not have 'size' where its name is 'complete'"):
        build_experiment(config)


def test_images_may_be_made_by_the_preprocessing():
    columns = {"pixels": np.zeros((4, 8, 8, 1), np.uint8), "label": np.zeros(4, np.int32)}
    train = FederatedData.from_arrays(columns, offsets=np.array([0, 2, 4]))
    scale = lambda batch, key, positions: {"image": batch["pixels"][:, 1:] / 255.0}
    data = Data({"train": train}, columns["pixels"], scale, scale, num_classes=10)
    assert image_shape(data) == (7, 8, 1)


def test_fed_md_and_mhd_have_the_same_ten_networks_and_data():
    fed_md = cifar_fed_md_small.get_config("non_iid")
    assert cifar_mhd_fed_md.get_runs() == ["fed_md", "mhd", "local_only_steps", "centralised"]
    same = cifar_mhd_fed_md.get_config("fed_md").to_dict()
    own = {"name": fed_md.name, "run": fed_md.run, "seeds": fed_md.seeds}
    assert {**same, **own} == fed_md.to_dict()
    config = cifar_mhd_fed_md.get_config("mhd")
    assert config.data == fed_md.data and config.seeds == same["seeds"] <= fed_md.seeds
    for (widths, dropout), name in zip(
        fed_md.parties.networks, config.parties.networks, strict=True
    ):
        backbone = BACKBONES[name]()
        assert tuple(backbone.widths) == tuple(w // fed_md.parties.narrower for w in widths)
        assert backbone.dropout == dropout and backbone.classes is None
    assert len(set(config.parties.networks)) == 10


@pytest.mark.parametrize("setting", ["client_optimizer", "epochs", "clip"])
def test_settings_of_training_that_a_graph_does_not_read_are_refused(setting):
    config = digits()
    with config.unlocked():
        config.training[setting] = None
    build_algorithm(config, load_data(config.data))
    with config.ignore_type():
        config.training[setting] = 1
    with pytest.raises(ValueError, match=rf"^training\.{setting} must be left out on a graph"):
        build_algorithm(config, load_data(config.data))


@pytest.mark.slow
def test_mhd_runs_on_the_data_and_networks_of_fed_md():
    """The public images less their own mean, the private ones less theirs."""
    names = ("fed_md_16_32", "fed_md_16_48", "fed_md_16_32", "fed_md_16_48")
    config = digits(parties__networks=names, parties__heads=1, parties__projection=16)
    config.rounds, config.training.steps = 1, 2
    with config.ignore_type():
        config.execution.update(loop="scan", chunk_size=None)
        config.data = dict(name="digits_public_private", num_parties=4, per_class=3, seed=0)
        config.evaluation.update(splits=("test",), final_splits=())
    data = load_data(config.data)
    public, seen = data.public, []

    def noted(batch, key, positions):
        seen.append(batch["image"].shape[0])
        return public.preprocess(batch, key, positions)

    data = data._replace(public=public._replace(preprocess=noted))
    outcome = run_experiment(build_experiment(config, data), show_progress=False)
    assert set(seen) >= {config.algorithm.public_batch_size}
    assert config.training.batch_size not in seen
    last = [record for record in outcome.records if record["split"] == "test"][-1]
    assert np.isfinite(last["loss"]) and len(last["per_label_accuracy"]) == 10


def test_flops_are_counted_from_the_steps():
    forward = 2 * (64 * 32 + 32 * 10)
    examples = {f"digits_small_{c}": 1000.0 for c in range(8)}
    config = digits("local_only_steps").to_dict()
    assert flops_of_parties(config, examples, 40).clients["digits_small_0"] == 3 * forward * 1000
    headed = 2 * (64 * 32 + 4 * 32 * 10)
    public = 40 * 25 * 64
    found = flops_of_parties(digits().to_dict(), examples, 40).clients["digits_small_3"]
    assert found == 3 * headed * 1000 + public * (3 * headed + headed)
    settings = digits("decentralised_periodic_codistillation")
    found = flops_of_parties(settings.to_dict(), examples, 40).clients["digits_small_3"]
    assert 40 // settings.algorithm.period == 6
    taught = 6 * settings.algorithm.examples
    assert found == 3 * forward * 1000 + taught * (1 + 3) * forward
    settings.algorithm.distillation_epochs = 2
    found = flops_of_parties(settings.to_dict(), examples, 40).clients["digits_small_3"]
    assert found == 3 * forward * 1000 + taught * (1 + 2 * 3) * forward


def test_public_examples_are_those_of_the_datas_public_part():
    """Data of one's own may have other unlabelled images, or none."""
    settings = digits("decentralised_periodic_codistillation")
    data = load_data(settings.data)
    expected = build_experiment(settings, data)
    found = build_experiment(settings, data._replace(unlabelled=data.unlabelled[:0]))
    assert found.algorithm.data_set_sizes == expected.algorithm.data_set_sizes


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
    found = tables_heads.read_heads(tmp_path)
    frequencies = label_frequencies(data.splits["train"], 10)
    np.testing.assert_allclose(found.shared[0], accuracies.mean(axis=-1))
    # A callback may have stopped the run before its last round.
    stopped = [line | {"round": 3} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, stopped)))
    with pytest.raises(ValueError, match="has not finished"):
        tables_heads.read_heads(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 3, "finished": True}))
    np.testing.assert_allclose(tables_heads.read_heads(tmp_path).shared, found.shared)
    for client in range(8):
        expected = accuracies[client] @ frequencies[client]
        np.testing.assert_allclose(found.private[0, client], expected)
        np.testing.assert_allclose(
            found.on_others[0, client, :, 5], accuracies[client] @ frequencies[5]
        )
    two_away = np.mean([accuracies[c] @ frequencies[(c + 2) % 8] for c in range(8)], axis=0)
    np.testing.assert_allclose(tables_heads.by_hops(found)[2], two_away)
    text = tables_heads.tables(found)
    assert f"{100 * two_away[1]:.1f}" in text.splitlines()[-1]
    assert len(tables_heads.picture(found).axes) >= 3
    assert (
        f"{100 * found.shared[0, 3, 1]:.1f}" in tables_heads.table_of_clients(found).splitlines()[4]
    )
    # In the form in which a run is recorded.
    recorded = tables_heads.recorded_heads(tmp_path, config.to_dict())
    for name, values in found._asdict().items():
        np.testing.assert_allclose(recorded[name], values, atol=1e-5)
    assert tables_heads.recorded_heads(tmp_path, digits("centralised").to_dict()) is None


def test_runs_without_clients_heads_are_left_out_of_the_tables(tmp_path: Path, capsys):
    """The centralised run's folder, which is beside the others."""
    for run in ("local_only_steps", "centralised"):
        folder = tmp_path / run
        folder.mkdir()
        (folder / "config.json").write_text(digits(run, rounds=4).to_json())
        line = {"round": 4, "split": "test", "seed": 0, "accuracy": 0.5}
        line["per_label_accuracy"] = [0.5] * 10
        models = [f"digits_small_{client}" for client in range(8)]
        lines = [json.dumps(line | {"model": model}) for model in models]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    picture = tmp_path / "heads.png"
    both = [str(tmp_path / run) for run in ("centralised", "local_only_steps")]
    assert tables_heads.main([*both, "--clients", "--picture", str(picture)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "a run of centralised, which has no such" in printed.err
    assert printed.out.count("50.0 / 50.0") == 8 and "local_only_steps" in printed.out
    assert picture.stat().st_size > 1000
    assert tables_heads.main([both[0], str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
    assert set(DECENTRALISED) == set(digits_mhd.get_runs()) - {"centralised"}


@pytest.mark.slow
def test_what_checkpoints_take_is_told_before_a_run_and_refused(tmp_path: Path, monkeypatch):
    command = [sys.executable, "-m", "experiments.main", "--processes=1", f"--workdir={tmp_path}"]
    command += ["--config=fedcodist/configs/digits_mhd.py", "--config.rounds=1"]
    settings = ("training.steps=1", "evaluation.every=1", "evaluation.checkpoint_every=1")
    command += [f"--config.{setting}" for setting in settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = done.stdout.index("checkpoints in the clients' buffers: ")
    assert said < done.stdout.index("run folder: ")
    shared = []
    available = lambda distillation, here: shared.append(here) or 2 * 10**6
    monkeypatch.setattr(graph_methods, "memory_for_checkpoints", available)
    monkeypatch.setattr(graph_methods.launch, "processes_here", lambda: 3)
    notes = build_experiment(digits(seeds=2)).algorithm.notes
    assert len(notes) == 1 and notes[0].endswith(", for each of 2 seeds")
    with pytest.raises(
        ValueError, match=r"checkpoints_per_client: .* may take .* or fewer seeds"
    ) as caught:
        build_experiment(digits(seeds=3))
    assert "\n" not in str(caught.value) and set(shared) == {3}


@pytest.mark.slow
def test_all_methods_are_compared_on_the_same_budget(tmp_path: Path, capfd):
    arguments = ["--config=fedcodist/configs/digits_mhd.py", f"--workdir={tmp_path}"]
    arguments += ["--processes=1", "--config.rounds=4", "--config.training.steps=2"]
    arguments += ["--config.evaluation.every=4", "--config.evaluation.checkpoint_every=4"]
    assert compare.main(arguments) == 0
    output = " ".join(capfd.readouterr().out.split())
    for run in digits_mhd.get_runs():
        assert f"{run}: finished" in output
    entries = {run: read_run(run, load_run(tmp_path / run))[0] for run in digits_mhd.get_runs()}
    # Eight clients, and one centralised model.
    examples = {run: entry.examples for run, entry in entries.items()}
    assert examples.pop("centralised") == 4 * 2 * 32
    assert set(examples.values()) == {8 * 4 * 2 * 32}
    assert entries["local_only_steps"].megabytes == entries["centralised"].megabytes == 0
    assert entries["multi_headed_distillation"].megabytes > 0
    assert "all runs have the same budget of client examples" in output
    # The table has a row for MHD's last head, with the difference to the same baseline.
    assert "all parties, head 3" in output and "head 2" not in output
    main, last = read_run(
        "multi_headed_distillation", load_run(tmp_path / "multi_headed_distillation")
    )[:2]
    assert (main.model, main.head, last.model, last.head) == (
        *["all parties", None],
        "all parties",
        3,
    )
    assert main.values != last.values and main.examples == last.examples
    both = [*entries.values(), last]
    found = ranking.difference(last, both, "local_only_steps")
    assert found.mean == pytest.approx(last.values[0] - entries["local_only_steps"].values[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(parties__networks=("digits_small",) * 3), "must be one name or 8, one per client"),
        (dict(parties__networks="resnet"), "parties.networks must be one of"),
        (dict(data__assignment="odd"), r"data.assignment must be one of \['even', 'random'\]"),
        (dict(data__labels_per_client=0), r"data\.labels_per_client must be at least 1, got 0"),
        (dict(data__public_share=0.4, data__private_share=0.7), "must leave both parts some"),
        (dict(data__public_share=0.9998, data__private_share=0.5), "must leave both parts some"),
        (dict(data__num_clients=1), r"^parties must be at least 2 clients on a graph, got 1"),
        (
            dict(parties__graph=dict(name="ring")),
            r"graph\.name must be .*'time_varying'\], got 'ring'",
        ),
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


def test_centralised_examples_must_not_be_counted_twice():
    config = digits("centralised", data__public_share=1.0, data__private_share=0.8)
    with pytest.raises(
        ValueError, match=r"data.public_share must be below 1 for centralised"
    ) as caught:
        build_experiment(config)
    assert "\n" not in str(caught.value)


def test_public_examples_of_other_classes_are_no_part_of_the_pooled_ones():
    with_public = load_data(digits().data)
    assert len(graph_methods.centralised_examples(with_public)["label"]) == (
        with_public.splits["train"].num_examples + len(with_public.unlabelled)
    )
    settings = ConfigDict(dict(name="digits_public_private", num_parties=4, per_class=3, seed=0))
    apart = load_data(settings)
    assert (
        len(graph_methods.centralised_examples(apart)["label"])
        == apart.splits["train"].num_examples
    )


def test_the_scaled_runs_have_the_spec_s_settings():
    runs = cifar100_mhd.get_runs()
    assert len(set(runs)) == len(runs)
    assert len({sweep.run_folder_name(run) for run in runs}) == len(runs)
    for run in runs:
        config = cifar100_mhd.get_config(run)
        assert config.run == run and config.seeds >= 2
        names = config.parties.networks
        assert isinstance(names, str) or len(names) == config.data.num_clients


def test_settings_are_chosen_on_held_out_images(tmp_path: Path):
    rng = np.random.default_rng(0)
    splits = {
        split: FederatedData.from_arrays(
            {
                "image": rng.integers(0, 256, (20, 32, 32, 3), np.uint8),
                "label": np.tile(np.arange(10), 2),
            },
            offsets=[0, 20],
            client_ids=["all"],
        )
        for split in ("train", "test", "held_out")
    }
    about = {"data_set": "CIFAR-10"}
    save_prepared(tmp_path / "data", splits, source="made up", licence="none", arguments=about)
    config = cifar100_mhd.get_config("heads,s=100,1").data
    config.update(folder=str(tmp_path / "data"), num_clients=2, labels_per_client=3)
    for tested in ("test", "held_out"):
        config.tested = tested
        np.testing.assert_array_equal(
            load_data(config).splits["test"].columns["image"], splits[tested].columns["image"]
        )
    config.tested = "validation"
    with pytest.raises(ValueError, match=r"data\.tested: the folder .* has no split 'validation'"):
        load_data(config)


def test_held_out_images_need_labels_too(tmp_path: Path):
    images = np.zeros((20, 32, 32, 3), np.uint8)
    columns = {"image": images, "label": np.tile(np.arange(10), 2)}
    whole = FederatedData.from_arrays(columns, offsets=[0, 20])
    bare = FederatedData.from_arrays({"image": images}, offsets=[0, 20])
    splits = {"train": whole, "test": whole, "held_out": bare}
    about = {"data_set": "CIFAR-10"}
    save_prepared(tmp_path / "data", splits, source="made up", licence="none", arguments=about)
    config = cifar100_mhd.get_config("heads,s=100,1").data
    config.update(folder=str(tmp_path / "data"), num_clients=2, labels_per_client=3, tested="test")
    with pytest.raises(ValueError, match=r"^data\.folder .*held_out.*'label'"):
        load_data(config)


def test_machines_with_much_memory(monkeypatch):
    monkeypatch.setattr(graph_methods, "memory_for_checkpoints", lambda exchange, sharing: 2**40)
    check_experiment(build_experiment(digits_mhd.get_config()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(public_batch_size=8), 8),
        (dict(distillation_batch_size=4), 4),
        (dict(public_batch_size=8, distillation_batch_size=4), 4),
    ],
)
def test_the_public_batch_size_has_the_name_that_a_methods_argument_gives_it(settings, expected):
    config = ConfigDict(dict(algorithm=settings))
    assert graph_methods.OFFERS["distillation_batch_size"](config, None) == expected
