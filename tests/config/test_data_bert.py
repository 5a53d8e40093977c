"""Sentences and news from configs: the deal to clients, networks and their FLOPs, bad input, a run."""

import jax
import numpy as np
import pytest
from changed_splits import change_split

from experiments.configs import ade_fed_kd, mind_fed_kd
from fedcodist.config import data_bert
from fedcodist.config.data import load_data
from fedcodist.config.data_bert import ENCODERS
from fedcodist.config.data_prepared import data_checksums
from fedcodist.config.experiment import build_experiment
from fedcodist.config.passes import LEARNING
from fedcodist.core.trees import named_leaves, parameter_count
from fedcodist.data import load_prepared
from fedcodist.report import flops
from fedcodist.report.entries import read_run
from fedcodist.report.runs import load_run
from fedcodist.run.experiment import check_experiment, run_experiment
from fedcodist.text.bert import Encoder
from fedcodist.text.bert_weights import VOCABULARY, save_encoder, vocabulary_checksum
from fedcodist.text.encoder_start import first_layers
from fedcodist.text.encoder_units import narrowed
from tests.datasets import test_ade, test_mind
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
    config.data.update(
        name=name, folder=folder, num_clients=3, frozen_tables=False, positive_copies=1
    )
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


def test_positive_sentences_are_shown_several_times_to_the_client_that_has_them(sentences):
    config = config_of(sentences)
    once, thrice = [], []
    for copies, dealt in ((1, once), (3, thrice)):
        config.data.positive_copies = copies
        train = load_data(config.data).splits["train"]
        for client in range(3):
            rows = slice(*train.offsets[client : client + 2])
            columns = (train.columns["tokens"][rows], train.columns["label"][rows])
            dealt.append(
                sorted((*map(int, t), int(label)) for t, label in zip(*columns, strict=True))
            )
    for own, repeated in zip(once, thrice, strict=True):
        assert sorted(row for row in own for _ in range(3 if row[-1] else 1)) == repeated
    assert any(row[-1] for row in once[0])


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(
    "changed",
    [lambda label: label[:, None], lambda label: np.eye(2)[label]],
    ids=["[n, 1]", "one-hot"],
)
def test_labels_of_another_form_are_dealt_as_whole_numbers_are(
    sentences, monkeypatch, changed, copies
):
    config = config_of(sentences)
    config.data.positive_copies = copies
    whole = load_data(config.data).splits["train"]
    change_split(
        monkeypatch,
        data_bert,
        "train",
        lambda columns: {**columns, "label": changed(columns["label"])},
    )
    found = load_data(config.data).splits["train"]
    np.testing.assert_array_equal(found.client_sizes, whole.client_sizes)
    np.testing.assert_array_equal(found.columns["tokens"], whole.columns["tokens"])
    np.testing.assert_array_equal(found.columns["label"], changed(whole.columns["label"]))


def test_only_sentences_of_two_classes_are_shown_several_times(sentences, news, monkeypatch):
    config = config_of(news, name="prepared_news")
    config.data.positive_copies = 2
    with pytest.raises(ValueError, match=r"^data\.positive_copies must be 1 for news, got 2\.$"):
        load_data(config.data)
    monkeypatch.setattr(data_bert, "number_of_classes", lambda *_: 3)
    config.data.update(name="prepared_sentences", folder=sentences)
    message = r"^data\.positive_copies must be 1 for 3 classes, got 2\.$"
    with pytest.raises(ValueError, match=message):
        load_data(config.data)


@pytest.mark.slow
def test_readers_are_dealt_whole(news):
    data = load_data(config_of(news, name="prepared_news").data)
    assert data.splits["train"].client_sizes.tolist() == [24, 24, 24]
    assert data.splits["test"].num_examples == 6
    columns = {name: column[:2] for name, column in data.splits["train"].columns.items()}
    batch = data.preprocess(columns, jax.random.key(0), np.arange(2))
    assert batch["candidates"].shape == (2, 5, 6) and batch["history"].shape == (2, 50, 6)


