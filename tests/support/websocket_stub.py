"""A service with a WebSocket in this process, which can be killed and started again at the same address."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias

from aiohttp import web


class Connected(web.WebSocketResponse):
    """A connection, with the path that was asked for. Pings and pongs come as messages."""

    def __init__(self, request: web.Request) -> None:
        super().__init__(autoping=False)
        assert request.transport is not None
        self.path, self.transport = request.path, request.transport


Talk: TypeAlias = Callable[[Connected], Awaitable[None]]


class WebSocketStub:
    """Talks on each connection as `talk` says, and then ends it with status 1000, if it still is there.

    Attributes:
        asked: the headers of all requests, by names in lower case.
        talk: is called with each connection.
        refuse: returns an answer to give instead of a connection; None: there is one.
    """

    def __init__(self, talk: Talk, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        """Prepare a service at a port; 0: the operating system chooses one."""
        self.asked: list[Mapping[str, str]] = []
        self.talk = talk
        self.refuse: Callable[[web.Request], web.Response | None] = lambda request: None
        self.port = port
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the service."""
        return f"{'ws' if self._context is None else 'wss'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, at the port that it had before if there was one."""
        self._do(self._start())

    def kill(self) -> None:
        """End it and all its connections, without a word to the other side."""
        self._do(self._kill())

    def close(self) -> None:
        """End the service for good."""
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _kill(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for connection in list(runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        answer = self.refuse(request)
        if answer is not None:
            return answer
        connected = Connected(request)
        await connected.prepare(request)
        with contextlib.suppress(ConnectionError):
            await self.talk(connected)
            if not connected.closed:
                await connected.close()
        return connected


@contextlib.contextmanager
def talking(talk: Talk, context: ssl.SSLContext | None = None) -> Iterator[WebSocketStub]:
    """Start a service that talks on each connection, at a port that the operating system chooses."""
    stub = WebSocketStub(talk, context)
    stub.start()
    try:
        yield stub
    finally:
        stub.close()
