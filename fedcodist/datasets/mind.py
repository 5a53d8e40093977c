"""MIND: impressions of news, with the articles that readers were shown and clicked, from official files.

Fields are separated by tabs. `news.tsv` has a line per article, `id, category, subcategory, title,
abstract, url, entities, entities`; id and title are read. `behaviors.tsv` has a line per impression,
`id, user, time, history, candidates`. The history is the articles that the user clicked before, the
latest last. Candidates are the articles that were shown, with `-1` if clicked and `-0` if not.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcodist.data.client_pools import split_users
from fedcodist.data.federated_data import FederatedData

FILES = NEWS, BEHAVIORS = "news.tsv", "behaviors.tsv"
HISTORY = 50
"""Latest clicks of a history that are kept, as in FedKD's code."""

# All impressions are padded to the longest one; MIND's have some hundred candidates.
_MOST_CANDIDATES = 1 << 12
_CANDIDATE = re.compile(r"(\S+)-([01])")


class News(NamedTuple):
    """Articles with a title.

    Attributes:
      titles: [articles + 1]; the first is empty and stands for padding.
      numbers: id -> place in `titles`.
      skipped: reason -> number of lines without an article.
    """

    titles: tuple[str, ...]
    numbers: dict[str, int]
    skipped: dict[str, int]


class Impressions(NamedTuple):
    """Impressions in the order of the file, without unknown articles.

    Attributes:
      users: the user of each impression.
      candidates: int32, articles of all impressions, one after another.
      clicked: bool, the same shape.
      ends: int64 [impressions], the end of each one's candidates.
      history: int32 [impressions, HISTORY], padded with 0.
      skipped: reason -> number of lines, candidates or clicks that are left out.
    """

    users: tuple[str, ...]
    candidates: np.ndarray
    clicked: np.ndarray
    ends: np.ndarray
    history: np.ndarray
    skipped: dict[str, int]


def read_news(*folders: str | os.PathLike[str]) -> News:
    """Reads `news.tsv` of one folder or several; the first line of an id counts.

    Articles without a title and lines of fewer than four fields are skipped and counted.

    Raises:
      ValueError: a file cannot be read or has no article.
    """
    titles, numbers = [""], dict[str, int]()
    skipped: Counter[str] = Counter()
    for folder in folders:
        path, articles = Path(folder) / NEWS, 0
        for fields in _lines(path):
            if len(fields) < 4 or not fields[0]:
                skipped[f"malformed lines of {NEWS}"] += 1
            elif not (title := " ".join(fields[3].split())):
                skipped["articles without a title"] += 1
            else:
                articles += 1
                if fields[0] not in numbers:
                    numbers[fields[0]] = len(titles)
                    titles.append(title)
        if not articles:
            raise ValueError(f"{path} has no article in MIND's format")
    return News(tuple(titles), numbers, dict(sorted(skipped.items())))


def read_impressions(folder: str | os.PathLike[str], numbers: Mapping[str, int]) -> Impressions:
    """Reads `behaviors.tsv`.

    Candidates and clicks of articles that are not among `numbers` are skipped. So are malformed lines,
    and impressions that are left with only clicked candidates or none. All are counted.

    Raises:
      ValueError: the file cannot be read, or no impression is left.
    """
    path = Path(folder) / BEHAVIORS
    users, history = list[str](), list[np.ndarray]()
    candidates, clicked, ends = array("i"), bytearray(), array("q")
    skipped: Counter[str] = Counter()
    for fields in _lines(path):
        shown = _shown(fields)
        if shown is None:
            skipped[f"malformed lines of {BEHAVIORS}"] += 1
            continue
        known = [(numbers[article], was) for article, was in shown if article in numbers]
        skipped["candidates without an article"] += len(shown) - len(known)
        clicks = sum(was for _, was in known)
        if clicks == 0:
            skipped["impressions without a click left"] += 1
        elif clicks == len(known):
            skipped["impressions with clicks only left"] += 1
        else:
            before = fields[3].split()
            articles = [numbers[article] for article in before if article in numbers]
            skipped["clicks of a history without an article"] += len(before) - len(articles)
            row = np.zeros(HISTORY, np.int32)
            row[: len(articles[-HISTORY:])] = articles[-HISTORY:]
            users.append(fields[1])
            history.append(row)
            candidates.extend(article for article, _ in known)
            clicked.extend(was for _, was in known)
            ends.append(len(candidates))
    if not users:
        counts = ", ".join(f"{n:,} {reason}" for reason, n in sorted(skipped.items()) if n)
        raise ValueError(f"{path} has no impression that can be used: {counts or 'it is empty'}")
    return Impressions(
        tuple(users),
        np.array(candidates, np.int32),
        np.frombuffer(bytes(clicked), np.bool_),
        np.array(ends, np.int64),
        np.stack(history),
        {reason: count for reason, count in sorted(skipped.items()) if count},
    )


