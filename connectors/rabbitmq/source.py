"""Reads streams of RabbitMQ; the position is the offset of the next message.

Messages stay in a stream as long as its limits say, so the source can be read again from any offset. No
offset is stored in the broker: positions are those of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, TypedDict, Unpack, overload

import msgspec

from ...errors import UsageError
from ...operators.connections import counted
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..arguments import OnLost, check_choice, check_positions
from ..bad_records import BadRecordPolicy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..functions.loop_thread import in_thread
from ..messages import MessageColumns, MessageSource, Reading
from .client import (
    Broker,
    Connection,
    cannot_use,
    connected,
    failures,
    is_missing,
    no_stream,
    partitions_of,
)
from .envelope import ENVELOPES, EnvelopeName
from .model import (
    METADATA,
    REJECTED_SCHEMA,
    RabbitSettings,
    Start,
    Stop,
    StreamSplit,
    decoded,
)
from .reader import RabbitReader

BUFFER: Final = "32mb"


class RabbitSource(MessageSource[Record_co]):
    """The messages of some streams, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA

    def __init__(self, settings: RabbitSettings) -> None:
        super().__init__("rabbitmq", settings.reading.columns, METADATA)
        self.settings = settings
        self.bounded = settings.reading.stop is not None
        self.discovers = settings.super_stream is not None and not self.bounded

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per stream, with the offsets where reading starts and stops."""
        planned = in_thread(lambda: _plan(self.settings))
        return [msgspec.msgpack.encode(split) for split in planned]

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.reading.columns.format.check_connection()
        in_thread(lambda: _plan(self.settings))
        if self.settings.super_stream is None:
            return counted(len(self.settings.streams), "stream")
        streams = in_thread(lambda: _streams_of(self.settings))
        return f"{counted(len(streams), 'partition')} of {self.settings.super_stream}"

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """Return one split per partition that exists now; new ones are read from their beginning."""
        return [
            known.get(stream, msgspec.msgpack.encode(StreamSplit(stream, 0)))
            for stream in in_thread(lambda: _streams_of(self.settings))
        ]

    def split_key(self, split: bytes) -> str:
        return decoded(split).name

    def reader(self) -> SourceReader:
        return RabbitReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"rabbitmq({self.settings.super_stream or ', '.join(self.settings.streams)})"


async def _plan(settings: RabbitSettings) -> list[StreamSplit]:
    """Look at the streams, and return the splits that have something to read."""
    planned = [await _plan_one(settings, stream) for stream in await _streams_of(settings)]
    return [split for split in planned if split is not None]


async def _streams_of(settings: RabbitSettings) -> Sequence[str]:
    """Return the streams to read, which may be the partitions of a super stream."""
    if settings.super_stream is None:
        return settings.streams
    return await partitions_of(settings.broker, settings.super_stream, "headgate-splits")


async def _plan_one(settings: RabbitSettings, stream: str) -> StreamSplit | None:
    try:
        async with connected(settings.broker, stream, "headgate-splits") as connection:
            end = await connection.end()
            start = await _first(connection, settings.reading.start, end)
            stop = await _last(connection, settings.reading.stop, end)
    except failures() as error:
        if is_missing(error):
            raise no_stream(settings.broker, stream) from error
        raise cannot_use(settings.broker, error) from error
    return StreamSplit(stream, start, stop) if stop is None or stop >= start else None


async def _first(connection: Connection, start: Start, end: int) -> int:
    """Return the offset of the first message to read."""
    if start == "earliest":
        return 0
    if start == "latest":
        return end
    if isinstance(start, datetime):
        return await _first_at(connection, start, end)
    if start > end:
        raise _no_message("start", start, connection.stream, end)
    return start


async def _last(connection: Connection, stop: Stop | None, end: int) -> int | None:
    """Return the offset of the last message to read; None: there is no end."""
    if stop is None:
        return None
    if stop == "latest":
        return end - 1
    if isinstance(stop, datetime):
        # The first chunk of that time or later is not read.
        return await _first_at(connection, stop, end) - 1
    if stop >= end:
        raise _no_message("stop", stop, connection.stream, end)
    return stop


async def _first_at(connection: Connection, at: datetime, end: int) -> int:
    """Return the offset of the first chunk of a time or later, or the end of the stream."""
    from rstream import schema
    from rstream.constants import OffsetType

    time_ms = math.ceil(at.timestamp() * 1000)
    found = await connection.chunk_at(schema.OffsetSpec.from_params(OffsetType.TIMESTAMP, time_ms))
    return end if found is None else int(found.chunk_first_offset)


def _no_message(name: str, at: int, stream: str, end: int) -> UsageError:
    fix = f"the last one is {end - 1}" if end else "the stream is empty"
    return UsageError(f"the stream has no such message {name}=`{at}` stream=`{stream}`", fix=fix)


class RabbitOptions(TypedDict, total=False):
    """The keyword arguments of `rabbitmq_source` beside the schema; it documents them."""

    super_stream: str
    user: str
    password: str
    virtual_host: str
    format: FormatName | Format
    envelope: EnvelopeName
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    batch_rows: int
    buffer: str | int
    ca: str | None
    certificate: str | None
    key: str | None


@overload
def rabbitmq_source(
    streams: str | Sequence[str] = ...,
    *,
    url: str,
    schema: type[Record],
    **options: Unpack[RabbitOptions],
) -> RabbitSource[Record]: ...
@overload
def rabbitmq_source(
    streams: str | Sequence[str] = ...,
    *,
    url: str,
    schema: ColumnsLike | None = ...,
    **options: Unpack[RabbitOptions],
) -> RabbitSource: ...
def rabbitmq_source(
    streams: str | Sequence[str] = (),
    *,
    url: str,
    schema: SchemaLike | None = None,
    super_stream: str | None = None,
    user: str = "guest",
    password: str = "guest",
    virtual_host: str = "/",
    format: FormatName | Format = "json",
    envelope: EnvelopeName = "amqp",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> RabbitSource:
    """Return a source of the messages in streams of RabbitMQ, each read exactly once.

    It needs `pip install 'headgate[rabbitmq]'`, and the plugin rabbitmq_stream in the broker.

    Args:
        streams: the names of streams, each of which is a split; either they or `super_stream`.
        url: brokers to ask first: `rabbitmq-stream://host:5552`, `rabbitmq-stream+tls://host:5551`, several
            with commas; or where that can be read on each machine: `file:/path` or `env:NAME`.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        super_stream: the name of a super stream, whose partitions are splits. Those that are added while
            the job runs are found every `headgate.source.discovery-interval` and read from their beginning,
            unless reading has an end (`stop`).
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        virtual_host: the virtual host of the streams.
        format: of the data: `json` (an object each), `csv` (one line), `raw`, or what `avro_format` and
            `protobuf_format` return.
        envelope: `amqp`: messages are those of AMQP 1.0, as RabbitMQ's clients write them; `none`: their
            bytes are the data.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `stream`, `offset`, `timestamp` (when the broker
            stored the chunk of the message) or `properties` (the application properties), such as
            {"timestamp": "stored_at"}.
        start: where a run without state begins: `earliest`, `latest`, a time (a datetime: the first chunk
            of that time or later), or the offset of the first message.
        stop: where reading ends, which makes the source bounded: `latest` (all that is there when the job
            starts), a time (a datetime: before the first chunk of that time or later, of what is there
            when the job starts), or the offset of the last message. None: it never ends.
        on_bad_record: the treatment of unreadable messages: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        on_lost: what happens if messages have been deleted before they were read: `fail`, or `skip` to the
            first one that is left, with a warning.
        batch_rows: most rows per batch.
        buffer: about the most bytes that wait to be processed, per subtask, beside four chunks per stream
            that the broker sends ahead.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the streams exist is found out when the job starts.
    """
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    _check_streams(names, super_stream)
    broker = Broker(url, user, password, virtual_host, ca, certificate, key)
    broker.check()
    made = to_format(format, delimiter)
    check_choice("envelope", envelope, ENVELOPES, "envelope", "envelopes")
    columns = MessageColumns.of(made, schema, metadata, METADATA, "messages")
    others = "a datetime, or an offset"
    check_positions(start, stop, ("earliest", "latest"), others, least=0, least_stop=0)
    reading = Reading[Start, Stop].of(
        columns, start, stop, on_bad_record, on_lost, batch_rows, buffer
    )
    settings = RabbitSettings(names, super_stream, broker, envelope, reading)
    return RabbitSource(settings)


def _check_streams(streams: Sequence[str], super_stream: str | None) -> None:
    """Raise UsageError unless streams are named, or a super stream."""
    for name in (*streams, *(() if super_stream is None else (super_stream,))):
        check_name(name)
    if bool(streams) == (super_stream is not None) or len(set(streams)) < len(streams):
        raise UsageError(
            f"a source needs streams, each of them once, or a super stream streams=`{', '.join(streams)}`",
            fix='rabbitmq_source("orders", ...), or rabbitmq_source(super_stream="orders", ...)',
        )


def check_name(stream: str) -> None:
    """Check the name of a stream.

    Raises:
        UsageError: no stream can have it.
    """
    if not stream or len(stream.encode()) > 255:
        raise UsageError(f"not the name of a stream stream=`{stream}`", fix="1 to 255 bytes")