@pytest.mark.slow
@pytest.mark.parametrize("run", ade_fed_kd.get_runs())
def test_every_run_is_built(sentences, pretrained, run):
    config = ade_fed_kd.get_config(run)
    config.data.update(folder=sentences, encoder=pretrained[0])
    experiment = build_experiment(config)
    check_experiment(experiment)
    own = list(experiment.algorithm.personal_models["main"])
    assert own == (["main_teachers"] if run.startswith(("fed_kd", "fml", "centralised")) else [])
    for predictor in experiment.algorithm.predictors.values():
        expected = {"accuracy", "precision", "recall", "f_score", "average_precision"}
        assert set(predictor.model.metrics) == expected


@pytest.mark.slow
@pytest.mark.parametrize("run", mind_fed_kd.get_runs())
def test_minds_runs_are_built_of_smaller_encoders(news, run):
    config = mind_fed_kd.get_config(run)
    config.data.update(folder=news, frozen_tables=False)
    small = {
        "bert_base_12": "bert_tiny_4",
        "bert_base_4": "bert_tiny_2",
        "bert_base_2": "bert_tiny_1",
    }
    config.pools.main.model = small[config.pools.main.model]
    if "fed_kd" in config.training:
        config.training.fed_kd.teacher = small[config.training.fed_kd.teacher]
    experiment = build_experiment(config)
    check_experiment(experiment)
    assert bool(experiment.algorithm.personal_models["main"]) == run.startswith("fed_kd")
    for predictor in experiment.algorithm.predictors.values():
        assert set(predictor.model.metrics) == {"auc", "mrr", "ndcg_5", "ndcg_10"}


def test_minds_settings_are_the_papers():
    """Spec, section 5; MIND's title length, history and negatives are the preparation's."""
    for run in mind_fed_kd.get_runs():
        config = mind_fed_kd.get_config(run)
        own, layers = config.pools.main, run.split(",")[1:2]
        is_student = layers in (["4"], ["2"])
        assert own.client_learning_rate == (5e-6 if is_student else 2e-6)
        assert own.model == (f"bert_base_{layers[0]}" if is_student else "bert_base_12")
        assert (config.rounds, config.training.epochs, config.training.batch_size) == (3, 1, 32)
        assert config.data.num_clients == own.cohort_size == 4 and config.data.frozen_tables
        if run.startswith("fed_kd"):
            links, settings = config.training.compression, config.training.fed_kd
            assert (links.uplink, links.downlink, links.start, links.end) == (
                "svd",
                "svd",
                0.95,
                0.98,
            )
            assert settings.teacher == "bert_base_12" and settings.teacher_learning_rate == 2e-6
            assert settings.hidden_weight == settings.output_weight == float("no_mutual" not in run)
    network = ENCODERS["bert_base_12"](30_522)
    size = lambda encoder: parameter_count(
        jax.eval_shape(encoder.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"][
            "layer0"
        ]
    )
    share = mind_fed_kd.get_config("fed_dropout").training.fed_dropout.share
    assert size(narrowed(network, share)) / size(network) == pytest.approx(0.6, abs=0.01)
    with pytest.raises(ValueError, match=r"a run of this config is one of .*, got 'fed_kd'"):
        mind_fed_kd.get_config("fed_kd")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentences", "news"])
def test_a_run_has_the_measures_of_its_task(kind, sentences, news, tmp_path):
    """From a config to its run folder, and what is ranked of it."""
    config = config_of(sentences, "fed_kd,whole")
    if kind == "news":
        config = config_of(news, "fed_kd,whole", "prepared_news")
    config.training.fed_kd.teacher = "bert_tiny_1"
    config.update(rounds=1, full_rounds=1, seeds=1)
    config.evaluation.update(checkpoint_every=1, batch_size=8)
    experiment = build_experiment(config)
    run_experiment(experiment, tmp_path / "run", config=config.to_dict(), show_progress=False)
    for metric in ("f_score", "precision") if kind == "sentences" else ("auc", "ndcg_5"):
        entries = {
            entry.model: entry for entry in read_run("fed_kd", load_run(tmp_path / "run"), metric)
        }
        assert set(entries) == {"main", "main_teachers"}
        for entry in entries.values():
            (value,) = entry.values
            # Precision is undefined where nothing is predicted.
            assert 0 <= value <= 100 or (metric == "precision" and np.isnan(value))
            assert entry.megabytes > 0 and entry.client_flops > 0


