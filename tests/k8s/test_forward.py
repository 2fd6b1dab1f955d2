"""Goal: a forwarded port closes when it is told to, whatever its clients and the pod do meanwhile.

Method: a tunnel that never says a word stands for the API server. `Server.wait_closed` waits for all
connections, as it does from Python 3.12 on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

import pytest

from headgate.k8s.kubectl.forward import Forward
from headgate.k8s.operator.api import Api


class SilentTunnel:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.heard = asyncio.Event()
        self.closed = False

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)
        self.heard.set()

    async def close(self) -> None:
        self.closed = True

    def __aiter__(self) -> SilentTunnel:
        return self

    async def __anext__(self) -> object:
        return await asyncio.Event().wait()

    async def __aenter__(self) -> SilentTunnel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SilentApi:
    def __init__(self) -> None:
        self.tunnels: list[SilentTunnel] = []
        self.opened: asyncio.Queue[None] = asyncio.Queue()

    async def websocket(self, path: str, query: Mapping[str, str], protocol: str) -> SilentTunnel:
        self.tunnels.append(SilentTunnel())
        if len(self.tunnels) > 1:  # the first one is a trial
            self.opened.put_nowait(None)
        return self.tunnels[-1]


def test_open_connections_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_closed(server: Any) -> None:
        if server._active_count:  # of asyncio's own server
            await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.base_events.Server, "wait_closed", wait_closed)
    asyncio.run(_end_with_clients())


async def _end_with_clients() -> None:
    api = SilentApi()
    forward = Forward(cast("Api", api), "default", "clicks-head-0", 8081)
    port = await forward.listen()
    serving = asyncio.create_task(forward.ended())
    _, asking = await asyncio.open_connection("127.0.0.1", port)
    _, idle = await asyncio.open_connection("127.0.0.1", port)
    asking.write(b"GET / HTTP/1.1\r\n\r\n")
    for _ in range(2):
        await api.opened.get()
    await asyncio.wait(
        [asyncio.create_task(tunnel.heard.wait()) for tunnel in api.tunnels[1:]],
        return_when=asyncio.FIRST_COMPLETED,
    )

    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(serving, 30)
    await asyncio.wait_for(forward.close(), 30)
    assert all(tunnel.closed for tunnel in api.tunnels)
    assert [data for each in api.tunnels for data in each.sent] == [b"\x00GET / HTTP/1.1\r\n\r\n"]
    asking.close()
    idle.close()
