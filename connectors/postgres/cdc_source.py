"""Reads the changes of a table of PostgreSQL by logical replication: each change once, in order.

The publication and the replication slot are made if they do not exist. A slot is one split, as the server
has one stream of changes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from ...errors import UsageError
from ...operators.schema import SchemaLike, to_schema
from ...operators.source import SourceReader
from ..arguments import OnLost, parse_bytes
from ..changes.source import BUFFER, ChangeSource, NewColumns, Snapshot, check_names
from .cdc_model import METADATA, ORDERED, CdcSettings, Position
from .cdc_reader import CdcReader
from .client import Address, Connection, connect, reading, refusals
from .replication import (
    check_wal_level,
    has_publication,
    identify,
    identity_of,
    lsn_of,
    make_publication,
    make_slot,
    slot_state,
)
from .tables import Table, find_table, no_table
from .values import schema_of

_APPLICATION: Final = "headgate-plan"


class CdcSource(ChangeSource[CdcSettings]):
    """The changes of one table, each read exactly once."""

    extras = ("postgres",)
    metadata = METADATA

    def splits(self, parallelism: int) -> list[bytes]:
        """Make the publication and the slot, and return the one split."""
        settings = self.settings
        with connect(settings.address, _APPLICATION) as connection, self._looking():
            table, key = self._found(connection)
            system = identify(settings.address, _APPLICATION)
            names = (table.schema, table.name)
            make_publication(connection, settings.publication, names, create=settings.create)
            make_slot(connection, settings.slot, settings.address, create=settings.create)
            return [
                msgspec.msgpack.encode(_first_position(connection, table, settings, key, system))
            ]

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check the table, the right to replicate, and the publication and the slot if they exist."""
        settings = self.settings
        identify(settings.address, "headgate-check")
        with (
            connect(settings.address, "headgate-check") as connection,
            self._looking(),
            reading(connection),
        ):
            table, _ = self._found(connection)
            missing = []
            if settings.create and not has_publication(connection, settings.publication):
                missing.append("publication")
            else:
                names = (table.schema, table.name)
                make_publication(connection, settings.publication, names, create=False)
            if settings.create and slot_state(connection, settings.slot) is None:
                check_wal_level(connection, settings.address)
                missing.append("slot")
            else:
                make_slot(connection, settings.slot, settings.address, create=False)
        if missing:
            return f"the {' and the '.join(missing)} will be created"
        return "the publication and the slot exist"

    def _looking(self) -> Any:
        """Turn errors of the server in the block into errors with the name of the table."""
        return refusals(
            f"changes cannot be read table=`{self.settings.table}` server=`{self.settings.address}`",
            "check the rights of the user",
        )

    def _found(self, connection: Connection) -> tuple[Table, list[tuple[str, str]]]:
        """Return the table, and the columns of its key with their types.

        Raises:
            UsageError: there is none, or it is not as promised.
        """
        settings = self.settings
        table = find_table(connection, settings.table, settings.address)
        if table is None:
            raise no_table(connection, settings.table, settings.address)
        schema_of(table, self.rows)
        return table, _check_table(connection, table, settings)

    def reader(self) -> SourceReader:
        return CdcReader(self.settings, self.rows, self.schema)

    def describe(self) -> str:
        return f"postgres_cdc({self.settings.table})"


def _check_table(
    connection: Connection, table: Table, settings: CdcSettings
) -> list[tuple[str, str]]:
    """Return the columns of the primary key with their types, after a look at what is promised of it.

    Raises:
        UsageError: the server would not send what is asked for.
    """
    key = table.keys[0] if table.has_primary_key else ()
    if table.replica_identity == "n" or (table.replica_identity == "d" and not key):
        raise UsageError(
            f"the server cannot tell which row was updated or deleted table=`{table.full_name}`",
            fix="add a primary key; or ALTER TABLE ... REPLICA IDENTITY USING INDEX, or FULL",
        )
    if settings.before is not None and table.replica_identity != "f":
        raise UsageError(
            f"the server does not send rows as they were before table=`{table.full_name}` "
            f"before=`{settings.before}`",
            fix=f"ALTER TABLE {table.full_name} REPLICA IDENTITY FULL; or leave before= out",
        )
    typed = [(name, column.base) for name in key if (column := table.column(name)) is not None]
    if settings.snapshot == "never":
        return typed
    others = [f"{name}: {base}" for name, base in typed if base not in ORDERED]
    if not typed or others:
        raise UsageError(
            f"the table is read in the order of its primary key table=`{table.full_name}` "
            f"key=`{', '.join(others) or 'none'}`",
            fix=f"a key of the types {', '.join(ORDERED)}; or snapshot=`never`, which reads changes only",
        )
    row = connection.execute(
        "SELECT has_table_privilege(%s::oid, 'SELECT')", [table.oid]
    ).fetchone()
    if row is None or not row[0]:
        raise UsageError(
            f"the user has no right to SELECT table=`{table.full_name}`",
            fix=f"GRANT SELECT ON {table.full_name} TO the user",
        )
    return typed


