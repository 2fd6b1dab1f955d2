"""The reader of Pulsar against a topic of this process: places, deleted messages, and outages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from headgate.connectors import pulsar_source
from headgate.connectors.pulsar.client import AWAY_S, Cluster
from headgate.connectors.pulsar.model import NOWHERE, Place, TopicSplit, decoded
from headgate.errors import SourceError, StateError
from headgate.operators.base import OperatorContext
from headgate.testing.connectors import make_context, open_reader, read_batches
from headgate.tests.support.clocks import MovedClock

pulsar = pytest.importorskip("pulsar")
NAME = "persistent://public/default/t"


class Message:
    """A message whose data has its place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def message_id(self) -> Any:
        return pulsar.MessageId(-1, *self.place)

    def data(self) -> bytes:
        return "{}:{}:{}".format(*self.place).encode()

    def publish_timestamp(self) -> int:
        return self.place[0] * 1000


class Topic:
    """A topic with messages at some places, and its client.

    Attributes:
        places: of its messages.
        away: whether its broker is away.
        failures: requests that fail before one is answered.
        repeats: the number of messages that a new reader returns once more behind the first ones.
    """

    def __init__(self, *places: Place) -> None:
        self.places = list(places)
        self.away = False
        self.failures = 0
        self.repeats = 0
        self.readers = 0

    def create_reader(self, topic: str, start: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise pulsar.ConnectError("away")
        self.readers += 1
        first = (start.ledger_id(), start.entry_id())
        return Reader(self, [each for each in self.places if each[:2] >= first])


class Reader:
    """A reader of a topic."""

    def __init__(self, topic: Topic, left: list[Place]) -> None:
        self._topic = topic
        self._left = left[: topic.repeats] + left

    def read_next(self, timeout_millis: int) -> Message:
        if not self._left:
            raise pulsar.Timeout("nothing")
        return Message(self._left.pop(0))

    def has_message_available(self) -> bool:
        return bool(self._left)

    def is_connected(self) -> bool:
        return not self._topic.away

    def seek(self, time_ms: int) -> None:
        """Find the first message of that time, or an earlier one, as brokers do."""
        earlier = sum(each[0] * 1000 < time_ms for each in self._left)
        self._left = self._left[max(0, earlier - 1) :]

    def close(self) -> None:
        return None


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.connectors.pulsar.reader.PAUSE_S", 0)
    monkeypatch.setattr("headgate.connectors.pulsar.reader._LOOK_S", 0)


def read(
    monkeypatch: pytest.MonkeyPatch,
    topic: Topic,
    at: TopicSplit,
    count: int | None = None,
    *,
    context: OperatorContext | None = None,
    **options: Any,
) -> list[Place]:
    """Return the places of the messages that are read: all, or the first ones."""

    @contextmanager
    def client(cluster: Cluster) -> Iterator[Any]:
        yield topic

    monkeypatch.setattr(Cluster, "client", client)
    stop = None if at.stop is None else "latest"
    given: dict[str, Any] = {"format": "raw", "schema": {"value": "string"}, "batch_rows": 1}
    source = pulsar_source("t", url="pulsar://nowhere", stop=stop, **(given | options))

    async def run() -> list[Any]:
        reader = open_reader(source, [msgspec.msgpack.encode(at)], context)
        try:
            return await asyncio.wait_for(read_batches(reader, count), 60)
        finally:
            reader.close()

    texts = [row["value"] for batch in asyncio.run(run()) for row in batch.data.to_pylist()]
    return [tuple(int(part) for part in text.split(":")) for text in texts]


PLACES: list[Place] = [(3, 0, -1), (3, 1, 0), (3, 1, 1), (3, 1, 2), (5, 0, -1), (9, 0, 0)]


@pytest.mark.parametrize("rows", [1, 100])
def test_any_position_goes_on_with_the_next_message(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, after in enumerate([NOWHERE, *PLACES[:-1]]):
        for repeats in (0, 2):
            topic = Topic(*PLACES)
            topic.repeats = repeats
            at = TopicSplit(NAME, after, stop=PLACES[-1])
            assert read(monkeypatch, topic, at, batch_rows=rows) == PLACES[number:]


def test_an_end_inside_of_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, stop in enumerate(PLACES, 1):
        at = TopicSplit(NAME, stop=stop)
        assert read(monkeypatch, Topic(*PLACES), at, batch_rows=100) == PLACES[:number]


def test_a_time_is_that_of_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    at = TopicSplit(NAME, since_ms=4000, stop=PLACES[-1])
    assert read(monkeypatch, Topic(*PLACES), at) == PLACES[4:]


@pytest.mark.parametrize("left", [PLACES[4:], PLACES[5:]])
def test_messages_of_a_ledger_that_is_gone_may_be_lost(
    left: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = TopicSplit(NAME, PLACES[3], stop=PLACES[-1])
    with pytest.raises(SourceError, match=r"not read in time.*behind 3:1:2 may have been deleted"):
        read(monkeypatch, Topic(*left), at)
    context = make_context()
    found = read(monkeypatch, Topic(*left), at, on_lost="skip", context=context)
    assert (found, context.drops.total) == (left, 1)


def test_nothing_is_left_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at = TopicSplit(NAME, PLACES[3], stop=PLACES[-1])
    with pytest.raises(SourceError, match="nothing is left"):
        read(monkeypatch, Topic(*PLACES[:4]), at)
    context = make_context()
    assert read(monkeypatch, Topic(), at, on_lost="skip", context=context) == []
    assert context.drops.total == 1


def test_a_topic_that_was_deleted_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class MadeAgain(Topic):
        def create_reader(self, topic: str, start: Any, **options: Any) -> Any:
            return Reader(self, list(self.places))

    with pytest.raises(SourceError, match="was the topic deleted and made again"):
        read(monkeypatch, MadeAgain(*PLACES), TopicSplit(NAME, (10, 0, -1)), 1)


def test_a_broker_that_is_away_is_tried_again_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    topic, clock = Topic(*PLACES), MovedClock()
    topic.failures = 3
    at = TopicSplit(NAME, stop=PLACES[-1])
    assert read(monkeypatch, topic, at, context=make_context(clock=clock)) == PLACES

    class Later(MovedClock):
        def monotonic(self) -> float:
            self.now_s += AWAY_S / 4
            return super().monotonic()

    topic.failures = 100
    with pytest.raises(SourceError, match=r"cannot be used.*no broker answers"):
        read(monkeypatch, topic, at, context=make_context(clock=Later()))
    assert 90 < topic.failures < 100
    topic.failures, topic.away = 0, True
    with pytest.raises(SourceError, match=r"cannot be used.*the connection is lost"):
        read(
            monkeypatch, topic, TopicSplit(NAME, PLACES[-1]), 1, context=make_context(clock=Later())
        )


def test_splits_of_another_source() -> None:
    with pytest.raises(StateError, match="not those of a Pulsar source"):
        decoded(b"\x01")
    source = pulsar_source("t", url="pulsar://nowhere", schema={"id": "int64"})
    split = msgspec.msgpack.encode(TopicSplit(NAME, stop=(1, 2, -1)))

    async def restore() -> None:
        open_reader(source, [split])

    with pytest.raises(StateError, match=r"with an end, 1:2, .* no stop= any more"):
        asyncio.run(restore())
