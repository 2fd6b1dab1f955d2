"""A broker is killed while a job reads and writes."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import headgate as hg
from headgate.connectors import parquet_sink, pulsar_sink
from headgate.testing.servers.pulsar import PulsarServer
from headgate.tests.pulsar.conftest import NewTopic
from headgate.tests.pulsar.test_topics import source_of, until, values
from headgate.tests.support.connector_runs import read_ids
from headgate.tests.support.pulsar_cases import publish

ROWS = 20_000


def test_a_broker_is_killed_while_a_job_reads_and_writes(
    server: PulsarServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    """What is read is right exactly once, and what is written is there at least once."""
    topic, copies = new_topic(2), new_topic()
    for number in range(2):
        publish(server.url, f"{topic}-partition-{number}", values(range(number, ROWS, 2)))

    def slowly(batch: Any) -> Any:
        time.sleep(0.01)
        return batch

    job = hg.Job("killed", parallelism=2)
    job.checkpoint(every="100ms", storage=tmp_path / "checkpoints")
    source = source_of(server, topic, batch_rows=100, receive_queue=100)
    read = job.read(source, name="in").map_batches(slowly, name="slowly")
    read.write(parquet_sink(str(tmp_path / "out"), guarantee="exactly_once"), name="out")
    read.write(pulsar_sink(copies, url=server.url), name="copies")

    def written() -> list[int]:
        files = (tmp_path / "out").glob("[!.]*.parquet")
        return [n for file in files for n in pq.read_table(file)["id"].to_pylist()]

    with job.start() as handle:
        until(lambda: len(written()) > 500)
        server.kill()
        assert len(written()) < ROWS
        server.start()
        handle.wait(240)
    assert sorted(written()) == list(range(ROWS))
    assert set(Counter(read_ids(source_of(server, copies)))) == set(range(ROWS))
