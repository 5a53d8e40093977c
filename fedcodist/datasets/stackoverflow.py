"""Stack Overflow as TensorFlow Federated publishes it: users' sentences of questions and answers.

Several processes read users in shards. A finished shard is a file in a work folder, so a run that was
stopped continues from there. Columns are memory-mapped, so all users are never in memory together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcodist.core.child_processes import end_with_parent
from fedcodist.data.client_ids import client_id_array
from fedcodist.data.client_pools import split_clients
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.text import EVALUATION_LENGTH, SPLITS, TRAIN_LENGTH, vocabulary_split
from fedcodist.data.tf_example import decode_example
from fedcodist.data.tff_sqlite import sqlite_database
from fedcodist.data.vocabulary import Vocabulary
from fedcodist.data.word_pieces import learn_pieces, piece_splitter
from fedcodist.datasets.preparation import Show
from fedcodist.datasets.stackexchange import ANSWERS, DOMAINS, QUESTIONS

USERS_PER_SHARD = 500
LONGEST_SENTENCE = 1 << 20  # bytes; a post itself has at most 30,000 characters

_TFF_SPLIT = {"train": "train", "distillation": "train", "held_out": "heldout", "test": "test"}
_READ = ("type", "tokens")  # features of an example
_DOMAIN_OF_TYPE = {"question": QUESTIONS, "answer": ANSWERS}
_LARGEST_VOCABULARY = (1 << 16) - 5  # so that tokens fit in 16 bits
# Words of a shard whose counts are kept: as many as a vocabulary may have. Rarer ones are not counted.
_KEPT_WORDS = _LARGEST_VOCABULARY

# User -> its number of examples, or None where that is not known before they are read.
Users = Mapping[str, int | None]
Features = Mapping[str, Any]


class Reader(NamedTuple):
    """A source of users.

    Attributes:
      users: TFF's split (train, heldout, test) -> its users, sorted.
      examples: (split, users) -> (user, features of an example; None where it is malformed), user by
        user.
    """

    users: Callable[[str], Users]
    examples: Callable[[str, Users], Iterator[tuple[str, Features | None]]]


class Settings(NamedTuple):
    """How users become splits.

    Attributes:
      vocabulary: number of words, without the four special tokens.
      pieces: number of word pieces used in place of words; None takes words.
      train_clients: users of `train`, the paper's pool of all clients. The others are `distillation`.
      distillation_sentences: number drawn from all sentences of the others; None takes all.
      evaluation_sentences: number drawn from each of TFF's heldout and test.
      seed: of all draws.
    """

    vocabulary: int = 10_000
    pieces: int | None = None
    train_clients: int = 34_248
    distillation_sentences: int | None = None
    evaluation_sentences: int = 100_000
    seed: int = 0


class Prepared(NamedTuple):
    """Memory-mapped splits, and the examples left out: reason -> number."""

    splits: dict[str, FederatedData]
    skipped: dict[str, int]


def sqlite_reader(path: Path) -> Reader:
    """A reader of TFF's SQLite file, unpacked. Reading a damaged file raises ValueError."""
    return Reader(functools.partial(_sqlite_users, path), functools.partial(_sqlite_examples, path))


def prepare_stackoverflow(
    reader: Reader,
    settings: Settings,
    work: Path,
    processes: int = 1,
    show: Show = lambda text, fraction: None,
) -> Prepared:
    """Counts words, then writes every split's columns below `work`.

    Results of an earlier call with the same arguments below `work` are used again. Sentences are cut to
    20 tokens in `train` and `distillation` and to 30 in `held_out` and `test`. An example that is
    malformed, neither question nor answer, not UTF-8, longer than 1 MiB or empty is skipped and counted.

    Args:
      reader: of the users.
      settings: how users become splits.
      work: folder for shards and columns; remove it after saving the splits.
      processes: number of processes that read at once.
      show: called with the present stage and the fraction that is done.

    Raises:
      ValueError: settings out of range, a damaged source, or too few users.
      OSError: the disk is full, or a process was killed.
    """
    check_settings(settings)
    of_split = {name: reader.users(_TFF_SPLIT[name]) for name in SPLITS}
    of_split |= _dealt(of_split["train"], settings)
    shards = {name: list(_shards(of_split[name])) for name in SPLITS}

    counting = {
        path: functools.partial(_count_shard, reader, users, path)
        for name in SPLITS[:2]
        for path, users in _files(work, f"counts_{name}", "json", shards[name])
    }
    counts: Counter[str] = Counter()
    for path in _run(counting, processes, lambda f: show("counting words", 0.4 * f)):
        counts.update(json.loads(path.read_text()))
    if not counts:
        raise ValueError("the train split has no sentences")
    if settings.pieces is None:
        vocabulary = Vocabulary.from_counts(counts, settings.vocabulary)
    else:
        vocabulary = Vocabulary(learn_pieces(counts, settings.pieces))
    del counts

    limits: dict[str, int | None] = {
        "train": None,
        "distillation": settings.distillation_sentences,
        "held_out": settings.evaluation_sentences,
        "test": settings.evaluation_sentences,
    }
    encoding = {
        path: functools.partial(
            _encode_shard,
            reader,
            name,
            users,
            vocabulary,
            settings.pieces is not None,
            limits[name],
            settings.seed,
            path,
        )
        for name in SPLITS
        for path, users in _files(work, name, "npz", shards[name])
    }
    paths = _run(encoding, processes, lambda f: show("writing tokens", 0.4 + 0.5 * f))
    splits, skipped, first = {}, Counter[str](), 0
    for number, name in enumerate(SPLITS):
        show(f"joining {name}", 0.9 + 0.025 * number)
        paths_of_split, first = paths[first : first + len(shards[name])], first + len(shards[name])
        splits[name] = _joined(paths_of_split, name, limits[name], work, skipped)
    splits["vocabulary"] = vocabulary_split(vocabulary)
    return Prepared(splits, dict(sorted(skipped.items())))


