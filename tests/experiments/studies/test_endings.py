"""The index counts the runs that no finished record of full length has."""

from types import SimpleNamespace

from experiments.studies.sections.commands import planned
from experiments.studies.sections.endings import not_run

NAME = "cifar100_kl_direction"


def record(run, rounds, finished=True):
    return SimpleNamespace(
        experiment=NAME, run=run, rounds=rounds, full_rounds=100, finished=finished
    )


def test_short_and_unfinished_runs_are_not_run():
    first, second, third, *others = planned(NAME)
    records = [record(first, 100), record(second, 40), record(third, 100, finished=False)]
    assert not_run(records, [NAME]) == [f"`{NAME}` ({2 + len(others)} of {3 + len(others)})"]
    assert not_run([record(run, 100) for run in planned(NAME)], [NAME]) == []
