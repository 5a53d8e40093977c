"""Loads prepared text, whose clients may be in domains, and makes the networks that read it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.config_errors import named
from fedcodist.config.data_prepared import check_columns, prepared_folder
from fedcodist.core.model import Model
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import manifest
from fedcodist.data.text import SPLITS, domain_pools, of_domain, vocabulary_of
from fedcodist.data.vocabulary import Vocabulary
from fedcodist.text import lstm, transformer
from fedcodist.text.next_token import language_model

TEXT = "prepared_text"
# Name -> a function from the number of tokens to a network.
TEXT_MODELS: dict[str, Callable[[int], Any]] = {
    "lstm_small": lstm.small_lstm,
    "lstm_large": lstm.large_lstm,
    "transformer_small": transformer.small_transformer,
    "transformer_large": transformer.large_transformer,
}


class Text(NamedTuple):
    """Properties of a text that networks and pools need in addition to its examples.

    Attributes:
      vocabulary: its words.
      expected_length: mean number of predicted tokens of the clients' sentences.
      domains: their names.
      pools: domain -> indices of the clients that have only this domain; None where clients have all.
    """

    vocabulary: Vocabulary
    expected_length: float
    domains: tuple[str, ...]
    pools: Mapping[str, np.ndarray] | None


class TextData(NamedTuple):
    """A prepared text.

    Attributes:
      splits: 'train', 'held_out' and 'test', and the last two also for each domain of which they have
        examples, as `<split>_<domain>`.
      unlabelled: the server's tokens [sentences, tokens].
      text: its vocabulary and domains.
    """

    splits: dict[str, FederatedData]
    unlabelled: np.ndarray
    text: Text


def load_text(settings: ConfigDict) -> TextData:
    """Loads a prepared folder of text.

    `data.domains` is domain -> share of the users. With it the clients are disjoint pools of users, each
    user with the examples of one domain. The unlabelled text is the split `distillation` with all
    domains, or, with `data.unlabelled_folder`, this split of another folder with the same vocabulary.

    Raises:
      ValueError: names the setting and what is allowed.
    """
    prepared = prepared_folder("data.folder", settings.folder)
    if missing := {*SPLITS, "vocabulary"} - set(prepared):
        raise ValueError(f"data.folder {settings.folder} has no split {min(missing)!r} of text.")
    domains = tuple(manifest(settings.folder)["arguments"].get("domains", ()))
    check_columns(
        "data.folder", settings.folder, {name: prepared[name] for name in SPLITS}, ("tokens",)
    )
    read_by_domain = {name: prepared[name] for name in ("held_out", "test") if domains}
    if settings.get("domains") is not None:
        read_by_domain["train"] = prepared["train"]
    check_columns("data.folder", settings.folder, read_by_domain, ("domain",))
    clients, pools = prepared["train"], None
    if settings.get("domains") is not None:
        shares = settings.domains.to_dict()
        with named("data.domains: "):
            clients, pools = domain_pools(clients, domains, shares, settings.seed)
    splits = {"train": clients}
    for name in ("held_out", "test"):
        splits[name] = prepared[name]
        splits |= {
            f"{name}_{domain}": of_domain(prepared[name], index)
            for index, domain in enumerate(domains)
            if np.any(prepared[name].columns["domain"] == index)
        }
    # Padding is 0. `tokens != 0` would be an array as large as the tokens of all users.
    expected_length = np.count_nonzero(clients.columns["tokens"][:, 1:])
    text = Text(vocabulary_of(prepared), expected_length / clients.num_examples, domains, pools)
    unlabelled = prepared["distillation"]
    if settings.get("unlabelled_folder") is not None:
        unlabelled = _unlabelled(settings, text.vocabulary)
    return TextData(splits, unlabelled.columns["tokens"], text)


def _unlabelled(settings: ConfigDict, vocabulary: Vocabulary) -> FederatedData:
    other = prepared_folder("data.unlabelled_folder", settings.unlabelled_folder)
    if "distillation" not in other or vocabulary_of(other) != vocabulary:
        raise ValueError(
            f"data.unlabelled_folder {settings.unlabelled_folder} must have a split 'distillation' in "
            f"the vocabulary of data.folder {settings.folder}."
        )
    check_columns(
        "data.unlabelled_folder",
        settings.unlabelled_folder,
        {"distillation": other["distillation"]},
        ("tokens",),
    )
    return other["distillation"]


def text_model(name: str, text: Text, samples: int = 0) -> Model:
    """One of TEXT_MODELS, whose softmax in training has `samples` drawn classes; with 0 it has all."""
    size = text.vocabulary.size
    return language_model(TEXT_MODELS[name](size), size, text.expected_length, samples)
