"""The connectors that a manifest can name: their fields, and how they become sources and sinks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..api.manifest.fields import (
    REFERENCE,
    AnyText,
    Anything,
    BooleanKind,
    ChoiceKind,
    Field,
    IntegerKind,
    Items,
    ListOf,
    NumberKind,
    Section,
    Table,
    TextKind,
    duration,
    size,
)
from ..api.manifest.references import resolve_function
from ..api.manifest.registry import LookupConnector, SinkConnector, SourceConnector, SourceSpec
from ..errors import UsageError
from ..operators.sink import IfExists, Sink
from ..operators.source import Source
from .arguments import ON_LOST
from .changes.source import change_fields
from .delta.sink import DeltaSink, delta_sink
from .files.sink import FileSink, csv_sink, files_sink, json_sink, parquet_sink
from .files.source import csv_source, files_source, json_source, parquet_source
from .formats.fields import format_field, with_format
from .formats.text import OUTPUT_FORMATS
from .functions.manifest import (
    FUNCTION,
    WRITE_AHEAD,
    made_function_sink,
    made_write_ahead_sink,
)
from .functions.sink import FunctionSink
from .functions.write_ahead import WriteAheadSink
from .generator import generator
from .http.manifest import (
    HTTP_SINK,
    HTTP_SOURCE,
    SSE_SOURCE,
    WEBSOCKET_SOURCE,
    made_http_sink,
    made_http_source,
    made_sse_source,
    made_websocket_source,
)
from .http.sink import HttpSink
from .hybrid import hybrid_connector
from .iceberg.catalog import KINDS
from .iceberg.sink import IcebergSink, iceberg_sink
from .kafka.model import METADATA
from .kafka.security import MECHANISMS, KafkaSecurity
from .kafka.sink import WRITABLE, KafkaSink, kafka_sink
from .kafka.source import kafka_source
from .kinesis import manifest as kinesis
from .kinesis.sink import KinesisSink
from .lines import SocketSink, socket_sink, socket_source, stdin_source
from .manifest_fields import (
    PASSWORD,
    message_fields,
    metadata_field,
    position_fields,
    with_positions,
)
from .mqtt import manifest as mqtt
from .mqtt.sink import MqttSink
from .mysql import manifest as mysql
from .nats import manifest as nats
from .nats.sink import NatsSink
from .nexmark import SCHEMAS, nexmark
from .position_column import with_position
from .postgres import cdc_model
from .postgres.cdc_source import postgres_cdc_source
from .postgres.lookup import MISSING, postgres_lookup
from .postgres.sink import CREATE, MODES, PostgresSink, postgres_sink
from .postgres.table_source import postgres_source
from .pulsar import manifest as pulsar
from .pulsar.sink import PulsarSink
from .rabbitmq import manifest as rabbitmq
from .rabbitmq.sink import RabbitSink
from .ray_data.source import ray_dataset_source
from .redis import manifest as redis
from .redis.sink import RedisSink
from .sinks import BlackholeSink, PrintSink, blackhole, print_sink
from .spark.source import spark_source
from .sqs import manifest as sqs
from .sqs.sink import SqsSink
from .throttle import stop_after_idle, throttle

_BATCH_ROWS = Field(IntegerKind(1), "the most rows of a batch")
_STORAGE_OPTIONS = Field(Items(AnyText()), "`s3.*` options, if they differ from the job's")
_GENERATED = {
    "rate": Field(NumberKind(), "rows per second over all subtasks; absent: no limit"),
    "batchRows": _BATCH_ROWS,
    "splits": Field(
        IntegerKind(1, 32768), "parts the rows are dealt into: the most useful subtasks"
    ),
    "seed": Field(IntegerKind(), "another seed, other data"),
}
_FILES = {
    "rate": Field(NumberKind(), "rows per second over all subtasks; absent: no limit"),
    "path": Field(TextKind(), "a file, a directory or a glob; local or s3://", required=True),
    "discoverEvery": Field(
        duration(),
        "how often to look for new files, each of which is read once; absent: only the files that are "
        "there at the start are read",
    ),
    "batchRows": _BATCH_ROWS,
    "position": Field(
        TextKind(),
        "a further column with the position of each record: its file and its place there",
    ),
    "storageOptions": _STORAGE_OPTIONS,
}
_TEXT_FILES = {**_FILES, "splitBytes": Field(size(), "size of the parts a file is cut into")}


def _arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a manifest as keyword arguments: `batchRows` becomes `batch_rows`."""
    return {
        re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name): (
            value.values if isinstance(value, Table) else value
        )
        for name, value in values.items()
    }


