"""The changes of a table come once and in order, wherever reading stops; what cannot be known is told."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import headgate as hg
from headgate.connectors import postgres_cdc_source, postgres_sink, throttle
from headgate.connectors.postgres import cdc_stream
from headgate.connectors.postgres.cdc_model import Position, Segment, Segments
from headgate.connectors.postgres.cdc_source import CdcSource
from headgate.errors import HeadgateError, SourceError, StateError, UsageError
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_all
from headgate.testing.servers.postgres import PostgresServer, running
from headgate.tests.postgres.test_sink import VALUES
from headgate.tests.support.changes import apply, rest, some
from headgate.tests.support.scenarios import guarded
from headgate.tests.support.threads import begun

NewTable = Callable[..., str]
run = partial(guarded, seconds=240)
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))


def changes(database: PostgresServer, table: str, **options: Any) -> CdcSource:
    given: dict[str, Any] = {"snapshot": "never", "stop": "latest", **options}
    return postgres_cdc_source(database.dsn, table, slot=f"slot_{table}", **given)


@pytest.fixture
def slots(database: PostgresServer) -> Iterator[None]:
    """Drops the slots that a test has made, as a server has few of them."""
    yield
    names = database.execute("SELECT slot_name FROM pg_replication_slots")
    database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
    )
    for (name,) in names:
        drop(database, name)


pytestmark = pytest.mark.usefixtures("slots")


def drop(database: PostgresServer, slot: str) -> None:
    """Drop a slot that a reader may just be leaving."""
    while True:
        try:
            database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
            return
        except psycopg.errors.ObjectInUse:
            continue


# -- what a change is ---------------------------------------------------------------------------------


def test_changes_of_rows(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table()
    changes(database, table).splits(1)
    database.execute(
        f"INSERT INTO {table} VALUES (1, 'a'), (2, NULL)",
        f"UPDATE {table} SET name = 'b' WHERE id = 1",
        f"UPDATE {table} SET id = 3 WHERE id = 2",
        f"DELETE FROM {table} WHERE id = 1",
        f"TRUNCATE {table}",
        f"INSERT INTO {table} VALUES (4, '')",
    )
    found = run(read_all(changes(database, table)))
    assert found == [
        {"op": "insert", "id": 1, "name": "a"},
        {"op": "insert", "id": 2, "name": None},
        {"op": "update", "id": 1, "name": "b"},
        {"op": "delete", "id": 2, "name": None},
        {"op": "insert", "id": 3, "name": None},
        {"op": "delete", "id": 1, "name": None},
        {"op": "truncate", "id": None, "name": None},
        {"op": "insert", "id": 4, "name": ""},
    ]


def test_rows_before_and_metadata(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table()
    database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    source = changes(
        database,
        table,
        op="what",
        before="old_",
        metadata={"lsn": "lsn", "commit_time": "at", "xid": "xid"},
    )
    source.splits(1)
    database.execute(
        f"INSERT INTO {table} VALUES (1, 'a')",
        f"UPDATE {table} SET name = 'b'; UPDATE {table} SET id = 2",
        f"DELETE FROM {table}",
    )
    found = run(
        read_all(
            changes(database, table, op="what", before="old_", metadata=source.settings.metadata)
        )
    )
    rows = [
        (each["what"], each["id"], each["name"], each["old_id"], each["old_name"]) for each in found
    ]
    assert rows == [
        ("insert", 1, "a", None, None),
        ("update", 1, "b", 1, "a"),
        ("delete", 1, "b", 1, "b"),
        ("insert", 2, "b", None, None),
        ("delete", 2, "b", 2, "b"),
    ]
    lsns = [each["lsn"] for each in found]
    assert lsns == sorted(lsns)
    assert lsns[1] == lsns[2] == lsns[3] < lsns[4]
    assert len({each["xid"] for each in found}) == 3
    assert all(each["at"] is not None for each in found)


def test_values_of_all_types(database: PostgresServer, new_table: NewTable) -> None:
    """A row of the snapshot and a change have the same values, of the types of the table or the schema."""
    columns = ", ".join(f"{name} {kind[0]}" for name, kind in VALUES.items())
    table = new_table(f"id bigint PRIMARY KEY, {columns}")
    literals = ", ".join(_literal(value) for _, _, value, _ in VALUES.values())
    database.execute(
        f"INSERT INTO {table} VALUES (1, {literals})", f"INSERT INTO {table} (id) VALUES (2)"
    )
    schema = {name: kind[1] for name, kind in VALUES.items()}

    async def read(source: CdcSource) -> list[Any]:
        reader = open_reader(source, source.splits(1))
        found = await some(reader, 1)
        database.execute(f"INSERT INTO {table} VALUES (3, {literals})")
        found += await some(reader, 1)
        reader.close()
        return found

    for given in (None, {"id": "int64", **schema}):
        source = changes(database, table, snapshot="initial", schema=given, stop=None)
        first, nulls, last = run(read(source))
        assert (first.pop("op"), last.pop("op")) == ("snapshot", "insert")
        assert {**first, "id": 3} == last
        assert set(nulls.values()) == {"snapshot", 2, None}
        if given:
            for name, (_, _, value, wanted) in VALUES.items():
                assert first[name] in (value, wanted), name
        else:
            assert first["f"] == Decimal("1.20")
            assert first["n"] == '{"x": 1}'
        drop(database, f"slot_{table}")
        database.execute(f"DELETE FROM {table} WHERE id = 3")


def _literal(value: Any) -> str:
    if isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    if isinstance(value, bytes):
        value = f"\\x{value.hex()}"
    return str(psycopg.sql.Literal(str(value)).as_string(None))


def test_a_value_that_does_not_fit_is_told(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id bigint PRIMARY KEY, at timestamptz")
    changes(database, table).splits(1)
    database.execute(f"INSERT INTO {table} VALUES (1, 'infinity')")
    with pytest.raises(HeadgateError, match="read the column as string"):
        run(read_all(changes(database, table)))
    texts = changes(database, table, schema={"id": "int64", "at": "string"})
    assert run(read_all(texts)) == [{"op": "insert", "id": 1, "at": "infinity"}]


def test_large_values_that_were_not_sent_are_told(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table("id bigint PRIMARY KEY, large text, n int")
    database.execute(
        f"ALTER TABLE {table} ALTER large SET STORAGE EXTERNAL",
        f"INSERT INTO {table} VALUES (1, repeat('x', 10000), 0)",
    )
    changes(database, table).splits(1)
    database.execute(f"UPDATE {table} SET n = 1")
    with pytest.raises(SourceError, match="REPLICA IDENTITY FULL"):
        run(read_all(changes(database, table)))
    narrow = changes(database, table, schema={"id": "int64", "n": "int64"})
    assert run(read_all(narrow)) == [{"op": "update", "id": 1, "n": 1}]
    told = changes(database, table, metadata={"unchanged": "missing"})
    (found,) = run(read_all(told))
    assert found == {"op": "update", "id": 1, "large": None, "n": 1, "missing": ["large"]}
    database.execute(f"UPDATE {table} SET n = 1", f"UPDATE {table} SET n = 1")
    one_by_one = changes(database, table, metadata={"unchanged": "missing"}, batch_rows=1)
    assert run(read_all(one_by_one)) == [found] * 3
    drop(database, f"slot_{table}")
    database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    changes(database, table).splits(1)
    database.execute(f"UPDATE {table} SET n = 2")
    (found,) = run(read_all(changes(database, table)))
    assert found["large"] == "x" * 10_000


# -- where reading goes on ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_rows", [1, 3] if THOROUGH else [3])
def test_reading_goes_on_inside_a_transaction(
    database: PostgresServer, new_table: NewTable, batch_rows: int
) -> None:
    table = new_table()
    changes(database, table).splits(1)
    database.execute(
        f"INSERT INTO {table} SELECT n, n::text FROM generate_series(1, 5) AS n",
        f"INSERT INTO {table} VALUES (6, '6')",
        f"UPDATE {table} SET id = id + 100 WHERE id < 4; DELETE FROM {table} WHERE id = 6",
    )
    source = changes(database, table, batch_rows=batch_rows)
    splits = source.splits(1)
    expected = run(read_all(source))
    assert len(expected) == 5 + 1 + 6 + 1

    async def stopped(batches: int, wanted: int | None) -> list[Any]:
        reader = open_reader(source, splits)
        found = await some(reader, batches)
        reader.rows_wanted = wanted
        found += await some(reader, 1)
        positions = reader.snapshot()
        reader.close()
        return found + await rest(source, positions)

    for batches in range(13 // batch_rows + 1):
        assert run(stopped(batches, 2 if batch_rows > 1 else None)) == expected


def test_an_idle_table_does_not_hold_back_the_log(
    database: PostgresServer, new_table: NewTable
) -> None:
    """The position moves on while others write, so that the server can forget."""
    table, busy = new_table(), new_table()
    source = changes(database, table, stop=None)

    async def scenario() -> None:
        reader = open_reader(source, source.splits(1))
        database.execute(f"INSERT INTO {busy} SELECT n FROM generate_series(1, 1000) AS n")
        ((end,),) = database.execute("SELECT pg_current_wal_lsn() - '0/0'")
        checkpoint = 0
        while True:
            assert reader.poll() is None
            checkpoint += 1
            reader.begin_checkpoint(checkpoint)
            reader.on_checkpoint_complete(checkpoint)
            ((confirmed,),) = database.execute(
                "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots "
                f"WHERE slot_name = 'slot_{table}'"
            )
            if confirmed >= end:
                break
            await asyncio.sleep(0.05)
        lag = reader.lag_bytes()
        assert lag is not None
        assert reader.lag_s() == 0
        reader.close()

    run(scenario())


# -- the table first ----------------------------------------------------------------------------------


def test_segments_contain_what_their_transactions_saw() -> None:
    position = Position(
        "s", "1", ("public", "t"), ["id"], ["int8"], ["id"], 0, False, None,
        [Segment(["10"], "100:105:100,103", 7), Segment(None, "200:200:", 9)], 0,
    )  # fmt: skip
    segments = Segments(position)
    seen = [xid for xid in range(98, 107) if segments.contain(["9"], xid)]
    assert seen == [98, 99, 101, 102, 104]
    assert segments.contain(["10"], 150) is False
    assert segments.contain(["11"], 150) is True
    assert segments.contain(["11"], 200) is False
    assert segments.contain_everywhere(99) is True
    assert segments.contain_everywhere(150) is None
    assert segments.contain_everywhere(300) is False
    assert segments.until == 9
    # Numbers of transactions begin again after 32 bits; the server's snapshots count on.
    position.segments = [Segment(None, f"{(1 << 32) + 5}:{(1 << 32) + 5}:", 9)]
    wrapped = Segments(position)
    assert wrapped.contain(["1"], 4)
    assert wrapped.contain(["1"], (1 << 32) - 1)
    assert not wrapped.contain(["1"], 5)


@pytest.mark.parametrize("seed", range(12 if THOROUGH else 1))
def test_the_table_and_its_changes_make_no_gap_and_no_double(
    database: PostgresServer, new_table: NewTable, seed: int
) -> None:
    """Reading stops again and again while the table changes: also its keys, and rows on both sides."""
    table = new_table("id text PRIMARY KEY, n int")
    database.execute(f"INSERT INTO {table} SELECT 'k' || n, 0 FROM generate_series(1, 60) AS n")
    random_numbers, over = random.Random(seed), threading.Event()
    names = [f"k{n}" for n in range(1, 90)] + ["ä", "Z", "_"]

    def write() -> None:
        with psycopg.connect(database.dsn) as connection:
            while not over.is_set():
                for _ in range(random_numbers.randrange(1, 4)):
                    one, other = random_numbers.sample(names, 2)
                    statement = random_numbers.choice(
                        [
                            "INSERT INTO {t} VALUES (%(a)s, 1) "
                            "ON CONFLICT (id) DO UPDATE SET n = {t}.n + 1",
                            "UPDATE {t} SET n = n + 1 WHERE id = %(a)s",
                            "DELETE FROM {t} WHERE id = %(a)s",
                            "UPDATE {t} SET id = %(b)s WHERE id = %(a)s "
                            "AND NOT EXISTS (SELECT 1 FROM {t} WHERE id = %(b)s)",
                        ]
                    )
                    connection.execute(statement.format(t=table), {"a": one, "b": other})  # type: ignore[arg-type]
                connection.commit()

    async def scenario() -> dict[Any, Any]:
        source = changes(database, table, snapshot="initial", batch_rows=4, stop=None)
        positions = source.splits(1)
        state: dict[Any, Any] = {}
        for _ in range(12):
            reader = open_reader(source, positions)
            reader.rows_wanted = random_numbers.choice([None, 1, 3])
            apply(state, await some(reader, random_numbers.randrange(1, 6)))
            positions = reader.snapshot()
            reader.close()
        over.set()
        await asyncio.wrap_future(writer)
        ((stop,),) = database.execute("SELECT pg_current_wal_flush_lsn() - '0/0'")
        position = msgspec.msgpack.decode(positions[0], type=Position)
        position.stop = int(stop)
        bounded = changes(database, table, snapshot="initial")
        last = open_reader(bounded, [msgspec.msgpack.encode(position)])
        apply(state, await some(last, 1_000_000))
        last.close()
        return state

    writer = begun(write)
    try:
        state = run(scenario())
    finally:
        over.set()
        writer.result()
    rows = database.execute(f"SELECT id, n FROM {table}")
    assert {key: row["n"] for key, row in state.items()} == dict(rows)


def test_a_bounded_source_that_was_interrupted_ends_with_rows_of_one_moment(
    database: PostgresServer, new_table: NewTable
) -> None:
    """The second part of the table is read later than the first one, and later than the end of the log."""
    table = new_table("id bigint PRIMARY KEY, n int")
    database.execute(f"INSERT INTO {table} SELECT n, 0 FROM generate_series(1, 10) AS n")
    source = changes(database, table, snapshot="initial", batch_rows=4)

    async def scenario() -> dict[Any, Any]:
        reader = open_reader(source, source.splits(1))
        state: dict[Any, Any] = {}
        apply(state, await some(reader, 1))
        positions = reader.snapshot()
        reader.close()
        assert 0 < len(state) < 10
        database.execute(f"UPDATE {table} SET n = 1")
        apply(state, await rest(source, positions))
        return state

    assert {key: row["n"] for key, row in run(scenario()).items()} == dict.fromkeys(range(1, 11), 1)


def test_transactions_that_began_before_the_slot_are_waited_for(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()
    source = changes(database, table, snapshot="initial")

    async def scenario() -> list[Any]:
        source.splits(1)
        with psycopg.connect(database.dsn) as open_transaction:
            open_transaction.execute(f"INSERT INTO {table} VALUES (1, 'late')")  # type: ignore[arg-type]
            splits = source.splits(1)
            reader = open_reader(source, splits)
            assert reader.poll() is None
            await asyncio.sleep(0.3)
            assert reader.poll() is None
            open_transaction.commit()
        found = await some(reader, 1)
        reader.close()
        return found

    assert run(scenario()) == [{"op": "snapshot", "id": 1, "name": "late"}]


# -- mistakes -----------------------------------------------------------------------------------------


def refused(make: Callable[[], CdcSource]) -> str:
    with pytest.raises(HeadgateError) as error:
        make().splits(1)
    return str(error.value)


def test_what_cannot_be_read_is_told_at_the_start(
    database: PostgresServer, new_table: NewTable
) -> None:
    bare = new_table("id bigint, name text")
    assert "add a primary key" in refused(lambda: changes(database, bare))
    table = new_table()
    assert "REPLICA IDENTITY FULL" in refused(lambda: changes(database, table, before="old_"))
    assert "column=`no`" in refused(lambda: changes(database, table, schema={"no": "int64"}))
    assert "has=`text`" in refused(lambda: changes(database, table, schema={"name": "int64"}))
    assert "no such publication" in refused(lambda: changes(database, table, create=False))
    database.execute(f"CREATE PUBLICATION of_others FOR TABLE {bare}")
    assert "ADD TABLE" in refused(lambda: changes(database, table, publication="of_others"))
    odd = new_table("at timestamptz PRIMARY KEY")
    assert "snapshot=`never`" in refused(lambda: changes(database, odd, snapshot="initial"))
    database.execute(f"ALTER TABLE {bare} REPLICA IDENTITY FULL")
    assert "snapshot=`never`" in refused(lambda: changes(database, bare, snapshot="initial"))
    database.execute("SELECT pg_create_logical_replication_slot('of_tests', 'test_decoding')")
    other = postgres_cdc_source(database.dsn, table, slot="of_tests", publication="of_tests")
    assert "plugin=`test_decoding`" in refused(lambda: other)
    database.execute("CREATE ROLE plain LOGIN", f"GRANT SELECT ON {table} TO plain")
    plain = database.dsn.replace("postgres@", "plain@")
    poor = postgres_cdc_source(plain, table, slot="poor")
    assert "replication" in refused(lambda: poor).lower()
    for wrong in (
        {"snapshot": "always"}, {"stop": "now"}, {"metadata": {"no": "x"}}, {"op": "id"}, {"batch_rows": 0},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            changes(database, table, **wrong)


def test_changed_columns_are_an_error_with_a_way_on(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()
    source = changes(database, table)
    source.splits(1)
    database.execute(
        f"INSERT INTO {table} VALUES (1, 'a')",
        f"ALTER TABLE {table} ADD COLUMN more int",
        f"INSERT INTO {table} VALUES (2, 'b', 2)",
    )
    positions = source.splits(1)
    position = msgspec.msgpack.decode(positions[0], type=Position)
    position.columns = ["id", "name"]  # as they were when the job began
    positions = [msgspec.msgpack.encode(position)]

    async def read(source: CdcSource, positions: list[bytes]) -> tuple[list[Any], list[bytes], str]:
        reader = open_reader(source, positions)
        found: list[Any] = []
        refusal = ""
        try:
            while not reader.finished:
                found += await some(reader, 1)
        except SourceError as error:
            refusal = str(error)
        finally:
            reader.close()
        return found, reader.snapshot(), refusal

    narrow = {"id": "int64", "name": "string"}
    found, positions, refusal = run(read(changes(database, table, schema=narrow), positions))
    assert "column `more` was added" in refusal
    assert found == [{"op": "insert", "id": 1, "name": "a"}]
    ignored, *_ = run(
        read(changes(database, table, schema=narrow, new_columns="ignore"), positions)
    )
    assert ignored == [{"op": "insert", "id": 2, "name": "b"}]
    wider, *_ = run(read(changes(database, table), source.splits(1)))
    assert wider == [
        {"op": "insert", "id": 1, "name": "a", "more": None},
        {"op": "insert", "id": 2, "name": "b", "more": 2},
    ]
    whole = changes(database, table, stop=None)
    positions = whole.splits(1)
    database.execute(
        f"ALTER TABLE {table} DROP COLUMN more", f"INSERT INTO {table} VALUES (3, 'c')"
    )
    with pytest.raises(SourceError, match="column `more` was dropped"):
        run(rest(whole, positions))


def test_changes_under_another_name_of_the_table_are_not_passed_over(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()
    source = changes(database, table)
    source.splits(1)
    renamed = f"ALTER TABLE {table} RENAME TO old_{table}"
    database.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    positions = source.splits(1)
    database.execute(renamed, f"INSERT INTO old_{table} VALUES (2, 'b')")
    end = database.execute("SELECT pg_current_wal_flush_lsn() - '0/0'")[0][0]
    position = msgspec.msgpack.decode(positions[0], type=Position)
    position.stop = int(end)
    for _ in range(2):
        with pytest.raises(SourceError, match=f"`public.old_{table}`"):
            run(rest(source, [msgspec.msgpack.encode(position)]))
    database.execute(f"ALTER TABLE old_{table} RENAME TO {table}")


def test_a_slot_that_has_lost_changes_is_an_error(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()
    source = changes(database, table)
    old = source.splits(1)
    database.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    database.execute(f"SELECT pg_replication_slot_advance('slot_{table}', pg_current_wal_lsn())")
    with pytest.raises(SourceError, match="cannot be read any more"):
        run(rest(source, old))
    skipping = changes(database, table, on_lost="skip")
    assert run(rest(skipping, old)) == []
    position = msgspec.msgpack.decode(old[0], type=Position)
    ahead = msgspec.structs.replace(position, confirmed=1 << 60)
    with pytest.raises(SourceError, match="has not written its log up to the position"):
        run(rest(source, [msgspec.msgpack.encode(ahead)]))
    drop(database, f"slot_{table}")
    with pytest.raises(SourceError, match="does not exist any more"):
        run(rest(source, old))
    ending = changes(database, table)
    with pytest.raises(StateError, match="restored without an end"):
        run(rest(ending, [msgspec.msgpack.encode(msgspec.structs.replace(position, stop=None))]))
    position.system = "42"
    with pytest.raises(SourceError, match="not the one whose changes were read"):
        run(rest(source, [msgspec.msgpack.encode(position)]))


def test_a_slot_whose_log_was_removed_is_an_error(tmp_path: Path) -> None:
    limits = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    with running(tmp_path, limits) as database:
        database.execute("CREATE TABLE t (id bigint PRIMARY KEY, name text)")
        source = changes(database, "t")
        splits = source.splits(1)
        for _ in range(5):
            database.execute(
                "INSERT INTO t VALUES (1, 'a') ON CONFLICT DO NOTHING", "SELECT pg_switch_wal()"
            )
        database.execute("CHECKPOINT")
        with pytest.raises(SourceError, match="max_slot_wal_keep_size"):
            run(rest(source, splits))


# -- jobs ---------------------------------------------------------------------------------------------


def test_a_table_is_copied_while_the_server_is_killed(
    database: PostgresServer, new_table: NewTable, tmp_path: Path
) -> None:
    """From a table to another one, in one job: snapshot and changes, and two deaths of the server."""
    here, there = (
        new_table("id bigint PRIMARY KEY, n int"),
        new_table("id bigint PRIMARY KEY, n int"),
    )
    database.execute(f"INSERT INTO {here} SELECT n, 0 FROM generate_series(1, 2000) AS n")
    source = changes(database, here, snapshot="initial", batch_rows=100)
    source.splits(1)
    for number in range(1, 4):
        database.execute(
            f"UPDATE {here} SET n = {number} WHERE id % 3 = 0",
            f"DELETE FROM {here} WHERE id % 100 = {number}",
            f"UPDATE {here} SET id = id + 10000 WHERE id % 100 = 50 + {number}",
        )
    job = hg.Job("copies")
    job.checkpoint(every="50ms", storage=str(tmp_path / "checkpoints"))
    job.restart(hg.fixed_delay(attempts=20, delay="10ms"))
    job.read(throttle(source, 2000), name="changes").write(
        postgres_sink(
            database.dsn, there, mode="upsert", key="id", op="op", guarantee="exactly_once"
        ),
        name="table",
    )
    over = threading.Event()

    def trouble() -> None:
        for rows in (1, 800):
            while not over.is_set():
                if database.execute(f"SELECT count(*) FROM {there}")[0][0] >= rows:
                    database.kill()
                    database.start()
                    break

    killer = begun(trouble)
    try:
        job.run()
    finally:
        over.set()
        killer.result()
    assert database.execute(f"TABLE {here} EXCEPT TABLE {there}") == []
    assert database.execute(f"TABLE {there} EXCEPT TABLE {here}") == []


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: orders}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    orders:
      postgresCdc:
        dsn: "env:THE_DSN"
        table: {here}
        slot: slot_{here}
        snapshot: initial
        metadata: {{lsn: at}}
        stop: latest
        batchRows: 2
        buffer: 1mb
      schema: {{id: long, name: string}}
  sinks:
    copies:
      from: orders
      postgres:
        dsn: "env:THE_DSN"
        table: {there}
        mode: upsert
        key: [id]
        op: op
        create: if_not_exists
        buffer: 1mb
      guarantee: exactly_once
"""


