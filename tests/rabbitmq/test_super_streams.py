"""Super streams by name and TLS, on a broker of their own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headgate.connectors import rabbitmq_sink, rabbitmq_source
from headgate.connectors.rabbitmq.envelope import wrap
from headgate.errors import SourceError, UsageError
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import open_reader, read_all, read_batches, records_of
from headgate.testing.servers.authority import Authority
from headgate.testing.servers.process import HeldPort
from headgate.testing.servers.rabbitmq import RabbitServer, running
from headgate.tests.support.connector_runs import read_ids, write
from headgate.tests.support.skips import available
from headgate.tests.support.stream_cases import RabbitStream

SCHEMA = {"id": "int64"}
SUPER = "clicks"
_READY_S_MAX = 60.0
pytestmark = pytest.mark.timeout(240)


def definitions(partitions: int) -> str:
    """Return what a broker has when it begins: a super stream, as its own tool makes it, and the user."""
    salt = b"salt"
    password = base64.b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
    numbers, kept = range(partitions), {"vhost": "/", "durable": True, "auto_delete": False}
    every = dict.fromkeys(("configure", "write", "read"), ".*")
    bound = {"source": SUPER, "vhost": "/", "destination_type": "queue"}
    exchange = {"name": SUPER, "type": "direct", "internal": False, **kept}
    return json.dumps(
        {
            "users": [{"name": "guest", "password_hash": password, "tags": "administrator"}],
            "vhosts": [{"name": "/"}],
            "permissions": [{"user": "guest", "vhost": "/", **every}],
            "exchanges": [exchange | {"arguments": {"x-super-stream": True}}],
            "queues": [
                kept | {"name": f"{SUPER}-{n}", "arguments": {"x-queue-type": "stream"}}
                for n in numbers
            ],
            "bindings": [
                bound
                | {"destination": f"{SUPER}-{n}", "routing_key": str(n)}
                | {"arguments": {"x-stream-partition-order": n}}
                for n in numbers
            ],
        }
    )


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

    def wait_for(self, partitions: int) -> None:
        """Wait until the broker has made its streams, which it does after it answers."""
        deadline = time.monotonic() + _READY_S_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(SourceError):
                if len(self.source(stop=None, start="latest").splits(1)) == partitions:
                    return
            time.sleep(0.1)
        raise TimeoutError("the broker has not made its streams")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("rabbitmq-super")
    file, tls = directory / "definitions.json", HeldPort()
    file.write_text(definitions(2))
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
        made.wait_for(2)
        yield made
    tls.release()


def test_partitions_of_a_super_stream_are_splits(broker: Broker) -> None:
    broker.put(0, 1, 2)
    broker.put(1, 3)
    source = broker.source(stop="latest", metadata={"stream": "of"})
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


def test_a_partition_that_is_added_is_found_and_read_from_its_beginning(broker: Broker) -> None:
    """It is the last test, as the partition stays."""
    source = broker.source(stop=None, start="latest")
    assert source.discovers

    known = {source.split_key(split): split for split in source.splits(1)}
    assert list(known) == ["clicks-0", "clicks-1"]
    broker.definitions.write_text(definitions(3))
    broker.server.wait_until_durable()
    broker.server.kill()
    broker.server.start()
    broker.wait_for(3)
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
