"""What a function's bytecode holds, which is nearly the same in every version of Python."""

import dis
import itertools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fedcodist.run.code_names import is_library
from fedcodist.run.json_values import NOT_JSON, json_value, key_text

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
OF_ATTRIBUTES = (("STORE_ATTR", "DELETE_ATTR"), ("LOAD_ATTR", "LOAD_METHOD"))
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "IMPORT_NAME")


def code_content(code: types.CodeType) -> Iterator[Any]:
    """The names, constants, operators and branches of some code, in their order."""
    inner = {*code.co_cellvars, *code.co_freevars}
    instructions = list(dis.get_instructions(code))
    for instruction, after in itertools.zip_longest(instructions, instructions[1:]):
        name, value = instruction.opname, instruction.argval
        if isinstance(value, types.CodeType):
            yield from code_content(value)
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
        yield from sorted(map(key_text, value))
    elif value is not None:
        plain = json_value(value)
        yield type(value).__name__ if plain is NOT_JSON else plain


def variables_read(code: types.CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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
            yield from variables_read(instruction.argval, variables)
            continue
        else:
            value = value if instruction.opname == "EXTENDED_ARG" else None
            continue
        yield name, value


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not is_library(value)


def names_that_code_changes(
    code: types.CodeType,
    stores: tuple[str, ...] = _OF_MODULES[0],
    loads: tuple[str, ...] = _OF_MODULES[1],
) -> Iterator[str]:
    """The module's variables that code sets or changes, such as a cache: state, and no constants.

    With `OF_ATTRIBUTES`, the names of attributes that it sets or changes, of any object.
    """
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        name, before = instruction.opname, instructions[index - 1] if index else None
        if isinstance(instruction.argval, types.CodeType):
            yield from names_that_code_changes(instruction.argval, stores, loads)
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
