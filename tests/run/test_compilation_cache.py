"""Every process stores compiled programs on disk for the next start."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcodist.run import launch


def cache_folder(**environment) -> str:
    """The folder in which a new process would store its compiled programs."""
    code = (
        "from fedcodist.run.compilation_cache import cache_compilations; cache_compilations(); "
        "import jax; print(jax.config.jax_compilation_cache_dir)"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_compiled_programs_are_kept_for_the_next_start(tmp_path):
    folder = cache_folder(XDG_CACHE_HOME=str(tmp_path))
    assert folder == cache_folder(XDG_CACHE_HOME=str(tmp_path))
    assert Path(folder).is_dir() and Path(folder).parent == tmp_path / "fedcodist"
    assert cache_folder(HOME=str(tmp_path)) == folder.replace("/fedcodist", "/.cache/fedcodist")


COMPILES = """
import pytest

from fedcodist.run import launch
from fedcodist.run.compilation_cache import cache_compilations
launch.join()
cache_compilations()
import jax, jax.numpy as jnp, sys
from jax import monitoring
found = []
monitoring.register_event_listener(lambda event, **_: found.append(event))
mesh = jax.sharding.Mesh(jax.devices(), "clients")
whole = jax.jit(lambda: jnp.ones(2), out_shardings=jax.NamedSharding(mesh, jax.P("clients")))()
jax.block_until_ready(jax.jit(lambda x: jnp.sin(x).sum())(whole))
hits, misses = (found.count(f"/jax/compilation_cache/cache_{what}") for what in ("hits", "misses"))
with open(f"{sys.argv[1]}_{jax.process_index()}", "w") as file:
    file.write(f"{hits} {misses}")
"""


@pytest.mark.slow
def test_every_process_finds_its_compiled_programs(tmp_path, monkeypatch):
    """On CPUs programs differ by process; JAX itself stores those of the first process only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for start in ("first", "second"):
        command = [sys.executable, "-c", COMPILES, str(tmp_path / start)]
        assert launch.supervise(command, 2) == 0
    for process in range(2):
        hits, misses = map(int, (tmp_path / f"second_{process}").read_text().split())
        assert hits > 0 and misses == 0


SHARES = """
import sys
from fedcodist.run import launch
from fedcodist.run.compilation_cache import cache_compilations
launch.join()
cache_compilations()
import jax, jax.numpy as jnp
from jax._src import compiler
compiled, of = [], compiler.backend_compile_and_load
compiler.backend_compile_and_load = lambda *given: compiled.append(str(given[1])) or of(*given)
mesh = jax.sharding.Mesh(jax.devices(), "clients")
whole = jax.jit(lambda: jnp.ones(2), out_shardings=jax.NamedSharding(mesh, jax.P("clients")))()

@jax.jit
def summed_sine(x):
    return jnp.sin(x).sum()

@jax.jit
def told(x):
    jax.debug.callback(lambda value: None, x.sum())
    return jnp.cos(x).sum()

values = [float(each(whole)) for each in (summed_sine, told)]
own = [name for name in ("summed_sine", "told") if any("jit_" + name in text for text in compiled)]
with open(f"{sys.argv[1]}_{jax.process_index()}", "w") as file:
    file.write(f"{values} {own}")
"""


@pytest.mark.parametrize("user_has_chosen", [False, True])
def test_one_process_compiles_for_all(user_has_chosen, tmp_path, monkeypatch):
    """But for a program that calls back, whose callback is an address of one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if user_has_chosen:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    assert launch.supervise([sys.executable, "-c", SHARES, str(tmp_path / "said")], 2) == 0
    first, second = ((tmp_path / f"said_{process}").read_text() for process in range(2))
    values = [2 * math.sin(1), 2 * math.cos(1)]
    assert eval(first.split("] ")[0] + "]") == pytest.approx(values)
    assert first.endswith("['summed_sine', 'told']") and second.endswith("['told']")
    assert first.split("] ")[0] == second.split("] ")[0]


@pytest.mark.slow
def test_a_users_choice_of_where_they_are_kept_stands(tmp_path):
    chosen = cache_folder(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"), HOME=str(tmp_path))
    assert chosen == str(tmp_path / "own")
    assert cache_folder(JAX_ENABLE_COMPILATION_CACHE="0", HOME=str(tmp_path)) == "None"


def test_without_a_place_to_write_nothing_is_kept(tmp_path):
    (tmp_path / "file").touch()
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
