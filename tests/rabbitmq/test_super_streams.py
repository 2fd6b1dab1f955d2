"""Super streams by name and TLS, on a broker of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import generator, pattern, rabbitmq_sink, rabbitmq_source, sequence
from headgate.connectors.rabbitmq.envelope import wrap
from headgate.connectors.rabbitmq.super_streams import partitions_by_key
from headgate.errors import PlanError, SourceError, UsageError
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import GuaranteeLike
from headgate.runtime.manifest import load_job
from headgate.state.snapshot import CommitPermit
from headgate.testing.connectors import (
    make_context,
    open_reader,
    read_all,
    read_batches,
    records_of,
)
from headgate.testing.servers.authority import Authority
from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.rabbitmq import RabbitServer, running
from headgate.tests.support.connector_runs import Fails, read_ids, write
from headgate.tests.support.rabbitmq_cases import RabbitStream, definitions, wait_for_partitions
from headgate.tests.support.skips import available

SCHEMA = {"id": "int64"}
SUPER = "clicks"
pytestmark = pytest.mark.timeout(240)


@dataclass
class Broker:
    """A broker with a super stream of two partitions, and TLS."""

    server: RabbitServer
    definitions: Path
    url_tls: str
    ca: str

    @property
    def url(self) -> str:
        return RabbitStream(self.server).direct_url

    def source(self, **options: Any) -> Any:
        given = {"url": self.url, "schema": SCHEMA, "super_stream": SUPER}
        return rabbitmq_source(**(given | options))

    def put(self, partition: int, *numbers: int) -> None:
        messages = [wrap(b'{"id": %d}' % number) for number in numbers]
        RabbitStream(self.server).publish(f"{SUPER}-{partition}", messages)


@contextmanager
def broker_in(directory: Path) -> Iterator[Broker]:
    """Run a broker with a super stream of two partitions."""
    file, tls = directory / "definitions.json", HeldPort()
    file.write_text(definitions(2, SUPER))
    authority = Authority(directory / "authority")
    certificate, key = authority.issue("localhost")
    settings = (
        f"load_definitions = {file}\nstream.listeners.ssl.1 = 127.0.0.1:{tls.number}\n"
        f"stream.advertised_tls_port = {tls.number}\nssl_options.cacertfile = {authority.file}\n"
        f"ssl_options.certfile = {certificate}\nssl_options.keyfile = {key}\n"
    )
    with available(running(directory / "server", settings)) as server:
        url_tls = f"rabbitmq-stream+tls://localhost:{tls.number}"
        made = Broker(server, file, url_tls, str(authority.file))
        wait_for_partitions(made.url, SUPER, 2)
        yield made
    tls.release()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker_in(tmp_path_factory.mktemp("rabbitmq-super")) as made:
        yield made


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker for a test that adds a partition, which cannot be taken away again."""
    with broker_in(tmp_path) as made:
        yield made


def test_partitions_of_a_super_stream_are_splits(broker: Broker) -> None:
    since = now()
    broker.put(0, 1, 2)
    broker.put(1, 3)
    source = broker.source(start=since, stop="latest", metadata={"stream": "of"})
    assert source.bounded
    assert not source.discovers
    assert source.describe() == f"rabbitmq({SUPER})"
    assert source.check_connection({}) == f"2 partitions of {SUPER}"
    rows = asyncio.run(read_all(source, 2))
    assert sorted((row["id"], row["of"]) for row in rows) == [
        *((1, "clicks-0"), (2, "clicks-0"), (3, "clicks-1")),
    ]


def test_a_super_stream_that_does_not_exist_is_named(broker: Broker) -> None:
    with pytest.raises(SourceError, match="no such super stream super_stream=`none`"):
        broker.source(super_stream="none").splits(1)


def test_streams_and_a_super_stream_exclude_each_other() -> None:
    options: dict[str, Any] = {"url": "rabbitmq-stream://host", "schema": SCHEMA}
    for wrong in ({}, {"streams": "a", "super_stream": "b"}, {"super_stream": ""}):
        with pytest.raises(UsageError, match=r"super stream|name of a stream"):
            rabbitmq_source(**options, **wrong)


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: clicks}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    clicks:
      rabbitmq:
        superStream: clicks
        url: {url}
        ca: {ca}
        start: {{time: "{start}"}}
        stop: {{time: "{stop}"}}
      schema: {{id: long}}
  sinks:
    out:
      from: clicks
      parquet: {{path: {path}/out}}
      guarantee: exactly_once
