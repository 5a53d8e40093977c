"""FedSDD's schedules: what waits for what, what they take, and the command."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import schedule as module
from experiments.studies.schedule import MAIN, duration, schedule, timeline

SECONDS = st.floats(0, 100) | st.integers(0, 5).map(float)


@given(
    st.lists(SECONDS, min_size=1, max_size=5),
    SECONDS,
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 6),
)
def test_nothing_begins_before_what_it_needs(clients, distillation, rounds, overlapped, at_once):
    tasks = schedule(clients, distillation, rounds, overlapped, at_once)
    training = {(t.round, t.model): t for t in tasks if not t.is_distillation}
    server = {t.round: t for t in tasks if t.is_distillation}
    assert len(tasks) == len(training) + len(server) == rounds * (len(clients) + 1)
    for (round, model), task in training.items():
        assert task.end - task.start == pytest.approx(clients[model])
        assert server[round].start >= task.end
        if round:
            assert task.start >= training[round - 1, model].end
            if model == MAIN or not overlapped:
                assert task.start >= server[round - 1].end
        if round > 1:
            assert task.start >= server[round - 2].end
    for first, second in itertools.pairwise(server.values()):
        assert second.start >= first.end
    # Never more clients than are available; at most the server beside them.
    for moment in {task.start for task in training.values()}:
        busy = [t for t in training.values() if t.start <= moment < t.end]
        assert len(busy) <= at_once


@given(st.integers(1, 6), st.integers(0, 50), st.integers(0, 300), st.integers(1, 6))
def test_one_client_at_a_time_in_closed_form(models, seconds, distillation, rounds):
    clients = [float(seconds)] * models
    sequence = duration(schedule(clients, distillation, rounds, overlapped=False))
    assert sequence == pytest.approx(rounds * (models * seconds + distillation))
    overlapped = duration(schedule(clients, distillation, rounds, overlapped=True))
    others = (models - 1) * seconds
    each = seconds + max(others, distillation)
    assert overlapped == pytest.approx(models * seconds + distillation + (rounds - 1) * each)
    assert overlapped <= sequence


def test_with_all_clients_at_once_only_the_main_model_matters():
    for overlapped in (False, True):
        assert duration(schedule([2.0, 2.0, 2.0], 5.0, 4, overlapped, at_once=3)) == 4 * 7.0


def test_the_timeline_shows_who_waits():
    tasks = schedule([1.0, 1.0], 2.0, 2, overlapped=True)
    # Model 1 goes on in second 2, the main model in second 4, when the server is done.
    assert timeline(tasks, width=7).splitlines() == [
        "main model  |1   2  |",
        "model 1     | 12    |",
        "server      |  11 22|",
    ]


def test_the_command_prints_the_gain(capsys):
    assert module.main(["--client-seconds", "10", "10", "10", "10", "--distillation-seconds", "30",
                        "--rounds", "10"]) == 0  # fmt: skip
    output = capsys.readouterr().out
    assert "10 rounds in sequence: 700 s, overlapped: 430 s, 38.6% less" in output
    assert output.count("server") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--at-once", "0"], "at_once must be at least 1"),
        (["--client-seconds", "-1"], "client_seconds must be at least 0"),
        (["--distillation-seconds", "nan"], "distillation_seconds must be finite"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert module.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_clients():
    with pytest.raises(ValueError, match="at least one client"):
        schedule([], 1.0, 1, overlapped=True)
