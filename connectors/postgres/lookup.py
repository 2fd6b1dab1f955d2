"""Looks rows up by key in a table or a query of PostgreSQL, many keys by one query.

The calls of one subtask share some connections. While all of them are busy, keys wait, and the next query
asks for all keys that wait: so a server that is slow gets larger queries instead of more of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any, Final, Literal, TypeAlias, cast

import pyarrow as pa

from ...errors import DataError, HeadgateError, JobError, UsageError
from ...operators.extras import check_extra
from ...operators.schema import SchemaLike, to_schema
from ...operators.suggestions import suggest
from ..arguments import check_choice, check_count
from .client import Address, AsyncConnection, connect, connect_async, is_lost, reason_of
from .relation import Relation
from .tables import Column
from .values import from_texts, schema_of

MISSING: Final = ("null", "fail")
_APPLICATION: Final = "headgate-lookup"
_AWAY_PAUSE_S: Final = 0.2
_log = logging.getLogger("headgate.connectors.postgres")
Key: TypeAlias = tuple[str, ...]
"""The values of a key, as texts that the server reads."""
Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class LookupSettings:
    """The arguments of `postgres_lookup`, which documents them."""

    relation: Relation
    key: tuple[str, ...]
    missing: str
    connections: int
    batch_keys: int


@dataclass(slots=True, eq=False)
class _Wanted:
    """A key that is to be looked up."""

    key: Key
    answer: asyncio.Future[Row | None]
    callers: int = 0
    query: asyncio.Task[Any] | None = None
    """It asks for the key, perhaps with others."""


@dataclass(slots=True)
class _Pool:
    """The connections of one subtask, and the keys that wait for them."""

    statement: Any
    waiting: deque[_Wanted] = field(default_factory=deque)
    wanted: dict[Key, _Wanted] = field(default_factory=dict)
    """Those that wait, and those that are being asked for."""
    idle: list[AsyncConnection] = field(default_factory=list)
    servers: set[asyncio.Task[None]] = field(default_factory=set)
    """Each uses one connection, until no key waits."""


class LookupFailed(LookupError):
    """A key has no row, or none that can be given. `on_error` of the step decides about its record."""


class PostgresLookup:
    """A coroutine function from a key to its row, for `stream.lookup`.

    Attributes:
        into: the columns that it finds.
    """

    def __init__(self, settings: LookupSettings, into: pa.Schema) -> None:
        self._settings = settings
        self.into = into
        self._pool: _Pool | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PostgresLookup, (self._settings, self.into)

    def __repr__(self) -> str:
        return f"postgres_lookup({self._settings.relation})"

    async def open(self, context: object) -> None:
        """Look at the table. Connections are made when they are needed."""
        self._pool = _Pool(await asyncio.to_thread(self._statement))

    def _statement(self) -> Any:
        """Return the query for some keys, whose values it takes as one array of texts per column."""
        from psycopg import sql

        settings, relation = self._settings, self._settings.relation
        with connect(relation.address, _APPLICATION) as connection, relation.looking():
            table = relation.describe(connection)
        schema_of(table, self.into)
        columns = {each.name: each for each in table.columns}
        _check_columns(settings, list(columns))
        numbers = range(len(settings.key))
        kinds: list[Any] = [_plain_type(columns[name]) for name in settings.key]
        return sql.SQL(
            "SELECT headgate_keys.number, {columns} FROM unnest({arrays}) WITH ORDINALITY "
            "AS headgate_keys ({names}, number) JOIN {rows} ON {equal}"
        ).format(
            columns=sql.SQL(", ").join(
                sql.Identifier("headgate_rows", name) for name in self.into.names
            ),
            arrays=sql.SQL(", ").join(
                sql.SQL("%s::text[]::{}[]").format(sql.SQL(kind)) for kind in kinds
            ),
            names=sql.SQL(", ").join(sql.Identifier(f"key_{number}") for number in numbers),
            rows=relation.rows([table.schema, table.name]),
            equal=sql.SQL(" AND ").join(
                sql.SQL("{} = {}").format(
                    sql.Identifier("headgate_rows", name),
                    sql.Identifier("headgate_keys", f"key_{number}"),
                )
                for number, name in zip(numbers, settings.key, strict=True)
            ),
        )

    async def __call__(self, key: Any) -> Row | None:
        """Return the row with this key; None if there is none, unless that is an error.

        Raises:
            LookupFailed: there is none, or there are several; or the key is no value of its column.
        """
        pool, settings = self._pool, self._settings
        assert pool is not None  # `open` was called
        texts = _texts(key, settings)
        row = None if texts is None else await self._answer(pool, texts)
        if row is None and settings.missing == "fail":
            raise LookupFailed(
                f"there is no row with this key key=`{key}` table=`{settings.relation}`: "
                "missing=`null` gives nulls; on_error= drops the record or puts it aside"
            )
        return row

    async def _answer(self, pool: _Pool, key: Key) -> Row | None:
        wanted = pool.wanted.get(key)
        if wanted is None:
            wanted = _Wanted(key, asyncio.get_running_loop().create_future())
            pool.wanted[key] = wanted
            pool.waiting.append(wanted)
        if len(pool.servers) < self._settings.connections and pool.waiting:
            # It begins behind the calls that begin now, and so asks for all their keys at once.
            server = asyncio.create_task(self._serve(pool))
            pool.servers.add(server)
        wanted.callers += 1
        try:
            return await asyncio.shield(wanted.answer)
        finally:
            wanted.callers -= 1
            if not wanted.callers:
                _abandon(pool, wanted)

    async def _serve(self, pool: _Pool) -> None:
        """Ask for keys until none waits."""
        try:
            while pool.waiting:
                batch: list[_Wanted] = []
                while pool.waiting and len(batch) < self._settings.batch_keys:
                    wanted = pool.waiting.popleft()
                    if wanted.callers:
                        batch.append(wanted)
                if batch:
                    await self._ask_for(pool, batch)
        finally:
            # Not by a callback, which comes later: a key may begin to wait before it.
            pool.servers.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _ask_for(self, pool: _Pool, batch: Sequence[_Wanted]) -> None:
        """Ask for some keys, and answer their callers."""
        query = asyncio.create_task(self._persistently(pool, [each.key for each in batch]))
        for wanted in batch:
            wanted.query = query
        try:
            await asyncio.wait([query])
        finally:
            query.cancel()
            for wanted in batch:
                wanted.query = None
        if query.cancelled():
            return  # all callers are gone
        error = query.exception()
        if isinstance(error, LookupFailed) and len(batch) > 1:
            # One of the keys or rows is wrong. The others shall not suffer.
            for wanted in batch:
                if wanted.callers:
                    await self._ask_for(pool, [wanted])
            return
        found = [error] * len(batch) if error is not None else query.result()
        for wanted, row in zip(batch, found, strict=True):
            if wanted.answer.done() or not wanted.callers:
                continue
            if isinstance(row, BaseException):
                wanted.answer.set_exception(row)
            else:
                wanted.answer.set_result(row)

    async def _persistently(
        self, pool: _Pool, keys: Sequence[Key]
    ) -> list[Row | LookupFailed | None]:
        """Return the row of each key; wait for a server that is away.

        Raises:
            LookupFailed: a key or a value of a row does not fit its type.
            JobError: the server refuses the query.
        """
        import psycopg

        relation = self._settings.relation
        while True:
            try:
                return await self._query(pool, keys)
            except psycopg.DataError as error:
                raise LookupFailed(
                    f"the key is no value of its column key=`{', '.join(keys[0])}` "
                    f"table=`{relation}`: {reason_of(error)}; cast the column of the stream, or let "
                    "on_error= drop the record or put it aside"
                ) from error
            except DataError as error:
                raise LookupFailed(str(error)) from error
            except (psycopg.Error, HeadgateError) as error:
                cause = error if isinstance(error, psycopg.Error) else error.__cause__
                if cause is None or not is_lost(cause):
                    if isinstance(error, HeadgateError):
                        raise
                    raise JobError(
                        f"rows cannot be looked up table=`{relation}` server=`{relation.address}`: "
                        f"{reason_of(error)}",
                        fix="check the query, if there is one, and the rights of the user",
                    ) from error
                _log.warning("the lookup waits for the server: %s", reason_of(cause))
                idle, pool.idle = pool.idle, []
                for connection in idle:
                    await connection.close()
                await asyncio.sleep(_AWAY_PAUSE_S)

    async def _query(self, pool: _Pool, keys: Sequence[Key]) -> list[Row | LookupFailed | None]:
        arrays = [list(column) for column in zip(*keys, strict=True)]
        connection = (
            pool.idle.pop()
            if pool.idle
            else await connect_async(self._settings.relation.address, _APPLICATION)
        )
        try:
            cursor = await connection.execute(pool.statement, arrays)
        except BaseException:
            # Also when the callers are gone: the server may still be at it.
            with suppress(Exception):
                await connection.close()
            raise
        pool.idle.append(connection)
        return self._rows(cursor.pgresult, keys)

    def _rows(self, result: Any, keys: Sequence[Key]) -> list[Row | LookupFailed | None]:
        """Return the answer for each key."""
        columns = [
            from_texts(
                each.name,
                [result.get_value(row, place) for row in range(result.ntuples)],
                each.type,
            ).to_pylist()
            for place, each in enumerate(self.into, 1)
        ]
        found: list[Row | LookupFailed | None] = [None] * len(keys)
        for row in range(result.ntuples):
            number = int(result.get_value(row, 0)) - 1
            if found[number] is None:
                names = zip(self.into.names, columns, strict=True)
                found[number] = {name: column[row] for name, column in names}
            else:
                found[number] = LookupFailed(
                    f"several rows have this key key=`{', '.join(keys[number])}` "
                    f"table=`{self._settings.relation}`: look up by columns that identify a row, or "
                    "choose one by query=`SELECT DISTINCT ON (...) ...`"
                )
        return found

    async def close(self) -> None:
        """Cancel queries, and close the connections."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        servers = list(pool.servers)
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, return_exceptions=True)
        for wanted in pool.wanted.values():
            wanted.answer.cancel()
        for connection in pool.idle:
            with suppress(Exception):
                await connection.close()