def _generator(values: Mapping[str, Any], spec: SourceSpec) -> Source:
    arguments = _arguments(values)
    if spec.schema is not None:
        if "fields" in arguments or "function" in arguments:
            raise UsageError(
                "generator takes its columns from `fields` or from the schema", fix="keep one"
            )
        arguments["fields"] = spec.schema
    if "function" in arguments:
        arguments["function"] = resolve_function(arguments["function"])
    return generator(**arguments)


def _nexmark(values: Mapping[str, Any], spec: SourceSpec) -> Source:
    return nexmark(**_arguments(values))


def _files(make: Callable[..., Source]) -> Callable[[Mapping[str, Any], SourceSpec], Source]:
    def make_source(values: Mapping[str, Any], spec: SourceSpec) -> Source:
        arguments = _arguments(values)
        if spec.on_bad_record is not None:
            arguments["on_bad_record"] = spec.on_bad_record
        rate, position = arguments.pop("rate", None), arguments.pop("position", None)
        source = make(schema=spec.schema, **arguments)
        source = source if position is None else with_position(source, position)
        return source if rate is None else throttle(source, rate)

    return make_source


def _spark(*, query: str | None = None, **arguments: Any) -> Source:
    return spark_source(query=resolve_function(query) if query else None, **arguments)


def _ray_dataset(*, function: str, **arguments: Any) -> Source:
    return ray_dataset_source(resolve_function(function), **arguments)


