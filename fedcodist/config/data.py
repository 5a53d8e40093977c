"""Loads a config's `data`: examples, and how training and evaluation read them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.classes import labels_of
from fedcodist.config.config_errors import named
from fedcodist.config.data_bert import ENCODED, NEWS, Submodel, load_encoded
from fedcodist.config.data_graph import PRIMARY, load_primary
from fedcodist.config.data_images import (
    DIGITS_SCALE,
    image_preprocess,
    load_digit_images,
    load_prepared_images,
)
from fedcodist.config.data_parties import PUBLIC_PRIVATE, Public, load_public_private
from fedcodist.config.data_partition import (
    check_no_all_splits,
    check_no_validation,
    repartitioned,
)
from fedcodist.config.data_settings import READ, check_read
from fedcodist.config.data_text import TEXT, Text, load_text
from fedcodist.config.referenced_data import (
    as_they_are,
    checked_splits,
    referenced_data,
    referenced_preprocessing,
)
from fedcodist.config.references import is_reference
from fedcodist.core.batches import Preprocess
from fedcodist.core.model import Model
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.within_clients import train_test_within_clients, unseen_clients
from fedcodist.datasets.public_private import FINE_PER_COARSE
from fedcodist.run.client_splits import ClientSplit
from fedcodist.text.next_token import next_tokens

DEALT = ("digits", "prepared")  # what `data.partition` deals to clients anew


class Data(NamedTuple):
    """What a config's `data` names.

    Attributes:
      splits: name -> labelled examples; 'train' has those of the clients.
      unlabelled: the server's images [images, height, width, channel], or tokens [sentences, tokens].
      preprocess, evaluation_preprocess: how images are read in training and in evaluation.
      public: labelled examples that everybody has, for methods of parties; None elsewhere.
      text: vocabulary and domains; None for images.
      models: name -> a function that makes a network for these data; None where a config's networks are
        those of images or of text.
      submodels: name -> a function from a share of the units to a smaller network, for Federated
        Dropout; None where `models` is None.
      unlabelled_labels: the labels of the server's images, which only codistillation with labelled data
        reads; None where there are none, or none of the clients' classes. Text is its own label.
      num_classes: the least number of outputs of networks of images, by the labels of all splits; None
        where `public`, `text` or `models` determine it.
      client_splits: name -> every client's own test examples: 'client_test', where
        `data.client_test_share` is set, 'unseen_clients', where `data.unseen_clients` is, and those of a
        loader.
      labels: split -> labels, before examples were taken away. Where `num_classes` is None, the classes
        are counted in them.
    """

    splits: Mapping[str, FederatedData]
    unlabelled: np.ndarray
    preprocess: Preprocess
    evaluation_preprocess: Preprocess
    public: Public | None = None
    text: Text | None = None
    models: Mapping[str, Callable[[], Model]] | None = None
    submodels: Mapping[str, Callable[[float], Submodel]] | None = None
    num_classes: int | None = None
    client_splits: Mapping[str, ClientSplit] = {}
    unlabelled_labels: np.ndarray | None = None
    labels: Mapping[str, np.ndarray] = {}

    @property
    def inputs(self) -> str:
        """The column that networks read."""
        return "image" if self.text is None else "tokens"


def load_data(settings: ConfigDict) -> Data:
    """Loads what a config's `data` names; raises as `build_experiment` does."""
    check_read(settings)
    own_preprocessing: dict[str, Any] = referenced_preprocessing(settings)
    if settings.get("partition") and not (is_reference(settings.name) or settings.name in DEALT):
        raise ValueError(
            f"data.partition must be None with data.name={settings.name!r}: only {list(DEALT)} and data "
            "of one's own are dealt to clients anew."
        )
    load = _referenced if is_reference(settings.name) else _LOADERS.get(settings.name)
    if load is None:
        raise ValueError(
            f"data.name must be one of {list(READ)} or package.module:function, got {settings.name!r}."
        )
    data = load(settings)
    if data.public is not None:
        public = data.public._replace(**own_preprocessing)
        data = data._replace(public=public)
    if not data.labels and data.num_classes is None and data.public is None:
        data = data._replace(labels=_labels_of(data))
    return _with_client_splits(data._replace(**own_preprocessing), settings)


def _with_client_splits(data: Data, settings: ConfigDict) -> Data:
    """Takes the clients' own test examples, and the unseen clients, out of the training examples."""
    if "train" not in data.splits:  # of a user's Data
        raise ValueError(
            f"data.name {settings.name!r} must return a split 'train', got {sorted(data.splits)}."
        )
    share, count = settings.get("client_test_share"), settings.get("unseen_clients")
    train, seed, text = data.splits["train"], settings.get("seed") or 0, data.text
    splits = {}
    if count is not None:
        if share is None:
            raise ValueError(
                "data.client_test_share must be set for data.unseen_clients to be evaluated."
            )
        with named("data.unseen_clients: "):
            train, unseen = unseen_clients(train, count, seed)
        text = _without(text, data.splits["train"], train)
        own, test = train_test_within_clients(unseen, share, seed)
        splits["unseen_clients"] = ClientSplit(test, own)
    if share is None:
        return data
    if (settings.get("positive_copies") or 1) > 1:
        raise ValueError(
            "data.positive_copies must be 1 with data.client_test_share: copies of a sentence would be "
            "in training and in test."
        )
    if settings.name == NEWS:
        raise ValueError(
            f"data.client_test_share must be None with data.name={NEWS!r}, whose clicks have no "
            "impression to rank."
        )
    if settings.name == "cifar_public_private" and _share_images(settings):
        raise ValueError(
            "data.client_test_share must be None with data.name='cifar_public_private', data.iid=False "
            f"and more than {FINE_PER_COARSE} parties: two parties may have the same image, which would "
            "be in training and in test."
        )
    if settings.get("public_share") == 1:
        raise ValueError(
            "data.client_test_share must be None with data.public_share=1: clients' test examples would "
            "be among the public ones, from which they learn."
        )
    train, test = train_test_within_clients(train, share, seed)
    splits = {"client_test": ClientSplit(test), **splits}
    if taken := sorted(splits.keys() & data.client_splits.keys()):
        raise ValueError(
            f"data.client_test_share must be None where data.name returns a client split {taken[0]!r}."
        )
    return data._replace(
        splits={**data.splits, "train": train},
        client_splits={**data.client_splits, **splits},
        text=text,
    )


