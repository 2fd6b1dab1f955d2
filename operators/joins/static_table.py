"""A static table: small files that are read as a whole, to look records up in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import msgspec
import pyarrow as pa

from ...errors import PlanError, StateError, UsageError
from ...state.hashing import check_key_type
from ..origin import Origin, capture_origin
from ..schema import unknown_column
from ..sizes import format_size, parse_size
from .columns import plain_rows, plain_schema

TABLE_BYTES: Final = "64mb"
TABLE_BYTES_MAX: Final = "1gb"
"""This is far from the 2 GiB of text that one Arrow array can hold."""
Duplicates: TypeAlias = Literal["fail", "first", "last"]


@runtime_checkable
class TableFiles(Protocol):
    """A file source that can be read as a whole. Picklable."""

    @property
    def schema(self) -> pa.Schema | None: ...

    def check_as_table(self) -> None:
        """Raise UsageError if the source cannot be read as a table."""
        ...

    def whole(self, options: Mapping[str, str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all records, in order, with these columns in the schema's order; blocks.

        Args:
            options: the options of the job.
            columns: at least one.

        Raises:
            UsageError: there is no file, or a column is missing.
            BadRecordError: a record cannot be read, or does not fit the schema.
            StorageError: the storage refused, or a file changed meanwhile.
        """
        ...

    def describe(self) -> str: ...


class StaticTable(msgspec.Struct, frozen=True):
    """The result of `static_table`, for `lookup`. Picklable.

    Attributes:
        schema: the key columns, followed by those of `columns` that are no keys.
        keys: the columns that records are looked up by.
        columns: the columns added to the records.
        max_bytes: the most bytes its columns may take in memory.
        duplicates: which of the rows with equal keys counts.
    """

    source: TableFiles
    schema: pa.Schema
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    max_bytes: int
    duplicates: Duplicates

    def read(self, options: Mapping[str, str]) -> pa.RecordBatch:
        """Read all rows; blocks.

        Raises:
            UsageError: the table is larger than `max_bytes`, or an error of `TableFiles.whole`.
        """
        batches, nbytes = [], 0
        for found in self.source.whole(options, self.schema.names):
            batch = plain_rows(found.select(self.schema.names), self.schema)
            batches.append(batch)
            nbytes += batch.nbytes
            if nbytes > self.max_bytes:
                raise UsageError(
                    f"a static table is larger than max_bytes=`{format_size(self.max_bytes)}` "
                    f"table=`{self.source.describe()}`",
                    fix="raise max_bytes (every subtask holds the table), name fewer columns=, or make "
                    "the table a stream and join by version",
                )
        return pa.concat_batches(batches or [pa.RecordBatch.from_pylist([], schema=self.schema)])

    def describe(self) -> str:
        """Return a short text for `explain`."""
        return self.source.describe()


def static_table(
    source: TableFiles,
    *,
    key: str | Sequence[str],
    columns: Sequence[str] | None = None,
    max_bytes: str = TABLE_BYTES,
    duplicates: Duplicates = "fail",
) -> StaticTable:
    """Declare a small table in files, for `stream.lookup(key, table, ...)`.

    Every subtask reads it as a whole when it starts, and again after each restart.

    Args:
        source: a file source (`csv_source`, `json_source`, `parquet_source`) that fails at bad
            records.
        key: the columns that records are looked up by; null is a key like any other.
        columns: the columns added to the records; None: all but the key.
        max_bytes: the most bytes that these columns may take in memory, in each subtask.
        duplicates: of rows with equal keys, the `first` or the `last` counts, or the job fails.

    Raises:
        PlanError: a column does not exist or cannot be a key, or the source is no file source.
    """
    origin = capture_origin()
    schema = _schema_of(source, origin)
    keys = (key,) if isinstance(key, str) else tuple(key)
    _check_names(keys, schema, "key", origin)
    if not keys:
        raise PlanError("a static table needs a key", where=str(origin), fix='key="column"')
    brought = tuple(n for n in schema.names if n not in keys) if columns is None else tuple(columns)
    _check_names(brought, schema, "columns", origin)
    fields = [schema.field(name) for name in dict.fromkeys((*keys, *brought))]
    for field in fields[: len(keys)]:
        try:
            check_key_type(field.type)
        except StateError as error:
            raise PlanError(
                f"column `{field.name}` cannot be the key of a static table: {error.message}",
                where=str(origin),
                fix=error.fix,
            ) from error
    if duplicates not in get_args(Duplicates):
        raise PlanError(
            f"not a rule for equal keys duplicates=`{duplicates}`",
            where=str(origin),
            fix='it can be: "fail", "first" or "last"',
        )
    bound = _max_bytes(max_bytes, origin)
    return StaticTable(source, pa.schema(fields), keys, brought, bound, duplicates)


def _schema_of(source: object, origin: Origin) -> pa.Schema:
    if not isinstance(source, TableFiles) or source.schema is None:
        raise PlanError(
            f"a static table is read from files, not from source=`{type(source).__name__}`",
            where=str(origin),
            fix="give csv_source(...), json_source(...) or parquet_source(...)",
        )
    try:
        source.check_as_table()
    except UsageError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error
    return plain_schema(source.schema)


def _check_names(names: Sequence[str], schema: pa.Schema, what: str, origin: Origin) -> None:
    for name in names:
        if name not in schema.names:
            raise unknown_column(name, schema, f"{what} of a static table", str(origin))
    if len(set(names)) < len(names):
        raise PlanError(
            f"a column is named twice {what}=`{', '.join(names)}`",
            where=str(origin),
            fix="keep one",
        )


def _max_bytes(said: str, origin: Origin) -> int:
    try:
        bound = parse_size(said, "max_bytes")
    except UsageError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error
    if not 1 <= bound <= parse_size(TABLE_BYTES_MAX):
        raise PlanError(
            f"max_bytes of a static table must be in 1b..{TABLE_BYTES_MAX} value=`{said}`",
            where=str(origin),
            fix="make a larger table a stream, and join by version",
        )
    return bound
