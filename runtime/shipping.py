"""User code travels with the job: functions and classes of the user's own modules go by value.

A worker may run on a machine that has headgate installed, but not the user's scripts. So modules that are
neither part of Python nor installed as a distribution are pickled by value (cloudpickle); msgspec Structs,
which cloudpickle cannot take apart, are rebuilt from their fields and methods.

A client, a lock, an open file or a connection cannot be pickled. `unshippable` finds such objects before
anything starts: where the pickle fails, it walks the objects from the step down to the first one no part of
which is to blame, and names the step, the variable and the line.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import inspect
import io
import linecache
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import cloudpickle
import msgspec
from msgspec.structs import fields as struct_fields
from msgspec.structs import replace

from ..errors import HeadgateError, PlanError
from ..operators.functions.checks import function_name
from ..operators.functions.pickling import FunctionPickler
from ..operators.graph import Graph, Node
from ..operators.origin import is_own_module, shown_path

_StructMeta: type = type(msgspec.Struct)
_CONFIG = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag",
    "tag_field",
)
_rebuilt: dict[str, type] = {}
_shipped: dict[str, type] = {}
"""The user's own classes, so that records of rebuilt ones are theirs when they come home."""
_FIX = (
    "workers are other processes: let each make its own, with `{name} = hg.per_worker(factory)` and "
    "`{name}()` where it is used, or in the open() of a function object (docs/api.md)"
)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF"})


def ship(value: object) -> bytes:
    """`value` as bytes that another process with headgate can load."""
    with _by_value(_user_modules()):
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        return buffer.getvalue()


def unship(data: bytes) -> Any:
    """The reverse of `ship`."""
    return cloudpickle.loads(data)


def _user_modules() -> list[types.ModuleType]:
    """Loaded modules that only this machine can be expected to have."""
    path = tuple(sys.path)
    everywhere = _everywhere(path)
    found: list[types.ModuleType] = []
    for name, module in list(sys.modules.items()):
        if everywhere.get(name) is module:
            continue
        # A module under a second name is found under its own, and some entries are no modules at all.
        if not isinstance(module, types.ModuleType) or vars(module).get("__name__") != name:
            continue
        if _is_everywhere(name, module, path):
            everywhere[name] = module
        elif isinstance(vars(module).get("__file__"), str):
            found.append(module)
    return found


@lru_cache(maxsize=1)
def _everywhere(path: tuple[str, ...]) -> dict[str, types.ModuleType]:
    """Modules by name that are known to be on each machine, with `path` as `sys.path`.

    Thousands of modules are loaded, and a job is pickled step by step.
    """
    return {}


def _is_everywhere(name: str, module: types.ModuleType, path: tuple[str, ...]) -> bool:
    """True if each machine with headgate can be expected to have the module."""
    top = name.partition(".")[0]
    if name == "__main__" or top == __name__.split(".")[0] or top in sys.stdlib_module_names:
        return True
    file = vars(module).get("__file__")
    return isinstance(file, str) and _is_installed(file, path)


@cache
def _is_installed(file: str, path: tuple[str, ...]) -> bool:
    """True if `file` belongs to Python or to an installed distribution, with `path` as `sys.path`."""
    roots = _installed_below(path)
    if any(_below(each, roots) for each in {file, os.path.realpath(file)}):
        return True
    # `pip install --target`: the distribution describes itself beside its modules. An editable project
    # does so elsewhere, and its modules are the user's own.
    return any(
        Path(os.path.relpath(file, root)).parts[0] in _distributed_in(root)
        for root in path
        if root and _below(file, (os.path.join(root, ""),))
    )


@cache
def _installed_below(path: tuple[str, ...]) -> tuple[str, ...]:
    """Directories, each with a separator behind it, in which all modules count as installed."""
    roots = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    roots |= {
        root for root in path if Path(root).name in ("site-packages", "dist-packages")
    }  # also those of other environments, which a .pth file adds
    return tuple(
        os.path.join(each, "") for root in roots for each in (root, os.path.realpath(root))
    )


@cache
def _distributed_in(root: str) -> frozenset[str]:
    """The packages and modules in `root` that a distribution installed there says are its own."""
    from importlib.metadata import distributions  # loads a parser of e-mail, and few jobs get here

    return frozenset(
        Path(str(file)).parts[0]
        for distribution in distributions(path=[root])
        if str(getattr(distribution, "_path", "")).endswith(".dist-info")
        for file in distribution.files or ()
    )


def _below(file: str, roots: tuple[str, ...]) -> bool:
    return file.startswith(roots)


