"""What of a job cannot be sent to workers, found before anything starts: the step, the variable, the line.

A worker is another process, so everything that a step consists of is pickled. A client, a lock, an open
file or a connection cannot be. Where the pickle fails, the objects are walked from the step down to the
first of them that no part of which is to blame.
"""

from __future__ import annotations

import dis
import inspect
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..errors import HeadgateError, PlanError
from ..operators.functions import function_name
from ..operators.graph import Graph, Node
from ..operators.origin import is_own_module, shown_path
from .shipping import ship

_FIX = (
    "workers are other processes: let each make its own, with `{name} = hg.per_worker(factory)` and "
    "`{name}()` where it is used, or in the open() of a function object (docs/api.md)"
)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF"})


@dataclass(frozen=True)
class _Found:
    """An object that cannot be pickled, by what the user calls it; `what` is empty if by nothing."""

    value: Any
    reason: str
    what: str = ""
    name: str = ""
    line: str = ""


@dataclass(frozen=True)
class _Part:
    """Something that another object consists of; `what` if the user has a name for it."""

    value: Any
    what: str = ""
    name: str = ""
    line: str = ""
    is_variable: bool = True
    """False for an attribute, which says less than the variable that leads to its object."""


def unshippable(graph: Graph) -> Iterator[PlanError]:
    """An error for each step that holds something which cannot be sent to workers."""
    if _refusal(graph) is None:
        return
    for node in graph.nodes:
        parts = _parts_of_step(node)
        reason = _refusal(parts)
        if reason is not None:
            yield _error(node, _culprit(_Found(parts, reason), set()))


def _parts_of_step(node: Node) -> list[Any]:
    """All that travels of a step, without the steps before it."""
    ways = [input_.partitioning for input_ in node.inputs]
    return [node.factory, node.source, node.sink, ways, node.watermarks, node.row_type]


def _refusal(value: object) -> str | None:
    """Why `value` cannot be pickled; None if it can be."""
    try:
        ship(value)
    except HeadgateError as error:
        return error.message
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _culprit(found: _Found, seen: set[int]) -> _Found:
    """The object deepest inside of `found` that is to blame, and the last name the user has on the way."""
    for part in _parts(found.value):
        if id(part.value) in seen:
            continue
        seen.add(id(part.value))
        reason = _refusal(part.value)
        if reason is None:
            continue
        inner = replace(found, value=part.value, reason=reason)
        if part.what and (part.is_variable or not found.what):
            inner = replace(inner, what=part.what, name=part.name, line=part.line)
        return _culprit(inner, seen)
    return found


def _parts(value: Any) -> Iterator[_Part]:
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield _Part(value.__self__)
        yield _Part(value.__func__)
    elif isinstance(value, partial):
        ours = is_own_module(getattr(value.func, "__module__", None) or "")
        holder = "" if ours else f" of `partial({function_name(value)})`"
        yield _Part(value.func)
        for index, argument in enumerate(value.args, 1):
            yield _Part(argument, holder and f"argument {index}{holder}", "it")
        for name, argument in value.keywords.items():
            yield _Part(argument, holder and f"the argument `{name}`{holder}", name)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield _Part(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield _Part(each)
    elif isinstance(value, type):
        yield from _attributes(vars(value), value)
    elif not isinstance(value, ModuleType):
        yield from _attributes(_state_of(value), type(value))
        yield _Part(type(value))


def _parts_of_function(function: FunctionType) -> Iterator[_Part]:
    holder = function_name(function)
    names = function.__globals__
    for name in _names_used(function.__code__):
        if name in names:
            line = _line_of(function.__code__, name)
            yield _Part(names[name], f"the global `{name}` of `{holder}`", name, line)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            content = cell.cell_contents
        except ValueError:  # nothing was assigned yet
            continue
        line = _line_of(function.__code__, name)
        yield _Part(content, f"the variable `{name}` of `{holder}`", name, line)
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield _Part(parameter.default, f"the default of `{name}` of `{holder}`", name)


def _attributes(state: Mapping[str, Any], holder: type) -> Iterator[_Part]:
    ours = is_own_module(holder.__module__)
    for name, value in state.items():
        if ours or name.startswith("__"):
            yield _Part(value)
        else:
            what = f"the attribute `{name}` of `{holder.__qualname__}`"
            yield _Part(value, what, f"self.{name}", is_variable=False)


def _state_of(value: object) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    state = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                state[name] = getattr(value, name)
    return state


def _names_used(code: CodeType) -> Iterator[str]:
    """The global names that a function, or one inside of it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_used(constant)


def _line_of(code: CodeType, name: str) -> str:
    """Where the code first uses a variable, as `file:line  text`; empty if nothing tells."""
    for step in dis.get_instructions(code):
        line = step.positions.lineno if step.positions else None
        if step.argval == name and step.opname in _LOADS and line is not None:
            text = linecache.getline(code.co_filename, line).strip()
            return f"{shown_path(code.co_filename)}:{line}  {text}".rstrip()
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return next(filter(None, (_line_of(each, name) for each in inner)), "")


def _error(node: Node, found: _Found) -> PlanError:
    kind = f"{type(found.value).__module__}.{type(found.value).__qualname__}"
    kind = kind.removeprefix("builtins.")
    what = found.what or f"it holds a {kind}, which"
    return PlanError(
        f"step `{node.name}` cannot be sent to workers: {what} cannot be pickled ({found.reason})",
        where="\n  at ".join(filter(None, (found.line, str(node.origin)))),
        fix=_FIX.format(name=found.name or "it"),
    )
