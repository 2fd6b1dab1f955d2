"""The rows of a table are read once each, wherever reading stops and whatever happens to other rows."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import headgate as hg
from headgate.connectors import collect, postgres_source
from headgate.connectors.postgres.table_source import TableSource
from headgate.errors import DataError, HeadgateError, StateError, UsageError
from headgate.operators.clock import SystemClock
from headgate.operators.source import SourceReader
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, open_reader, read_all, records_of
from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.postgres.test_sink import VALUES
from headgate.tests.support.scenarios import guarded

NewTable = Callable[..., str]
run = partial(guarded, seconds=240)
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))


async def rows_from(reader: SourceReader, count: int) -> list[Any]:
    """Return at least this number of records, fewer if the reader has finished."""
    found: list[Any] = []
    while len(found) < count and not reader.finished:
        batch = reader.poll()
        if batch is not None:
            found += records_of(batch)
        elif not reader.finished:
            await reader.wait()
    return found


async def rest(source: TableSource, positions: list[bytes]) -> list[Any]:
    """Return all rows that follow positions."""
    reader = open_reader(source, positions)
    try:
        return await rows_from(reader, 1_000_000)
    finally:
        reader.close()


def filled(database: PostgresServer, new_table: NewTable, rows: int) -> str:
    table = new_table("id bigint PRIMARY KEY, name text")
    database.execute(f"INSERT INTO {table} SELECT n, 'row ' || n FROM generate_series(1, {rows}) n")
    return table


# -- a table once -------------------------------------------------------------------------------------


def test_all_rows_are_read_in_parts(database: PostgresServer, new_table: NewTable) -> None:
    table = filled(database, new_table, 5000)
    source = postgres_source(database.dsn, table, batch_rows=100)
    splits = source.splits(1)
    assert len(splits) == 16
    found = [run(rest(source, [split])) for split in splits]
    # The parts are about equal.
    assert all(100 < len(part) < 1000 for part in found)
    rows = [row for part in found for row in part]
    assert rows == [{"id": n, "name": f"row {n}"} for n in range(1, 5001)]


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
def test_small_tables(database: PostgresServer, new_table: NewTable, rows: int) -> None:
    found = run(read_all(postgres_source(database.dsn, filled(database, new_table, rows))))
    assert [row["id"] for row in found] == list(range(1, rows + 1))


def test_values_of_all_types(database: PostgresServer, new_table: NewTable) -> None:
    columns = ", ".join(f"{name} {kind[0]}" for name, kind in VALUES.items())
    table = new_table(f"id bigint PRIMARY KEY, {columns}")
    values = [value for _, _, value, _ in VALUES.values()]
    literals = ", ".join(_literal(value) for value in values)
    database.execute(f"INSERT INTO {table} VALUES (1, {literals})")
    database.execute(f"INSERT INTO {table} (id) VALUES (2)")
    schema = {"id": "int64", **{name: kind[1] for name, kind in VALUES.items()}}
    for given in ({"table": table}, {"query": f"SELECT * FROM {table}", "key": "id"}):
        first, nulls = run(read_all(postgres_source(database.dsn, schema=schema, **given)))
        for name, (_, _, value, wanted) in VALUES.items():
            assert first[name] in (value, wanted), name
        assert set(nulls.values()) == {2, None}
        found = postgres_source(database.dsn, **given).schema
        assert str(found.field("f").type) == "decimal128(10, 2)"
        assert str(found.field("k").type) == "timestamp[us, tz=UTC]"


def _literal(value: Any) -> str:
    if isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, bytes):
        value = f"\\x{value.hex()}"
    return str(psycopg.sql.Literal(str(value)).as_string(None))


KEYS = {
    "text": ("key text PRIMARY KEY, n int", "'ä' || n"),
    "two": ("key text, n int, PRIMARY KEY (key, n)", "(n % 3)::text"),
    "uuid": ("key uuid PRIMARY KEY, n int", "md5(n::text)::uuid"),
    "time": ("key timestamptz PRIMARY KEY, n int", "to_timestamp(n * 1.5)"),
    "number": ("key numeric PRIMARY KEY, n int", "n / 7.0"),
    "bytes": ("key bytea PRIMARY KEY, n int", "decode(md5(n::text), 'hex')"),
    "unique": ("n int, key double precision NOT NULL UNIQUE", "sqrt(n)"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_it_goes_on_behind_any_row(
    database: PostgresServer, new_table: NewTable, kind: str
) -> None:
    columns, key = KEYS[kind]
    table = new_table(columns)
    database.execute(f"INSERT INTO {table} (key, n) SELECT {key}, n FROM generate_series(1, 40) n")
    source = postgres_source(database.dsn, table, splits=2, batch_rows=1).with_columns(["n"])

    async def stopped(behind: int) -> list[Any]:
        reader = open_reader(source, source.splits(1))
        found = await rows_from(reader, behind)
        positions = reader.snapshot()
        reader.close()
        return found + await rest(source, positions)

    whole = run(read_all(source))
    assert sorted(row["n"] for row in whole) == list(range(1, 41))
    for behind in range(0, 41, 1 if THOROUGH else 8):
        assert run(stopped(behind)) == whole


def test_rows_that_stay_are_read_once_while_others_change(
    database: PostgresServer, new_table: NewTable
) -> None:
    """Updates move rows to other places of the table, and readers begin and end between them."""
    table = filled(database, new_table, 300)
    database.execute(f"ALTER TABLE {table} ADD v int DEFAULT 0")
    source = postgres_source(database.dsn, table, splits=3, batch_rows=10)
    dice = random.Random(5)

    async def read() -> list[Any]:
        positions, found = source.splits(1), []
        while positions:
            reader = open_reader(source, positions)
            found += await rows_from(reader, dice.randrange(1, 60))
            positions = reader.snapshot()
            reader.close()
            gone, new = dice.randrange(1, 301), dice.randrange(1000, 2000)
            database.execute(
                f"DELETE FROM {table} WHERE id = {gone} AND id % 2 = 0",
                f"UPDATE {table} SET v = v + 1",
                f"INSERT INTO {table} VALUES ({new}, 'new') ON CONFLICT DO NOTHING",
            )
        return found

    ids = [row["id"] for row in run(read())]
    assert len(set(ids)) == len(ids)
    assert set(range(1, 301, 2)) <= set(ids)


def test_a_view_a_partitioned_table_and_a_query(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = filled(database, new_table, 100)
    parts = f"{table}_parts"
    database.execute(
        f"CREATE VIEW {table}_view AS SELECT * FROM {table} WHERE id <= 50",
        f"CREATE TABLE {parts} (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        f"CREATE TABLE {parts}_1 PARTITION OF {parts} FOR VALUES FROM (0) TO (20)",
        f"CREATE TABLE {parts}_2 PARTITION OF {parts} FOR VALUES FROM (20) TO (1000)",
        f"INSERT INTO {parts} SELECT id, name FROM {table}",
    )

    def ids(**options: Any) -> list[int]:
        found = run(read_all(postgres_source(database.dsn, **options)))
        return [next(iter(row.values())) for row in found]

    assert ids(table=f"{table}_view", key="id", splits=4) == list(range(1, 51))
    assert ids(table=parts) == list(range(1, 101))
    query = f"SELECT id % 10 AS last, count(*) AS n FROM {table} GROUP BY 1; -- '%s'\n"
    assert ids(query=query.replace(";", ""), key=["last"]) == list(range(10))
    assert ids(query=query.replace(";", ""), key=["last"], splits=3) == list(range(10))


def test_a_wrong_key_of_a_query_is_told(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id int, n int")
    database.execute(f"INSERT INTO {table} VALUES (1, 1), (2, 1), (3, NULL)")
    query = f"SELECT * FROM {table}"

    def read(query: str, **options: Any) -> None:
        run(read_all(postgres_source(database.dsn, query=query, batch_rows=1, **options)))

    with pytest.raises(DataError, match=r"same key.*values=`1`"):
        read(f"{query} WHERE n = 1", key="n")
    with pytest.raises(HeadgateError, match=r"no value in a column of its key.*`n`"):
        read(f"{query} WHERE id <> 2", key="n")
    with pytest.raises(UsageError, match=r"no value in a column of its key.*`n`"):
        read(f"{query} WHERE id <> 2", key="n", splits=2)
    table = filled(database, new_table, 1)
    with pytest.raises(UsageError, match="does not identify a row"):
        postgres_source(database.dsn, table, key="name").splits(1)


@pytest.mark.parametrize(
    ("values", "problem"), [("(1), (2), (NULL)", "no value"), ("(1), (1), (2)", "same key")]
)
def test_a_wrong_key_is_told_when_reading_goes_on_behind_a_row(
    database: PostgresServer, new_table: NewTable, values: str, problem: str
) -> None:
    """Rows without a key, or with that of the last row, are not behind the last row."""
    table = new_table("n int")
    database.execute(f"INSERT INTO {table} VALUES {values}")
    source = postgres_source(
        database.dsn, query=f"SELECT * FROM {table}", key="n", batch_rows=1, buffer=1
    )

    async def read() -> None:
        reader = open_reader(source, source.splits(1))
        assert await rows_from(reader, 1) == [{"n": 1}]
        positions = reader.snapshot()
        reader.close()
        await rest(source, positions)

    with pytest.raises(DataError, match=rf"{problem}.* reading cannot go on.*`n` last=`1`"):
        run(read())


def test_mistakes(database: PostgresServer, new_table: NewTable) -> None:
    dsn = database.dsn
    with pytest.raises(UsageError, match="either a table or a query"):
        postgres_source(dsn)
    with pytest.raises(UsageError, match="either a table or a query"):
        postgres_source(dsn, "orders", query="SELECT 1")
    with pytest.raises(UsageError, match="every=`0s`"):
        postgres_source(dsn, "orders", incremental_by="id", every="0s")
    with pytest.raises(UsageError, match=r"query cannot be read.*syntax"):
        postgres_source(dsn, query="SELECT FROM WHERE", key="id")
    with pytest.raises(UsageError, match="names of their own"):
        postgres_source(dsn, query="SELECT 1 AS a, 2 AS a", key="a")
    with pytest.raises(UsageError, match="identify a row"):
        postgres_source(dsn, new_table("n int")).splits(1)
    with pytest.raises(UsageError, match=r"no such column.*`idd`"):
        postgres_source(dsn, new_table(), incremental_by="idd").splits(1)
    table = new_table()
    database.execute(
        f"CREATE FUNCTION write_{table}() RETURNS int LANGUAGE sql AS "
        f"$$ INSERT INTO {table} VALUES (1) RETURNING 1 $$"
    )
    query = f"SELECT write_{table}() AS id"
    with pytest.raises(HeadgateError, match="read-only"):
        run(read_all(postgres_source(dsn, query=query, key="id", schema={"id": "int64"})))


def test_a_query_that_takes_too_long_is_told(database: PostgresServer, new_table: NewTable) -> None:
    """Asking again would not help; unlike that of a server that is away, this query is not repeated."""
    table = filled(database, new_table, 1)
    dsn = f"{database.dsn}?options=-c%20statement_timeout%3D200"
    query = f"SELECT id, pg_sleep(30)::text AS slept FROM {table}"
    schema = {"id": "int64", "slept": "string"}
    with pytest.raises(HeadgateError, match="statement timeout"):
        run(read_all(postgres_source(dsn, query=query, key="id", schema=schema)))


def test_positions_of_other_rows_are_refused(database: PostgresServer, new_table: NewTable) -> None:
    one, other = filled(database, new_table, 2), filled(database, new_table, 2)
    positions = postgres_source(database.dsn, one, splits=1).splits(1)
    with pytest.raises(StateError, match=f"another table.*{other}"):
        run(rest(postgres_source(database.dsn, other), positions))
    with pytest.raises(StateError, match="in another order"):
        run(rest(postgres_source(database.dsn, one, incremental_by="id"), positions))
    with pytest.raises(StateError, match="another source"):
        run(rest(postgres_source(database.dsn, one), [b"other"]))


def test_a_job_in_a_manifest(database: PostgresServer, new_table: NewTable, tmp_path: Path) -> None:
    table = filled(database, new_table, 50)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: copied}}
spec:
  checkpoint: {{every: 1s, storage: "{tmp_path}"}}
  sources:
    rows:
      postgres: {{dsn: "{database.dsn}", query: "SELECT * FROM {table}", key: [id], splits: 4}}
  operators:
    few:
      from: rows
      filter: "id <= 20"
  sinks:
    out:
      from: few
      postgres: {{dsn: "{database.dsn}", table: copied, mode: upsert, key: [id], create: if_not_exists}}
      guarantee: at_least_once
"""
    )
    load_job(path).run()
    assert database.execute("SELECT count(*), sum(id) FROM copied") == [(20, 210)]


