"""The connectors of SQS keep all promises of the conformance kit, on ElasticMQ, and on moto's server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.testing.connectors import Check, SourceCase, sink_checks, source_checks
from headgate.testing.servers.elasticmq import ElasticMqServer
from headgate.tests.support.skips import thorough_only
from headgate.tests.support.sqs_cases import SQS, Queues, SqsSinkCase, SqsSourceOnMoto

SECONDS_MAX = 240
pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)


def applying(cases: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(kind, check, id=f"{name}-{check.name}")
        for name, kind in cases.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind)
    ]


async def guarded(check: Check[Any], case: Any) -> None:
    if check.thorough:
        thorough_only()
    async with asyncio.timeout(SECONDS_MAX):
        await check.run(case)


@pytest.mark.parametrize(("kind", "check"), applying(SQS))
def test_it_keeps_the_promise(
    elasticmq: ElasticMqServer, kind: type[Any], check: Check[Any]
) -> None:
    asyncio.run(guarded(check, kind(Queues(elasticmq.url), elasticmq)))


@pytest.mark.parametrize(
    ("kind", "check"), applying({"sqs_source": SqsSourceOnMoto, "sqs_sink": SqsSinkCase})
)
def test_it_keeps_the_promise_on_moto(queues: Queues, kind: type[Any], check: Check[Any]) -> None:
    asyncio.run(guarded(check, kind(queues)))