"""


def test_a_manifest_reads_a_super_stream_between_two_times_by_tls(
    broker: Broker, tmp_path: Path
) -> None:
    times = []
    for number in (10, 20, 30):
        times.append(datetime.now(UTC).isoformat())
        time.sleep(0.05)
        broker.put(0, number)
        broker.put(1, number + 1)
        time.sleep(0.05)
    file = tmp_path / "clicks.yaml"
    arguments = {"url": broker.url_tls, "ca": broker.ca, "start": times[1], "stop": times[2]}
    file.write_text(MANIFEST.format(path=tmp_path, **arguments))
    load_job(file).run()
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == [20, 21]


def test_tls_needs_the_authority_of_the_broker(broker: Broker) -> None:
    stream, options = f"{SUPER}-0", {"url": broker.url_tls, "ca": broker.ca}
    before = read_ids(rabbitmq_source(stream, schema=SCHEMA, stop="latest", **options))
    data = pa.RecordBatch.from_pylist([{"id": n} for n in range(500, 600)])
    write(rabbitmq_sink(stream, **options), data)
    found = read_ids(rabbitmq_source(stream, schema=SCHEMA, stop="latest", **options))
    assert found == [*before, *range(500, 600)]
    stranger = rabbitmq_source(stream, schema=SCHEMA, url=broker.url_tls)
    with pytest.raises(SourceError, match="certificate"):
        stranger.splits(1)


# -- the sink -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitions", "keys", "numbers"),
    [
        # of the tests of RabbitMQ's client for Java: the hashes themselves, and partitions
        (1 << 32, ["hello", "brave", "new"], [1321743225, 3825276426, 2970740106]),
        (3, [f"hello{n}" for n in range(1, 11)], [1, 0, 1, 2, 0, 2, 0, 1, 0, 2]),
        (5, [None, ""], [1, 1]),
    ],
)
def test_the_hash_is_that_of_other_clients(
    partitions: int, keys: list[str | None], numbers: list[int]
) -> None:
    assert partitions_by_key(pa.array(keys, pa.string()), partitions).tolist() == numbers
    large = pa.array(keys, pa.large_string())
    assert partitions_by_key(large, partitions).tolist() == numbers


ROWS = pa.RecordBatch.from_pylist([{"id": n, "user": f"hello{n}"} for n in range(1, 500)])


def by_partition(broker: Broker, since: datetime) -> dict[str, list[int]]:
    """Return the ids of each partition from a time on."""
    source = broker.source(stop="latest", start=since, metadata={"stream": "of"})
    found: dict[str, list[int]] = {}
    for row in asyncio.run(read_all(source, 2)):
        found.setdefault(row["of"], []).append(row["id"])
    return found


def expected(partitions: int = 2) -> dict[str, list[int]]:
    numbers = partitions_by_key(ROWS["user"], partitions)
    ids = ROWS["id"].to_numpy()
    return {f"{SUPER}-{n}": ids[numbers == n].tolist() for n in range(partitions)}


def now() -> datetime:
    """Return a time after all that is there."""
    time.sleep(0.01)
    return datetime.now(UTC)


def sink_of(broker: Broker, guarantee: GuaranteeLike) -> Any:
    return rabbitmq_sink(
        super_stream=SUPER, routing_key="user", url=broker.url, guarantee=guarantee
    )


def test_a_key_has_one_partition_and_keeps_its_order(broker: Broker) -> None:
    sink, since = sink_of(broker, "at_least_once"), now()
    write(sink, ROWS, attempt=2)  # the broker knows the messages of the first one
    assert by_partition(broker, since) == expected()
    assert sink.describe() == "rabbitmq(clicks by user)"
    assert sink.check_connection({}) == "2 partitions of clicks"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"stream": "a", "super_stream": "b", "routing_key": "user"},
        {"super_stream": "a"},
        {"stream": "a", "routing_key": "user"},
        {"super_stream": "a", "routing_key": ""},
    ],
)
def test_a_sink_needs_a_stream_or_a_super_stream_with_a_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a sink needs a stream, or a super stream"):
        rabbitmq_sink(url="rabbitmq-stream://host", **wrong)


def test_the_routing_key_must_be_a_column_of_texts() -> None:
    for key, said in (("id", "wrong type routing_key=`id`"), ("usr", "no such column")):
        sink = rabbitmq_sink(super_stream=SUPER, routing_key=key, url="rabbitmq-stream://host")
        with pytest.raises(PlanError, match=said):
            sink.bind(ROWS.schema)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_kill_of_the_broker_and_failures_of_the_job_double_nothing(
    broker: Broker, parallelism: int, tmp_path: Path
) -> None:
    sink, since = sink_of(broker, "exactly_once"), now()
    job = hg.Job(f"to-clicks-{parallelism}", parallelism=parallelism)
    job.checkpoint(every="50ms", storage=str(tmp_path / "state"))
    fields = {"id": sequence(), "user": pattern(prefix="user-", distinct=50)}
    (
        job.read(generator(fields, rows=1_000, rate=500, splits=2), name="numbers")
        .map(Fails(tmp_path, (300, 600)), into={"id": "long", "user": "string"})
        .write(sink, name="out")
    )
    broker.server.wait_until_durable()
    running_job = job.start()
    while not (tmp_path / "300").exists():
        time.sleep(0.01)
    broker.server.kill()
    broker.server.start()
    running_job.wait()
    assert (tmp_path / "600").exists()
    found = by_partition(broker, since)
    assert sorted(number for ids in found.values() for number in ids) == list(range(1_000))
    assert set(found) == {"clicks-0", "clicks-1"}


SINK_MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: to-clicks}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    users:
      csv: {{path: "{path}/users.csv"}}
      schema: {{id: long, user: string}}
  sinks:
    out:
      from: users
      rabbitmq: {{superStream: clicks, routingKey: user, url: {url}}}
      guarantee: exactly_once
"""