def test_a_job_with_two_subtasks(database: PostgresServer, new_table: NewTable) -> None:
    table = filled(database, new_table, 2000)
    job, found = hg.Job("read"), collect(guarantee="none")
    rows = job.read(postgres_source(database.dsn, table), name="rows", parallelism=2)
    rows.select("id").write(found, name="out")
    job.run()
    assert sorted(row["id"] for row in found.rows) == list(range(1, 2001))


# -- new rows -----------------------------------------------------------------------------------------


def growing(database: PostgresServer, table: str, **options: Any) -> TableSource:
    given: dict[str, Any] = {"incremental_by": "at", "lag": "0ms", "every": "10ms", **options}
    return postgres_source(database.dsn, table, **given)


def test_new_rows_are_read(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id bigint PRIMARY KEY, at timestamptz")
    early, late = datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC)
    database.execute(f"INSERT INTO {table} VALUES (2, '{early}'), (1, '{early}')")
    source = growing(database, table)

    async def read() -> None:
        reader = open_reader(source, source.splits(1))
        assert await rows_from(reader, 2) == [{"id": 1, "at": early}, {"id": 2, "at": early}]
        database.execute(
            # One transaction, as there is no lag here for a row that commits behind another.
            f"INSERT INTO {table} VALUES (3, '{late}'), (4, NULL); "
            f"UPDATE {table} SET at = '{late}' WHERE id = 1",
        )
        found = await rows_from(reader, 2)
        assert found == [{"id": 1, "at": late}, {"id": 3, "at": late}]
        reader.close()

    run(read())


