"""Partitions and topics that appear while a job reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import kafka_source, parquet_sink
from headgate.connectors.kafka.model import decoded
from headgate.errors import HeadgateError, StateError, UsageError
from headgate.operators.source import SourceReader
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_batches, records_of
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.test_jobs import SCHEMA, fill_partition, written
from headgate.tests.support.connector_runs import Fails

NewTopic = Callable[..., str]
ROWS = 500
"""The number of records of each partition."""


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {name: clicks}
spec:
  sources:
    clicks:
      kafka: {pattern: clicks-.*, bootstrap: "localhost:9092"}
      schema: {id: long}
  sinks:
    out: {from: clicks, print: {}}
"""


def add_partitions(broker: KafkaServer, topic: str, count: int) -> None:
    """Let the topic have `count` partitions."""
    from confluent_kafka.admin import NewPartitions

    admin = broker.admin()  # its requests end with it
    for done in admin.create_partitions([NewPartitions(topic, count)]).values():
        done.result(300)


def numbers(first: int) -> list[int]:
    return list(range(first, first + ROWS))


def wait_for(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoint_until(handle: hg.JobHandle, rows: int, directory: Path) -> None:
    """Take checkpoints until this number of rows is visible, and stop the job."""

    def visible() -> bool:
        with contextlib.suppress(HeadgateError):  # the job restarts
            handle.checkpoint()
        return len(written(directory)) >= rows

    wait_for(visible)
    handle.stop()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_what_appears_is_read_once_through_a_crash_and_a_stop(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path, parallelism: int
) -> None:
    """A partition and a topic are found after the last checkpoint, read in part, and lost by a crash;
    another partition appears while the job is down."""
    topic = new_topic(1)
    fill_partition(broker, topic, 0, numbers(0))
    (tmp_path / "marks").mkdir()
    marks, out = tmp_path / "marks", tmp_path / "out"

    def make() -> hg.Job:
        job = hg.Job(
            "clicks",
            parallelism=parallelism,
            options={"headgate.source.discovery-interval": "100ms"},
        )
        job.checkpoint(every="1h", storage=str(tmp_path / "state"))
        job.restart(hg.fixed_delay(attempts=3, delay="10ms"))
        clicks = job.read(
            kafka_source(
                pattern=f"{topic}(-more)?",
                bootstrap=broker.bootstrap,
                schema=SCHEMA,
                batch_rows=50,
            ),
            name="clicks",
        )
        seen = clicks.map(Fails(marks, (2_300,)), into=SCHEMA, name="fails")
        seen.write(parquet_sink(out, guarantee="exactly_once"), name="out")
        return job

    with make().start() as handle:
        wait_for(lambda: handle.status()["status"] == "RUNNING")
        handle.checkpoint()
        add_partitions(broker, topic, 2)
        fill_partition(broker, topic, 1, numbers(1_000))
        broker.create_topic(f"{topic}-more", 1, {})
        fill_partition(broker, f"{topic}-more", 0, numbers(2_000))
        wait_for((marks / "2300").exists)
        checkpoint_until(handle, 3 * ROWS, out)
    add_partitions(broker, topic, 3)
    fill_partition(broker, topic, 2, numbers(3_000))
    with make().start() as handle:
        checkpoint_until(handle, 4 * ROWS, out)
    expected = [*numbers(0), *numbers(1_000), *numbers(2_000), *numbers(3_000)]
    assert sorted(row["id"] for row in written(out)) == expected


def test_what_is_known_is_not_asked_for_again(broker: KafkaServer, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    fill_partition(broker, topic, 0, numbers(0))
    source = kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA, start="latest")
    (begun,) = source.splits(1)
    assert decoded(begun).offset == ROWS
    found = source.discover({})
    assert [decoded(split) for split in found] == [
        msgspec.structs.replace(decoded(begun), offset=0)
    ]
    assert source.split_key(begun) == source.split_key(found[0]) == f"{topic}/0"
    add_partitions(broker, topic, 2)
    known = {f"{topic}/0": b"as it was"}
    again = source.discover(known)
    assert again[0] == b"as it was"
    assert source.split_key(again[1]) == f"{topic}/1"
    shares = [source.split_share(f"{topic}/{number}") % 4 for number in range(4)]
    assert sorted(shares) == [0, 1, 2, 3]


def test_a_source_that_had_an_end_is_not_read_on_without_one(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    fill_partition(broker, topic, 0, range(3))
    ending = kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA, stop="latest")
    splits = ending.splits(1)
    endless = kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA)

    async def restored() -> None:
        open_reader(endless, splits)

    with pytest.raises(
        StateError, match=r"restored with an end, offset 3, and the source has no stop="
    ):
        asyncio.run(restored())


def test_what_ends_does_not_look_for_more(broker: KafkaServer) -> None:
    ends = kafka_source(pattern="no-.*", bootstrap=broker.bootstrap, schema=SCHEMA, stop="latest")
    assert ends.bounded
    assert ends.splits(1) == []


def test_a_manifest_names_a_pattern(tmp_path: Path) -> None:
    file = tmp_path / "clicks.yaml"
    file.write_text(MANIFEST)
    assert "kafka(pattern clicks-.*)" in str(load_job(file).explain())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topics": "a", "pattern": "b"}, "by name and by a pattern"),
        ({"pattern": "("}, "not a regular expression"),
        ({}, "must be names of topics"),
    ],
)
def test_mistakes(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kafka_source(bootstrap="localhost:9092", schema=SCHEMA, **arguments)


def test_an_open_reader_takes_more_partitions(broker: KafkaServer, new_topic: NewTopic) -> None:
    """Its client knows the topic as it was; a partition that is paused stays paused."""
    topic = new_topic(1)
    fill_partition(broker, topic, 0, numbers(0))

    async def scenario() -> None:
        source = kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA)
        reader = open_reader(source, source.splits(1))
        found = await read_ids(reader, ROWS)
        reader.pause_splits(frozenset({f"{topic}/0"}))
        await asyncio.to_thread(add_partitions, broker, topic, 3)
        for partition in range(3):
            first = numbers(1_000 * (partition + 1))
            await asyncio.to_thread(fill_partition, broker, topic, partition, first)
        splits = source.discover({})
        new = [split for split in splits if source.split_key(split) != f"{topic}/0"]
        reader.add_splits(new[:1])
        found += await read_ids(reader, ROWS)
        reader.add_splits(new[1:])
        found += await read_ids(reader, ROWS)
        assert found == [*numbers(0), *numbers(2_000), *numbers(3_000)]
        positions = [decoded(split) for split in reader.snapshot()]
        assert [(each.name, each.offset) for each in positions] == [
            (f"{topic}/{partition}", ROWS) for partition in range(3)
        ]
        reader.pause_splits(frozenset())
        assert await read_ids(reader, ROWS) == numbers(1_000)
        reader.close()

    asyncio.run(asyncio.wait_for(scenario(), 300))


async def read_ids(reader: SourceReader, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        for batch in await read_batches(reader, 1):
            found += [record["id"] for record in records_of(batch)]
    return found
