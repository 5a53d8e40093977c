"""Records of measurements, results/benchmarks/<date>-<workload>.json: written, and read again."""

import datetime
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import machine

from fedcodist.core.files import write_atomically
from fedcodist.run.commit import running_commit

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "benchmarks"
# Entries that every record has besides its measurements.
COMMON = ("workload", "kind", "date", "device", "commit", "command", "versions")


def common(workload: str, kind: str, device: str | None = None) -> dict[str, Any]:
    """The entries that describe the origin of a measurement.

    Args:
      workload: a name that no other measurement has.
      kind: the program that measured, which determines the record's other entries.
      device: by default the machine's processor.
    """
    return {
        "workload": workload,
        "kind": kind,
        "date": datetime.date.today().isoformat(),
        "device": device or machine.device(),
        "commit": _commit(),
        "command": command(sys.argv),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("fedcodist", "jax", "numpy")},
    }


@functools.cache
def _commit() -> str | None:
    """The commit that runs; other records may have changed since it, but no code."""
    commit = running_commit()
    command = ["git", "diff", "--quiet", "HEAD", "--", ".", ":!results"]
    if commit and subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0:
        return commit.removesuffix("-dirty")
    return commit


def command(arguments: Sequence[str]) -> str:
    """The command as it would be typed at the root of the checkout."""
    script = os.path.relpath(arguments[0], ROOT)
    return shlex.join(["python", script, *arguments[1:]])


def write(record: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Writes a record; replaces one of the same day, workload and device, no other."""
    folder.mkdir(parents=True, exist_ok=True)
    name, number = f"{record['date']}-{record['workload']}", 1
    while (path := folder / f"{name}{'' if number == 1 else f'-{number}'}.json").exists():
        if read(path)["device"] == record["device"]:
            break
        number += 1
    # One line per key: small, and a change shows in a diff.
    lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def newest(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The newest record of each workload and device, ordered by both.

    Raises:
      ValueError: names a file that is not a record.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        key = (record["device"], record["workload"])
        if key not in found or found[key]["date"] <= record["date"]:
            found[key] = record
    return [found[key] for key in sorted(found)]


def read(path: Path) -> dict[str, Any]:
    """A file's record. Raises ValueError, one line that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object.")
    if missing := [key for key in COMMON if key not in content]:
        raise ValueError(f"{path} is not a record: {missing[0]!r} is missing.")
    return content