def _abandon(pool: _Pool, wanted: _Wanted) -> None:
    """Forget a key that nobody waits for, and its query if that has no other."""
    if pool.wanted.get(wanted.key) is wanted:
        del pool.wanted[wanted.key]
    query = wanted.query
    if query is not None and not any(
        each.callers for each in pool.wanted.values() if each.query is query
    ):
        query.cancel()


def _texts(key: Any, settings: LookupSettings) -> Key | None:
    """Return a key as texts; None if a part of it is null, which equals nothing."""
    values = key if isinstance(key, tuple) else (key,)
    if len(values) != len(settings.key):
        raise UsageError(
            f"the key has {len(values)} columns, and that of the table {len(settings.key)} "
            f"key=`{', '.join(settings.key)}`",
            fix='stream.lookup(("a", "b"), ...) needs as many columns as key=["x", "y"]',
        )
    return None if any(value is None for value in values) else tuple(map(_text, values))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return str(value)


def _plain_type(column: Column) -> str:
    """Return the type of a column without its length, which would cut or round keys."""
    return "bpchar" if column.base == "bpchar" else re.sub(r"\(\d+(,-?\d+)?\)", "", column.type)


def _check_columns(settings: LookupSettings, names: Sequence[str]) -> None:
    for name in settings.key:
        if name not in names:
            raise UsageError(
                f"there is no such column key=`{name}` table=`{settings.relation}`",
                fix=suggest(name, names, "columns"),
            )


