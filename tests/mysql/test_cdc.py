"""The changes of a table come once and in order, wherever reading stops; what cannot be known is told."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest

import headgate as hg
from headgate.connectors import mysql_cdc_source, throttle
from headgate.connectors.mysql import cdc_reader
from headgate.connectors.mysql.cdc_model import Position
from headgate.connectors.mysql.cdc_source import CdcSource
from headgate.errors import HeadgateError, SourceError, StateError
from headgate.operators.connections import check_connection
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_all
from headgate.testing.servers.authority import Authority
from headgate.testing.servers.mariadb import MariaDbServer, running
from headgate.tests.support.changes import apply, rest, some
from headgate.tests.support.mysql_cases import ChangesSince, log_end
from headgate.tests.support.scenarios import guarded
from headgate.tests.support.skips import available
from headgate.tests.support.threads import begun

NewTable = Callable[..., str]
run = partial(guarded, seconds=120)
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))


def changes(database: MariaDbServer, table: str, **options: Any) -> CdcSource:
    """Return a source of the changes of a table, without its rows."""
    given: dict[str, Any] = {"snapshot": "never", "stop": "latest", **options}
    return mysql_cdc_source(database.url, table, **given)


def read_since(
    database: MariaDbServer, table: str, statements: list[str], **options: Any
) -> list[Any]:
    """Return the changes that statements make."""
    place = log_end(database)
    database.execute(*statements)
    return run(read_all(ChangesSince(changes(database, table, **options), place)))


# -- what a change is ---------------------------------------------------------------------------------


def test_changes_of_rows(database: MariaDbServer, new_table: NewTable) -> None:
    table = new_table()
    found = read_since(
        database,
        table,
        [
            f"INSERT INTO {table} VALUES (1, 'a'), (2, NULL)",
            f"UPDATE {table} SET name = 'ä' WHERE id = 1",
            f"UPDATE {table} SET id = 3 WHERE id = 2",
            f"DELETE FROM {table} WHERE id = 1",
            f"TRUNCATE {table}",
            f"INSERT INTO {table} VALUES (4, '')",
        ],
    )
    assert found == [
        {"op": "insert", "id": 1, "name": "a"},
        {"op": "insert", "id": 2, "name": None},
        {"op": "update", "id": 1, "name": "ä"},
        {"op": "delete", "id": 2, "name": None},
        {"op": "insert", "id": 3, "name": None},
        {"op": "delete", "id": 1, "name": "ä"},
        {"op": "truncate", "id": None, "name": None},
        {"op": "insert", "id": 4, "name": ""},
    ]


def test_rows_before_and_metadata(database: MariaDbServer, new_table: NewTable) -> None:
    table, other = new_table(), new_table()
    found = read_since(
        database,
        table,
        [
            f"INSERT INTO {table} VALUES (1, 'a')",
            f"INSERT INTO {other} VALUES (1, 'a')",
            f"UPDATE {table}, {other} SET {table}.name = 'b', {other}.name = 'c', {table}.id = 2",
            "BEGIN",
            f"UPDATE {table} SET name = 'c'",
            f"DELETE FROM {table}",
            "COMMIT",
        ],
        op="what",
        before="old_",
        metadata={"place": "place", "commit_time": "at", "gtid": "gtid"},
    )
    rows = [
        (each["what"], each["id"], each["name"], each["old_id"], each["old_name"]) for each in found
    ]
    assert rows == [
        ("insert", 1, "a", None, None),
        ("delete", 1, "a", 1, "a"),
        ("insert", 2, "b", None, None),
        ("update", 2, "c", 2, "b"),
        ("delete", 2, "c", 2, "c"),
    ]
    places = [each["place"] for each in found]
    assert places[0] < places[1] == places[2] < places[3] == places[4]
    assert len({each["gtid"] for each in found}) == 3
    assert all(each["gtid"].startswith("0-1-") and each["at"].tzinfo for each in found)


VALUES: dict[str, tuple[str, Any]] = {
    "tiny": ("-128", -128),
    "small": ("65535", 65535),
    "medium": ("-8388608", -8388608),
    "whole": ("4294967295", 4294967295),
    "big": ("18446744073709551615", 18446744073709551615),
    "born": ("1985", 1985),
    "price": ("-1234567.89", Decimal("-1234567.89")),
    "large": ("12345678901234567890123456789012345678901.5", "12345678901234567890123456789012345678901.5"),
    "ratio": ("0.1", 0.10000000149011612),
    "share": ("0.1", 0.1),
    "day": ("'2024-02-29'", date(2024, 2, 29)),
    "at": ("'2024-02-29 23:59:59.123456'", datetime(2024, 2, 29, 23, 59, 59, 123456)),
    "seen": ("'2024-02-29 23:59:59'", datetime(2024, 2, 29, 23, 59, 59, tzinfo=UTC)),
    "took": ("'-100:00:00.500'", "-100:00:00.500"),
    "flag": ("b'1'", True),
    "bits": ("b'1000000001'", 513),
    "size": ("'small'", "small"),
    "tags": ("'b,a'", "a,b"),
    "code": ("'ä\u20ac '", "ä\u20ac"),
    "note": ("'\U0001f600'", "\U0001f600"),
    "fixed": ("x'0102'", b"\1\2\0\0"),
    "raw": ("x'00ff00'", b"\0\xff\0"),
    "doc": ("'{\"a\": [1, null]}'", '{"a": [1, null]}'),
}  # fmt: skip
COLUMNS = """
id int PRIMARY KEY, tiny tinyint, small smallint unsigned, medium mediumint, whole int unsigned,
big bigint unsigned, born year, price decimal(10, 2), large decimal(45, 1), ratio float, share double,
day date, at datetime(6), seen timestamp NULL, took time(3), flag bit(1), bits bit(10),
size enum('small', 'large'), tags set('a', 'b'), code char(5), note text, fixed binary(4), raw blob,
doc json
"""
EDGES = {
    "tags": "''",
    "born": "0",
    "day": "'0000-00-00'",
    "at": "'0000-00-00'",
    "seen": "'0000-00-00'",
}
"""Values that are no dates."""


BYTES = {"fixed": "binary", "raw": "binary"}


def test_values_of_all_types(database: MariaDbServer, new_table: NewTable) -> None:
    """A row of the snapshot and a change have the same values, of the types of the table or as texts."""
    table = new_table(COLUMNS)
    literals = ", ".join(literal for literal, _ in VALUES.values())
    mode = "SET sql_mode = ''"
    names, values = ", ".join(EDGES), ", ".join(EDGES.values())
    edges = f"INSERT INTO {table} (id, {names}) VALUES (2, {values})"
    database.execute(mode, f"INSERT INTO {table} VALUES (1, {literals})", edges)

    async def read(source: CdcSource) -> list[Any]:
        reader = open_reader(source, source.splits(1))
        found = []
        while len(found) < 2:
            found += await some(reader, 1)
        database.execute(mode, f"DELETE FROM {table} WHERE id = 2", edges)
        database.execute(f"INSERT INTO {table} VALUES (3, {literals})")
        while len(found) < 5:
            found += await some(reader, 1)
        reader.close()
        return found

    for schema in (None, dict.fromkeys(("id", *VALUES), "string") | BYTES):
        source = changes(database, table, snapshot="initial", schema=schema, stop=None)
        first, strange, _, again, last = run(read(source))
        ids = (1, 2, 2, 3) if schema is None else ("1", "2", "2", "3")
        for row, op, id_ in zip(
            (first, strange, again, last), ("snapshot",) * 2 + ("insert",) * 2, ids, strict=True
        ):
            assert (row.pop("op"), row.pop("id")) == (op, id_)
        assert first == last
        assert strange == again
        if schema is None:
            assert first == {name: wanted for name, (_, wanted) in VALUES.items()}
            assert {name: value for name, value in strange.items() if value is not None} == {
                "born": 0, "tags": "",
            }  # fmt: skip
        database.execute(f"DELETE FROM {table} WHERE id = 3")


# -- where reading goes on ----------------------------------------------------------------------------


def test_reading_goes_on_inside_a_transaction(database: MariaDbServer, new_table: NewTable) -> None:
    table, other = new_table(), new_table()
    place = log_end(database)
    database.execute(
        f"INSERT INTO {table} VALUES (1, '1'), (2, '2'), (3, '3'), (4, '4'), (5, '5')",
        "FLUSH BINARY LOGS",
        f"INSERT INTO {other} VALUES (1, '1')",
        f"INSERT INTO {table} VALUES (6, '6')",
        "BEGIN",
        f"UPDATE {table} SET id = id + 100 WHERE id < 4",
        f"UPDATE {other} SET id = 2",
        f"DELETE FROM {table} WHERE id = 6",
        "COMMIT",
    )
    source = ChangesSince(changes(database, table, batch_rows=3), place)
    splits = source.splits(1)
    expected = run(read_all(source))
    assert len(expected) == 5 + 1 + 6 + 1

    async def stopped(batches: int) -> list[Any]:
        reader = open_reader(source, splits)
        found = await some(reader, batches)
        reader.rows_wanted = 2
        found += await some(reader, 1)
        positions = reader.snapshot()
        reader.close()
        return found + await rest(source, positions)

    for batches in range(5):
        assert run(stopped(batches)) == expected


def test_the_position_moves_while_others_write(
    database: MariaDbServer, new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdc_reader, "_WATCH_S", 0.0)
    table, busy = new_table(), new_table()
    source = changes(database, table, stop=None)

    async def scenario() -> None:
        reader = open_reader(source, source.splits(1))
        database.execute(
            f"INSERT INTO {busy} SELECT seq, seq FROM seq_1_to_1000", "FLUSH BINARY LOGS"
        )
        end = log_end(database)
        while msgspec.msgpack.decode(reader.snapshot()[0], type=Position).confirmed < end:
            assert reader.poll() is None
            await asyncio.sleep(0.02)
        while reader.lag_bytes() != 0:
            assert reader.poll() is None
            await asyncio.sleep(0.02)
        assert reader.lag_s() == 0
        reader.close()

    run(scenario())


# -- the table first ----------------------------------------------------------------------------------


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("seed", range(12 if THOROUGH else 1))
def test_the_table_and_its_changes_make_no_gap_and_no_double(
    database: MariaDbServer,
    new_table: NewTable,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    locked: bool,
) -> None:
    """Reading stops again and again while the table changes: also its keys, and rows on both sides.

    `locked`: the server does not tell the place of a transaction in its log, as MySQL.
    """
    if locked:
        query = cdc_reader.query

        def forgetful(connection: Any, statement: str) -> Any:
            return [] if "binlog_snapshot" in statement else query(connection, statement)

        monkeypatch.setattr(cdc_reader, "query", forgetful)
    table = new_table("id varchar(20) PRIMARY KEY, n int")
    database.execute(f"INSERT INTO {table} SELECT CONCAT('k', seq), 0 FROM seq_1_to_60")
    random_numbers, over = random.Random(seed), threading.Event()
    names = [f"k{n}" for n in range(1, 90)] + ["ä", "Z", "_", "K1"]

    def write() -> None:
        connection = pymysql.connect(
            host="127.0.0.1", port=database.port, user="root", database="shop"
        )
        with connection, connection.cursor() as cursor:
            while not over.is_set():
                for _ in range(random_numbers.randrange(1, 4)):
                    one, other = random_numbers.sample(names, 2)
                    statement = random_numbers.choice(
                        [
                            f"INSERT INTO {table} VALUES (%(a)s, 1) ON DUPLICATE KEY UPDATE n = n + 1",
                            f"UPDATE {table} SET n = n + 1 WHERE id = %(a)s",
                            f"DELETE FROM {table} WHERE id = %(a)s",
                            f"UPDATE IGNORE {table} SET id = %(b)s WHERE id = %(a)s",
                        ]
                    )
                    cursor.execute(statement, {"a": one, "b": other})
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
        position = msgspec.msgpack.decode(positions[0], type=Position)
        position.stop = log_end(database)
        bounded = changes(database, table, snapshot="initial")
        apply(state, await rest(bounded, [msgspec.msgpack.encode(position)]))
        return state

    writer = begun(write)
    try:
        state = run(scenario())
    finally:
        over.set()
        writer.result()
    rows = database.execute(f"SELECT id, n FROM {table}")
    assert {key: row["n"] for key, row in state.items()} == dict(rows)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("bigint unsigned", ["18446744073709551615", "9"]),
        ("decimal(20, 2)", ["-1.50", "10.25"]),
        ("binary(3)", ["x''", "x'0001'"]),
        ("date", ["'1999-12-31'", "'0999-01-01'"]),
        ("char(3)", ["'ö'", "'B'"]),
    ],
)
def test_keys_of_all_kinds(
    database: MariaDbServer, new_table: NewTable, kind: str, keys: list[str]
) -> None:
    """Reading goes on behind each key, and changes of rows that were read or not read are told apart."""
    table = new_table(f"id {kind}, part int, n int, PRIMARY KEY (id, part)")
    rows = ", ".join(f"({key}, {part}, 0)" for key in keys for part in (1, 2))
    database.execute(f"INSERT INTO {table} VALUES {rows}")
    source = changes(database, table, snapshot="initial", batch_rows=1)

    async def scenario() -> None:
        positions = source.splits(1)
        found: list[Any] = []
        for number in range(2 * len(keys)):
            reader = open_reader(source, positions)
            found += await some(reader, 1)
            positions = reader.snapshot()
            reader.close()
            database.execute(f"UPDATE {table} SET n = {number + 1}")
        position = msgspec.msgpack.decode(positions[0], type=Position)
        position.stop = log_end(database)
        found += await rest(source, [msgspec.msgpack.encode(position)])
        state: dict[Any, list[Any]] = {}
        for row in found:
            state.setdefault((row["id"], row["part"]), []).append((row["op"], row["n"]))
        assert len(state) == 2 * len(keys)
        for place, history in enumerate(state.values()):
            last = 2 * len(keys)
            assert history == [
                ("snapshot", place), *(("update", n) for n in range(place + 1, last + 1)),
            ]  # fmt: skip

    run(scenario())


# -- mistakes -----------------------------------------------------------------------------------------


def refused(make: Callable[[], CdcSource]) -> str:
    with pytest.raises(HeadgateError) as error:
        make().splits(1)
    return str(error.value)


def test_what_cannot_be_read_is_told_at_the_start(
    database: MariaDbServer, new_table: NewTable
) -> None:
    bare = new_table("id bigint, name text")
    assert "ADD PRIMARY KEY" in refused(lambda: changes(database, bare))
    table = new_table()
    assert "column=`no`" in refused(lambda: changes(database, table, schema={"no": "int64"}))
    assert "has=`bigint(20)`" in refused(
        lambda: changes(database, table, schema={"id": "list<int64>"})
    )
    odd = new_table("id double PRIMARY KEY, place point, old varchar(5) CHARACTER SET latin1")
    assert "type=`point`" in refused(lambda: changes(database, odd))
    assert "charset=`latin1`" in refused(lambda: changes(database, odd, schema={"old": "string"}))
    readable = {"id": "double"}
    first = refused(lambda: changes(database, odd, schema=readable, snapshot="initial"))
    assert "snapshot=`never`" in first
    plain = new_table()
    database.execute(f"ALTER TABLE {plain} ENGINE = MyISAM")
    assert "engine=`MyISAM`" in refused(lambda: changes(database, plain, snapshot="initial"))
    database.execute("CREATE OR REPLACE VIEW seen AS SELECT 1 AS id")
    assert "no plain table" in refused(lambda: changes(database, "seen"))


def test_rights_and_settings_of_the_server_are_checked(
    database: MariaDbServer, new_table: NewTable
) -> None:
    table = new_table()
    url = database.url.replace("root@", "ann:right@")
    ann = mysql_cdc_source(url, f"shop.{table}", schema={"id": "long"})
    database.execute("CREATE OR REPLACE USER ann@'127.0.0.1' IDENTIFIED BY 'right'")
    assert "Access denied" in refused(lambda: ann)
    database.execute("GRANT CREATE ON shop.* TO ann@'127.0.0.1'")
    assert "no right to read the log" in refused(lambda: ann)
    database.execute("GRANT REPLICATION SLAVE ON *.* TO ann@'127.0.0.1'")
    assert "REPLICATION CLIENT" in refused(lambda: ann)
    database.execute("GRANT REPLICATION CLIENT ON *.* TO ann@'127.0.0.1'")
    assert "SELECT" in refused(lambda: ann)
    database.execute(f"GRANT SELECT ON shop.{table} TO ann@'127.0.0.1'")
    assert "the log ends at mariadb-bin.0" in str(check_connection(ann, {}))
    source = changes(database, table)
    for name, wrong, right in (
        ("binlog_format", "MIXED", "ROW"),
        ("binlog_row_image", "MINIMAL", "FULL"),
        ("binlog_row_metadata", "MINIMAL", "FULL"),
    ):
        database.execute(f"SET GLOBAL {name} = {wrong}")
        try:
            assert f"{name}=`{wrong}`" in refused(lambda: source)
        finally:
            database.execute(f"SET GLOBAL {name} = {right}")


async def until_refused(
    source: CdcSource, positions: list[bytes]
) -> tuple[list[Any], list[bytes], str]:
    """Return what is read, the position, and the error that ends it."""
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


def test_changed_columns_are_an_error_with_a_way_on(
    database: MariaDbServer, new_table: NewTable
) -> None:
    table = new_table()
    live = changes(database, table, stop=None)
    positions = live.splits(1)
    database.execute(
        f"INSERT INTO {table} VALUES (1, 'a')",
        f"ALTER TABLE {table} ADD COLUMN more int FIRST",
        f"INSERT INTO {table} VALUES (2, 2, 'b')",
    )
    found, positions, refusal = run(until_refused(live, positions))
    assert "column `more` was added" in refusal
    assert found == [{"op": "insert", "id": 1, "name": "a"}]
    position = msgspec.msgpack.decode(positions[0], type=Position)
    position.stop = log_end(database)
    ending = [msgspec.msgpack.encode(position)]
    narrow = {"id": "int64", "name": "string"}
    ignoring = changes(database, table, schema=narrow, new_columns="ignore")
    assert run(rest(ignoring, ending)) == [{"op": "insert", "id": 2, "name": "b"}]
    wider = changes(database, table)
    assert run(rest(wider, ending)) == [{"op": "insert", "more": 2, "id": 2, "name": "b"}]
    whole = changes(database, table, stop=None)
    positions = whole.splits(1)
    database.execute(
        f"ALTER TABLE {table} DROP COLUMN more", f"INSERT INTO {table} VALUES (3, 'c')"
    )
    with pytest.raises(SourceError, match="column `more` was dropped"):
        run(rest(whole, positions))


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (["SET SESSION binlog_format = STATEMENT", "DELETE FROM {t}"], "by a statement"),
        (["SET SESSION binlog_row_image = MINIMAL", "UPDATE {t} SET name = 'b'"], "binlog_row_image"),
        (["XA START 'x'", "DELETE FROM {t}", "XA END 'x'", "XA PREPARE 'x'", "XA ROLLBACK 'x'"], "XA"),
        (["RENAME TABLE {t} TO {t}_old"], "renamed or replaced"),
        (["DROP TABLE {t}"], "dropped"),
    ],
)  # fmt: skip
def test_changes_that_the_log_does_not_have_are_an_error(
    database: MariaDbServer, new_table: NewTable, statements: list[str], reason: str
) -> None:
    table = new_table()
    database.execute(f"INSERT INTO {table} VALUES (1, 'a')")
    source = changes(database, table, stop=None)
    positions = source.splits(1)
    database.execute(*(each.format(t=table) for each in statements))
    found, _, refusal = run(until_refused(source, positions))
    assert reason in refusal
    assert found == []


def test_a_log_that_was_deleted_is_an_error(tmp_path: Path) -> None:
    with available(running(tmp_path / "server")) as database:
        database.execute("CREATE TABLE t (id bigint PRIMARY KEY, name text)")
        source = changes(database, "t")
        database.execute("INSERT INTO t VALUES (1, 'a')", "FLUSH BINARY LOGS")
        old = msgspec.msgpack.decode(source.splits(1)[0], type=Position)
        at_first = msgspec.structs.replace(old, confirmed=(1 << 32) | 400)
        database.execute("INSERT INTO t VALUES (2, 'b')")
        purge = f"PURGE BINARY LOGS TO 'mariadb-bin.{old.confirmed >> 32:06}'"
        while database.execute(purge, "SHOW BINARY LOGS")[0][0] == "mariadb-bin.000001":
            time.sleep(0.05)  # it may still be needed after a crash of the server
        position = msgspec.structs.replace(at_first, stop=log_end(database))
        positions = [msgspec.msgpack.encode(position)]
        with pytest.raises(
            SourceError, match="(?s)has deleted the part of its log.*on_lost=`skip`"
        ):
            run(rest(source, positions))
        skipping = changes(database, "t", on_lost="skip")
        assert run(rest(skipping, positions)) == [{"op": "insert", "id": 2, "name": "b"}]
        ahead = msgspec.structs.replace(old, confirmed=1 << 40, stop=1 << 50)
        with pytest.raises(SourceError, match="ends before the position"):
            run(rest(source, [msgspec.msgpack.encode(ahead)]))
        other = msgspec.structs.replace(old, system="server_uid=other")
        with pytest.raises(SourceError, match="not the one whose changes were read"):
            run(rest(source, [msgspec.msgpack.encode(other)]))
        endless = msgspec.structs.replace(old, stop=None)
        with pytest.raises(StateError, match="restored without an end"):
            run(rest(source, [msgspec.msgpack.encode(endless)]))

        live = changes(database, "t", stop=None)

        async def until_known() -> list[bytes]:
            reader = open_reader(live, live.splits(1))
            database.execute("INSERT INTO t VALUES (3, 'c')")
            await some(reader, 1)
            positions = reader.snapshot()
            reader.close()
            return positions

        known = run(until_known())
        number = msgspec.msgpack.decode(known[0], type=Position).confirmed >> 32
        database.execute("RESET MASTER", *["FLUSH BINARY LOGS"] * (number - 1))
        database.execute(*[f"INSERT INTO t VALUES ({n}, 'd')" for n in range(10, 30)])
        with pytest.raises(SourceError, match="was deleted \\(RESET MASTER\\)"):
            run(rest(live, known))


# -- jobs and secrets ---------------------------------------------------------------------------------


def test_a_table_is_copied_while_the_server_is_killed(
    database: MariaDbServer, new_table: NewTable, tmp_path: Path
) -> None:
    """The snapshot and the changes in one job, with two deaths of the server: no row twice, none lost."""
    table = new_table("id bigint PRIMARY KEY, n int")
    database.execute(f"INSERT INTO {table} SELECT seq, 0 FROM seq_1_to_1000")
    source = changes(database, table, snapshot="initial", batch_rows=100, stop=None)
    job = hg.Job("copies")
    job.checkpoint(every="50ms", storage=str(tmp_path / "checkpoints"))
    job.restart(hg.fixed_delay(attempts=20, delay="10ms"))
    rows = hg.connectors.collect(path=str(tmp_path / "rows"), guarantee="exactly_once")
    job.read(throttle(source, 2000), name="changes").write(rows, name="rows")
    state: dict[Any, Any] = {}

    def is_copied() -> bool:
        state.clear()
        apply(state, [_plain(row) for row in rows.rows])
        found = {key: row["n"] for key, row in state.items()}
        return found == dict(database.execute(f"SELECT id, n FROM {table}"))

    async def scenario() -> None:
        copying = asyncio.create_task(job.run_async())
        for number in range(1, 3):
            await asyncio.sleep(0.3)
            database.execute(
                f"UPDATE {table} SET n = {number} WHERE id % 3 = 0",
                f"DELETE FROM {table} WHERE id % 100 = {number}",
                f"UPDATE {table} SET id = id + 10000 WHERE id % 100 = 50 + {number}",
            )
            database.kill()
            database.start()
        while not is_copied():
            assert not copying.done(), copying.result()
            await asyncio.sleep(0.1)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)

    run(scenario())


def _plain(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else row._asdict()


def test_the_connection_is_encrypted_and_secrets_stay_secret(
    new_table: NewTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.issue("localhost")
    settings = {"ssl-cert": str(certificate), "ssl-key": str(key), "ssl-ca": str(authority.file)}
    with available(running(tmp_path / "server", settings)) as database:
        database.execute(
            "CREATE TABLE t (id bigint PRIMARY KEY)",
            "INSERT INTO t VALUES (1)",
            "CREATE USER ann@'127.0.0.1' IDENTIFIED BY 'no-password-of-ours' REQUIRE SSL",
            "GRANT ALL ON *.* TO ann@'127.0.0.1'",
        )
        monkeypatch.setenv("SHOP", f"mysql://ann@localhost:{database.port}/shop")
        secret = tmp_path / "secret"
        secret.write_text("no-password-of-ours\n")
        manifest = f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: shop}}
spec:
  sources:
    orders:
      mysqlCdc: {{url: "env:SHOP", table: t, stop: latest, tls: true, ca: {authority.file},
                  password: "file:{secret}"}}
  sinks:
    out: {{from: orders, json: {{path: {tmp_path}/out}}, guarantee: none}}
"""
        file = tmp_path / "job.yaml"
        file.write_text(manifest)
        load_job(file).run()
        [written] = (tmp_path / "out").glob("*.json")
        assert written.read_text() == '{"op":"snapshot","id":1}\n'
        source = mysql_cdc_source(
            "env:SHOP",
            "t",
            stop="latest",
            tls=True,
            ca=str(authority.file),
            password=f"file:{secret}",
        )
        assert run(read_all(source)) == [{"op": "snapshot", "id": 1}]
        assert "no-password" not in repr(source.settings)
        plain = mysql_cdc_source(
            "env:SHOP", "t", tls=True, password=f"file:{secret}", schema={"id": "long"}
        )
        with pytest.raises(SourceError, match="certificate") as error:
            plain.splits(1)
        assert "no-password" not in str(error.value)
