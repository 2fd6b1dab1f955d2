"""Sources and sinks: one file or folder per system that records come from or go to.

Names are loaded when they are first used: a job, and each worker, loads the connectors that it has.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# These functions have the name of their module: an import of that module would put it in their place.
from .collect import collect
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
from .nexmark import nexmark
from .throttle import stop_after_idle, throttle

_NAMES = {
    "collections": ("Crash", "Pause", "from_list"),
    "delta.sink": ("delta_sink",),
    "files.sink": ("csv_sink", "files_sink", "json_sink", "parquet_sink"),
    "files.source": ("csv_source", "files_source", "json_source", "parquet_source"),
    "formats.avro": ("avro_format",),
    "formats.json": ("json_format",),
    "formats.protobuf": ("protobuf_format",),
    "formats.schema_registry": ("schema_registry",),
    "functions.sink": ("function_sink",),
    "functions.write_ahead": ("Epoch", "write_ahead_sink"),
    "http.events": ("sse_source",),
    "http.polling": ("http_source",),
    "http.sink": ("http_sink",),
    "http.websocket": ("websocket_source",),
    "hybrid": ("hybrid_source",),
    "iceberg.sink": ("iceberg_sink",),
    "kafka.security": ("KafkaSecurity",),
    "kafka.sink": ("kafka_sink",),
    "kafka.source": ("kafka_source",),
    "kinesis.sink": ("kinesis_sink",),
    "kinesis.source": ("kinesis_source",),
    "lines": ("socket_sink", "socket_source", "stdin_source"),
    "mqtt.sink": ("mqtt_sink",),
    "mqtt.source": ("mqtt_source",),
    "mysql.cdc_source": ("mysql_cdc_source",),
    "nats.sink": ("nats_sink",),
    "nats.source": ("nats_source",),
    "position_column": ("with_position",),
    "postgres.cdc_source": ("postgres_cdc_source",),
    "postgres.lookup": ("postgres_lookup",),
    "postgres.sink": ("postgres_sink",),
    "postgres.table_source": ("postgres_source",),
    "pulsar.sink": ("pulsar_sink",),
    "pulsar.source": ("pulsar_source",),
    "rabbitmq.sink": ("rabbitmq_sink",),
    "rabbitmq.source": ("rabbitmq_source",),
    "ray_data.source": ("ray_dataset_source",),
    "redis.sink": ("redis_sink",),
    "redis.source": ("redis_source",),
    "sinks": ("blackhole", "print_sink"),
    "spark.source": ("spark_source",),
    "sqs.sink": ("sqs_sink",),
    "sqs.source": ("sqs_source",),
}
"""The other public names, by the module that each is in."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

if TYPE_CHECKING:  # the same names, which type checkers take from imports only
    from .collections import Crash as Crash
    from .collections import Pause as Pause
    from .collections import from_list as from_list
    from .delta.sink import delta_sink as delta_sink
    from .files.sink import csv_sink as csv_sink
    from .files.sink import files_sink as files_sink
    from .files.sink import json_sink as json_sink
    from .files.sink import parquet_sink as parquet_sink
    from .files.source import csv_source as csv_source
    from .files.source import files_source as files_source
    from .files.source import json_source as json_source
    from .files.source import parquet_source as parquet_source
    from .formats.avro import avro_format as avro_format
    from .formats.json import json_format as json_format
    from .formats.protobuf import protobuf_format as protobuf_format
    from .formats.schema_registry import schema_registry as schema_registry
    from .functions.sink import function_sink as function_sink
    from .functions.write_ahead import Epoch as Epoch
    from .functions.write_ahead import write_ahead_sink as write_ahead_sink
    from .http.events import sse_source as sse_source
    from .http.polling import http_source as http_source
    from .http.sink import http_sink as http_sink
    from .http.websocket import websocket_source as websocket_source
    from .hybrid import hybrid_source as hybrid_source
    from .iceberg.sink import iceberg_sink as iceberg_sink
    from .kafka.security import KafkaSecurity as KafkaSecurity
    from .kafka.sink import kafka_sink as kafka_sink
    from .kafka.source import kafka_source as kafka_source
    from .kinesis.sink import kinesis_sink as kinesis_sink
    from .kinesis.source import kinesis_source as kinesis_source
    from .lines import socket_sink as socket_sink
    from .lines import socket_source as socket_source
    from .lines import stdin_source as stdin_source
    from .mqtt.sink import mqtt_sink as mqtt_sink
    from .mqtt.source import mqtt_source as mqtt_source
    from .mysql.cdc_source import mysql_cdc_source as mysql_cdc_source
    from .nats.sink import nats_sink as nats_sink
    from .nats.source import nats_source as nats_source
    from .position_column import with_position as with_position
    from .postgres.cdc_source import postgres_cdc_source as postgres_cdc_source
    from .postgres.lookup import postgres_lookup as postgres_lookup
    from .postgres.sink import postgres_sink as postgres_sink
    from .postgres.table_source import postgres_source as postgres_source
    from .pulsar.sink import pulsar_sink as pulsar_sink
    from .pulsar.source import pulsar_source as pulsar_source
    from .rabbitmq.sink import rabbitmq_sink as rabbitmq_sink
    from .rabbitmq.source import rabbitmq_source as rabbitmq_source
    from .ray_data.source import ray_dataset_source as ray_dataset_source
    from .redis.sink import redis_sink as redis_sink
    from .redis.source import redis_source as redis_source
    from .sinks import blackhole as blackhole
    from .sinks import print_sink as print_sink
    from .spark.source import spark_source as spark_source
    from .sqs.sink import sqs_sink as sqs_sink
    from .sqs.source import sqs_source as sqs_source

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
    "mysql_cdc_source",
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
    "pulsar_sink",
    "pulsar_source",
    "rabbitmq_sink",
    "rabbitmq_source",
    "random_float",
    "random_int",
    "ray_dataset_source",
    "redis_sink",
    "redis_source",
    "schema_registry",
    "sequence",
    "socket_sink",
    "socket_source",
    "spark_source",
    "sqs_sink",
    "sqs_source",
    "sse_source",
    "stdin_source",
    "stop_after_idle",
    "throttle",
    "websocket_source",
    "with_position",
    "write_ahead_sink",
]

if not TYPE_CHECKING:  # to a type checker it would say that any name is there

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
