"""User code travels with the job: functions and classes of the user's own modules go by value.

A worker may run on a machine that has headgate installed, but not the user's scripts. So modules that are
neither part of Python nor installed as a distribution are pickled by value (cloudpickle); msgspec Structs,
which cloudpickle cannot take apart, are rebuilt from their fields and methods.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
from msgspec.structs import fields as struct_fields

from ..errors import HeadgateError

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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
    """What `defstruct` needs. The identity keeps one class one class in the receiving process."""
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
    """How records of a rebuilt class pickle: no import finds it, but its identity does."""

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
