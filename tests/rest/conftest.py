"""A real job in this event loop, and its REST API on a port of the system's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.operators.clock import SystemClock
from headgate.runtime.options.registry import Options
from headgate.runtime.rest.client import RestClient
from headgate.runtime.rest.server import RestServer


class Api:
    """The REST API of a running job."""

    def __init__(self, job: Any, server: RestServer, session: aiohttp.ClientSession) -> None:
        self.job = job
        self.server = server
        self.session = session
        self.url = server.url
        self.token = job.coordinator.server.token

    def client(self) -> RestClient:
        return RestClient(self.url, self.token)

    async def ask(
        self, method: str, path: str, *, token: str | None = "", **more: Any
    ) -> tuple[int, Any, Any]:
        """Status, headers and body of an answer; the job's own token is shown unless another is given."""
        headers = dict(more.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self.token}"
        async with self.session.request(
            method, self.url + path, headers=headers, **more
        ) as response:
            kind = response.content_type
            body = await (response.json(content_type=None) if "json" in kind else response.text())
            return response.status, response.headers, body


QUERY_TOKEN = "for queries alone"


@asynccontextmanager
async def serving(job: Any, **options: str) -> AsyncIterator[Api]:
    """The API of a job, until the end of the block."""
    coordinator = job.coordinator
    server = RestServer(
        coordinator.clients,
        coordinator.server.token,
        Options({"rest.port": "0", **options}),
        SystemClock(),
        query_token=QUERY_TOKEN,
    )
    await server.listen()
    try:
        async with aiohttp.ClientSession() as session:
            yield Api(job, server, session)
    finally:
        await server.close()


def windows_job(lab: Any, **options: str) -> hg.Job:
    """One that has a bit of everything, checkpoints on demand."""
    job = hg.Job("clicks", parallelism=2, options=options)
    job.checkpoint(every="1h", storage=lab.storage)
    rows = [{"user": f"u{n % 3}", "ts": n * 1000} for n in range(200)]
    schema = {"user": "string", "ts": "int64"}
    (
        job.read(from_list(rows, schema=schema, batch_rows=10), name="events")
        .event_time("ts", max_out_of_order="0s")
        .key_by("user")
        .window(hg.tumbling("1m"))
        .agg(n=hg.count(), name="windows")
        .write(blackhole(), name="out")
    )
    return job


@pytest.fixture
def make_job(lab: Any) -> Callable[[], hg.Job]:
    """Makes the job of `with_api`, for tests that run it themselves."""
    return lambda: windows_job(lab)


@pytest.fixture
def with_api(lab: Any) -> Callable[..., Any]:
    """Runs a script beside a job whose REST API is open."""

    def run(script: Callable[[Api], Awaitable[None]], **options: str) -> Any:
        async def beside(job: Any) -> None:
            async with serving(job, **options) as api:
                await job.until("status", status="RUNNING")
                await script(api)

        return lab.run(windows_job(lab, **options), beside, batches=2)

    return run