def test_a_manifest_copies_a_table(
    database: PostgresServer, new_table: NewTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table()
    monkeypatch.setenv("THE_DSN", database.dsn)
    database.execute(f"INSERT INTO {table} SELECT n, n::text FROM generate_series(1, 5) AS n")
    file = tmp_path / "orders.yaml"
    file.write_text(MANIFEST.format(here=table, there=f"{table}_copy", path=tmp_path))
    load_job(file).run()
    rows = database.execute(f"SELECT id, name, at FROM {table}_copy ORDER BY id")
    assert rows == [(n, str(n), None) for n in range(1, 6)]


# -- a table that is not what it was ------------------------------------------------------------------


def test_a_table_that_leaves_the_publication_is_noticed(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says nothing: the changes just do not come any more."""
    monkeypatch.setattr(cdc_stream, "_WATCH_S", 0.0)
    table = new_table()
    source = changes(database, table, stop=None)
    positions = source.splits(1)
    publication = f"ALTER PUBLICATION slot_{table}"

    async def read_on() -> None:
        reader = open_reader(source, positions)
        database.execute(f"INSERT INTO {table} VALUES (1, 'a')")
        assert len(await some(reader, 1)) == 1
        database.execute(f"{publication} DROP TABLE {table}")
        await some(reader, 1)

    with pytest.raises(SourceError, match=f"not in the publication.*slot_{table}"):
        run(read_on())
    position = msgspec.msgpack.decode(positions[0], type=Position)
    position.stop = int(database.execute("SELECT pg_current_wal_flush_lsn() - '0/0'")[0][0])
    ended = [msgspec.msgpack.encode(position)]
    with pytest.raises(SourceError, match="not in the publication"):
        run(rest(changes(database, table), ended))
    # What has changed meanwhile is lost, so the table is not just taken back either.
    database.execute(f"INSERT INTO {table} VALUES (2, 'b')", f"{publication} ADD TABLE {table}")
    with pytest.raises(SourceError, match="was taken out of the publication"):
        run(rest(changes(database, table), ended))
    skipping = changes(database, table, on_lost="skip")
    assert [each["id"] for each in run(rest(skipping, ended))] == [1]


def test_another_table_with_the_name_is_not_read(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdc_stream, "_WATCH_S", 0.0)
    table, other = new_table(), new_table()
    database.execute("CREATE PUBLICATION of_all FOR ALL TABLES")
    database.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    sources = {}
    for name, snapshot in (("rows", "initial"), ("changes", "never")):
        made = postgres_cdc_source(
            database.dsn, table, slot=name, publication="of_all", snapshot=snapshot
        )
        sources[name] = (made, made.splits(1))
    database.execute(
        f"INSERT INTO {table} VALUES (2, 'b')",
        f"ALTER TABLE {table} RENAME TO before_{table}; ALTER TABLE {other} RENAME TO {table}",
        f"INSERT INTO {table} VALUES (3, 'of the other table')",
    )

    async def read_on(source: CdcSource, positions: list[bytes]) -> list[Any]:
        reader = open_reader(source, positions)
        found: list[Any] = []

        async def on() -> None:
            while True:
                found.extend(await some(reader, 1))

        with pytest.raises(SourceError, match=f"another table.*has the name.*`public.{table}`"):
            await on()
        reader.close()
        return found

    assert run(read_on(*sources["rows"])) == []
    # What came before is not lost.
    assert [row["id"] for row in run(read_on(*sources["changes"]))] in ([], [2])
    database.execute("DROP PUBLICATION of_all")


def test_a_table_that_was_renamed_before_its_rows_were_read(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()
    source = changes(database, table, snapshot="initial")
    positions = source.splits(1)
    database.execute(f"ALTER TABLE {table} RENAME TO new_{table}")
    with pytest.raises(SourceError, match=f"has another name now.*`public.new_{table}`"):
        run(rest(source, positions))
    database.execute(f"DROP TABLE new_{table}")
    with pytest.raises(SourceError, match="was dropped"):
        run(rest(source, positions))


def test_a_table_that_was_dropped_is_noticed(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdc_stream, "_WATCH_S", 0.0)
    table = new_table()
    source = changes(database, table, stop=None)
    positions = source.splits(1)
    database.execute(f"DROP TABLE {table}")
    with pytest.raises(SourceError, match="the table was dropped"):
        run(rest(source, positions))
