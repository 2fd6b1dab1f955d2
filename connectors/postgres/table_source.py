"""Reads a table of PostgreSQL, or the rows of a query: all rows once, or again and again new ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec
import pyarrow as pa

from ...errors import UsageError
from ...operators.connections import counted
from ...operators.durations import Duration, parse_duration
from ...operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ...operators.source import Record, Record_co, Source, SourceReader
from ...operators.suggestions import suggest
from ..arguments import check_count, parse_bytes
from .client import Address, Connection, connect, reading
from .relation import Relation
from .table_reader import TableReader, TableSettings, TableSplit
from .tables import Table
from .values import schema_of

BUFFER: Final = "32mb"
_SPLITS: Final = 16
"""The splits of a table, by default."""
_SAMPLED: Final = 1000
"""About this many rows per split are looked at to cut a table into splits."""
_APPLICATION: Final = "headgate-plan"


class TableSource(Source[Record_co]):
    """The rows of a table or a query."""

    extras = ("postgres",)

    def __init__(
        self, settings: TableSettings, rows: pa.Schema, row_type: type[Any] | None
    ) -> None:
        self.settings = settings
        self.schema: pa.Schema = rows
        self.bounded = settings.incremental_by is None
        self.at_rest = self.bounded
        self.row_type = row_type

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that the table or the query has the columns, and the right to read it."""
        settings, relation = self.settings, self.settings.relation
        with (
            connect(relation.address, "headgate-check") as connection,
            relation.looking(),
            reading(connection),
        ):
            table = relation.describe(connection)
            schema_of(table, self.schema)
            expected = _expected_rows(
                connection, settings, _whole(table, _order_of(table, settings))
            )
        return f"about {counted(expected, 'row')}"

    def splits(self, parallelism: int) -> list[bytes]:
        """Look at the table, and cut it into ranges of keys."""
        settings, relation = self.settings, self.settings.relation
        with connect(relation.address, _APPLICATION) as connection, relation.looking():
            connection.execute("SET default_transaction_read_only = on")
            table = relation.describe(connection)
            schema_of(table, self.schema)
            order = _order_of(table, settings)
            whole = _whole(table, order, polls=not self.bounded)
            bounds = [] if whole.polls else _bounds(connection, settings, table, whole)
        lows, highs = [None, *bounds], [*bounds, None]
        return [
            msgspec.msgpack.encode(
                msgspec.structs.replace(whole, name=str(number), last=low, upto=high)
            )
            for number, (low, high) in enumerate(zip(lows, highs, strict=True))
        ]

    def reader(self) -> SourceReader:
        return TableReader(self.settings, self.schema)

    def with_columns(self, columns: Sequence[str]) -> TableSource[Record_co]:
        # At least one column stays: a batch without columns has no rows to count.
        wanted = [field for field in self.schema if field.name in set(columns)]
        narrow = copy.copy(self)
        narrow.schema = pa.schema(wanted or [self.schema.field(0)])
        narrow.row_type = self.row_type if len(wanted) == len(self.schema) else None
        return narrow

    def describe(self) -> str:
        return f"postgres({self.settings.relation})"


def _order_of(table: Table, settings: TableSettings) -> list[str]:
    """Return the columns by which rows are ordered, which identify a row.

    Raises:
        UsageError: they are not known, or do not identify a row.
    """
    growing = [] if settings.incremental_by is None else [settings.incremental_by]
    names = [each.name for each in table.columns]
    for name in (*growing, *settings.key):
        if name not in names:
            raise UsageError(
                f"there is no such column column=`{name}` table=`{table.full_name}`",
                fix=suggest(name, names, "columns"),
            )

    def is_full(key: Sequence[str]) -> bool:
        return all(each.not_null for each in table.columns if each.name in key)

    if not table.keys:
        # Whether the columns identify a row of a view or a query is seen when it is read.
        if not settings.key and not growing:
            raise UsageError(
                f"nothing tells which columns identify a row table=`{table.full_name}`",
                fix='key=["id"], columns with values in all rows that no two rows share; or give the '
                "table a primary key",
            )
        key: Sequence[str] = settings.key
    elif settings.key:
        key = settings.key
        if not any(set(each) <= set(key) for each in table.keys) or not is_full(key):
            raise UsageError(
                f"the key does not identify a row key=`{', '.join(key)}` table=`{table.full_name}`",
                fix="name the columns of a unique index that are NOT NULL, such as the primary key",
            )
    else:
        full = [each for each in table.keys if is_full(each)]
        if not full:
            raise UsageError(
                f"the columns of all unique indexes may be null table=`{table.full_name}`",
                fix="ALTER TABLE ... ALTER COLUMN ... SET NOT NULL",
            )
        key = full[0]
    return [*growing, *(name for name in key if name not in growing)]


def _whole(table: Table, order: Sequence[str], *, polls: bool = False) -> TableSplit:
    """Return the table as one split."""
    kinds = {each.name: each.type for each in table.columns}
    name = [] if table.kind == "q" else [table.schema, table.name]
    return TableSplit("0", name, list(order), [kinds[column] for column in order], polls=polls)


def _expected_rows(connection: Connection, settings: TableSettings, whole: TableSplit) -> int:
    """Return about how many rows there are, by the plan of the server; it also checks the rights."""
    from psycopg import sql

    rows = settings.relation.rows(whole.table)
    plan: Any = connection.execute(sql.SQL("EXPLAIN (FORMAT JSON) SELECT FROM {}").format(rows))
    ((found,),) = plan.fetchall()
    planned = json.loads(found) if isinstance(found, str) else found
    return int(planned[0]["Plan"]["Plan Rows"])


