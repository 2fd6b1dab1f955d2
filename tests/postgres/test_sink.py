"""The sink of PostgreSQL: values, keys and deletions, mistakes, staged rows of the living and the dead."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import generator, postgres_sink, sequence
from headgate.connectors.postgres import target
from headgate.connectors.postgres.binary import binary_rows
from headgate.connectors.postgres.client import Address, connect
from headgate.connectors.postgres.sink import PostgresSink
from headgate.connectors.postgres.tables import Column
from headgate.connectors.postgres.target import MARKERS, checked_target
from headgate.errors import DataError, HeadgateError, JobError, PlanError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkRun, SinkWriter
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import make_context
from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.support.scenarios import guarded, prepared
from headgate.tests.support.threads import begun

NewTable = Callable[..., str]
GUARD_S = 120.0
run = partial(guarded, seconds=GUARD_S)
PERMIT = CommitPermit("conformance", 0, 1)


def batch(**columns: Any) -> ColumnBatch:
    return ColumnBatch(pa.record_batch(columns))


async def opened(sink: PostgresSink, like: ColumnBatch, **context: Any) -> SinkWriter:
    sink.bind(like.data.schema)
    writer = sink.writer()
    writer.open(make_context(**context))
    await asyncio.to_thread(writer.prepare)
    return writer


async def written(sink: PostgresSink, *batches: ColumnBatch) -> None:
    """Write batches, commit them if that is needed, and close the writer."""
    writer = await opened(sink, batches[0])
    try:
        for each in batches:
            writer.write(each)
        committables = await prepared(writer)
        await asyncio.to_thread(writer.commit, committables, PERMIT)
    finally:
        writer.close()


def staged(database: PostgresServer) -> list[str]:
    rows = database.execute("SELECT relname FROM pg_class WHERE relname LIKE 'hg\\_%'")
    return [row[0] for row in rows]


VALUES: dict[str, tuple[str, pa.DataType, Any, Any]] = {
    "a": ("smallint", pa.int8(), -7, -7),
    "b": ("integer", pa.uint16(), 60_000, 60_000),
    "c": ("bigint", pa.int64(), 2**62, 2**62),
    "d": ("numeric(20)", pa.uint64(), 2**64 - 1, Decimal(2**64 - 1)),
    "e": ("double precision", pa.float64(), 0.1, 0.1),
    "f": ("numeric(10,2)", pa.decimal128(10, 2), Decimal("1.20"), Decimal("1.20")),
    "g": ("boolean", pa.bool_(), True, True),
    "h": ("text", pa.string(), 'a,"b"\n\\ ü', 'a,"b"\n\\ ü'),
    "i": ("bytea", pa.binary(), b"\0\xff", b"\0\xff"),
    "j": ("date", pa.date32(), date(2024, 2, 29), date(2024, 2, 29)),
    "k": (
        "timestamptz",
        pa.timestamp("us", "UTC"),
        datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
        datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
    ),
    "l": ("timestamp", pa.timestamp("ms"), datetime(2024, 1, 2, 3), datetime(2024, 1, 2, 3)),
    "m": ("time", pa.time64("us"), time(1, 2, 3), time(1, 2, 3)),
    "n": ("jsonb", pa.struct([("x", pa.int64())]), {"x": 1}, {"x": 1}),
    "o": ("jsonb", pa.list_(pa.string()), ["p", None], ["p", None]),
    "q": ("uuid", pa.string(), "00000000-0000-0000-0000-000000000001", None),
    "r": ("text", pa.string(), "", ""),
}


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_values_of_all_types(database: PostgresServer, new_table: NewTable, guarantee: Any) -> None:
    table = new_table(", ".join(f"{name} {kind[0]}" for name, kind in VALUES.items()))
    columns = {name: pa.array([value, None], kind) for name, (_, kind, value, _) in VALUES.items()}
    run(written(postgres_sink(database.dsn, table, guarantee=guarantee), batch(**columns)))
    found, nulls = database.execute(f"SELECT * FROM {table} ORDER BY a")
    for (name, (_, _, _, wanted)), value in zip(VALUES.items(), found, strict=True):
        assert value == wanted or (name == "q" and str(value) == VALUES["q"][2]), name
    assert set(nulls) == {None}


BINARY: dict[str, tuple[str, pa.DataType, list[Any]]] = {
    "a": ("bool", pa.bool_(), [True, False]),
    "b": ("int2", pa.int16(), [-(2**15), 2**15 - 1]),
    "c": ("int2", pa.uint8(), [0, 255]),
    "d": ("int4", pa.int32(), [-(2**31), 2**31 - 1]),
    "e": ("int4", pa.uint16(), [0, 2**16 - 1]),
    "f": ("int8", pa.int64(), [-(2**63), 2**63 - 1]),
    "g": ("int8", pa.uint32(), [0, 2**32 - 1]),
    "h": ("float4", pa.float32(), [-math.inf, 0.1]),
    "i": ("float8", pa.float64(), [-0.0, 1e-300]),
    "j": ("text", pa.string(), ["", 'a "b",\n\\N;\té']),
    "k": ("varchar(5)", pa.large_string(), ["", "fünf!"]),
    "l": ("char(3)", pa.string(), ["a", "abc"]),
    "m": ("bytea", pa.binary(), [b"", bytes(range(256))]),
    "n": ("date", pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    "o": (
        "timestamp",
        pa.timestamp("us"),
        [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)],
    ),
    "p": (
        "timestamptz",
        pa.timestamp("us", "Europe/Berlin"),
        [datetime(1969, 12, 31, tzinfo=UTC), datetime(2026, 7, 1, 1, 2, 3, 4, UTC)],
    ),
}


def column_of(base: str) -> Column:
    return Column("x", base, base, False, False, False, None, False)


def the_same_as_csv(
    database: PostgresServer,
    new_table: NewTable,
    monkeypatch: pytest.MonkeyPatch,
    *batches: ColumnBatch,
) -> None:
    """Write batches as binary and as CSV; the tables must have the same rows."""
    definition = ", ".join(f"{name} {BINARY[name][0]}" for name in batches[0].data.schema.names)
    tables = [new_table(definition) for _ in range(2)]
    sinks = [postgres_sink(database.dsn, table, guarantee="exactly_once") for table in tables]
    assert find_spec("pgpq"), "pgpq is not installed: pip install 'headgate[postgres]'"
    run(written(sinks[0], *batches))
    monkeypatch.setattr(target, "binary_rows", lambda *given: None)
    run(written(sinks[1], *batches))
    rows = [database.execute(f"SELECT t::text FROM {table} t ORDER BY 1") for table in tables]
    assert rows[0] == rows[1]
    assert len(rows[0]) == sum(len(each) for each in batches)


@pytest.mark.parametrize("name", BINARY)
def test_binary_rows_are_those_of_csv(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, kind, values = BINARY[name]
    column = pa.array([*values, None], kind)
    base = {"char(3)": "bpchar"}.get(BINARY[name][0], BINARY[name][0].partition("(")[0])
    assert binary_rows([], pa.schema({name: kind}), [column_of(base)]) is not None
    the_same_as_csv(database, new_table, monkeypatch, batch(**{name: column}))


def test_binary_rows_of_slices_and_of_far_times(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with a time that is far away travels as CSV, in the same epoch as others."""
    times = [datetime(2026, 1, 1 + n) for n in range(9)]
    numbers = pa.record_batch(
        {"f": pa.array([*range(8), None]), "o": pa.array(times, pa.timestamp("us"))}
    )
    far = pa.array([10**17], pa.int64()).cast(pa.timestamp("us"))  # the year 5138
    further = pa.array([3 * 10**17], pa.int64()).cast(pa.timestamp("us"))  # the year 11476
    batches = [
        ColumnBatch(numbers.slice(2, 3)),
        batch(f=pa.array([100]), o=far),
        batch(f=pa.array([101]), o=pa.array([None], pa.timestamp("us"))),
        ColumnBatch(numbers.slice(7)),
    ]
    the_same_as_csv(database, new_table, monkeypatch, *batches)
    encoder = binary_rows([], batches[1].data.schema, [column_of("int8"), column_of("timestamp")])
    assert encoder is not None
    assert encoder.encode([pa.array([1]), far]) is not None
    assert encoder.encode([pa.array([1]), further]) is None


