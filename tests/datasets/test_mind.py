"""Reading MIND: the official layout, what is skipped and counted, examples, and the deal of users."""

import os
import tracemalloc
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcodist.datasets.mind import (
    HISTORY,
    deal_users,
    evaluation_examples,
    read_impressions,
    read_news,
    training_examples,
)

TITLES = {f"N{number}": f"Title {number}" for number in range(1, 7)}


def article(identity, title, abstract="An abstract."):
    fields = [identity, "news", "politics", title, abstract, "https://a.b/c.html", "[]", "[]"]
    return "\t".join(fields).encode() + b"\n"


def behavior(number, user, history, candidates):
    fields = [str(number), user, "11/12/2019 2:14:46 PM", history, candidates]
    return "\t".join(fields).encode() + b"\n"


ARTICLES = [article(*each) for each in TITLES.items()]
BEHAVIORS = [
    behavior(1, "U1", "N1 N2", "N3-0 N4-1 N5-0"),
    behavior(2, "U2", "", "N1-1 N2-1 N6-0"),
    behavior(3, "U1", "N9 N3", "N2-0 N9-0 N1-1"),
]


def layout(folder, articles=ARTICLES, behaviors=BEHAVIORS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "news.tsv").write_bytes(b"".join(articles))
    (folder / "behaviors.tsv").write_bytes(b"".join(behaviors))
    return folder


def read(folder):
    news = read_news(folder)
    return news, read_impressions(folder, news.numbers)


def as_ids(news, articles):
    return [news.titles[number].replace("Title ", "N") for number in articles if number]


def test_articles(tmp_path):
    short = b"N7\tnews\tpolitics\tWithout an abstract\n"
    empty = article("N8", "No abstract", abstract="")
    later = article("N1", "Another title")
    news = read_news(layout(tmp_path, [*ARTICLES, short, empty, later, article("N9", " ")]))
    expected = ["", *TITLES.values(), "Without an abstract", "No abstract"]
    assert list(news.titles) == expected and news.numbers["N1"] == 1
    assert news.skipped == {"articles without a title": 1}


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    mark = b"\xef\xbb\xbf"
    plain = read(layout(tmp_path / "plain"))
    layout(tmp_path / "marked", [mark + b"".join(ARTICLES)], [mark + b"".join(BEHAVIORS)])
    for found, expected in zip(read(tmp_path / "marked"), plain, strict=True):
        assert str(found) == str(expected)


def test_impressions_that_arrays_cannot_hold_are_malformed(tmp_path):
    many = behavior(4, "U4", "", " ".join(["N1-1"] + ["N2-0"] * 5000))
    other = behavior(5, "U1\0", "", "N1-1 N2-0")
    _, found = read(layout(tmp_path, behaviors=[*BEHAVIORS, many, other]))
    _, plain = read(layout(tmp_path))
    assert found.users == plain.users
    assert found.skipped["malformed lines of behaviors.tsv"] == 2


def test_articles_of_two_folders(tmp_path):
    first = layout(tmp_path / "train", ARTICLES[:3])
    second = layout(tmp_path / "dev", [article("N2", "Changed"), *ARTICLES[3:]])
    assert list(read_news(first, second).titles) == ["", *TITLES.values()]


def test_impressions(tmp_path):
    news, found = read(layout(tmp_path))
    assert found.users == ("U1", "U2", "U1")
    parts = np.split(found.candidates, found.ends[:-1])
    assert [as_ids(news, part) for part in parts] == [
        ["N3", "N4", "N5"],
        ["N1", "N2", "N6"],
        ["N2", "N1"],
    ]
    clicked = [part.tolist() for part in np.split(found.clicked, found.ends[:-1])]
    assert clicked == [[False, True, False], [True, True, False], [False, True]]
    assert [as_ids(news, row) for row in found.history] == [["N1", "N2"], [], ["N3"]]
    assert found.skipped == {
        "candidates without an article": 1,
        "clicks of a history without an article": 1,
    }


def test_only_the_latest_clicks_are_kept(tmp_path):
    history = " ".join(["N1"] * 3 + ["N2"] * (HISTORY - 1) + ["N3"])
    line = behavior(1, "U1", history, "N3-0 N4-1")
    news, found = read(layout(tmp_path, behaviors=[line]))
    assert as_ids(news, found.history[0]) == ["N2"] * (HISTORY - 1) + ["N3"]


SKIPPED = {
    "impressions without a click left": behavior(9, "U9", "N1", "N1-0 N8-1 N2-0"),
    "impressions with clicks only left": behavior(9, "U9", "N1", "N1-1 N8-0"),
    "malformed lines of behaviors.tsv": b"9\tU9\ttime\tN1 N2\n",
}
MALFORMED = [
    behavior(9, "U9", "", "N1 N2"),  # as in MIND's test set, whose clicks are not published
    behavior(9, "U9", "", "N1-1 N2-2"),
    behavior(9, "", "", "N1-1 N2-0"),
    behavior(9, "U9", "", ""),
    behavior(9, "U9", "", "N1-1 N2-0\tmore"),
    b"9\tU\xe99\ttime\t\tN1-1 N2-0\n",
]


@pytest.mark.parametrize(
    ("reason", "line"),
    [*SKIPPED.items(), *(("malformed lines of behaviors.tsv", line) for line in MALFORMED)],
)
def test_what_cannot_be_used_is_counted_and_spoils_no_other(tmp_path, reason, line):
    whole = read(layout(tmp_path))[1]
    found = read(layout(tmp_path, behaviors=[line, *BEHAVIORS, line]))[1]
    assert found.skipped[reason] == 2
    for there, here in zip(whole[:-1], found[:-1], strict=True):
        np.testing.assert_array_equal(there, here)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40) | st.sampled_from([*SKIPPED.values(), *MALFORMED])))
