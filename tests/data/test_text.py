"""Users dealt to splits, and disjoint pools of users by domain."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.text import SPLITS, domain_pools, of_domain, text_splits, vocabulary_of

DOMAINS = ("prose", "code")


def made_up(seed, users=30):
    """Users of whom some lack a domain; every word names its user and domain."""
    rng = np.random.default_rng(seed)
    return {
        f"user{user}": {
            domain: [
                [f"{domain}{user}", f"w{rng.integers(9)}"] * int(rng.integers(1, 25))
                for _ in range(rng.integers(0, 5))
            ]
            for domain in DOMAINS
        }
        for user in range(users)
    }


def decoded(splits, data):
    vocabulary = vocabulary_of(splits)
    for user, columns in data.clients():
        for tokens, domain in zip(columns["tokens"], columns["domain"], strict=True):
            yield user, DOMAINS[domain], vocabulary.decode(tokens)


@settings(max_examples=20)
@given(st.integers(0, 999))
def test_every_sentence_is_in_one_split(seed):
    users = made_up(seed)
    splits = text_splits(users, DOMAINS, seed=seed)
    seen = [sentence for name in SPLITS for sentence in decoded(splits, splits[name])]
    assert len(seen) == sum(len(s) for own in users.values() for s in own.values())
    ids = [set(splits[name].client_ids.tolist()) for name in SPLITS]
    assert len(set.union(*ids)) == sum(map(len, ids))
    for name in SPLITS:
        length = 20 if name in ("train", "distillation") else 30
        assert splits[name].columns["tokens"].shape[1] == length + 1
    for name in ("train", "distillation"):
        for user, domain, words in decoded(splits, splits[name]):
            assert words in [sentence[:20] for sentence in users[user][domain]]


def test_the_vocabulary_is_of_training_users_only():
    users = made_up(0)
    splits = text_splits(users, DOMAINS)
    known = set(vocabulary_of(splits).words)
    for name in SPLITS:
        own = {d + user.removeprefix("user") for user, d, _ in decoded(splits, splits[name])}
        assert own <= known if name in SPLITS[:2] else not own & known
    assert len(vocabulary_of(text_splits(users, DOMAINS, vocabulary_size=5)).words) == 5


def test_most_sentences_of_a_user_are_limited():
    users = {str(u): {"prose": [[f"w{i}"] for i in range(10)], "code": []} for u in range(10)}
    splits = text_splits(users, DOMAINS, max_examples=4)
    kept = [words for _, _, words in decoded(splits, splits["train"].select([0]))]
    assert kept == [["w0"], ["w2"], ["w5"], ["w7"]]


def test_a_seed_is_a_deal():
    one, same, other = (text_splits(made_up(0), DOMAINS, seed=seed) for seed in (0, 0, 1))
    assert one["train"].client_ids.tolist() == same["train"].client_ids.tolist()
    assert one["train"].client_ids.tolist() != other["train"].client_ids.tolist()
    np.testing.assert_array_equal(one["test"].columns["tokens"], same["test"].columns["tokens"])


@settings(max_examples=20)
@given(st.integers(0, 999))
def test_pools_are_disjoint_and_of_one_domain(seed):
    users = made_up(seed, 60)
    splits = text_splits(users, DOMAINS, seed=seed)
    train = splits["train"]
    clients, pools = domain_pools(train, DOMAINS, {"prose": 0.4, "code": 0.3}, seed)
    names = {domain: [clients.client_ids[i] for i in own] for domain, own in pools.items()}
    assert len(names["prose"]) == int(0.4 * train.num_clients)
    assert len(names["code"]) == int(0.3 * train.num_clients)
    users_of = [{name.split("/")[1] for name in own} for own in names.values()]
    assert not users_of[0] & users_of[1]
    found = {}
    for name, domain, words in decoded(splits, clients):
        assert name.split("/")[0] == domain
        found.setdefault(name, []).append(words)
    for name, sentences in found.items():
        domain, user = name.split("/")
        assert sentences == [sentence[:20] for sentence in users[user][domain]]


def test_pools_are_the_only_copy_of_their_tokens():
    tokens = np.zeros((40_000, 201), np.uint16)
    columns = {"tokens": tokens, "domain": np.arange(40_000) // 200 % 2}
    data = FederatedData.from_arrays(columns, offsets=np.arange(0, 40_001, 100))
    tracemalloc.start()
    clients, _ = domain_pools(data, DOMAINS, {"prose": 0.5, "code": 0.5}, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert clients.num_examples == 40_000 and peak < 1.2 * tokens.nbytes


def test_a_domain_is_part_of_every_client():
    splits = text_splits(made_up(3), DOMAINS)
    parts = [of_domain(splits["test"], index) for index in range(2)]
    assert sum(part.num_examples for part in parts) == splits["test"].num_examples
    for index, part in enumerate(parts):
        assert (part.columns["domain"] == index).all() and (part.client_sizes > 0).all()


def test_shares_are_not_lost_to_rounding():
    """100 x 0.29 is a little less than 29."""
    users = {f"user{index}": {"prose": [["a"]]} for index in range(100)}
    splits = text_splits(users, ["prose"], (0.13, 0.29, 0.29, 0.29))
    counts = [splits[name].num_clients for name in ("train", "distillation", "held_out", "test")]
    assert counts == [13, 29, 29, 29]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: text_splits(made_up(0), DOMAINS, (0.5, 0.5)), "shares must be 4 positive numbers"),
        (lambda: text_splits(made_up(0), DOMAINS, max_examples=0), "max_examples must be at least"),
        (lambda: text_splits(made_up(0, 5), DOMAINS), "there must be a user for each split"),
        (lambda: pools({"verse": 0.1}), "must be one of .*'prose', 'code'.*, got 'verse'"),
        (lambda: pools({"prose": 1.5}), r"domain 'prose' must be in \(0, 1\], got 1.5"),
        (lambda: pools({"prose": 0.6, "code": 0.6}), "users of domain 'code' are asked for"),
        (lambda: of_domain(text_splits(made_up(0), DOMAINS)["test"], 2), "no example is of domain"),
        (lambda: vocabulary_of({}), "no split 'vocabulary'"),
        (
            lambda: of_domain(text_splits(made_up(0), DOMAINS)["test"].keep(("tokens",)), 0),
            "data must have a column 'domain'",
        ),
        (lambda: text_splits(made_up(0), range(129)), "domains must be at most 128, got 129"),
        (lambda: pools({"prose": 0.1}, seed=-1), "seed must be at least 0, got -1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"users": {"a": {"prose": "a b"}}}, r"users\['a'\]\['prose'\] must be lists of words"),
        (
            {"users": {"a": {"prose": [["a"], "a b"]}}, "max_examples": 1},
            r"users\['a'\]\['prose'\]\[1\] must be a list of words, got 'a b'",
        ),
        ({"domains": "prose"}, "domains must be a list, got 'prose'"),
        ({"max_examples": 2.5}, "max_examples must be an integer of at least 1, got 2.5"),
        ({"vocabulary_size": 2.5}, "vocabulary_size must be an integer of at least 1, got 2.5"),
    ],
)
def test_text_is_no_list_and_sizes_are_integers(arguments, message):
    with pytest.raises(TypeError, match=message):
        text_splits(**{"users": made_up(0), "domains": DOMAINS, **arguments})


def test_clients_without_examples_of_a_domain_are_left_out():
    columns = {"tokens": np.ones((3, 2), np.uint16), "domain": np.array([0, 1, 0])}
    data = FederatedData.from_arrays(columns, offsets=[0, 0, 2, 3, 3], allow_empty=True)
    assert of_domain(data, 0).client_sizes.tolist() == [1, 1]
    assert of_domain(data, 1).client_sizes.tolist() == [1]


def pools(shares, seed=0):
    return domain_pools(text_splits(made_up(0), DOMAINS)["train"], DOMAINS, shares, seed)
