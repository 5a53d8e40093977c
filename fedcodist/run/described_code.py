"""Descriptions of values and of the code that they hold, as JSON values.

Functions are described by their names, the content of their closures and, if the user wrote them, the
constants and names in their code. These are the same in every process and, for nearly all code, in every
version of Python.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from fedcodist.core.for_each_client import Execution
from fedcodist.data.federated_data import FederatedData
from fedcodist.run.bytecode import (
    OF_ATTRIBUTES,
    code_content,
    names_that_code_changes,
    variables_read,
)
from fedcodist.run.code_names import is_library, name_of
from fedcodist.run.digests import column_digests_with_sizes, digest
from fedcodist.run.json_values import NOT_JSON, json_value, key_text

_SHOWN = 8  # values of an array that are shown in one line


def described(path: str, value: Any) -> dict[str, Any]:
    """JSON values by path: what a value is made of, including functions' code and constants."""
    entries, _ = described_parts({path: value})
    return entries


def described_parts(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describes several values, in which an object that occurs again is described once.

    Args:
      parts: path -> value.

    Returns:
      JSON values by path, as `described`; and how an algorithm's clients are executed, which is not
      among them.
    """
    description = _Description()
    for path, value in parts.items():
        description.add(path, value)
    return description.entries, description.execution


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
        if (plain := json_value(value)) is not NOT_JSON:
            self.entries[path] = plain
        elif isinstance(value, Execution):
            # JSON holds no NumPy integers.
            whole = value._replace(chunk_size=int(value.chunk_size))
            self.execution = {"execution": whole._asdict()}
        elif isinstance(value, types.FunctionType) and _is_named(value):
            self.entries[path] = name_of(value)
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
            self._parts(path, name_of(type(value)), value._asdict())
        elif isinstance(value, Mapping | ConfigDict):
            self._parts(
                path, "mapping", {f"[{key_text(key)}]": item for key, item in value.items()}
            )
        elif isinstance(value, list | tuple):
            self._parts(path, "list", {f"[{index}]": item for index, item in enumerate(value)})
        elif isinstance(value, AbstractSet):
            self.entries[path] = sorted(map(key_text, value))
        elif isinstance(value, FederatedData):
            self.entries[path] = column_digests_with_sizes(value.columns, value.client_sizes)
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
        is_users = not is_library(function)
        if is_users or "<" in function.__qualname__:
            defaults = function.__defaults__ or ()
            named = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
            parts |= dict(zip(named, defaults, strict=True)) | (function.__kwdefaults__ or {})
        if is_users:
            variables = dict(variables_read(code, function.__globals__))
            changed = set(names_that_code_changes(code))
            parts |= {
                name: value
                for name, value in variables.items()
                # The `update` of an optimizer, a named tuple, changes nothing.
                if (name not in changed or isinstance(value, tuple)) and _is_constant(value)
            }
            parts |= _annotated_classes(function)
        self._parts(path, name_of(function), parts)
        if is_users or function.__name__ == "<lambda>":
            self.entries[f"{path}.code"] = [*code_content(code)]

    def _class(self, path: str, class_: type) -> None:
        self.entries[path] = name_of(class_)
        if is_library(class_):
            return
        for index, base in enumerate(class_.__bases__):
            if not is_library(base):
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
                if not name.startswith("__") or (is_written and not is_library(function)):
                    self.add(f"{path}.{name}", function)
            elif _is_constant_of_class(name, attribute):
                self.add(f"{path}.{name}", attribute)

    def _object(self, path: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            # A Flax module's parent says where it is used, not what it computes.
            names = [field.name for field in dataclasses.fields(value) if field.name != "parent"]
            parts = {name: getattr(value, name, None) for name in names}
        else:
            constants = _attributes_set_in_init(type(value))
            parts = {
                name: part
                for name, part in _attributes(value).items()
                if name[:1] != "_" or (name in constants and _is_private_constant(part))
            }
        self._parts(path, name_of(type(value)), parts)
        if not is_library(type(value)):
            self.add(f"{path}.class", type(value))


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"{value.dtype}{list(value.shape)}"
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if value.size <= _SHOWN and value.dtype.kind in "biuf":
        return [str(value.dtype), *map(json_value, np.asarray(value).reshape(-1))]
    return digest(value)


def _is_named(function: types.FunctionType) -> bool:
    """Whether a function's name identifies it: a library's function without a closure."""
    is_inner = function.__closure__ or "<" in function.__qualname__
    return is_library(function) and not is_inner


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
    return attribute is not None and _is_constant(attribute)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object holds, also those in the slots of a user's class."""
    slots = {
        name: getattr(value, name)
        for class_ in type(value).__mro__
        if not is_library(class_)
        for name, slot in vars(class_).items()
        if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name)
    }
    return slots | getattr(value, "__dict__", {})


def _attributes_set_in_init(class_: type) -> set[str]:
    """The attributes that `__init__` sets and no other method of a user's class sets or changes."""
    in_init: set[str] = set()
    later: set[str] = set()
    for each in class_.__mro__:
        for name, attribute in vars(each).items() if not is_library(each) else ():
            setter = attribute.fset if isinstance(attribute, property) else None
            for function in (_function_of(attribute), setter):
                if isinstance(function, types.FunctionType):
                    changed = names_that_code_changes(function.__code__, *OF_ATTRIBUTES)
                    (in_init if name == "__init__" else later).update(changed)
    return in_init - later


def _is_private_constant(value: Any) -> bool:
    """Whether a private attribute is a constant.

    Lists, sets and mappings do not count: they hold notes and caches.
    """
    containers = (list, AbstractSet, Mapping, ConfigDict)
    return not isinstance(value, containers) and _is_constant(value)


def _annotated_classes(function: types.FunctionType) -> dict[str, Any]:
    """A user's named tuples among the annotations; a config makes them with their defaults."""
    classes = {}
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            annotation = function.__globals__.get(annotation)
        if hasattr(annotation, "_field_defaults") and not is_library(annotation):
            classes[f"annotation of {name}"] = annotation
    return classes


def _is_constant(value: Any, inside: tuple[int, ...] = ()) -> bool:
    """True for constants, functions, classes, frozen data classes and Flax modules.

    Other objects may change during a run, so they do not count. A list or mapping of constants counts
    unless the code changes it (`names_that_code_changes`) or it contains itself. `inside`: ids of the
    containers around the value.
    """
    if isinstance(value, types.ModuleType) or id(value) in inside:
        return False
    inside = (*inside, id(value))
    if isinstance(value, list | tuple | AbstractSet):
        return all(_is_constant(item, inside) for item in value)
    if isinstance(value, Mapping | ConfigDict):
        return all(_is_constant(item, inside) for item in value.values())
    of_dataclass = getattr(value, "__dataclass_params__", None)
    if of_dataclass is not None and not isinstance(value, type):
        return isinstance(value, nn.Module) or of_dataclass.frozen
    kinds = (types.FunctionType, functools.partial, type, np.ndarray, jax.Array)
    if json_value(value) is not NOT_JSON or isinstance(value, kinds):
        return True
    # Of a compiled function, or of one with cached results.
    wrapped = getattr(value, "__wrapped__", None)
    is_users = isinstance(wrapped, functools.partial) or not is_library(wrapped)
    return wrapped is not None and is_users and _is_constant(wrapped, inside)
