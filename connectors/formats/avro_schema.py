"""Schemas of Avro: parsed from JSON, compared with columns, and made from columns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from ...errors import UsageError

PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
MISSING: Final = object()
"""The default of a field that has none; None is the default null."""
NAMES_MAX: Final = 10_000
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Primitive:
    """One of `PRIMITIVES`, with the name of its logical type, or an empty one."""

    name: str
    logical: str = ""
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True)
class Fixed:
    """A value of always the same number of bytes."""

    name: str
    size: int
    logical: str = ""
    precision: int = 0
    scale: int = 0


@dataclass(frozen=True)
class Enum:
    name: str
    symbols: tuple[str, ...]
    default: str | None = None


@dataclass(frozen=True)
class Array:
    items: AvroType


@dataclass(frozen=True)
class Map:
    values: AvroType


@dataclass(frozen=True)
class Union:
    branches: tuple[AvroType, ...]


@dataclass(frozen=True)
class RecordField:
    name: str
    type: AvroType
    default: Any = MISSING
    aliases: tuple[str, ...] = ()


@dataclass(eq=False)
class Record:
    """A record; its fields are added after it, as they may name it."""

    name: str
    fields: list[RecordField] = field(default_factory=list)


AvroType: TypeAlias = Primitive | Fixed | Enum | Array | Map | Union | Record


class Unfit(Exception):
    """Raised if a type of Avro has no form as the type of a column; the text gives the reason."""


def parse_avro(
    schema: str | Mapping[str, Any] | Sequence[Any], references: Sequence[str] = ()
) -> AvroType:
    """Return a schema.

    Args:
        schema: as JSON, or as what JSON makes.
        references: schemas whose types it names, each behind those that it needs.

    Raises:
        UsageError: it is no schema of Avro.
    """
    if isinstance(schema, str) and schema.strip() in PRIMITIVES:
        return Primitive(schema.strip())
    try:
        parser = _Parser()
        for each in references:
            parser.parse(json.loads(each), "")
        return parser.parse(json.loads(schema) if isinstance(schema, str) else schema, "")
    except ValueError as error:
        raise _wrong(f"it is no JSON: {error}") from None
    except RecursionError:
        raise _wrong("it is nested too deeply") from None


def _wrong(reason: str) -> UsageError:
    return UsageError(
        f"not a schema of Avro: {reason}",
        fix='such as {"type": "record", "name": ..., "fields": [...]}',
    )


class _Parser:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}

    def parse(self, found: Any, namespace: str) -> AvroType:
        if isinstance(found, str):
            return self._name(found, namespace)
        if isinstance(found, list):
            branches = tuple(self.parse(each, namespace) for each in found)
            if not branches or any(isinstance(each, Union) for each in branches):
                raise _wrong("a union needs branches, none of which is a union")
            return Union(branches)
        if not isinstance(found, Mapping) or "type" not in found:
            raise _wrong(
                f"a type is a name, a list or an object with `type` found=`{found!r:.100}`"
            )
        kind = found["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._define(kind, found, namespace)
        if kind == "array":
            return Array(self.parse(found.get("items"), namespace))
        if kind == "map":
            return Map(self.parse(found.get("values"), namespace))
        made = self.parse(kind, namespace)
        if isinstance(made, Primitive):
            return Primitive(made.name, *_logical(found))
        return made

    def _name(self, name: str, namespace: str) -> AvroType:
        if name in PRIMITIVES:
            return Primitive(name)
        # A short name is one of the namespace around it; schemas of older tools may mean the empty one.
        for full in (name,) if "." in name else (f"{namespace}.{name}", name):
            if full in self._named:
                return self._named[full]
        raise _wrong(f"no such type `{name}`")

    def _define(self, kind: str, found: Mapping[str, Any], namespace: str) -> AvroType:
        name = found.get("name")
        if not isinstance(name, str) or not name:
            raise _wrong(f"a type `{kind}` needs a name")
        if "." in name:
            full, namespace = name, name.rpartition(".")[0]
        else:
            namespace = found.get("namespace", namespace) or ""
            full = f"{namespace}.{name}" if namespace else name
        if full in self._named or len(self._named) >= NAMES_MAX:
            raise _wrong(f"the name `{full}` is defined twice, or there are too many")
        if kind == "fixed":
            size = found.get("size")
            if not isinstance(size, int) or not 0 <= size < 1 << 20:
                raise _wrong(f"`{full}` has no size below 1 MiB")
            self._named[full] = fixed = Fixed(full, size, *_logical(found))
            return fixed
        if kind == "enum":
            symbols = found.get("symbols")
            if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
                raise _wrong(f"`{full}` has no symbols")
            self._named[full] = enum = Enum(full, tuple(symbols), found.get("default"))
            return enum
        self._named[full] = record = Record(full)
        fields = found.get("fields")
        if not isinstance(fields, list):
            raise _wrong(f"`{full}` has no fields")
        for each in fields:
            if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
                raise _wrong(f"a field of `{full}` has no name")
            record.fields.append(
                RecordField(
                    each["name"],
                    self.parse(each.get("type"), namespace),
                    each.get("default", MISSING),
                    tuple(each.get("aliases", ())),
                )
            )
        names = [each.name for each in record.fields]
        if len(set(names)) < len(names):
            raise _wrong(f"two fields of `{full}` have the same name")
        return record


def _logical(found: Mapping[str, Any]) -> tuple[str, int, int]:
    name = found.get("logicalType", "")
    precision, scale = found.get("precision", 0), found.get("scale", 0)
    if name == "decimal" and not (
        isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision <= 38
    ):
        return "", 0, 0  # what is not valid is ignored, as the specification of Avro says
    return str(name), int(precision or 0), int(scale or 0)


_TIMES: Final[dict[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    **{
        ("long", f"{prefix}timestamp-{name}"): pa.timestamp(unit, zone)
        for name, unit in (("millis", "ms"), ("micros", "us"), ("nanos", "ns"))
        for prefix, zone in (("", "UTC"), ("local-", None))
    },
}
"""The types of columns for numbers that stand for times."""
_PLAIN: Final = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}


def time_type(avro: AvroType) -> pa.DataType | None:
    """Return the type of column for a number that stands for a time; None: it does not."""
    return _TIMES.get((avro.name, avro.logical)) if isinstance(avro, Primitive) else None


def is_decimal(avro: AvroType) -> bool:
    return (
        isinstance(avro, Primitive | Fixed)
        and avro.logical == "decimal"
        and (isinstance(avro, Fixed) or avro.name == "bytes")
    )


def arrow_type(avro: AvroType, inside: tuple[Record, ...] = ()) -> tuple[pa.DataType, bool]:
    """Return the type of column that holds all values of a type of Avro, and whether it has nulls.

    Raises:
        Unfit: there is none.
    """
    if isinstance(avro, Union):
        branches = [each for each in avro.branches if each != Primitive("null")]
        if not branches:
            return pa.null(), True
        if len(branches) > 1:
            raise Unfit("a union of several types has no type of column: declare the column")
        return arrow_type(branches[0], inside)[0], len(branches) < len(avro.branches)
    if is_decimal(avro):
        assert isinstance(avro, Primitive | Fixed)
        return pa.decimal128(avro.precision, avro.scale), False
    if isinstance(avro, Primitive):
        return time_type(avro) or _PLAIN[avro.name], avro.name == "null"
    if isinstance(avro, Enum):
        return pa.string(), False
    if isinstance(avro, Fixed):
        return pa.binary(avro.size), False
    if isinstance(avro, Array):
        kind, nullable = arrow_type(avro.items, inside)
        return pa.list_(pa.field("item", kind, nullable)), False
    if isinstance(avro, Map):
        kind, nullable = arrow_type(avro.values, inside)
        return pa.map_(pa.string(), pa.field("value", kind, nullable)), False
    if avro in inside:
        raise Unfit(f"the record `{avro.name}` contains itself")
    return pa.struct(_fields(avro, (*inside, avro))), False


def _fields(record: Record, inside: tuple[Record, ...]) -> list[pa.Field]:
    return [pa.field(each.name, *arrow_type(each.type, inside)) for each in record.fields]


def columns_of(avro: AvroType) -> pa.Schema:
    """Return the columns that a record of Avro makes.

    Raises:
        UsageError: it is no record, or a field has no type of column.
    """
    if not isinstance(avro, Record):
        raise UsageError(
            "the Avro schema is no record, so it names no columns", fix='schema={"value": "string"}'
        )
    try:
        return pa.schema(_fields(avro, (avro,)))
    except Unfit as error:
        raise UsageError(f"the columns do not follow from the Avro schema: {error}") from None


def avro_of(schema: pa.Schema, name: str) -> dict[str, Any]:
    """Return the schema of Avro for columns, as what JSON can hold.

    Raises:
        UsageError: a column has no form in Avro.
    """
    return _record_of(list(schema), name)


def _record_of(fields: Sequence[pa.Field], name: str) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [
            {
                "name": _checked(each.name),
                "type": _avro_field(each, f"{name}_{each.name}"),
                **({"default": None} if each.nullable else {}),
            }
            for each in fields
        ],
    }


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"this is no name in Avro column=`{name}`",
            fix="names have letters, digits and `_`, and do not begin with a digit: rename it",
        )
    return name


def _avro_field(given: pa.Field, name: str) -> Any:
    made = _avro_type(given.type, name)
    return ["null", made] if given.nullable and made != "null" else made


def _avro_type(kind: pa.DataType, name: str) -> Any:
    is_a = pa.types
    if is_a.is_integer(kind) and kind != pa.uint64():
        return "int" if kind.bit_width < 32 or kind == pa.int32() else "long"
    if kind == pa.time32("s"):
        kind = pa.time32("ms")
    for (base, logical), found in _TIMES.items():
        if kind == found or (
            is_a.is_timestamp(kind)
            and is_a.is_timestamp(found)
            and (kind.tz is None) == (found.tz is None)
            and ("ms" if kind.unit == "s" else kind.unit) == found.unit
        ):
            return {"type": base, "logicalType": logical}
    if is_a.is_decimal128(kind):
        decimal = {"logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
        return {"type": "bytes", **decimal}
    if is_a.is_fixed_size_binary(kind):
        return {"type": "fixed", "name": name, "size": kind.byte_width}
    if is_a.is_large_string(kind) or is_a.is_large_binary(kind):
        return "string" if is_a.is_large_string(kind) else "bytes"
    if is_a.is_list(kind) or is_a.is_large_list(kind):
        return {"type": "array", "items": _avro_field(kind.value_field, f"{name}_item")}
    if is_a.is_map(kind) and kind.key_type in (pa.string(), pa.large_string()):
        return {"type": "map", "values": _avro_field(kind.item_field, f"{name}_value")}
    if is_a.is_struct(kind):
        return _record_of([kind.field(at) for at in range(kind.num_fields)], name)
    for plain, found in _PLAIN.items():
        if kind == found:
            return plain
    raise UsageError(
        f"Avro has no form for this type column=`{name}` type=`{kind}`",
        fix="cast it, or leave it out",
    )