def check_settings(settings: Settings) -> None:
    """Raises ValueError that names a setting outside its range."""
    for name, low, high in (
        ("vocabulary", 1, _LARGEST_VOCABULARY),
        ("pieces", 1, _LARGEST_VOCABULARY),
        ("train_clients", 1, None),
        ("distillation_sentences", 1, None),
        ("evaluation_sentences", 1, None),
        ("seed", 0, None),
    ):
        value = getattr(settings, name)
        if value is not None and (value < low or (high and value > high)):
            allowed = f"in {low}..{high}" if high else f"at least {low}"
            raise ValueError(f"{name} must be {allowed}, got {value}")


def _dealt(users: Users, settings: Settings) -> dict[str, Users]:
    if settings.train_clients >= len(users):
        raise ValueError(
            f"train_clients must leave users for unlabelled text: at most {len(users) - 1} of "
            f"{len(users)}, got {settings.train_clients}"
        )
    rest = len(users) - settings.train_clients
    groups = {"train": settings.train_clients, "distillation": rest}
    ids = list(users)
    return {
        name: {ids[index]: users[ids[index]] for index in indices.tolist()}
        for name, indices in split_clients(len(ids), groups, settings.seed).items()
    }


def _shards(users: Users) -> Iterator[Users]:
    ids = list(users)
    for first in range(0, len(ids), USERS_PER_SHARD):
        yield {user: users[user] for user in ids[first : first + USERS_PER_SHARD]}


def _files(
    work: Path, name: str, suffix: str, shards: Sequence[Users]
) -> Iterator[tuple[Path, Users]]:
    for index, users in enumerate(shards):
        yield work / f"{name}_{index:05d}.{suffix}", users


def _run(
    tasks: Mapping[Path, Callable[[], None]], processes: int, show: Callable[[float], None]
) -> list[Path]:
    """Makes every task's file, unless it exists; returns the files."""
    for folder in {path.parent for path in tasks}:
        folder.mkdir(parents=True, exist_ok=True)
    left = [task for path, task in tasks.items() if not path.exists()]
    shown = -1
    for done, _ in enumerate(_finished(left, processes), len(tasks) - len(left) + 1):
        if 50 * done // len(tasks) > shown:
            shown = 50 * done // len(tasks)
            show(done / len(tasks))
    return list(tasks)