def test_a_table_is_made_of_the_columns(database: PostgresServer) -> None:
    like = batch(**{name: pa.array([value], kind) for name, (_, kind, value, _) in VALUES.items()})
    sink = postgres_sink(database.dsn, "made_here", mode="upsert", key="c", create="if_not_exists")
    run(written(sink, like, like))
    rows = database.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'made_here'::regclass AND attnum > 0 ORDER BY attnum"
    )
    made = {name: kind.replace("numeric(20,0)", "numeric(20)") for name, kind in rows}
    wanted = {name: kind[0] for name, kind in VALUES.items()}
    wanted |= {
        "k": "timestamp with time zone",
        "l": "timestamp without time zone",
        "m": "time without time zone",
        "q": "text",
    }
    assert made == wanted
    assert database.execute("SELECT count(*) FROM made_here") == [(1,)]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_the_last_row_of_a_key_counts(
    database: PostgresServer, new_table: NewTable, guarantee: Any
) -> None:
    table = new_table()
    database.execute(f"INSERT INTO {table} VALUES (1, 'old'), (4, 'kept'), (5, 'old')")
    sink = postgres_sink(
        database.dsn, table, mode="upsert", key=["id"], op="op", guarantee=guarantee
    )
    rows = [
        ("insert", 1, "first"),
        ("insert", 2, "first"),
        ("delete", 2, None),
        ("update", 1, "second"),
        ("delete", 3, None),
        ("insert", 3, "again"),
        ("delete", 5, None),
    ]
    given = [
        batch(op=[op], id=pa.array([key], pa.int64()), name=pa.array([name], pa.string()))
        for op, key, name in rows
    ]
    run(written(sink, *given))
    found = database.execute(f"SELECT id, name FROM {table} ORDER BY id")
    assert found == [(1, "second"), (3, "again"), (4, "kept")]


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("collation", ['"C"', "ignoring_case"])
def test_keys_are_compared_as_the_table_compares_them(
    database: PostgresServer, new_table: NewTable, guarantee: Any, collation: str
) -> None:
    database.execute(
        "CREATE COLLATION IF NOT EXISTS ignoring_case "
        "(provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
    )
    table = new_table(f"id text COLLATE {collation} PRIMARY KEY, name text")
    database.execute(f"INSERT INTO {table} VALUES ('b', 'old')")
    sink = postgres_sink(database.dsn, table, mode="upsert", key="id", op="op", guarantee=guarantee)
    rows = batch(op=["insert", "insert", "delete"], id=["a", "A", "b"], name=["1", "2", "3"])
    run(written(sink, rows))
    found = database.execute(f"SELECT name FROM {table} ORDER BY name")
    assert found == ([("1",), ("2",)] if collation == '"C"' else [("2",)])


