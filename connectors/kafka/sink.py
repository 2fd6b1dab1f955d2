"""A topic of Kafka as a sink, at least once or exactly once.

The client sends in the background and tries again by itself, without doubling or reordering records. Before
a checkpoint can complete, the brokers have acknowledged every record up to its barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import pyarrow as pa

from ...errors import PlanError, UsageError
from ...operators.connections import counted
from ...operators.durations import Duration, parse_duration
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    stream_columns,
)
from ...operators.sizes import parse_size
from ...operators.suggestions import suggest
from ..arguments import ON_LOST, OnLost, check_choice, check_count, check_policy, parse_bytes
from ..formats.format import Format, planning
from ..formats.text import FormatName, to_output_format
from ..messages import check_written
from .client import (
    ErrorListener,
    check_properties,
    client_properties,
    describe_topics,
    make_producer,
    no_topic,
)
from .committing import check_transactions
from .exactly_once import StagedWriter, TransactionalWriter
from .model import METADATA
from .rights import check_topic_rights
from .security import KafkaSecurity, check_security, with_security
from .writer import KafkaWriter, SinkSettings, is_bytes, is_text

BUFFER: Final = "32mb"
STAGED: Final = "128mb"
TRANSACTIONS: Final = ("open", "staged")
TRANSACTION_TIMEOUT: Final = "15m"
"""The most that brokers allow unless they are told otherwise."""
WRITABLE: Final = ("key", "timestamp", "headers", "partition")


class KafkaSink(Sink):
    """One topic."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("kafka", *settings.format.extras)
        self._values: pa.Schema | None = None
        if guarantee is Guarantee.EXACTLY_ONCE:
            if settings.transactions == "open":
                self.uncommitted_ms_max = settings.transaction_timeout_ms
            self.names_committables = True
        self.place = f"{settings.topic} of {settings.bootstrap}"

    def bind(self, schema: pa.Schema | None) -> None:
        schema = stream_columns(schema, "records of Kafka")
        for kind, column in self.settings.metadata.items():
            if column not in schema.names:
                raise PlanError(
                    f"there is no such column for metadata {kind}=`{column}`",
                    fix=suggest(column, schema.names, "columns"),
                )
            _check_kind(kind, schema.field(column))
        others = self.settings.metadata.values()
        self._values = pa.schema([field for field in schema if field.name not in others])
        with planning():
            self.settings.format.check_output(self._values)

    def writer(self) -> SinkWriter:
        kind = KafkaWriter
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            kind = TransactionalWriter if self.settings.transactions == "open" else StagedWriter
        return kind(self.settings, self._values)

    def check_output(self, run: SinkRun) -> None:
        """Check that the topic is there, that values can be encoded, and the rights to write."""
        settings = self.settings
        self._check_topic()
        if self._values is not None:
            settings.format.encoder(self._values, settings.topic)
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            check_transactions(settings)

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that the topic is there, and the rights to write to it; no transaction is tried."""
        self.settings.format.check_connection()
        return f"{counted(self._check_topic(), 'partition')} of {self.settings.topic}"

    def _check_topic(self) -> int:
        """Check that the topic is there, and the rights on it; return the number of its partitions."""
        from confluent_kafka.admin import AdminClient

        settings, errors = self.settings, ErrorListener()
        # The properties are checked by this producer. It cannot be asked for topics: without a right to
        # WRITE it gets no producer id, and then all its calls fail without naming the topic.
        make_producer(
            settings.bootstrap, settings.properties, "headgate-check", settings.buffer_bytes, errors
        )
        admin = AdminClient(client_properties(settings.bootstrap, settings.properties, errors))
        known = describe_topics(admin, None, settings.bootstrap, errors)
        if settings.topic not in known:
            raise no_topic(settings.topic, sorted(known), "WRITE")
        # The mark of a transaction is an offset, and offsets are written by readers of a topic.
        exactly_once = self.guarantee is Guarantee.EXACTLY_ONCE
        rights = ("WRITE", "READ") if exactly_once else ("WRITE",)
        check_topic_rights(settings.bootstrap, settings.properties, [settings.topic], rights)
        return len(known[settings.topic].partitions)

    def describe(self) -> str:
        return f"kafka({self.settings.topic})"


def _check_kind(kind: str, field: pa.Field) -> None:
    fits = {
        "key": is_text(field.type) or is_bytes(field.type),
        "timestamp": pa.types.is_timestamp(field.type) or field.type == pa.int64(),
        "headers": field.type == METADATA.field("headers").type,
        "partition": field.type == pa.int32(),
    }
    if not fits[kind]:
        wanted = {
            "key": "string or binary",
            "timestamp": "a timestamp, or int64 of ms since 1970",
            "headers": str(METADATA.field("headers").type),
            "partition": "int32",
        }
        raise PlanError(
            f"a column has the wrong type for metadata {kind}=`{field.name}: {field.type}`",
            fix=f"it must be {wanted[kind]}; cast it with select",
        )


def kafka_sink(
    topic: str,
    *,
    bootstrap: str,
    format: FormatName | Format = "json",
    metadata: Mapping[str, str] | None = None,
    guarantee: GuaranteeLike = "at_least_once",
    transactions: Literal["open", "staged"] = "open",
    transaction_timeout: Duration = TRANSACTION_TIMEOUT,
    on_lost: OnLost = "fail",
    buffer: str | int | None = None,
    security: KafkaSecurity | None = None,
    properties: Mapping[str, str] | None = None,
) -> KafkaSink:
    """Return a sink that writes to a topic of Kafka. It needs `pip install 'headgate[kafka]'`.

    Args:
        topic: the name of the topic, which must exist.
        bootstrap: brokers to ask first: `host:port`, several with commas between them.
        format: of the values: `json` (an object of the columns that are not in `metadata`), `raw` (the
            one column that is not; null makes a tombstone), or what `avro_format` and
            `protobuf_format` return.
        metadata: columns that become a part of the record beside its value: `key` (string or binary),
            `timestamp`, `headers` or `partition` (int32), such as {"key": "user"}. Without a partition,
            records of one key go to one partition, as with the clients of Java.
        guarantee: `at_least_once`, `exactly_once` (in transactions, which readers of committed records
            see when the checkpoint is complete) or `none`.
        transactions: for `exactly_once`. `open`: records are sent at once, in a transaction that stays open
            until the checkpoint is complete. `staged`: they become part of the checkpoint, and are sent in
            a short transaction when it is complete.
        transaction_timeout: the brokers abort a transaction that is older. With `open` it must exceed the
            longest time for which the job may be down. It must not exceed their
            `transaction.max.timeout.ms`.
        on_lost: what a restore does if the brokers have aborted, or forgotten, a transaction that the
            checkpoint needs: `fail`, or `skip` its records with a warning.
        buffer: the most bytes that wait to be sent, per subtask; 32 MB unless set. With `staged`, the most
            bytes that a subtask stages between two checkpoints, compressed; 128 MB unless set. They are in
            memory, and more fail the job.
        security: the credentials and the encryption.
        properties: further properties of librdkafka; see `kafka_source`.

    Raises:
        UsageError: an argument is wrong. Whether the topic exists is found out when the job starts.
    """
    if not topic or not bootstrap:
        raise UsageError(
            f"a topic and a broker must be named topic=`{topic}` bootstrap=`{bootstrap}`",
            fix='kafka_sink("orders", bootstrap="host:9092")',
        )
    made_format = to_output_format(format)
    check_policy("on_lost", on_lost, ON_LOST)
    written = check_written(metadata, WRITABLE, "records of Kafka")
    check_choice("transactions", transactions, TRANSACTIONS, "kind of transactions", "kinds")
    staged, made = transactions == "staged", parse_guarantee(guarantee)
    if staged and made is not Guarantee.EXACTLY_ONCE:
        raise UsageError(
            "records are staged for exactly-once output only transactions=`staged`",
            fix='guarantee="exactly_once"',
        )
    if buffer is None:
        buffer = STAGED if staged else BUFFER
    buffer_bytes = parse_bytes("buffer", buffer)
    timeout_ms = parse_duration(transaction_timeout, "transaction_timeout")
    check_count("transaction_timeout", timeout_ms, 1_000)
    settings = SinkSettings(
        topic,
        bootstrap,
        made_format,
        written,
        parse_size(BUFFER) if staged else buffer_bytes,
        with_security(check_properties(properties or {}), security),
        timeout_ms,
        on_lost,
        transactions,
        buffer_bytes,
    )
    if made is Guarantee.EXACTLY_ONCE:
        check_security(settings.properties)
    return KafkaSink(settings, made)
