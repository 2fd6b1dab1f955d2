"""Conversion of values of a Python type to plain data that Arrow takes for a column, and back.

A `Form` needs the type: it makes the column, and functions between values and plain data. `plain_of` does
without it: it turns what an old codec encoded into plain data, by the type of the column alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin
from uuid import UUID

import msgspec
import pyarrow as pa

from ..errors import StateError


def returned_type(function: object) -> Any:
    """Return the type that a function is annotated to return; Any if there is no annotation, or an
    unknown name in it.
    """
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the method is wanted
    try:
        hint = typing.get_type_hints(function, include_extras=True).get("return", Any)
    except Exception:  # the name is known to type checkers only, or the function is written in C
        return Any
    return Any if isinstance(hint, TypeVar) or hint is type(None) else hint


PLAIN: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", tz="UTC"),
    date: pa.date32(),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
}
"""Immutable scalars that go into Arrow columns and come back unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A type as Arrow sees it. The functions turn values into plain data and back."""

    type_: pa.DataType
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]
    nullable: bool = False
    """True if None is a value."""


def _same(value: Any) -> Any:
    return value


def form_of(hint: Any, inside: tuple[Any, ...] = ()) -> Form | None:
    """Return the form of a type; None if it has none. `inside`: the records around it, which must not
    recur.
    """
    inner, optional = without_none(hint)
    if optional:
        form = form_of(inner, inside)
        return None if form is None else _optional(form)
    scalar = _scalar(inner)
    if scalar is not None:
        return scalar
    inner, _ = unwrapped(inner)
    if is_record(inner):
        return None if inner in inside else _record_form(inner, (*inside, inner))
    origin, args = get_origin(inner), get_args(inner)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return _tuple_form(args, inside)
    if origin in (list, set, frozenset, tuple) and args:
        return _list_form(origin, args[0], inside)
    if origin is dict and args:
        return _map_form(args[0], args[1], inside)
    return None


def _scalar(hint: Any) -> Form | None:
    hint, aware = unwrapped(hint)
    if hint in (Decimal, UUID):
        return Form(pa.string(), str, hint)
    if (kind := enum_values(hint)) is not None:
        return Form(PLAIN[kind], lambda member: member.value, hint)
    if not is_plain(hint):
        return None
    if hint is float:
        return Form(PLAIN[hint], _same, float)  # the stored state may have had integers
    if hint is time:
        return Form(PLAIN[hint], _without_zone, _same)
    if hint is not datetime:
        return Form(PLAIN[hint], _same, _same)
    if not aware:
        return Form(pa.timestamp("us"), _without_zone, _same)
    return Form(PLAIN[hint], _with_zone, lambda value: value.astimezone(UTC))


def _with_zone(value: datetime) -> datetime:
    """Check that a datetime has a zone: Arrow would take it for UTC, and a restore would add a zone."""
    if value.tzinfo is None:
        raise TypeError(
            f"the datetime lacks a zone value=`{value}`; give it one, or declare it as "
            "Annotated[datetime, Meta(tz=False)]"
        )
    return value


def _without_zone(value: Any) -> Any:
    if value.tzinfo is not None:
        raise TypeError(
            f"the {type(value).__name__} has a zone, which no column keeps value=`{value}`"
        )
    return value


def is_plain(hint: Any) -> bool:
    """Return True for the types of `PLAIN`."""
    try:
        return hint in PLAIN
    except TypeError:  # some Annotated types are not hashable
        return False


def enum_values(hint: Any) -> type[Any] | None:
    """Return the type of the values of an Enum class, if it is int or str for all members."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        kinds = {type(member.value) for member in hint}
        if kinds in ({int}, {str}):
            return kinds.pop()
    return None


def _optional(form: Form) -> Form:
    to_plain, from_plain = form.to_plain, form.from_plain
    return Form(
        form.type_,
        lambda value: None if value is None else to_plain(value),
        lambda value: None if value is None else from_plain(value),
        True,
    )


def _record_form(kind: type[Any], inside: tuple[Any, ...]) -> Form | None:
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise StateError(
            f"a type of `{kind.__name__}` is not known: {error}",
            fix="define the class, and import its types, at the top of a module",
        ) from error
    if issubclass(kind, msgspec.Struct):
        if kind.__struct_config__.tag is not None:
            return None
        names: Sequence[str] = kind.__struct_fields__
    else:
        names = [field.name for field in dataclasses.fields(kind) if field.init]
    forms = {name: form_of(hints[name], inside) for name in names}
    known = {name: form for name, form in forms.items() if form is not None}
    if len(known) < len(forms) or not known:
        return None
    # A field with a default may be missing in stored state, so its column is nullable.
    optional = _fields_with_defaults(kind)
    fields = [
        pa.field(name, form.type_, form.nullable or name in optional)
        for name, form in known.items()
    ]

    nulls = [name for name, form in known.items() if form.nullable and name not in optional]

    def to_plain(value: Any) -> Any:
        return {name: form.to_plain(getattr(value, name)) for name, form in known.items()}

    def from_plain(plain: Any) -> Any:
        # A field that the stored value lacks gets its default.
        given = {
            name: form.from_plain(plain[name])
            for name, form in known.items()
            if name in plain and (form.nullable or plain[name] is not None)
        }
        for name in nulls:
            if name not in given:
                given[name] = None
        return kind(**given)

    return Form(pa.struct(fields), to_plain, from_plain)


