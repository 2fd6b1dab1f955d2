"""The source and the sink of Pulsar: partitions, places, deleted messages, subscriptions, security."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import from_list, parquet_sink, pulsar_sink, pulsar_source
from headgate.connectors.pulsar.model import decoded
from headgate.errors import PlanError, SourceError, UsageError
from headgate.operators.source import Source, SourceReader
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import (
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.authority import Authority
from headgate.testing.servers.pulsar import PulsarServer, token
from headgate.tests.pulsar.conftest import NewTopic
from headgate.tests.support.connector_runs import read_ids, write
from headgate.tests.support.pulsar_cases import publish

SCHEMA = {"id": "int64"}


def values(ids: Sequence[int]) -> list[bytes]:
    return [b'{"id": %d}' % n for n in ids]


def source_of(server: PulsarServer, topic: str | list[str], **options: Any) -> Source:
    return pulsar_source(
        topic, **({"url": server.url, "schema": SCHEMA, "stop": "latest"} | options)
    )


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def restored(source: Source, position: bytes, **given: Any) -> list[int]:
    """Return the ids behind a position."""

    async def run() -> list[Any]:
        reader = open_reader(source, [position], given.get("context"))
        try:
            return await read_batches(reader)
        finally:
            reader.close()

    return [row["id"] for batch in asyncio.run(run()) for row in records_of(batch)]


async def first_batch(source: Source, splits: list[bytes]) -> tuple[SourceReader, list[Any]]:
    """Return a reader that has read one batch, and its records."""
    reader = open_reader(source, splits)
    (batch,) = await read_batches(reader, 1)
    return reader, records_of(batch)


def test_metadata_and_columns(server: PulsarServer, new_topic: NewTopic) -> None:
    topic, before = new_topic(), datetime.now(UTC) - timedelta(seconds=1)
    publish(server.url, topic, values([1, 2]), partition_key="k", properties={"a": "b"})
    publish(server.url, topic, values([3]), event_timestamp=5)
    kinds = ("topic", "message_id", "publish_time", "event_time", "key", "properties")
    source = source_of(server, topic, metadata={kind: kind for kind in kinds})
    rows = asyncio.run(read_all(source))
    one, _, three = rows
    assert (one["id"], one["key"], one["event_time"]) == (1, "k", None)
    assert one["properties"] == [{"name": "a", "value": "b"}]
    assert one["topic"] == f"persistent://{topic}"
    assert before < one["publish_time"] <= datetime.now(UTC) + timedelta(seconds=1)
    assert three["event_time"] == datetime(1970, 1, 1, 0, 0, 0, 5000, UTC)
    assert (three["key"], three["properties"]) == (None, None)
    ids = [row["message_id"].split(":") for row in rows]
    assert [each[1:] for each in ids] == [["0", "0"], ["0", "1"], ["1", "0"]]
    assert asyncio.run(read_all(source.with_columns(["key"]))) == [
        {"key": each} for each in ("k", "k", None)
    ]


def test_where_reading_begins_and_ends(server: PulsarServer, new_topic: NewTopic) -> None:
    topic = new_topic()
    assert read_ids(source_of(server, topic)) == []
    publish(server.url, topic, values(range(7)))
    time.sleep(0.02)
    between = datetime.now(UTC)
    time.sleep(0.02)
    publish(server.url, topic, values(range(7, 12)))
    assert read_ids(source_of(server, topic)) == list(range(12))
    assert read_ids(source_of(server, topic, start=between)) == list(range(7, 12))
    assert read_ids(source_of(server, topic, start="latest")) == []
    live = source_of(server, topic, start="latest", stop=None)
    splits = live.splits(1)
    publish(server.url, topic, values([12]))

    async def read_one() -> list[Any]:
        reader, records = await first_batch(live, splits)
        reader.close()
        return records

    assert asyncio.run(read_one()) == [{"id": 12}]


def test_each_partition_is_a_split(server: PulsarServer, new_topic: NewTopic) -> None:
    one, many = new_topic(), new_topic(3)
    publish(server.url, one, values([0]))
    for number in range(3):
        publish(server.url, f"{many}-partition-{number}", values([number + 1] * 4))
    source = source_of(server, [one, many])
    names = [decoded(split).name for split in source.splits(2)]
    wanted = [one, *(f"{many}-partition-{n}" for n in range(3))]
    assert names == [f"persistent://{name}" for name in wanted]
    shares = [source.split_share(name) for name in names[1:]]
    assert shares == [shares[0], shares[0] + 1, shares[0] + 2]
    assert sorted(row["id"] for row in asyncio.run(read_all(source, 2))) == [
        *(0, *[1] * 4, *[2] * 4, *[3] * 4)
    ]
    assert source.check_connection({}) == "4 partitions"  # type: ignore[attr-defined]


def test_a_job_finds_partitions_and_goes_on_where_it_was(
    server: PulsarServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(1)

    def job() -> hg.Job:
        made = hg.Job("finds", parallelism=2)
        made.options["headgate.source.discovery-interval"] = "100ms"
        made.checkpoint(every="50ms", storage=tmp_path / "checkpoints")
        read = made.read(source_of(server, topic, stop=None), name="in")
        read.write(parquet_sink(str(tmp_path / "out"), guarantee="exactly_once"), name="out")
        return made

    def written() -> list[int]:
        files = (tmp_path / "out").glob("[!.]*.parquet")
        return sorted(n for file in files for n in pq.read_table(file)["id"].to_pylist())

    publish(server.url, f"{topic}-partition-0", values(range(20)))
    with job().start() as handle:
        until(lambda: written() == list(range(20)))
        server.enlarge(topic, 3)
        publish(server.url, f"{topic}-partition-2", values(range(20, 40)))
        until(lambda: written() == list(range(40)))
        handle.stop()
    publish(server.url, f"{topic}-partition-2", values(range(40, 50)))
    publish(server.url, f"{topic}-partition-1", values(range(50, 60)))
    with job().start() as handle:
        until(lambda: len(written()) >= 60)
        handle.stop()
    assert written() == list(range(60))


def ledgers(server: PulsarServer, topic: str) -> list[int]:
    found = server.ask("GET", f"persistent/{topic}/internalStats")["ledgers"]
    return [each["ledgerId"] for each in found]


def roll(server: PulsarServer, topic: str) -> None:
    """End the ledger of a topic, and delete it unless something keeps it."""
    old = ledgers(server, topic)
    server.unload(topic)
    until(lambda: ledgers(server, topic)[-1] != old[-1])
    server.ask("POST", f"persistent/{topic}/trim")


def test_ledgers_that_were_deleted(server: PulsarServer, new_topic: NewTopic) -> None:
    topic = new_topic(namespace="short")
    publish(server.url, topic, values(range(3)))
    source = source_of(server, topic, batch_rows=1)

    async def stop_behind_one() -> bytes:
        reader, _ = await first_batch(source, source.splits(1))
        (position,) = reader.snapshot()
        reader.close()
        return position

    position = asyncio.run(stop_behind_one())
    (old,) = ledgers(server, topic)
    roll(server, topic)
    until(lambda: old not in ledgers(server, topic))
    publish(server.url, topic, values([7]))
    at = decoded(position)
    at.stop = decoded(source.splits(1)[0]).stop
    later = msgspec.msgpack.encode(at)
    with pytest.raises(SourceError, match="was not read in time"):
        restored(source, later)
    context = make_context()
    assert restored(source_of(server, topic, on_lost="skip"), later, context=context) == [7]
    assert context.drops.total == 1


def test_a_subscription_keeps_what_no_checkpoint_has(
    server: PulsarServer, new_topic: NewTopic
) -> None:
    topic = new_topic(namespace="short")
    publish(server.url, topic, values(range(15)))
    source = source_of(server, topic, stop=None, subscription="keeps", batch_rows=1)

    def marked() -> list[str]:
        stats = server.ask("GET", f"persistent/{topic}/internalStats")
        return [stats["cursors"]["keeps"]["markDeletePosition"]]

    async def checkpoint(splits: list[bytes], rows: int) -> list[bytes]:
        """Read some records, take a checkpoint, and return its positions."""
        reader = open_reader(source, splits)
        for _ in range(rows):
            await read_batches(reader, 1)
        before = marked()
        reader.begin_checkpoint(1)
        positions = reader.snapshot()
        assert marked() == before
        reader.on_checkpoint_complete(1)
        until(lambda: marked() != before)
        reader.close()
        return positions

    positions = asyncio.run(checkpoint(source.splits(1), 11))
    (ledger,) = ledgers(server, topic)
    assert marked() == [f"{ledger}:1"]  # the eleventh message is in the entry 2
    roll(server, topic)
    publish(server.url, topic, values(range(15, 20)))
    roll(server, topic)

    async def rest() -> list[int]:
        reader = open_reader(source, positions)
        found = [row["id"] for each in await read_batches(reader, 9) for row in records_of(each)]
        reader.close()
        return found

    assert asyncio.run(rest()) == list(range(11, 20))


def test_a_sink_with_keys_and_times(server: PulsarServer, new_topic: NewTopic) -> None:
    topic = new_topic(3)
    rows = [
        {"id": n, "key": f"k{n % 7}", "at": datetime(2026, 1, 1, 0, 0, n, tzinfo=UTC)}
        for n in range(40)
    ]
    data = pa.RecordBatch.from_pylist(rows)
    sink = pulsar_sink(
        topic, url=server.url, partition_key="key", event_time="at", compression="zstd"
    )
    write(sink, data)
    names = {"topic": "topic", "key": "of", "event_time": "at"}
    found = asyncio.run(read_all(source_of(server, topic, metadata=names)))
    assert sorted(row["id"] for row in found) == list(range(40))
    assert all(row["of"] == f"k{row['id'] % 7}" for row in found)
    assert all(row["at"] == rows[row["id"]]["at"] for row in found)
    partitions, order = defaultdict(set), defaultdict(list)
    for row in found:
        partitions[row["of"]].add(row["topic"])
        order[row["of"]].append(row["id"])
    assert {len(each) for each in partitions.values()} == {1}
    assert all(each == sorted(each) for each in order.values())
    spread = new_topic(3)
    write(pulsar_sink(spread, url=server.url), data.select(["id"]))
    assert sorted(read_ids(source_of(server, spread))) == list(range(40))


def test_a_message_that_is_too_large(server: PulsarServer, new_topic: NewTopic) -> None:
    sink = pulsar_sink(new_topic(), url=server.url, format="raw")
    data = pa.RecordBatch.from_pylist([{"value": b"x" * (6 << 20)}])
    with pytest.raises(Exception, match=r"cannot be published.*MessageTooBig"):
        write(sink, data)


READS = """
import sys
from headgate.connectors import pulsar_source
from headgate.tests.support.connector_runs import read_ids

