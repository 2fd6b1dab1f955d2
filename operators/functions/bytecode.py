"""Finds out in the bytecode of a function which columns it reads, so that only those become Python objects,
and whether it does little else."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SUBSCRIPTS = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_NO_EFFECT = frozenset({"RESUME", "EXTENDED_ARG", "NOP"})
_INTROSPECTION = frozenset({"locals", "vars", "eval", "exec", "dir"})


def used_columns(function: Callable[..., Any], parameters: int = 1) -> frozenset[str] | None:
    """Return the attributes (`row.a`) and items (`row["a"]`) that `function` reads from its first
    parameter.

    Return None when in doubt: the row itself is passed on, stored, rebound, seen by an inner
    function, or the callable is not a plain Python function or method with this number of
    parameters (`self` is not counted).
    """
    own = 0
    if isinstance(function, MethodType):
        function, own = function.__func__, 1
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    if not _plain_parameters(code, own + parameters) or _INTROSPECTION & set(code.co_names):
        return None
    row = code.co_varnames[own]
    if row in code.co_cellvars:
        return None
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    names: set[str] = set()
    for index, step in enumerate(steps):
        if not _mentions(step, row):
            continue
        name = _read_after(steps, index) if step.opname in _LOADS else None
        if name is None:
            return None
        names.add(name)
    return frozenset(names)


def direct_read(function: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """Return a function in C that does the same, if all that `function` does is to return an attribute or a
    constant item of its only parameter: `row.a`, `row["a"]`, `row[0]`. Return None if it is another one.
    """
    read = _only_read(function)
    if read is None:
        return None
    return attrgetter(read.name) if read.is_attribute else itemgetter(read.name)


def direct_place(function: Callable[..., Any]) -> int | None:
    """Return the place of a tuple that `function` reads, if that is all that it does: `pair[0]`."""
    read = _only_read(function)
    if read is None or read.is_attribute or type(read.name) is not int:
        return None
    return read.name


def direct_tuple(function: Callable[..., Any]) -> list[Read | Constant] | None:
    """Return what a function puts into a tuple, if all that it does is to return a tuple of attributes and
    constant items of its only parameter, and of constants: `(row.a, row["b"], 1)`. Else return None.
    """
    steps = _expression(function)
    if not steps or steps[-1].opname != "BUILD_TUPLE":
        return None
    found: list[Read | Constant] = []
    at, end = 0, len(steps) - 1
    while at < end:
        if steps[at].opname in _CONSTANTS:
            found.append(Constant(steps[at].argval))
            at += 1
        else:
            read = _read_at(steps, at)
            if read is None:
                return None
            found.append(read)
            at += read.steps
    return found if len(found) == steps[-1].arg else None


class Read(NamedTuple):
    """A read of an attribute, or of an item, of a function's only parameter, and its instructions."""

    is_attribute: bool
    name: Any
    steps: int


class Constant(NamedTuple):
    """A constant in a function."""

    value: Any


def _only_read(function: Callable[..., Any]) -> Read | None:
    """Return the read that is all that a function does."""
    steps = _expression(function)
    if steps is None:
        return None
    read = _read_at(steps, 0)
    return read if read is not None and read.steps == len(steps) else None


def _expression(function: Callable[..., Any]) -> list[dis.Instruction] | None:
    """Return the instructions of the expression that a plain function of one parameter returns.

    Return None for another function. Whether there is more than an expression is seen in the instructions.
    """
    own = 0
    if isinstance(function, MethodType):
        function, own = function.__func__, 1
    if not isinstance(function, FunctionType) or not _plain_parameters(function.__code__, own + 1):
        return None
    code = function.__code__
    row = code.co_varnames[own]
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_EFFECT]
    if steps[-1].opname != "RETURN_VALUE":
        return None
    loads = [step for step in steps if step.opname in _LOADS]
    return steps[:-1] if all(step.argval == row for step in loads) else None


def _read_at(steps: list[dis.Instruction], at: int) -> Read | None:
    """Return the read of the parameter that begins with instruction number `at`, if one does."""
    names = [step.opname for step in steps[at : at + 3]]
    if len(names) < 2 or names[0] not in _LOADS:
        return None
    if names[1] == "LOAD_ATTR":
        return Read(True, steps[at + 1].argval, 2)
    is_item = len(names) == 3 and names[1] in _CONSTANTS and names[2] in _SUBSCRIPTS
    if not is_item or steps[at + 2].argrepr not in ("", "[]"):
        return None
    return Read(False, steps[at + 1].argval, 3)


def _plain_parameters(code: CodeType, count: int) -> bool:
    variable = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_argcount == count and code.co_kwonlyargcount == 0 and not variable


def _mentions(step: dis.Instruction, row: str) -> bool:
    """Return True if an instruction touches the parameter; later Pythons fuse two variables into one."""
    if "FAST" not in step.opname and "DEREF" not in step.opname:
        return False
    return step.argval == row or (isinstance(step.argval, tuple) and row in step.argval)


def _read_after(steps: list[dis.Instruction], index: int) -> str | None:
    """Return the column read by the instructions directly after the load at `index`."""
    following = steps[index + 1 : index + 3]
    if following and following[0].opname in _ATTRIBUTES:
        return str(following[0].argval)
    if len(following) == 2 and following[0].opname == "LOAD_CONST":
        is_item = following[1].opname in _SUBSCRIPTS and following[1].argrepr in ("", "[]")
        if is_item and isinstance(following[0].argval, str):
            return str(following[0].argval)
    return None
