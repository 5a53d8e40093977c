"""Prepared text: from a config's `data` to clients in domains, and the networks that read it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from fedcodist.config.config_errors import named
from fedcodist.config.data_prepared import prepared_folder
from fedcodist.core.model import Model
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import manifest
from fedcodist.data.text import SPLITS, domain_pools, of_domain, vocabulary_of
from fedcodist.data.vocabulary import Vocabulary
from fedcodist.text import lstm, transformer
from fedcodist.text.next_token import language_model

TEXT = "prepared_text"
# From the number of tokens to a network.
TEXT_MODELS: dict[str, Callable[[int], Any]] = {
    "lstm_small": lstm.small_lstm,
    "lstm_large": lstm.large_lstm,
    "transformer_small": transformer.small_transformer,
    "transformer_large": transformer.large_transformer,
}


class Text(NamedTuple):
    """What a config's text is, besides examples.

    Attributes:
      vocabulary: its words.
      expected_length: mean number of predicted tokens of a clients' sentence.
      domains: their names.
      pools: domain -> indices of the clients that have it alone; None where clients have all domains.
    """

    vocabulary: Vocabulary
    expected_length: float
    domains: tuple[str, ...]
    pools: Mapping[str, np.ndarray] | None


class TextData(NamedTuple):
    """Splits, each of evaluation also by domain as `<split>_<domain>`; unlabelled tokens; the text."""

    splits: dict[str, FederatedData]
    unlabelled: np.ndarray
    text: Text


def load_text(settings: ConfigDict) -> TextData:
    """Loads a prepared folder of text.

    With `data.domains`, domain -> share of the users, the clients are disjoint pools of users with
    their examples of one domain. The unlabelled text is of the users of `distillation`, all domains, or
    with `data.unlabelled_folder` that of another prepared folder with the same vocabulary.

    Raises:
      ValueError: one line that names the setting and what is allowed.
    """
    prepared = prepared_folder("data.folder", settings.folder)
    if missing := {*SPLITS, "vocabulary"} - set(prepared):
        raise ValueError(f"data.folder {settings.folder} has no split {min(missing)!r} of text.")
    domains = tuple(manifest(settings.folder)["arguments"].get("domains", ()))
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
        }
    # Padding is 0. Not compared with it: that would be an array as large as all users' tokens.
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
    return other["distillation"]


def text_model(name: str, text: Text, samples: int = 0) -> Model:
    """One of TEXT_MODELS for a text; `samples` classes are drawn in training, 0 takes all."""
    size = text.vocabulary.size
    return language_model(TEXT_MODELS[name](size), size, text.expected_length, samples)
