"""Sources and sinks: one file or folder per system that records come from or go to."""

from __future__ import annotations

from .collect import collect
from .collections import Crash, Pause, from_list
from .delta.sink import delta_sink
from .files.sink import csv_sink, files_sink, json_sink, parquet_sink
from .files.source import csv_source, files_source, json_source, parquet_source
from .formats.avro import avro_format
from .formats.json import json_format
from .formats.protobuf import protobuf_format
from .formats.schema_registry import schema_registry
from .functions.sink import function_sink
from .functions.write_ahead import Epoch, write_ahead_sink
from .generator import (
    choice,
    constant,
    event_time,
    generator,
    numbers,
    pattern,
    random_float,
    random_int,
    sequence,
)
from .http.events import sse_source
from .http.polling import http_source
from .http.sink import http_sink
from .hybrid import hybrid_source
from .iceberg.sink import iceberg_sink
from .kafka.security import KafkaSecurity
from .kafka.sink import kafka_sink
from .kafka.source import kafka_source
from .kinesis.sink import kinesis_sink
from .kinesis.source import kinesis_source
from .lines import socket_sink, socket_source, stdin_source
from .mqtt.sink import mqtt_sink
from .mqtt.source import mqtt_source
from .nats.sink import nats_sink
from .nats.source import nats_source
from .nexmark import nexmark
from .position_column import with_position
from .postgres.cdc_source import postgres_cdc_source
from .postgres.lookup import postgres_lookup
from .postgres.sink import postgres_sink
from .postgres.table_source import postgres_source
from .rabbitmq.sink import rabbitmq_sink
from .rabbitmq.source import rabbitmq_source
from .redis.sink import redis_sink
from .redis.source import redis_source
from .sinks import blackhole, print_sink
from .spark.source import spark_source
from .throttle import stop_after_idle, throttle

__all__ = [
    "Crash",
    "Epoch",
    "KafkaSecurity",
    "Pause",
    "avro_format",
    "blackhole",
    "choice",
    "collect",
    "constant",
    "csv_sink",
    "csv_source",
    "delta_sink",
    "event_time",
    "files_sink",
    "files_source",
    "from_list",
    "function_sink",
    "generator",
    "http_sink",
    "http_source",
    "hybrid_source",
    "iceberg_sink",
    "json_format",
    "json_sink",
    "json_source",
    "kafka_sink",
    "kafka_source",
    "kinesis_sink",
    "kinesis_source",
    "mqtt_sink",
    "mqtt_source",
    "nats_sink",
    "nats_source",
    "nexmark",
    "numbers",
    "parquet_sink",
    "parquet_source",
    "pattern",
    "postgres_cdc_source",
    "postgres_lookup",
    "postgres_sink",
    "postgres_source",
    "print_sink",
    "protobuf_format",
    "rabbitmq_sink",
    "rabbitmq_source",
    "random_float",
    "random_int",
    "redis_sink",
    "redis_source",
    "schema_registry",
    "sequence",
    "socket_sink",
    "socket_source",
    "spark_source",
    "sse_source",
    "stdin_source",
    "stop_after_idle",
    "throttle",
    "with_position",
    "write_ahead_sink",
]


def __dir__() -> list[str]:
    return sorted(__all__)
