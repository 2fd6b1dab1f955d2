"""The source and the sink of SQS: deletions with completed checkpoints, and messages at least once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list, sqs_sink, sqs_source
from headgate.connectors.sqs.sink import SqsWriter
from headgate.connectors.sqs.source import SqsSource
from headgate.errors import JobError, PlanError, SourceError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkWriter
from headgate.operators.source import Source
from headgate.runtime.job import runnable
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context, open_reader, records_of
from headgate.tests.support.sqs_cases import Queues

SCHEMA = {"id": "int64"}
_numbers = itertools.count()
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def queue() -> str:
    return f"queue-{next(_numbers)}"


def source_of(queues: Queues, queue: str, **options: Any) -> Source:
    return sqs_source(queue, **({"endpoint": queues.url, "schema": SCHEMA} | options))


def bodies(*numbers: int) -> list[str]:
    return [json.dumps({"id": n}) for n in numbers]


class Reading:
    """A reader in a job whose checkpoints are those of the test."""

    def __init__(self, source: Source) -> None:
        self.rejected: list[Any] = []
        self.context = make_context()
        self.reader = open_reader(source, source.splits(1), self.context, self.rejected.append)

    async def rows(self, count: int) -> list[Any]:
        found: list[Any] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                batch = self.reader.poll()
                if batch is None:
                    await self.reader.wait()
                else:
                    found += records_of(batch)
        return found

    async def ids(self, count: int) -> list[int]:
        return sorted(row["id"] for row in await self.rows(count))

    async def until_seen(self, *numbers: int) -> None:
        """Wait for these messages, each of which may come again while it is not deleted."""
        left = set(numbers)
        while left:
            found = {row["id"] for row in await self.rows(1)}
            assert found <= set(numbers)
            left -= found


async def until(done: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, done)


def wait_until(done: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if done():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")


def test_messages_are_deleted_when_a_checkpoint_has_them(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(*range(15)))

    async def run() -> None:
        reading = Reading(source_of(queues, queue))
        assert await reading.ids(15) == list(range(15))
        reading.reader.begin_checkpoint(1)
        await asyncio.to_thread(queues.send, url, *bodies(15, 16))
        assert await reading.ids(2) == [15, 16]
        await asyncio.sleep(0.3)
        assert await asyncio.to_thread(queues.waiting, url) == (0, 17)
        reading.reader.on_checkpoint_complete(1)
        await until(lambda: queues.waiting(url) == (0, 2))
        reading.reader.begin_checkpoint(2)
        reading.reader.on_checkpoint_aborted(2)
        reading.reader.begin_checkpoint(3)
        reading.reader.on_checkpoint_complete(3)
        reading.reader.close()
        await until(lambda: queues.waiting(url) == (0, 0))

    asyncio.run(run())


def test_what_no_checkpoint_has_comes_again(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(1, 2, 3))
    source = source_of(queues, queue, visibility="1s")

    async def run() -> None:
        for _ in range(2):
            reading = Reading(source)
            await reading.until_seen(1, 2, 3)
            reading.reader.close()

    asyncio.run(run())


def test_a_message_that_the_job_has_is_kept_from_others(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(1, 2))

    async def run() -> None:
        # It asks for them again every third of this time, which a busy machine may delay.
        reading = Reading(source_of(queues, queue, visibility="6s"))
        assert await reading.ids(2) == [1, 2]
        await asyncio.sleep(7)
        assert await asyncio.to_thread(queues.waiting, url) == (0, 2)
        await asyncio.to_thread(queues.send, url, *bodies(3))
        assert await reading.ids(1) == [3]
        reading.reader.close()

    asyncio.run(run())


def test_no_more_are_received_than_may_be_unacknowledged(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(*range(30)))

    async def run() -> None:
        reading = Reading(source_of(queues, queue, max_unacknowledged=10, consumers=1))
        first = await reading.ids(10)
        await asyncio.sleep(0.5)
        assert reading.reader.poll() is None
        reading.reader.begin_checkpoint(1)
        reading.reader.on_checkpoint_complete(1)
        assert len({*first, *await reading.ids(10)}) == 20
        reading.reader.close()

    asyncio.run(run())


def test_bad_messages_and_metadata(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(1), "no JSON")
    metadata = {"message_id": "key", "receives": "times", "timestamp": "at", "group": "of"}

    async def run() -> None:
        reading = Reading(source_of(queues, queue, metadata=metadata, on_bad_record="side_output"))
        (row,) = await reading.rows(1)
        assert (row["id"], row["times"], row["of"]) == (1, 1, None)
        assert row["key"]
        assert abs(row["at"].timestamp() - time.time()) < 60
        await until(lambda: bool(reading.reader.poll() or reading.rejected))
        assert reading.rejected[0].data.column("data").to_pylist() == [b"no JSON"]
        reading.reader.begin_checkpoint(1)
        reading.reader.on_checkpoint_complete(1)
        await until(lambda: queues.waiting(url) == (0, 0))
        reading.reader.close()

    asyncio.run(run())


def test_the_lag_is_what_waits_in_the_queue(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    queues.send(url, *bodies(*range(20)))

    async def run() -> None:
        reading = Reading(source_of(queues, queue, max_unacknowledged=1, consumers=1))
        await until(lambda: reading.reader.lag_records() is not None)
        lag = reading.reader.lag_records()
        assert lag is not None
        assert 10 <= lag["consumer-0"] <= 20
        reading.reader.close()

    asyncio.run(run())


def test_a_queue_that_does_not_exist_is_named(queues: Queues) -> None:
    with pytest.raises(SourceError, match="no such queue queue=`none`"):
        source_of(queues, "none").splits(1)
    assert source_of(queues, "none").bounded is False


def write(sink: Any, rows: list[dict[str, Any]]) -> None:
    write_with(sink.writer(), rows)


def write_with(writer: SinkWriter, rows: list[dict[str, Any]]) -> None:
    async def run() -> None:
        writer.open(make_context())
        await asyncio.to_thread(writer.prepare)
        writer.write(ColumnBatch(pa.RecordBatch.from_pylist(rows)))
        settle = writer.roll(1)
        assert settle is not None
        await asyncio.to_thread(settle)
        await asyncio.to_thread(writer.close)

    asyncio.run(asyncio.wait_for(run(), 60))


def read_in_order(queues: Queues, url: str) -> list[int]:
    """Return the ids in the messages of a FIFO queue, which gives those of a group one after the other."""
    found: list[int] = []
    while messages := queues.read(url):
        found += [json.loads(each["Body"])["id"] for each in messages]
        for each in messages:
            queues.do(
                lambda client, each=each: client.delete_message(
                    QueueUrl=url, ReceiptHandle=each["ReceiptHandle"]
                )
            )
    return found


def test_large_messages_are_divided_into_requests(queues: Queues, queue: str) -> None:
    url = queues.create(queue)
    rows = [{"id": n, "text": "x" * 60_000} for n in range(25)]
    write(sqs_sink(queue, endpoint=queues.url), rows)
    found = [json.loads(each["Body"])["id"] for each in queues.read(url)]
    assert sorted(found) == list(range(25))
    with pytest.raises(JobError, match="too large"):
        write(sqs_sink(queue, endpoint=queues.url), [{"text": "x" * 2_000_000}])


class Refusing:
    """A client of a service that refuses the first message of each request once."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._refused: set[str] = set()

    async def send_message_batch(self, QueueUrl: str, Entries: list[Any]) -> Any:
        first, *rest = Entries
        if first["MessageBody"] in self._refused:
            return await self._client.send_message_batch(QueueUrl=QueueUrl, Entries=Entries)
        self._refused.add(first["MessageBody"])
        if rest:
            await self._client.send_message_batch(QueueUrl=QueueUrl, Entries=rest)
        return {"Failed": [{"Id": first["Id"], "Code": "InternalError", "SenderFault": False}]}


