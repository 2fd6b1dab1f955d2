"""`http_source` and `sse_source`: answers that are cut, wrong or late, and jobs that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, http_source, sse_source
from headgate.connectors.http.events import Event, EventParser
from headgate.errors import BadRecordError, HeadgateError, SourceError, StorageError, UsageError
from headgate.operators.source import Source
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_all, read_batches
from headgate.tests.support.http_stub import Asked, Given, HttpStub

SCHEMA = pa.schema([("id", pa.int64())])
ROWS = [{"id": n} for n in range(5)]


@pytest.fixture
def stub() -> Iterator[HttpStub]:
    with HttpStub(lambda asked: (404, {}, b"nothing here")) as found:
        yield found


def read(source: Source) -> list[Any]:
    return asyncio.run(read_all(source))


def polled(stub: HttpStub, **options: Any) -> Source:
    given = {"stop": "latest", "longest_pause": "1ms", "retries": 2, **options}
    return http_source(f"{stub.url}/rows?token=s3cr3t", SCHEMA, **given)


@pytest.mark.parametrize(
    ("body", "items"),
    [
        (b'[{"id": 1}, {"id": 2}]', ""),
        (b'{"id": 1}\n\n{"id": 2}\n', ""),
        (b'{"data": {"rows": [{"id": 1}, {"id": 2, "more": {}}]}}', "data.rows"),
    ],
)
def test_forms_of_an_answer(stub: HttpStub, body: bytes, items: str) -> None:
    stub.answer = lambda asked: (200, {}, body)
    assert read(polled(stub, items=items)) == [{"id": 1}, {"id": 2}]
    assert len(stub.asked) == 1  # without a position one answer is all that there is


@pytest.mark.parametrize(
    "given", [(204, {}, b""), (304, {}, b""), (200, {}, b"[]"), (200, {}, b" ")]
)
def test_answers_without_records(stub: HttpStub, given: Given) -> None:
    stub.answer = lambda asked: given
    assert read(polled(stub)) == []


def rows_behind(rows: list[Any], most: int = 2) -> Callable[[Asked], Given]:
    def answer(asked: Asked) -> Given:
        query = parse_qs(urlsplit(asked.path).query)
        assert query["token"] == ["s3cr3t"]
        after = int(query.get("behind", ["-1"])[0])
        return 200, {}, json.dumps([row for row in rows if row["id"] > after][:most]).encode()

    return answer


def test_positions_are_asked_for_until_there_is_nothing_more(stub: HttpStub) -> None:
    stub.answer = rows_behind(ROWS)
    assert read(polled(stub, position="id", parameter="behind")) == ROWS
    assert [asked.path.partition("&")[2] for asked in stub.asked] == [
        "",
        *(f"behind={n}" for n in (1, 3, 4)),
    ]
    stub.asked.clear()
    assert read(polled(stub, position="id", parameter="behind", start=2)) == ROWS[3:]


def test_the_column_of_positions_need_not_be_read(stub: HttpStub) -> None:
    rows = [{"id": n, "name": f"n{n}"} for n in range(5)]
    stub.answer = rows_behind(rows)
    schema = {"id": "int64", "name": "string"}
    whole = http_source(
        f"{stub.url}/?token=s3cr3t", schema, position="id", parameter="behind", stop="latest"
    )
    assert read(whole.with_columns(["name"])) == [{"name": row["name"]} for row in rows]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (b'[{"id": 1}', SourceError, "no array of records"),
        (b'[{"id": "one"}]', BadRecordError, "record=`1 of 1`"),
        (b"[" + b'{"id": 1},' * 200 + b'{"id": 1}]', SourceError, "too large"),
        (b"not json", BadRecordError, "cannot be read"),
        (b'[{"id": 1}, {"id": 1}]', SourceError, "`1` comes after `1`"),
        (b'[{"id": null}]', SourceError, "has no position"),
        (b'[{"id": 3}]', SourceError, "`3` comes after `3`"),
    ],
)
def test_answers_that_cannot_be_read_fail(
    stub: HttpStub, body: bytes, error: type[Exception], message: str
) -> None:
    stub.answer = lambda asked: (200, {}, body)
    with pytest.raises(error, match=message) as failed:
        read(polled(stub, position="id", buffer=1000))
    assert "s3cr3t" not in str(failed.value)


def test_a_service_that_is_away_and_one_that_refuses(stub: HttpStub) -> None:
    with pytest.raises(SourceError, match="status 404: nothing here"):
        read(polled(stub))
    stub.answer = lambda asked: (503, {}, b"busy")
    stub.asked.clear()
    with pytest.raises(StorageError, match="tries=`3`: status 503: busy"):
        read(polled(stub))
    assert len(stub.asked) == 3
    stub.kill()
    with pytest.raises(UsageError, match="cannot be reached"):
        read(polled(stub))


@pytest.mark.parametrize("query", ["token=s3c%2Fr3t%20x", "a=b&token=s3c/r3t+x"])
def test_secrets_of_the_query_are_not_shown_in_other_spellings(stub: HttpStub, query: str) -> None:
    """The client spells the query in its own way, and the service may name a value alone."""
    spellings = ("s3c/r3t x", "s3c%2Fr3t%20x", "s3c/r3t%20x", "s3c%2Fr3t+x")
    source = http_source(f"{stub.url}/rows?{query}", SCHEMA, stop="latest", retries=0)
    stub.answer = lambda asked: (403, {}, ", ".join(("no such token", *spellings)).encode())
    with pytest.raises(SourceError, match="no such token") as refused:
        read(source)
    # The name of the header is wrong, and the client's error about it has the address.
    stub.answer = lambda asked: (200, {"bad header": "x"}, b"[]")
    with pytest.raises(StorageError, match="/rows") as broken:
        read(source)
    for shown in (str(refused.value), str(broken.value)):
        assert not [each for each in (*spellings, "r3t") if each in shown]


def test_a_reader_waits_and_is_closed_while_the_service_hangs(stub: HttpStub) -> None:
    async def run() -> None:
        source = polled(stub, stop=None, every="1h")
        stub.answer = lambda asked: (200, {}, b"[]")
        reader = open_reader(source, source.splits(1))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.wait(), 0.05)
        assert reader.poll() is None
        assert not reader.finished
        reader.close()

    asyncio.run(run())


# -- events ----------------------------------------------------------------------------------------


STREAM = (
    "\ufeffid: 1\ndata: one\n\n: a comment\nevent: add\ndata:two\r\ndata: lines\r\nid:2\r\n\r\n"
    "id: 3\n\ndata\n\nretry: 70\nid: 4\ndata: ä\rid: 5\r\r\n\ndata: unfinished\n"
).encode()
EVENTS = [
    Event(b"one", "1", True, "message"),
    Event(b"two\nlines", "2", True, "add"),
    Event(b"", "3", False, "message"),
    Event("ä".encode(), "5", True, "message"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_of_events_in_parts_of_any_size(size: int) -> None:
    parser = EventParser("", 1000)
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for part in parts for event in parser.feed(part)] == EVENTS
    assert parser.retry_ms == 70


def test_an_event_that_is_too_large_is_refused() -> None:
    for stream in (b"data: " + b"x" * 100, b"data: xxxxxxxx\n" * 20):
        parser = EventParser("", 50)
        parts = [stream[at : at + 7] for at in range(0, len(stream), 7)]
        with pytest.raises(ValueError, match="too large"):
            [event for part in parts for event in parser.feed(part)]


def stream_of(rows: list[Any], ids: bool = True) -> Callable[[Asked], Given]:
    """Return a service that gives two events a connection, and half of the next one."""

    def answer(asked: Asked) -> Given:
        after = int(asked.headers.get("last-event-id", "-1"))
        found = [row for row in rows if row["id"] > after][:2]
        if not found:
            return 204, {}, b""
        lines = []
        for row in found:
            kind = "even" if row["id"] % 2 == 0 else "odd"
            given = f"id: {row['id']}\n" if ids else ""
            lines.append(f"event: {kind}\n{given}data: {json.dumps(row)}\n\n".encode())
        half = b'id: 9999\ndata: {"id": 99'
        return 200, {"Content-Type": "text/event-stream; charset=utf-8"}, [*lines, half]

    return answer


def events(stub: HttpStub, **options: Any) -> Source:
    given = {"bounded": True, "longest_pause": "1ms", "retries": 2, **options}
    return sse_source(f"{stub.url}/events?token=s3cr3t", SCHEMA, **given)


def test_a_stream_that_is_cut_goes_on_behind_the_last_whole_event(stub: HttpStub) -> None:
    stub.answer = stream_of(ROWS)
    source = events(stub, metadata={"id": "event_id", "event": "kind"})
    assert read(source) == [
        {"id": n, "event_id": str(n), "kind": "odd" if n % 2 else "even"} for n in range(5)
    ]
    assert [asked.headers.get("last-event-id") for asked in stub.asked] == [None, "1", "3", "4"]
    assert read(source.with_columns(["kind"]))[1] == {"kind": "odd"}


def test_events_of_other_types_move_the_position_too(stub: HttpStub) -> None:
    stub.answer = stream_of(ROWS)
    assert read(events(stub, events=["odd"])) == [{"id": 1}, {"id": 3}]
    assert stub.asked[-1].headers["last-event-id"] == "4"
    assert read(events(stub, start="2")) == ROWS[3:]


def test_events_without_ids_need_a_word(stub: HttpStub) -> None:
    rows = ROWS[:2]
    stub.answer = stream_of(rows, ids=False)
    with pytest.raises(SourceError, match="has no id") as failed:
        read(events(stub))
    assert "replay=False" in failed.value.fix

    async def first() -> list[Any]:
        source = events(stub, replay=False, bounded=False)
        assert not source.replays
        reader = open_reader(source, source.splits(1))
        batches = await read_batches(reader, 1)
        position = reader.snapshot()
        reader.close()
        return [batches[0].data.to_pylist()[0], position]  # type: ignore[union-attr]

    found, position = asyncio.run(first())
    assert found == {"id": 0}
    assert b"9999" not in position[0]
    assert all("last-event-id" not in asked.headers for asked in stub.asked)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((401, {}, b"not you"), SourceError, "status 401: not you"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), SourceError, "status 302"),
        ((200, {"Content-Type": "text/html"}, b"hello"), SourceError, "text/html"),
        ((503, {}, b"busy"), StorageError, "tries=`3`: status 503: busy"),
        (
            (200, {"Content-Type": "text/event-stream"}, b"id: 1\ndata: no\n\n"),
            BadRecordError,
            "record=`1 of 1`",
        ),
    ],
)
def test_streams_that_cannot_be_read_fail(
    stub: HttpStub, given: Given, error: type[Exception], message: str
) -> None:
    stub.answer = lambda asked: given
    with pytest.raises(error, match=message) as failed:
        read(events(stub))
    assert "s3cr3t" not in str(failed.value)


def test_an_event_with_an_empty_id_has_none(stub: HttpStub) -> None:
    """An empty id resets the position, and the service would give all events again."""
    head = {"Content-Type": "text/event-stream"}
    stub.answer = lambda asked: (200, head, b'id: 1\ndata: {"id": 1}\n\nid:\ndata: {"id": 2}\n\n')
    with pytest.raises(SourceError, match="has no id"):
        read(events(stub))


def test_a_silent_stream_is_left_and_read_again(stub: HttpStub) -> None:
    served = stream_of(ROWS)

    def answer(asked: Asked) -> Given:
        if len(stub.asked) > 4:
            return served(asked)
        return 200, {"Content-Type": "text/event-stream", "Content-Length": "100"}, [b": wait\n"]

    stub.answer = answer
    assert read(events(stub, silence="50ms", retries=1000)) == ROWS


# -- jobs ------------------------------------------------------------------------------------------


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: services}}
spec:
  checkpoint: {{every: 1s, storage: {folder}/state}}
  sources:
    rows:
      schema: {{id: long}}
      http:
        url: "{url}/rows?token=s3cr3t"
        position: id
        parameter: behind
        start: "-1"
        every: 1s
        stop: latest
        headers: {{X-From: headgate}}
    events:
      schema: {{id: long}}
      sse:
        url: {url}/events
        events: [even, odd]
        metadata: {{event: kind}}
        bounded: true
        longestPause: 10ms
  sinks:
    rows_out: {{from: rows, json: {{path: {folder}/rows}}, guarantee: exactly_once}}
    events_out: {{from: events, json: {{path: {folder}/events}}, guarantee: exactly_once}}
"""