SOURCES: dict[str, SourceConnector] = {
    "generator": SourceConnector(
        Section(
            "generator",
            {
                "fields": Field(
                    Items(Anything(), may_be_empty=False),
                    "columns, each `{kind: sequence | int | float | choice | constant | timestamp | "
                    "pattern, ...}`",
                ),
                "function": Field(REFERENCE, "instead: makes record i, `module:function`"),
                "rows": Field(IntegerKind(), "how many; absent: without end"),
                **_GENERATED,
            },
        ),
        _generator,
    ),
    "nexmark": SourceConnector(
        Section(
            "nexmark",
            {
                "kind": Field(ChoiceKind(tuple(SCHEMAS)), "which of the three streams"),
                "events": Field(IntegerKind(), "rows of the stream; absent: without end"),
                "eventsPerSecond": Field(
                    IntegerKind(1), "events of all kinds per second of event time"
                ),
                **_GENERATED,
            },
        ),
        _nexmark,
        schema="refused",
    ),
    "csv": SourceConnector(
        Section(
            "csv",
            {
                **_TEXT_FILES,
                "delimiter": Field(TextKind(r"[^\n]", "one character"), "between values"),
                "header": Field(BooleanKind(), "do files begin with a line of column names?"),
                "nullValues": Field(ListOf(AnyText()), "unquoted texts that mean null"),
            },
        ),
        _files(csv_source),
        schema="required",
        bad_records=True,
        tables=True,
    ),
    "json": SourceConnector(
        Section("json", _TEXT_FILES),
        _files(json_source),
        schema="required",
        bad_records=True,
        tables=True,
    ),
    "text": SourceConnector(
        Section("text", _TEXT_FILES),
        _files(partial(files_source, format="text")),
        bad_records=True,
        tables=True,
    ),
    "parquet": SourceConnector(
        Section("parquet", _FILES), _files(parquet_source), bad_records=True, tables=True
    ),
    "spark": SourceConnector(
        Section(
            "spark",
            {
                "sql": Field(TextKind(), "the query: a SELECT"),
                "table": Field(TextKind(), "instead: a table or view that Spark knows"),
                "path": Field(TextKind(), "instead: what `spark.read` reads"),
                "format": Field(TextKind(), "of what is at `path`; or one without, such as `jdbc`"),
                "options": Field(Items(AnyText()), "options of the format"),
                "query": Field(REFERENCE, "instead: a function of the session, `module:function`"),
                "master": Field(
                    TextKind(),
                    "where Spark runs, such as `local[4]`, `spark://host:port`, `sc://host`",
                ),
                "conf": Field(Items(AnyText()), "settings of Spark, such as `spark.driver.memory`"),
                "keepResult": Field(BooleanKind(), "keep the result when the job has finished"),
                "analysisTimeout": Field(
                    duration(),
                    "how long Spark may take to analyse the query, if there is no schema",
                ),
                "rate": _FILES["rate"],
                "batchRows": _BATCH_ROWS,
            },
        ),
        _files(_spark),
        bad_records=True,
    ),
    "rayDataset": SourceConnector(
        Section(
            "rayDataset",
            {
                "function": Field(
                    REFERENCE,
                    "makes the dataset: `module:function`, without arguments",
                    required=True,
                ),
                "keepResult": Field(BooleanKind(), "keep the rows when the job has finished"),
                "splitBytes": Field(size(), "size in memory of the parts that subtasks take"),
                "rate": _FILES["rate"],
                "batchRows": _BATCH_ROWS,
            },
        ),
        _files(_ray_dataset),
        schema="required",
        bad_records=True,
    ),
}
_BOOTSTRAP = Field(
    TextKind(), "brokers to ask first: `host:port`, several with commas", required=True
)
_PROPERTIES = Field(
    Items(AnyText()), "of librdkafka; `file:/path` and `env:NAME` stand for secrets on the worker"
)
_SECURITY = Field(
    Section(
        "security",
        {
            "mechanism": Field(ChoiceKind(MECHANISMS), "of SASL; absent: no SASL"),
            "username": Field(TextKind(), "for all mechanisms but OAUTHBEARER"),
            "password": Field(
                TextKind(), "likewise; `file:/path` and `env:NAME` are read on the worker"
            ),
            "token": Field(
                TextKind(), "for OAUTHBEARER: a JSON web token, as `file:/path` or `env:NAME`"
            ),
            "tls": Field(BooleanKind(), "true: encrypt, and check the certificates of the brokers"),
            "ca": Field(
                TextKind(), "the file of the authorities to trust; absent: those of the system"
            ),
            "certificate": Field(TextKind(), "the file with the certificate of the client"),
            "key": Field(TextKind(), "the file with its key"),
            "keyPassword": Field(TextKind(), "of that file, as `file:/path` or `env:NAME`"),
        },
    ),
    "the credentials and the encryption",
)
_POSITION = {
    "time": Field(
        TextKind(), "the first record of this time or later, such as `2026-01-31T12:00:00Z`"
    ),
    "offsets": Field(
        Items(Items(IntegerKind())), "offsets by topic and partition, `{orders: {0: 10}}`"
    ),
}


def _kafka(**arguments: Any) -> Source:
    arguments = with_positions(arguments, "offsets", _kafka_offsets)
    return kafka_source(arguments.pop("topics", ()), **_with_security(with_format(arguments)))


def _with_security(arguments: dict[str, Any]) -> dict[str, Any]:
    if "security" in arguments:
        arguments["security"] = KafkaSecurity(**_arguments(arguments["security"]))
    return arguments


def _kafka_offsets(name: str, given: Any) -> dict[str, dict[int, int]]:
    try:
        return {
            topic: {int(partition): offset for partition, offset in offsets.values.items()}
            for topic, offsets in given.values.items()
        }
    except ValueError as error:
        raise UsageError(
            f"partitions are numbers {name}=`{error}`", fix="offsets: {orders: {0: 10}}"
        ) from None


