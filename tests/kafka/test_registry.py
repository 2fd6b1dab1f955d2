"""Jobs whose schemas are in a real schema registry."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import pytest

import headgate as hg
from headgate.connectors import (
    avro_format,
    kafka_sink,
    kafka_source,
    parquet_sink,
    protobuf_format,
    schema_registry,
)
from headgate.connectors.formats.schema_registry import RegistryClient, header_of, subject_of
from headgate.errors import HeadgateError
from headgate.runtime.manifest import load_job
from headgate.testing.servers.apicurio import ApicurioServer, running
from headgate.testing.servers.kafka import KafkaServer
from headgate.tests.formats.test_protobuf import DESCRIPTOR
from headgate.tests.kafka.test_jobs import written
from headgate.tests.support.connector_runs import Fails
from headgate.tests.support.skips import available

NewTopic = Callable[..., str]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApicurioServer]:
    """A running registry."""
    with available(running(tmp_path_factory.mktemp("registry") / "apicurio")) as server:
        yield server


def record(*fields: Any) -> dict[str, Any]:
    made = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": "Click", "namespace": "shop", "fields": made}


OLD = record(("id", "int"), ("user", "string"))
NEW = record(("user", "string"), ("id", "long"), ("page", ["null", "string"]))
ROWS = 400


def register(registry: ApicurioServer, topic: str, schema: Any, kind: str = "AVRO") -> int:
    client = RegistryClient(schema_registry(registry.url))
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return client.id_of(subject_of(topic), kind, text, register=True)


def message(id: int, schema: Any, row: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    fastavro.schemaless_writer(file, fastavro.parse_schema(schema), row)
    return header_of(id) + file.getvalue()


def test_schemas_evolve_and_output_is_exactly_once(
    broker: KafkaServer, registry: ApicurioServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    """Two schemas of writers in one topic, a job that fails twice, and a topic with a schema of its own."""
    topic, out = new_topic(), new_topic()
    old, new = register(registry, topic, OLD), register(registry, topic, NEW)
    assert old != new
    rows = [{"id": n, "user": f"u{n}", "page": None if n % 3 else "p"} for n in range(ROWS)]
    values: list[bytes | None] = [
        message(old, OLD, row) if n % 2 else message(new, NEW, row) for n, row in enumerate(rows)
    ]
    broker.produce(topic, values)
    columns = {"id": "int64", "user": "string", "page": "string"}
    job = hg.Job("clicks")
    job.checkpoint(every="20ms", storage=str(tmp_path / "state"))
    job.restart(hg.fixed_delay(attempts=10, delay="10ms"))
    read = avro_format(registry=schema_registry(registry.url))
    write = avro_format(registry=schema_registry(registry.url, auto_register=True))
    clicks = job.read(
        kafka_source(
            topic,
            bootstrap=broker.bootstrap,
            schema=columns,
            format=read,
            stop="latest",
            batch_rows=20,
        ),
        name="clicks",
    )
    (tmp_path / "marks").mkdir()
    seen = clicks.map(Fails(tmp_path / "marks", (100, 300)), into=columns, name="fails")
    sink = kafka_sink(out, bootstrap=broker.bootstrap, format=write, guarantee="exactly_once")
    seen.write(sink, name="out")
    job.run()
    assert len(list((tmp_path / "marks").iterdir())) == 2

    copy = tmp_path / "copy.yaml"
    copy.write_text(
        MANIFEST.format(topic=out, bootstrap=broker.bootstrap, url=registry.url, path=tmp_path)
    )
    load_job(copy).run()
    expected = [{**row, "page": None if n % 2 else row["page"]} for n, row in enumerate(rows)]
    found = sorted(written(tmp_path / "out"), key=lambda row: int(row["id"]))
    assert found == expected


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: copy}}
spec:
  checkpoint: {{every: 1h, storage: {path}/copies}}
  sources:
    clicks:
      kafka:
        topics: [{topic}]
        bootstrap: {bootstrap}
        stop: latest
        format: {{avro: {{registry: {{url: "{url}", timeout: 20s, responseMax: 1mb}}}}}}
      schema: {{id: long, user: string, page: string}}
  sinks:
    out:
      from: clicks
      parquet: {{path: {path}/out}}
      guarantee: exactly_once
"""


def test_protobuf_by_the_schemas_of_the_registry(
    broker: KafkaServer, registry: ApicurioServer, new_topic: NewTopic, tmp_path: Path
) -> None:
    """A sink registers its schema, and a source needs no other one."""
    topic = new_topic()
    schemas = schema_registry(registry.url, auto_register=True)
    rows = [{"p_int64": n, "p_string": f"u{n}", "kind": "PAID"} for n in range(20)]
    columns = {"p_int64": "int64", "p_string": "string", "kind": "string"}
    write = protobuf_format("shop.Order", descriptor=DESCRIPTOR, registry=schemas)
    job = hg.Job("orders")
    orders = job.read(hg.connectors.from_list(rows, schema=columns), name="orders")
    sink = kafka_sink(topic, bootstrap=broker.bootstrap, format=write, guarantee="none")
    orders.write(sink, name="out")
    job.run()
    source = kafka_source(
        topic,
        bootstrap=broker.bootstrap,
        schema=columns,
        format=protobuf_format(registry=schemas),
        stop="latest",
    )
    back = hg.Job("back")
    back.checkpoint(every="1h", storage=str(tmp_path / "state"))
    seen = back.read(source, name="orders")
    seen.write(parquet_sink(tmp_path / "out", guarantee="exactly_once"), name="out")
    back.run()
    assert written(tmp_path / "out") == rows


def test_a_sink_whose_schema_is_not_registered_does_not_start(
    broker: KafkaServer, registry: ApicurioServer, new_topic: NewTopic
) -> None:
    job = hg.Job("clicks")
    format = avro_format(registry=schema_registry(registry.url))
    source = hg.connectors.from_list([{"id": 1}], schema={"id": "int64"})
    sink = kafka_sink(new_topic(), bootstrap=broker.bootstrap, format=format, guarantee="none")
    job.read(source, name="rows").write(sink, name="out")
    with pytest.raises(HeadgateError, match="auto_register=True"):
        job.run()


def test_a_registry_that_is_away_is_an_error_with_the_place(
    broker: KafkaServer, new_topic: NewTopic
) -> None:
    topic = new_topic()
    broker.produce(topic, [message(1, OLD, {"id": 1, "user": "u"})])
    format = avro_format(registry=schema_registry("http://127.0.0.1:1", patience="100ms"))
    source = kafka_source(
        topic, bootstrap=broker.bootstrap, schema={"id": "int64"}, format=format, stop="latest"
    )
    job = hg.Job("clicks")
    job.read(source, name="clicks").write(hg.connectors.blackhole(), name="out")
    with pytest.raises(HeadgateError, match=f"schema 1[^0-9][\\s\\S]*{topic}/0 offset 0"):
        job.run()
