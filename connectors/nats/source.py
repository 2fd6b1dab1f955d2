"""Reads a stream of NATS JetStream; the position is the sequence number of the last message.

Messages stay in a stream as long as its limits say, so the source can be read again from any position.
Nothing is acknowledged: consumers are made for a position and forgotten, and positions are those of
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec

from ...errors import SourceError, UsageError
from ...operators.connections import counted
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..arguments import OnLost, check_positions
from ..bad_records import BadRecordPolicy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..functions.loop_thread import in_thread
from ..messages import MessageColumns, MessageSource, Reading
from .client import Servers, cannot_use, connected, failures, is_missing
from .model import (
    METADATA,
    REJECTED_SCHEMA,
    NatsSettings,
    NatsSplit,
    Start,
    Stop,
    overlap,
)
from .reader import NatsReader

BUFFER: Final = "32mb"
_NUMBERS: Final = "a datetime, or a sequence number"


class NatsSource(MessageSource[Record_co]):
    """The messages of a stream, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA

    def __init__(self, settings: NatsSettings) -> None:
        super().__init__("nats", settings.reading.columns, METADATA)
        self.settings = settings
        self.bounded = settings.reading.stop is not None

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split for the stream, or one per subject, with the first and the last message."""
        found = in_thread(lambda: _plan(self.settings))
        return [msgspec.msgpack.encode(split) for split in found]

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.reading.columns.format.check_connection()
        return f"{counted(in_thread(lambda: _messages(self.settings)), 'message')} in the stream"

    def reader(self) -> SourceReader:
        return NatsReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        settings = self.settings
        subjects = f": {', '.join(settings.subjects)}" if settings.subjects else ""
        return f"nats({settings.stream}{subjects})"


async def _plan(settings: NatsSettings) -> list[NatsSplit]:
    """Ask the servers for the stream, and return the splits."""

    try:
        async with connected(settings.servers, "headgate-splits") as connection:
            jetstream = connection.jetstream
            state = await _state(jetstream, settings)
            start = await _first(jetstream, settings, state) - 1
            stop = await _last(jetstream, settings, state)
    except failures() as error:
        raise cannot_use(settings.servers, error) from error
    if stop is not None and stop <= start:
        return []
    return [
        NatsSplit(settings.stream, subject, start, stop) for subject in settings.subjects or ("",)
    ]


async def _messages(settings: NatsSettings) -> int:
    """Return how many messages the stream has."""

    try:
        async with connected(settings.servers, "headgate-check") as connection:
            state = await _state(connection.jetstream, settings)
            return int(state.messages)
    except failures() as error:
        raise cannot_use(settings.servers, error) from error


async def _state(jetstream: Any, settings: NatsSettings) -> Any:
    """Return the state of the stream.

    Raises:
        SourceError: there is no such stream.
    """
    import nats

    try:
        return (await jetstream.stream_info(settings.stream)).state
    except nats.js.errors.NotFoundError as error:
        if not is_missing(error):
            raise
        raise SourceError(
            f"there is no such stream stream=`{settings.stream}` servers=`{settings.servers}`",
            fix="check the name, the account of the user, and the domain; create it with `nats "
            "stream add`",
        ) from None


async def _first(jetstream: Any, settings: NatsSettings, state: Any) -> int:
    """Return the sequence number of the first message to read; 1: that of the first one there is."""
    at, behind = settings.reading.start, int(state.last_seq) + 1
    if at == "earliest":
        return 1 if state.messages else behind
    if at == "latest":
        return behind
    if isinstance(at, datetime):
        return await _first_at(jetstream, settings.stream, at)
    if at > behind:
        raise _no_message("start", at, state.last_seq)
    return at


async def _last(jetstream: Any, settings: NatsSettings, state: Any) -> int | None:
    """Return the sequence number of the last message to read; None: there is no end."""
    at = settings.reading.stop
    if at is None:
        return None
    if at == "latest":
        return int(state.last_seq)
    if isinstance(at, datetime):
        # The first message of that time or later is not read.
        return await _first_at(jetstream, settings.stream, at) - 1
    if at > state.last_seq:
        raise _no_message("stop", at, state.last_seq)
    return at


def _no_message(name: str, at: int, last: int) -> UsageError:
    return UsageError(
        f"the stream has no such message {name}=`{at}`", fix=f"the last one is {last}"
    )


async def _first_at(jetstream: Any, stream: str, at: datetime) -> int:
    """Return the number of the first message of a time or later, or that of the next one."""
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.BY_START_TIME,
        opt_start_time=at,
        ack_policy=AckPolicy.NONE,
        mem_storage=True,
        inactive_threshold=1.0,
    )
    told = await jetstream.add_consumer(stream, config=config)
    await jetstream.delete_consumer(stream, told.name)
    return int(told.delivered.stream_seq) + 1


class NatsOptions(TypedDict, total=False):
    """The keyword arguments of `nats_source` beside the schema; it documents them."""

    subjects: str | Sequence[str]
    format: FormatName | Format
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    batch_rows: int
    buffer: str | int
    user: str | None
    password: str | None
    token: str | None
    credentials: str | None
    ca: str | None
    certificate: str | None
    key: str | None


@overload
def nats_source(
    stream: str, *, url: str, schema: type[Record], **options: Unpack[NatsOptions]
) -> NatsSource[Record]: ...
@overload
def nats_source(
    stream: str, *, url: str, schema: ColumnsLike | None = ..., **options: Unpack[NatsOptions]
) -> NatsSource: ...
def nats_source(
    stream: str,
    *,
    url: str,
    schema: SchemaLike | None = None,
    subjects: str | Sequence[str] = (),
    format: FormatName | Format = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "earliest",
    stop: Stop | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    credentials: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> NatsSource:
    """Return a source of the messages in a stream of NATS JetStream.

    It needs `pip install 'headgate[nats]'`.

    Args:
        stream: the name of the stream, which keeps its messages by limits.
        url: servers to ask first: `nats://host:4222`, several with commas; or where that can be read on
            each machine: `file:/path` or `env:NAME`.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        subjects: only messages of these subjects, such as "orders.eu.>". Each is a split, so different
            subtasks can read them; no subject may match two of them. None: all messages, by one subtask.
        format: of the data: `json` (an object each), `csv` (one line), `raw`, or what `avro_format` and
            `protobuf_format` return.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `subject`, `sequence`, `timestamp` (when the server
            stored the message) or `headers`, such as {"timestamp": "sent_at"}.
        start: where a run without state begins: `earliest`, `latest`, a time (a datetime: the first
            message of that time or later), or the sequence number of the first message.
        stop: where reading ends, which makes the source bounded: `latest` (all that is there when the job
            starts), a time, or the sequence number of the last message. None: it never ends.
        on_bad_record: the treatment of unreadable messages: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        on_lost: what happens if messages have been deleted before they were read: `fail`, or `skip` to the
            first one that is left, with a warning.
        batch_rows: most rows per batch.
        buffer: about the most bytes that wait to be processed, per subtask.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        token: the token, likewise.
        credentials: a file with a JWT and its key (`.creds`), on each machine.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the stream exists is found out when the job starts.
    """
    check_name(stream)
    servers = Servers(url, user, password, token, credentials, ca, certificate, key)
    servers.check()
    columns = MessageColumns.of(
        to_format(format, delimiter), schema, metadata, METADATA, "messages"
    )
    check_positions(start, stop, ("earliest", "latest"), _NUMBERS, least=1, least_stop=0)
    reading = Reading[Start, Stop].of(
        columns, start, stop, on_bad_record, on_lost, batch_rows, buffer
    )
    names = (subjects,) if isinstance(subjects, str) else tuple(subjects)
    settings = NatsSettings(stream, _check_subjects(names), servers, reading)
    return NatsSource(settings)


def check_name(stream: str) -> None:
    """Check the name of a stream.

    Raises:
        UsageError: no stream can have it.
    """
    if not stream or any(each.isspace() or each in ".*>/\\" for each in stream):
        raise UsageError(
            f"not the name of a stream stream=`{stream}`",
            fix='"ORDERS"; subjects are given as subjects=',
        )


def _check_subjects(subjects: tuple[str, ...]) -> tuple[str, ...]:
    for number, subject in enumerate(subjects):
        if not subject or any(each.isspace() for each in subject):
            raise UsageError(f"not a subject subjects=`{subject}`", fix='subjects=["orders.eu.>"]')
        for other in subjects[:number]:
            if overlap(subject, other):
                raise UsageError(
                    f"a message could match two of the subjects subjects=`{other}, {subject}`",
                    fix="it would be read twice; keep one of them, or make them disjoint",
                )
    return subjects
