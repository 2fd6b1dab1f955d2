"""Topics of Pulsar as sinks, at least once.

The client sends messages in batches, and again on another connection if one is lost. A checkpoint waits
until the brokers have stored all messages in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from ...errors import JobError, PlanError, SourceError, StorageError
from ...operators.base import OperatorContext
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ..arguments import check_choice
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds
from ..messages import check_message_columns
from ..publishing import Publisher, PublishingWriter, RowEncoder
from .client import AWAY_S, LOST, Cluster, check_topic, failures, is_lost, reason_of

Compression: TypeAlias = Literal["none", "lz4", "zlib", "zstd", "snappy"]
_TYPES: Final[Mapping[Compression, str]] = {
    "none": "NONE",
    "lz4": "LZ4",
    "zlib": "ZLib",
    "zstd": "ZSTD",
    "snappy": "SNAPPY",
}
"""The compressions, as the client calls them."""
COMPRESSIONS: Final = tuple(_TYPES)
_BOUNDS: Final = CallBounds(rows=2_000, within_ms=200, max_in_flight=1)
"""One call at a time keeps the order of a key."""
_PENDING_MAX: Final = _BOUNDS.rows * 10_000
"""More messages of a call never wait in the client, which would refuse them."""
_BATCH_MS: Final = 10
_ANSWER_S_MAX: Final = AWAY_S + 30


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `pulsar_sink`, which documents them."""

    topic: str
    cluster: Cluster
    format: Format
    partition_key: str | None
    event_time: str | None
    compression: Compression


class PulsarSink(Sink):
    """One topic."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("pulsar", *settings.format.extras)
        self.place = f"{settings.topic} of {settings.cluster}"

    def bind(self, schema: pa.Schema | None) -> None:
        settings, column = self.settings, self.settings.event_time
        texts = {} if settings.partition_key is None else {"partition_key": settings.partition_key}
        check_message_columns(schema, texts, (), settings.format, "messages of Pulsar")
        if column is not None and schema is not None:
            given = schema.field(column).type if column in schema.names else None
            if given is None or not pa.types.is_timestamp(given):
                raise PlanError(
                    f"there is no such column of times event_time=`{column}` type=`{given}`",
                    fix="name a column of type timestamp",
                )

    def writer(self) -> SinkWriter:
        return PublishingWriter(PulsarPublisher(self.settings), _BOUNDS)

    def check_output(self, run: SinkRun) -> None:
        """Check that the topic can be written to."""
        _look(self.settings)

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        _look(self.settings)
        return "the topic can be written to"

    def describe(self) -> str:
        return f"pulsar({self.settings.topic})"


def _look(settings: SinkSettings) -> None:
    """Check that the cluster answers, and takes messages for the topic."""
    with settings.cluster.checked_client() as client:
        try:
            client.create_producer(settings.topic).close()
        except failures() as error:
            raise _unusable(settings, error) from error


def _unusable(settings: SinkSettings, error: BaseException) -> SourceError | JobError:
    if is_lost(error):
        return settings.cluster.cannot_use(error)
    return _refused(settings, reason_of(error))


def _refused(settings: SinkSettings, reason: str) -> JobError:
    return JobError(
        f"messages cannot be published topic=`{settings.topic}` cluster=`{settings.cluster}`: {reason}",
        fix="check that the topic is there, the size of messages, and the right to produce them",
    )


class PulsarPublisher(Publisher):
    """Publishes the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__()
        self._settings = settings
        self._encoder = RowEncoder(settings.format, settings.topic)
        self._opened = contextlib.ExitStack()

    async def open(self, context: OperatorContext) -> None:
        try:
            await asyncio.to_thread(self._connect, context)
        except failures() as error:
            raise _unusable(self._settings, error) from error

    def _connect(self, context: OperatorContext) -> None:
        import pulsar

        settings = self._settings
        client = self._opened.enter_context(settings.cluster.checked_client())
        self._producer = client.create_producer(
            settings.topic,
            send_timeout_millis=int(AWAY_S * 1000),
            compression_type=pulsar.CompressionType.__members__[_TYPES[settings.compression]],
            max_pending_messages=_BOUNDS.rows,
            max_pending_messages_across_partitions=_PENDING_MAX,
            batching_enabled=True,
            batching_max_messages=_BOUNDS.rows,
            batching_max_publish_delay_ms=_BATCH_MS,
            properties={"headgate": f"{context.job_name}/{context.operator_name}"},
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._opened.close)

    async def publish(self, data: pa.RecordBatch, key: str) -> None:
        await asyncio.to_thread(self._send, data)

    def _send(self, data: pa.RecordBatch) -> None:
        """Publish records until they are stored.

        Raises:
            StorageError: the brokers do not answer.
            JobError: they do not take messages like these.
        """
        settings = self._settings
        values = self._encoder.encode(data)
        keys = _texts_of(data, settings.partition_key)
        times_ms = _times_of(data, settings.event_time)
        answers = _Answers(len(values))
        for value, key, time_ms in zip(values, keys, times_ms, strict=True):
            self._producer.send_async(
                value, answers.take, partition_key=key, event_timestamp=time_ms
            )
        with contextlib.suppress(*failures()):  # which the answers tell as well
            self._producer.flush()
        for reason in answers.failures(_ANSWER_S_MAX):
            if reason in LOST:
                raise StorageError(
                    f"messages are not stored topic=`{settings.topic}` cluster=`{settings.cluster}`: "
                    f"{reason}",
                    fix="check that the brokers can be reached, and have room on their disks",
                )
            raise _refused(settings, reason)


