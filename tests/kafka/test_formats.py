"""Jobs that read and write topics in other formats than JSON."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import pytest

import headgate as hg
from headgate.connectors import avro_format, kafka_sink, kafka_source
from headgate.errors import HeadgateError
from headgate.runtime.manifest import load_job
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.kafka.test_jobs import written
from headgate.tests.kafka.test_sink import written as topic_rows
from headgate.tests.support.connector_runs import Fails

NewTopic = Callable[..., str]
PARTITIONS, ROWS = 2, 1_000
SCHEMA = {
    "type": "record",
    "name": "Click",
    "fields": [{"name": "id", "type": "long"}, {"name": "user", "type": ["null", "string"]}],
}
COLUMNS = {"id": "int64", "user": "string"}


def messages(ids: Any) -> list[bytes | None]:
    schema = fastavro.parse_schema(SCHEMA)
    made: list[bytes | None] = []
    for id_ in ids:
        file = io.BytesIO()
        fastavro.schemaless_writer(file, schema, {"id": id_, "user": f"u{id_}"})
        made.append(file.getvalue())
    return made


def fill(broker: KafkaServer, topic: str) -> None:
    for partition in range(PARTITIONS):
        broker.produce(topic, messages(range(partition, ROWS, PARTITIONS)), partition=partition)


def test_from_avro_to_avro_exactly_once_through_failures(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic, out = new_topic(PARTITIONS), new_topic()
    fill(broker, topic)
    job = hg.Job("clicks", parallelism=2)
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=10, delay="10ms"))
    clicks = job.read(
        kafka_source(
            topic,
            bootstrap=broker.bootstrap,
            format=avro_format(schema=SCHEMA),
            stop="latest",
            batch_rows=50,
        ),
        name="clicks",
    )
    (tmp_path / "marks").mkdir()
    seen = clicks.map(Fails(tmp_path / "marks", (300, 700)), into=COLUMNS, name="fails")
    sink = kafka_sink(
        out, bootstrap=broker.bootstrap, format=avro_format(), guarantee="exactly_once"
    )
    seen.write(sink, name="out")
    job.run()
    assert len(list((tmp_path / "marks").iterdir())) == 2
    found = topic_rows(broker, out, schema=COLUMNS, format=avro_format(schema=NULLABLE))
    assert sorted((row["id"], row["user"]) for row in found) == [(n, f"u{n}") for n in range(ROWS)]


NULLABLE = {
    **SCHEMA,
    "fields": [{"name": "id", "type": ["null", "long"]}, SCHEMA["fields"][1]],  # type: ignore[index]
}
"""What a sink makes of columns that may be null."""
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
        metadata: {{offset: at}}
        stop: latest
        format:
          avro:
            schema:
              type: record
              name: Click
              fields:
                - {{name: id, type: long}}
                - {{name: user, type: ["null", string]}}
      schema: {{id: long, user: string}}
      onBadRecord: side_output
  sinks:
    out:
      from: clicks
      parquet: {{path: {path}/out}}
      guarantee: exactly_once
    copy:
      from: clicks
      kafka: {{topic: {out}, bootstrap: {bootstrap}, format: {{avro: {{}}}}}}
      guarantee: at_least_once
    rejected:
      from: clicks.rejected
      parquet: {{path: {path}/rejected}}
      guarantee: exactly_once
"""


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_bad_message_is_set_aside_with_its_place(
    broker: KafkaServer, new_topic: NewTopic, tmp_path: Path, place: int
) -> None:
    topic, out = new_topic(), new_topic()
    values = messages(range(5))
    values[place] = b"\x02\x02\x7f"
    broker.produce(topic, values)
    file = tmp_path / "clicks.yaml"
    text = MANIFEST.format(topic=topic, out=out, bootstrap=broker.bootstrap, path=tmp_path)
    file.write_text(text)
    load_job(file).run()
    good = [n for n in range(5) if n != place]
    rows = written(tmp_path / "out")
    assert [(row["id"], row["user"], row["at"]) for row in rows] == [(n, f"u{n}", n) for n in good]
    (bad,) = written(tmp_path / "rejected")
    assert (bad["topic"], bad["partition"], bad["offset"]) == (topic, 0, place)
    assert (bad["value"], bad["reason"]) == (
        values[place],
        "a value is longer than what is left of the message",
    )
    assert len(topic_rows(broker, out, schema=None, format="raw")) == 4


def test_a_job_that_fails_at_a_bad_message_says_where(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    broker.produce(topic, [*messages([1]), b""])
    source = kafka_source(
        topic,
        bootstrap=broker.bootstrap,
        schema={"user": "string"},
        format=avro_format(schema=SCHEMA),
        stop="latest",
    )
    job = hg.Job("clicks")
    job.read(source, name="clicks").write(hg.connectors.blackhole(), name="out")
    with pytest.raises(HeadgateError, match=f"{topic}/0 offset 1"):
        job.run()