SOURCES["kafka"] = SourceConnector(
    Section(
        "kafka",
        {
            "topics": Field(ListOf(TextKind()), "the topics; either they or `pattern`"),
            "pattern": Field(
                TextKind(),
                "a regular expression for the names of topics, also of later ones, `orders-.*`",
            ),
            "bootstrap": _BOOTSTRAP,
            **message_fields(METADATA.names, "{timestamp: sent_at}"),
            **position_fields(_POSITION, ("earliest", "latest", "committed")),
            "group": Field(
                TextKind(), "consumer group to which offsets of completed checkpoints are written"
            ),
            "onLost": Field(
                ChoiceKind(ON_LOST), "records were deleted before they were read; fail"
            ),
            "readUncommitted": Field(
                BooleanKind(), "true: also records of open and aborted transactions"
            ),
            "batchRows": _BATCH_ROWS,
            "buffer": Field(size(), "most bytes fetched ahead by a subtask; 32mb"),
            "security": _SECURITY,
            "properties": _PROPERTIES,
            "rate": _FILES["rate"],
        },
    ),
    _files(_kafka),
    bad_records=True,
)
_DATABASE = {
    "dsn": Field(
        TextKind(),
        "the database, `postgresql://user@host:5432/database`; or `file:/path` or `env:NAME`, read on "
        "each machine",
        required=True,
    ),
    "password": PASSWORD,
}


def _postgres_cdc(*, dsn: str, table: str, **arguments: Any) -> Source:
    return postgres_cdc_source(dsn, table, **arguments)


def _postgres(*, dsn: str, **arguments: Any) -> Source:
    return postgres_source(dsn, **arguments)


