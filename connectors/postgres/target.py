"""The table that a sink writes to: what is checked before the first row, and the statements of the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from ...errors import PlanError, UsageError
from ...operators.suggestions import suggest
from .binary import BinaryRows, binary_rows
from .client import Address, Connection
from .tables import Table, find_table, no_table, takes, type_for

MARKERS: Final = "headgate_commits"
"""The table with a row for each writer: the number of the last epoch that is committed."""
_ROW: Final = "headgate_row"
_DELETE: Final = "headgate_delete"
_LOCK: Final = 0x6865616467617465
"""The number of the lock under which tables are created, as two of them at once would fail."""


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `postgres_sink`, which documents them."""

    address: Address
    table: str
    mode: str
    key: tuple[str, ...]
    op: str | None
    create: str
    staging_schema: str | None
    on_lost: str
    buffer_bytes: int
    exactly_once: bool
    stream: pa.Schema | None = None
    """The columns of the stream, once they are known."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are written."""
        assert self.stream is not None
        return tuple(name for name in self.stream.names if name != self.op)

    @property
    def plain(self) -> bool:
        """True if rows go into the table as they come."""
        return not self.exactly_once and not self.key


class Move(Protocol):
    """All that a statement that moves rows depends on."""

    @property
    def target(self) -> tuple[str, str]: ...
    @property
    def columns(self) -> Sequence[str]: ...
    @property
    def key(self) -> Sequence[str]: ...
    @property
    def deletes(self) -> bool: ...
    @property
    def identity(self) -> bool: ...
    @property
    def rows(self) -> int: ...


@dataclass(frozen=True)
class Target:
    """The table, as it was found, and how rows come into it."""

    schema: str
    name: str
    staging_schema: str
    definitions: tuple[str, ...]
    """The types of the columns that are written, with their collations."""
    columns: tuple[str, ...]
    identity: bool
    plain: bool
    deletes: bool
    binary: BinaryRows | None
    """Encodes rows of the stream, if they need not travel as CSV."""

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"

    # -- staged rows --------------------------------------------------------------------------------

    def staged_name(self, table: str) -> Any:
        """Return a staged table as a part of a statement."""
        from psycopg import sql

        return sql.Identifier(self.staging_schema, table)

    def create_markers(self, connection: Connection) -> None:
        """Create the table of markers, unless it exists."""
        from psycopg import sql

        name = sql.Identifier(self.staging_schema, MARKERS)
        found = connection.execute(
            "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            [self.staging_schema, MARKERS],
        ).fetchone()
        if found is not None:
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            connection.execute(
                sql.SQL(
                    "CREATE TABLE IF NOT EXISTS {} (writer text PRIMARY KEY, "
                    "epoch bigint NOT NULL, committed_at timestamptz)"
                ).format(name)
            )

    def add_marker(self, cursor: Any, writer: str) -> None:
        from psycopg import sql

        statement = "INSERT INTO {} VALUES (%s, 0) ON CONFLICT DO NOTHING"
        name = sql.Identifier(self.staging_schema, MARKERS)
        cursor.execute(sql.SQL(statement).format(name), [writer])

    def lock_marker(self, cursor: Any, schema: str, writer: str) -> int | None:
        """Return the number of the marker, which nobody else changes in this transaction; None: none."""
        from psycopg import sql

        statement = "SELECT epoch FROM {} WHERE writer = %s FOR UPDATE"
        cursor.execute(sql.SQL(statement).format(sql.Identifier(schema, MARKERS)), [writer])
        found = cursor.fetchone()
        return None if found is None else int(found[0])

    def advance_marker(self, cursor: Any, schema: str, writer: str, number: int) -> None:
        from psycopg import sql

        statement = "UPDATE {} SET epoch = %s, committed_at = now() WHERE writer = %s"
        cursor.execute(sql.SQL(statement).format(sql.Identifier(schema, MARKERS)), [number, writer])

    def create_staged(self, cursor: Any, table: str) -> None:
        """Create a staged table. It lives for one epoch, so nothing has to be vacuumed."""
        from psycopg import sql

        cursor.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({}) WITH (autovacuum_enabled = false)").format(
                self.staged_name(table), self._definitions()
            )
        )

    def create_temporary(self, cursor: Any) -> Any:
        """Create a table for the rows of one transaction, and return its name."""
        from psycopg import sql

        name = sql.Identifier("pg_temp", "headgate_chunk")
        statement = sql.SQL("CREATE TEMPORARY TABLE headgate_chunk ({}) ON COMMIT DROP")
        cursor.execute(statement.format(self._definitions()))
        return name

    def _definitions(self) -> Any:
        from psycopg import sql

        own = [(_ROW, "bigint"), *([(_DELETE, "boolean")] if self.deletes else [])]
        given: Any = [*own, *zip(self.columns, self.definitions, strict=True)]
        return sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in given
        )

    def copy_statement(self, into: Any, *, binary: bool) -> Any:
        from psycopg import sql

        own = [] if self.plain else [_ROW, *([_DELETE] if self.deletes else [])]
        return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(
            into, _names([*own, *self.columns]), sql.SQL("binary" if binary else "csv")
        )

    def forget_rows(self, cursor: Any, table: str, first_row: int) -> None:
        """Delete rows of a chunk whose first sending may have succeeded, or may be about to.

        The lock waits for a session that lost its client in the commit: its rows are not seen before.
        """
        from psycopg import sql

        lock = sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE")
        cursor.execute(lock.format(self.staged_name(table)))
        statement = sql.SQL("DELETE FROM {} WHERE {} >= %s")
        cursor.execute(statement.format(self.staged_name(table), sql.Identifier(_ROW)), [first_row])

    def staged_tables(self, connection: Connection, prefix: str) -> list[str]:
        """Return the staged tables whose names begin with this."""
        rows = connection.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r' AND starts_with(c.relname::text, %s)",
            [self.staging_schema, prefix],
        ).fetchall()
        return [row[0] for row in rows]

    def drop_staged(self, connection: Connection, table: str) -> None:
        from psycopg import sql

        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self.staged_name(table)))

    def exists(self, cursor: Any, schema: str, table: str) -> bool:
        cursor.execute(
            "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            [schema, table],
        )
        return cursor.fetchone() is not None

    def move(self, cursor: Any, source: Any, move: Move) -> None:
        """Move rows to their table. Of several rows of a key the last one counts."""
        from psycopg import sql

        parts = {
            "target": sql.Identifier(*move.target),
            "columns": _names(move.columns),
            "source": source,
            "identity": sql.SQL("OVERRIDING SYSTEM VALUE" if move.identity else ""),
            "row": sql.Identifier(_ROW),
            "delete": sql.Identifier(_DELETE),
            "key": _names(move.key),
        }
        if not move.key:
            insert = (
                "INSERT INTO {target} ({columns}) {identity} "
                "SELECT {columns} FROM {source} ORDER BY {row}"
            )
            cursor.execute(sql.SQL(insert).format(**parts))
            return
        last = "(SELECT DISTINCT ON ({key}) * FROM {source} ORDER BY {key}, {row} DESC) AS l"
        if move.deletes:
            same = sql.SQL(" AND ").join(
                sql.SQL("t.{0} = l.{0}").format(sql.Identifier(name)) for name in move.key
            )
            delete = "DELETE FROM {target} AS t USING " + last + " WHERE l.{delete} AND {same}"
            cursor.execute(sql.SQL(delete).format(**parts, same=same))
        rest = [name for name in move.columns if name not in move.key]
        changes = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in rest
        )
        insert = (
            "INSERT INTO {target} ({columns}) {identity} SELECT {columns} FROM "
            + last
            + (" WHERE NOT l.{delete}" if move.deletes else "")
            + " ON CONFLICT ({key}) DO "
            + ("UPDATE SET {changes}" if rest else "NOTHING")
        )
        cursor.execute(sql.SQL(insert).format(**parts, changes=changes))


