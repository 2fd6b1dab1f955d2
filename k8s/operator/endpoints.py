"""The operator's HTTP ports: /healthz and /readyz on one, /metrics on the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import web

SILENCE_S_MAX: Final = 300.0
"""The operator is not healthy if one of its watches heard nothing for this time: it is restarted then."""


@contextlib.asynccontextmanager
async def serving(
    host: str,
    health_port: int,
    metrics_port: int,
    silence_s: Callable[[], float],
    metrics: Callable[[], bytes],
) -> AsyncIterator[None]:
    """Answer on both ports for the time of the block.

    Args:
        silence_s: how long the quietest watch has heard nothing; 0 while this process does not lead.
        metrics: all metrics in Prometheus' text format.
    """

    async def healthz(_: web.Request) -> web.Response:
        silent_s = silence_s()
        if silent_s > SILENCE_S_MAX:
            text = f"a watch has heard nothing for {silent_s:.0f} s\n"
            return web.Response(text=text, status=503)
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        # A process that waits for the Lease is ready too: it is there to take over.
        return web.Response(text="ok\n")

    async def read_metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=metrics(), headers=headers)

    health, scraped = web.Application(), web.Application()
    health.router.add_get("/healthz", healthz)
    health.router.add_get("/readyz", readyz)
    scraped.router.add_get("/metrics", read_metrics)
    async with contextlib.AsyncExitStack() as stack:
        for application, port in ((health, health_port), (scraped, metrics_port)):
            runner = web.AppRunner(application, access_log=None)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, host, port).start()
        yield
