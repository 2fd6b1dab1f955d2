"""`websocket_source`: messages of every kind, connections that end, and services that refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import WSMessage, WSMsgType, web

from headgate.connectors import websocket_source
from headgate.connectors.http.websocket import _Waiting
from headgate.errors import BadRecordError, HeadgateError, SourceError, StorageError, UsageError
from headgate.operators.source import Source
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_all, read_batches
from headgate.testing.servers.authority import Authority
from headgate.tests.support.websocket_stub import Connected, WebSocketStub, talking

SCHEMA = pa.schema([("id", pa.int64())])
ROWS = [{"id": n} for n in range(5)]


async def all_rows(connected: Connected) -> None:
    """Send all rows, as texts and as bytes in turn."""
    for row in ROWS:
        if row["id"] % 2:
            await connected.send_bytes(json.dumps(row).encode())
        else:
            await connected.send_str(json.dumps(row))


def messages(stub: WebSocketStub, **options: Any) -> Source:
    given = {"bounded": True, "longest_pause": "1ms", "retries": 2, **options}
    return websocket_source(f"{stub.url}/prices?token=s3cr3t", SCHEMA, **given)


def read(source: Source) -> list[Any]:
    return asyncio.run(asyncio.wait_for(read_all(source), 60))


@pytest.mark.parametrize("batch_rows", [1, 2, 1024])
def test_texts_and_bytes_are_records_in_order(batch_rows: int) -> None:
    with talking(all_rows) as stub:
        assert read(messages(stub, batch_rows=batch_rows)) == ROWS
    assert len(stub.asked) == 1


@pytest.mark.parametrize(
    ("bytes_max", "sizes"), [(1000, [3, 3, 1]), (16, [2, 2, 2, 1]), (1, [1] * 7)]
)
def test_messages_that_wait_are_bounded(bytes_max: int, sizes: list[int]) -> None:
    """A connection from which all messages can be received at once is received from in parts."""

    class Given:
        def __init__(self) -> None:
            self.messages = [WSMessage(WSMsgType.BINARY, b"8 bytes!", None) for _ in range(7)]

        async def receive(self) -> WSMessage:
            return self.messages.pop(0) if self.messages else WSMessage(WSMsgType.CLOSED, b"", None)

    async def run() -> list[int]:
        waiting = _Waiting(3, bytes_max)
        filling = asyncio.ensure_future(waiting.fill(Given()))
        found = []
        while not filling.done():
            await asyncio.wait_for(waiting.came.wait(), 10)
            if payloads := waiting.take():
                found.append(len(payloads))
        assert (await filling).type is WSMsgType.CLOSED
        return found

    assert asyncio.run(run()) == sizes


def test_what_is_sent_first_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    async def talk(connected: Connected) -> None:
        for _ in range(2):
            heard.append((await connected.receive()).data)
        await all_rows(connected)

    (tmp_path / "first").write_text('{"type": "subscribe"}\n')
    monkeypatch.setenv("HG_WORD", "Bearer abcdef")
    first = (f"file:{tmp_path / 'first'}", "prices")
    with talking(talk) as stub:
        source = messages(stub, subscribe=first, headers={"Authorization": "env:HG_WORD"})
        assert read(source) == ROWS
    assert heard == ['{"type": "subscribe"}', "prices"]
    assert stub.asked[0]["authorization"] == "Bearer abcdef"


def test_a_connection_that_is_lost_is_made_again() -> None:
    """A connection that ends without a status is no end, and neither is one with another status."""
    ends: list[Callable[[Connected], Any]] = [
        lambda connected: connected.transport.abort(),
        lambda connected: connected.transport.close(),
        lambda connected: connected.close(code=1001, message=b"later"),
        lambda connected: connected.close(code=1011),
    ]

    async def talk(connected: Connected) -> None:
        turn = len(stub.asked) - 1
        await connected.send_str(json.dumps({"id": turn}))
        if turn < len(ends):
            if turn < 2:
                await asyncio.sleep(0.05)  # an abort takes what was not sent yet with it
            ended = ends[turn](connected)
            if asyncio.iscoroutine(ended):
                await ended

    with talking(talk) as stub:
        assert read(messages(stub)) == ROWS
    assert len(stub.asked) == 5


def test_without_bounded_no_status_is_an_end() -> None:
    async def run() -> list[Any]:
        source = messages(stub, bounded=False)
        assert not source.replays
        reader = open_reader(source, source.splits(1))
        rows: list[Any] = []
        while len(rows) < 2 * len(ROWS):
            rows += [row for b in await read_batches(reader, 1) for row in b.data.to_pylist()]  # type: ignore[union-attr]
        reader.close()
        return rows

    with talking(all_rows) as stub:
        assert asyncio.run(run())[:10] == ROWS + ROWS


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_service_is_asked_for_a_sign(answers: bool) -> None:
    pings: list[int] = []

    async def talk(connected: Connected) -> None:
        turn = len(stub.asked)
        if turn == 1 or answers:
            while len(pings) < 3:
                message = await connected.receive()
                if message.type is not WSMsgType.PING:
                    return
                pings.append(turn)
                if answers:
                    await connected.pong(message.data)
        await connected.ping(b"are you there?")
        message = await connected.receive()
        assert (message.type, message.data) == (WSMsgType.PONG, b"are you there?")
        await all_rows(connected)

    with talking(talk) as stub:
        assert read(messages(stub, silence="100ms", retries=1000)) == ROWS
    if answers:
        assert pings == [1, 1, 1]
        assert len(stub.asked) == 1
    else:
        assert pings == [1]
        assert len(stub.asked) == 2


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(401, SourceError, "status 401"), (302, SourceError, "redirects"), (200, SourceError, "200")],
)
def test_a_service_that_refuses(status: int, error: type[Exception], message: str) -> None:
    def refuse(request: web.Request) -> web.Response:
        return web.Response(
            status=status, headers={"Location": f"{request.path}/more?token=s3cr3t"}
        )

    with talking(all_rows) as stub:
        stub.refuse = refuse
        with pytest.raises(error, match=message) as failed:
            read(messages(stub))
    assert "s3cr3t" not in str(failed.value)
    assert len(stub.asked) == 1


def test_a_service_that_is_busy_or_away() -> None:
    def busy(request: web.Request) -> web.Response | None:
        return web.Response(status=503) if len(stub.asked) < 4 else None

    with talking(all_rows) as stub:
        stub.refuse = busy
        with pytest.raises(StorageError, match="tries=`3`: status 503"):
            read(messages(stub))
        assert read(messages(stub)) == ROWS
        stub.kill()
        with pytest.raises(UsageError, match="cannot be reached"):
            read(messages(stub))


def test_a_reason_does_not_show_what_was_sent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(connected: Connected) -> None:
        told = json.loads((await connected.receive()).data)["token"]
        await connected.close(code=1008, message=f"unknown {told}".encode())
        stub.refuse = lambda request: web.Response(status=500)

    monkeypatch.setenv("HG_FIRST", '{"token": "a-secret"}')
    with talking(talk) as stub:
        source = messages(stub, subscribe="env:HG_FIRST", retries=0)
        assert "HG_FIRST" not in repr(source.settings)  # type: ignore[attr-defined]
        with pytest.raises(StorageError) as failed:
            read(source)
    assert "a-secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"id": "one"}', BadRecordError, "record=`1 of 1`"),
        ("x" * 2000, SourceError, "too large"),
    ],
)
def test_messages_that_cannot_be_read_fail(text: str, error: type[Exception], message: str) -> None:
    with (
        talking(lambda connected: connected.send_str(text)) as stub,
        pytest.raises(error, match=message),
    ):
        read(messages(stub, buffer=1000))


def test_a_service_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    with talking(all_rows, authority.server_context()) as stub:
        assert read(messages(stub, ca=str(authority.file))) == ROWS
        with pytest.raises(HeadgateError, match="does not prove who it is"):
            read(messages(stub))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: prices}}
spec:
  checkpoint: {{every: 1s, storage: {folder}/state}}
  sources:
    prices:
      schema: {{id: long}}
      websocket:
        url: {url}/prices
        subscribe: ['{{"type": "subscribe"}}']
        bounded: true
        silence: 10s
        longestPause: 10ms
  sinks:
    out: {{from: prices, json: {{path: {folder}/rows}}, guarantee: exactly_once}}
"""


def test_a_manifest(tmp_path: Path) -> None:
    with talking(all_rows) as stub:
        job = load_job(MANIFEST.format(url=stub.url, folder=tmp_path))
        assert "loses its records since the last checkpoint" in job.explain()
        assert job.run().status == "FINISHED"
    found = [
        json.loads(line)
        for file in (tmp_path / "rows").glob("*.json")
        for line in file.read_text().splitlines()
    ]
    assert found == ROWS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: websocket_source("http://host/", SCHEMA), "not an address of a WebSocket"),
        (lambda: websocket_source("ws://me:it@host/", SCHEMA), "credentials"),
        (lambda: websocket_source("ws://host/"), "the source needs a schema"),
        (lambda: websocket_source("ws://host/", SCHEMA, subscribe=("",)), "is a text"),
        (lambda: websocket_source("ws://host/", SCHEMA, headers={"Upgrade": "x"}), "sets this"),
        (lambda: websocket_source("ws://host/", SCHEMA, silence="1ms"), "silence"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Callable[[], Source], message: str) -> None:
    with pytest.raises(HeadgateError, match=message):
        make()
