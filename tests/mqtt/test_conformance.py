"""The connectors of MQTT keep all promises of the conformance kit."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from headgate.testing.connectors import Check, SourceCase, sink_checks, source_checks
from headgate.testing.servers.mosquitto import MosquittoServer
from headgate.tests.support.queue_cases import QUEUES

SLOW = ("once_after_any_two_crashes",)
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))
SECONDS_MAX = 600 if THOROUGH else 240
pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)


def applying() -> list[Any]:
    return [
        pytest.param(kind, check, id=f"{name}-{check.name}")
        for name, kind in QUEUES.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind)
    ]


@pytest.mark.parametrize(("kind", "check"), applying())
def test_it_keeps_the_promise(server: MosquittoServer, kind: type[Any], check: Check[Any]) -> None:
    if check.name in SLOW and not THOROUGH:
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")

    async def guarded() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await check.run(kind(server))

    asyncio.run(guarded())