@pytest.mark.slow
def test_sizes_are_what_the_config_says(sentences, pretrained):
    """With frozen tables they do not depend on the vocabulary."""
    config = ade_fed_kd.get_config("fed_avg,teacher")
    config.data.update(folder=sentences, encoder=pretrained[0])
    data, config = load_data(config.data), ade_fed_kd.get_config("fed_dropout")
    size_of = lambda model: parameter_count(jax.eval_shape(model.init, jax.random.key(0)).params)
    sizes = [size_of(data.models[name]()) for name in (ade_fed_kd.TEACHER, ade_fed_kd.STUDENT)]
    assert sizes == [819_602, 423_058]
    for size in sizes:
        assert f"{size:,}" in ade_fed_kd.__doc__
    share = config.training.fed_dropout.share
    submodel = data.submodels[ade_fed_kd.TEACHER](share)
    assert size_of(submodel.model) / sizes[0] == pytest.approx(0.6, abs=0.01)
    layer = jax.eval_shape(submodel.model.init, jax.random.key(0)).params["encoder"]["layer0"]
    assert layer["query"]["kernel"].shape == (128, 64)  # one of two heads
    assert layer["inner"]["bias"].shape == (323,) and "323 inner neurons" in ade_fed_kd.__doc__
    sketch = ade_fed_kd.get_config("fetch_sgd")
    table, rounds = sketch.training.fetch_sgd, sketch.rounds / config.rounds
    sent = rounds * (table.sketch_rows * table.sketch_columns + 2 * table.k)
    assert sent / (2 * sizes[0]) == pytest.approx(0.249, abs=0.002)


def test_flops_are_those_of_an_encoder(sentences):
    """By hand for 12 tokens and width 128: products with weights, and those of attention."""
    of_layer = 12 * 2 * 12 * 128**2 + 2 * 2 * 12 * 12 * 128
    head = 12 * 2 * 128 * 200 + 12 * 2 * 200 + 12 * 2 * 128 + 2 * 128 * 2
    for run, forward in (("fed_avg,student", of_layer + head), ("fed_kd", 3 * of_layer + 2 * head)):
        config = config_of(sentences, run).to_dict()
        counted = flops.flops_of_run(config, {"main": 10.0}).clients["main"]
        assert counted == LEARNING * 10 * forward


def test_federated_dropouts_clients_compute_smaller_encoders(sentences):
    config = config_of(sentences, "fed_dropout")
    config.training.fed_dropout.share = 0.5
    part = 12 * 2 * (4 * 128 * 64 + 2 * 128 * 256) + 2 * 2 * 12 * 12 * 64
    head = 12 * 2 * 128 * 200 + 12 * 2 * 200 + 12 * 2 * 128 + 2 * 128 * 2
    counted = flops.flops_of_run(config.to_dict(), {"main": 10.0}).clients["main"]
    assert counted == LEARNING * 10 * (part + head)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("pools.main.model", "digits_small", r"pools\.main\.model must be one of .*'bert_tiny_1'"),
        ("training.fed_kd.teacher", "bert", r"training\.fed_kd\.teacher must be one of .*'bert_b"),
        *(
            (
                f"training.fed_kd.{layers}",
                ("layer0",),
                rf"^training\.fed_kd\.{layers} must be left out: .*, got \('layer0',\)\.$",
            )
            for layers in ("teacher_layers", "student_layers")
        ),
        ("data.num_clients", 0, r"data\.num_clients must be at least 1, got 0"),
        ("data.num_clients", 145, r"data\.num_clients must be an integer in 1\.\.144, .*got 145"),
        (
            "data.frozen_tables",
            True,
            r"data\.frozen_tables must be False where data\.encoder names no",
        ),
        (
            "training.compression.end",
            0.9,
            r"^training\.compression\.end must be at least start=0\.95, got 0\.9",
        ),
        (
            "training.compression.start",
            1.5,
            r"^training\.compression\.start must be at most 1 and above 0, got 1\.5",
        ),
    ],
)
def test_mistakes_are_one_line(sentences, setting, value, message):
    config = config_of(sentences)
    with config.unlocked():
        config.update_from_flattened_dict({setting: value})
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_a_server_that_distils_has_no_unlabelled_sentences(sentences):
    config = config_of(sentences, "fed_avg,student")
    with config.unlocked():
        config.algorithm = {"name": "fed_df"}
    message = r"^algorithm\.name='fed_df' cannot be used with data\.name='prepared_sentences'"
    with pytest.raises(ValueError, match=message):
        build_experiment(config)


