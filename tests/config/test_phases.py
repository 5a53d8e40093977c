"""FedMD as a config: its phases, stored public training, and the table at the end."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from experiments.configs import cifar_fed_md, cifar_fed_md_small, emnist_fed_md
from fedcodist.algorithms.parties import local_only, party
from fedcodist.algorithms.parties.fed_mrl import OWN
from fedcodist.config import data_parties, phases
from fedcodist.config import party_methods as party_methods
from fedcodist.config.data import load_data
from fedcodist.config.experiment import build_experiment
from fedcodist.config.party_methods import party_groups, party_shapes
from fedcodist.config.registry import ENTRIES, function_of
from fedcodist.configs import digits_fed_md, digits_heterogeneous, digits_parties
from fedcodist.core.joint_model import part_of
from fedcodist.core.local_training import LocalTraining
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import save_prepared
from fedcodist.models.fed_md import TABLE_1, TABLE_2, narrower
from fedcodist.models.headed import check_heads
from fedcodist.report import tables_parties
from fedcodist.run.checkpoint import CheckpointError
from fedcodist.run.experiment import run_experiment
from fedcodist.run.folder_check import RunFolderError

pytestmark = pytest.mark.usefixtures("compile_quickly")

DENSE = (((6,), 0.0),) * 3
PHASES = ("public", "private", "centralised")
# Sums of absolute weights of output layers after two epochs, by party.
TRAINED = {"conv_2_3_dropout_50": 55.28993, "dense_4_1": 14.21610, "dense_4_2": 13.35572}


def small_config(**changes):
    """Three parties with one dense architecture, which compiles quickly."""
    config = digits_fed_md.get_config()
    config.rounds = 2
    config.data.num_parties = 3
    config.algorithm.alignment_size = 30
    with config.ignore_type():
        config.parties.networks = DENSE
    for phase in PHASES:
        config.phases[phase].epochs = 2
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run folder, start, outcome) of the small experiment."""
    folder, config = tmp_path_factory.mktemp("fed_md"), small_config()
    data = load_data(config.data)
    start = phases.run_phases(config, data, folder, show_progress=False)
    experiment = build_experiment(config, data)._replace(start=start)
    outcome = run_experiment(experiment, folder, config.to_dict(), show_progress=False)
    return folder, start, outcome


def final(folder: Path):
    return json.loads((folder / "summary.json").read_text())["final"]


def test_the_first_record_is_the_baseline(finished):
    """The collaboration starts from the models after private training, before any update."""
    folder, _, outcome = finished
    baseline = final(folder / "phases" / "private")
    first = [r for r in outcome.records if r["round"] == 0 and r["split"] == "held_out"]
    assert {r["model"]: r["accuracy"] for r in first} == {
        party: splits["held_out"]["accuracy"][0] for party, splits in baseline.items()
    }
    assert set(baseline) == {"dense_6_0", "dense_6_1", "dense_6_2"}


