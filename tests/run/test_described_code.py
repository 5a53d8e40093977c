"""A run's identity sees every edit of a user's code, and nothing else."""

import json
import sys
import textwrap
import types

import pytest

from fedcodist.run.bytecode import code_content
from fedcodist.run.described_code import described

HEAD = """
import dataclasses, functools
from typing import Any, NamedTuple
import flax.linen as nn
import jax
import numpy as np
import optax
from ml_collections import ConfigDict
CACHE = {}
"""
NETWORK = """
class Base(nn.Module):
    gain: float = {a}
    RATE = {b}
    @property
    def width(self): return {c}
    @nn.compact
    def __call__(self, x): return nn.Dense(self.width)(x * self.gain * self.RATE)
class Net(Base):
    pass
class Outer(nn.Module):
    @nn.compact
    def __call__(self, x): return Net()(x)
"""
GLOBALS = """
SETTINGS = {{"factor": {a}, "rates": [{b}]}}
CONFIG = ConfigDict(dict(width={c}))
OPTIMIZER = optax.sgd({d})
DENSE = nn.Dense({e})
def f(x):
    CACHE[x] = x
    return SETTINGS["factor"] * x, SETTINGS["rates"], CONFIG.width, OPTIMIZER.update(x), DENSE(x)
"""
FUNCTIONS = """
@jax.jit
def compiled(x): return {a} * x
@functools.cache
def table(x): return {b} * x
PARTIAL = jax.jit(functools.partial(lambda by, x: by * x, {c}))
def f(x): return compiled(x), table(3), PARTIAL(x)
"""
OBJECT = """
class Base:
    __slots__ = ("_first", "second")
    def __init__(self, first, second): self._first, self.second = first, second
class Scale(Base):
    def __init__(self, first, second, by, mean, factor):
        super().__init__(first, second)
        self._by, self._mean, self._function = by, np.float32([mean]), jax.jit(lambda x: factor * x)
        self._count, self._notes, self._cache, self._buffer = 0, [], {{}}, np.zeros(1)
    def __call__(self, x):
        self._count, self._buffer[0] = self._count + 1, x
        self._notes.append(x)
        self._cache[x] = self._function(self._first + self.second + self._by * x - self._mean)
        return self._cache[x]
OBJECT = Scale({a}, {b}, {c}, {d}, {e})
"""
CLASSES = """
class Hyper(NamedTuple):
    rate: Any = {a}
@dataclasses.dataclass
class Plan:
    rounds: list = dataclasses.field(default_factory=lambda: [{b}])
    every: int = {c}
    def __post_init__(self): self.every += {d}
def f(x, hyper: Hyper): return Plan()
"""
# Name -> (the code, the name that is described, the code's values, an edit of one of them).
EDITS = {
    **{
        f"{of}: {value}": (NETWORK, of, dict(a=1.0, b=2.0, c=4), value)
        for value in "abc"
        for of in ("Net", "Outer")
    },
    **{
        f"module: {value}": (GLOBALS, "f", dict(a=1.0, b=2.0, c=4, d=0.1, e=4), value)
        for value in "abcde"
    },
    **{f"functions: {value}": (FUNCTIONS, "f", dict(a=1, b=2, c=3), value) for value in "abc"},
    **{
        f"object: {value}": (OBJECT, "OBJECT", dict(a=1, b=2, c=3, d=4, e=5), value)
        for value in "abcde"
    },
    **{f"class: {value}": (CLASSES, "f", dict(a=1.0, b=2, c=4, d=0), value) for value in "abcd"},
}


def described_code(code, name):
    module = types.ModuleType("ones_own_module")
    exec(compile(textwrap.dedent(HEAD + code), "ones_own_module.py", "exec"), module.__dict__)
    return json.dumps(described(name, getattr(module, name)))


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "ones_own_module", types.ModuleType("ones_own_module"))


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_of_a_value_is_seen(case):
    code, name, values, edited = EDITS[case]
    before = described_code(code.format(**values), name)
    assert before == described_code(code.format(**values), name) and " at 0x" not in before
    other = values | {edited: values[edited] + 1}
    assert described_code(code.format(**other), name) != before


BRANCHES = {
    "not": ("b if a else 0", "b if not a else 0"),
    "none": ("b if a is None else 0", "b if a is not None else 0"),
    "and": ("a and b", "a or b"),
    "filter": ("[x for x in b if x]", "[x for x in b if not x]"),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_an_edit_of_a_branch_is_seen(case):
    one, other = (described_code(f"def f(a, b): return {text}", "f") for text in BRANCHES[case])
    assert one != other


STATE = """
CALLS, COUNT, SEEN, GONE = [], 0, dict(last=0), dict(next=0)
def f(x):
    global COUNT
    COUNT += 1
    CALLS.append(x)
    SEEN[x + 1] = CALLS, COUNT
    del GONE[x]
    return x
"""


def test_objects_that_may_change_are_no_constants():
    code = """
@dataclasses.dataclass
class Counter:
    count: int
COUNTER, HELD = Counter({}), {{"a": {}}}
HELD["itself"] = HELD
def f(x): return COUNTER.count, HELD["a"]
"""
    assert described_code(code.format(1, 1), "f") == described_code(code.format(2, 2), "f")


def test_what_methods_change_of_an_object_is_no_constant():
    values = dict(a=1, b=2, c=3, d=4, e=5)
    code = OBJECT.format(**values)
    assert described_code(code, "OBJECT") == described_code(f"{code}OBJECT(1.0)", "OBJECT")


def test_what_code_changes_is_no_constant():
    before = described_code(STATE, "f")
    values = ("[]", "[1]"), (" 0,", " 5,"), ("last=0", "last=7"), ("next=0", "next=7")
    for value, other in values:
        assert before == described_code(STATE.replace(value, other), "f")
    # Another mapping is changed here.
    code = "FACTOR = dict(by={})\ndef f(x):\n    x['y'] = FACTOR['by']\n    return x"
    assert described_code(code.format(1), "f") != described_code(code.format(2), "f")


PROGRAM = """
def f(a, b):
    while a:
        a = b if a is None else [x for x in b if x and not a]
    if not a or b:
        return {x for x in b if x is not None}
    for x in a:
        if x:
            continue
        b = x
    return a and b
"""


def test_branches_are_the_same_in_every_version_of_python():
    """Python 3.11, 3.12 and 3.13 compile loops and filters in different ways."""
    code = code_content(compile(PROGRAM, "f.py", "exec"))
    branches = [entry.removeprefix("if ") for entry in code if str(entry).startswith("if ")]
    loop = ["FALSE", "NOT_NONE", "FALSE", "TRUE", "TRUE"]
    assert branches == [*loop, "FALSE", "FALSE", "NONE", "TRUE", "FALSE"]
