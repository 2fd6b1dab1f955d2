"""What clients are told by a coordinator whose job is over."""

from __future__ import annotations

import asyncio

import pytest

from headgate.errors import HeadgateError, JobError
from headgate.runtime.control.client import CoordinatorClient
from headgate.runtime.control.link import MemoryLink
from headgate.runtime.control.messages import Hello
from headgate.runtime.coordinator.clients import ClientServer
from headgate.runtime.coordinator.context import ClientWish


def test_a_wish_that_the_job_did_not_live_to_hear_is_refused() -> None:
    async def main() -> None:
        wishes: asyncio.Queue[ClientWish] = asyncio.Queue()
        server = ClientServer(wishes.put_nowait, {}, {})
        near, far = MemoryLink.pair()
        client = CoordinatorClient(near, "token")
        assert isinstance(await far.receive(), Hello)
        serving = asyncio.ensure_future(server.serve(far))
        asking = [asyncio.ensure_future(client.request(verb)) for verb in ("stop", "checkpoint")]
        granted = await wishes.get()
        await wishes.get()
        granted.done(status="SUSPENDED")
        server.end({"status": "SUSPENDED"}, None)
        assert await asking[0] == {"status": "SUSPENDED"}
        with pytest.raises(JobError, match="the job has ended"):
            await asking[1]
        with pytest.raises(HeadgateError, match="the job has ended"):
            await client.request("cancel")
        await server.drain()
        await client.close()
        serving.cancel()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())