def test_it_goes_on_between_equal_values(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id bigint PRIMARY KEY, at timestamptz")
    database.execute(
        f"INSERT INTO {table} SELECT n, to_timestamp(n / 10) FROM generate_series(1, 35) n"
    )
    source = growing(database, table, batch_rows=1).with_columns(["id"])

    async def read() -> None:
        positions = source.splits(1)
        found: list[Any] = []
        while len(found) < 35:
            reader = open_reader(source, positions)
            found += await rows_from(reader, 1)
            positions = reader.snapshot()
            reader.close()
        assert [row["id"] for row in found] == list(range(1, 36))

    run(read())


class HeldClock(SystemClock):
    """Stands still until it is told to go, and counts how often it was looked at."""

    def __init__(self) -> None:
        self.now_s, self.looks = 0.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now_s


def test_a_source_is_idle_only_if_it_has_read_what_there_is(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table("id bigint PRIMARY KEY, at timestamptz")
    database.execute(f"INSERT INTO {table} VALUES (1, '2024-01-01')")
    once, again = postgres_source(database.dsn, table), growing(database, table, lag="3s")
    clock = HeldClock()

    async def read() -> None:
        for source in (once, again):
            reader = open_reader(source, source.splits(1), make_context(clock=clock))
            if source is again:  # the row is too new until the clock goes on
                while clock.looks < 10:
                    assert [reader.poll() is None, reader.held_back] == [True, True]
                    await asyncio.sleep(0.01)
                clock.now_s = 3.0
            assert len(await rows_from(reader, 1)) == 1
            while reader.held_back:
                assert reader.poll() is None
                await asyncio.sleep(0.01)
            reader.close()

    run(read())


def test_rows_with_the_value_of_the_last_one_are_read(
    database: PostgresServer, new_table: NewTable
) -> None:
    """They come without one that has a higher value, which may be tomorrow."""
    table = new_table("id bigint PRIMARY KEY, at date")
    source = growing(database, table)

    async def read() -> list[int]:
        reader = open_reader(source, source.splits(1))
        found: list[Any] = []
        for number in (1, 2, 3):
            database.execute(f"INSERT INTO {table} VALUES ({number}, '2024-01-01')")
            found += await rows_from(reader, 1)
        reader.close()
        return [row["id"] for row in found]

    assert run(read()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("timestamptz", "infinity"), ("date", "infinity"), ("double precision", "NaN")],
)
def test_a_value_that_nothing_can_follow_is_told(
    database: PostgresServer, new_table: NewTable, kind: str, value: str
) -> None:
    table = new_table(f"id bigint PRIMARY KEY, at {kind}")
    database.execute(f"INSERT INTO {table} VALUES (1, '{value}')")
    source = growing(database, table).with_columns(["id"])

    async def read() -> None:
        reader = open_reader(source, source.splits(1))
        await rows_from(reader, 2)

    with pytest.raises(DataError, match=rf"no new row could follow it.*`at`.*`{value}`"):
        run(read())


def test_rows_that_commit_late_are_waited_for(
    database: PostgresServer, new_table: NewTable
) -> None:
    """A row is not read before it was visible for the lag, so one with a lower value may still come."""
    table = new_table("id bigint PRIMARY KEY")
    source = growing(database, table, incremental_by="id", lag="3s")
    clock = HeldClock()

    async def read() -> list[Any]:
        with psycopg.connect(database.dsn) as other:
            other.execute(f"INSERT INTO {table} VALUES (1)")
            database.execute(f"INSERT INTO {table} VALUES (2)")
            reader = open_reader(source, source.splits(1), make_context(clock=clock))
            while clock.looks < 10:
                assert reader.poll() is None
                await asyncio.sleep(0.01)
            other.commit()
        clock.now_s = 3.0
        found = await rows_from(reader, 2)
        reader.close()
        return found

    assert run(read()) == [{"id": 1}, {"id": 2}]


def test_new_rows_come_after_the_server_was_killed(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table("id bigint PRIMARY KEY")
    source = growing(database, table, incremental_by="id")

    async def read() -> list[Any]:
        reader = open_reader(source, source.splits(1))
        database.execute(f"INSERT INTO {table} VALUES (1), (2)")
        found = await rows_from(reader, 2)
        database.kill()
        await asyncio.sleep(0.05)
        database.start()
        database.execute(f"INSERT INTO {table} VALUES (3)")
        found += await rows_from(reader, 1)
        reader.close()
        return found

    assert run(read()) == [{"id": 1}, {"id": 2}, {"id": 3}]