def test_many_rows_travel_in_several_transactions(
    database: PostgresServer, new_table: NewTable
) -> None:
    """With a small buffer the writer waits, and the rows of an epoch appear all at once."""
    table = new_table()

    async def scenario() -> None:
        rows = [
            batch(id=list(range(at, at + 100)), name=["x" * 50] * 100) for at in range(0, 5000, 100)
        ]
        sink = postgres_sink(database.dsn, table, guarantee="exactly_once", buffer="10kb")
        writer = await opened(sink, rows[0])
        for each in rows:
            writer.write(each)
        committables = await prepared(writer)
        assert database.execute(f"SELECT count(*) FROM {table}") == [(0,)]
        await asyncio.to_thread(writer.commit, committables, PERMIT)
        assert database.execute(f"SELECT count(*), sum(id) FROM {table}") == [(5000, 12497500)]
        writer.close()

    run(scenario())


# -- mistakes -----------------------------------------------------------------------------------------


def refused(sink: PostgresSink, like: ColumnBatch) -> str:
    """Return the error that comes before the first row, in the coordinator and in a restored writer."""

    def start() -> None:
        sink.bind(like.data.schema)
        sink.check_output(SinkRun("job", "sink", {}, None, print))

    with pytest.raises(HeadgateError) as first:
        start()
    if not isinstance(first.value, PlanError):
        with pytest.raises(HeadgateError) as second:
            run(opened(sink, like))
        assert second.value.message == first.value.message
    return str(first.value)


