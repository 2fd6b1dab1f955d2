"""Writes records to a topic of Kafka, at least once.

The client sends in the background and tries again by itself, without doubling or reordering records. Before
a checkpoint can complete, the brokers have acknowledged every record up to its barrier. After a failure the
records since the last checkpoint are written again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import polars as pl
import pyarrow as pa

from ...errors import JobError, PlanError, UsageError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.event_time import milliseconds
from ...operators.sink import Guarantee, GuaranteeLike, Sink, SinkRun, SinkWriter, parse_guarantee
from ...operators.sizes import parse_size
from ...operators.suggestions import suggest
from ...state.snapshot import CommitPermit
from ..files.formats import can_encode, check_times
from ..rows import check_count
from .client import (
    ANSWER_S_MAX,
    ErrorListener,
    check_properties,
    make_producer,
    no_answer,
    no_topic,
    shown,
)
from .model import METADATA

BUFFER: Final = "32mb"
FORMATS: Final = ("json", "raw")
WRITABLE: Final = ("key", "timestamp", "headers", "partition")
_SERVE_MS: Final = 500
"""How often reports of delivery are looked at while no record comes."""
_FLUSH_S: Final = 0.5
Values: TypeAlias = Sequence[bytes | None]


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `kafka_sink`, which documents them."""

    topic: str
    bootstrap: str
    format: str
    metadata: Mapping[str, str]
    buffer_bytes: int
    properties: Mapping[str, str]

    def __repr__(self) -> str:
        """Return the settings without secrets."""
        return f"SinkSettings({self.topic} of {self.bootstrap}, {shown(self.properties)})"


class KafkaSink(Sink):
    """One topic."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    needs_columns = True
    extras = ("kafka",)

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.place = f"{settings.topic} of {settings.bootstrap}"

    def bind(self, schema: pa.Schema | None) -> None:
        if schema is None:
            raise PlanError(
                "records of Kafka are made of columns, and this stream is of Python objects",
                fix="add into=<a Struct class or schema> to the map before it",
            )
        for kind, column in self.settings.metadata.items():
            if column not in schema.names:
                raise PlanError(
                    f"there is no such column for metadata {kind}=`{column}`",
                    fix=suggest(column, schema.names, "columns"),
                )
            _check_kind(kind, schema.field(column))
        _check_values(
            self.settings.format,
            [field for field in schema if field.name not in self.settings.metadata.values()],
        )

    def writer(self) -> SinkWriter:
        return KafkaWriter(self.settings)

    def check_output(self, run: SinkRun) -> None:
        """Check that the cluster answers and has the topic."""
        from confluent_kafka import KafkaException

        settings, errors = self.settings, ErrorListener()
        producer = make_producer(
            settings.bootstrap, settings.properties, "headgate-check", settings.buffer_bytes, errors
        )
        try:
            known = producer.list_topics(timeout=ANSWER_S_MAX).topics
        except KafkaException as error:
            producer.poll(0)  # the reason comes by the callback
            raise no_answer(settings.bootstrap, errors, error.args[0].str()) from error
        if settings.topic not in known:
            raise no_topic(settings.topic, sorted(known))

    def describe(self) -> str:
        return f"kafka({self.settings.topic})"


class KafkaWriter(SinkWriter):
    """Writes the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._errors = ErrorListener()
        self._producer: Any = None
        self._failure = ""
        self._closed = False

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        settings = self._settings
        self._producer = make_producer(
            settings.bootstrap,
            settings.properties,
            f"headgate-{context.job_name}-{context.operator_name}",
            settings.buffer_bytes,
            self._errors,
        )
        context.timers.call_later(_SERVE_MS, self._serve)

    def _serve(self) -> None:
        """Look at reports of delivery, also while no record comes."""
        if not self._closed:
            self._producer.poll(0)
            self._check()
            self.context.timers.call_later(_SERVE_MS, self._serve)

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        if not len(batch):
            return
        given = batch.data
        columns = {
            kind: _values_of(kind, given.column(column))
            for kind, column in self._settings.metadata.items()
        }
        rest = [name for name in given.schema.names if name not in self._settings.metadata.values()]
        values = _ENCODERS[self._settings.format](given.select(rest))
        for row, value in enumerate(values):
            fields = {kind: found[row] for kind, found in columns.items() if found[row] is not None}
            self._produce(value, fields)
        self._producer.poll(0)
        self._check()

    def _produce(self, value: bytes | None, fields: Mapping[str, Any]) -> None:
        """Hand one record to the client; waiting while its buffer is full is the backpressure."""
        while True:
            try:
                self._producer.produce(
                    self._settings.topic, value=value, on_delivery=self._delivered, **fields
                )
                return
            except BufferError:
                self._producer.poll(0.1)
                self._check()

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None and not self._failure:
            self._failure = str(error.str())

    def _check(self) -> None:
        """Raise if a record was not delivered, or none can be any more."""
        reason = self._failure or self._errors.fatal
        if reason:
            raise JobError(
                f"records were not delivered topic=`{self._settings.topic}` "
                f"bootstrap=`{self._settings.bootstrap}`: {reason}",
                fix="check the size limits of the topic (max.message.bytes), the right to WRITE, and that "
                "the brokers can be reached",
            )

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        return self._flush

    def _flush(self) -> list[bytes]:
        """Wait until all records are acknowledged. Nothing is left to commit."""
        while self._producer.flush(_FLUSH_S) and not self._closed:
            self._check()
        self._check()
        return []

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        return None

    def finish(self) -> Callable[[], None] | None:
        def flush() -> None:
            self._flush()

        return flush

    def close(self) -> None:
        """Drop what was not sent: if it is needed, it is written again."""
        self._closed = True
        if self._producer is not None:
            self._producer.purge()
            self._producer.poll(0)