_RELATION = {
    "table": Field(TextKind(), "the table or view as SQL names it: `orders`, `shop.orders`"),
    "query": Field(TextKind(), "instead of a table: a SELECT"),
}
SOURCES["postgres"] = SourceConnector(
    Section(
        "postgres",
        {
            **_DATABASE,
            **_RELATION,
            "key": Field(
                ListOf(TextKind()), "the columns that identify a row; those of the primary key"
            ),
            "splits": Field(IntegerKind(1), "parts that are read at the same time; 16 of a table"),
            "incrementalBy": Field(
                TextKind(),
                "a column that grows: rows beyond those that were read are read for ever",
            ),
            "lag": Field(
                duration(),
                "with incrementalBy: rows are read this much later, as transactions commit late; 5s",
            ),
            "every": Field(duration(), "with incrementalBy: how often new rows are asked for; 1s"),
            "batchRows": _BATCH_ROWS,
            "buffer": Field(size(), "most bytes of a subtask that wait to be processed; 32mb"),
            "rate": _FILES["rate"],
        },
    ),
    _files(_postgres),
    lookup=LookupConnector(
        Section(
            "postgres",
            {
                **_DATABASE,
                **_RELATION,
                "key": Field(
                    ListOf(TextKind()),
                    "the columns that are compared with the key of the record; they identify a row",
                    required=True,
                ),
                "missing": Field(
                    ChoiceKind(MISSING), "a record without a row gets nulls, or is an error; null"
                ),
                "connections": Field(IntegerKind(1), "most connections per subtask; 4"),
                "batchKeys": Field(IntegerKind(1), "most keys per query; 500"),
            },
        ),
        lambda values, into: postgres_lookup(schema=into, **_arguments(values)),
    ),
)
SOURCES["postgresCdc"] = SourceConnector(
    Section(
        "postgresCdc",
        {
            **_DATABASE,
            "table": Field(
                TextKind(), "the table as SQL names it: `orders`, `shop.orders`", required=True
            ),
            "slot": Field(
                TextKind(), "the replication slot; no other source may read it", required=True
            ),
            "publication": Field(TextKind(), "the publication; the name of the slot"),
            "create": Field(
                BooleanKind(), "false: the publication and the slot must exist; else they are made"
            ),
            **change_fields(
                cdc_model.METADATA,
                "as others have read them",
                "{commit_time: changed_at}",
                _BATCH_ROWS,
            ),
            "rate": _FILES["rate"],
        },
    ),
    _files(_postgres_cdc),
)
SOURCES["mysqlCdc"] = SourceConnector(
    Section(
        "mysqlCdc",
        {
            **mysql.SOURCE,
            **change_fields(
                mysql.METADATA,
                "as the server has deleted its log",
                "{commit_time: changed_at}",
                _BATCH_ROWS,
            ),
            "rate": _FILES["rate"],
        },
    ),
    _files(mysql.make_source),
)
SOURCES["nats"] = SourceConnector(
    Section("nats", {**nats.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(nats.make_source),
    bad_records=True,
)
SOURCES["kinesis"] = SourceConnector(
    Section("kinesis", {**kinesis.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(kinesis.make_source),
    bad_records=True,
)
SOURCES["mqtt"] = SourceConnector(
    Section("mqtt", {**mqtt.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(mqtt.make_source),
    bad_records=True,
)
SOURCES["pulsar"] = SourceConnector(
    Section("pulsar", {**pulsar.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(pulsar.make_source),
    bad_records=True,
)
SOURCES["rabbitmq"] = SourceConnector(
    Section("rabbitmq", {**rabbitmq.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(rabbitmq.make_source),
    bad_records=True,
)
SOURCES["sqs"] = SourceConnector(
    Section("sqs", {**sqs.SOURCE, "rate": _FILES["rate"]}),
    _files(sqs.make_source),
    bad_records=True,
)
SOURCES["redis"] = SourceConnector(
    Section("redis", {**redis.SOURCE, "batchRows": _BATCH_ROWS, "rate": _FILES["rate"]}),
    _files(redis.make_source),
    bad_records=True,
)


def _service(make: Callable[..., Source]) -> Callable[[Mapping[str, Any], SourceSpec], Source]:
    def make_source(values: Mapping[str, Any], spec: SourceSpec) -> Source:
        arguments = _arguments(values)
        rate = arguments.pop("rate", None)
        source = make(schema=spec.schema, **arguments)
        return source if rate is None else throttle(source, rate)

    return make_source


_SOCKET = {
    "port": Field(IntegerKind(1, 65535), "at which a program of this machine listens", True),
    "host": Field(TextKind(), "127.0.0.1, ::1 or localhost; 127.0.0.1"),
}
SOURCES["stdin"] = SourceConnector(
    Section("stdin", {}), lambda values, spec: stdin_source(), schema="refused"
)
SOURCES["socket"] = SourceConnector(
    Section("socket", _SOCKET),
    lambda values, spec: socket_source(**_arguments(values)),
    schema="refused",
)
SOURCES["http"] = SourceConnector(HTTP_SOURCE, _service(made_http_source), schema="required")
SOURCES["sse"] = SourceConnector(SSE_SOURCE, _service(made_sse_source))
SOURCES["websocket"] = SourceConnector(WEBSOCKET_SOURCE, _service(made_websocket_source))
SOURCES["hybrid"] = hybrid_connector(dict(SOURCES))


def _limited(connector: SourceConnector) -> SourceConnector:
    """Return the connector with the fields that all sources have: `stopAfterIdle`, and `rate`."""
    fields = connector.fields.fields
    stop = Field(duration(), "the source ends when no record has come for this long; absent: never")
    added = {"stopAfterIdle": stop, **({} if "rate" in fields else {"rate": _FILES["rate"]})}

    def make(values: Mapping[str, Any], spec: SourceSpec) -> Source:
        limits = {name: values[name] for name in added if name in values}
        rest = {name: value for name, value in values.items() if name not in added}
        source = connector.make(rest, spec)
        if "rate" in limits:
            source = throttle(source, limits["rate"])
        if "stopAfterIdle" in limits:
            source = stop_after_idle(source, limits["stopAfterIdle"])
        return source

    section = Section(connector.fields.what, {**fields, **added})
    return replace(connector, fields=section, make=make)


SOURCES = {name: _limited(each) for name, each in SOURCES.items()}


def _sink(make: Callable[..., Sink]) -> Callable[[Mapping[str, Any], str | None], Sink]:
    def make_sink(values: Mapping[str, Any], guarantee: str | None) -> Sink:
        arguments = _arguments(values)
        if guarantee is not None:
            arguments["guarantee"] = guarantee
        return make(**arguments)

    return make_sink


_OUTPUT_FILES = {
    "path": Field(TextKind(), "a directory; local or s3://", required=True),
    "rollEvery": Field(duration(), "the greatest age of a file that is still written"),
    "rollBytes": Field(size(), "the size at which a file ends"),
    "compactEvery": Field(
        IntegerKind(2), "checkpoints whose small files are merged before they become visible"
    ),
    "compactBytes": Field(size(), "the size from which on files are merged at once; rollBytes"),
    "ifExists": Field(
        ChoiceKind(tuple(policy.value for policy in IfExists)),
        "a run starts without state, and files of earlier runs are there: refuse, keep or delete them",
    ),
    "storageOptions": _STORAGE_OPTIONS,
}


_OUTPUT_TABLE = {
    "rollBytes": _OUTPUT_FILES["rollBytes"],
    "buffer": Field(size(), "most bytes of rows of a subtask that wait to be written; 64mb"),
    "compactFiles": Field(
        IntegerKind(2), "small files of a partition that are merged after a commit; none are"
    ),
    "ifExists": Field(
        ChoiceKind((IfExists.ERROR.value, IfExists.APPEND.value)),
        "a run starts without state, and the table has rows of earlier runs; error",
    ),
    "storageOptions": _STORAGE_OPTIONS,
}


def _postgres_sink(*, dsn: str, table: str, **arguments: Any) -> Sink:
    return postgres_sink(dsn, table, **arguments)


def _kafka_sink(*, topic: str, **arguments: Any) -> Sink:
    return kafka_sink(topic, **_with_security(with_format(arguments)))


def _delta_sink(values: Mapping[str, Any], guarantee: str | None) -> Sink:
    return delta_sink(**_arguments(values))  # it has only one guarantee


def _iceberg_sink(values: Mapping[str, Any], guarantee: str | None) -> Sink:
    return iceberg_sink(**_arguments(values))  # it has only one guarantee


SINKS: dict[str, SinkConnector] = {
    "parquet": SinkConnector(
        Section("parquet", _OUTPUT_FILES), _sink(parquet_sink), FileSink.guarantees
    ),
    "csv": SinkConnector(Section("csv", _OUTPUT_FILES), _sink(csv_sink), FileSink.guarantees),
    "json": SinkConnector(Section("json", _OUTPUT_FILES), _sink(json_sink), FileSink.guarantees),
    "text": SinkConnector(
        Section("text", _OUTPUT_FILES),
        _sink(partial(files_sink, format="text")),
        FileSink.guarantees,
    ),
    "print": SinkConnector(
        Section("print", {"width": Field(IntegerKind(20), "most characters of a line")}),
        _sink(print_sink),
        PrintSink.guarantees,
        guarantee_required=False,
    ),
    "blackhole": SinkConnector(
        Section("blackhole", {}),
        _sink(blackhole),
        BlackholeSink.guarantees,
        guarantee_required=False,
    ),
    "function": SinkConnector(FUNCTION, _sink(made_function_sink), FunctionSink.guarantees),
    "writeAhead": SinkConnector(
        WRITE_AHEAD, _sink(made_write_ahead_sink), WriteAheadSink.guarantees
    ),
    "socket": SinkConnector(
        Section("socket", _SOCKET),
        lambda values, guarantee: socket_sink(**_arguments(values)),
        SocketSink.guarantees,
        guarantee_required=False,
    ),
    "http": SinkConnector(HTTP_SINK, _sink(made_http_sink), HttpSink.guarantees),
    "kafka": SinkConnector(
        Section(
            "kafka",
            {
                "topic": Field(TextKind(), "the topic, which must exist", required=True),
                "bootstrap": _BOOTSTRAP,
                "format": format_field(OUTPUT_FORMATS),
                "metadata": metadata_field(
                    WRITABLE,
                    "columns that become a part of the record beside its value, `{key: user}`",
                ),
                "transactions": Field(
                    ChoiceKind(("open", "staged")),
                    "with exactly_once: sent at once in a transaction that stays open until the "
                    "checkpoint is complete, or staged in the checkpoint and sent then; open",
                ),
                "transactionTimeout": Field(
                    duration(), "with exactly_once: brokers abort older transactions; 15m"
                ),
                "onLost": Field(
                    ChoiceKind(ON_LOST),
                    "the brokers have aborted a transaction that a checkpoint needs; fail",
                ),
                "buffer": Field(
                    size(),
                    "most bytes of a subtask that wait to be sent, 32mb, or are staged, 128mb",
                ),
                "security": _SECURITY,
                "properties": _PROPERTIES,
            },
        ),
        _sink(_kafka_sink),
        KafkaSink.guarantees,
    ),
    "delta": SinkConnector(
        Section(
            "delta",
            {
                "path": Field(
                    TextKind(), "the table: a local directory or s3://bucket/prefix", required=True
                ),
                "partitionBy": Field(
                    ListOf(TextKind()), "columns by whose values files are separated"
                ),
                **_OUTPUT_TABLE,
            },
        ),
        _delta_sink,
        DeltaSink.guarantees,
        guarantee_required=False,
    ),
    "iceberg": SinkConnector(
        Section(
            "iceberg",
            {
                "table": Field(TextKind(), "its name, `namespace.table`", required=True),
                "catalog": Field(
                    Items(AnyText(), may_be_empty=False),
                    f"properties that pyiceberg knows: `type` ({' or '.join(KINDS)}), `uri`, "
                    "`warehouse`, `token`; `env:NAME` and `file:/path` are read on each machine",
                    required=True,
                ),
                "partitionBy": Field(
                    ListOf(TextKind()),
                    "columns, `day(c)`, `bucket(16, c)` and the like; of a table that is created",
                ),
                **_OUTPUT_TABLE,
            },
        ),
        _iceberg_sink,
        IcebergSink.guarantees,
        guarantee_required=False,
    ),
    "postgres": SinkConnector(
        Section(
            "postgres",
            {
                **_DATABASE,
                "table": Field(
                    TextKind(), "the table as SQL names it: `orders`, `shop.orders`", required=True
                ),
                "mode": Field(
                    ChoiceKind(MODES), "insert each record, or replace the row with its key; append"
                ),
                "key": Field(
                    ListOf(TextKind()), "with upsert: the columns of a unique index of the table"
                ),
                "op": Field(
                    TextKind(),
                    "with upsert: a column that is not written; `delete` deletes the row",
                ),
                "create": Field(ChoiceKind(CREATE), "whether to create the table; never"),
                "stagingSchema": Field(
                    TextKind(), "with exactly_once: the schema of staged rows; that of the table"
                ),
                "onLost": Field(
                    ChoiceKind(ON_LOST),
                    "staged rows of a checkpoint are missing in the database; fail",
                ),
                "buffer": Field(size(), "most bytes of a subtask that wait to be sent; 32mb"),
            },
        ),
        _sink(_postgres_sink),
        PostgresSink.guarantees,
    ),
    "nats": SinkConnector(Section("nats", nats.SINK), _sink(nats.make_sink), NatsSink.guarantees),
    "sqs": SinkConnector(Section("sqs", sqs.SINK), _sink(sqs.make_sink), SqsSink.guarantees),
    "rabbitmq": SinkConnector(
        Section("rabbitmq", rabbitmq.SINK), _sink(rabbitmq.make_sink), RabbitSink.guarantees
    ),
    "kinesis": SinkConnector(
        Section("kinesis", kinesis.SINK), _sink(kinesis.make_sink), KinesisSink.guarantees
    ),
    "pulsar": SinkConnector(
        Section("pulsar", pulsar.SINK), _sink(pulsar.make_sink), PulsarSink.guarantees
    ),
    "mqtt": SinkConnector(Section("mqtt", mqtt.SINK), _sink(mqtt.make_sink), MqttSink.guarantees),
    "redis": SinkConnector(
        Section("redis", redis.SINK), _sink(redis.make_sink), RedisSink.guarantees
    ),
}