def postgres_lookup(
    dsn: str,
    table: str | None = None,
    *,
    query: str | None = None,
    key: str | Sequence[str],
    schema: SchemaLike | None = None,
    missing: Literal["null", "fail"] = "null",
    connections: int = 4,
    batch_keys: int = 500,
    password: str | None = None,
) -> PostgresLookup:
    """Return a function for `stream.lookup`, which finds rows by key.

    It needs `pip install 'headgate[postgres]'`.

    Args:
        dsn: the address of the database, `postgresql://user@host:5432/database` or `host=... dbname=...`;
            or where it can be read on each machine: `file:/path` or `env:NAME`.
        table: the name of the table or view as SQL writes it: `users`, `shop.users` or `"Users"`.
        query: instead of a table: a SELECT, in whose rows keys are looked up.
        key: the columns that are compared with the key of the record, in that order. They must identify
            a row, and should have an index.
        schema: the columns to find; by default all but the key, as the table has them now.
        missing: a record without a row gets nulls (`null`), or is an error (`fail`), which `on_error` of
            the lookup may drop or put aside.
        connections: the most connections per subtask.
        batch_keys: the most keys per query.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.

    Raises:
        UsageError: an argument is wrong; without a schema, also if the table cannot be looked at.
    """
    check_extra("postgres", "postgres_lookup")
    relation = Relation(Address(dsn, password), table, query)
    relation.check()
    keys = (key,) if isinstance(key, str) else tuple(key)
    if not keys:
        raise UsageError("no column is named to look keys up in", fix='key="id"')
    check_choice("missing", missing, MISSING)
    check_count("connections", connections, 1)
    check_count("batch_keys", batch_keys, 1)
    settings = LookupSettings(relation, keys, missing, connections, batch_keys)
    if schema is not None:
        return PostgresLookup(settings, to_schema(schema))
    columns = relation.columns(_APPLICATION)
    _check_columns(settings, columns.names)
    found = [each for each in columns if each.name not in keys]
    if not found:
        raise UsageError(
            f"the table has no columns beside its key table=`{relation}` key=`{', '.join(keys)}`",
            fix="name columns to find: schema={...}",
        )
    return PostgresLookup(settings, pa.schema(found))