def test_a_manifest(stub: HttpStub, tmp_path: Path) -> None:
    by_path = {"/rows": rows_behind(ROWS), "/events": stream_of(ROWS)}
    stub.answer = lambda asked: by_path[urlsplit(asked.path).path](asked)
    job = load_job(MANIFEST.format(url=stub.url, folder=tmp_path))
    assert "cannot be read again" not in job.explain()
    assert job.run().status == "FINISHED"
    found = {
        name: [
            json.loads(line)
            for file in (tmp_path / name).glob("*.json")
            for line in file.read_text().splitlines()
        ]
        for name in ("rows", "events")
    }
    assert sorted(row["id"] for row in found["rows"]) == list(range(5))
    assert sorted(row["kind"] for row in found["events"]) == ["even"] * 3 + ["odd"] * 2


class FailsOnce:
    """Fails in the first attempt, when it has seen some records."""

    def open(self, ctx: Any) -> None:
        self.fails = ctx.attempt_number == 1

    def __call__(self, row: Any) -> bool:
        if self.fails and row.id == 30:
            raise ValueError("not yet")
        return True


@pytest.mark.parametrize("kind", ["rows", "events"])
def test_a_job_that_fails_reads_each_record_once(stub: HttpStub, tmp_path: Path, kind: str) -> None:
    rows = [{"id": n} for n in range(60)]
    stub.answer = rows_behind(rows) if kind == "rows" else stream_of(rows)
    source = polled(stub, position="id", parameter="behind") if kind == "rows" else events(stub)
    out = collect(path=str(tmp_path / "out"), guarantee="exactly_once")
    job = hg.Job("services")
    job.restart(3, "0s")
    job.checkpoint(every="10ms", storage=str(tmp_path / "state"))
    job.read(source, name="in").filter(FailsOnce()).write(out, name="out")
    assert job.run().status == "FINISHED"
    assert sorted(row["id"] for row in out.rows) == list(range(60))


