"""Subjects of NATS JetStream as a sink. Each message has an id, by which a stream drops repeats.

A stream remembers the ids of its *duplicate window*, two minutes by default. At least once, ids are those
of a column, or made for an attempt, for requests whose answer was lost. Exactly once, records are staged in
checkpoints, and the ids are fixed with them: see `functions/write_ahead.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
import pyarrow as pa

from ...errors import DataError, JobError, SourceError, StorageError, UsageError
from ...operators.base import OperatorContext
from ...operators.origin import Origin, capture_origin
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ..arguments import parse_bytes
from ..files.sink import tag_of
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds
from ..functions.loop_thread import in_thread
from ..functions.write_ahead import BUFFER
from ..messages import check_message_columns, check_written
from ..publishing import Client, ConnectedPublisher, RowEncoder, publishing_writer
from . import client as nats_client
from .client import ANSWER_S_MAX, Connection, Inbox, Servers, cannot_use, connected, failures
from .frames import Message, header, publication, status_of

WRITABLE: Final = ("subject", "id")
ID_HEADER: Final = "Nats-Msg-Id"
_LINE_ENDS: Final = str.maketrans("\r\n", "  ")
"""A header cannot have line ends, so spaces stand for them in ids."""
_SEND_BYTES: Final = 1 << 20
"""Commands are sent when they have this size."""
_NUMBERS: Final = "0" * 30
"""About as long as the numbers in the id of staged records, which are known with their checkpoint."""
_FOREIGN: Final = Exception("another program has answered")
_BOUNDS: Final = CallBounds(rows=500, within_ms=1_000, max_in_flight=1)
"""All messages of a call are sent before an answer is waited for. One call at a time keeps the order."""


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `nats_sink`, which documents them."""

    subject: str
    servers: Servers
    format: Format
    metadata: Mapping[str, str]
    buffer_bytes: int