def test_a_manifest_writes_to_a_super_stream(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text(
        "id,user\n" + "".join(f"{row['id']},{row['user']}\n" for row in ROWS.to_pylist())
    )
    file = tmp_path / "job.yaml"
    file.write_text(SINK_MANIFEST.format(path=tmp_path, url=broker.url))
    since = now()
    load_job(file).run()
    assert by_partition(broker, since) == expected()


def add_partition(broker: Broker) -> None:
    """Make a third partition."""
    broker.definitions.write_text(definitions(3, SUPER))
    broker.server.wait_until_durable()
    broker.server.kill()
    broker.server.start()
    wait_for_partitions(broker.url, SUPER, 3)


def test_a_partition_that_is_added_is_found_and_read_from_its_beginning(own_broker: Broker) -> None:
    broker = own_broker
    source = broker.source(stop=None, start="latest")
    assert source.discovers

    known = {source.split_key(split): split for split in source.splits(1)}
    assert list(known) == ["clicks-0", "clicks-1"]
    add_partition(broker)
    broker.put(2, 1_001)
    splits = source.discover(known)
    assert splits[:2] == list(known.values())

    async def run() -> list[int]:
        reader = open_reader(source, splits[:2])
        await asyncio.to_thread(broker.put, 0, 1_000)
        found = [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        reader.add_splits(splits[2:])
        found += [row for batch in await read_batches(reader, 1) for row in records_of(batch)]
        assert len(reader.snapshot()) == 3
        assert not reader.finished
        reader.close()
        return [row["id"] for row in found]

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [1_000, 1_001]


def test_an_interrupted_commit_goes_to_the_partitions_it_went_to_before(own_broker: Broker) -> None:
    broker = own_broker
    sink, since = sink_of(broker, "exactly_once"), now()

    async def staged(checkpoint_id: int, *before: list[bytes]) -> list[bytes]:
        """Commit what was staged before, then stage and commit the rows."""
        permit = CommitPermit("job", 1, checkpoint_id)
        writer = sink.writer()
        writer.open(make_context())
        await asyncio.to_thread(writer.prepare)
        for committables in before:
            await asyncio.to_thread(writer.commit, committables, permit)
        writer.write(ColumnBatch(ROWS))
        committables = await asyncio.to_thread(writer.roll(checkpoint_id))
        await asyncio.to_thread(writer.commit, committables, permit)
        await asyncio.to_thread(writer.close)
        return list(committables)

    first = asyncio.run(staged(1))
    add_partition(broker)
    began = now()
    asyncio.run(staged(2, first))
    found = by_partition(broker, since)
    assert by_partition(broker, began) == expected(3)
    assert {
        name: ids[: len(expected()[name])] for name, ids in found.items() if name in expected()
    } == expected()
    assert sum(map(len, found.values())) == 2 * ROWS.num_rows