def test_a_source_that_cannot_be_read_again_is_named(
    stub: HttpStub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.answer = lambda asked: (200, {}, b'[{"id": 1}]')
    job = hg.Job("services")
    out = collect(guarantee="none")
    job.read(polled(stub), name="in").write(out, name="out")
    text = "`in` (http(http://127.0.0.1"
    assert text in job.explain()
    assert "loses its records since the last checkpoint" in job.explain()
    job.run()
    assert any(text in record.message for record in caplog.records)
    assert out.rows == [{"id": 1}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: http_source("http://host/", SCHEMA, position="no"), "no such column"),
        (lambda: http_source("http://host/", {"at": "double"}, position="at"), "whole number or a"),
        (lambda: http_source("http://host/", SCHEMA, start=3), "start is a position"),
        (lambda: http_source("host", SCHEMA), "not an address"),
        (lambda: http_source("http://host/", SCHEMA, stop="earliest"), "place to stop"),  # type: ignore[arg-type]
        (lambda: http_source("http://host/", SCHEMA, every="0s"), "every"),
        (lambda: sse_source("http://host/"), "the source needs a schema"),
        (lambda: sse_source("http://host/", SCHEMA, metadata={"key": "k"}), "no such metadata"),
        (lambda: sse_source("http://host/", SCHEMA, metadata={"id": "id"}), "same name"),
        (lambda: sse_source("http://host/", SCHEMA, replay=False, start="3"), "no ids to start"),
        (lambda: sse_source("http://host/", SCHEMA, headers={"Accept": "x"}), "sets this header"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Callable[[], Source], message: str) -> None:
    with pytest.raises(HeadgateError, match=message):
        make()


def test_connections_that_are_answered_and_silent_are_no_failures(stub: HttpStub) -> None:
    served = stream_of(ROWS)

    def answer(asked: Asked) -> Given:
        if len(stub.asked) > 4:
            return served(asked)
        return 200, {"Content-Type": "text/event-stream"}, [b": nothing yet\n"]

    stub.answer = answer
    assert read(events(stub, retries=2)) == ROWS