class RefusedWriter(SqsWriter):
    """A writer whose service refuses some messages at first."""

    async def begin(self) -> None:
        await super().begin()
        self._client = Refusing(self._client)


def test_messages_of_a_group_keep_their_order_when_some_are_refused(queues: Queues) -> None:
    name = f"queue-{next(_numbers)}.fifo"
    url = queues.create(name, FifoQueue="true")
    sink = sqs_sink(name, endpoint=queues.url, group="of", deduplication_id="key")
    rows = [{"id": n, "of": f"g{n % 3}", "key": f"k{n}"} for n in range(24)]
    write_with(RefusedWriter(sink.settings), rows)
    found = read_in_order(queues, url)
    assert [[n for n in found if n % 3 == group] for group in range(3)] == [
        list(range(group, 24, 3)) for group in range(3)
    ]


def test_a_fifo_queue_keeps_order_and_drops_repeats(queues: Queues) -> None:
    name = f"queue-{next(_numbers)}.fifo"
    url = queues.create(name, FifoQueue="true")
    sink = sqs_sink(name, endpoint=queues.url, group="of", deduplication_id="key")
    rows = [{"id": n, "of": "one", "key": f"k{n}"} for n in range(25)]
    write(sink, rows)
    write(sink, rows)
    assert read_in_order(queues, url) == list(range(25))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "https://sqs/1/orders"}, "name of a queue"),
        ({"endpoint": "sqs://host"}, "address of a service"),
        ({"visibility": "13h"}, "12 h"),
        ({"consumers": 0}, "at least 1"),
        ({"format": "xml"}, "format"),
        ({"metadata": {"offset": "o"}}, "no such metadata"),
    ],
)
def test_wrong_arguments_of_the_source(options: dict[str, Any], said: str) -> None:
    given = {"schema": SCHEMA, "queue": "orders"} | options
    with pytest.raises(UsageError, match=said):
        sqs_source(**given)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "a.fifo"},
        {"queue": "a", "group": "of"},
        {"queue": "a", "deduplication_id": "key"},
        {"queue": "a", "format": "csv"},
    ],
)
def test_wrong_arguments_of_the_sink(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        sqs_sink(**options)


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: orders}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    orders:
      sqs: {{queue: {queue}, endpoint: "{url}", consumers: 2, visibility: 5m}}
      schema: {{id: long}}
  sinks:
    out:
      from: orders
      sqs: {{queue: {queue}, endpoint: "{url}"}}
      guarantee: at_least_once
