"""Sources try servers that do not answer again for a time, which begins with the first failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.connectors import nats_source, rabbitmq_source
from headgate.connectors.aws import AWAY_S, AwsService, Requests
from headgate.connectors.nats.model import NatsSplit
from headgate.connectors.outages import Outage
from headgate.connectors.rabbitmq.model import StreamSplit
from headgate.errors import SourceError
from headgate.testing.connectors import make_context
from headgate.tests.support.clocks import MovedClock

_PAUSED_S = 100.0
"""A reader has asked for nothing for this time, as the subtask had enough."""


def test_an_outage_begins_with_the_first_failure_and_ends_with_an_answer() -> None:
    clock = MovedClock()
    outage = Outage(clock, 30.0)
    clock.now_s = 100
    assert not outage.is_too_long()
    clock.now_s = 130
    assert not outage.is_too_long()
    outage.end()
    clock.now_s = 140
    assert not outage.is_too_long()
    clock.now_s = 171
    assert outage.is_too_long()


def test_requests_behind_a_pause_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.aws.PAUSE_S", 0)
    clock, failures = MovedClock(), 0

    async def request() -> str:
        nonlocal failures
        clock.now_s += 10
        if failures:
            failures -= 1
            raise ConnectionResetError("cut")
        return "an answer"

    async def scenario() -> None:
        nonlocal failures
        requests = Requests(AwsService("kinesis"), clock, lambda: False)
        for _ in range(3):
            assert await requests.ask(request) == "an answer"
            clock.now_s, failures = clock.now_s + _PAUSED_S, 3
        failures = int(AWAY_S // 10) + 2
        with pytest.raises(SourceError, match="cannot be used"):
            await requests.ask(request)
        assert not failures

    asyncio.run(scenario())


class _Pausing:
    """A connection that answers, and is lost when the reader asks again after a long pause."""

    def __init__(self, clock: MovedClock, answered: Callable[[], None]) -> None:
        self._clock = clock
        self._answered = answered
        self.jetstream = self

    async def until_lost(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    async def _lost(self, *_: Any) -> Any:
        self._clock.now_s += _PAUSED_S
        raise ConnectionResetError("cut")

    # of RabbitMQ
    subscribe = _lost

    async def end(self) -> int:
        self._answered()
        return 0

    # of NATS
    stream_info = delete_consumer = _lost

    async def add_consumer(self, *_: Any, **__: Any) -> Any:
        self._answered()
        return SimpleNamespace(num_pending=0)

    async def inbox(self) -> None:
        return None


@pytest.mark.parametrize("system", ["rabbitmq", "nats"])
def test_a_connection_that_is_lost_behind_a_pause_is_made_again(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = MovedClock(), 0

    async def scenario() -> None:
        schema = {"id": "int64"}
        if system == "nats":
            source: Any = nats_source("s", url="nats://127.0.0.1:1", schema=schema)
            split: Any = NatsSplit("s", "", 0)
        else:
            source = rabbitmq_source("s", url="rabbitmq-stream://127.0.0.1:1", schema=schema)
            split = StreamSplit("s", 0)
        reader = source.reader()
        reader.open(make_context(clock=clock), lambda batch: None)
        reader._fetched = {split.name: split}

        def answered() -> None:
            nonlocal answers
            answers += 1
            if answers == 4:
                reader.close()

        @asynccontextmanager
        async def connected(*_: Any) -> AsyncIterator[_Pausing]:
            yield _Pausing(clock, answered)

        module = f"headgate.connectors.{system}.reader"
        monkeypatch.setattr(f"{module}.connected", connected)
        monkeypatch.setattr(f"{module}.PAUSE_S", 0)
        await reader.fetch_all()

    asyncio.run(scenario())
    assert answers == 4
