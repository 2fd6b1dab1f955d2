"""Connectors whose records come once, and sinks that promise nothing for a crash, as cases of the kit."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from aiohttp import WSMsgType, web

from headgate.connectors import (
    print_sink,
    socket_sink,
    socket_source,
    stdin_source,
    websocket_source,
)
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import Case, Feature, SinkCase, SourceCase
from headgate.testing.servers.process import HeldPort
from headgate.tests.support.connector_cases import NOWHERE, SCHEMA, Line, Proxied, Rows
from headgate.tests.support.websocket_stub import Connected, WebSocketStub

_LOOK_S: Final = 0.002
"""How often a service looks whether there is something to send."""
_END_S_MAX: Final = 30


class WebSocketCase(Rows, Proxied, SourceCase):
    """A service that sends each row once, over a connection that has just answered a ping."""

    features = frozenset(
        {
            *(Feature.UNREPEATED, Feature.LIVE, Feature.SERVER, Feature.CUTS),
            *(Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = ("s3cr3t", "not-for-you")
    unseen = frozenset({"a wrong token"})

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self.server = self.stub = WebSocketStub(self._talk, port=self.port)
        self.stub.refuse = self._refuse
        self._rows: deque[Any] = deque()
        self._ends = False

    @contextmanager
    def place(self) -> Iterator[deque[Any]]:
        self._rows = deque()
        self.stub.start()
        try:
            yield self._rows
        finally:
            self.stub.kill()

    def _refuse(self, request: web.Request) -> web.Response | None:
        token = request.headers.get("authorization", "")
        return None if token == "Bearer s3cr3t" else web.Response(status=401, text=f"not {token}")

    async def _talk(self, connected: Connected) -> None:
        rows = self._rows
        while (rows or not self._ends) and not connected.transport.is_closing():
            if not rows:
                await asyncio.sleep(_LOOK_S)
                continue
            await connected.ping(b"are you there?")
            if (await connected.receive()).type is not WSMsgType.PONG:
                return
            if rows:
                await connected.send_str(json.dumps(rows.popleft()))

    def put(self, place: deque[Any], records: Sequence[Any]) -> None:
        place.extend(records)

    def source(self, place: deque[Any], **options: Any) -> Source:
        self._ends = options.get("bounded", True)
        given = {
            "headers": {"Authorization": "Bearer s3cr3t"},
            "batch_rows": 1,
            "bounded": True,
            "longest_pause": "10ms",
            "retries": 1000,
        }
        url = options.pop("url", f"ws://127.0.0.1:{self.port}")
        return websocket_source(f"{url}/rows?with=not-for-you", SCHEMA, **(given | options))

    def live(self, place: deque[Any]) -> Source:
        return self.source(place, bounded=False)

    def mistakes(self, place: deque[Any]) -> Mapping[str, tuple[Source, str]]:
        wrong = {"Authorization": "Bearer not-for-you"}
        return {
            "no service": (self.source(place, url=f"ws://{NOWHERE}"), NOWHERE),
            "a wrong token": (self.source(place, headers=wrong), "status 401"),
        }


class LineService:
    """A program that listens on a port: it sends each line once, and takes lines.

    Attributes:
        port: its port.
        to_send: the lines that are still to be sent, to any connection.
        ends: when all are sent it ends the connections.
        taken: the lines that were sent to it.
    """

    def __init__(self) -> None:
        self.to_send: deque[str] = deque()
        self.ends = False
        self.taken: list[str] = []
        self._open: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_END_S_MAX)

    def put(self, lines: Sequence[str]) -> None:
        """Send these lines as well; a connection whose end has come does not get them."""

        async def put() -> None:
            self.to_send.extend(lines)

        self._do(put())

    def all_taken(self) -> list[str]:
        """Return the lines that were sent to it, when all connections have ended."""
        self._do(self._connections_end())
        return self.taken

    async def _connections_end(self) -> None:
        await asyncio.sleep(_LOOK_S)  # connections that were made are accepted
        if self._open:
            await asyncio.wait(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        assert own is not None
        self._open.add(own)
        sending = asyncio.ensure_future(self._send(reader, writer))
        try:
            async for line in reader:
                self.taken.append(line.decode().removesuffix("\n"))
            await sending
        finally:
            sending.cancel()
            self._open.discard(own)
            writer.close()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                if self.to_send:
                    writer.write(f"{self.to_send.popleft()}\n".encode())
                elif self.ends:
                    writer.close()
                    return
                await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """End it, and all connections."""
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for each in self._open:
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


class LineConnections:
    """A program of its own for each check."""

    @contextmanager
    def place(self) -> Iterator[LineService]:
        service = LineService()
        try:
            yield service
        finally:
            service.close()


class SocketSourceCase(LineConnections, Line, SourceCase):
    """A program that sends lines."""

    features = frozenset({Feature.UNREPEATED, Feature.LIVE, Feature.MISTAKES})

    def put(self, place: LineService, records: Sequence[Any]) -> None:
        place.put([record["line"] for record in records])

    def source(self, place: LineService) -> Source:
        place.ends = True
        return socket_source(place.port)

    def live(self, place: LineService) -> Source:
        return socket_source(place.port)

    def mistakes(self, place: LineService) -> Mapping[str, tuple[Source, str]]:
        host, port = NOWHERE.split(":")
        return {"nothing listens": (socket_source(int(port), host=host), NOWHERE)}


class SocketSinkCase(LineConnections, Rows, SinkCase):
    """A program that takes lines of JSON."""

    features = frozenset({Feature.MISTAKES})

    def sink(self, place: LineService, guarantee: GuaranteeLike) -> Sink:
        return socket_sink(place.port)

    def visible(self, place: LineService) -> list[Any]:
        return [json.loads(line) for line in place.all_taken()]

    def mistakes(self, place: LineService) -> Mapping[str, tuple[Sink, str]]:
        host, port = NOWHERE.split(":")
        return {"nothing listens": (socket_sink(int(port), host=host), NOWHERE)}


class Pipe:
    """A pipe that takes the place of standard input."""

    def __init__(self) -> None:
        self.end, self.writing = os.pipe()

    def fileno(self) -> int:
        return self.end

    def end_input(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1


class StdinCase(Line, SourceCase):
    """A pipe in the place of standard input."""

    features = frozenset({Feature.UNREPEATED, Feature.LIVE})

    @contextmanager
    def place(self) -> Iterator[Pipe]:
        own, pipe = sys.stdin, Pipe()
        sys.stdin = pipe  # type: ignore[assignment]
        try:
            yield pipe
        finally:
            sys.stdin = own
            pipe.end_input()
            os.close(pipe.end)

    def put(self, place: Pipe, records: Sequence[Any]) -> None:
        for record in records:
            os.write(place.writing, f"{record['line']}\n".encode())

    def source(self, place: Pipe) -> Source:
        place.end_input()
        return stdin_source()

    def live(self, place: Pipe) -> Source:
        return stdin_source()


class PrintCase(Rows, SinkCase):
    """Standard output, as text in memory."""

    @contextmanager
    def place(self) -> Iterator[io.StringIO]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            yield printed

    def sink(self, place: io.StringIO, guarantee: GuaranteeLike) -> Sink:
        return print_sink()

    def visible(self, place: io.StringIO) -> list[Any]:
        lines = re.findall(r"^(?:\d> )?id=(\d+), name=(.*)$", place.getvalue(), re.MULTILINE)
        assert len(lines) == len(place.getvalue().splitlines())
        return [{"id": int(id_), "name": None if name == "None" else name} for id_, name in lines]


UNREPEATED: dict[str, type[Case]] = {
    "websocket_source": WebSocketCase,
    "socket_source": SocketSourceCase,
    "stdin_source": StdinCase,
    "socket_sink": SocketSinkCase,
    "print_sink": PrintCase,
}
