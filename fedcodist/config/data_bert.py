"""Loads sentences and news as word pieces, and makes the networks that read them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.classes import number_of_classes
from fedcodist.config.config_errors import named
from fedcodist.config.data_prepared import check_columns, prepared_folder
from fedcodist.core import metrics
from fedcodist.core.batches import Preprocess
from fedcodist.core.checks import shown
from fedcodist.core.layer_outputs import metrics_of_logits
from fedcodist.core.model import Model, variable_shapes
from fedcodist.core.summed_metrics import SummedMetric
from fedcodist.data.client_pools import merge_clients
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.partition import iid, whole_labels
from fedcodist.models.submodels import Units
from fedcodist.text.bert import TABLES, Encoder, bert_base, bert_mini
from fedcodist.text.bert_weights import (
    check_vocabulary,
    load_embeddings,
    load_encoder,
    stored_encoder,
)
from fedcodist.text.candidates import all_candidates, sampled_candidates
from fedcodist.text.encoder_start import (
    first_layers,
    with_embeddings,
    with_encoder,
    with_frozen_tables,
)
from fedcodist.text.encoder_units import encoder_units, narrowed
from fedcodist.text.news import news_recommender
from fedcodist.text.sentence_classifier import Pooling, sentence_classifier
from fedcodist.text.sentence_encoders import ConvolutionEncoder, LSTMEncoder, SelfAttentionEncoder

PyTree = Any
OneLayer = ConvolutionEncoder | LSTMEncoder | SelfAttentionEncoder
SENTENCES, NEWS = "prepared_sentences", "prepared_news"
ENCODED = (SENTENCES, NEWS)
NEGATIVES = 4


def bert_tiny(vocabulary: int, layers: int = 2) -> Encoder:
    """Width 128, two heads (Turc et al., 2019)."""
    return Encoder(vocabulary, width=128, layers=layers, heads=2)


# Name -> a function from the number of word pieces to an encoder. Students have fewer layers.
ENCODERS: dict[str, Callable[[int], Encoder]] = {
    f"{name}_{layers}": functools.partial(encoder, layers=layers)
    for name, encoder, counts in (
        ("bert_base", bert_base, (12, 4, 2)),
        ("bert_mini", bert_mini, (4, 2, 1)),
        ("bert_tiny", bert_tiny, (4, 2, 1)),
    )
    for layers in counts
}


class SmallEncoder(NamedTuple):
    """An encoder of one layer, (vocabulary, width, positions=, types=) -> module, and its pooling."""

    create: Callable[..., OneLayer]
    pooling: Pooling


# Name -> an encoder of sentences that is not pre-trained. Only its embeddings can come from a file.
SMALL_ENCODERS = {
    "text_cnn": SmallEncoder(ConvolutionEncoder, "max"),
    "text_cnn_attention": SmallEncoder(ConvolutionEncoder, "attention"),
    "text_lstm": SmallEncoder(LSTMEncoder, "last"),
    "text_lstm_attention": SmallEncoder(LSTMEncoder, "attention"),
    "text_self_attention": SmallEncoder(SelfAttentionEncoder, "attention"),
}
WIDTH = 128  # of their embeddings, if no file gives them


class Submodel(NamedTuple):
    """A network with a share of heads and inner neurons, and the units of the whole network's axes."""

    model: Model
    units: Units


class Networks(NamedTuple):
    """Name -> a function that makes the whole network, or one with a share of its units.

    Names are those in ENCODERS. For sentences there are also whole networks of SMALL_ENCODERS.
    """

    models: Mapping[str, Callable[[], Model]]
    submodels: Mapping[str, Callable[[float], Submodel]]


class EncodedData(NamedTuple):
    """What `fedcodist.config.data.Data` is made of.

    Attributes:
      splits: 'train', its examples dealt to clients, and 'held_out' and 'test'.
      preprocess, evaluation_preprocess: how examples are read.
      networks: those that read these data.
    """

    splits: dict[str, FederatedData]
    preprocess: Preprocess
    evaluation_preprocess: Preprocess
    networks: Networks