source = pulsar_source(sys.argv[1], url=sys.argv[2], schema={"id": "int64"}, stop="latest")
assert len(read_ids(source)) == 40
"""


def test_a_process_that_ends_behind_its_last_record(
    server: PulsarServer, new_topic: NewTopic
) -> None:
    """The thread of the reader may still close its client then, which must not abort the process."""
    topic = new_topic(3)
    publish(server.url, topic, values(range(40)))
    command = [sys.executable, "-c", READS, topic, server.url]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [0] * len(children), told


def test_tls_and_tokens(
    server: PulsarServer, new_topic: NewTopic, authority: Authority, tmp_path: Path
) -> None:
    topic, secret = new_topic(), tmp_path / "token"
    secret.write_text(token("ann") + "\n")
    safe: dict[str, Any] = {
        "url": server.tls_url,
        "ca": str(authority.file),
        "token": f"file:{secret}",
    }
    write(pulsar_sink(topic, **safe), pa.RecordBatch.from_pylist([{"id": 1}]))
    assert read_ids(source_of(server, topic, **safe)) == [1]
    for wrong in (
        {"token": token("ann", b"another key, with which others sign their tokens")},
        {"ca": str(Authority(tmp_path / "other").file)},
        {"url": server.tls_url.replace("127.0.0.1", "localhost")},
    ):
        with pytest.raises(SourceError, match="cannot be used") as raised:
            source_of(server, topic, **(safe | wrong)).splits(1)
        assert token("ann") not in str(raised.value)


def test_a_manifest(server: PulsarServer, new_topic: NewTopic, tmp_path: Path) -> None:
    topic, out = new_topic(), new_topic()
    publish(server.url, topic, values([1, 2]))
    manifest = tmp_path / "job.yaml"
    manifest.write_text(f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: manifest}}
spec:
  sources:
    in:
      pulsar:
        topics: [{topic}]
        url: "{server.url}"
        metadata: {{key: key}}
        start: {{time: "2020-01-01T00:00:00Z"}}
        stop: latest
        receiveQueue: 10
      schema: {{id: long}}
  sinks:
    out:
      from: in
      pulsar: {{topic: {out}, url: "{server.url}", compression: lz4}}
      guarantee: none
""")
    load_job(manifest).run()
    assert read_ids(source_of(server, out)) == [1, 2]


