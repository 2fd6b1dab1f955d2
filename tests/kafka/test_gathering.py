"""Messages of the client become records by partition; no broker is asked for any of this."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from headgate.connectors import kafka_source
from headgate.connectors.kafka.gathering import AT_ONCE, BYTES_MAX, Gathered
from headgate.connectors.kafka.model import PartitionSplit
from headgate.testing.connectors import make_context
from headgate.tests.support.kafka_client import FakeClient, FakeMessage

TOPICS = ("a", "b")


def fetched(
    client: FakeClient, splits: list[PartitionSplit], times: int = 1, **options: Any
) -> Any:
    """Return a reader of some partitions that has fetched this number of times; its thread does not run."""

    async def fetch() -> Any:
        topics = sorted({split.topic for split in splits})
        reader: Any = kafka_source(topics, bootstrap="nowhere:1", **options).reader()
        reader.open(make_context(operator_name="source"), lambda batch: None)
        reader._positions = {split.name: split for split in splits}
        reader._consumer, reader._topics = client, set(topics)
        for _ in range(times):
            reader.fetch()
        return reader

    return asyncio.run(fetch())


@given(
    st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, 2), st.integers(1, 3)), max_size=40),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_records_of_partitions_stay_apart_and_in_order(
    drawn: list[tuple[str, int, int]], at_once: int, one_topic: bool, lines: bool
) -> None:
    """A step of more than one in the offsets stands for the mark of a transaction."""
    offsets: dict[str, list[int]] = {}
    messages = []
    for topic, partition, step in drawn:
        topic = TOPICS[0] if one_topic else topic
        before = offsets.setdefault(f"{topic}/{partition}", [])
        before.append((before[-1] if before else 0) + step)
        value = f"{topic}/{partition} {before[-1]}".encode()
        messages.append(FakeMessage(topic, partition, before[-1], value))
    gathered = Gathered(["key", "timestamp"], one_topic=one_topic, lines=lines)
    for begin in range(0, len(messages), at_once):
        gathered.add(messages[begin : begin + at_once])
    assert gathered.rows == len(messages)
    assert not gathered.events
    assert list(gathered.partitions) == list(offsets)
    for name, records in gathered.partitions.items():
        expected = offsets[name]
        assert f"{records.topic}/{records.partition}" == name
        assert records.offsets.tolist() == expected
        assert list(records.values) == [f"{name} {offset}".encode() for offset in expected]
        assert records.metadata["key"] == [f"key {offset}".encode() for offset in expected]
        assert records.metadata["timestamp"] == [1_000 + offset for offset in expected]
        assert records.first_ms == 1_000 + expected[0]


def test_many_messages_are_taken_in_groups_up_to_the_rows_of_a_batch() -> None:
    most = 2 * AT_ONCE + 5
    client = FakeClient([FakeMessage("a", 0, offset, b"v") for offset in range(most + 7)])
    split = PartitionSplit("a", 0, 0)
    reader = fetched(client, [split], 2, format="raw", batch_rows=most)
    # When fewer have come than it asked for, it does not ask again.
    assert client.asked == [AT_ONCE - 1, AT_ONCE, 5, AT_ONCE - 1]
    piece, rest = reader._shared.pieces
    assert piece.batch.num_rows == most == piece.position.offset
    assert piece.marks.tolist() == list(range(most))
    assert rest.marks.tolist() == list(range(most, most + 7))


def test_large_messages_make_smaller_batches() -> None:
    value = b"v" * (BYTES_MAX // AT_ONCE)
    client = FakeClient([FakeMessage("a", 0, offset, value) for offset in range(2 * AT_ONCE)])
    reader = fetched(client, [PartitionSplit("a", 0, 0)], format="raw")
    assert client.asked == [AT_ONCE - 1]
    assert [each.batch.num_rows for each in reader._shared.pieces] == [AT_ONCE]


def test_an_event_is_handled_before_what_comes_behind_it_is_taken() -> None:
    """The position of a partition that has lost records is set anew when the client reports it."""
    first = [FakeMessage("a", 0, offset, b"v") for offset in range(AT_ONCE - 1)]
    end = FakeMessage("a", 1, 4, None, KafkaError(KafkaError._PARTITION_EOF))
    later = [FakeMessage("a", 0, offset, b"v") for offset in range(AT_ONCE - 1, AT_ONCE + 9)]
    client = FakeClient([*first, end, *later])
    splits = [PartitionSplit("a", 0, 0, 10_000), PartitionSplit("a", 1, 0, 4)]
    reader = fetched(client, splits, format="raw", stop="latest")
    assert client.messages == later
    assert {each.position.name: each.ended for each in reader._shared.pieces} == {
        "a/0": False,
        "a/1": True,
    }


def test_bad_records_and_ends_leave_the_metadata_of_others_where_they_are() -> None:
    """More records than the client is asked for at once; every third is bad, and one partition ends."""
    count, stop = AT_ONCE, 500
    messages = [
        FakeMessage(topic, 0, 2 * number, b"x" if number % 3 == 2 else b'{"n":%d}' % number)
        for number in range(count)
        for topic in TOPICS
    ]
    client = FakeClient(messages)
    splits = [PartitionSplit("a", 0, 0, stop), PartitionSplit("b", 0, 0)]
    reader = fetched(
        client,
        splits,
        schema={"n": "int64"},
        metadata={"topic": "from", "offset": "at", "key": "key", "timestamp": "sent"},
        on_bad_record="side_output",
    )
    pieces = {piece.position.topic: piece for piece in reader._shared.pieces}
    for topic, last in (("a", stop), ("b", 2 * count)):
        piece = pieces[topic]
        numbers = [number for number in range(count) if 2 * number < last]
        good = [number for number in numbers if number % 3 != 2]
        assert piece.ended is (topic == "a")
        assert piece.position.offset == (stop if topic == "a" else 2 * count - 1)
        assert piece.marks.tolist() == [2 * number for number in good]
        rows = piece.batch.to_pydict()
        assert rows["n"] == good
        assert set(rows["from"]) == {topic}
        assert rows["at"] == [2 * number for number in good]
        assert rows["key"] == [f"key {2 * number}".encode() for number in good]
        sent = piece.batch.column("sent").cast(pa.int64()).to_pylist()
        assert sent == [1_000 + 2 * number for number in good]
        bad = [message for message, _ in piece.bad]
        assert [message.offset for message in bad] == [
            2 * number for number in numbers if number % 3 == 2
        ]
        assert bad[0] == (topic, 0, 4, b"key 4", b"x")
        rejected = reader.rejected(piece)
        assert rejected.column("topic").to_pylist() == [topic] * len(bad)
        assert rejected.column("key")[0].as_py() == b"key 4"
