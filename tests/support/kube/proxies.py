"""Connections from an operator to the API server that can fail: a wire, and a proxy for HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from headgate.tests.support.kube.control_plane import ControlPlane

CHUNK = 65536


class Wire:
    """A TCP connection to the API server. With `swallows` it drops all bytes in both directions.

    Neither side notices: no connection is closed, and new ones are accepted.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.swallows = False
        self._behind = port
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen on `port` for the time of the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection("127.0.0.1", self._behind)
        loop = asyncio.get_running_loop()
        for one in (self._pump(near, to_far), self._pump(far, to_near)):
            task = loop.create_task(one)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK):
                if self.swallows:
                    # Bytes that were swallowed once leave a hole: the connection is dead for good.
                    await asyncio.Event().wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@dataclass
class Faults:
    """The requests that fail, by a seed.

    Attributes:
        chance: the chance of one request to fail; 0: none fails.
        seen: the number of each fault, by its name.
    """

    seed: int
    chance: float
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def draw(self, method: str, watch: bool) -> tuple[str, int]:
        """Return the name of a fault, or nothing, and its number, which is a status or bytes."""
        if self._random.random() >= self.chance:
            return "", 0
        if watch:
            fault = self._random.choice(("refuse", "hang", "cut", "cut", "cut"))
            number = self._random.choice((410, 410, 429, 500, 503))
        else:
            fault = self._random.choice(("refuse", "refuse", "hang", "lose", "lose"))
            conflicts = (409, 409) if method != "GET" else ()
            number = self._random.choice((*conflicts, 429, 500, 503))
        if fault == "cut":
            number = self._random.randrange(4000)
        self.seen[f"{fault} {number}" if fault == "refuse" else fault] += 1
        return fault, number


class FaultyProxy:
    """An HTTP proxy in front of the API server: it refuses or swallows requests, or loses answers."""

    def __init__(self, plane: ControlPlane, faults: Faults) -> None:
        self.url = ""
        self.faults = faults
        self._plane = plane
        self._session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listen at `url` for the time of the block."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (host, port) = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        connector = aiohttp.TCPConnector(ssl=self._plane.context())
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            try:
                yield
            finally:
                await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "true"
        fault, number = self.faults.draw(request.method, watch)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "refuse":
            return _refusal(number)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OF_CONNECTIONS}
        async with self._session.request(
            request.method,
            self._plane.server + request.path_qs,
            headers=headers,
            data=await request.read() or None,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            left = number if fault == "cut" else None
            if fault == "lose":
                await answer.read()
                return _hang_up(request)
            return await self._copy(request, answer, left)

    async def _copy(
        self, request: web.Request, answer: aiohttp.ClientResponse, left: int | None
    ) -> web.StreamResponse:
        """Pass an answer on, or only a number of its bytes."""
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _OF_CONNECTIONS}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        async for data in answer.content.iter_any():
            if left is not None and len(data) >= left:
                await response.write(data[:left])
                _hang_up(request)
                return response
            left = None if left is None else left - len(data)
            await response.write(data)
        await response.write_eof()
        return response


_OF_CONNECTIONS = frozenset(
    ("connection", "content-length", "host", "keep-alive", "transfer-encoding")
)


def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()  # nobody gets it


def _refusal(status: int) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": status, "message": f"injected {status}"}
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response(body, status=status, headers=headers)