@pytest.fixture(scope="module")
def pretrained(sentences, tmp_path_factory):
    """A file of four layers with 20 positions, as `pretrain_encoder` writes it, and its parameters."""
    encoder = Encoder(pieces(sentences), width=128, layers=4, heads=2, positions=20)
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
    kept = algorithm.personal_models["main"]["main_teachers"]
    row = jax.tree.map(np.asarray, algorithm.client_states["main"].first)
    teacher = kept.variables(state, row).params["encoder"]
    for found, layers in ((teacher, 2), (student, 1)):
        assert sorted(found) == ["embeddings", *(f"layer{layer}" for layer in range(layers))]
        jax.tree.map(np.testing.assert_array_equal, found, {name: params[name] for name in found})
    # Layers outside the encoder are drawn, by the same key for every file.
    drawn = build_experiment(config_of(sentences)).algorithm
    other = drawn.predictors["main"].variables(drawn.init(jax.random.key(3))).params
    own = algorithm.predictors["main"].variables(state).params
    for part in ("pooling", "classes"):
        jax.tree.map(np.testing.assert_array_equal, own[part], other[part])


def test_the_file_belongs_to_the_data_and_a_test_sentence_has_no_copy(
    sentences, pretrained, tmp_path
):
    config = config_of(sentences)
    config.data.encoder = str(tmp_path / "encoder.safetensors")
    found = []
    for content in (b"one", b"one", b"another"):
        (tmp_path / "encoder.safetensors").write_bytes(content)
        found.append(data_checksums(config.data))
    assert found[0] == found[1] != found[2]
    assert {**found[0], "data.encoder": ""} == {**found[2], "data.encoder": ""}
    with config.unlocked():
        config.data.update(encoder=None, positive_copies=2, client_test_share=0.25)
    with pytest.raises(ValueError, match=r"^data\.positive_copies must be 1 with"):
        load_data(config.data)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["fed_kd", "fed_dropout"])
def test_frozen_tables_are_neither_trained_nor_sent(sentences, pretrained, run):
    """Clients' states do not hold them; networks still read them."""
    config = config_of(sentences, run)
    config.data.update(encoder=pretrained[0], frozen_tables=True)
    experiment = build_experiment(config)
    algorithm = experiment.algorithm
    state = algorithm.init(jax.random.key(3))
    own = algorithm.predictors["main"].variables(state).params["encoder"]
    assert set(own["embeddings"]) == {"norm"}
    row = algorithm.client_states["main"].first
    kept = {name for name in named_leaves(row) if "embeddings" in name}
    assert all("norm" in name for name in kept) and bool(kept) == (run == "fed_kd")
    data = load_data(config.data)
    model = data.models["bert_tiny_1"]()
    variables = model.init(jax.random.key(0))
    tokens = data.splits["test"].columns["tokens"][:2]
    other = np.where(tokens > 5, 5 + (tokens - 4) % (pieces(sentences) - 5), tokens)
    apply = jax.jit(lambda tokens: model.apply(variables, {"tokens": tokens})[0].logits)
    one, two = apply(tokens), apply(other)
    assert np.abs(one - two).max() > 1e-4


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


