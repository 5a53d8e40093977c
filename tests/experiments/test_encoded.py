"""Sentences and news from configs: how data are dealt, networks and their FLOPs, mistakes, a run."""

import jax
import numpy as np
import pytest

from experiments import flops
from experiments.assembly import build_experiment
from experiments.configs import ade_fed_kd
from experiments.data import load_data
from experiments.encoded import ENCODERS
from fedcodist.bert_weights import save_encoder
from fedcodist.data import load_prepared
from fedcodist.experiment import check_experiment
from fedcodist.model import parameter_count
from fedcodist.models.bert import Encoder
from tests.data import test_ade, test_mind
from tests.datasets.test_prepare import program

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """60 documents of three sentences, a third of them with an effect."""
    folder = tmp_path_factory.mktemp("ade")
    documents = range(100, 160)
    drugs = [test_ade.relation(n, f"Patient {n} had a rash after aspirin.") for n in documents]
    others = [
        test_ade.negative(n, f"Patient {n} {what}.")
        for n in documents
        for what in ("recovered at home", "was admitted for observation")
    ]
    source = test_ade.corpus(folder / "source", drugs, others)
    arguments = ["--source", str(source), "--output", str(folder / "ade")]
    assert program("ade").main([*arguments, "--pieces=80", "--length=12"]) == 0
    return str(folder / "ade")


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    """30 users of two impressions, of which one has two clicks."""
    folder = tmp_path_factory.mktemp("mind")
    lines = [
        test_mind.behavior(0, f"U{user}", "N1 N2", shown)
        for user in range(30)
        for shown in ("N3-0 N4-1 N5-0", "N1-1 N2-1 N6-0")
    ]
    source = test_mind.layout(folder / "source", behaviors=lines)
    arguments = ["--source", str(source), "--output", str(folder / "mind")]
    assert program("mind").main([*arguments, "--pieces=40", "--length=6"]) == 0
    return str(folder / "mind")


def config_of(folder, run="fed_kd", name="prepared_sentences"):
    config = ade_fed_kd.get_config(run)
    config.data.update(name=name, folder=folder, num_clients=3)
    config.pools.main.update(model="bert_tiny_1", cohort_size=3)
    if "fed_kd" in config.training:
        config.training.fed_kd.teacher = "bert_tiny_2"
    config.training.batch_size = 16
    return config


def test_sentences_are_dealt_equally(sentences):
    data = load_data(config_of(sentences).data)
    assert data.splits["train"].client_sizes.tolist() == [48, 48, 48]
    assert data.splits["test"].num_clients == 1 and data.splits["test"].num_examples == 18
    rows = data.splits["train"].columns["tokens"]
    assert len(np.unique(rows, axis=0)) == len(rows)
    again = load_data(config_of(sentences).data).splits["train"].columns["tokens"]
    np.testing.assert_array_equal(rows, again)


def test_readers_are_dealt_whole(news):
    data = load_data(config_of(news, name="prepared_news").data)
    assert data.splits["train"].client_sizes.tolist() == [24, 24, 24]
    assert data.splits["test"].num_examples == 6
    columns = {name: column[:2] for name, column in data.splits["train"].columns.items()}
    batch = data.preprocess(columns, jax.random.key(0), np.arange(2))
    assert batch["candidates"].shape == (2, 5, 6) and batch["history"].shape == (2, 50, 6)


@pytest.mark.slow
@pytest.mark.parametrize("run", ade_fed_kd.get_runs())
def test_every_run_is_built(sentences, run):
    config = ade_fed_kd.get_config(run)
    config.data.folder = sentences
    experiment = build_experiment(config)
    check_experiment(experiment)
    own = list(experiment.algorithm.kept_models["main"])
    assert own == (["main_teachers"] if run.startswith(("fed_kd", "fml")) else [])
    for predictor in experiment.algorithm.predictors.values():
        assert set(predictor.model.metrics) == {"accuracy", "precision", "recall", "f_score"}


def test_sizes_are_what_the_config_says(sentences):
    config = ade_fed_kd.get_config("fed_avg,teacher")
    config.data.folder = sentences
    data = load_data(config.data)
    missing = 8_005 - load_prepared(sentences)["vocabulary"].num_examples  # of the real corpus
    sizes = {
        name: missing * 128
        + parameter_count(jax.eval_shape(data.models[name]().init, jax.random.key(0)).params)
        for name in (ade_fed_kd.TEACHER, ade_fed_kd.STUDENT)
    }
    assert list(sizes.values()) == [1_910_034, 1_513_490]
    for size in sizes.values():
        assert f"{size:,}" in ade_fed_kd.__doc__
    sketch = ade_fed_kd.get_config("fetch_sgd")
    table, rounds = sketch.training.fetch_sgd, sketch.rounds / config.rounds
    sent = rounds * (table.rows * table.columns + 2 * table.count)
    assert sent / (2 * sizes[ade_fed_kd.TEACHER]) == pytest.approx(0.249, abs=0.002)


