"""The identity of a run: its data, its settings, and its functions as far as they can be named.

A run folder stores it in environment.json, so that an edited script does not continue the run of its
earlier version. Data are described by a digest. Functions are described by their names, the content of
their closures and, if the user wrote them, the constants and names in their code. These are the same in
every process and, for nearly all code, in every version of Python.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import itertools
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from fedcodist.core.for_each_client import Execution
from fedcodist.data.column_values import give_back_pages
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.client_splits import all_splits

PyTree = Any
# Of larger columns only blocks, evenly spread over them, are digested.
_DIGESTED_WHOLE = 2**30
_BLOCK = 2**24
_SHOWN = 8  # values of an array, or entries of a list, that are shown in one line
_SETTINGS = (
    "evaluate_every",
    "checkpoint_every",
    "seed",
    "seeds",
    "evaluation_batch_size",
    "evaluate_clients",
)
_PARTS = (
    "round",
    "select",
    "init",
    "predictors",
    "client_states",
    "personal_models",
    "data_set_sizes",
)
# Settings that older run folders lack, where nobody knows them.
_ADDED_LATER = ("hyper", "start")
_LIBRARIES = {"fedcodist", *sys.stdlib_module_names}
# Methods that change a list, a set or a mapping.
_CHANGING = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "remove",
    "discard",
    "sort",
    "reverse",
}
_OPPOSITE = {"TRUE": "FALSE", "FALSE": "TRUE", "NONE": "NOT_NONE", "NOT_NONE": "NONE"}
# How code sets, and how it reads, variables of a module and attributes.
_OF_MODULES = (("STORE_GLOBAL", "DELETE_GLOBAL"), ("LOAD_GLOBAL", "LOAD_NAME"))
_OF_ATTRIBUTES = (("STORE_ATTR", "DELETE_ATTR"), ("LOAD_ATTR", "LOAD_METHOD"))
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "IMPORT_NAME")


class Identity(NamedTuple):
    """The identity of a run.

    Attributes:
      content: JSON values: 'rounds', 'prepared', 'data', 'settings' and 'algorithm'.
      has_config: whether the run has a config, and descriptions of the code to which it refers. Then
        'settings' and 'algorithm' are not compared, and hyper-parameters and start are not described.
      execution: how the algorithm's clients are executed, which belongs to the plan.
    """

    content: dict[str, Any]
    has_config: bool
    execution: dict[str, Any]

    def is_longer(self, theirs: Mapping[str, Any]) -> bool:
        """Whether the run has more rounds than another one's content says."""
        rounds = theirs.get("rounds")
        return isinstance(rounds, int) and rounds < self.content["rounds"]

    def difference(self, theirs: Mapping[str, Any], to_grow: bool = False) -> str | None:
        """The first difference from another run's content; None if it is the same run.

        Args:
          theirs: from environment.json.
          to_grow: whether our config is theirs with more rounds. Then the algorithm must not depend on
            the number of rounds.
        """
        parts = ["prepared", "data"]
        if not self.has_config:
            parts += ["settings", "algorithm"]
        rounds = theirs.get("rounds")
        until = min(rounds if isinstance(rounds, int) else 0, self.content["rounds"])
        before, now = (
            {part: _until(until, content.get(part)) for part in parts}
            for content in (theirs, self.content)
        )
        if not self.has_config:
            now["settings"] = _known(before["settings"], now["settings"])
        if difference := first_difference(before, now):
            return difference
        if to_grow and (
            difference := first_difference(
                {"algorithm": theirs.get("algorithm")}, {"algorithm": self.content["algorithm"]}
            )
        ):
            return (
                f"rounds is {theirs.get('rounds')} there and {self.content['rounds']} here, and the "
                f"algorithm depends on it: {difference}"
            )
        return None


def identity_of(
    experiment: Any, has_config: bool = False, prepared: Mapping[str, Any] | None = None
) -> Identity:
    """The identity of an Experiment. The data are read once.

    Args:
      experiment: an Experiment.
      has_config: as in Identity.
      prepared: prepared folder -> checksum; setting -> `described` code that a config refers to.
    """
    settings: dict[str, Any] = {name: getattr(experiment, name) for name in _SETTINGS}
    settings["evaluate_also"] = sorted(int(round) for round in experiment.evaluate_also)
    settings["final_splits"] = sorted(experiment.final_splits)
    for name in ("client_splits", "final_client_splits"):
        if getattr(experiment, name):
            settings[name] = sorted(getattr(experiment, name))
    if experiment.privacy is not None:
        settings["privacy"] = list(experiment.privacy)
    if not has_config:
        settings |= {"hyper": hyper_of(experiment), "start": start_of(experiment)}
    preprocess = _Description()
    preprocess.add("evaluation_preprocess", experiment.evaluation_preprocess)
    settings |= preprocess.entries
    algorithm, execution = described_algorithm(experiment.algorithm)
    content = {
        "rounds": experiment.rounds,
        "prepared": dict(prepared or {}),
        "data": _data(experiment),
        "settings": jax.tree.map(_plain, settings),
        "algorithm": algorithm,
    }
    return Identity(content, has_config, {"seeds_loop": experiment.seeds_loop, **execution})