def _fields_with_defaults(kind: type[Any]) -> set[str]:
    if issubclass(kind, msgspec.Struct):
        return {field.name for field in msgspec.structs.fields(kind) if not field.required}
    missing = dataclasses.MISSING
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is not missing or field.default_factory is not missing
    }


def _tuple_form(args: tuple[Any, ...], inside: tuple[Any, ...]) -> Form | None:
    found = [form_of(arg, inside) for arg in args]
    forms = [form for form in found if form is not None]
    if len(forms) < len(found):
        return None
    fields = [pa.field(f"f{index}", form.type_, form.nullable) for index, form in enumerate(forms)]

    def to_plain(value: Any) -> Any:
        pairs = zip(value, forms, strict=True)
        return {f"f{index}": form.to_plain(item) for index, (item, form) in enumerate(pairs)}

    def from_plain(plain: Any) -> Any:
        return tuple(form.from_plain(plain[f"f{index}"]) for index, form in enumerate(forms))

    return Form(pa.struct(fields), to_plain, from_plain)


def _list_form(kind: Any, element: Any, inside: tuple[Any, ...]) -> Form | None:
    form = form_of(element, inside)
    if form is None:
        return None
    return Form(
        pa.list_(pa.field("item", form.type_, form.nullable)),
        lambda value: [form.to_plain(item) for item in value],
        lambda plain: kind(form.from_plain(item) for item in plain),
    )


def _map_form(key: Any, value: Any, inside: tuple[Any, ...]) -> Form | None:
    keys, values = form_of(key, inside), form_of(value, inside)
    if keys is None or values is None or keys.nullable:
        return None
    return Form(
        pa.map_(keys.type_, pa.field("value", values.type_, values.nullable)),
        lambda mapping: [(keys.to_plain(k), values.to_plain(v)) for k, v in mapping.items()],
        lambda plain: {keys.from_plain(k): values.from_plain(v) for k, v in plain},
    )


def unwrapped(hint: Any) -> tuple[Any, bool]:
    """Return a type without Annotated and NewType, and False if it declares datetimes without zone."""
    aware = True
    while True:
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            aware = aware and not any(getattr(extra, "tz", None) is False for extra in extras)
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return hint, aware


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return `(T, True)` for `T | None`, and `(hint, False)` for other types."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        members = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(members) == 1:
            return members[0], True
    return hint, False


def is_record(kind: Any) -> bool:
    """Return True for a msgspec Struct class or a dataclass."""
    return isinstance(kind, type) and (
        issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
    )


Plain: TypeAlias = Callable[[Any], Any]
_CONVERTED = (
    (pa.types.is_timestamp, datetime),
    (pa.types.is_date, date),
    (pa.types.is_time, time),
    (pa.types.is_duration, timedelta),
    (pa.types.is_decimal, Decimal),
)


def plain_of(type_: pa.DataType) -> Plain:
    """Return a function from plain msgpack values to values that Arrow takes for a type."""
    found = _known_plain(type_)
    return lambda value: None if value is None else found(value)


def _known_plain(type_: pa.DataType) -> Plain:
    if pa.types.is_struct(type_):
        return _struct(type_)
    if pa.types.is_map(type_):
        keys, items = plain_of(type_.key_type), plain_of(type_.item_type)
        return lambda value: [(keys(k), items(v)) for k, v in value.items()]
    if pa.types.is_list(type_):
        item = plain_of(type_.value_type)
        return lambda value: [item(element) for element in value]
    for is_one, kind in _CONVERTED:
        if is_one(type_):
            return lambda value: msgspec.convert(value, kind)
    return lambda value: value


def _struct(type_: pa.DataType) -> Plain:
    fields = {field.name: plain_of(field.type) for field in type_}

    def plain(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):  # the value is a tuple, or a Struct written as an array
            value = dict(zip(fields, value, strict=True))
        unknown = value.keys() - fields.keys()
        if unknown:
            raise StateError(
                f"a stored value has fields that its type did not declare fields=`{sorted(unknown)}`",
                fix="restore from a canonical savepoint, which keeps the names of fields",
            )
        return {name: read(value.get(name)) for name, read in fields.items()}

    return plain
