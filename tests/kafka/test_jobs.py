"""Whole jobs that read Kafka: failures of the job and of the broker, and the form of a manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import kafka_source, parquet_sink
from headgate.runtime.manifest import load_job
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.conftest import broker_killed_at
from headgate.tests.support.connector_runs import Fails

NewTopic = Callable[..., str]
PARTITIONS, ROWS = 3, 3_000
SCHEMA = {"id": "int64", "user": "string"}


def fill(broker: KafkaServer, topic: str, first: int = 0) -> None:
    for partition in range(PARTITIONS):
        ids = range(first + partition, first + ROWS, PARTITIONS)
        fill_partition(broker, topic, partition, ids)


def fill_partition(broker: KafkaServer, topic: str, partition: int, ids: Iterable[int]) -> None:
    values: list[bytes | None] = [
        json.dumps({"id": id_, "user": f"u{id_ % 7}"}).encode() for id_ in ids
    ]
    broker.produce(topic, values, partition=partition)


def written(directory: Path) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted(directory.glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_every_record_counts_once_through_failures(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path, parallelism: int
) -> None:
    """The job fails three times, and the broker is killed while it reads."""
    topic = new_topic(PARTITIONS)
    fill(broker, topic)
    job = hg.Job("clicks", parallelism=parallelism)
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=10, delay="10ms"))
    clicks = job.read(
        kafka_source(
            topic,
            bootstrap=broker.bootstrap,
            schema=SCHEMA,
            metadata={"partition": "part", "offset": "at"},
            stop="latest",
            batch_rows=50,
        ),
        name="clicks",
    )
    (tmp_path / "marks").mkdir()
    fails = Fails(tmp_path / "marks", (500, 1_500, 2_500))
    columns = {**SCHEMA, "part": "int32", "at": "int64"}
    seen = clicks.map(fails, into=columns, name="fails")
    seen.write(parquet_sink(tmp_path / "out", guarantee="exactly_once"), name="out")

    with broker_killed_at(tmp_path / "marks" / "500", broker):
        job.run()
    found = written(tmp_path / "out")
    assert sorted(row["id"] for row in found) == list(range(ROWS))
    places = {(row["part"], row["at"]) for row in found}
    assert places == {(part, at) for part in range(PARTITIONS) for at in range(ROWS // PARTITIONS)}
    assert len(list((tmp_path / "marks").iterdir())) == 3


def test_a_second_run_goes_on_behind_the_first(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    """A job that is stopped with a checkpoint resumes at its offsets, not at those of a group."""
    topic = new_topic(PARTITIONS)
    fill(broker, topic)

    def run_until(rows: int) -> None:
        job = hg.Job("clicks", parallelism=2)
        job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
        clicks = job.read(
            kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA, batch_rows=100),
            name="clicks",
        )
        clicks.write(parquet_sink(tmp_path / "out", guarantee="exactly_once"), name="out")
        with job.start() as handle:
            while len(written(tmp_path / "out")) < rows:
                handle.status()
            handle.stop()

    run_until(ROWS)
    fill(broker, topic, first=ROWS)
    run_until(2 * ROWS)
    assert sorted(row["id"] for row in written(tmp_path / "out")) == list(range(2 * ROWS))


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: clicks}}
spec:
  checkpoint: {{every: 1h, storage: {path}/state}}
  sources:
    clicks:
      kafka:
        topics: [{topic}]
        bootstrap: {bootstrap}
        metadata: {{offset: at, key: who}}
        start: {{offsets: {{{topic}: {{0: 2}}}}}}
        stop: latest
        group: dashboards
        properties: {{client.rack: a}}
      schema: {{id: long, user: string}}
      onBadRecord: side_output
  sinks:
    out:
      from: clicks
      parquet: {{path: {path}/out}}
      guarantee: exactly_once
    rejected:
      from: clicks.rejected
      parquet: {{path: {path}/rejected}}
      guarantee: exactly_once
"""


def test_a_manifest_reads_topics(broker: KafkaServer, new_topic: NewTopic, tmp_path: Path) -> None:
    topic = new_topic()
    broker.produce(topic, [b'{"id": %d, "user": "u"}' % id_ for id_ in range(5)] + [b"?"])
    file = tmp_path / "clicks.yaml"
    file.write_text(MANIFEST.format(topic=topic, bootstrap=broker.bootstrap, path=tmp_path))
    load_job(file).run()
    assert [(row["id"], row["at"], row["who"]) for row in written(tmp_path / "out")] == [
        (2, 2, None),
        (3, 3, None),
        (4, 4, None),
    ]
    (bad,) = written(tmp_path / "rejected")
    assert (bad["offset"], bad["value"]) == (5, b"?")