def _share_images(settings: ConfigDict) -> bool:
    """Whether two parties of `cifar_public_private` draw from the same fine classes."""
    return not settings.iid and settings.num_parties > FINE_PER_COARSE


def _without(text: Text | None, clients: FederatedData, left: FederatedData) -> Text | None:
    """The text with the pools of domains among the clients who are left."""
    if text is None or text.pools is None:
        return text
    is_left = np.isin(clients.client_ids, left.client_ids)
    positions = np.cumsum(is_left, dtype=np.int32) - 1  # a client's index among those who are left
    pools = {domain: positions[pool[is_left[pool]]] for domain, pool in text.pools.items()}
    if empty := [domain for domain, pool in pools.items() if not len(pool)]:
        raise ValueError(
            f"data.unseen_clients must leave clients of every domain of data.domains to train, none of "
            f"{empty[0]!r} is left."
        )
    return text._replace(pools=pools)


def _referenced(settings: ConfigDict) -> Data:
    """Data of one's own: see `fedcodist.config.referenced_data`."""
    loaded = referenced_data(settings)
    if isinstance(loaded, Data):
        if settings.get("partition"):
            raise ValueError(
                f"data.partition must be None: data.name {settings.name!r} returns a Data, whose "
                "examples are dealt already."
            )
        return loaded
    splits = checked_splits(settings.name, loaded)
    all_labels = labels_of(splits)
    if (partition := settings.get("partition")) is not None:
        check_no_all_splits(settings)
        check_no_validation(settings, splits)
        splits |= repartitioned(splits["train"], partition, settings.get("seed", 0), None)
    unlabelled, labels = np.zeros((0,)), None
    if "distillation" in splits:
        columns = splits.pop("distillation").columns
        if "image" not in columns:
            raise ValueError(
                f"data.name {settings.name!r} must return a column 'image' in split 'distillation', "
                f"got {sorted(columns)}."
            )
        unlabelled, labels = columns["image"], columns.get("label")
    return Data(
        splits, unlabelled, as_they_are, as_they_are, unlabelled_labels=labels, labels=all_labels
    )


def _labels_of(data: Data) -> dict[str, np.ndarray]:
    labels = labels_of(data.splits)
    if data.unlabelled_labels is not None:
        labels["distillation"] = data.unlabelled_labels
    return labels


def _digits(settings: ConfigDict) -> Data:
    return Data(**load_digit_images(settings)._asdict())


def _prepared(settings: ConfigDict) -> Data:
    return Data(**load_prepared_images(settings)._asdict())


def _text(settings: ConfigDict) -> Data:
    splits, unlabelled, text = load_text(settings)
    return Data(splits, unlabelled, next_tokens, next_tokens, text=text)


def _encoded(settings: ConfigDict) -> Data:
    splits, preprocess, evaluation_preprocess, networks = load_encoded(settings)
    unlabelled = np.zeros((0,))
    return Data(splits, unlabelled, preprocess, evaluation_preprocess, **networks._asdict())


def _public_private(settings: ConfigDict) -> Data:
    private, test, held_out, preprocess, public = load_public_private(settings)
    images = public.train.columns["image"]
    splits = _with_held_out({"train": private, "test": test}, held_out)
    return Data(splits, images, preprocess, preprocess, public)


def _primary(settings: ConfigDict) -> Data:
    private, shared, test, held_out, classes = load_primary(settings)
    images = shared.columns["image"]
    preprocess = evaluation_preprocess = DIGITS_SCALE
    if settings.name == "prepared_primary":
        preprocess, evaluation_preprocess = image_preprocess(settings, images.shape[1:])
    public = Public(shared, test, preprocess, classes, evaluation_preprocess)
    splits = _with_held_out({"train": private, "test": test}, held_out)
    return Data(splits, images, preprocess, evaluation_preprocess, public)


def _with_held_out(
    splits: dict[str, FederatedData], held_out: FederatedData | None
) -> dict[str, FederatedData]:
    return splits if held_out is None else splits | {"held_out": held_out}


# `data.name` -> what loads these data.
_LOADERS: dict[str, Callable[[ConfigDict], Data]] = {
    "digits": _digits,
    "prepared": _prepared,
    TEXT: _text,
    **dict.fromkeys(ENCODED, _encoded),
    **dict.fromkeys(PUBLIC_PRIVATE, _public_private),
    **dict.fromkeys(PRIMARY, _primary),
}
