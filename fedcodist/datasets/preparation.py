"""Common code of the preparation programs in `datasets/`, without reading their sources.

A prepared folder is made once. If the folder exists, a program only checks it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedcodist.data.federated_data import FederatedData
from fedcodist.data.prepared import PreparedDataError, load_prepared, manifest, save_prepared

try:
    import fcntl
except ImportError:  # Windows has none: two programs at once are then not noticed
    fcntl = None  # type: ignore[assignment]

Show = Callable[[str, float], None]
"""Called with the name of the present stage and the fraction of it that is done."""


class Source(NamedTuple):
    """An opened source: its description for the manifest, and a function that makes its splits.

    `notices` are lines that the user must see. `skipped`, called after `build`, returns what was left
    out of the source: reason -> number. It is shown and becomes part of the manifest's arguments.
    """

    arguments: Mapping[str, Any]
    build: Callable[[Show], Mapping[str, FederatedData]]
    notices: tuple[str, ...] = ()
    skipped: Callable[[], Mapping[str, int]] | None = None


def run(
    output: Path,
    open_source: Callable[[Show], Source],
    *,
    data_set: str,
    source: str,
    licence: str,
) -> int:
    """Prepares `output` once and returns the exit status: 0 for success, 2 for an error.

    An existing folder is only checked: its manifest's arguments against the source's, its files against
    their checksums. A new folder appears completely or not at all, whenever the program is stopped.
    Errors are one line on stderr.

    Args:
      output: the prepared folder.
      open_source: opens the source; called with a function that shows progress.
      data_set: name of the data set, for the manifest.
      source: where the data come from, for the manifest.
      licence: how they may be used, for the manifest.
    """
    try:
        _prepare(Path(os.path.abspath(output)), open_source, data_set, source, licence)
    except KeyboardInterrupt:
        print("interrupted; run the same command again", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, MemoryError) as error:
        return refuse(error)
    return 0


def refuse(error: Exception) -> int:
    """Prints an error as one line; returns the exit status of a mistake."""
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr)
    return 2


def check_is_file(source: Path) -> None:
    """Raises ValueError unless `--source` is a file that can be hashed."""
    if not source.exists():
        raise ValueError(f"--source {source} does not exist")
    if not source.is_file():
        raise ValueError(f"--source {source} must be a file")


def file_checksum(path: Path, algorithm: str) -> str:
    """The checksum of a file in hexadecimal digits; `algorithm` is a name in hashlib."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def check_md5s(
    source: Path, md5s: Mapping[str, str], official: Mapping[str, str], accept_unverified: bool
) -> tuple[str, ...]:
    """Returns a line for each file that is missing or is not the official one.

    Args:
      source: where the files are, for the message.
      md5s: file name -> md5 found.
      official: file name -> md5 of the official file.
      accept_unverified: whether other files are accepted.

    Raises:
      ValueError: there is such a line, and other files are not accepted.
    """
    unverified = []
    for name, expected in official.items():
        if name not in md5s:
            unverified.append(f"{name} is missing")
        elif md5s[name] != expected:
            unverified.append(f"{name} has md5 {md5s[name]}, the official file {expected}")
    return _checked_unverified(source, unverified, accept_unverified)


def check_counts(
    source: Path, counts: Mapping[str, int], official: Mapping[str, int], accept_unverified: bool
) -> tuple[str, ...]:
    """Returns a line for each split whose number of images is not that of the official file.

    Args:
      source: the file, for the message.
      counts: split -> number of images found.
      official: split -> number of images in the official file.
      accept_unverified: whether other numbers are accepted.

    Raises:
      ValueError: there is such a line, and other numbers are not accepted.
    """
    unverified = [
        f"{split} has {counts[split]} images, the official file {expected}"
        for split, expected in official.items()
        if counts[split] != expected
    ]
    return _checked_unverified(source, unverified, accept_unverified)