def _finished(tasks: Sequence[Callable[[], None]], processes: int) -> Iterator[None]:
    if processes == 1 or len(tasks) < 2:
        for task in tasks:
            yield task()
        return
    # Forked processes would inherit locks that threads of imported modules hold.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        # A pool's processes would wait for work for ever if a signal stops this process.
        min(processes, len(tasks)),
        context,
        initializer=end_with_parent,
    )
    try:
        for future in concurrent.futures.as_completed([pool.submit(task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise OSError(
            "a process that read users was killed (out of memory?); run the same command again, "
            "with fewer --processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _count_shard(reader: Reader, users: Users, path: Path) -> None:
    counts: Counter[str] = Counter()
    for _, features in reader.examples("train", users):
        sentence = _sentence(features)
        if not isinstance(sentence, str):
            counts.update(sentence[1])
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_KEPT_WORDS]
    with _whole(path) as partial:
        partial.write_text(json.dumps(dict(frequent)))


def _encode_shard(
    reader: Reader,
    name: str,
    users: Users,
    vocabulary: Vocabulary,
    in_pieces: bool,
    limit: int | None,
    seed: int,
    path: Path,
) -> None:
    """Writes columns of some users; with a limit, only sentences that can be among the drawn ones."""
    split = piece_splitter(vocabulary.words) if in_pieces else None
    length = TRAIN_LENGTH if name in SPLITS[:2] else EVALUATION_LENGTH
    skipped: Counter[str] = Counter()
    domains: list[int] = []
    sentences: list[Sequence[str]] = []
    sizes = dict.fromkeys(users, 0)
    for user, features in reader.examples(_TFF_SPLIT[name], users):
        sentence = _sentence(features)
        if isinstance(sentence, str):
            skipped[sentence] += 1
            continue
        domain, words = sentence
        domains.append(DOMAINS.index(domain))
        cut = words[:length]  # a word has at least one piece
        sentences.append([piece for word in cut for piece in split(word)] if split else cut)
        sizes[user] += 1
    owner = np.repeat(np.arange(len(sizes)), list(sizes.values()))
    priority = np.concatenate(
        [_generator(seed, name, user).random(size) for user, size in sizes.items()]
    )
    tokens = vocabulary.encode(sentences, length)
    chosen = np.arange(len(owner))
    if limit is not None and len(chosen) > limit:
        chosen = np.sort(np.argsort(priority, kind="stable")[:limit])
    with _whole(path) as partial, open(partial, "wb") as file:
        np.savez(
            file,
            tokens=tokens[chosen],
            domain=np.array(domains, np.int8)[chosen],
            owner=owner[chosen],
            priority=priority[chosen] if limit is not None else np.zeros(0),
            users=client_id_array(list(sizes)),
            reasons=client_id_array(list(skipped)),
            skipped=np.array(list(skipped.values()), np.int64),
        )


def _joined(
    paths: Sequence[Path], name: str, limit: int | None, work: Path, skipped: Counter[str]
) -> FederatedData:
    """A split made of all its shards, columns on disk. Drawn sentences have the least priorities."""
    last = np.inf
    if limit is not None:
        priority = np.concatenate([np.load(path)["priority"] for path in paths])
        if len(priority) > limit:
            last = np.partition(priority, limit - 1)[limit - 1]
    ids: list[str] = []
    sizes: list[np.ndarray] = []
    for path in paths:
        with np.load(path) as shard:
            counts = np.bincount(_kept(shard, last, shard["owner"]), minlength=len(shard["users"]))
            ids += shard["users"][counts > 0].tolist()
            sizes.append(counts[counts > 0])
            skipped.update(
                dict(zip(shard["reasons"].tolist(), shard["skipped"].tolist(), strict=True))
            )
    offsets = np.concatenate([[0], *sizes]).cumsum()
    if offsets[-1] == 0:
        raise ValueError(f"the split {name!r} has no sentences")
    columns = {}
    for column in ("tokens", "domain"):
        path, start = work / f"{name}_{column}.npy", 0
        with np.load(paths[0]) as shard:
            dtype, width = shard[column].dtype, shard[column].shape[1:]
        target = np.lib.format.open_memmap(path, "w+", dtype, (int(offsets[-1]), *width))
        for shard_path in paths:
            with np.load(shard_path) as shard:
                values = _kept(shard, last, shard[column])
            target[start : start + len(values)] = values
            start += len(values)
        target.flush()
        columns[column] = np.load(path, mmap_mode="r")
    return FederatedData.from_arrays(columns, offsets=offsets, client_ids=ids)


def _kept(shard: Mapping[str, np.ndarray], last: float, values: np.ndarray) -> np.ndarray:
    return values if last == np.inf else values[shard["priority"] <= last]


def _sentence(features: Features | None) -> tuple[str, list[str]] | str:
    """(domain, words) of an example, or the reason for skipping it."""
    texts = []
    for name in _READ:
        values = features.get(name) if features is not None else None
        if not isinstance(values, list) or len(values) != 1:
            return "malformed"
        if not isinstance(values[0], bytes):
            return "malformed"
        if len(values[0]) > LONGEST_SENTENCE:
            return "too long"
        try:
            texts.append(values[0].decode())
        except UnicodeDecodeError:
            return "not UTF-8"
    domain = _DOMAIN_OF_TYPE.get(texts[0])
    if domain is None:
        return "neither question nor answer"
    words = texts[1].split()
    return (domain, words) if words else "empty"


def _sqlite_users(path: Path, split: str) -> Users:
    with sqlite_database(path) as database:
        users: Users | None = database.client_sizes(split)
        table = "examples" if users is None else "client_metadata"
        if users is None:
            users = dict.fromkeys(database.client_ids(split))
        if not users:
            raise ValueError(
                f"{path} has no split {split!r}; its splits are {database.splits(table)}"
            )
    return users


def _sqlite_examples(path: Path, split: str, users: Users) -> Iterator[tuple[str, Features | None]]:
    with sqlite_database(path) as database:
        for user, expected in users.items():
            count = 0
            for _, blob in database.examples(split, user):
                count += 1
                yield user, _decoded(blob)
            if expected not in (None, count):
                raise ValueError(
                    f"{path}: client {user!r} has {count} examples of {split!r}, client_metadata "
                    f"says {expected}"
                )


def _decoded(blob: bytes) -> Features | None:
    try:
        return decode_example(blob, _READ)
    except ValueError:
        return None


def _generator(seed: int, name: str, user: str) -> np.random.Generator:
    """A generator for each user, so draws do not depend on shards or processes."""
    digest = hashlib.sha256(f"{name}/{user}".encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8])])


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A context with a temporary path for a file that appears completely or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