def _names(columns: Sequence[str]) -> Any:
    from psycopg import sql

    return sql.SQL(", ").join(map(sql.Identifier, columns))


# -- what is checked before the first row -------------------------------------------------------------


def checked_target(connection: Connection, settings: SinkSettings) -> Target:
    """Return the table, after it was checked that rows of the stream can be written to it.

    It is created if it does not exist and the user wants that.

    Raises:
        UsageError: they cannot.
    """
    assert settings.stream is not None
    table = find_table(connection, settings.table, settings.address)
    if table is None and settings.create == "if_not_exists":
        # Every subtask gets here, and whichever comes first creates it.
        _create(connection, settings)
        table = find_table(connection, settings.table, settings.address)
    if table is None:
        fix = "create it, or say create=`if_not_exists`"
        raise no_table(connection, settings.table, settings.address, fix)
    _check_columns(table, settings)
    _check_key(table, settings)
    staging = settings.staging_schema or table.schema
    _check_rights(connection, table, settings, staging)
    found = [column for name in settings.columns if (column := table.column(name)) is not None]
    own = [pa.field(_ROW, pa.int64()), pa.field(_DELETE, pa.bool_())]
    count = 0 if settings.plain else 1 if settings.op is None else 2
    stream = pa.schema([settings.stream.field(name) for name in settings.columns])
    return Target(
        table.schema,
        table.name,
        staging,
        tuple(each.definition for each in found),
        settings.columns,
        any(each.identity for each in found),
        settings.plain,
        settings.op is not None,
        binary_rows(own[:count], stream, found),
    )


