"""Runs recorded seed by seed are read as one run of all seeds."""

import itertools
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from experiments.studies.archive import Record
from experiments.studies.seeds import most_seeds

SEEDS = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
NUMBER = 0.001


def whole(seeds):
    """A record of `seeds`, whose numbers encode what they belong to."""
    value = lambda start: [start + NUMBER * seed for seed in seeds]
    final = {"small": {"test": {"accuracy": value(0.2), "loss": value(2)}}, "large": {}}
    return Record(
        path=Path(f"{seeds}.json"),
        experiment="one",
        run="run",
        command=f"command of {seeds}",
        config={"seed": seeds[0], "seeds": len(seeds), "rounds": 2, "algorithm": {}},
        commit="c0ffee",
        seeds=list(seeds),
        rounds=2,
        full_rounds=2,
        finished=True,
        last_round=2,
        device="cpu",
        date="2026-01-01",
        seconds=len(seeds),
        final=final,
        curve={
            "small": {"test": {"round": [0, 2], "accuracy": [value(0.1), value(0.2)]}},
        },
        notes=[],
        phases={"private": {"small": {"test": {"accuracy": value(0.1)}}}},
    )


@given(st.permutations(["old", "new", "next"]))
def test_of_several_records_of_a_seed_the_newest_is_joined(order):
    parts = {
        "old": whole([0])._replace(date="2026-01-01", command="old"),
        "new": whole([0])._replace(date="2026-01-02", command="new"),
        "next": whole([1])._replace(date="2026-01-01", command="next"),
    }
    found = most_seeds([parts[name] for name in order])
    assert (found.command, found.seeds, found.date) == ("new", [0, 1], "2026-01-02")


@given(SEEDS, st.data())
def test_parts_of_a_run_are_the_run(seeds, data):
    cuts = data.draw(st.lists(st.integers(0, len(seeds)), max_size=3).map(sorted))
    ends = [0, *cuts, len(seeds)]
    parts = [part for a, b in itertools.pairwise(ends) if (part := sorted(seeds)[a:b])]
    found = most_seeds(map(whole, data.draw(st.permutations(parts))))
    first = whole(parts[0])
    expected = whole(sorted(seeds))._replace(
        path=first.path, command=first.command, config=first.config
    )
    assert found == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"seed": 2, "seeds": 1, "rounds": 3, "algorithm": {}}},
        {"data": {"data/digits": {"source": "others", "num_examples": {}}}},
        {"last_round": 1},
        {"curve": {"small": {"test": {"round": [2], "accuracy": [[0.2]]}}}},
        {"phases": {}},
        {"heads": {"shared": []}},
        {"spectra": {"small": {}}},
        {"gradient_spectra": {"small": {}}},
        {"seeds": [1]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_others_are_left_apart(changes):
    one, other = whole([0, 1]), whole([2])._replace(**changes)
    assert most_seeds([one, other]) == most_seeds([other, one]) == one


def test_a_seed_may_have_its_public_training_from_a_cache():
    one, other = whole([0]), whole([1])
    trained = one._replace(phases={"public": {"small": {}}, **one.phases})
    assert most_seeds([trained, other]) == most_seeds([one, other])
    assert most_seeds([trained, other]).seeds == [0, 1]
    both = most_seeds([trained, other._replace(phases=trained.phases)])
    assert both.phases.keys() == {"public", "private"}


def test_a_metric_that_only_one_record_has_is_left_out():
    one, other = whole([0]), whole([1])
    of_small = {"test": one.final["small"]["test"] | {"f_score": [0.5]}}
    final = {**one.final, "small": of_small}
    newer = most_seeds([one._replace(final=final), other])
    assert newer == most_seeds([one, other]) and newer.seeds == [0, 1]


def test_a_longer_run_goes_before_one_of_more_seeds():
    short = whole([0, 1, 2])._replace(last_round=1)
    assert most_seeds([short, whole([0])]) == most_seeds([whole([0]), short]) == whole([0])


def test_the_newest_of_as_many_seeds():
    old, new = whole([0, 1]), whole([0, 1])._replace(date="2026-02-01")
    assert most_seeds([new, old]) == most_seeds([old, new]) == new
    assert most_seeds([]) is None