def test_any_bytes_between_lines_are_survived(tmp_path, garbage):
    lines = [each.replace(b"\n", b" ") + b"\n" for each in garbage]
    news, found = read(layout(tmp_path, [*lines, *ARTICLES], [*BEHAVIORS, *lines]))
    filled = sum(bool(line.strip()) for line in lines)
    lost = sum(count for reason, count in news.skipped.items())
    assert len(news.titles) - 1 + lost <= filled + len(ARTICLES)
    lost = sum(n for r, n in found.skipped.items() if r.startswith(("impressions", "malformed")))
    assert len(found.users) + lost == filled + len(BEHAVIORS)


def test_files_of_which_nothing_is_left_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"news.tsv cannot be read: No such file"):
        read_news(tmp_path)
    layout(tmp_path, [b"\n", b"N1\tnews\n"], list(SKIPPED.values()))
    with pytest.raises(ValueError, match=r"news.tsv has no article in MIND's format"):
        read_news(tmp_path)
    message = r"no impression that can be used: .*1 impressions without a click left, 1 malformed"
    with pytest.raises(ValueError, match=message):
        read_impressions(tmp_path, {f"N{number}": number for number in range(1, 7)})


@st.composite
def made_up(draw):
    """Lines of a few users, [(user, history, [(article, clicked)])], both kinds in each."""
    articles = st.sampled_from(sorted(TITLES))
    shown = st.lists(st.tuples(articles, st.integers(0, 1)), min_size=2, max_size=9)
    both_kinds = shown.filter(lambda each: len({clicked for _, clicked in each}) == 2)
    line = st.tuples(st.sampled_from("ABCDEFGH"), st.lists(articles, max_size=4), both_kinds)
    return draw(st.lists(line, min_size=1, max_size=10))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made_up(), st.data())
def test_examples_are_those_of_a_plain_loop(tmp_path, lines, data):
    chosen = data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=1).map(sorted))
    text = [
        behavior(1, user, " ".join(history), " ".join(f"{each}-{was}" for each, was in shown))
        for user, history, shown in lines
    ]
    news, found = read(layout(tmp_path, behaviors=text))
    training, evaluation = defaultdict(list), defaultdict(list)
    for user, history, shown in (lines[row] for row in chosen):
        others = [each for each, was in shown if not was]
        training[user] += [(each, others, history) for each, was in shown if was]
        evaluation[user].append((shown, history))

    examples = training_examples(found, chosen)
    assert examples.columns["others"].shape[1] == max(
        len(others) for own in training.values() for _, others, _ in own
    )
    assert {
        user: [
            (as_ids(news, [c])[0], as_ids(news, o), as_ids(news, h))
            for c, o, h in zip(own["clicked"], own["others"], own["history"], strict=True)
        ]
        for user, own in examples.clients()
    } == dict(training)

    examples = evaluation_examples(found, chosen)
    for user, own in examples.clients():
        for row, (shown, history) in enumerate(evaluation.pop(user)):
            candidates, label = own["candidates"][row], own["label"][row]
            assert as_ids(news, candidates) == [each for each, _ in shown]
            assert label[: len(shown)].tolist() == [was for _, was in shown]
            assert set(label[len(shown) :]) <= {-1} and not candidates[len(shown) :].any()
            assert as_ids(news, own["history"][row]) == history
    assert not evaluation


def test_examples_take_little_more_memory_than_they_have(tmp_path):
    """Of short impressions beside a long one; it was six times as much."""
    short = [behavior(1, f"U{user}", "", "N1-1 N2-0") for user in range(2000)]
    long = behavior(1, "U0", "", " ".join(["N1-1"] + ["N2-0"] * 400))
    _, found = read(layout(tmp_path, behaviors=[*short, long]))
    for examples in (training_examples, evaluation_examples):
        tracemalloc.start()
        columns = examples(found, np.arange(2001)).columns
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * sum(column.nbytes for column in columns.values()), examples


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40).map("U{}".format), min_size=1, max_size=60), st.integers(0, 9))
def test_no_user_has_impressions_in_two_splits(users, seed):
    shares = {"train": 0.8, "held_out": 0.1, "test": 0.1}
    if len(set(users)) < 10:
        with pytest.raises(ValueError, match="there must be a user for each split"):
            deal_users(users, shares, seed)
        return
    rows = deal_users(users, shares, seed)
    assert sorted(np.concatenate(list(rows.values()))) == list(range(len(users)))
    own = [{users[row] for row in each} for each in rows.values()]
    assert sum(map(len, own)) == len(set(users))
    assert len(own[2]) == len(set(users)) // 10


@pytest.mark.skipif("FEDCODIST_DATA" not in os.environ, reason="needs the sample of MIND")
def test_every_candidate_of_the_real_sample_is_used_or_counted():
    folder = Path(os.environ["FEDCODIST_DATA"]) / "mind_sample"
    news, found = read(folder)
    assert len(news.titles) == 2001 and not news.skipped
    lost = sum(n for r, n in found.skipped.items() if r.startswith("impressions"))
    assert len(found.users) + lost == 5000 and len(found.users) == 119
    # Counted by another program: 5,310 of the 189,359 candidates have their article.
    assert found.skipped["candidates without an article"] == 189_359 - 5_310
    examples = evaluation_examples(found, np.arange(len(found.users)))
    label = examples.columns["label"]
    assert ((label == 1).any(axis=1) & (label == 0).any(axis=1)).all()
    assert (label >= 0).sum() == len(found.candidates)