def _create(connection: Connection, settings: SinkSettings) -> None:
    from psycopg import sql

    assert settings.stream is not None
    columns = [
        sql.SQL("{} {}{}").format(
            sql.Identifier(name),
            _raw(type_for(settings.stream.field(name).type)),
            sql.SQL("" if settings.stream.field(name).nullable else " NOT NULL"),
        )
        for name in settings.columns
    ]
    if settings.key:
        columns.append(sql.SQL("PRIMARY KEY ({})").format(_names(settings.key)))
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        # The name is the user's, in the form of SQL, and the server has parsed it before.
        connection.execute(
            sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
                _raw(settings.table), sql.SQL(", ").join(columns)
            )
        )


def _raw(text: Any) -> Any:
    """Return a text that headgate or the server has made, as a part of a statement."""
    from psycopg import sql

    return sql.SQL(text)


def _check_columns(table: Table, settings: SinkSettings) -> None:
    assert settings.stream is not None
    known = [column.name for column in table.columns]
    for name in settings.columns:
        column, kind = table.column(name), settings.stream.field(name).type
        if column is None:
            raise UsageError(
                f"the table has no such column column=`{name}` table=`{table.full_name}`",
                fix=f"add it to the table, or select it out; {suggest(name, known, 'columns')}",
            )
        if column.generated:
            raise UsageError(
                f"the server computes this column column=`{name}` table=`{table.full_name}`",
                fix="select it out",
            )
        if not takes(column, kind):
            raise UsageError(
                f"a column of the table does not take the values of the stream column=`{name}` "
                f"table=`{table.full_name}` has=`{column.type}` stream=`{kind}`",
                fix=f"cast it with select, or make the column {type_for(kind)}",
            )
    for column in table.columns:
        if column.required and column.name not in settings.columns and not column.generated:
            raise UsageError(
                f"the stream has no value for a column that must have one column=`{column.name}` "
                f"table=`{table.full_name}`",
                fix="select a column of this name, or give the column a default",
            )


def _check_key(table: Table, settings: SinkSettings) -> None:
    if not settings.key or any(set(key) == set(settings.key) for key in table.keys):
        return
    known = ", ".join(f"({', '.join(key)})" for key in table.keys) or "none"
    raise UsageError(
        f"no unique index of the table has exactly the columns of the key "
        f"key=`{', '.join(settings.key)}` table=`{table.full_name}` keys=`{known}`",
        fix=f"CREATE UNIQUE INDEX ON {table.full_name} ({', '.join(settings.key)}), or take one of "
        "its keys",
    )


def _check_rights(
    connection: Connection, table: Table, settings: SinkSettings, staging: str
) -> None:
    wanted = ["INSERT"]
    if settings.key:
        wanted += ["SELECT", "UPDATE", *(["DELETE"] if settings.op is not None else [])]
    for right in wanted:
        row = connection.execute(
            "SELECT has_table_privilege(%s::oid, %s)", [table.oid, right]
        ).fetchone()
        if row is None or not row[0]:
            raise UsageError(
                f"the user has no right to {right} table=`{table.full_name}` "
                f"server=`{settings.address}`",
                fix=f"GRANT {', '.join(wanted)} ON {table.full_name} TO the user",
            )
    if not settings.exactly_once:
        if not settings.plain:
            _check_temporary(connection, settings)
        return
    row = connection.execute(
        "SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace WHERE nspname = %s", [staging]
    ).fetchone()
    if row is None:
        raise UsageError(
            f"there is no such schema staging_schema=`{staging}` server=`{settings.address}`",
            fix=f"CREATE SCHEMA {staging}",
        )
    if not row[0]:
        raise UsageError(
            f"the user has no right to CREATE tables of staged rows schema=`{staging}` "
            f"server=`{settings.address}`",
            fix=f"GRANT CREATE ON SCHEMA {staging} TO the user, or name another one: staging_schema=",
        )


def _check_temporary(connection: Connection, settings: SinkSettings) -> None:
    row = connection.execute(
        "SELECT has_database_privilege(current_database(), 'TEMPORARY')"
    ).fetchone()
    if row is None or not row[0]:
        raise UsageError(
            f"the user has no right to make temporary tables server=`{settings.address}`",
            fix="GRANT TEMPORARY ON DATABASE ... TO the user",
        )


def check_stream(settings: SinkSettings, schema: pa.Schema) -> None:
    """Check the columns of the stream that arguments name.

    Raises:
        PlanError: one is missing or has the wrong type.
    """
    for argument, name in [*(("key", name) for name in settings.key), ("op", settings.op)]:
        if name is not None and name not in schema.names:
            raise PlanError(
                f"the stream has no such column {argument}=`{name}`",
                fix=suggest(name, schema.names, "columns"),
            )
    if settings.op is not None and settings.op in settings.key:
        raise PlanError(f"the column of the operation is part of the key op=`{settings.op}`")
