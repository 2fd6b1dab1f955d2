"""Rows are looked up by key: many by one query, by few connections; errors of one key are its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headgate as hg
from headgate.connectors import collect, from_list, postgres_lookup
from headgate.connectors.postgres.lookup import LookupFailed, PostgresLookup
from headgate.errors import HeadgateError, JobError, UsageError
from headgate.runtime.manifest import load_job
from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.support.scenarios import guarded

NewTable = Callable[..., str]
run = partial(guarded, seconds=240)


@asynccontextmanager
async def opened(lookup: PostgresLookup) -> AsyncIterator[PostgresLookup]:
    await lookup.open(None)
    try:
        yield lookup
    finally:
        await lookup.close()


def answers(lookup: PostgresLookup, *keys: Any) -> list[Any]:
    """Look keys up at the same time, and return rows or errors."""

    async def ask() -> list[Any]:
        async with opened(lookup):
            return await asyncio.gather(*map(lookup, keys), return_exceptions=True)

    found: list[Any] = run(ask())
    return found


def filled(database: PostgresServer, new_table: NewTable, rows: int = 20) -> str:
    table = new_table("id bigint PRIMARY KEY, name text")
    database.execute(f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, {rows}) n")
    return table


def test_keys_are_asked_for_together(database: PostgresServer, new_table: NewTable) -> None:
    table = filled(database, new_table, 1000)
    lookup = postgres_lookup(database.dsn, table, key="id", batch_keys=100, connections=2)
    found = answers(lookup, *range(1, 1001), 5, 2000, None)
    assert found[:1000] == [{"name": f"row {n}"} for n in range(1, 1001)]
    assert found[1000:] == [{"name": "row 5"}, None, None]


def test_no_more_connections_and_keys_than_allowed(
    database: PostgresServer, new_table: NewTable
) -> None:
    """Each query waits for a lock, so all connections are in use at the same time."""
    table = filled(database, new_table)
    lookup = postgres_lookup(database.dsn, table, key="id", batch_keys=3, connections=2)

    async def ask() -> list[Any]:
        async with opened(lookup):
            with psycopg.connect(database.dsn) as other:
                other.execute(f"LOCK TABLE {table}")
                asked = [asyncio.ensure_future(lookup(n)) for n in range(1, 21)]
                waiting = []
                while len(waiting) < 2:
                    await asyncio.sleep(0.01)
                    waiting = database.execute(
                        "SELECT pid FROM pg_stat_activity "
                        "WHERE application_name = 'headgate-lookup' AND wait_event_type = 'Lock'"
                    )
                assert len(waiting) == 2
            return await asyncio.gather(*asked)

    assert run(ask()) == [{"name": f"row {n}"} for n in range(1, 21)]
    connections = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'headgate-lookup'"
    while database.execute(connections):
        pass  # the server takes a moment to notice


def test_a_call_that_is_given_up_frees_its_connection(
    database: PostgresServer, new_table: NewTable
) -> None:
    table, other_table = filled(database, new_table), filled(database, new_table)
    query = f"SELECT * FROM {table} UNION ALL SELECT id + 100, name FROM {other_table}"
    lookup = postgres_lookup(database.dsn, query=query, key="id", connections=1)

    async def ask() -> Any:
        async with opened(lookup):
            with psycopg.connect(database.dsn) as other:
                other.execute(f"LOCK TABLE {table}")
                stuck = [asyncio.ensure_future(lookup(n)) for n in (1, 2)]
                await asyncio.sleep(0.05)
                for each in stuck:
                    each.cancel()
                await asyncio.gather(*stuck, return_exceptions=True)
            return await lookup(1)

    assert run(ask()) == {"name": "row 1"}


KEYS = [
    ("text", 'it\'s \\ {"a", NULL}\n', 'it\'s \\ {"a", NULL}\n'),
    ("varchar(3)", "abc", "abc"),
    ("char(5)", "abc", "abc"),
    ("boolean", True, "t"),
    ("numeric(10,2)", Decimal("1.50"), "1.5"),
    ("timestamptz", datetime(2024, 1, 2, 3, 4, 5, 6, UTC), "2024-01-02 04:04:05.000006+01"),
    ("bytea", b"\0\xff", "\\x00ff"),
    ("double precision", 0.1, "0.1"),
    ("uuid", "00000000-0000-0000-0000-00000000000A", "00000000-0000-0000-0000-00000000000a"),
]


@pytest.mark.parametrize(("kind", "key", "text"), KEYS)
def test_keys_of_all_types(
    database: PostgresServer, new_table: NewTable, kind: str, key: Any, text: str
) -> None:
    table = new_table(f"key {kind} PRIMARY KEY, n int, also boolean, price numeric(5,2)")
    literal = psycopg.sql.Literal(text).as_string(None)
    database.execute(f"INSERT INTO {table} VALUES ({literal}, 7, true, 1.2)")
    lookup = postgres_lookup(database.dsn, table, key="key")
    assert answers(lookup, key) == [{"n": 7, "also": True, "price": Decimal("1.20")}]


def test_keys_are_not_cut_or_rounded(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("a varchar(3), b numeric(10,1), n int, PRIMARY KEY (a, b)")
    database.execute(f"INSERT INTO {table} VALUES ('abc', 1.3, 1)")
    lookup = postgres_lookup(database.dsn, table, key=["a", "b"])
    keys = [("abc", Decimal("1.3")), ("abcd", Decimal("1.3")), ("abc", Decimal("1.26"))]
    assert answers(lookup, *keys) == [{"n": 1}, None, None]


def test_an_error_of_one_key_is_its_own(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id bigint, name text, at timestamptz")
    database.execute(
        f"INSERT INTO {table} VALUES (1, 'a', now()), (2, 'b', now()), (2, 'c', now()), "
        "(3, 'd', 'infinity')"
    )
    lookup = postgres_lookup(database.dsn, table, key="id", missing="fail")
    good, twice, wide, wrong, missing = answers(lookup, 1, 2, 3, "x", 4)
    assert good["name"] == "a"
    assert isinstance(twice, LookupFailed)
    assert "several rows" in str(twice)
    assert isinstance(wide, LookupFailed)
    assert "read the column as string" in str(wide)
    assert isinstance(wrong, LookupFailed)
    assert "key=`x`" in str(wrong)
    assert isinstance(missing, LookupFailed)
    assert "no row with this key" in str(missing)


def test_a_server_that_is_away_is_waited_for(database: PostgresServer, new_table: NewTable) -> None:
    lookup = postgres_lookup(database.dsn, filled(database, new_table), key="id")

    async def ask() -> list[Any]:
        async with opened(lookup):
            first = await lookup(1)
            database.kill()
            second = asyncio.ensure_future(lookup(2))
            await asyncio.sleep(0.05)
            database.start()
            return [first, await second]

    assert run(ask()) == [{"name": "row 1"}, {"name": "row 2"}]


def test_mistakes(database: PostgresServer, new_table: NewTable) -> None:
    dsn, table = database.dsn, filled(database, new_table)
    with pytest.raises(UsageError, match="either a table or a query"):
        postgres_lookup(dsn, key="id")
    with pytest.raises(UsageError, match="no_such_table"):
        postgres_lookup(dsn, "no_such_table", key="id")
    with pytest.raises(UsageError, match=r"no such column.*`idd`"):
        postgres_lookup(dsn, table, key="idd")
    with pytest.raises(UsageError, match="missing=`drop`"):
        postgres_lookup(dsn, table, key="id", missing="drop")  # type: ignore[arg-type]
    with pytest.raises(HeadgateError, match="no such column"):
        answers(postgres_lookup(dsn, table, key="id", schema={"nam": "string"}), 1)
    (error,) = answers(postgres_lookup(dsn, table, key="id"), (1, 2))
    assert isinstance(error, UsageError)
    database.execute("DO $$ BEGIN CREATE ROLE eve LOGIN; EXCEPTION WHEN OTHERS THEN NULL; END $$")
    (error,) = answers(postgres_lookup(dsn.replace("postgres@", "eve@"), table, key="id"), 1)
    assert isinstance(error, JobError)
    assert "permission denied" in str(error)


def visits(*users: Any) -> Any:
    return from_list([(user,) for user in users], schema={"user": "int64"})


def test_a_job_with_missing_rows(database: PostgresServer, new_table: NewTable) -> None:
    users = filled(database, new_table)
    job, found, failed = hg.Job("join"), collect(guarantee="none"), collect(guarantee="none")
    stream = job.read(visits(1, 2, 99, 1), name="visits")
    lookup = postgres_lookup(database.dsn, users, key="id", missing="fail")
    joined = stream.lookup("user", lookup, name="users", on_error="side_output", timeout="60s")
    joined.write(found, name="out")
    joined.failed.write(failed, name="failed")
    job.run()
    rows = [(row["user"], row["name"]) for row in found.rows]
    assert rows == [(1, "row 1"), (2, "row 2"), (1, "row 1")]
    assert len(failed.rows) == 1


def test_each_subtask_has_connections_of_its_own(
    database: PostgresServer, new_table: NewTable
) -> None:
    users = filled(database, new_table, 200)
    job, found = hg.Job("join", parallelism=2), collect(guarantee="none")
    stream = job.read(visits(*range(1, 201)), name="visits").rebalance()
    lookup = postgres_lookup(database.dsn, users, key="id", connections=1)
    stream.lookup("user", lookup, name="users", timeout="60s").write(found, name="out")
    job.run()
    assert sorted(row["name"] for row in found.rows) == sorted(f"row {n}" for n in range(1, 201))
    connections = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'headgate-lookup'"
    while database.execute(connections):
        pass  # the server takes a moment to notice that they are closed


def test_a_job_in_a_manifest(database: PostgresServer, new_table: NewTable, tmp_path: Path) -> None:
    users, ids = filled(database, new_table), new_table("id bigint PRIMARY KEY")
    database.execute(f"INSERT INTO {ids} VALUES (1), (2), (99)")
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: joined}}
spec:
  checkpoint: {{every: 1s, storage: "{tmp_path}"}}
  sources:
    ids:
      postgres: {{dsn: "{database.dsn}", table: {ids}}}
  operators:
    named:
      from: ids
      lookup:
        key: id
        postgres: {{dsn: "{database.dsn}", table: {users}, key: id, connections: 2, batchKeys: 10}}
        cacheFor: 5m
      timeout: 60s
  sinks:
    out:
      from: named
      postgres: {{dsn: "{database.dsn}", table: joined, create: if_not_exists}}
      guarantee: at_least_once
"""
    )
    load_job(path).run()
    found = database.execute("SELECT id, name FROM joined ORDER BY id")
    assert found == [(1, "row 1"), (2, "row 2"), (99, None)]
