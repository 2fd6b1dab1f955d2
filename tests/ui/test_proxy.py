"""`headgate ui` between several browsers and a coordinator."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from headgate.runtime.cli.ui import HERE_PATH, JobsServer
from headgate.runtime.finding import HERE
from headgate.runtime.rest.client import RestClient

GUARD_S = 60.0


def test_a_browser_that_leaves_does_not_cut_off_the_others() -> None:
    left = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 10_000)
                await asyncio.sleep(0.01)
        finally:
            left.set()

    async def scenario() -> None:
        coordinator = web.Application()
        coordinator.router.add_route("GET", "/v1/job/events", stream)
        runner = web.AppRunner(coordinator, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        ui = JobsServer(HERE, "secret")
        ui._clients[HERE_PATH, "job"] = await RestClient(
            f"http://127.0.0.1:{port}", "token"
        ).__aenter__()
        link = await ui.listen(0)
        events = link.partition("/ui/")[0] + f"/{HERE_PATH}/job/v1/job/events"
        headers = {"Authorization": "Bearer secret"}
        async with aiohttp.ClientSession(headers=headers) as session:
            staying, leaving = await session.get(events), await session.get(events)
            await leaving.content.readany()
            leaving.close()
            while not left.is_set():
                assert await staying.content.readany()
            for _ in range(10):
                assert await staying.content.readany()
            staying.close()
        await ui.close()
        await runner.cleanup()

    asyncio.run(asyncio.wait_for(scenario(), GUARD_S))
