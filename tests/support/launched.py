"""A job started as `headgate run` starts it, with a client of its coordinator, until a script is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import headgate as hg
from headgate.runtime.cluster.launch import launch
from headgate.runtime.control.job_client import Connect, JobClient
from headgate.runtime.job import runnable
from headgate.runtime.protocol.job_result import JobOutcome

DEADLINE_S = 600.0


async def while_running(
    job: hg.Job, cluster: str, script: Callable[[JobClient], Awaitable[None]]
) -> JobOutcome:
    """Launch the job, run the script once the job is RUNNING, cancel it, and return how it ended."""
    listening: asyncio.Future[Connect] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(
            launch(runnable(job).spec(), cluster, on_listening=listening.set_result)
        )
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        client = await listening.result()()
        try:
            while (await client.request("status"))["status"] != "RUNNING":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await script(client)
            await client.request("cancel")
        finally:
            await client.close()
        return await running