def _checked_unverified(
    source: Path, unverified: Sequence[str], accept_unverified: bool
) -> tuple[str, ...]:
    if unverified and not accept_unverified:
        raise ValueError(
            f"{source}: {unverified[0]}; --accept-unverified uses what is there all the same"
        )
    return tuple(unverified)


def _prepare(
    output: Path,
    open_source: Callable[[Show], Source],
    data_set: str,
    origin: str,
    licence: str,
) -> None:
    is_empty = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    present = None if is_empty else manifest(output)
    console = Console()
    with _stages(console, f"preparing {data_set}", 3) as stage:
        source = open_source(stage(0, "checking the source"))
        arguments = {"data_set": data_set, **source.arguments}
        if present:
            recorded = dict(present.get("arguments", {}))
            if source.skipped:
                recorded.pop("skipped", None)  # known only when everything was read
            _check_same_arguments(output, recorded, arguments)
            stage(2, "verifying")("", 0.0)
            splits = _verified(output)
        else:
            show = stage(1, "making splits")
            show("", 0.0)
            splits = source.build(show)
            if source.skipped:
                arguments["skipped"] = dict(source.skipped())
            stage(2, "writing")("", 0.0)
            _write(output, splits, origin, licence, arguments)
    for notice in source.notices:
        _print(console, notice, style="bold yellow")
    for name, data in sorted(splits.items()):
        clients = "client" if data.num_clients == 1 else "clients"
        _print(console, f"{name}: {data.num_examples:,} examples, {data.num_clients:,} {clients}")
    if source.skipped and not present:
        counts = ", ".join(f"{n:,} {reason}" for reason, n in arguments["skipped"].items())
        _print(console, f"skipped: {counts or 'none'}")
    done = "verified; nothing is left to do" if present else "prepared"
    _print(console, f"{output}: {done}")


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _check_same_arguments(
    output: Path, present: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    recorded, required = _flat(present), _flat(wanted)
    for name in sorted({*recorded, *required}):
        if recorded.get(name) != required.get(name):
            raise PreparedDataError(
                f"{output} was prepared with other arguments: {name} is {recorded.get(name)}, "
                f"now it would be {required.get(name)}; choose another --output or remove that folder"
            )


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            result.update({f"{name}[{key!r}]": inner for key, inner in value.items()})
        else:
            result[name] = value
    return result


def _verified(output: Path) -> Mapping[str, FederatedData]:
    try:
        return load_prepared(output)
    except PreparedDataError as error:
        raise PreparedDataError(f"{error}; remove {output} and run this again") from None


def _write(
    output: Path,
    splits: Mapping[str, FederatedData],
    origin: str,
    licence: str,
    arguments: Mapping[str, Any],
) -> None:
    try:
        with _only_writer(output):
            # No other process writes now, so these are from processes that were killed.
            for stale in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
                shutil.rmtree(stale)
            save_prepared(output, splits, source=origin, licence=licence, arguments=arguments)
    except OSError as error:
        # NumPy's message only has the number of bytes that were not written.
        text = error.strerror or f"{error}; is the disk full?"
        raise OSError(f"{output} cannot be written: {text}") from None


@contextlib.contextmanager
def _only_writer(output: Path) -> Iterator[None]:
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.parent / f".{output.name}.lock"
    with open(path, "w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("another process is preparing it") from None
            # The previous holder of the lock may have removed the file.
            if not (path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())):
                raise OSError("another process has just prepared it")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _stages(console: Console, name: str, count: int) -> Iterator[Callable[[int, str], Show]]:
    # With FORCE_COLOR, rich treats a pipe as a terminal; cursor movements would fill the log.
    live = console.is_interactive and console.file.isatty()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not live,
    ) as bar:
        task = bar.add_task(name, total=count)

        def stage(number: int, what: str) -> Show:
            def show(text: str, fraction: float) -> None:
                described = f"{name}: {what}" + (f", {text}" if text else "")
                bar.update(task, completed=number + fraction, description=described)
                if not live:
                    _print(console, described)

            return show

        yield stage
