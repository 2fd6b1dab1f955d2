"""Partitions of an Iceberg table: how users write them, and the values of a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from ...errors import PlanError, UsageError
from ..tables.sink import check_column

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table.update.spec import UpdateSpec

_WRITTEN: Final = re.compile(r"(\w+)\((?:(\d+), *)?(.+)\)")
_TIMES: Final = ("year", "month", "day", "hour")
_COUNTED: Final = {"bucket": "bucket", "truncate": "trunc"}
"""Transforms that have a number, and how the names of their partitions end."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A column, or what a transform makes of it, by which the files of a table are separated."""

    column: str
    transform: str = "identity"
    number: int = 0

    def __str__(self) -> str:
        """Return it as users write it."""
        if self.transform == "identity":
            return self.column
        number = f"{self.number}, " if self.number else ""
        return f"{self.transform}({number}{self.column})"

    def takes(self, type_: pa.DataType) -> bool:
        """Tells whether a column of this type can be partitioned in this way."""
        timed, dated = pa.types.is_timestamp(type_), pa.types.is_date(type_)
        whole = pa.types.is_integer(type_) or pa.types.is_decimal(type_)
        text = type_ in (pa.string(), pa.binary())
        if self.transform in _TIMES:
            return timed or (dated and self.transform != "hour")
        if self.transform == "truncate":
            return bool(whole or type_ == pa.string())
        bucketed = whole or text or timed or dated or pa.types.is_time(type_)
        return bucketed or (self.transform == "identity" and pa.types.is_boolean(type_))


def parse_partition(text: str, columns: pa.Schema) -> Partition:
    """Return the partition that a user writes: `region`, `day(at)`, `bucket(16, id)`.

    Raises:
        PlanError: there is no such column or transform, or they do not fit.
    """
    match = None if text in columns.names else _WRITTEN.fullmatch(text)
    if match is None:
        made = Partition(text)
    else:
        transform, number, column = match.groups()
        known = (*_TIMES, *_COUNTED)
        if transform not in known or (transform in _COUNTED) != bool(int(number or 0)):
            raise PlanError(
                f"no such partition partition_by=`{text}`",
                fix="a column, year(c), month(c), day(c), hour(c), bucket(16, c) or truncate(4, c)",
            )
        made = Partition(column, transform, int(number or 0))
    kind = check_column(columns, made.column).type
    if not made.takes(kind):
        raise PlanError(
            f"a table cannot be partitioned in this way partition_by=`{text}` type=`{kind}`",
            fix="use another column, or another transform such as bucket(16, c)",
        )
    return made


def parse_partitions(texts: Sequence[str], columns: pa.Schema) -> tuple[Partition, ...]:
    """Return the partitions of a table that a user writes; see `parse_partition`."""
    made = tuple(parse_partition(text, columns) for text in texts)
    timed = [each.column for each in made if each.transform in _TIMES]
    twice = next((name for name in timed if timed.count(name) > 1), None)
    if twice is not None:
        raise PlanError(
            f"a column is in two partitions by time column=`{twice}` "
            f"partition_by=`{', '.join(texts)}`",
            fix="keep the finer one: readers know that hours are parts of days",
        )
    return made


def add_partitions(update: UpdateSpec, partitions: Sequence[Partition]) -> None:
    """Add partitions to a table that is created, named as all tools name them."""
    from pyiceberg.transforms import parse_transform

    for each in partitions:
        if each.transform == "identity":
            update.add_identity(each.column)
            continue
        number = f"[{each.number}]" if each.number else ""
        suffix = _COUNTED.get(each.transform, each.transform)
        update.add_field(
            each.column,
            parse_transform(f"{each.transform}{number}"),
            f"{each.column}_{suffix}",
        )


def partitions_of(schema: Schema, spec: PartitionSpec) -> list[Partition]:
    """Return the partitions of a table.

    Raises:
        UsageError: headgate cannot write to them.
    """
    found = []
    for field in spec.fields:
        name, number, _ = re.fullmatch(r"(\w+)(?:\[(\d+)\])?(.*)", str(field.transform)).groups()  # type: ignore[union-attr]
        if name == "void":
            continue
        column = schema.find_column_name(field.source_id)
        known = name in ("identity", *_TIMES, *_COUNTED)
        if name == "truncate" and str(schema.find_type(field.source_id)) == "binary":
            known = False  # the library has no such transform
        if not known or column not in {each.name for each in schema.fields}:
            raise UsageError(
                f"headgate cannot write to such partitions partition=`{field.name}` "
                f"transform=`{field.transform}` column=`{column}`",
                fix="partition the table by columns that are not parts of others, or write into another "
                "table and copy from there",
            )
        found.append(Partition(column, name, int(number or 0)))
    return found


class PartitionValues:
    """Computes the partitions of rows, and what the entry of their file has to say of them."""

    def __init__(self, schema: Schema, spec: PartitionSpec) -> None:
        self._schema = schema
        self._spec = spec
        self._types = [each.field_type for each in spec.partition_type(schema).fields]

    def of_rows(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """Return the value of each partition of each row, as the numbers that Iceberg stores."""
        return [self._values(field, rows) for field in self._spec.fields]

    def _values(self, field: Any, rows: pa.RecordBatch) -> pa.Array:
        name = self._schema.find_column_name(field.source_id)
        if str(field.transform) == "void" or name not in rows.schema.names:
            return pa.nulls(len(rows), pa.int32())
        source = self._schema.find_field(field.source_id).field_type
        found = field.transform.pyarrow_transform(source)(rows.column(name))
        if pa.types.is_date32(found.type):
            return found.cast(pa.int32())
        if pa.types.is_timestamp(found.type) or pa.types.is_time64(found.type):
            return found.cast(pa.int64())
        return found

    def encoded(self, key: Sequence[Any]) -> list[bytes | None]:
        """Return the values of a file as bytes."""
        from pyiceberg.conversions import to_bytes

        return [
            None if value is None else to_bytes(type_, value)
            for type_, value in zip(self._types, key, strict=True)
        ]

    def decoded(self, values: Sequence[bytes | None]) -> Any:
        """Return encoded values as the record of a manifest."""
        from pyiceberg.conversions import from_bytes
        from pyiceberg.typedef import Record

        return Record(
            *(
                None if value is None else from_bytes(type_, value)
                for type_, value in zip(self._types, values, strict=True)
            )
        )

    def path(self, key: Sequence[Any]) -> str:
        """Return the directory of a file with these values; empty without partitions."""
        from pyiceberg.typedef import Record

        if not self._spec.fields:
            return ""
        return str(self._spec.partition_to_path(Record(*key), self._schema))