def _bounds(
    connection: Connection, settings: TableSettings, table: Table, whole: TableSplit
) -> list[list[str]]:
    """Return keys that cut the rows into about equal parts, by looking at some of them."""
    from psycopg import sql

    can_sample = table.kind in ("r", "p", "m")
    splits = settings.splits or (_SPLITS if can_sample else 1)
    if splits == 1:
        return []
    rows = settings.relation.rows(whole.table)
    share = min(1.0, splits * _SAMPLED / max(1, _expected_rows(connection, settings, whole)))
    if can_sample:
        rows = sql.SQL("{} TABLESAMPLE SYSTEM ({})").format(rows, sql.Literal(100 * share))
    else:
        rows = sql.SQL("{} WHERE random() < {}").format(rows, sql.Literal(share))
    if not table.keys:
        _check_values(connection, settings, whole)
    key = sql.SQL(", ").join(map(sql.Identifier, whole.key))
    texts = sql.SQL(", ").join(
        sql.SQL("{}::text").format(sql.Identifier(name)) for name in whole.key
    )
    statement = sql.SQL(
        "SELECT {texts} FROM (SELECT {key}, row_number() OVER (ORDER BY {key}) AS headgate_row, "
        "count(*) OVER () AS headgate_rows FROM {rows}) AS headgate_sample "
        "WHERE headgate_row * {splits} % headgate_rows < {splits} AND headgate_row < headgate_rows "
        "ORDER BY headgate_row"
    ).format(texts=texts, key=key, rows=rows, splits=sql.Literal(splits))
    return [list(row) for row in connection.execute(statement).fetchall()]


def _check_values(connection: Connection, settings: TableSettings, whole: TableSplit) -> None:
    """Check that all rows have values in the columns of the key: those without are in no range.

    Raises:
        UsageError: one has none.
    """
    from psycopg import sql

    missing = sql.SQL(" OR ").join(
        sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in whole.key
    )
    statement = sql.SQL("SELECT FROM {} WHERE {} LIMIT 1").format(
        settings.relation.rows(whole.table), missing
    )
    if connection.execute(statement).fetchone() is not None:
        raise UsageError(
            f"a row has no value in a column of its key key=`{', '.join(whole.key)}` "
            f"table=`{settings.relation}`",
            fix="leave such rows out by a query, or name other columns",
        )


class TableOptions(TypedDict, total=False):
    """The keyword arguments of `postgres_source` beside the schema; it documents them."""

    query: str | None
    key: str | Sequence[str]
    splits: int | None
    incremental_by: str | None
    lag: Duration
    every: Duration
    batch_rows: int
    buffer: str | int
    password: str | None


@overload
def postgres_source(
    dsn: str, table: str | None = ..., *, schema: type[Record], **options: Unpack[TableOptions]
) -> TableSource[Record]: ...
@overload
def postgres_source(
    dsn: str,
    table: str | None = ...,
    *,
    schema: ColumnsLike | None = ...,
    **options: Unpack[TableOptions],
) -> TableSource: ...
def postgres_source(
    dsn: str,
    table: str | None = None,
    *,
    query: str | None = None,
    schema: SchemaLike | None = None,
    key: str | Sequence[str] = (),
    splits: int | None = None,
    incremental_by: str | None = None,
    lag: Duration = "5s",
    every: Duration = "1s",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    password: str | None = None,
) -> TableSource:
    """Return a source of the rows of a table or a query. It needs `pip install 'headgate[postgres]'`.

    Args:
        dsn: the address of the database, `postgresql://user@host:5432/database` or `host=... dbname=...`;
            or where it can be read on each machine: `file:/path` or `env:NAME`.
        table: the name of the table or view as SQL writes it: `orders`, `shop.orders` or `"Orders"`.
        query: instead of a table: a SELECT, whose rows are read.
        schema: the columns to read; by default all, as the table has them now.
        key: the columns that identify a row, in whose order rows are read; by default those of the
            primary key. A view or a query needs it.
        splits: the number of parts that subtasks can read at the same time; by default 16 of a table,
            and 1 of a query or a view.
        incremental_by: a column that grows, such as a number or the time of the last change. The
            source then never ends: it reads rows whose value is beyond those that it has read.
        lag: with `incremental_by`: the longest time between the choice of a row's value and the commit
            of its transaction. Rows are read this much later, and rows that take longer are missed.
        every: with `incremental_by`: how often the table is asked for new rows.
        batch_rows: most rows per batch.
        buffer: the most bytes that wait to be processed, per subtask.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.

    Raises:
        UsageError: an argument is wrong; without a schema, also if the table cannot be looked at.
    """
    relation = Relation(Address(dsn, password), table, query)
    relation.check()
    keys = (key,) if isinstance(key, str) else tuple(key)
    if len(set(keys)) < len(keys):
        raise UsageError(f"a column is named twice key=`{', '.join(keys)}`")
    if splits is not None:
        check_count("splits", splits, 1)
        if incremental_by is not None:
            raise UsageError(
                f"new rows are read in one order splits=`{splits}` incremental_by=`{incremental_by}`",
                fix="leave splits= out",
            )
    check_count("batch_rows", batch_rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    lag_s, every_s = parse_duration(lag, "lag") / 1000, parse_duration(every, "every") / 1000
    if not every_s:
        raise UsageError(f"there must be time between two looks every=`{every}`", fix='every="1s"')
    settings = TableSettings(
        relation, keys, splits, incremental_by, lag_s, every_s, batch_rows, buffer_bytes
    )
    rows = relation.columns(_APPLICATION) if schema is None else to_schema(schema)
    return TableSource(settings, rows, record_class(schema))