def test_mistakes_are_told_where_they_are_made() -> None:
    for wrong, message in (
        ({"topics": "a/b"}, "not the name of a topic"),
        ({"topics": ["a", "a"]}, "each of them once"),
        ({"topics": []}, "needs topics"),
        ({"url": "http://a"}, "not the address"),
        ({"certificate": "a"}, "belong together"),
        ({"start": "first"}, "not a position"),
        ({"start": datetime(2026, 1, 1)}, "no time zone"),
        ({"stop": "first"}, "no such choice"),
        ({"on_lost": "never"}, "no such policy"),
        ({"metadata": {"offset": "k"}}, "no such metadata"),
        ({"receive_queue": 0}, "receive_queue"),
    ):
        given: dict[str, Any] = {"topics": "t", "url": "pulsar://a", "schema": SCHEMA}
        with pytest.raises(UsageError, match=message):
            pulsar_source(**(given | wrong))
    schema = pa.schema([("id", pa.int64())])
    for column, message in (("key", "no such column"), ("id", "wrong type")):
        with pytest.raises(PlanError, match=message):
            pulsar_sink("t", url="pulsar://a", partition_key=column).bind(schema)
    for column in ("at", "id"):
        with pytest.raises(PlanError, match="no such column of times"):
            pulsar_sink("t", url="pulsar://a", event_time=column).bind(schema)
    with pytest.raises(PlanError, match="Python objects"):
        pulsar_sink("t", url="pulsar://a").bind(None)
    with pytest.raises(UsageError, match="no such choice"):
        pulsar_sink("t", url="pulsar://a", compression="gzip")  # type: ignore[arg-type]
    records = hg.Job("once").read(from_list([{"id": 1}], schema=SCHEMA), name="in")
    with pytest.raises(PlanError, match="exactly_once"):
        records.write(pulsar_sink("t", url="pulsar://a", guarantee="exactly_once"), name="out")
