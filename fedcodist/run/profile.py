"""Traces some rounds with jax.profiler, for XProf in TensorBoard or for Perfetto."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

Callback = Callable[[Sequence[Mapping[str, Any]]], None]


def check_trace_folder(folder: str) -> None:
    """Raises ValueError that names the flag if a trace cannot be written into the folder.

    A folder that does not exist is not made yet: it may lie in a run folder, which must be new.
    """
    made: list[Path] = []
    try:
        missing = [path for path in (Path(folder), *Path(folder).parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            made.append(path)
        Path(folder).mkdir(exist_ok=True)  # raises if it is a file
    except OSError as error:
        raise ValueError(
            f"--profile must be a folder that can be written, got {folder!r}: {error.strerror}."
        ) from error
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def tracing(folder: str | Path | None) -> Iterator[list[Callback]]:
    """Traces the rounds from a run's second evaluation to its third, when everything is compiled.

    Args:
      folder: the trace is written to `plugins/profile/<date>/` in it. `tensorboard --logdir` shows it,
        and Perfetto shows its `trace.json.gz`. None traces nothing.

    Yields:
      Callbacks for `run_experiment`.
    """
    if folder is None:
        yield []
        return
    evaluations, is_tracing = 0, False

    def at_evaluation(records: Sequence[Mapping[str, Any]]) -> None:
        nonlocal evaluations, is_tracing
        evaluations += 1
        if evaluations == 2:
            jax.profiler.start_trace(str(folder))
            is_tracing = True
        elif is_tracing:
            jax.profiler.stop_trace()
            is_tracing = False
            print(f"trace: {folder}", flush=True)

    try:
        yield [at_evaluation]
    finally:
        if is_tracing:
            jax.profiler.stop_trace()
    if evaluations < 2:
        warnings.warn(
            "--profile: nothing was traced, since the run had no second evaluation.", stacklevel=2
        )
    elif evaluations == 2:
        warnings.warn(
            "--profile: the run had no third evaluation, so the trace may have no rounds.",
            stacklevel=2,
        )
