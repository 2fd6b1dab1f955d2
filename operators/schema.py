"""Schemas as users write them, turned into Arrow: a msgspec Struct, a dataclass, `pa.schema`, a dict."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from ..errors import PlanError
from .origin import Origin
from .suggestions import suggest

ColumnsLike: TypeAlias = pa.Schema | Mapping[str, Any]
"""Columns by name, without a class for the records."""
SchemaLike: TypeAlias = ColumnsLike | type[Any]

_PYTHON_TYPES: Final[dict[Any, pa.DataType]] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    # Python's own resolution, so that nothing is lost in conversion.
    datetime: pa.timestamp("us", tz="UTC"),
    date: pa.date32(),
    time: pa.time64("us"),
    timedelta: pa.duration("us"),
}
_NAMED_TYPES: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "str": pa.string(),
    "int64": pa.int64(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "int32": pa.int32(),
    "int": pa.int32(),
    "int16": pa.int16(),
    "int8": pa.int8(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("ms", tz="UTC"),
    "date": pa.date32(),
    "binary": pa.binary(),
    "bytes": pa.binary(),
}
_DECIMAL = re.compile(r"decimal\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_LIST = re.compile(r"(?:list|array)\s*<(.+)>")


def to_schema(described: SchemaLike) -> pa.Schema:
    """Return the Arrow schema of a Struct class, a dataclass, a `pa.Schema`, or {name: type name}.

    In a class, a field is nullable if its type says so (`int | None`).

    Raises:
        PlanError: it describes no columns, or a type that has no column form.
    """
    if isinstance(described, pa.Schema):
        schema = described
    elif isinstance(described, Mapping):
        schema = pa.schema([pa.field(n, _named_or_arrow(n, t)) for n, t in described.items()])
    elif is_record_class(described):
        schema = pa.schema([_class_field(described, n, t) for n, t in _hints(described).items()])
    else:
        raise PlanError(
            f"not a schema value=`{described!r}`",
            fix="give a msgspec.Struct class, a dataclass, a pyarrow.Schema or {name: type name}",
        )
    if not schema.names:
        raise PlanError(f"a schema needs at least one column value=`{described!r}`")
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise PlanError(f"column `{twice}` appears twice")
    return schema


def into_schema(into: SchemaLike, origin: Origin) -> pa.Schema:
    """Return the schema given with `into=`; errors name the user's line."""
    try:
        return to_schema(into)
    except PlanError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error


def is_record_class(described: object) -> bool:
    """Return True for a msgspec Struct class or a dataclass, whose instances are records."""
    return isinstance(described, type) and (
        issubclass(described, msgspec.Struct) or dataclasses.is_dataclass(described)
    )


def record_class(described: SchemaLike | None) -> type[Any] | None:
    """Return the class itself if the schema was given as one, else None."""
    return typing.cast("type[Any]", described) if is_record_class(described) else None


def parse_type(text: str) -> pa.DataType:
    """Return the Arrow type of a manifest's type name, such as `long` or `list<decimal(10,2)>`.

    Raises:
        PlanError: no such type.
    """
    name = text.strip().lower()
    if name in _NAMED_TYPES:
        return _NAMED_TYPES[name]
    if found := _DECIMAL.fullmatch(name):
        precision, scale = int(found[1]), int(found[2])
        if not (1 <= precision <= 38 and scale <= precision):
            raise PlanError(
                f"decimal needs 1..38 digits, and no more after the point type=`{text}`"
            )
        return pa.decimal128(precision, scale)
    if found := _LIST.fullmatch(name):
        return pa.list_(parse_type(found[1]))
    known = [*_NAMED_TYPES, "decimal(p,s)", "list<...>"]
    raise PlanError(f"unknown type `{text}`", fix=suggest(text, known, "types"))


def same_columns(left: pa.Schema, right: pa.Schema) -> bool:
    """Return True if names, order and types are equal; nullability and metadata are ignored."""
    return bool(left.names == right.names and left.types == right.types)


def united(first: pa.Schema, *others: pa.Schema) -> pa.Schema:
    """Merge the same columns of several streams: nullable in one of them is nullable in the result."""
    found = first
    for other in others:
        for at, field in enumerate(other):
            if field.nullable:
                found = found.set(at, found.field(at).with_nullable(True))
    return found


def optional(schema: pa.Schema) -> pa.Schema:
    """Return the same columns, all nullable."""
    return pa.schema([field.with_nullable(True) for field in schema], schema.metadata)


def difference(wanted: pa.Schema, found: pa.Schema) -> str:
    """Describe what is wrong with `found`; empty if it has the wanted columns, in any order."""
    problems = [f"no column `{n}`" for n in wanted.names if n not in found.names]
    problems += [f"unexpected column `{n}`" for n in found.names if n not in wanted.names]
    problems += [
        f"column `{field.name}` is {found.field(field.name).type}, not {field.type}"
        for field in wanted
        if field.name in found.names and found.field(field.name).type != field.type
    ]
    return ", ".join(problems)


def unknown_column(name: str, schema: pa.Schema, step: str, where: str = "") -> PlanError:
    """Return the error for a column that does not exist."""
    return PlanError(
        f"unknown column `{name}` in {step}",
        where=where,
        fix=suggest(name, schema.names, "columns"),
    )


def _named_or_arrow(column: str, described: Any) -> pa.DataType:
    if isinstance(described, pa.DataType):
        return described
    if isinstance(described, str):
        try:
            return parse_type(described)
        except PlanError as error:
            raise PlanError(f"{error.message} column=`{column}`", fix=error.fix) from None
    return _python_type(column, described)[0]


def _hints(described: type[Any]) -> dict[str, Any]:
    """Return the fields of a record class with their types, in order."""
    try:
        hints = typing.get_type_hints(described)
    except NameError as error:
        raise PlanError(
            f"a type of `{described.__name__}` is not known: {error}",
            fix="define the class, and import its types, at the top of a module",
        ) from error
    if issubclass(described, msgspec.Struct):
        names = described.__struct_fields__
    else:
        names = tuple(field.name for field in dataclasses.fields(described))
    return {name: hints[name] for name in names}


def _class_field(described: type[Any], name: str, hint: Any) -> pa.Field:
    arrow_type, nullable = _python_type(f"{described.__name__}.{name}", hint)
    return pa.field(name, arrow_type, nullable=nullable)


def _python_type(column: str, hint: Any) -> tuple[pa.DataType, bool]:
    """Return the Arrow type of a Python type hint, and whether it may be None."""
    if isinstance(hint, typing.NewType):
        return _python_type(column, hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _python_type(column, typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        members = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(members) == 1 and len(members) < len(typing.get_args(hint)):
            return _python_type(column, members[0])[0], True
    if origin is list:
        return pa.list_(_python_type(column, typing.get_args(hint)[0])[0]), False
    if hint in _PYTHON_TYPES:
        return _PYTHON_TYPES[hint], False
    raise PlanError(
        f"type has no column form column=`{column}` type=`{getattr(hint, '__name__', hint)}`",
        fix="use str, int, float, bool, bytes, datetime, date, time, timedelta, list[...] or "
        "one of them | None; for other Arrow types, such as decimals, give a pyarrow.Schema",
    )
