"""Reads the changes of a table of MySQL or MariaDB from the server's binary log: each once, in order.

The table is one split, as the server has one log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from ...errors import UsageError
from ...operators.schema import SchemaLike, to_schema
from ...operators.source import SourceReader
from ..arguments import OnLost, check_count, parse_bytes
from ..changes.source import BUFFER, ChangeSource, NewColumns, Snapshot, check_names
from .cdc_model import METADATA, CdcSettings, Position
from .cdc_reader import CdcReader
from .client import Address, Connection, connected, refusals
from .log import files_of, identify
from .tables import Table, find_table, key_kind_of, schema_of

_TRANSACTIONAL: Final = ("InnoDB", "ROCKSDB")


class CdcSource(ChangeSource[CdcSettings]):
    """The changes of one table, each read exactly once."""

    extras = ("mysql",)
    metadata = METADATA

    def splits(self, parallelism: int) -> list[bytes]:
        """Look where the log of the server ends now, and return the one split."""
        settings = self.settings
        with connected(settings.address) as connection, self._looking():
            system, table, kinds = self._found(connection)
            files = files_of(connection)
        position = Position(
            system,
            files.base,
            (table.schema, table.name),
            list(table.key),
            kinds,
            [each.name for each in table.columns],
            settings.snapshot == "initial",
            None,
            [],
            files.end,
            stop=files.end if settings.bounded else None,
        )
        return [msgspec.msgpack.encode(position)]

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check the table, the settings of the log, and the rights to read both."""
        with connected(self.settings.address) as connection, self._looking():
            self._found(connection)
            files = files_of(connection)
        return f"the log ends at {files.text(files.end)}"

    def _looking(self) -> Any:
        """Turn errors of the server in the block into errors with the name of the table."""
        return refusals(
            f"changes cannot be read table=`{self.settings.table}` server=`{self.settings.address}`",
            "check the rights of the user",
        )

    def _found(self, connection: Connection) -> tuple[str, Table, list[str]]:
        """Return what identifies the server, the table, and the kinds of the columns of its key.

        Raises:
            UsageError: the table, the server or the rights are not as needed.
        """
        settings = self.settings
        system = identify(connection, settings.address)
        table = find_table(connection, settings.table, settings.address)
        schema_of(table, self.rows)
        if settings.snapshot == "never":
            return system, table, []  # nothing is compared with keys
        kinds = [
            key_kind_of(column) for name in table.key if (column := table.column(name)) is not None
        ]
        if None in kinds:
            raise UsageError(
                f"the table is read in the order of its primary key table=`{table.full_name}` "
                f"key=`{', '.join(table.key)}`",
                fix="a key of integers, decimal, char, varchar, binary, varbinary or date; or "
                "snapshot=`never`, which reads changes only",
            )
        if table.engine not in _TRANSACTIONAL:
            raise UsageError(
                f"the rows of the table at one moment cannot be read table=`{table.full_name}` "
                f"engine=`{table.engine}`",
                fix="ALTER TABLE ... ENGINE = InnoDB; or snapshot=`never`, which reads changes only",
            )
        return system, table, [kind for kind in kinds if kind is not None]

    def reader(self) -> SourceReader:
        return CdcReader(self.settings, self.rows, self.schema)

    def describe(self) -> str:
        return f"mysql_cdc({self.settings.table})"


def mysql_cdc_source(
    url: str,
    table: str,
    *,
    snapshot: Snapshot = "initial",
    schema: SchemaLike | None = None,
    op: str = "op",
    before: str | None = None,
    metadata: Mapping[str, str] | None = None,
    stop: Literal["latest"] | None = None,
    on_lost: OnLost = "fail",
    new_columns: NewColumns = "fail",
    server_id: int | None = None,
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    password: str | None = None,
    tls: bool = False,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> CdcSource:
    """Return a source of the changes of a table. It needs `pip install 'headgate[mysql]'`.

    Its columns are `op` (`snapshot`, `insert`, `update`, `delete` or `truncate`) and those of the table:
    the row after the change, of a deletion the row before it.

    Args:
        url: the address of the database, `mysql://user@host:3306/database`; or where it can be read on each
            machine: `file:/path` or `env:NAME`.
        table: the name of the table as SQL writes it: `orders` or `shop.orders`. It needs a primary key.
        snapshot: `initial` reads the rows that the table has, and then its changes; `never` reads changes
            only, from the time at which the job was started.
        schema: the columns of the table to read; by default all, as the table has them now.
        op: the name of the column with the operation.
        before: a prefix: also read the columns of the row before the change, under their names with this
            prefix.
        metadata: further columns, by what they hold: `place` (where the transaction begins in the log, the
            same for all its rows), `commit_time` (in whole seconds) or `gtid`.
        stop: `latest` ends reading at the changes that exist when the job starts, or, if that is later,
            when the last rows of the table are read. None: it never ends.
        on_lost: what happens if changes cannot be read any more, because the server has deleted that part
            of its log: `fail`, or `skip` them with a warning.
        new_columns: what happens when the table gets a column that is not in the schema: `fail` or
            `ignore`.
        server_id: the number by which the server knows the reader, which no other reader or replica may
            have. By default it is made of the names of the job, the source and the table.
        batch_rows: most rows per batch.
        buffer: the most bytes that wait to be processed.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        tls: the connection is encrypted, and the certificate of the server is checked.
        ca: with TLS: the file of the authorities to trust; None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong; without a schema, also if the table cannot be looked at.
    """
    settings = CdcSettings(
        address=Address(url, password, tls, ca, certificate, key),
        table=table,
        server_id=server_id,
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
    settings.address.check()
    if not table:
        raise UsageError(
            "a table must be named", fix='mysql_cdc_source("mysql://user@host/shop", "orders")'
        )
    settings.check_choices(METADATA)
    if server_id is not None:
        check_count("server_id", server_id, 1)
        if server_id >= 1 << 32:
            raise UsageError(f"the number has more than 32 bits server_id=`{server_id}`")
    source = CdcSource(settings, _rows(settings, schema))
    check_names(source.schema.names)
    return source


def _rows(settings: CdcSettings, schema: SchemaLike | None) -> pa.Schema:
    """Return the columns of the table to read; without a schema the table is looked at."""
    if schema is not None:
        return to_schema(schema)
    with (
        connected(settings.address) as connection,
        refusals(
            f"the table cannot be looked at table=`{settings.table}` server=`{settings.address}`",
            "check the rights of the user, or give schema=",
        ),
    ):
        return schema_of(find_table(connection, settings.table, settings.address), None)