class _Answers:
    """The answers to messages, which come in threads of the client."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._results: list[Any] = []
        self._all = threading.Event()

    def take(self, result: Any, message_id: Any) -> None:
        """Note an answer. It must not raise, as the client would end the process."""
        self._results.append(result)
        if len(self._results) >= self._count:
            self._all.set()

    def failures(self, seconds_max: float) -> list[str]:
        """Wait for all answers, and return the names of the failures."""
        if not self._all.wait(seconds_max):
            return ["Timeout"]
        return [each.name for each in self._results if each.name != "Ok"]


def _texts_of(data: pa.RecordBatch, column: str | None) -> list[Any]:
    return [None] * data.num_rows if column is None else data.column(column).to_pylist()


def _times_of(data: pa.RecordBatch, column: str | None) -> list[Any]:
    """Return the times of a column in ms since 1970."""
    if column is None:
        return [None] * data.num_rows
    times = data.column(column)
    stamps = times.cast(pa.timestamp("ms", times.type.tz), safe=False)
    found: list[Any] = stamps.cast(pa.int64()).to_pylist()
    return found


def pulsar_sink(
    topic: str,
    *,
    url: str,
    format: FormatName | Format = "json",
    partition_key: str | None = None,
    event_time: str | None = None,
    compression: Compression = "none",
    guarantee: GuaranteeLike = "at_least_once",
    token: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> PulsarSink:
    """Return a sink that publishes to a topic of Apache Pulsar, at least once.

    It needs `pip install 'headgate[pulsar]'`.

    Args:
        topic: the name of the topic: `orders`, or with tenant and namespace `shop/sales/orders`.
        url: the cluster, as for `pulsar_source`.
        format: of the data: `json` (an object of all columns), `raw` (the one column), or what
            `avro_format` and `protobuf_format` return.
        partition_key: the column with the key, a string, whose hash decides the partition of a record.
            None: records go to all partitions in turn.
        event_time: the column with the event time of messages, a timestamp. None: they have none.
        compression: of batches of messages: `none`, `lz4`, `zlib`, `zstd` or `snappy`.
        guarantee: `at_least_once`, or `none`.
        token: the token of a role, or where it can be read on each machine: `file:/path` or `env:NAME`.
        ca: with TLS: the file of the authorities to trust. None: those of the package certifi.
        certificate: with TLS: the file with the certificate of the client, which names the role if there is
            no token.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the topic exists is found out when the job starts.
    """
    check_topic(topic)
    check_choice("compression", compression, COMPRESSIONS)
    cluster = Cluster(url, token, ca, certificate, key)
    cluster.check()
    made_format = to_output_format(format)
    settings = SinkSettings(topic, cluster, made_format, partition_key, event_time, compression)
    return PulsarSink(settings, parse_guarantee(guarantee))
