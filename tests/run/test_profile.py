"""Traces of a run: which rounds they hold, and that they end with it."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from fedcodist.run.profile import check_trace_folder, tracing


@jax.jit
def a_round(x):
    return x @ x


def run(callbacks, evaluations):
    """Something between any two evaluations."""
    for number in range(evaluations):
        with jax.profiler.TraceAnnotation(f"before evaluation {number}"):
            a_round(jnp.ones((8, 8))).block_until_ready()
        for callback in callbacks:
            callback([{"round": number}])


def events(folder):
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


@pytest.mark.slow
def test_the_rounds_before_the_third_evaluation_are_traced(tmp_path, capsys):
    with tracing(tmp_path / "trace") as callbacks:
        run(callbacks, 5)
    found = {name for name in events(tmp_path / "trace") if "before evaluation" in str(name)}
    assert found == {"before evaluation 2"}
    assert list((tmp_path / "trace").glob("plugins/profile/*/*.xplane.pb"))
    assert capsys.readouterr() == (f"trace: {tmp_path / 'trace'}\n", "")


@pytest.mark.slow
def test_a_run_that_fails_ends_its_trace(tmp_path):
    with pytest.raises(KeyError), tracing(tmp_path / "first") as callbacks:
        run(callbacks, 2)
        raise KeyError
    with tracing(tmp_path / "second") as callbacks:
        run(callbacks, 3)
    assert events(tmp_path / "second")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluations", "line"), [(0, "nothing was traced"), (2, "the trace may have no rounds")]
)
def test_a_run_without_a_third_evaluation_says_so(evaluations, line, tmp_path):
    with pytest.warns(UserWarning, match=line), tracing(tmp_path) as callbacks:
        run(callbacks, evaluations)
    assert bool(list(tmp_path.glob("plugins/profile/*"))) == (evaluations == 2)


def test_without_a_folder_nothing_happens(capsys):
    with tracing(None) as callbacks:
        assert callbacks == []
    assert capsys.readouterr() == ("", "")


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    check_trace_folder(str(tmp_path / "new" / "folder"))
    # It may be in a run folder, which must be new.
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "old").mkdir()
    check_trace_folder(str(tmp_path / "old"))
    assert (tmp_path / "old").is_dir()
    for name in ("file", "file/folder"):
        with pytest.raises(ValueError, match=r"--profile must be a folder .*, got '.*file"):
            check_trace_folder(str(tmp_path / name))
