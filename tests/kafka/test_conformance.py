"""Kafka's source and sink keep all promises of the conformance kit, on a broker that may be killed."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from headgate.operators.sink import GuaranteeLike, Sink
from headgate.testing.connectors import Check, sink_checks, source_checks
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.test_exactly_once import KilledSink
from headgate.tests.support.kafka_cases import KafkaSinkCase, KafkaSource, StagedKafkaCase

SLOW = ("once_after_any_two_crashes", "once_if_the_server_dies", "once_if_a_connection_breaks")
"""These take half a minute and more. `test_exactly_once.py` kills the broker in each run, too."""
SLOW_STAGED = (
    *(*SLOW, "once_after_any_crash", "a_process_may_be_killed"),
    "nothing_is_left_open",
)
"""At most of these points a staging sink asks nothing of Kafka. `test_staged.py` has the rest."""
SECONDS_MAX = 1200 if os.environ.get("HEADGATE_THOROUGH") else 240
pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)


class KilledKafkaSink(KafkaSinkCase):
    """Writers that are never closed, like those of a killed process: their transactions stay open."""

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        made: Any = super().sink(place, guarantee)
        return KilledSink(made.settings, made.guarantee)


def applying(checks: list[Any], kind: type[Any]) -> list[Any]:
    return [pytest.param(each, id=each.name) for each in checks if each.applies_to(kind)]


def run(check: Check[Any], case: Any) -> None:
    slow = SLOW_STAGED if isinstance(case, StagedKafkaCase) else SLOW
    if (
        isinstance(case, KafkaSinkCase)
        and check.name in slow
        and not os.environ.get("HEADGATE_THOROUGH")
    ):
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")

    async def guarded() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await check.run(case)

    asyncio.run(guarded())


@pytest.mark.parametrize("check", applying(source_checks(), KafkaSource))
def test_the_source(broker: KafkaServer, check: Check[Any]) -> None:
    run(check, KafkaSource(broker))


@pytest.mark.parametrize("check", applying(sink_checks(), KafkaSinkCase))
def test_the_sink(broker: KafkaServer, check: Check[Any]) -> None:
    run(check, KafkaSinkCase(broker))


@pytest.mark.parametrize("check", applying(sink_checks(), StagedKafkaCase))
def test_the_sink_that_stages(broker: KafkaServer, check: Check[Any]) -> None:
    run(check, StagedKafkaCase(broker))


def test_the_sink_whose_processes_are_killed(broker: KafkaServer) -> None:
    (check,) = [each for each in sink_checks() if each.name == "once_after_any_crash"]
    run(check, KilledKafkaSink(broker))