def load_encoded(settings: ConfigDict) -> EncodedData:
    """Loads a prepared folder: sentences and their labels, or impressions of news.

    There are `data.num_clients` clients. They have equally many sentences, or equally many readers of
    news, each with all of their clicks. With `data.positive_copies` a client has each of its sentences
    of label 1 so many times; sizes are equal without the copies. `data.encoder` names a file of
    `pretrain_encoder`, or of BERT's weights: networks start from its embeddings and from as many of its
    first layers as they have. A file that says that it is of other word pieces than the folder's is
    refused. With `data.frozen_tables` the embedding tables keep the file's values and are not
    parameters.

    Raises:
      ValueError: names the setting and what is allowed.
    """
    prepared = prepared_folder("data.folder", settings.folder)
    is_news = settings.name == NEWS
    needed = {"train", "held_out", "test", "vocabulary"} | ({"news"} if is_news else set())
    if missing := needed - set(prepared):
        raise ValueError(f"data.folder {settings.folder} has no split {min(missing)!r}.")
    if not is_news:
        examples = {name: prepared[name] for name in ("train", "held_out", "test")}
        check_columns("data.folder", settings.folder, examples, ("tokens", "label"))
    vocabulary = prepared["vocabulary"]
    # One client has all examples, so that metrics are over all of them.
    splits = {
        name: FederatedData.of_one_client(prepared[name].columns, name)
        for name in ("held_out", "test")
    }
    train, count, seed = prepared["train"], settings.num_clients, settings.seed
    copies = settings.get("positive_copies", 1)
    with named("data."):
        if is_news:
            splits["train"] = merge_clients(train, count, seed)
        else:
            parts = iid(train.num_examples, count, seed)
            splits["train"] = _dealt(train, parts, copies)
    if is_news and copies > 1:
        raise ValueError(f"data.positive_copies must be 1 for news, got {copies}.")
    if is_news:
        check_columns("data.folder", settings.folder, {"news": prepared["news"]}, ("tokens",))
        titles = np.array(prepared["news"].columns["tokens"])
        _check_titles(settings.folder, titles, vocabulary.num_examples)
        preprocess = sampled_candidates(titles, NEGATIVES), all_candidates(titles)
        return EncodedData(splits, *preprocess, _networks(news_recommender, vocabulary, settings))
    with named(f"data.folder {settings.folder}: "):
        classes = number_of_classes(splits, settings.folder)
    if classes != 2 and copies > 1:
        raise ValueError(f"data.positive_copies must be 1 for {classes} classes, got {copies}.")
    networks = _networks(functools.partial(_classifier, classes), vocabulary, settings)
    small = {
        name: functools.partial(_small_network, kind, classes, vocabulary, settings)
        for name, kind in SMALL_ENCODERS.items()
    }
    networks = networks._replace(models={**networks.models, **small})
    unchanged = lambda batch, key, positions: batch
    return EncodedData(splits, unchanged, unchanged, networks)


def _check_titles(folder: str, titles: np.ndarray, vocabulary: int) -> None:
    """Raises ValueError unless titles are of the vocabulary's word pieces, and the first is padding."""
    name = f"data.folder {folder} must have"
    if titles.size and not 0 <= titles.min() <= titles.max() < vocabulary:
        raise ValueError(
            f"{name} word pieces 0..{vocabulary - 1}, its vocabulary, in column 'tokens' of split "
            f"'news', got {titles.min()} to {titles.max()}."
        )
    if not len(titles) or titles[0].any():
        raise ValueError(
            f"{name} only zeros, padding, in the first row of column 'tokens' of split 'news', which "
            f"stands for no article, got {shown(titles[:1].tolist(), 40)}."
        )


def _dealt(train: FederatedData, parts: list[np.ndarray], copies: int) -> FederatedData:
    """The parts as clients, with each positive sentence several times."""
    if copies > 1:
        is_positive = whole_labels(train.columns["label"]) == 1
        parts = [np.repeat(part, np.where(is_positive[part], copies, 1)) for part in parts]
    rows, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
    columns = {name: np.asarray(column)[rows] for name, column in train.columns.items()}
    return FederatedData.from_arrays(columns, offsets=[0, *ends])


