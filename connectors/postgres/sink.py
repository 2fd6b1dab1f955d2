"""A table of PostgreSQL as a sink, at least once or exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import pyarrow as pa

from ...errors import PlanError, UsageError
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    stream_columns,
)
from ..arguments import ON_LOST, OnLost, check_choice, parse_bytes
from .client import Address, connect, refusals
from .tables import can_write, find_table
from .target import SinkSettings, check_stream, checked_target
from .writer import PostgresWriter

BUFFER: Final = "32mb"
MODES: Final = ("append", "upsert")
CREATE: Final = ("never", "if_not_exists")


class PostgresSink(Sink):
    """One table."""

    guarantees = frozenset(Guarantee)
    needs_columns = True
    extras = ("postgres",)

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee

    def bind(self, schema: pa.Schema | None) -> None:
        schema = stream_columns(schema, "rows of a table")
        check_stream(self.settings, schema)
        for field in schema:
            if not can_write(field.type):
                raise PlanError(
                    f"PostgreSQL has no type for this column column=`{field.name}` type=`{field.type}`",
                    fix="select the column out, or cast it",
                )
        self.settings = replace(self.settings, stream=schema)
        self.place = f"{self.settings.table} of {self.settings.address}"

    def writer(self) -> SinkWriter:
        return PostgresWriter(self.settings)

    def check_output(self, run: SinkRun) -> None:
        """Check that the server answers, and that the table takes the columns of the stream."""
        self._check_table(f"headgate-{run.job}-{run.sink}")

    def check_connection(self, options: Mapping[str, str]) -> str:
        fits = self._check_table("headgate-check")
        return "the table takes the columns" if fits else "the table does not exist yet"

    def _check_table(self, application: str) -> bool:
        """Check that the table takes the columns of the stream; return False if there is none yet."""
        settings = self.settings
        with (
            connect(settings.address, application) as connection,
            refusals(
                f"the table cannot be looked at table=`{settings.table}` server=`{settings.address}`",
                "check the rights of the user",
            ),
        ):
            missing = find_table(connection, settings.table, settings.address) is None
            if missing and settings.create == "if_not_exists":
                return False
            checked_target(connection, replace(settings, create="never"))
            return True

    def describe(self) -> str:
        return f"postgres({self.settings.table})"


def postgres_sink(
    dsn: str,
    table: str,
    *,
    mode: Literal["append", "upsert"] = "append",
    key: str | Sequence[str] = (),
    op: str | None = None,
    guarantee: GuaranteeLike = "at_least_once",
    create: Literal["never", "if_not_exists"] = "never",
    staging_schema: str | None = None,
    on_lost: OnLost = "fail",
    buffer: str | int = BUFFER,
    password: str | None = None,
) -> PostgresSink:
    """Return a sink that writes to a table of PostgreSQL. It needs `pip install 'headgate[postgres]'`.

    Args:
        dsn: the address of the database, `postgresql://user@host:5432/database` or `host=... dbname=...`;
            or where it can be read on each machine: `file:/path` or `env:NAME`.
        table: the name of the table as SQL writes it: `orders`, `shop.orders` or `"Orders"`.
        mode: `append` inserts each record; `upsert` inserts or replaces the row with its key.
        key: with `upsert`: the columns of a unique index of the table, such as its primary key.
        op: with `upsert`: a column of the stream that is not written, and says what to do: the value
            `delete` deletes the row with this key; `insert`, `update` and `snapshot` write it.
        guarantee: `at_least_once`, `exactly_once` (rows are staged, and appear when the checkpoint is
            complete) or `none`.
        create: `if_not_exists` creates the table, with the key as its primary key.
        staging_schema: with `exactly_once`: the schema of the tables of staged rows; by default that of
            the table.
        on_lost: what a restore does if staged rows of the checkpoint are missing in the database: `fail`,
            or `skip` them with a warning.
        buffer: the most bytes that wait to be sent, per subtask.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.

    Raises:
        UsageError: an argument is wrong. Whether the table fits is found out when the job starts.
    """
    address = Address(dsn, password)
    address.check()
    if not table:
        raise UsageError("no table is named", fix='postgres_sink("postgresql://...", "orders")')
    check_choice("mode", mode, MODES)
    check_choice("create", create, CREATE)
    check_choice("on_lost", on_lost, ON_LOST)
    keys = (key,) if isinstance(key, str) else tuple(key)
    if mode == "upsert" and not keys:
        raise UsageError(
            "mode=`upsert` needs the columns by which rows are replaced", fix='key=["id"]'
        )
    if mode == "append" and (keys or op is not None):
        raise UsageError(
            f"rows are only appended key=`{', '.join(keys)}` op=`{op}`",
            fix="say mode=`upsert`, or leave key= and op= out",
        )
    if len(set(keys)) < len(keys):
        raise UsageError(f"a column is named twice key=`{', '.join(keys)}`")
    buffer_bytes = parse_bytes("buffer", buffer)
    made = parse_guarantee(guarantee)
    settings = SinkSettings(
        address,
        table,
        mode,
        keys,
        op,
        create,
        staging_schema,
        on_lost,
        buffer_bytes,
        made is Guarantee.EXACTLY_ONCE,
    )
    return PostgresSink(settings, made)