def _encode_json(batch: pa.RecordBatch) -> Values:
    check_times(batch)
    frame: Any = pl.from_arrow(batch)
    lines = io.BytesIO()
    frame.write_ndjson(lines)
    return lines.getvalue().split(b"\n")[:-1]  # line breaks in texts are escaped


def _encode_raw(batch: pa.RecordBatch) -> Values:
    column = batch.column(0)
    kind = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    values: Values = column.cast(kind).to_pylist() if _is_text(column.type) else column.to_pylist()
    return values


_ENCODERS: Final[Mapping[str, Callable[[pa.RecordBatch], Values]]] = {
    "json": _encode_json,
    "raw": _encode_raw,
}


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())


def _values_of(kind: str, column: pa.Array) -> list[Any]:
    """Return the argument of `produce` for each row of a column; None: it has none."""
    if kind == "timestamp":
        times = milliseconds(column.fill_null(0)).tolist()
        valid = column.is_valid().to_pylist()
        return [time if there else None for time, there in zip(times, valid, strict=True)]
    found: list[Any] = column.to_pylist()
    if kind == "headers":
        return [
            None if row is None else [(each["name"], each["value"]) for each in row]
            for row in found
        ]
    return found


def _check_kind(kind: str, field: pa.Field) -> None:
    fits = {
        "key": _is_text(field.type) or _is_bytes(field.type),
        "timestamp": pa.types.is_timestamp(field.type) or field.type == pa.int64(),
        "headers": field.type == METADATA["headers"],
        "partition": field.type == pa.int32(),
    }
    if not fits[kind]:
        wanted = {
            "key": "string or binary",
            "timestamp": "a timestamp, or int64 of ms since 1970",
            "headers": str(METADATA["headers"]),
            "partition": "int32",
        }
        raise PlanError(
            f"a column has the wrong type for metadata {kind}=`{field.name}: {field.type}`",
            fix=f"it must be {wanted[kind]}; cast it with select",
        )


def _check_values(format: str, fields: Sequence[pa.Field]) -> None:
    if format == "raw":
        if len(fields) != 1 or not (_is_text(fields[0].type) or _is_bytes(fields[0].type)):
            raise PlanError(
                "a raw value is one column of type string or binary "
                f"columns=`{', '.join(f'{field.name}: {field.type}' for field in fields)}`",
                fix='select one column beside those of metadata, or say format="json"',
            )
        return
    if not fields:
        raise PlanError("no column is left for the value", fix="select another one")
    for field in fields:
        if not can_encode("json", field.type):
            raise PlanError(
                f"json has no form for this type column=`{field.name}` type=`{field.type}`",
                fix="select the column out, or cast it",
            )


def kafka_sink(
    topic: str,
    *,
    bootstrap: str,
    format: str = "json",
    metadata: Mapping[str, str] | None = None,
    guarantee: GuaranteeLike = "at_least_once",
    buffer: str | int = BUFFER,
    properties: Mapping[str, str] | None = None,
) -> KafkaSink:
    """Return a sink that writes to a topic of Kafka. It needs `pip install 'headgate[kafka]'`.

    Args:
        topic: the name of the topic, which must exist.
        bootstrap: brokers to ask first: `host:port`, several with commas between them.
        format: of the values: `json` (an object of the columns that are not in `metadata`) or `raw` (the
            one column that is not; null makes a tombstone).
        metadata: columns that become a part of the record beside its value: `key` (string or binary),
            `timestamp`, `headers` or `partition` (int32), such as {"key": "user"}. Without a partition,
            records of one key go to one partition, as with the clients of Java.
        guarantee: `at_least_once`, or `none`. Exactly-once is not there yet.
        buffer: the most bytes that wait to be sent, per subtask.
        properties: properties of librdkafka; see `kafka_source`.

    Raises:
        UsageError: an argument is wrong. Whether the topic exists is found out when the job starts.
    """
    if not topic or not bootstrap:
        raise UsageError(
            f"a topic and a broker must be named topic=`{topic}` bootstrap=`{bootstrap}`",
            fix='kafka_sink("orders", bootstrap="host:9092")',
        )
    if format not in FORMATS:
        raise UsageError(
            f"no such format of messages format=`{format}`", fix=suggest(format, FORMATS, "formats")
        )
    for kind, column in (metadata or {}).items():
        if kind not in WRITABLE:
            raise UsageError(
                f"records of Kafka are not given such metadata metadata=`{kind}: {column}`",
                fix=suggest(kind, WRITABLE, "metadata"),
            )
    if isinstance(buffer, str):
        buffer = parse_size(buffer, "buffer")
    check_count("buffer", buffer, 1)
    settings = SinkSettings(
        topic, bootstrap, format, dict(metadata or {}), buffer, check_properties(properties or {})
    )
    made = parse_guarantee(guarantee)
    if made not in KafkaSink.guarantees:
        raise UsageError(
            "the Kafka sink cannot write exactly once yet guarantee=`exactly_once`",
            fix='guarantee="at_least_once": readers see a record again after a failure of the job',
        )
    return KafkaSink(settings, made)
