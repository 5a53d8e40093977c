"""The progress display, on a made-up clock."""

import io

import pytest
from rich.console import Console

from fedcodist.run.progress import progress


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self):
        return True


def log():
    return Console(file=io.StringIO(), width=40)


def terminal():
    return Console(file=Terminal(), width=100, force_terminal=True)


def test_log_gets_one_line_per_update():
    clock, console = Clock(), log()
    with progress("digits", 100, console=console, clock=clock) as show:
        clock.seconds = 30.0  # of which 28 compile
        show(20, "test accuracy: small 83.1 %")
        clock.seconds = 32.0
        show(40, "test accuracy: small 85.0 %")
        clock.seconds = 34.0
        show(60)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "digits  compiling",
        "digits  round  20/100  test accuracy: small 83.1 %",
        "digits  round  40/100  10.0 rounds/s  ETA 0:06  test accuracy: small 85.0 %",
        "digits  round  60/100  10.0 rounds/s  ETA 0:04  test accuracy: small 85.0 % (round 40)",
    ]


def test_log_is_not_flooded_and_ends_with_the_last_round():
    clock, console = Clock(), log()
    with progress("digits", 1000, console=console, clock=clock) as show:
        for round in range(1, 1001):
            clock.seconds += 0.01
            show(round, f"accuracy {round / 1000}")
    lines = console.file.getvalue().splitlines()
    assert 6 <= len(lines) <= 8
    assert "1000/1000" in lines[-1] and "done in 0:10" in lines[-1]


def test_log_of_an_aborted_run_shows_its_last_update():
    clock, console = Clock(), log()
    with (
        pytest.raises(RuntimeError),
        progress("digits", 100, console=console, clock=clock) as show,
    ):
        for round in (1, 2, 3):
            show(round)
        raise RuntimeError
    lines = console.file.getvalue().splitlines()
    assert [line.split()[-1] for line in lines] == ["compiling", "1/100", "3/100"]


def test_resumed_run_counts_its_own_rounds_only():
    clock, console = Clock(), log()
    with progress("digits", 100, start_round=60, console=console, clock=clock) as show:
        clock.seconds = 10.0
        show(60, "small 0.5")  # the evaluation before any round
        clock.seconds = 20.0
        show(70, "small 0.6")
        clock.seconds = 22.5
        show(80, "small 0.7")
    lines = console.file.getvalue().splitlines()
    assert lines[:3] == [
        "digits  continues after round 60, compiling",
        "digits  round  60/100  small 0.5",
        "digits  round  70/100  small 0.6",
    ]
    assert "4.0 rounds/s  ETA 0:05" in lines[3] and len(lines) == 4


def test_no_time_is_told_before_one_is_known_without_compilation():
    """Ten thousand rounds of a hundredth of a second, of which the first compile for 20 s."""
    clock, console = Clock(), log()
    with progress("digits", 10_000, console=console, clock=clock) as show:
        show(0, "small 0.1")
        clock.seconds = 20.1
        show(10, "small 0.2")
        clock.seconds = 25.0  # without an update nothing is known
        clock.seconds = 20.2 + 5
        show(20, "small 0.3")
    lines = console.file.getvalue().splitlines()
    assert ["ETA" in line for line in lines] == [False, False, False, True]


def test_an_evaluation_that_compiles_counts_neither():
    """A resumed run evaluates first after some blocks of rounds."""
    clock, console = Clock(), log()
    with progress("digits", 1000, start_round=500, console=console, clock=clock) as show:
        clock.seconds = 30.0  # training compiles
        show(510)
        clock.seconds = 40.0
        show(520)
        clock.seconds = 140.0  # evaluation compiles
        show(530, "small 0.2")
        clock.seconds = 150.0
        show(540)
    lines = console.file.getvalue().splitlines()
    assert "ETA" not in lines[1] and "ETA 8:00" in lines[2]
    assert "ETA" not in lines[3] and "ETA 7:40" in lines[4]


@pytest.mark.parametrize("where", [log, terminal])
def test_names_are_shown_as_they_are(where):
    """Names are not read as rich's markup, where an unmatched end is an error."""
    console = where()
    with progress("[/bold] a[red]b $x$ :smile:", 1, console=console) as show:
        show(1, "[/m] 50.0 %")
    output = console.file.getvalue()
    for text in ("[/bold] a[red]b $x$ :smile:", "[/m] 50.0 %"):
        assert text in output


def test_terminal_gets_a_live_bar():
    clock, console = Clock(), terminal()
    with progress("digits", 100, console=console, clock=clock) as show:
        assert "compiling, 0:00" in console.file.getvalue()
        clock.seconds = 60.0
        show(0, "test accuracy: small 10.0 % [x]")  # rounds still compile
        assert "compiling, 1:00" in console.file.getvalue()
        for round in (20, 40):
            clock.seconds += 10.0
            show(round, "test accuracy: small 83.1 % [x]")
    output = console.file.getvalue()
    for text in ("digits", "40/100", "2.0 rounds/s", "ETA 0:30", "small 83.1 % [x]"):
        assert text in output
    assert "compiling" not in output.rpartition("40/100")[2]
    assert "\x1b[?25h" in output  # the cursor is back


def test_a_terminal_tells_where_a_run_continues():
    clock, console = Clock(), terminal()
    with progress("digits", 100, start_round=60, console=console, clock=clock):
        assert "continues after round 60, compiling, 0:00" in console.file.getvalue()


def test_no_control_codes_where_colours_are_forced_on_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    with progress("digits", 10, console=console) as show:
        show(10, "small 1.0")
    assert "\x1b" not in console.file.getvalue()


def test_disabled_shows_nothing(capsys):
    with progress("digits", 10, enabled=False) as show:
        show(10, "small")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_nothing_left_to_do(capsys):
    with progress("digits", 10, start_round=10) as show:
        show(10, "small 1.0")
    assert "done in 0:00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("total", "start", "message"),
    [(0, 0, "total_rounds"), (10, -1, "start_round"), (10, 11, "start_round")],
)
def test_bad_rounds(total, start, message):
    with pytest.raises(ValueError, match=message), progress("digits", total, start):
        pass