def _networks(
    create: Callable[[Encoder], Model], vocabulary: FederatedData, settings: ConfigDict
) -> Networks:
    file, is_frozen = settings.get("encoder"), settings.get("frozen_tables", False)
    if not isinstance(is_frozen, bool):
        raise TypeError(f"data.frozen_tables must be True or False, got {is_frozen!r}.")
    if is_frozen and file is None:
        raise ValueError(
            "data.frozen_tables must be False where data.encoder names no file of an encoder, whose "
            "tables embeddings could keep."
        )

    def finished(model: Model, params: PyTree) -> Model:
        return with_frozen_tables(model, params) if is_frozen else model

    def network(kind: Callable[[int], Encoder]) -> Model:
        encoder, params = _read(kind, vocabulary, file)
        model = create(encoder)
        if params is not None:
            model = with_encoder(model, params)
        return finished(model, params)

    def submodel(kind: Callable[[int], Encoder], share: float) -> Submodel:
        encoder, params = _read(kind, vocabulary, file)
        whole = variable_shapes(network(kind))
        units = encoder_units(whole.params, encoder.heads)
        return Submodel(finished(create(narrowed(encoder, share)), params), units)

    return Networks(
        {name: functools.partial(network, kind) for name, kind in ENCODERS.items()},
        {name: functools.partial(submodel, kind) for name, kind in ENCODERS.items()},
    )


def _read(
    kind: Callable[[int], Encoder], vocabulary: FederatedData, file: str | None
) -> tuple[Encoder, PyTree]:
    """The encoder with the file's number of positions, and the file's first layers, or None."""
    encoder = kind(vocabulary.num_examples)
    if file is None:
        return encoder, None
    with named("data.encoder: "):
        _check_vocabulary(file, vocabulary)
        stored = stored_encoder(file, encoder.heads)
        encoder = encoder.clone(positions=stored.positions)
        params = load_encoder(file, encoder.clone(layers=max(encoder.layers, stored.layers)))
    return encoder, first_layers(params, encoder.layers)


def _check_vocabulary(file: str, vocabulary: FederatedData) -> None:
    """Refuses a file of another vocabulary; a folder of one's own may not have its pieces."""
    if "piece" in vocabulary.columns:
        check_vocabulary(file, vocabulary.columns["piece"].tolist())


def _small_network(
    kind: SmallEncoder, classes: int, vocabulary: FederatedData, settings: ConfigDict
) -> Model:
    """A classifier with one layer that is not pre-trained, on the file's embeddings if there is one."""
    pieces = vocabulary.num_examples
    if (file := settings.get("encoder")) is None:
        return _classifier(classes, kind.create(pieces, WIDTH), kind.pooling)
    with named("data.encoder: "):
        _check_vocabulary(file, vocabulary)
        embeddings = load_embeddings(file)
    (_, width), positions, types = (embeddings[name].shape for name in TABLES)
    encoder = kind.create(pieces, width, positions=positions[0], types=types[0])
    model = with_embeddings(_classifier(classes, encoder, kind.pooling), embeddings)
    tables = {"embeddings": embeddings}
    return with_frozen_tables(model, tables) if settings.get("frozen_tables", False) else model


def _classifier(classes: int, encoder: Encoder | OneLayer, pooling: Pooling = "attention") -> Model:
    """A classifier; with two classes it also measures how well it finds class 1."""
    model = sentence_classifier(encoder, classes, pooling=pooling)
    if classes != 2:
        return model
    of_class_1: dict[str, metrics.Statistic | SummedMetric] = {
        "precision": metrics.precision(),
        "recall": metrics.recall(),
        "f_score": metrics.f_score(),
        "average_precision": metrics.average_precision(),
    }
    return model._replace(metrics={**model.metrics, **metrics_of_logits(of_class_1)})
