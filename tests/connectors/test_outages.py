"""Servers that do not answer are tried again for a time, and that neither loses nor repeats anything."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from headgate.connectors import mqtt_sink, nats_source, rabbitmq_sink, rabbitmq_source
from headgate.connectors.aws import AWAY_S, AwsService, Requests
from headgate.connectors.mqtt.client import Connection
from headgate.connectors.mqtt.sink import MqttWriter
from headgate.connectors.nats.model import NatsSplit
from headgate.connectors.outages import Outage
from headgate.connectors.rabbitmq.model import StreamSplit
from headgate.connectors.rabbitmq.publisher import _FRAME_ROOM, _MESSAGE_ROOM, RabbitPublisher
from headgate.errors import JobError, SourceError
from headgate.operators.elements import ColumnBatch
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


class _Broker:
    """Acknowledges messages of MQTT as a list says, and breaks the connection behind each of its parts."""

    def __init__(self, writer: MqttWriter, *answers: list[str]) -> None:
        self._writer = writer
        self._answers = list(answers)
        self.taken: list[bytes] = []
        self.connections = 0

    def connect(self) -> None:
        self.connections += 1
        self._writer._connection = cast(Connection, SimpleNamespace(client=self, turn=self._turn))
        self._sent: list[bytes] = []

    def publish(self, topic: str, value: bytes, qos: int, retain: bool) -> Any:
        self._sent.append(value)
        return SimpleNamespace(mid=len(self._sent))

    def _turn(self, seconds: float) -> None:
        for number, refusal in enumerate(self._answers.pop(0), 1):
            reason = _Reason(refusal)
            if not refusal:
                self.taken.append(self._sent[number - 1])
            self._writer._published(None, None, number, reason, None)
        raise ConnectionResetError("cut")


class _Reason(str):
    @property
    def is_failure(self) -> bool:
        return bool(self)


def _published(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> _Broker:
    """Publish three messages to a broker that answers so."""
    monkeypatch.setattr("headgate.connectors.mqtt.sink.PAUSE_S", 0)
    writer = cast(MqttWriter, mqtt_sink("a", url="mqtt://127.0.0.1:1").writer())
    writer.context = make_context()
    broker = _Broker(writer, *answers)
    monkeypatch.setattr(writer, "_connect", broker.connect)
    broker.connect()
    data = pa.RecordBatch.from_pylist([{"id": n} for n in range(3)])
    asyncio.run(writer.call(ColumnBatch(data)))
    return broker


def test_messages_of_mqtt_that_were_taken_are_not_published_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [b'{"id":0}', b'{"id":1}', b'{"id":2}']
    broker = _published(monkeypatch, [""], ["", ""])
    assert (broker.taken, broker.connections) == (messages, 2)
    broker = _published(monkeypatch, ["", "", ""])  # lost just behind the last answer
    assert (broker.taken, broker.connections) == (messages, 1)


@pytest.mark.parametrize("answers", [[["not authorized"], ["", ""]], [["", "", "not authorized"]]])
def test_a_message_of_mqtt_that_is_refused_before_an_outage_is_not_lost(
    answers: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="cannot be published.*not authorized"):
        _published(monkeypatch, *answers)


class _Stream:
    """A stream of RabbitMQ that refuses a frame, and stores later ones.

    Attributes:
        stored: the messages.
        last: the greatest number among them.
    """

    def __init__(self, refused: int) -> None:
        """Make a stream that refuses the frame with this number, from 0."""
        self.stored: list[bytes] = []
        self.last = 0
        self._frames = itertools.count()
        self._refused = refused

    async def take(self, frame: Any, publisher: RabbitPublisher) -> None:
        numbers = [each.publishing_id for each in frame.messages]
        if next(self._frames) == self._refused:
            errors = [SimpleNamespace(publishing_id=n, response_code=6) for n in numbers]
            publisher._refuse(SimpleNamespace(errors=errors))
            return
        for message in frame.messages:
            if message.publishing_id > self.last:  # others are taken for repeats
                self.stored.append(message.data)
                self.last = message.publishing_id
        publisher._confirm(SimpleNamespace(publishing_ids=numbers))


class _StreamPublisher(RabbitPublisher):
    """A publisher to a stream of this process, with frames of two messages."""

    def __init__(self, settings: Any, stream: _Stream) -> None:
        super().__init__(settings, "s")
        self._to = stream
        self._context = make_context()

    @asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Any]:
        async def declare(*_: Any) -> None:
            return None

        async def run(work: Coroutine[Any, Any, None]) -> None:
            await work

        client = SimpleNamespace(
            frame_max=_FRAME_ROOM + 2 * (_MESSAGE_ROOM + 1),
            declare_publisher=declare,
            send_publish_frame=lambda frame: self._to.take(frame, self),
        )
        yield SimpleNamespace(client=client, stream="s", until_lost=run)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_messages_of_rabbitmq_that_were_refused_are_not_lost_when_they_are_repeated(
    refused: int,
) -> None:
    """The broker confirms a message without storing it if it has stored one with a greater number."""
    settings = rabbitmq_sink("s", url="rabbitmq-stream://127.0.0.1:1").settings
    stream, messages = _Stream(refused), [b"0", b"1", b"2", b"3", b"4", b"5"]

    async def publish() -> None:
        await _StreamPublisher(settings, stream).publish_messages(messages, "epoch", 1)

    with pytest.raises(JobError, match="the broker refuses a message with the code 6"):
        asyncio.run(publish())
    assert stream.stored == messages[: 2 * refused]
    asyncio.run(publish())  # as the next attempt does with what a checkpoint has staged
    assert stream.stored == messages