"""


def test_a_manifest(queues: Queues, queue: str, tmp_path: Path) -> None:
    queues.create(queue)
    file = tmp_path / "job.yaml"
    file.write_text(MANIFEST.format(path=tmp_path, queue=queue, url=queues.url))
    (source,) = [node.source for node in runnable(load_job(file)).graph.sources()]
    assert isinstance(source, SqsSource)
    assert (source.settings.consumers, source.settings.visibility_s) == (2, 300)


def test_a_job_sends_what_it_has_read(queues: Queues, queue: str, tmp_path: Path) -> None:
    url = queues.create(queue)
    job = hg.Job("numbers")
    rows = [{"id": n} for n in range(200)]
    job.read(from_list(rows, schema=SCHEMA), name="numbers").write(
        sqs_sink(queue, endpoint=queues.url), name="out"
    )
    job.checkpoint(every="1h", storage=str(tmp_path / "state"))
    job.run()
    assert sorted(json.loads(each["Body"])["id"] for each in queues.read(url)) == list(range(200))


def test_a_source_needs_checkpoints(queues: Queues, queue: str) -> None:
    queues.create(queue)
    job = hg.Job("numbers")
    job.read(source_of(queues, queue), name="numbers").write(blackhole(), name="out")
    with pytest.raises(PlanError, match="acknowledges messages at checkpoints"):
        job.run()