def training_examples(impressions: Impressions, chosen: Any) -> FederatedData:
    """One example per click, from which `fedcodist.text.candidates` draws candidates.

    Columns: `clicked` int32 [n], an article; `others` int32 [n, longest], the articles of the same
    impression that were not clicked, padded with 0; `history` int32 [n, HISTORY]. Clients are users.

    Args:
      impressions: all impressions.
      chosen: int, indices of those to use.
    """
    articles, was_clicked, sizes = _candidates(impressions, chosen)
    impression = np.repeat(np.arange(len(sizes)), sizes)
    others = np.bincount(impression[~was_clicked], minlength=len(sizes))
    impression = impression[was_clicked]
    # Of large arrays there are only `others` of all impressions, a mask, and `others` of all clicks.
    columns = {
        "clicked": articles[was_clicked],
        "others": _padded(articles[~was_clicked], others, 0)[impression],
        "history": impressions.history[chosen][impression],
    }
    users = np.array(impressions.users)[chosen]
    return FederatedData.from_arrays(columns, client_of_row=users[impression])


def evaluation_examples(impressions: Impressions, chosen: Any) -> FederatedData:
    """One example per impression, with all of its candidates.

    Columns: `candidates` int32 [n, longest], padded with 0; `label` int8 of the same shape, 1 clicked,
    0 not clicked, -1 padding; `history` int32 [n, HISTORY]. Clients are users.

    Args:
      impressions: all impressions.
      chosen: int, indices of those to use.
    """
    articles, was_clicked, sizes = _candidates(impressions, chosen)
    columns = {
        "candidates": _padded(articles, sizes, 0),
        "label": _padded(was_clicked.astype(np.int8), sizes, -1),
        "history": impressions.history[chosen],
    }
    return FederatedData.from_arrays(columns, client_of_row=np.array(impressions.users)[chosen])


def deal_users(
    users: Sequence[str], shares: Mapping[str, float], seed: int
) -> dict[str, np.ndarray]:
    """Splits impressions by user, so that no user has impressions in two splits.

    Args:
      users: the user of each impression.
      shares: split -> share of the users; the first split also gets the users that rounding leaves.
      seed: of the deal.

    Returns:
      split -> indices of impressions, int64, ascending.

    Raises:
      ValueError: too few users.
    """
    ids, index_of_row = np.unique(np.array(users), return_inverse=True)
    return {
        name: np.flatnonzero(np.isin(index_of_row, indices))
        for name, indices in split_users(len(ids), shares, seed).items()
    }


def _candidates(impressions: Impressions, chosen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Articles and whether they were clicked, one impression after another, and how many each has."""
    ends = impressions.ends[chosen]
    sizes = ends - np.concatenate([[0], impressions.ends[:-1]])[chosen]
    places = np.arange(sizes.sum()) + np.repeat(ends - sizes.cumsum(), sizes)
    return impressions.candidates[places], impressions.clicked[places], sizes


def _padded(values: np.ndarray, sizes: np.ndarray, padding: int) -> np.ndarray:
    """Values of all rows, one after another, as [rows, longest]."""
    is_there = np.arange(sizes.max()) < sizes[:, None]
    rows = np.full(is_there.shape, padding, values.dtype)
    rows[is_there] = values
    return rows


def _shown(fields: Sequence[str]) -> list[tuple[str, int]] | None:
    """(article, whether it was clicked) of a line; None for one that is malformed."""
    if len(fields) != 5 or not fields[1] or not (entries := fields[4].split()):
        return None
    # Arrays of text would lose the NUL, which may distinguish two users.
    if fields[1].endswith("\0") or len(entries) > _MOST_CANDIDATES:
        return None
    matches = [_CANDIDATE.fullmatch(candidate) for candidate in entries]
    return [(match[1], int(match[2])) for match in matches if match] if all(matches) else None


def _lines(path: Path) -> Iterator[Sequence[str]]:
    """Yields the fields of every line that is not empty; no fields for a line that is not UTF-8.

    Concatenated files may have a byte order mark in any line.
    """
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    try:
                        yield line.rstrip(b"\r\n").decode("utf-8-sig").split("\t")
                    except UnicodeDecodeError:
                        yield ()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