class NatsSink(Sink):
    """One subject, or those in a column."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee, origin: Origin) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("nats", *settings.format.extras)
        self.place = f"{settings.subject or 'subjects'} of {settings.servers}"
        self._origin = origin

    def bind(self, schema: pa.Schema | None) -> None:
        metadata = self.settings.metadata
        texts = {f"for metadata {kind}": column for kind, column in metadata.items()}
        check_message_columns(
            schema, texts, metadata.values(), self.settings.format, "messages of NATS"
        )

    def writer(self) -> SinkWriter:
        publisher, buffer_bytes = NatsPublisher(self.settings), self.settings.buffer_bytes
        return publishing_writer(publisher, _BOUNDS, self.guarantee, buffer_bytes, self._origin)

    def check_output(self, run: SinkRun) -> None:
        """Check that a stream takes the subject; say how long it remembers ids."""
        window_s = in_thread(lambda: _window_s(self.settings))
        if self.guarantee is Guarantee.EXACTLY_ONCE and window_s is not None:
            run.announce(
                f"sink `{run.sink}`: the stream drops repeated messages for {window_s:g} s. A commit that "
                "is interrupted for longer may make messages visible twice"
            )

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        in_thread(lambda: _window_s(self.settings))
        if not self.settings.subject:
            return "the server answers; the subjects are in a column"
        return "a stream takes the subject"

    def describe(self) -> str:
        return f"nats({self.settings.subject or self.settings.metadata['subject']})"


async def _window_s(settings: SinkSettings) -> float | None:
    """Return for how many seconds the stream of the subject drops repeats; None: that is not known."""
    import nats

    try:
        async with connected(settings.servers, "headgate-check") as connection:
            if not settings.subject:
                return None
            jetstream = connection.jetstream
            try:
                name = await jetstream.find_stream_name_by_subject(settings.subject)
            except nats.js.errors.NotFoundError:
                raise _no_stream(settings.subject, settings.servers) from None
            window = (await jetstream.stream_info(name)).config.duplicate_window
            return None if window is None else float(window)
    except failures() as error:
        raise cannot_use(settings.servers, error) from error


def _no_stream(subject: str, servers: Servers) -> SourceError:
    return SourceError(
        f"no stream takes messages of the subject subject=`{subject}` servers=`{servers}`",
        fix="create one with `nats stream add`, or check the name and the account of the user",
    )


class NatsPublisher(ConnectedPublisher[Connection]):
    """Publishes the records of one subtask."""

    system = "NATS"
    client: ClassVar[Client] = nats_client

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__()
        self._settings = settings
        apart = settings.metadata.values()
        self._encoder = RowEncoder(settings.format, settings.subject, apart)
        self._checking = RowEncoder(settings.format, settings.subject, apart)
        self._bytes_max = 0
        """The most bytes of a message with its headers, as the server said first."""

    async def open(self, context: OperatorContext) -> None:
        await super().open(context)
        if self._connection is not None:
            self._bytes_max = self._connection.bytes_max

    def check(self, data: pa.RecordBatch) -> None:
        self._texts(data, "subject")
        values, context = self._checking.encode(data), self._context
        key = f"{tag_of(context.job_name, context.operator_name)}-{context.run_id}-{_NUMBERS}"
        ids = self._texts(data, "id") or [key]
        most = len(header(ID_HEADER, max(ids, key=_size_of))) + max(map(len, values))
        if most > self._bytes_max:  # else single records need not be looked at
            for value, id_ in zip(values, ids if len(ids) > 1 else ids * len(values), strict=True):
                self._check_size(len(header(ID_HEADER, id_)) + len(value))

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise DataError(
                f"a message is too large for NATS servers=`{self._settings.servers}` bytes=`{size}` "
                f"max_payload=`{self._bytes_max}`",
                fix="let the servers take larger messages (max_payload), or divide such records before the "
                "sink",
            )

    def connected(self, name: str) -> AbstractAsyncContextManager[Connection]:
        return connected(self._settings.servers, name)

    async def publish(self, data: pa.RecordBatch, key: str) -> None:
        """Publish records; `key` and their numbers are the ids of messages, unless a column has ids."""
        messages = self._messages_of(data, key)
        await self.insist(lambda connection: _publish_all(connection, messages))

    def _messages_of(self, data: pa.RecordBatch, key: str) -> list[tuple[str, bytes, str]]:
        """Return subject, data and id of each record."""
        rows = data.num_rows
        subjects = self._texts(data, "subject") or [self._settings.subject] * rows
        ids = self._texts(data, "id") or [f"{key}-{number}" for number in range(rows)]
        return list(zip(subjects, self._encoder.encode(data), ids, strict=True))

    def _texts(self, data: pa.RecordBatch, kind: str) -> list[str] | None:
        column = self._settings.metadata.get(kind)
        if column is None:
            return None
        texts: list[str | None] = data.column(column).to_pylist()
        found = [text for text in texts if text and not text.isspace()]
        if len(found) < len(texts) or any(
            each.isspace() for text in found for each in (text if kind == "subject" else "")
        ):
            raise DataError(
                f"a record has no {kind} that NATS takes column=`{column}`",
                fix="correct such records before the sink, or filter them out",
            )
        return [text.strip().translate(_LINE_ENDS) for text in found]

    def unusable(self, error: BaseException) -> JobError:
        return cannot_use(self._settings.servers, error)

    def unheard(self, reason: str) -> StorageError:
        return StorageError(
            f"messages are not acknowledged servers=`{self._settings.servers}`: {reason}",
            fix="check that the servers can be reached, and that a stream takes the subject",
        )

    def refused(self, reason: str) -> JobError:
        return JobError(
            f"messages cannot be published servers=`{self._settings.servers}`: {reason}",
            fix="check the size limits of the servers and of the stream (max_payload, max_msg_size), that "
            "it is not full, and the rights of the user",
        )


def _size_of(text: str) -> int:
    return len(text.encode())


async def _publish_all(connection: Connection, messages: list[tuple[str, bytes, str]]) -> None:
    """Publish messages; raise if one of them was not acknowledged, after all answers have come."""
    from nats.errors import MaxPayloadError

    answers = await connection.answers()
    reply = answers.new_reply()
    commands, size = [], 0
    for number, (subject, data, id_) in enumerate(messages):
        headers = header(ID_HEADER, id_)
        if len(headers) + len(data) > connection.bytes_max:
            raise MaxPayloadError
        commands.append(publication(subject, f"{reply}.{number}", headers, data))
        size += len(commands[-1])
        if size >= _SEND_BYTES:
            await connection.send(b"".join(commands))
            commands, size = [], 0
    await connection.send(b"".join(commands))
    await _wait_for_all(answers, f"{reply}.".encode(), len(messages))


async def _wait_for_all(answers: Inbox, prefix: bytes, count: int) -> None:
    """Wait for the answers to messages; raise the first failure among them.

    Args:
        answers: where they come.
        prefix: the subject of an answer is this and the number of the message.
        count: of the messages.
    """
    unanswered, failure = set(range(count)), None
    while unanswered:
        try:
            arrived = await answers.some(ANSWER_S_MAX)
        except TimeoutError:
            raise failure or TimeoutError("a stream has not answered") from None
        for each in arrived:
            if each.subject.startswith(prefix):
                told = None if _is_stored(each) else _told(each)
                if told is _FOREIGN:
                    continue
                failure = failure or told
                unanswered.discard(int(each.subject[len(prefix) :]))
    if failure is not None:
        raise failure


def _is_stored(answer: Message) -> bool:
    """Return True if a stream has stored the message, by the look of its answer."""
    return answer.data.startswith(b'{"stream":') and b'"error"' not in answer.data


class _Answer(msgspec.Struct):
    """The answer of a stream to a message."""

    error: dict[str, Any] | None = None
    stream: str = ""


def _told(answer: Message) -> Exception | None:
    """Return the failure in an answer; None: there is none; `_FOREIGN`: it is not that of a stream."""
    from nats.js.errors import APIError, NoStreamResponseError

    if status_of(answer) is not None:
        unavailable: Exception = NoStreamResponseError()
        return unavailable
    try:
        told = msgspec.json.decode(answer.data, type=_Answer)
        if told.error is not None:
            APIError.from_error(told.error)
    except msgspec.MsgspecError:
        return _FOREIGN
    except APIError as error:
        refused: Exception = error
        return refused
    return None if told.stream else _FOREIGN


def nats_sink(
    subject: str = "",
    *,
    url: str,
    format: FormatName | Format = "json",
    metadata: Mapping[str, str] | None = None,
    guarantee: GuaranteeLike = "at_least_once",
    buffer: str | int = BUFFER,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    credentials: str | None = None,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> NatsSink:
    """Return a sink that publishes to a stream of NATS JetStream.

    It needs `pip install 'headgate[nats]'`.

    Args:
        subject: the subject of all messages, which a stream must take; or a column has it (`metadata`).
        url: the servers, as for `nats_source`.
        format: of the data: `json` (an object of the columns that are not in `metadata`), `raw` (the one
            column that is not), or what `avro_format` and `protobuf_format` return.
        metadata: columns that become a part of the message beside its data: `subject` or `id` (the header
            `Nats-Msg-Id`), such as {"id": "order_id"}.
        guarantee: `at_least_once`; `exactly_once`, as long as a commit is not interrupted for longer than
            the duplicate window of the stream; or `none`.
        buffer: with `exactly_once`: the most bytes staged between two checkpoints, as for
            `write_ahead_sink`.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        token: the token, likewise.
        credentials: a file with a JWT and its key (`.creds`), on each machine.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether a stream takes the subject is found out when the job
            starts.
    """
    given = check_written(metadata, WRITABLE, "messages")
    if bool(subject) == ("subject" in given):
        raise UsageError(
            "the subject must be given once",
            fix='nats_sink("orders.eu"), or metadata={"subject": column}',
        )
    if any(each.isspace() or each in "*>" for each in subject):
        raise UsageError(
            f"no message can have this subject subject=`{subject}`",
            fix='"orders.eu", without wildcards',
        )
    made_format = to_output_format(format)
    buffer_bytes = parse_bytes("buffer", buffer)
    servers = Servers(url, user, password, token, credentials, ca, certificate, key)
    servers.check()
    settings = SinkSettings(subject, servers, made_format, given, buffer_bytes)
    return NatsSink(settings, parse_guarantee(guarantee), capture_origin())
