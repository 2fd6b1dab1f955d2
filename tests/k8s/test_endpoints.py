"""The operator's ports: whether it is healthy, and why not."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from headgate.k8s.operator.endpoints import SILENCE_S_MAX, WatchHealth, serving
from headgate.testing.servers.process import HeldPort

JOBS = WatchHealth("streamjobs", "", 3)
MISSING = WatchHealth("rayclusters", "", 3, "not found", missing=True)
FAILING = WatchHealth("pods", "air", 200, "the API server does not answer")
DEAD = WatchHealth("pods", "air", SILENCE_S_MAX + 1, "the API server does not answer")


@pytest.mark.parametrize(
    ("watches", "status", "text"),
    [
        ([], 200, "ok\n"),
        ([JOBS], 200, "ok\n"),
        ([JOBS, MISSING], 200, "ok\nrayclusters are not watched: not found\n"),
        (
            [JOBS, FAILING],
            200,
            "ok\nthere was no news of pods in air for 200 s: the API server does not answer\n",
        ),
        (
            [MISSING, DEAD],
            503,
            "not healthy\n"
            "there was no news of pods in air for 301 s: the API server does not answer\n",
        ),
    ],
)
def test_healthz_says_why(watches: list[WatchHealth], status: int, text: str) -> None:
    async def main() -> tuple[int, str]:
        async with (
            serving("127.0.0.1", health, metrics, lambda: watches, lambda: b""),
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{health}/healthz") as answer,
        ):
            return answer.status, await answer.text()

    with HeldPort() as health, HeldPort() as metrics:
        assert asyncio.run(main()) == (status, text)