def test_a_file_of_another_vocabulary_of_the_same_size_is_one_line(sentences, pretrained, tmp_path):
    """Its rows stood for other word pieces, and nothing said so."""
    config = config_of(sentences)
    config.data.encoder = str(tmp_path / "encoder.safetensors")
    own = load_prepared(sentences)["vocabulary"].columns["piece"].tolist()
    for known, is_own in ((own, True), (own[::-1], False)):
        metadata = {"heads": "2", VOCABULARY: vocabulary_checksum(known)}
        save_encoder(config.data.encoder, pretrained[1], metadata)
        networks = load_data(config.data).models
        for name in ("bert_tiny_2", "text_cnn"):
            if is_own:
                networks[name]()
                continue
            with pytest.raises(ValueError, match=r"^data\.encoder: .* the data's vocab") as error:
                networks[name]()
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "file", "message"),
    [
        ("bert_tiny_1", "nowhere", r"data\.encoder: cannot read an encoder from nowhere: .*\.$"),
        ("bert_tiny_4", "short", r"data\.encoder: .* has no tensor encoder\.layer\.3\."),
        ("bert_mini_1", None, r"data\.encoder: .* is of an encoder of 2 heads, got one of 4\.$"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    sentences, pretrained, tmp_path, model, file, message
):
    config = config_of(sentences)
    config.data.encoder = file or pretrained[0]
    if file == "short":
        config.data.encoder = str(tmp_path / file)
        save_encoder(tmp_path / file, first_layers(pretrained[1], 3), {"heads": "2"})
    config.training.fed_kd.teacher = model
    with pytest.raises(ValueError, match=message) as error:
        build_experiment(config)
    assert "\n" not in str(error.value)


def test_folders_of_other_data_are_one_line(sentences):
    with pytest.raises(ValueError, match=r"data\.folder .* has no split 'news'"):
        load_data(config_of(sentences, name="prepared_news").data)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda titles: titles + 40 * (titles > 0), r"word pieces 0\.\.\d+, .* got 0 to \d+\.$"),
        (lambda titles: titles - (titles > 0) * 9, r"word pieces 0\.\.\d+, .* got -\d to \d+\.$"),
        (lambda titles: titles[1:], r"only zeros, padding, in the first row .*, got \[\[\d.*\.$"),
    ],
    ids=["too large", "below 0", "no padding"],
)
def test_titles_that_are_none_are_named(news, monkeypatch, changed, message):
    """The embedding of a number that is no word piece is that of another one."""
    change_split(
        monkeypatch,
        data_bert,
        "news",
        lambda columns: {"tokens": changed(np.asarray(columns["tokens"], np.int32))},
    )
    with pytest.raises(ValueError, match=rf"^data\.folder .* must have {message}"):
        load_data(config_of(news, name="prepared_news").data)


@pytest.mark.parametrize(
    ("name", "split", "column"),
    [("prepared_sentences", "test", "label"), ("prepared_news", "news", "tokens")],
)
def test_columns_that_are_missing_are_named(request, monkeypatch, name, split, column):
    folder = request.getfixturevalue(name.removeprefix("prepared_"))
    renamed = lambda columns: {"other" if k == column else k: v for k, v in columns.items()}
    change_split(monkeypatch, data_bert, split, renamed)
    message = rf"^data\.folder .* must have a column '{column}' in split '{split}', got \[.*'other'"
    with pytest.raises(ValueError, match=message):
        load_data(config_of(folder, name=name).data)


def test_clicks_are_not_taken_for_tests_of_clients(news):
    config = config_of(news, name="prepared_news")
    with config.unlocked():
        config.data.client_test_share = 0.25
    with pytest.raises(
        ValueError, match=r"^data\.client_test_share must be None with .*_news', .*\.$"
    ):
        load_data(config.data)


def test_every_encoder_is_a_network_of_both_data():
    for name, encoder in ENCODERS.items():
        assert str(encoder(50).layers) == name.rsplit("_", 1)[1]
