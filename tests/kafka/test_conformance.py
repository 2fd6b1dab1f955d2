"""Kafka's source and sink keep all promises of the conformance kit, on a broker that may be killed."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.operators.sink import GuaranteeLike, Sink
from headgate.testing.connectors import Check
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.test_exactly_once import KilledSink
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.kafka_cases import KafkaSinkCase, KafkaSource, StagedKafkaCase

SLOW = ("once_after_any_two_crashes", "once_if_the_server_dies", "once_if_a_connection_breaks")
"""These take half a minute and more. `test_exactly_once.py` kills the broker in each run, too."""
SLOW_STAGED = (
    *(*SLOW, "once_after_any_crash", "a_process_may_be_killed"),
    "nothing_is_left_open",
)
"""At most of these points a staging sink asks nothing of Kafka. `test_staged.py` has the rest."""
pytestmark = TIMEOUT


class KilledKafkaSink(KafkaSinkCase):
    """Writers that are never closed, like those of a killed process: their transactions stay open."""

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        made: Any = super().sink(place, guarantee)
        return KilledSink(made.settings, made.guarantee)


CASES = {
    "the_source": KafkaSource,
    "the_sink": KafkaSinkCase,
    "the_sink_that_stages": StagedKafkaCase,
    "killed": KilledKafkaSink,
}
CHOSEN = {"killed": ("once_after_any_crash",)}


@pytest.mark.parametrize(("kind", "check"), promises(CASES, CHOSEN))
def test_it_keeps_the_promise(broker: KafkaServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(broker), SLOW_STAGED if kind is StagedKafkaCase else SLOW)