@contextlib.contextmanager
def _by_value(modules: list[types.ModuleType]) -> Iterator[None]:
    registered: list[types.ModuleType] = []
    already = cloudpickle.list_registry_pickle_by_value()  # by the user, whose registration stays
    try:
        for module in modules:
            if module.__name__ in already:
                continue
            with contextlib.suppress(ValueError):  # a module that is not in sys.modules any more
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(FunctionPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and isinstance(obj, _StructMeta) and _travels_by_value(obj):
            return _make_struct, _skeleton(obj), _members(obj), None, None, _set_members
        if isinstance(obj, msgspec.Meta):  # of annotated types; it has no pickle form of its own
            return _make_meta, (dict(obj.__rich_repr__()),)
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would send a copy of what is left to read in it.
            raise TypeError(f"cannot pickle an open file: {getattr(obj, 'name', obj)}")
        return super().reducer_override(obj)


def _travels_by_value(struct: type) -> bool:
    module = struct.__module__
    if module == "__main__" or module in cloudpickle.list_registry_pickle_by_value():
        return True
    # Local classes, and those that came here by value: the coordinator ships jobs on.
    found: Any = sys.modules.get(module)
    for part in struct.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not struct


def _make_meta(constraints: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**constraints)


def _skeleton(struct: Any) -> tuple[Any, ...]:
    """Return the arguments of `defstruct`. The receiving process makes one class of one identity."""
    described: list[tuple[Any, ...]] = []
    for field in struct_fields(struct):
        if field.default_factory is not msgspec.NODEFAULT:
            described.append((field.name, field.type, "factory", field.default_factory))
        elif field.default is not msgspec.NODEFAULT:
            described.append((field.name, field.type, "default", field.default))
        else:
            described.append((field.name, field.type, "required", None))
    config = {name: getattr(struct.__struct_config__, name) for name in _CONFIG}
    text = repr((struct.__module__, struct.__qualname__, described, sorted(config.items())))
    identity = hashlib.blake2s(text.encode()).hexdigest()
    _shipped[identity] = struct
    return struct.__name__, struct.__module__, struct.__qualname__, described, config, identity


def _members(struct: type) -> dict[str, Any]:
    """Methods, properties and class attributes: everything that is not a field or machinery."""
    skipped = {
        "__module__",
        "__dict__",
        "__weakref__",
        "__qualname__",
        "__slots__",
        "__match_args__",
        # Those of the fields are made of resolved types; the user's may be texts, which only the module
        # that they are written in gives a meaning.
        "__annotations__",
    }
    names = set(getattr(struct, "__struct_fields__", ()))
    return {
        name: value
        for name, value in vars(struct).items()
        if name not in skipped and name not in names and not name.startswith("__struct")
        and not isinstance(value, types.MemberDescriptorType)
        and not name.startswith("_abc_")
        and not (name == "__reduce__" and getattr(value, "__module__", "") == __name__)
    }  # fmt: skip


def _make_struct(
    name: str,
    module: str,
    qualname: str,
    described: list[tuple[Any, ...]],
    config: dict[str, Any],
    identity: str,
) -> type:
    existing = _rebuilt.get(identity)
    if existing is not None:
        return existing
    specs: list[Any] = []
    for field_name, type_, kind, value in described:
        if kind == "required":
            specs.append((field_name, type_))
        else:
            default = msgspec.field(default_factory=value) if kind == "factory" else value
            specs.append((field_name, type_, default))
    made = msgspec.defstruct(name, specs, module=module, **config)
    made.__qualname__ = qualname
    setattr(made, "__reduce__", _reducer(identity))  # noqa: B010 - mypy knows of no such change
    _rebuilt[identity] = made
    return made


def _reducer(identity: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return how records of a rebuilt class pickle: by its identity, since no import finds the class."""

    def reduce(self: Any) -> tuple[Any, ...]:
        values = tuple(getattr(self, name) for name in self.__struct_fields__)
        return _make_record, (identity, values)

    return reduce


def _make_record(identity: str, values: tuple[Any, ...]) -> Any:
    struct: Any = _rebuilt.get(identity) or _shipped.get(identity)
    if struct is None:
        raise HeadgateError(
            "a record is of a class that this job does not ship",
            fix="were the fields of a Struct changed? then its records in old state cannot be read",
        )
    return struct(**dict(zip(struct.__struct_fields__, values, strict=True)))


def _set_members(struct: type, members: dict[str, Any]) -> None:
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):  # what the class itself made
            setattr(struct, name, value)


class _Found(msgspec.Struct, frozen=True):
    """An object that cannot be pickled, by what the user calls it; `what` is empty if by nothing."""

    value: Any
    reason: str
    what: str = ""
    name: str = ""
    line: str = ""


class _Part(msgspec.Struct, frozen=True):
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
    """Return the parts of a step that travel, without the steps before it."""
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
