"""User code travels with the job: functions and classes of the user's own modules go by value.

A worker may run on a machine that has headgate installed, but not the user's scripts. So modules outside
of the standard library and of site-packages are pickled by value (cloudpickle); msgspec Structs, which
cloudpickle cannot take apart, are rebuilt from their fields and methods.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
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
    paths = set(sysconfig.get_paths().values())
    installed = tuple(
        f"{root}{os.sep}" for path in paths for root in (path, os.path.realpath(path))
    )
    own = __name__.split(".")[0]
    found: list[types.ModuleType] = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name == "__main__" or name.split(".")[0] == own:
            continue
        if not file.startswith(installed) and not os.path.realpath(file).startswith(installed):
            found.append(module)
    return found


@contextlib.contextmanager
def _by_value(modules: list[types.ModuleType]) -> Iterator[None]:
    registered: list[types.ModuleType] = []
    try:
        for module in modules:
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