def test_private_and_pooled_training_start_from_the_public_one(finished):
    folder, _, _ = finished

    def record(phase, round):
        lines = (folder / "phases" / phase / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [r["accuracy"] for r in records if r["round"] == round and r["split"] == "held_out"]

    assert record("private", 0) == record("centralised", 0)
    config = small_config()
    data = load_data(config.data)
    trained = run_experiment(phases.phase_experiment(config, data, "public"), show_progress=False)
    batch = {"image": data.splits["held_out"].columns["image"]}
    batch = data.preprocess(batch, jax.random.key(0), np.arange(len(batch["image"])))
    labels = data.splits["held_out"].columns["label"]
    (group,) = party_groups(config, data).values()
    for index in range(3):
        own = jax.tree.map(lambda leaf: leaf[0], trained.variables[f"dense_6_{index}"])
        predicted = group.model.apply(own, batch)[0].argmax(-1)
        assert record("private", 0)[index] == pytest.approx(np.mean(predicted == labels))
    summaries = {
        phase: json.loads((folder / "phases" / phase / "summary.json").read_text())
        for phase in PHASES
    }
    assert summaries["public"]["algorithm"] == "public training, stopped on held-out public data"
    assert summaries["private"]["algorithm"] == "private training"
    # Held-out public examples are evaluated during training, public test data after it.
    looked_at = set(summaries["public"]["final"]["dense_6_1"]) - {"clients"}
    assert looked_at == {"held_out", "public_test"}


def test_the_table_has_a_line_per_party_and_their_mean(finished, capsys):
    folder, _, outcome = finished
    found = tables_parties.results(folder)
    assert list(found["dense_6_1"]) == ["baseline", "collaboration", "centralised"]
    assert (
        found["dense_6_1"]["collaboration"]
        == outcome.summary["final"]["dense_6_1"]["test"]["accuracy"]
    )
    lines = tables_parties.table(found).splitlines()
    assert lines[0].split() == ["baseline", "collaboration", "centralised"]
    assert len(lines) == 1 + 3 + 1
    mean = 100 * np.mean([each["centralised"] for each in found.values()])
    assert lines[-1].split()[-1] == f"{mean:.1f}"
    capsys.readouterr()
    assert tables_parties.main([str(folder), "--plot", str(folder / "none" / "figure.png")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --plot ") and message.count("\n") == 1


@pytest.mark.parametrize("method", digits_parties.get_runs())
def test_every_method_of_parties_goes_on_from_the_same_models(method):
    config = small_config()
    with config.unlocked(), config.ignore_type():
        whole = digits_parties.get_config(method)
        config.algorithm = whole.algorithm
        config.parties.embedding_width = whole.parties.get("embedding_width")
    data = load_data(config.data)
    groups = party_groups(config, data)
    key = jax.random.key(0)
    models = jax.tree.map(lambda leaf: leaf + 1, party.init_models(groups, key))
    algorithm = build_experiment(config, data).algorithm
    training = LocalTraining(party_methods.party_optimizer(config.algorithm), 8)
    trained = jax.tree.map(lambda leaf: leaf + 2, local_only.start(models, training))
    trained = {n: each._replace(variables=models[n]) for n, each in trained.items()}
    state = party_methods.start(config, data, trained, key)
    fresh = jax.eval_shape(algorithm.init, key)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for name in groups:
        found = algorithm.predictors[name].variables(state)
        if method == "fed_mrl":  # predicts with the shared model besides
            found = part_of(found, OWN)
        jax.tree.map(np.testing.assert_array_equal, found, models[name])
        # The optimizer of private examples continues where it lasts over rounds; the digest's is new.
        lasting = {"local_only": "optimizer_state", "fed_md": "revisit_state"}.get(method)
        if lasting:
            own = getattr(state[name], lasting)
            jax.tree.map(np.testing.assert_array_equal, own, trained[name].optimizer_state)
        if method == "fed_md":
            assert not any(map(np.any, jax.tree.leaves(state[name].digest_state)))


def test_a_finished_run_is_not_run_again(finished, monkeypatch, capsys):
    folder, start, _ = finished
    monkeypatch.setattr("fedcodist.run.training_loop.in_blocks", lambda *_: None)
    config = small_config()
    again = phases.run_phases(config, load_data(config.data), folder)
    jax.tree.map(np.testing.assert_array_equal, again, start)
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [
        "phase 1 of 4: public training",
        "phase 2 of 4: private training",
        "phase 3 of 4: centralised training",
        "phase 4 of 4: fed_md",
    ]
    assert all("training  finished already, " in line for line in lines[1::2])
    assert all(" accuracy: dense_6_0 " in line for line in lines[1::2])


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_phase_goes_on_with_the_same_bits(finished, tmp_path, monkeypatch):
    """Killed before its second epoch is saved; how often it is evaluated changes nothing either."""
    _, expected, _ = finished
    config = small_config(**{"phases.evaluate_every": 1, "phases.centralised_bound": False})
    data, evaluated = load_data(config.data), []

    def watch(records):
        evaluated.append(records[0]["round"])
        if evaluated == [0, 1, 2]:
            raise Killed

    def watched(experiment, folder, **options):
        callbacks = [watch] if folder.name == "private" else []
        return run_experiment(experiment, folder, callbacks=callbacks, **options)

    monkeypatch.setattr(phases, "run_experiment", watched)
    with pytest.raises(Killed):
        phases.run_phases(config, data, tmp_path, show_progress=False)
    assert not (tmp_path / "phases" / "private" / "summary.json").exists()
    found = phases.run_phases(config, data, tmp_path, show_progress=False)
    assert evaluated == [0, 1, 2, 2]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "stopping, phase",
    [
        ("held_out", "public"),
        *(
            pytest.param("held_out", phase, marks=pytest.mark.slow)
            for phase in ("private", "centralised")
        ),
        *(pytest.param("fixed", phase, marks=pytest.mark.slow) for phase in PHASES),
        *(pytest.param("test_data", phase, marks=pytest.mark.slow) for phase in PHASES),
    ],
)
def test_test_data_are_looked_at_only_where_the_name_says_so(stopping, phase):
    """With other test images, weights are the same to the last bit, unless phases stop on them."""
    config = small_config(
        **{
            "phases.stopping": stopping,
            "algorithm.learning_rate": 3e-2,
            f"phases.{phase}.epochs": 6,
            f"phases.{phase}.patience": 1,
        }
    )
    data, other = load_data(config.data), load_data(config.data)
    for split in (other.splits["test"], other.public.test):
        # Labels no longer belong to their images.
        split.columns["image"][:] = split.columns["image"][::-1].copy()
    groups = party_groups(config, data)
    start = None
    if phase != "public":
        seeds = np.zeros(1, np.uint32)
        init = lambda seed: party.init_models(groups, jax.random.key(seed))
        start = jax.tree.map(np.asarray, jax.vmap(init)(seeds))
    ours, theirs = (
        run_experiment(phases.phase_experiment(config, each, phase, start), show_progress=False)
        for each in (data, other)
    )
    assert ours.records != theirs.records
    leaves = [jax.tree.leaves(outcome.variables) for outcome in (ours, theirs)]
    same = all(np.array_equal(*pair) for pair in zip(*leaves, strict=True))
    assert same == (stopping != "test_data")


@pytest.mark.slow
def test_streamed_examples_give_the_same(finished):
    _, start, outcome = finished
    config = small_config(**{"execution.stream": True})
    streamed = run_experiment(build_experiment(config)._replace(start=start), show_progress=False)
    for ours, theirs in zip(streamed.records, outcome.records, strict=True):
        assert ours["model"] == theirs["model"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


# ------------------------------------------------------------------- stored public training


def kept(config, models):
    """The result of `_cached`, and how often it trained."""
    data, calls = load_data(config.data), []
    groups, key = party_groups(config, data), phases._pretraining_key(config, data)
    found = phases._cached(config, groups, key, lambda: calls.append(1) or models)
    return found, len(calls)


@pytest.fixture
def config_and_models(tmp_path):
    config = small_config(**{"phases.cache": str(tmp_path / "kept")})
    groups = party_groups(config, load_data(config.data))
    models = jax.vmap(lambda seed: party.init_models(groups, jax.random.key(seed)))(
        np.zeros(1, np.uint32)
    )
    return config, jax.tree.map(np.asarray, models)


def test_public_training_is_kept_for_other_runs(config_and_models):
    config, models = config_and_models
    for trains in (1, 0):
        found, calls = kept(config, models)
        assert calls == trains
        jax.tree.map(np.testing.assert_array_equal, found, models)
    config.rounds, config.algorithm.revisit_epochs, config.phases.private.epochs = 9, 9, 9
    assert kept(config, models)[1] == 0


@pytest.mark.parametrize(
    "setting, value",
    [
        ("seed", 1),
        ("algorithm.learning_rate", 1e-2),
        ("algorithm.output_penalty", 0.0),
        ("phases.public.epochs", 3),
        ("phases.stopping", "fixed"),
        ("phases.held_out_share", 0.2),
        ("data.seed", 1),
        ("parties.narrower", 2),
    ],
)
def test_what_determines_it_is_part_of_the_name(setting, value):
    config, other = small_config(), small_config(**{setting: value})
    data = load_data(config.data)
    assert phases._pretraining_key(config, data) != phases._pretraining_key(other, data)


def test_what_is_kept_would_be_trained_again(tmp_path):
    """If the same settings give other results, phases._CACHE_VERSION must be raised."""
    config = small_config(**{"phases.cache": None, "phases.stopping": "fixed"})
    with config.ignore_type():
        config.parties.networks = (((2, 3), 0.5), ((4,), 0.0), ((4,), 0.0))
    experiment = phases.phase_experiment(config, load_data(config.data), "public")
    models = run_experiment(experiment, tmp_path, {}, show_progress=False).variables
    sums = {
        party: float(np.abs(own.params["output"]["kernel"]).sum()) for party, own in models.items()
    }
    assert (sums, phases._CACHE_VERSION) == (pytest.approx(TRAINED, rel=1e-3), 3)


def test_both_cifar_experiments_share_it():
    """The runs differ in private images, rounds and batches, but not in public training."""
    kept = lambda config: phases._pretraining_key(config, load_data(small_config().data))
    runs = ("non_iid", "iid", "non_iid,alone", "public_images,50")
    assert len({kept(cifar_fed_md_small.get_config(run)) for run in runs}) == 1
    assert len({kept(cifar_fed_md.get_config(run)) for run in ("non_iid", "iid")}) == 1


def test_so_is_preprocessing_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "halving.py").write_text(
        "def half(batch, key, positions):\n    return {**batch, 'image': batch['image'] / 2}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config, other = small_config(), small_config()
    data = load_data(config.data)
    with other.data.unlocked(), other.data.ignore_type():
        other.data.preprocess = "halving:half"
    assert phases._pretraining_key(config, data) != phases._pretraining_key(other, data)
    other = small_config()
    with other.data.unlocked():
        other.data.mean = (0.4,)
    assert phases._pretraining_key(config, data) != phases._pretraining_key(other, data)


def test_so_is_the_normalisation_that_a_manifest_names(tmp_path):
    config = small_config()
    data = load_data(config.data)
    kept = {}
    for folder, mean in (("one", 0.5), ("copy", 0.5), ("other", 0.4)):
        arguments = {"mean": [mean], "deviation": [0.25]}
        splits = {"train": data.splits["train"]}
        about = dict(source="digits", licence="none", arguments=arguments)
        save_prepared(tmp_path / folder, splits, **about)
        with config.data.unlocked():
            config.data.update(name="prepared_primary", folder=str(tmp_path / folder))
        kept[folder] = phases._pretraining_key(config, data)
    assert kept["one"] == kept["copy"] != kept["other"]


def test_phases_are_evaluated_on_images_as_the_collaboration_is(tmp_path, monkeypatch):
    """Not on augmented ones, which training reads."""
    (tmp_path / "reads.py").write_text(
        "def augmented(batch, key, positions): return {**batch, 'image': batch['image'] * 2}\n"
        "def plain(batch, key, positions): return {**batch, 'image': batch['image'] * 3}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config()
    with config.unlocked():
        config.data.update(preprocess="reads:augmented", evaluation_preprocess="reads:plain")
    data = load_data(config.data)
    for phase in PHASES:
        experiment = phases.phase_experiment(config, data, phase)
        assert experiment.evaluation_preprocess.__name__ == "plain"


def test_evaluation_may_read_images_in_its_own_way_and_training_as_before(tmp_path, monkeypatch):
    (tmp_path / "reads_plain.py").write_text("def plain(batch, key, positions): return batch\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config()
    with config.unlocked():
        config.data.evaluation_preprocess = "reads_plain:plain"
    public = load_data(config.data).public
    assert public.evaluation_preprocess.__name__ == "plain"
    assert public.preprocess.__name__ != "plain"


def test_a_network_needs_a_layer_of_a_certain_name_for_a_penalty_alone(tmp_path, monkeypatch):
    (tmp_path / "of_one_dense.py").write_text(
        "import flax.linen as nn\n"
        "class Network(nn.Module):\n"
        "    num_classes: int\n"
        "    @nn.compact\n"
        "    def __call__(self, x): return nn.Dense(self.num_classes)(x.reshape(len(x), -1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config()
    with config.ignore_type():
        config.parties.networks = ("of_one_dense:Network",) * 3
    config.algorithm.output_penalty = 0.0
    data = load_data(config.data)
    phases.phase_experiment(config, data, "private")
    config.algorithm.output_penalty = 1e-3
    with pytest.raises(
        ValueError, match=r"algorithm\.output_penalty\) must be 0 for a network without"
    ):
        phases.phase_experiment(config, data, "private")


def test_so_are_the_images():
    config = small_config()
    data, other = load_data(config.data), load_data(config.data)
    other.public.train.columns["image"][0, 0, 0, 0] += 1
    assert phases._pretraining_key(config, data) != phases._pretraining_key(config, other)


@pytest.mark.slow
def test_later_phases_go_on_from_no_other_models(config_and_models, tmp_path, monkeypatch):
    """Refused before anything is trained, though the public phase has no folder here."""
    config, models = config_and_models
    kept(config, models)
    data = load_data(config.data)
    phases.run_phases(config, data, tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run" / "phases" / "public").exists()
    monkeypatch.setattr(phases, "run_experiment", lambda *_, **__: pytest.fail("trained"))
    config.phases.public.epochs += 1
    with pytest.raises(RunFolderError, match=r"went on from other public training.*--workdir\.$"):
        phases.run_phases(config, data, tmp_path / "run", show_progress=False)


def test_pooled_training_is_on_all_private_examples():
    config = small_config()
    data = load_data(config.data)
    experiment = phases.phase_experiment(config, data, "centralised")
    for name, column in data.splits["train"].columns.items():
        np.testing.assert_array_equal(experiment.data.data_sets[local_only.SHARED][name], column)


def test_an_edited_optimizer_of_ones_own_is_not_the_cached_one(monkeypatch):
    config = small_config()
    config.algorithm.optimizer = f"{__name__}:slow"
    before = phases._determinants(config, "public")
    monkeypatch.setitem(globals(), "slow", lambda rate: optax.sgd(0.2 * rate))
    assert phases._determinants(config, "public") != before


def slow(rate):
    return optax.sgd(0.1 * rate)


def test_a_corrupt_file_is_made_again(config_and_models, capsys):
    config, models = config_and_models
    kept(config, models)
    (path,) = Path(config.phases.cache).glob("*/*.msgpack")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert kept(config, models)[1] == 1
    message = capsys.readouterr().err.strip()
    assert "corrupt" in message and "\n" not in message
    assert kept(config, models)[1] == 0


def test_a_folder_that_cannot_be_written(config_and_models, tmp_path):
    """The error comes before anything is trained."""
    config, _ = config_and_models
    (tmp_path / "kept").write_text("a file")
    data = load_data(config.data)
    with pytest.raises(CheckpointError, match="cannot write"):
        phases._cached(config, party_groups(config, data), "key", lambda: pytest.fail("trained"))


# --------------------------------------------------------------------------------- configs


def test_networks_that_differ_little_have_names_of_their_own():
    rates = (0.2, 0.201, 0.25)
    config = small_config()
    with config.ignore_type():
        config.parties.networks = tuple(((2, 3), rate) for rate in rates)
    groups = party_groups(config, load_data(config.data))
    assert {name: group.clients.tolist() for name, group in groups.items()} == {
        "conv_2_3_dropout_20": [0],
        "conv_2_3_dropout_20.1": [1],
        "conv_2_3_dropout_25": [2],
    }


def test_party_i_has_network_i():
    config = digits_fed_md.get_config()
    data = load_data(config.data)
    groups = party_groups(config, data)
    assert {name: group.clients.tolist() for name, group in groups.items()} == {
        "conv_8_16_dropout_10": [0, 3],
        "dense_64": [1, 4],
        "dense_32": [2, 5],
    }


@pytest.mark.parametrize("run", cifar_fed_md.get_runs())
def test_cifar_has_the_papers_networks(run):
    config = cifar_fed_md.get_config(run)
    shapes = party_shapes(config)
    divisor = 4 if "scaled" in run else 2 if "half" in run else 1
    assert shapes == narrower(TABLE_2 if "table_2" in run else TABLE_1, divisor)
    assert len(shapes) == 10


@pytest.mark.parametrize(
    "config, run, settings",
    [
        # Rounds; epochs and batch of the digest, of the revisit; private images (spec 2.1).
        (cifar_fed_md, "non_iid", (13, 1, 128, 10, 10, None)),
        (cifar_fed_md, "iid", (20, 1, 256, 4, 5, None)),
        (emnist_fed_md, "iid", (20, 1, 256, 2, 5, 3)),
        (emnist_fed_md, "non_iid", (20, 1, 256, 4, 5, 3)),
    ],
)
def test_settings_are_the_released_codes(config, run, settings):
    found = config.get_config(run)
    own = found.algorithm
    epochs_and_batches = (
        *(own.digest_epochs, own.digest_batch_size),
        *(own.revisit_epochs, own.revisit_batch_size),
    )
    assert (found.rounds, *epochs_and_batches, found.data.per_class) == settings
    assert (own.alignment_size, own.learning_rate, own.epsilon) == (5000, 1e-3, 1e-7)
    assert own.output_penalty == 1e-3
    phase = lambda one: (one.epochs, one.batch_size, one.patience)
    assert phase(found.phases.public) == (20, 128, 3)
    assert phase(found.phases.private) == (25, 32, 10)
    assert phase(found.phases.centralised) == (50, 32, 10)
    min_delta = 0.005 if config is cifar_fed_md else 0.001
    assert found.phases.public.min_delta == min_delta
    assert found.phases.private.min_delta == found.phases.centralised.min_delta == 0.001


def test_small_runs_have_the_papers_shapes():
    assert tuple(shape.widths for shape in TABLE_1) == cifar_fed_md_small.WIDTHS


def save_in_both(folder, split):
    """Prepares a folder that has the same examples for training and test."""
    splits = {"train": split, "test": split}
    save_prepared(folder, splits, source="made up", licence="none", arguments={})


@pytest.mark.parametrize("run", emnist_fed_md.get_runs())
def test_letters_are_read_from_prepared_folders(run, tmp_path):
    """Ten parties with the ten networks; public digits and private letters have 16 outputs."""
    config = emnist_fed_md.get_config(run)
    for name, rows in (("mnist", 60), ("emnist", 480)):
        labels = np.arange(rows, dtype=np.int32) % (10 if name == "mnist" else 8)
        columns = {"image": np.zeros((rows, 28, 28, 1), np.uint8), "label": labels}
        split = FederatedData.from_arrays(columns, offsets=np.arange(0, rows + 1, 30))
        save_in_both(tmp_path / name, split)
    config.data.update(public_folder=str(tmp_path / "mnist"), folder=str(tmp_path / "emnist"))
    config.algorithm.alignment_size = 30
    experiment = build_experiment(config)
    assert experiment.algorithm.num_clients == 10
    assert {p.model.num_classes for p in experiment.algorithm.predictors.values()} == {16}
    assert len(experiment.algorithm.communication) == 10


def test_an_image_of_two_parties_is_not_one_of_their_tests(tmp_path):
    config = cifar_fed_md.get_config("non_iid")
    for name, classes in (("public_folder", 10), ("folder", 100)):
        labels = np.repeat(np.arange(classes, dtype=np.int32), 6)
        image = np.zeros((len(labels), 4, 4, 3), np.uint8)
        columns = {"image": image, "label": labels, "coarse_label": labels % 20}
        split = FederatedData.from_arrays(columns, offsets=[0, len(labels)])
        config.data[name] = str(tmp_path / name)
        save_in_both(tmp_path / name, split)
    with config.unlocked():
        config.data.update(num_parties=6, per_class=3, client_test_share=0.25)
    with pytest.raises(ValueError, match=r"^data\.client_test_share must be None with [^\n]*$"):
        load_data(config.data)
    config.data.num_parties = 5
    assert load_data(config.data).client_splits["client_test"].test.num_clients == 5
    config.data.update(num_parties=2, iid=True)
    assert load_data(config.data).client_splits["client_test"].test.num_clients == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data.num_parties": 4}, r"parties.networks must be 4, one per party .* got 3"),
        (
            {"data.client_test_share": 0.25, "data.unseen_clients": 1},
            r"^data\.unseen_clients must be None where parties\.networks has one network per party: 3 ",
        ),
        ({"parties.narrower": 0}, "parties.narrower must be at least 1"),
        (
            {"parties.narrower": 100},
            r"^parties\.narrower: divisor must be at most \d+, the features",
        ),
        (
            {"parties.networks": (((6,), 0.3), ((6,), 0.0), ((6,), 0.0))},
            r"parties.networks must have dropout 0 for fully connected .* got \(\(6,\), 0.3\)",
        ),
        (
            {"algorithm.alignment_size": 5000},
            "algorithm.alignment_size must be at most the 758 public examples",
        ),
        ({"algorithm.output_penalty": -1.0}, "algorithm.output_penalty must be"),
        ({"algorithm.digest_epochs": -1}, "algorithm.digest_epochs must be at least 0"),
        ({"algorithm.weights": (0.0, 0.0, 0.0)}, "algorithm.weights must be .* not all 0"),
        ({"data.name": "digits_public"}, "data.name must be one of .*'digits_public'"),
        ({"data.held_out_share": 0.0005}, "^data.held_out_share must leave images"),
    ],
)
def test_bad_settings_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(small_config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"phases.stopping": "early"}, "phases.stopping must be one of"),
        ({"phases.held_out_share": 0.0}, "phases.held_out_share must leave examples"),
        ({"phases.public.epochs": 0}, "phases.public.epochs must be at least 1"),
        (
            {"phases.public.batch_size": 0},
            "phases.public: training.batch_size must be at least 1",
        ),
        ({"phases.public.patience": 0}, "phases.public: patience.patience must be at least 1"),
    ],
)
def test_bad_phases_are_one_line(changes, message):
    config = small_config(**changes)
    with pytest.raises(ValueError, match=message):
        phases.phase_experiment(config, load_data(config.data), "public")


def test_phases_need_a_split_to_evaluate():
    config = small_config()
    data = load_data(config.data)
    without = {name: split for name, split in data.splits.items() if name != "test"}
    message = r"^data must have a split 'test' for phases, got \['held_out', 'train'\]"
    with pytest.raises(ValueError, match=message):
        phases.phase_experiment(config, data._replace(splits=without), "private")


def test_phases_have_the_configs_metrics():
    config = small_config()
    config.metrics = dict(macro_f1="macro_f_score")
    experiment = phases.phase_experiment(config, load_data(config.data), "private")
    for predictor in experiment.algorithm.predictors.values():
        assert "macro_f1" in predictor.model.metrics


def test_fed_gens_generator_has_an_optimizer_of_its_own():
    """Adam, as in its paper's code, also where the parties have plain SGD."""
    config = digits_heterogeneous.get_config("fed_gen")
    assert config.algorithm.optimizer == "sgd"
    data = load_data(config.data)
    key = jax.random.key(0)
    adam = jax.eval_shape(build_experiment(config, data).algorithm.init, key).optimizer_state
    config.algorithm.generator_optimizer = "sgd"
    sgd = jax.eval_shape(build_experiment(config, data).algorithm.init, key).optimizer_state
    assert len(jax.tree.leaves(adam)) > len(jax.tree.leaves(sgd)) == 0


def test_faithful_early_stopping_is_in_the_names():
    config = small_config(**{"phases.stopping": "test_data"})
    data = load_data(config.data)
    assert build_experiment(config, data).algorithm.name == "fed_md, phases stopped on test data"
    for phase in PHASES:
        name = phases.phase_experiment(config, data, phase).algorithm.name
        assert name == f"{phase} training, stopped on test data"


def test_labels_outside_the_joint_space_are_one_line(monkeypatch):
    """Data with a party whose public classes differ."""
    known = data_parties.PUBLIC_PRIVATE["digits_public_private"]

    def others(settings):
        found = known(settings)
        found.public.columns["label"][3] = 7
        return found

    monkeypatch.setitem(data_parties.PUBLIC_PRIVATE, "digits_public_private", others)
    with pytest.raises(ValueError, match="public labels must be 0 to 5 of the joint label space"):
        build_experiment(small_config())


def test_a_public_class_is_no_answer_to_a_private_image():
    config = small_config()
    data = load_data(config.data)
    (group,) = party_groups(config, data).values()
    private = data.public.num_classes - 1
    logits = np.zeros((3, data.public.num_classes), np.float32)
    logits[:, private] = 1.0
    logits[1, 0] = 2.0  # the true class is still the best of the private ones
    batch = {"label": np.full(3, private)}
    correct, _ = group.model.metrics["accuracy"](logits, batch)
    assert correct.tolist() == [1, 0, 1]


def test_other_data_have_no_public_part():
    config = small_config()
    config.data = dict(name="digits", num_clients=3, concentration=1.0, seed=0)
    with pytest.raises(ValueError, match="for methods that need public examples"):
        build_experiment(config)


def test_batches_do_not_depend_on_early_stopping(monkeypatch):
    """Training alone draws batches by its name, which does not depend on how phases were stopped."""
    given = []
    entry = ENTRIES["local_only"]
    real = function_of(entry)

    @functools.wraps(real)
    def noted(**arguments):
        given.append(arguments["name"])
        return real(**arguments)

    monkeypatch.setitem(ENTRIES, "local_only", entry._replace(make=noted))
    config = small_config(**{"phases.stopping": "test_data"})
    config.algorithm = digits_parties.get_config("local_only").algorithm
    named = build_experiment(config, load_data(config.data)).algorithm
    assert named.name == "local_only, phases stopped on test data"
    assert given == ["local_only"]


def test_named_networks_get_a_head_of_one_width():
    config = digits_fed_md.get_config()
    config.parties.embedding_width = 12
    data = load_data(config.data)
    models = {name: group.model for name, group in party_groups(config, data).items()}
    assert check_heads("groups", models) == (12, 10)
