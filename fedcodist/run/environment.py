"""environment.json: the machine, versions and data of a run, and what of it changes bits of results."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fedcodist.core.files import write_atomically
from fedcodist.run.commit import running_commit
from fedcodist.run.folder_check import RunFolderError

_PACKAGES = ("fedcodist", "jax", "jaxlib", "flax", "optax", "chex", "ml-collections", "numpy")


def environment_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What environment.json says of a start with this plan."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "plan": plan,
        "versions": versions,
        "python": platform.python_version(),
        "commit": running_commit(),
        "device": jax.devices()[0].device_kind,
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
        "prng": str(jax.config.jax_default_prng_impl),
        # A flag of the transition to other draws of threefry, which a later release may drop.
        "prng_is_partitionable": getattr(jax.config, "jax_threefry_partitionable", True),
        "x64": jax.dtypes.canonicalize_dtype("float64") == "float64",
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def machine_of(environment: Any) -> dict[str, Any]:
    """The entries of an environment on which the last bits of results depend."""
    values: dict[str, Any] = {}
    if isinstance(environment, dict):
        versions = environment.get("versions")
        jaxlib = versions.get("jaxlib") if isinstance(versions, dict) else None
        values = {"x64": environment.get("x64"), "jaxlib": jaxlib}
        for name in ("device", "matmul_precision", "prng", "prng_is_partitionable"):
            values[name] = environment.get(name)
    return {name: value for name, value in values.items() if value is not None}


def data_note(
    workdir: Path, about: Mapping[str, Any]
) -> Callable[[Sequence[Mapping[str, Any]]], None]:
    """A callback that adds a description of a run's data to environment.json, once."""

    def note(records: Sequence[Mapping[str, Any]]) -> None:
        # At the first evaluation, when the folder is claimed. A resumed run's entry stays.
        path = workdir / "environment.json"
        try:
            environment = json.loads(path.read_text(encoding="utf-8"))
            if "data" not in environment:
                text = json.dumps({**environment, "data": about}, indent=2) + "\n"
                write_atomically(path, text.encode())
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}.") from error
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"cannot read {path}: {error}.") from error

    return note