LIKE = batch(id=pa.array([1], pa.int64()), name=pa.array(["x"]))


@pytest.mark.parametrize(
    ("columns", "options", "told"),
    [
        ("id bigint", {}, "column=`name`"),
        ("id bigint, name integer", {}, "has=`integer` stream=`string`"),
        ("id bigint, name text", {"mode": "upsert", "key": "id"}, "CREATE UNIQUE INDEX"),
        ("id bigint, name text, more text NOT NULL", {}, "column=`more`"),
        ("id bigint, name text GENERATED ALWAYS AS ('x') STORED", {}, "computes"),
        ("id bigint, name text", {"mode": "upsert", "key": "no"}, "key=`no`"),
        (
            "id bigint, name text",
            {"guarantee": "exactly_once", "staging_schema": "nowhere"},
            "CREATE SCHEMA nowhere",
        ),
    ],
)
def test_a_table_that_does_not_fit(
    database: PostgresServer, new_table: NewTable, columns: str, options: Any, told: str
) -> None:
    assert told in refused(postgres_sink(database.dsn, new_table(columns), **options), LIKE)


def test_missing_rights(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table()
    database.execute(
        "DO $$ BEGIN CREATE ROLE writer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
        "CREATE SCHEMA IF NOT EXISTS closed",
    )
    dsn = database.dsn.replace("postgres@", "writer@")
    append = postgres_sink(dsn, table, guarantee="exactly_once")
    assert "GRANT INSERT ON" in refused(append, LIKE)
    database.execute(f"GRANT INSERT ON {table} TO writer")
    assert "GRANT CREATE ON SCHEMA public" in refused(append, LIKE)
    database.execute("GRANT USAGE ON SCHEMA closed TO writer")
    elsewhere = postgres_sink(dsn, table, guarantee="exactly_once", staging_schema="closed")
    assert "GRANT CREATE ON SCHEMA closed" in refused(elsewhere, LIKE)
    database.execute("GRANT CREATE ON SCHEMA closed TO writer")
    run(written(elsewhere, LIKE))
    upsert = postgres_sink(dsn, table, mode="upsert", key="id")
    assert "right to SELECT" in refused(upsert, LIKE)


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (
        {"mode": "upsert"},
        {"key": "id"},
        {"mode": "replace"},
        {"create": "always"},
        {"guarantee": "twice"},
        {"on_lost": "cry"},
        {"mode": "upsert", "key": ["a", "a"]},
    ):
        with pytest.raises(UsageError):
            postgres_sink("postgresql://host/db", "t", **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no server"):
        postgres_sink("", "t")
    with pytest.raises(PlanError, match="Python objects"):
        postgres_sink("postgresql://host/db", "t").bind(None)
    with pytest.raises(PlanError, match="no type"):
        postgres_sink("postgresql://host/db", "t").bind(pa.schema([("d", pa.duration("s"))]))
    sink = postgres_sink("postgresql://ann:geheim@host/db", "t", password="env:NO_SUCH_SECRET")
    assert "geheim" not in repr(sink.settings)
    sink.bind(LIKE.data.schema)
    assert "geheim" not in sink.place
    with pytest.raises(UsageError, match="NO_SUCH_SECRET"):
        sink.check_output(SinkRun("job", "sink", {}, None, print))


def test_secrets_are_read_where_the_client_runs(
    database: PostgresServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = new_table()
    (tmp_path / "dsn").write_text(f"{database.dsn}\n")
    monkeypatch.setenv("THE_DSN", database.dsn)
    run(written(postgres_sink(f"file:{tmp_path}/dsn", table), LIKE))
    run(written(postgres_sink("env:THE_DSN", table, mode="upsert", key="id"), LIKE))
    assert database.execute(f"SELECT * FROM {table}") == [(1, "x")]


def test_bad_rows_end_the_attempt(database: PostgresServer, new_table: NewTable) -> None:
    table = new_table("id smallint PRIMARY KEY, name text")
    sink = postgres_sink(database.dsn, table, mode="upsert", key="id", guarantee="exactly_once")

    async def scenario() -> None:
        writer = await opened(sink, LIKE)
        with pytest.raises(DataError, match="no value in a column of the key"):
            writer.write(batch(id=pa.array([None], pa.int64()), name=["x"]))
        with pytest.raises(DataError, match="NUL"):
            writer.write(batch(id=[1], name=["x\0"]))
        writer.write(batch(id=[70_000], name=["too large"]))
        with pytest.raises(JobError, match="out of range"):
            await prepared(writer)
        with pytest.raises(JobError, match="out of range"):
            writer.write(LIKE)
        writer.close()

    run(scenario())


# -- staged rows --------------------------------------------------------------------------------------


def test_only_own_leftovers_are_dropped(database: PostgresServer, new_table: NewTable) -> None:
    table, another = new_table(), new_table()

    async def scenario() -> None:
        sink = postgres_sink(database.dsn, table, guarantee="exactly_once")
        neighbour = await opened(
            postgres_sink(database.dsn, another, guarantee="exactly_once"), LIKE
        )
        neighbour.write(LIKE)
        theirs = await prepared(neighbour)
        first = await opened(sink, LIKE)
        first.write(LIKE)
        kept = await prepared(first, 1)
        first.write(batch(id=[2], name=["y"]))
        await prepared(first, 2)
        other_subtask = await opened(sink, LIKE, subtask_index=1, parallelism=2)
        other_subtask.write(batch(id=[3], name=["z"]))
        await prepared(other_subtask, 2)
        assert len(staged(database)) == 4
        # Checkpoint 1 is restored. What was staged behind it is dead, except that of the other subtask.
        second = await opened(sink, LIKE, attempt=2, restored_checkpoint=1, parallelism=2)
        assert len(staged(database)) == 3
        await asyncio.to_thread(second.commit, kept, PERMIT)
        assert database.execute(f"SELECT id FROM {table}") == [(1,)]
        # Now subtask 1 does not exist any more.
        third = await opened(sink, LIKE, attempt=3, restored_checkpoint=0)
        assert len(staged(database)) == 1
        await asyncio.to_thread(neighbour.commit, theirs, PERMIT)
        assert staged(database) == []
        for writer in (neighbour, first, other_subtask, second, third):
            writer.close()

    run(scenario())


def test_a_chunk_is_not_sent_again_beside_its_first_sending(
    database: PostgresServer, new_table: NewTable
) -> None:
    """If the connection breaks in a commit, the server may still be busy with it."""
    sink = postgres_sink(database.dsn, new_table(), guarantee="exactly_once")
    sink.bind(LIKE.data.schema)
    with (
        connect(sink.settings.address, "first") as first,
        connect(sink.settings.address, "again") as again,
    ):
        target = checked_target(first, sink.settings)
        with first.transaction(), first.cursor() as cursor:
            target.create_staged(cursor, "hg_again")

        def send_again() -> None:
            with again.transaction(), again.cursor() as cursor:
                target.forget_rows(cursor, "hg_again", 5)
                cursor.execute("INSERT INTO hg_again VALUES (5, 1, 'x')")

        with first.transaction():
            first.execute("INSERT INTO hg_again VALUES (5, 1, 'x')")
            sending = begun(send_again)
            waiting = (
                "SELECT 1 FROM pg_stat_activity "
                "WHERE application_name = 'again' AND wait_event_type = 'Lock'"
            )
            while not (sending.done() or database.execute(waiting)):
                pass
        sending.result(GUARD_S)
        assert first.execute("SELECT count(*) FROM hg_again").fetchone() == (1,)
        target.drop_staged(first, "hg_again")


def test_a_commit_is_durable_also_if_the_server_would_not_wait(database: PostgresServer) -> None:
    for setting, wanted in [("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")]:
        options = f"-c synchronous_commit={setting}"
        with connect(Address(database.dsn), "test", options=options) as connection:
            assert connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)


def test_a_writer_that_was_closed_gives_no_committable(
    database: PostgresServer, new_table: NewTable
) -> None:
    """A closed writer drops what no checkpoint has, so no checkpoint may get it afterwards."""
    sink = postgres_sink(database.dsn, new_table("k int"), guarantee="exactly_once")
    before = staged(database)

    async def scenario() -> Any:
        writer: Any = await opened(sink, batch(k=[1]))
        writer.write(batch(k=[1, 2]))
        pre_commit = writer.roll(1)
        await asyncio.to_thread(writer._send_until, 1)  # as the thread for full chunks does
        assert len(staged(database)) == len(before) + 1
        writer.close()
        return pre_commit

    pre_commit = run(scenario())  # the loop ends behind the thread of `close`
    assert staged(database) == before
    with pytest.raises(JobError, match="was closed"):
        pre_commit()


def test_rows_that_vanished_are_an_error_and_never_silence(
    database: PostgresServer, new_table: NewTable, caplog: pytest.LogCaptureFixture
) -> None:
    table = new_table()

    async def scenario() -> None:
        sink = postgres_sink(database.dsn, table, guarantee="exactly_once")
        writer = await opened(sink, LIKE)
        writer.write(LIKE)
        lost = await prepared(writer)
        database.execute(*(f"DROP TABLE {name}" for name in staged(database)))
        with pytest.raises(JobError, match="no mark that they were committed"):
            await asyncio.to_thread(writer.commit, lost, PERMIT)
        writer.write(LIKE)
        marked = await prepared(writer, 2)
        database.execute(f"DELETE FROM {MARKERS}")
        with pytest.raises(JobError, match="no mark that they were committed"):
            await asyncio.to_thread(writer.commit, marked, PERMIT)
        tolerant = postgres_sink(database.dsn, table, guarantee="exactly_once", on_lost="skip")
        other = await opened(tolerant, LIKE)
        await asyncio.to_thread(other.commit, lost, PERMIT)
        assert "goes on without rows" in caplog.text
        database.execute(*(f"DROP TABLE {name}" for name in staged(database)))
        writer.close()
        other.close()

    run(scenario())


def test_the_server_is_killed_between_both_phases(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table()

    async def scenario() -> None:
        sink = postgres_sink(database.dsn, table, guarantee="exactly_once")
        writer = await opened(sink, LIKE)
        writer.write(LIKE)
        committables = await prepared(writer)
        await asyncio.to_thread(database.kill)
        await asyncio.to_thread(database.start)
        assert database.execute(f"SELECT count(*) FROM {table}") == [(0,)]
        successor = await opened(sink, LIKE, attempt=2, restored_checkpoint=1)
        for each in (successor, writer, successor):
            await asyncio.to_thread(each.commit, committables, PERMIT)
            assert database.execute(f"SELECT count(*) FROM {table}") == [(1,)]
        writer.close()
        successor.close()

    run(scenario())


def test_writers_of_the_same_rows_do_not_stop_each_other(
    database: PostgresServer, new_table: NewTable
) -> None:
    """They lock the rows in the order of the key, or try again."""
    table = new_table()

    async def scenario() -> None:
        sink = postgres_sink(database.dsn, table, mode="upsert", key="id", guarantee="exactly_once")
        writers = [await opened(sink, LIKE, subtask_index=n, parallelism=4) for n in range(4)]
        for number, writer in enumerate(writers):
            ids = list(range(2000)) if number % 2 else list(range(1999, -1, -1))
            writer.write(batch(id=ids, name=[str(number)] * 2000))
        committables = [await prepared(writer) for writer in writers]
        await asyncio.gather(
            *(
                asyncio.to_thread(writer.commit, own, PERMIT)
                for writer, own in zip(writers, committables, strict=True)
            )
        )
        assert database.execute(f"SELECT count(*), count(DISTINCT name) FROM {table}") == [
            (2000, 1)
        ]
        for writer in writers:
            writer.close()

    run(scenario())


# -- jobs ---------------------------------------------------------------------------------------------


def test_a_job_whose_server_is_killed(
    database: PostgresServer, new_table: NewTable, tmp_path: Path
) -> None:
    table = new_table("n bigint")
    job = hg.Job("rows", parallelism=2)
    job.checkpoint(every="100ms", storage=str(tmp_path / "checkpoints"))
    rows = job.read(generator({"n": sequence()}, rows=6000, rate=3000, splits=2), name="rows")
    rows.write(postgres_sink(database.dsn, table, guarantee="exactly_once"), name="table")
    over = threading.Event()

    def trouble() -> None:
        while not over.is_set():
            if database.execute(f"SELECT count(*) FROM {table}")[0][0]:
                database.kill()
                database.start()
                return

    killer = begun(trouble)
    try:
        job.run()
    finally:
        over.set()
        killer.result()
    found = database.execute(f"SELECT count(*), count(DISTINCT n), sum(n) FROM {table}")
    assert found == [(6000, 6000, 17997000)]
    assert staged(database) == []


NESTED = {
    "list": pa.array([[1.0], [math.nan]]),
    "struct": pa.array([{"x": 1.0}, {"x": math.inf}]),
    "map": pa.array([[("a", 1.0)], [("a", -math.inf)]], pa.map_(pa.string(), pa.float64())),
    "deep": pa.array([[{"x": [1.0]}], [{"x": [None, math.nan]}]]),
}


@pytest.mark.parametrize("kind", NESTED)
def test_numbers_that_json_does_not_have_are_refused(
    database: PostgresServer, new_table: NewTable, kind: str
) -> None:
    table = new_table("id bigint, doc jsonb")
    sink, values = postgres_sink(database.dsn, table), NESTED[kind]
    ids = pa.array([1, 2])
    with pytest.raises(DataError, match=r"JSON has no such number column=`doc`.*(NaN|nan|inf)"):
        run(written(sink, batch(id=ids, doc=values)))
    hidden = values.slice(0, 1)
    run(written(sink, batch(id=ids.slice(0, 1), doc=hidden)))
    assert database.execute(f"SELECT count(*) FROM {table}") == [(1,)]


def test_a_locked_table_holds_up_its_stream_and_nothing_else(
    database: PostgresServer, new_table: NewTable
) -> None:
    """The writer says that it is backlogged instead of blocking the event loop of its worker."""
    table = new_table("id bigint, name text")
    rows = batch(id=pa.array(range(1000)), name=pa.array(["x" * 100] * 1000))
    sink = postgres_sink(database.dsn, table, buffer="10kb")

    async def write() -> None:
        writer = await opened(sink, rows)
        with psycopg.connect(database.dsn) as other:
            other.execute(f"LOCK TABLE {table}")
            writer.write(rows)
            writer.write(rows)
            assert writer.backlogged()
        while writer.backlogged():  # noqa: ASYNC110  a subtask is woken by a timer
            await asyncio.sleep(0.01)
        finish = writer.finish()
        assert finish is not None
        await asyncio.to_thread(finish)
        writer.close()

    run(write())
    assert database.execute(f"SELECT count(*) FROM {table}") == [(2000,)]


def test_a_job_goes_on_when_a_lock_is_released(
    database: PostgresServer, new_table: NewTable
) -> None:
    table = new_table("n bigint")
    job = hg.Job("locked")
    source = generator({"n": sequence()}, rows=20_000, batch_rows=1000)
    rows = job.read(source, name="rows")
    rows.write(postgres_sink(database.dsn, table, buffer="1kb", guarantee="none"), name="out")
    waiting = f"SELECT 1 FROM pg_locks WHERE relation = '{table}'::regclass AND NOT granted"

    def release() -> None:
        with psycopg.connect(database.dsn) as other:
            other.execute(f"LOCK TABLE {table}")
            locked.set()
            while not database.execute(waiting):
                pass

    locked = threading.Event()
    released = begun(release)
    if not locked.wait(60):
        released.result(0)  # it tells why
    job.run()
    released.result()
    assert database.execute(f"SELECT count(*), sum(n) FROM {table}") == [(20_000, 199_990_000)]
