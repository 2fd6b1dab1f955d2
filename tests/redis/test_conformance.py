"""The sink and the source of Redis keep all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.connectors.redis.sink import RedisSink
from headgate.connectors.redis.writer import RedisWriter
from headgate.operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter
from headgate.testing.connectors import Check, source_checks
from headgate.testing.servers.redis import RedisServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.stream_cases import REDIS, RedisSinkCase, RedisSource

pytestmark = TIMEOUT


class KilledWriter(RedisWriter):
    """One whose process is killed instead of being closed: its staged entries stay."""

    def close(self) -> None:
        self._closed = True


class KilledSink(RedisSink):
    def writer(self) -> SinkWriter:
        return KilledWriter(self.settings, self.guarantee is Guarantee.EXACTLY_ONCE)


class KilledCase(RedisSinkCase):
    """Writers whose processes are killed."""

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        made: Any = super().sink(place, guarantee)
        return KilledSink(made.settings, made.guarantee)


class TwoStreams(RedisSource):
    """Fields in two streams, which are read in turn: their order is another one after a restore."""

    def streams(self, place: str) -> list[str]:
        return [place, f"{place}-b"]


TWO_CHECKS = {each.name for each in source_checks()} - {"resumes_behind_every_record"}
KILLED_CHECKS = ("once_after_any_crash", "nothing_is_left_open")
CASES = {**REDIS, "killed": KilledCase, "two": TwoStreams}
CHOSEN = {"killed": KILLED_CHECKS, "two": TWO_CHECKS}


@pytest.mark.parametrize(("kind", "check"), promises(CASES, CHOSEN))
def test_it_keeps_the_promise(server: RedisServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server), slow=())