def test_flops_are_those_of_an_encoder(sentences):
    """By hand: 12 tokens, width 128; products with weights, and of attention with queries and values."""
    of_layer = 12 * 2 * 12 * 128**2 + 2 * 2 * 12 * 12 * 128
    head = 12 * 2 * 128 * 200 + 12 * 2 * 200 + 12 * 2 * 128 + 2 * 128 * 2
    for run, forward in (("fed_avg,student", of_layer + head), ("fed_kd", 3 * of_layer + 2 * head)):
        config = config_of(sentences, run).to_dict()
        counted = flops.flops_of_run(config, {"main": 10.0}).clients["main"]
        assert counted == flops.LEARNING * 10 * forward


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("pools.main.model", "digits_small", r"pools\.main\.model must be one of .*'bert_tiny_1'"),
        ("training.fed_kd.teacher", "bert", r"training\.fed_kd\.teacher must be one of .*'bert_b"),
        ("data.num_clients", 0, r"data\.num_clients must be an integer in 1\.\.144, .*got 0"),
        ("data.num_clients", 145, r"data\.num_clients must be an integer in 1\.\.144, .*got 145"),
    ],
)
def test_mistakes_are_one_line(sentences, setting, value, message):
    config = config_of(sentences)
    config.update_from_flattened_dict({setting: value})
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def pretrained(sentences, tmp_path_factory):
    """A file of three layers with 20 positions, as `pretrain_encoder` writes it, and its parameters."""
    encoder = Encoder(pieces(sentences), width=128, layers=3, heads=2, positions=20)
    params = encoder.init(jax.random.key(7), np.zeros((1, 2), np.int32))["params"]
    file = tmp_path_factory.mktemp("encoder") / "encoder.safetensors"
    save_encoder(file, params, {"heads": "2"})
    return str(file), params


def pieces(folder):
    return load_prepared(folder)["vocabulary"].num_examples


@pytest.mark.slow
def test_teacher_and_student_start_from_the_files_first_layers(sentences, pretrained):
    file, params = pretrained
    config = config_of(sentences)
    config.data.encoder = file
    algorithm = build_experiment(config).algorithm
    state = algorithm.init(jax.random.key(3))
    student = algorithm.predictors["main"].variables(state).params["encoder"]
    kept = algorithm.kept_models["main"]["main_teachers"]
    row = jax.tree.map(np.asarray, algorithm.rows["main"].first)
    teacher = kept.variables(state, row).params["encoder"]
    for found, layers in ((teacher, 2), (student, 1)):
        assert sorted(found) == ["embeddings", *(f"layer{layer}" for layer in range(layers))]
        jax.tree.map(np.testing.assert_array_equal, found, {name: params[name] for name in found})
    # What is no encoder is drawn, of one draw whatever the file.
    drawn = build_experiment(config_of(sentences)).algorithm
    other = drawn.predictors["main"].variables(drawn.init(jax.random.key(3))).params
    own = algorithm.predictors["main"].variables(state).params
    for part in ("pooling", "classes"):
        jax.tree.map(np.testing.assert_array_equal, own[part], other[part])


def test_every_method_starts_from_the_file(sentences, news, pretrained):
    file, params = pretrained
    config = config_of(sentences, "fed_avg,teacher")
    config.data.encoder = file
    model = load_data(config.data).models["bert_tiny_2"]()
    own = model.init(jax.random.key(0)).params["encoder"]
    np.testing.assert_array_equal(own["layer1"]["query"]["bias"], params["layer1"]["query"]["bias"])
    config = config_of(news, name="prepared_news")
    config.data.encoder = file
    with pytest.raises(ValueError, match=r"^data\.encoder: .*word_embeddings\.weight must be \["):
        load_data(config.data).models["bert_tiny_2"]()  # another vocabulary


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("bert_tiny_1", "nowhere", r"data\.encoder: cannot read an encoder from nowhere: .*\.$"),
        ("bert_tiny_4", None, r"data\.encoder: .* has no tensor encoder\.layer\.3\."),
        ("bert_mini_1", None, r"data\.encoder: .* is of an encoder of 2 heads, got one of 4\.$"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(sentences, pretrained, model, file, message):
    config = config_of(sentences)
    config.data.encoder = file or pretrained[0]
    config.training.fed_kd.teacher = model
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_folders_of_other_data_are_one_line(sentences):
    with pytest.raises(ValueError, match=r"data\.folder .* has no split 'news'"):
        load_data(config_of(sentences, name="prepared_news").data)


def test_every_encoder_is_a_network_of_both_data():
    for name, encoder in ENCODERS.items():
        assert str(encoder(50).layers) == name.rsplit("_", 1)[1]
