"""Text of users in several domains as federated splits, and pools of clients by domain.

A prepared folder of text has the splits `train`, `distillation`, `held_out` and `test`, with different
users and the columns `tokens` and `domain`. Its split `vocabulary` has the column `word`, by falling
frequency. The manifest's arguments name the domains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedcodist.core.checks import check_integer, check_several
from fedcodist.data.client_pools import rounded_down, split_users
from fedcodist.data.federated_data import FederatedData
from fedcodist.data.vocabulary import Vocabulary, check_sentences

# user -> domain -> sentences of words
Users = Mapping[str, Mapping[str, Sequence[Sequence[str]]]]
SPLITS = ("train", "distillation", "held_out", "test")
_MOST_DOMAINS = 128  # column `domain` is int8
TRAIN_LENGTH, EVALUATION_LENGTH = 20, 30  # FedJAX's for Stack Overflow


def text_splits(
    users: Users,
    domains: Sequence[str],
    shares: Sequence[float] = (0.6, 0.2, 0.1, 0.1),
    vocabulary_size: int = 10_000,
    max_examples: int | None = None,
    seed: int = 0,
) -> dict[str, FederatedData]:
    """Deals whole users to splits and encodes their words as tokens.

    The vocabulary is that of the users of `train` and `distillation`. Sentences are cut to 20 tokens in
    these splits, and to 30 in `held_out` and `test`.

    Args:
      users: user -> domain -> sentences of words. Users without a sentence are left out.
      domains: their names; column `domain` (int8) holds positions in this list.
      shares: shares of the users of train, distillation, held_out and test; they sum to 1.
      vocabulary_size: number of words, without the four special tokens.
      max_examples: most sentences per user and domain, taken at equal distances; None keeps all.
      seed: of the deal.

    Raises:
      ValueError, TypeError: shares or sizes out of range, text in place of lists, or too few users for
        a split.
    """
    check_shares("shares", shares)
    check_several("domains", domains)
    if len(domains) > _MOST_DOMAINS:
        raise ValueError(f"domains must be at most {_MOST_DOMAINS}, got {len(domains)}")
    check_integer("vocabulary_size", vocabulary_size, low=1)
    if max_examples is not None:
        check_integer("max_examples", max_examples, low=1)
    chosen = {
        user: {
            domain: _thinned(
                f"users[{user!r}][{domain!r}]", by_domain.get(domain, ()), max_examples
            )
            for domain in domains
        }
        for user, by_domain in users.items()
    }
    ids = sorted(user for user, by_domain in chosen.items() if any(map(len, by_domain.values())))
    groups = split_users(len(ids), dict(zip(SPLITS, shares, strict=True)), seed)
    users_of = {name: [ids[index] for index in indices] for name, indices in groups.items()}
    frequency = Counter(
        word
        for user in users_of["train"] + users_of["distillation"]
        for sentences in chosen[user].values()
        for sentence in sentences
        for word in sentence
    )
    vocabulary = Vocabulary.from_counts(frequency, vocabulary_size)
    lengths = dict.fromkeys(SPLITS, TRAIN_LENGTH) | dict.fromkeys(SPLITS[2:], EVALUATION_LENGTH)
    splits = {
        name: _federated({user: chosen[user] for user in users_of[name]}, vocabulary, lengths[name])
        for name in SPLITS
    }
    splits["vocabulary"] = vocabulary_split(vocabulary)
    return splits


def check_shares(name: str, shares: Sequence[float]) -> None:
    """Raises ValueError that names the argument unless shares are of the splits and sum to 1."""
    # In this form NaN is refused too.
    if len(shares) != len(SPLITS) or not (min(shares) > 0 and abs(sum(shares) - 1) <= 1e-6):
        raise ValueError(f"{name} must be {len(SPLITS)} positive numbers of sum 1, got {shares!r}")


def vocabulary_split(vocabulary: Vocabulary) -> FederatedData:
    """The words as a split of prepared data: column `word`, by number."""
    return FederatedData.of_one_client({"word": np.array(vocabulary.words)}, "vocabulary")


def vocabulary_of(splits: Mapping[str, FederatedData]) -> Vocabulary:
    """The vocabulary of prepared splits. Raises ValueError where they have none."""
    if "vocabulary" not in splits or "word" not in splits["vocabulary"].columns:
        raise ValueError("the data have no split 'vocabulary' with a column 'word'")
    return Vocabulary(tuple(splits["vocabulary"].columns["word"].tolist()))


def of_domain(data: FederatedData, domain: int) -> FederatedData:
    """The examples of one domain. Clients without any are left out.

    Raises:
      ValueError: no client has examples of the domain.
    """
    is_own, sizes = _of_domain(data, domain)
    if not sizes.any():
        raise ValueError(f"no example is of domain {domain}")
    columns = {name: column[is_own] for name, column in data.columns.items()}
    sizes, client_ids = sizes[sizes > 0], data.client_ids[sizes > 0]
    return FederatedData(columns, np.concatenate([[0], np.cumsum(sizes)]), client_ids)


def domain_pools(
    data: FederatedData, domains: Sequence[str], shares: Mapping[str, float], seed: int
) -> tuple[FederatedData, dict[str, np.ndarray]]:
    """Disjoint pools of users, each with the users' examples of one domain only.

    Args:
      data: users with a column `domain`.
      domains: the domains' names.
      shares: domain -> share of all users, drawn in this order among those that have examples of it.
      seed: of the draw.

    Returns:
      The clients of all pools, named `<domain>/<user>`, and domain -> int32 indices among them.

    Raises:
      ValueError: an unknown domain, a share outside (0, 1], or too few users.
    """
    check_integer("seed", seed, low=0)
    order = np.random.default_rng(seed).permutation(data.num_clients)
    examples: list[np.ndarray] = []
    sizes: list[int] = []
    ids: list[str] = []
    pools: dict[str, np.ndarray] = {}
    for name, share in shares.items():
        if name not in domains:
            raise ValueError(f"a pool's domain must be one of {list(domains)}, got {name!r}")
        if not 0 < share <= 1:
            raise ValueError(f"the share of domain {name!r} must be in (0, 1], got {share!r}")
        is_own, sizes_of_own = _of_domain(data, list(domains).index(name))
        has_own = sizes_of_own[order] > 0
        wanted = rounded_down(share, data.num_clients)
        drawn = order[has_own][:wanted]
        if not 1 <= wanted <= len(drawn):
            raise ValueError(
                f"{wanted} users of domain {name!r} are asked for ({share} of {data.num_clients}), "
                f"but {len(order[has_own])} that no other pool has are left"
            )
        order = order[~np.isin(order, drawn)]
        drawn = np.sort(drawn)
        is_drawn = np.zeros(data.num_clients, bool)
        is_drawn[drawn] = True
        examples.append(np.flatnonzero(is_own & np.repeat(is_drawn, data.client_sizes)))
        pools[name] = np.arange(len(ids), len(ids) + len(drawn), dtype=np.int32)
        sizes += sizes_of_own[drawn].tolist()
        ids += [f"{name}/{user}" for user in data.client_ids[drawn].tolist()]
    # One concatenation avoids a second copy of all tokens.
    every = np.concatenate(examples)
    columns = {name: column[every] for name, column in data.columns.items()}
    offsets = np.cumsum([0, *sizes])
    return FederatedData.from_arrays(columns, offsets=offsets, client_ids=ids), pools


def _of_domain(data: FederatedData, domain: int) -> tuple[np.ndarray, np.ndarray]:
    """A mask of the examples of a domain, and their number per client."""
    if "domain" not in data.columns:
        raise ValueError(f"data must have a column 'domain', it has {sorted(data.columns)}")
    is_own = data.columns["domain"] == domain
    sizes = np.diff(np.concatenate([[0], np.cumsum(is_own)])[data.offsets])
    return is_own, sizes


def _thinned(
    name: str, sentences: Sequence[Sequence[str]], max_examples: int | None
) -> Sequence[Sequence[str]]:
    check_sentences(name, sentences)
    if max_examples is None or len(sentences) <= max_examples:
        return sentences
    return [sentences[index * len(sentences) // max_examples] for index in range(max_examples)]


def _federated(users: Users, vocabulary: Vocabulary, length: int) -> FederatedData:
    tokens, domain, sizes = [], [], []
    for by_domain in users.values():
        for index, sentences in enumerate(by_domain.values()):
            tokens.append(vocabulary.encode(sentences, length))
            domain.append(np.full(len(sentences), index, np.int8))
        sizes.append(sum(map(len, by_domain.values())))
    columns = {"tokens": np.concatenate(tokens), "domain": np.concatenate(domain)}
    return FederatedData.from_arrays(
        columns, offsets=np.cumsum([0, *sizes]), client_ids=list(users)
    )