def hyper_of(experiment: Any) -> dict[str, Any]:
    """Path -> the values of a hyper-parameter, a number or a list."""
    leaves = jax.tree_util.tree_flatten_with_path(experiment.algorithm.hyper)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tolist() for path, leaf in leaves}


def start_of(experiment: Any) -> list[int]:
    """A checksum of each array of the state from which the run starts."""
    leaves = jax.tree.leaves(experiment.start)
    return [zlib.crc32(np.ascontiguousarray(leaf).tobytes()) for leaf in leaves]


def described_algorithm(algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(JSON values by path; how its clients are executed, which is not among them)."""
    description = _Description()
    for part in _PARTS:
        description.add(part, getattr(algorithm, part))
    return description.entries, description.execution


def is_same_algorithm(one: Any, other: Any) -> bool:
    """Whether two algorithms are one, but for `hyper`. If not, their descriptions may be the same."""
    return all(getattr(one, part) is getattr(other, part) for part in _PARTS)


def described(path: str, value: Any) -> dict[str, Any]:
    """JSON values by path: what a value is made of, including functions' code and constants."""
    description = _Description()
    description.add(path, value)
    return description.entries


def digest(array: Any) -> str:
    """An array's dtype, shape and a checksum of its values, as text."""
    values = np.asarray(array)
    if values.dtype.kind in "OSU":
        values = np.frombuffer("\0".join(map(str, values.reshape(-1))).encode(), np.uint8)
    entries, checksum = np.atleast_1d(values), hashlib.sha256()
    length = max(1, _BLOCK * len(entries) // max(1, entries.nbytes))
    blocks, most = -(-len(entries) // length), _DIGESTED_WHOLE // _BLOCK
    for block in range(blocks) if blocks <= most else np.linspace(0, blocks - 1, most).astype(int):
        part = np.ascontiguousarray(entries[block * length : (block + 1) * length])
        checksum.update(part.reshape(-1).view(np.uint8).data)
    return f"{np.asarray(array).dtype}{list(np.shape(array))} {checksum.hexdigest()[:16]}"


def first_difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    """One line about the first difference between two JSON values; None if they are equal."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            missing = "nothing"
            inner = f"{where}.{name}" if where else name
            left, right = theirs.get(name, missing), ours.get(name, missing)
            if difference := first_difference(left, right, inner):
                return difference
        return None
    if theirs == ours:
        return None
    if (
        isinstance(theirs, list)
        and isinstance(ours, list)
        and min(map(len, (theirs, ours))) > _SHOWN
    ):
        pairs = enumerate(itertools.zip_longest(theirs, ours, fillvalue="nothing"))
        place, (left, right) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        return first_difference(left, right, f"{where}[{place}]")
    return f"{where} is {theirs!r} there and {ours!r} here"


def _until(rounds: int, part: Any) -> Any:
    """A part of the content without evaluations that only the longer of two runs has."""
    if isinstance(part, dict) and isinstance(part.get("evaluate_also"), list):
        part = part | {"evaluate_also": [r for r in part["evaluate_also"] if r < rounds]}
    return part


def _known(theirs: Any, ours: Any) -> Any:
    """Our settings without those that an older folder does not tell."""
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return ours
    return {n: v for n, v in ours.items() if n in theirs or n not in _ADDED_LATER}


def _data(experiment: Any) -> dict[str, Any]:
    data, splits = experiment.data, all_splits(experiment)
    return {
        "clients": _of_clients(data.columns, data.sizes),
        "data_sets": {name: _columns(columns) for name, columns in data.data_sets.items()},
        "splits": {
            name: _of_clients(split.columns, split.client_sizes) for name, split in splits.items()
        },
    }


def _of_clients(columns: Mapping[str, Any], sizes: Any) -> dict[str, str]:
    return {**_columns(columns), "sizes of clients": digest(np.asarray(sizes, np.int64))}


def _columns(columns: Mapping[str, Any]) -> dict[str, str]:
    digests = {name: digest(column) for name, column in columns.items()}
    give_back_pages(columns)
    return digests


class _Description:
    """A description, path -> JSON value, of a value, its closures and their contents.

    A value that occurs again is described by its first path. Objects that are not dataclasses are
    described by their class, their public attributes, and the private ones that only `__init__` sets.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.execution: dict[str, Any] = {}
        self._paths: dict[int, str] = {}
        self._values: list[Any] = []  # kept alive, so that ids are unique

    def add(self, path: str, value: Any) -> None:
        if (plain := _plain(value)) is not _NOT_PLAIN:
            self.entries[path] = plain
        elif isinstance(value, Execution):
            self.execution = {"execution": value._asdict()}
        elif isinstance(value, types.FunctionType) and _is_named(value):
            self.entries[path] = _name(value)
        elif id(value) in self._paths:
            self.entries[path] = f"as {self._paths[id(value)]}"
        else:
            self._paths[id(value)] = path
            self._values.append(value)
            self._describe(path, value)

    def _describe(self, path: str, value: Any) -> None:
        if isinstance(value, np.ndarray | jax.Array):
            self.entries[path] = _array(value)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._parts(path, "method", {"function": value.__func__, "self": value.__self__})
        elif isinstance(value, functools.partial):
            arguments = {f"[{index}]": argument for index, argument in enumerate(value.args)}
            self._parts(path, "partial", {"function": value.func, **arguments, **value.keywords})
        elif isinstance(value, type):
            self._class(path, value)
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            self._parts(path, _name(type(value)), value._asdict())
        elif isinstance(value, Mapping | ConfigDict):
            self._parts(path, "mapping", {f"[{_key(key)}]": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            self._parts(path, "list", {f"[{index}]": item for index, item in enumerate(value)})
        elif isinstance(value, AbstractSet):
            self.entries[path] = sorted(map(_key, value))
        elif isinstance(value, FederatedData):
            self.entries[path] = _of_clients(value.columns, value.client_sizes)
        elif hasattr(value, "__wrapped__"):  # a compiled function, or one with cached results
            self.add(path, value.__wrapped__)
        else:
            self._object(path, value)

    def _parts(self, path: str, kind: str, parts: Mapping[str, Any]) -> None:
        self.entries[path] = kind
        for name, part in parts.items():
            self.add(f"{path}{name}" if name.startswith("[") else f"{path}.{name}", part)

    def _function(self, path: str, function: types.FunctionType) -> None:
        code, parts = function.__code__, dict(_closure(function))
        is_users = not _is_library(function)
        if is_users or "<" in function.__qualname__:
            defaults = function.__defaults__ or ()
            named = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
            parts |= dict(zip(named, defaults, strict=True)) | (function.__kwdefaults__ or {})
        if is_users:
            variables, written = dict(_globals(code, function.__globals__)), set(_written(code))
            parts |= {
                name: value
                for name, value in variables.items()
                # The `update` of an optimizer, a named tuple, changes nothing.
                if (name not in written or isinstance(value, tuple)) and _is_lasting(value)
            }
            parts |= _annotated_classes(function)
        self._parts(path, _name(function), parts)
        if is_users or function.__name__ == "<lambda>":
            self.entries[f"{path}.code"] = [*_code(code)]

    def _class(self, path: str, class_: type) -> None:
        self.entries[path] = _name(class_)
        if _is_library(class_):
            return
        for index, base in enumerate(class_.__bases__):
            if not _is_library(base):
                self.add(f"{path}.base[{index}]", base)
        if hasattr(class_, "_field_defaults"):  # of a named tuple
            self.add(f"{path}.defaults", class_._field_defaults)
        if dataclasses.is_dataclass(class_):
            for field in dataclasses.fields(class_):
                if field.default_factory is not dataclasses.MISSING:
                    self.add(f"{path}.{field.name}", field.default_factory)
        for name, attribute in vars(class_).items():
            function = _function_of(attribute)
            if isinstance(function, types.FunctionType):
                # A class gets further methods from a library, such as the `__eq__` of a dataclass.
                is_written = function.__code__.co_filename != "<string>"
                if not name.startswith("__") or (is_written and not _is_library(function)):
                    self.add(f"{path}.{name}", function)
            elif _is_constant_of_class(name, attribute):
                self.add(f"{path}.{name}", attribute)

    def _object(self, path: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            # A Flax module's parent says where it is used, not what it computes.
            names = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
            parts = {name: getattr(value, name, None) for name in names}
        else:
            constants = _set_once(type(value))
            parts = {
                name: part
                for name, part in _attributes(value).items()
                if name[:1] != "_" or (name in constants and _stays(part))
            }
        self._parts(path, _name(type(value)), parts)
        if not _is_library(type(value)):
            self.add(f"{path}.class", type(value))


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """A simple value as JSON; _NOT_PLAIN for other values."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex | np.dtype) or value is Ellipsis:
        return str(value)
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, types.BuiltinFunctionType | np.ufunc):
        return value.__name__
    return _NOT_PLAIN


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"{value.dtype}{list(value.shape)}"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if value.size <= _SHOWN and value.dtype.kind in "biuf":
        return [str(value.dtype), *map(_plain, np.asarray(value).reshape(-1))]
    return digest(value)


def _key(key: Any) -> str:
    plain = _plain(key)
    if plain is not _NOT_PLAIN:
        return repr(plain)
    if isinstance(key, tuple | frozenset):
        parts = map(_key, key) if isinstance(key, tuple) else sorted(map(_key, key))
        return f"({', '.join(parts)})"
    return _name(key if hasattr(key, "__qualname__") else type(key))


def _name(named: Any) -> str:
    """The name of a function or class; in libraries, with the package but without the module."""
    name = getattr(named, "__qualname__", type(named).__qualname__)
    if not _is_library(named):
        return name
    return f"{named.__module__.partition('.')[0]}.{name}"


def _is_library(named: Any) -> bool:
    """Whether a function or class is of a library, or a module is."""
    is_module = isinstance(named, types.ModuleType)
    module = named.__name__ if is_module else getattr(named, "__module__", None)
    package = (module or "").partition(".")[0]
    if package in _LIBRARIES:
        return package != "__main__"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if package == "experiments":
        # The one beside the library. Others call a package of their own so.
        return Path(file).parent.parent == Path(__file__).parents[2]
    return "site-packages" in file or "dist-packages" in file


def _is_named(function: types.FunctionType) -> bool:
    """Whether a function's name identifies it: a library's function without a closure."""
    is_inner = function.__closure__ or "<" in function.__qualname__
    return _is_library(function) and not is_inner


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # defined later than the function, as it is being made
            yield name, None


def _function_of(attribute: Any) -> Any:
    """The function of a class's property, class method, or wrapped method."""
    attribute = getattr(attribute, "wrapped", attribute)  # by Flax, of a module's property
    if isinstance(attribute, property):
        attribute = attribute.fget
    if isinstance(attribute, functools.cached_property):
        attribute = attribute.func
    while hasattr(attribute, "__wrapped__"):
        attribute = attribute.__wrapped__
    return attribute


def _is_constant_of_class(name: str, attribute: Any) -> bool:
    """Whether methods may depend on a class's attribute. Flax adds private ones, and some of None."""
    if name.startswith("_"):
        is_number_or_text = isinstance(attribute, int | float | str)
        return is_number_or_text and not isinstance(attribute, bool) and name[:2] != "__"
    return attribute is not None and _is_lasting(attribute)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object holds, also those in the slots of a user's class."""
    slots = {
        name: getattr(value, name)
        for class_ in type(value).__mro__
        if not _is_library(class_)
        for name, slot in vars(class_).items()
        if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name)
    }
    return slots | getattr(value, "__dict__", {})


def _set_once(class_: type) -> set[str]:
    """The attributes that `__init__` sets and no other method of a user's class sets or changes."""
    first: set[str] = set()
    later: set[str] = set()
    for each in class_.__mro__:
        for name, attribute in vars(each).items() if not _is_library(each) else ():
            setter = attribute.fset if isinstance(attribute, property) else None
            for function in (_function_of(attribute), setter):
                if isinstance(function, types.FunctionType):
                    written = _written(function.__code__, *_OF_ATTRIBUTES)
                    (first if name == "__init__" else later).update(written)
    return first - later


def _stays(value: Any) -> bool:
    """Whether a private attribute is a constant; lists, sets and mappings hold notes and caches."""
    containers = (list, AbstractSet, Mapping, ConfigDict)
    return not isinstance(value, containers) and _is_lasting(value)


def _annotated_classes(function: types.FunctionType) -> dict[str, Any]:
    """A user's named tuples among the annotations; a config makes them with their defaults."""
    classes = {}
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            annotation = function.__globals__.get(annotation)
        if hasattr(annotation, "_field_defaults") and not _is_library(annotation):
            classes[f"annotation of {name}"] = annotation
    return classes


def _is_lasting(value: Any, inside: tuple[int, ...] = ()) -> bool:
    """Whether code may depend on a module's variable: a constant, function, class or module of Flax.

    Other objects are none: nobody knows whether another module changes them during a run.
    Lists and mappings of such are constants too, unless the code changes them: see `_written`. Those
    that hold themselves are none; `inside` has the ids of those around a value.
    """
    if isinstance(value, types.ModuleType) or id(value) in inside:
        return False
    inside = (*inside, id(value))
    if isinstance(value, list | tuple | AbstractSet):
        return all(_is_lasting(item, inside) for item in value)
    if isinstance(value, Mapping | ConfigDict):
        return all(_is_lasting(item, inside) for item in value.values())
    of_dataclass = getattr(value, "__dataclass_params__", None)
    if of_dataclass is not None and not isinstance(value, type):
        return isinstance(value, nn.Module) or of_dataclass.frozen
    lasting = (types.FunctionType, functools.partial, type, np.ndarray, jax.Array)
    if _plain(value) is not _NOT_PLAIN or isinstance(value, lasting):
        return True
    # Of a compiled function, or of one with cached results.
    wrapped = getattr(value, "__wrapped__", None)
    is_users = isinstance(wrapped, functools.partial) or not _is_library(wrapped)
    return wrapped is not None and is_users and _is_lasting(wrapped, inside)


def _written(
    code: types.CodeType,
    stores: tuple[str, ...] = _OF_MODULES[0],
    loads: tuple[str, ...] = _OF_MODULES[1],
) -> Iterator[str]:
    """The module's variables that code sets or changes, such as a cache: state, and no constants.

    With `_OF_ATTRIBUTES`, the names of attributes that it sets or changes, of any object.
    """
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        name, before = instruction.opname, instructions[index - 1] if index else None
        if isinstance(instruction.argval, types.CodeType):
            yield from _written(instruction.argval, stores, loads)
        elif name in stores:
            yield instruction.argval
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _CHANGING:
            if before is not None and before.opname in loads:
                yield before.argval
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            depth, place = 0, index
            while depth < 1 and place > 0:  # back over the key
                place -= 1
                step = instructions[place]
                depth += dis.stack_effect(step.opcode, step.arg, jump=False)
            container = instructions[place - 1] if place else None
            if container is not None and container.opname in loads:
                yield container.argval


def _globals(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A module's variables that code reads, also those of a user's other modules: `helper.scale`."""
    name, value = "", None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = instruction.argval
            value = variables.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_users_module(value):
            name = f"{name}.{instruction.argval}"
            value = getattr(value, instruction.argval, None)
        elif isinstance(instruction.argval, types.CodeType):
            yield from _globals(instruction.argval, variables)
            continue
        else:
            value = value if instruction.opname == "EXTENDED_ARG" else None
            continue
        yield name, value


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _is_library(value)


def _code(code: types.CodeType) -> Iterator[Any]:
    """The names, constants, operators and branches of some code, in their order."""
    inner = {*code.co_cellvars, *code.co_freevars}
    instructions = list(dis.get_instructions(code))
    for instruction, after in itertools.zip_longest(instructions, instructions[1:]):
        name, value = instruction.opname, instruction.argval
        if isinstance(value, types.CodeType):
            yield from _code(value)
        elif "JUMP" in name and "IF_" in name:
            condition = name.partition("IF_")[2].removesuffix("_OR_POP")
            # Some versions of Python jump to a loop's body, and others jump over it.
            is_inverted = after is not None and after.opname.startswith("JUMP_BACKWARD")
            yield f"if {_OPPOSITE[condition] if is_inverted else condition}"
        elif name in _LOADS:
            yield value
        elif "LOAD_FAST" in name and "CLEAR" not in name:
            loaded = value if isinstance(value, tuple) else (value,)
            # An instruction that stores one variable and loads another lists both.
            loaded = loaded[1:] if name.startswith("STORE") else loaded
            yield from (local for local in loaded if local not in inner and local[:1] != ".")
        elif name in ("BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP"):
            yield instruction.argrepr or str(value)
        elif name.startswith("UNARY_"):
            yield name
        elif name == "LOAD_SMALL_INT":
            yield value
        elif instruction.opcode in dis.hasconst:
            # In Python 3.11 the instruction's value lacks the names of a call's arguments.
            yield from _constants(code.co_consts[instruction.arg or 0])


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for entry in value:
            yield from _constants(entry)
    elif isinstance(value, frozenset):
        yield from sorted(map(_key, value))
    elif value is not None:
        plain = _plain(value)
        yield type(value).__name__ if plain is _NOT_PLAIN else plain