def _first_position(
    connection: Connection,
    table: Table,
    settings: CdcSettings,
    key: list[tuple[str, str]],
    system: str,
) -> Position:
    row = connection.execute(
        # A new number: all transactions that had begun when the slot was made have lower ones.
        "SELECT pg_current_xact_id()::text, pg_current_wal_flush_lsn()::text"
    ).fetchone()
    state = slot_state(connection, settings.slot)
    assert row is not None
    assert state is not None
    identity = identity_of(connection, settings.publication, (table.schema, table.name), table.oid)
    return Position(
        settings.slot,
        system,
        (table.schema, table.name),
        [name for name, _ in key],
        [base for _, base in key],
        [each.name for each in table.columns],
        int(row[0]),
        settings.snapshot == "initial",
        None,
        [],
        lsn_of(state["confirmed"]),
        stop=lsn_of(row[1]) if settings.bounded else None,
        oid=table.oid,
        published=identity.published or "",
    )


def postgres_cdc_source(
    dsn: str,
    table: str,
    *,
    slot: str,
    publication: str | None = None,
    create: bool = True,
    snapshot: Snapshot = "initial",
    schema: SchemaLike | None = None,
    op: str = "op",
    before: str | None = None,
    metadata: Mapping[str, str] | None = None,
    stop: Literal["latest"] | None = None,
    on_lost: OnLost = "fail",
    new_columns: NewColumns = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    password: str | None = None,
) -> CdcSource:
    """Return a source of the changes of a table. It needs `pip install 'headgate[postgres]'`.

    Its columns are `op` (`snapshot`, `insert`, `update`, `delete` or `truncate`) and those of the table:
    the row after the change, of a deletion the row before it, as far as the server sends that.

    Args:
        dsn: the address of the database, `postgresql://user@host:5432/database` or `host=... dbname=...`;
            or where it can be read on each machine: `file:/path` or `env:NAME`.
        table: the name of the table as SQL writes it: `orders`, `shop.orders` or `"Orders"`.
        slot: the name of the replication slot. No other source may read it.
        publication: the name of the publication; by default that of the slot.
        create: make the publication and the slot if they do not exist.
        snapshot: `initial` reads the rows that the table has, and then its changes; `never` reads changes
            only, from the time at which the slot was made.
        schema: the columns of the table to read; by default all, as the table has them now.
        op: the name of the column with the operation.
        before: a prefix: also read the columns of the row before the change, under their names with this
            prefix. The table must have REPLICA IDENTITY FULL.
        metadata: further columns, by what they hold: `lsn`, `commit_time`, `xid`, or `unchanged` (the names
            of columns that are null because the server did not send their large value).
        stop: `latest` ends reading at the changes that exist when the job starts, or, if that is later,
            when the last rows of the table are read. None: it never ends.
        on_lost: what happens if changes cannot be read any more, because somebody else has read the
            slot or an older savepoint was restored: `fail`, or `skip` them with a warning.
        new_columns: what happens when the table gets a column that is not in the schema: `fail` or
            `ignore`.
        batch_rows: most rows per batch.
        buffer: the most bytes that wait to be processed.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.

    Raises:
        UsageError: an argument is wrong; without a schema, also if the table cannot be looked at.
    """
    settings = CdcSettings(
        address=Address(dsn, password),
        table=table,
        slot=slot,
        publication=publication or slot,
        create=create,
        snapshot=snapshot,
        op=op,
        before=before,
        metadata=dict(metadata or {}),
        stop=stop,
        on_lost=on_lost,
        new_columns=new_columns,
        batch_rows=batch_rows,
        buffer_bytes=parse_bytes("buffer", buffer),
    )
    _check_settings(settings)
    source = CdcSource(settings, _rows(settings, schema))
    check_names(source.schema.names)
    return source


def _check_settings(settings: CdcSettings) -> None:
    """Check the arguments, without a look at the database.

    Raises:
        UsageError: one is wrong.
    """
    settings.address.check()
    table, slot = settings.table, settings.slot
    if not table or not slot:
        raise UsageError(
            f"a table and a slot must be named table=`{table}` slot=`{slot}`",
            fix='postgres_cdc_source("postgresql://...", "orders", slot="orders_to_headgate")',
        )
    settings.check_choices(METADATA)


def _rows(settings: CdcSettings, schema: SchemaLike | None) -> pa.Schema:
    """Return the columns of the table to read; without a schema the table is looked at."""
    if schema is not None:
        return to_schema(schema)
    with (
        connect(settings.address, _APPLICATION) as connection,
        refusals(
            f"the table cannot be looked at table=`{settings.table}` server=`{settings.address}`",
            "check the rights of the user, or give schema=",
        ),
    ):
        table = find_table(connection, settings.table, settings.address)
        if table is None:
            raise no_table(connection, settings.table, settings.address)
        return schema_of(table, None)
