"""Finds out in the bytecode of a function which columns it reads, so that only those become Python objects,
and whether it does nothing else."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

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
    own = 0
    if isinstance(function, MethodType):
        function, own = function.__func__, 1
    if not isinstance(function, FunctionType) or not _plain_parameters(function.__code__, own + 1):
        return None
    code = function.__code__
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_EFFECT]
    names = [step.opname for step in steps]
    if len(steps) not in (3, 4) or names[0] not in _LOADS or names[-1] != "RETURN_VALUE":
        return None
    if steps[0].argval != code.co_varnames[own]:
        return None
    if len(steps) == 3:
        return attrgetter(steps[1].argval) if names[1] == "LOAD_ATTR" else None
    is_item = names[2] in _SUBSCRIPTS and steps[2].argrepr in ("", "[]")
    return itemgetter(steps[1].argval) if names[1] in _CONSTANTS and is_item else None


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
