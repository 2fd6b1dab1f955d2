"""The source of Redis: where it begins and ends, what it says of lost entries, and the forms of entries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors import redis_source
from headgate.errors import SourceError, StateError, UsageError
from headgate.operators.drops import DropKind
from headgate.operators.source import Source
from headgate.testing.connectors import (
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.redis import RedisServer, running

NewStream = Callable[[], str]
SCHEMA = {"id": "int64", "name": "string"}


def add(client: Any, stream: str, *numbers: int) -> list[str]:
    return [client.xadd(stream, {"id": n}, id=f"1000-{n}").decode() for n in numbers]


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


def source_of(server: RedisServer, stream: str, **options: Any) -> Source:
    given: dict[str, Any] = {"url": server.url, "schema": SCHEMA, "stop": "latest"}
    return redis_source(stream, **(given | options))


def read(source: Source) -> list[Any]:
    return asyncio.run(read_all(source))


def test_it_begins_and_ends_where_it_is_told(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    for n in range(6):
        client.xadd(stream, {"id": n}, id=f"{1000 + n}-0")

    def found(**options: Any) -> list[int]:
        return ids(read(source_of(server, stream, **options)))

    assert found() == [0, 1, 2, 3, 4, 5]
    assert found(start={stream: "1002-0"}) == [3, 4, 5]
    assert found(start=1002) == [2, 3, 4, 5]
    assert found(start=datetime(1970, 1, 1, 0, 0, 1, 4_000, tzinfo=UTC)) == [4, 5]
    assert found(start=9_000) == []
    assert found(start="latest") == []
    assert found(stop={stream: "1002-0"}) == [0, 1, 2]
    assert found(start=1001, stop=1003) == [1, 2]
    with pytest.raises(UsageError, match="no such entry"):
        found(start={stream: "9000-0"})


def test_payloads_in_a_field_and_metadata(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    client.xadd(stream, {"body": '{"id": 1, "name": "a"}', "other": "x"}, id="1000-7")
    metadata = {"stream": "from", "id": "entry", "timestamp": "at"}
    source = source_of(server, stream, format="json", field="body", metadata=metadata)
    assert read(source) == [
        {
            "id": 1,
            "name": "a",
            "from": stream,
            "entry": "1000-7",
            "at": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        }
    ]
    assert read(source.with_columns(["entry"])) == [{"entry": "1000-7"}]


def test_fields_of_all_types(server: RedisServer, client: Any, new_stream: NewStream) -> None:
    stream = new_stream()
    client.xadd(
        stream,
        {"f": "1.5", "b": "true", "t": "2026-01-31T12:00:00Z", "raw": b"\xff", "d": "2026-01-31"},
    )
    client.xadd(stream, {"f": "2"})
    schema = {"f": "double", "b": "bool", "raw": "binary", "d": "date", "t": "timestamp"}
    first, second = read(source_of(server, stream, schema=schema))
    assert (first["f"], first["b"], first["raw"], str(first["t"])) == (
        *(1.5, True, b"\xff", "2026-01-31 12:00:00+00:00"),
    )
    assert str(first["d"]) == "2026-01-31"
    assert (second["f"], second["b"]) == (2.0, None)


def test_entries_that_were_trimmed_are_an_error_or_skipped(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    add(client, stream, *range(1, 11))

    async def read_on(trim: Callable[[], None], on_lost: str) -> tuple[list[int], int]:
        source = source_of(server, stream, batch_rows=1, buffer=1, on_lost=on_lost)
        reader = open_reader(source, source.splits(1))
        assert len(await read_batches(reader, 2)) == 2
        positions = reader.snapshot()
        reader.close()
        trim()
        context = make_context()
        reader = open_reader(source, positions, context)
        try:
            rows = [row for batch in await read_batches(reader) for row in records_of(batch)]
        finally:
            reader.close()
        return ids(rows), context.drops.counts.get(DropKind.DELETED, 0)

    def trimmed(minimum: str) -> Callable[[], None]:
        return lambda: client.xtrim(stream, minid=minimum, approximate=False)

    assert asyncio.run(read_on(trimmed("1000-3"), "fail"))[0] == [3, 4, 5, 6, 7, 8, 9, 10]
    add(client, stream, 11)  # the first two are gone, and nothing is lost of what follows them
    with pytest.raises(SourceError, match="4 entries after 1000-4 were deleted"):
        asyncio.run(read_on(trimmed("1000-9"), "fail"))
    assert asyncio.run(read_on(trimmed("1000-11"), "skip")) == ([11], 0)
    add(client, stream, 12, 13, 14, 15, 16)
    assert asyncio.run(read_on(trimmed("1000-15"), "skip")) == ([15, 16], 2)


def test_entries_that_were_deleted_one_by_one_are_no_loss(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    add(client, stream, *range(1, 7))
    client.xdel(stream, "1000-3")

    async def read_on() -> list[int]:
        source = source_of(server, stream, batch_rows=1, buffer=1)
        reader = open_reader(source, source.splits(1))
        rows = [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        positions = reader.snapshot()
        reader.close()
        client.xdel(stream, "1000-5")
        reader = open_reader(source, positions)
        rows += [row for batch in await read_batches(reader) for row in records_of(batch)]
        reader.close()
        return ids(rows)

    assert asyncio.run(read_on()) == [1, 2, 4, 6]


def test_another_stream_of_the_same_name_is_an_error(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    add(client, stream, 5, 6)
    source = source_of(server, stream, start={stream: "1000-5"})
    splits = source.splits(1)
    client.delete(stream)

    async def read_on() -> None:
        reader = open_reader(source, splits)
        try:
            await read_batches(reader)
        finally:
            reader.close()

    with pytest.raises(SourceError, match="deleted and created again"):
        asyncio.run(read_on())


@pytest.mark.parametrize("on_lost", ["fail", "skip"])
def test_another_stream_with_higher_ids_is_a_loss(
    server: RedisServer, client: Any, new_stream: NewStream, on_lost: str
) -> None:
    """Entries of the first stream were not read, and the counters of the second know nothing of them."""
    stream = new_stream()
    add(client, stream, *range(1, 7))

    async def read_on() -> tuple[list[int], int]:
        source = source_of(server, stream, batch_rows=1, buffer=1, on_lost=on_lost)
        reader = open_reader(source, source.splits(1))
        assert len(await read_batches(reader, 3)) == 3
        positions = reader.snapshot()
        reader.close()
        client.delete(stream)
        add(client, stream, 5, 8)  # the source ends at 1000-6
        context = make_context()
        reader = open_reader(source, positions, context)
        try:
            rows = [row for batch in await read_batches(reader) for row in records_of(batch)]
        finally:
            reader.close()
        return ids(rows), context.drops.counts.get(DropKind.DELETED, 0)

    if on_lost == "skip":
        assert asyncio.run(read_on()) == ([5], 1)
    else:
        with pytest.raises(SourceError, match="forgotten entries .* created again"):
            asyncio.run(read_on())


def test_positions_with_an_end_need_one(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    add(client, stream, 1)
    splits = source_of(server, stream).splits(1)

    async def restore() -> None:
        open_reader(source_of(server, stream, stop=None), splits)

    with pytest.raises(StateError, match="no stop= any more"):
        asyncio.run(restore())


def test_a_stream_that_does_not_exist(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    with pytest.raises(SourceError, match=stream):
        read(source_of(server, stream))
    assert read(source_of(server, stream, on_missing="wait")) == []
    client.set(stream, "text")
    with pytest.raises(SourceError, match="WRONGTYPE"):
        read(source_of(server, stream))


def test_large_entries_are_fetched_few_at_a_time(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    for n in range(30):
        client.xadd(stream, {"id": n, "name": "x" * 100_000})

    async def waiting() -> int:
        source = source_of(server, stream, buffer="400kb")
        reader: Any = open_reader(source, source.splits(1))
        # The first request does not know the size of entries; the others do.
        rows = sum(map(len, await read_batches(reader)))
        count = int(reader._count)
        reader.close()
        assert rows == 30
        return count

    assert asyncio.run(waiting()) <= 1


def test_paused_streams_wait_and_others_go_on(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    first, second = new_stream(), new_stream()
    for stream in (first, second):
        client.xadd(stream, {"id": 0}, id="999-0")

    async def run() -> None:
        source = redis_source(
            [first, second], url=server.url, schema=SCHEMA, metadata={"stream": "from"}
        )
        reader = open_reader(source, source.splits(1))
        assert sum(map(len, await read_batches(reader, 2))) == 2
        reader.pause_splits(frozenset({first}))
        add(client, first, 1)
        add(client, second, 2)
        (batch,) = await read_batches(reader, 1)
        assert ids(records_of(batch)) == [2]
        reader.pause_splits(frozenset())
        (batch,) = await read_batches(reader, 1)
        assert ids(records_of(batch)) == [1]
        reader.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_only_the_wanted_rows_and_their_positions(
    server: RedisServer, client: Any, new_stream: NewStream
) -> None:
    stream = new_stream()
    add(client, stream, *range(1, 11))

    async def run() -> list[int]:
        source = source_of(server, stream)
        reader = open_reader(source, source.splits(1))
        reader.rows_wanted = 3
        (batch,) = await read_batches(reader, 1)
        found = ids(records_of(batch))
        positions = reader.snapshot()
        reader.close()
        reader = open_reader(source, positions)
        for each in await read_batches(reader):
            found += ids(records_of(each))
        reader.close()
        return found

    assert asyncio.run(run()) == list(range(1, 11))


def test_secrets_are_read_where_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "server", "--requirepass", "very secret") as own:
        with own.client() as client:
            client.xadd("orders", {"id": 1})
        (tmp_path / "password").write_text("very secret\n")
        monkeypatch.setenv("REDIS_URL", own.url)
        for options in (
            {"url": own.url, "password": f"file:{tmp_path / 'password'}"},
            {"url": "env:REDIS_URL", "password": "very secret"},
            {"url": own.url.replace("//", "//:very%20secret@")},
        ):
            source = source_of(own, "orders", **options)
            assert ids(read(source)) == [1]
            assert "secret" not in repr(source.settings) + source.describe()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url", ["", "host:6379", "redis://:pass/word@host", "redis://host/0?password=x", "http://host"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as error:
        redis_source("orders", url=url, schema=SCHEMA)
    assert "word" not in str(error.value).replace("password", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": None}, "no types"),
        ({"format": "xml"}, "no such format"),
        ({"schema": {"x": "list<int64>"}}, "cannot be a field"),
        ({"metadata": {"offset": "o"}}, "no such metadata"),
        ({"metadata": {"id": "name"}}, "same name"),
        ({"start": "first"}, "not a position"),
        ({"start": {"orders": "x"}}, "not the id"),
        ({"start": {"other": "1-0"}}, "not read"),
        ({"stop": datetime(2026, 1, 1)}, "time zone"),
        ({"on_lost": "ignore"}, "no such policy"),
        ({"on_missing": "ignore"}, "no such policy"),
        ({"batch_rows": 0}, "at least 1"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        redis_source("orders", **({"url": "redis://host", "schema": SCHEMA} | options))


def test_a_cluster(cluster: RedisServer) -> None:
    with cluster.client() as client:
        add(client, "a", 1, 2)
        add(client, "b", 3)
    source = redis_source(["a", "b"], url=cluster.url, schema=SCHEMA, stop="latest", cluster=True)
    assert sorted(ids(read(source))) == [1, 2, 3]
