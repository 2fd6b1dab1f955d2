"""A stream of RabbitMQ as a sink. A publisher has a name, and numbers its messages.

The broker stores a message only if its number is greater than all that it has stored of this publisher. At
least once, a publisher is an attempt of a subtask, and numbers tell repeats of requests whose answer was
lost. Exactly once, records are staged in checkpoints, and a publisher is what a subtask has staged for one
checkpoint: the order of these records is fixed, so their numbers are, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError, UsageError
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch
from ...operators.origin import Origin, capture_origin
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ...operators.suggestions import suggest
from ..arguments import parse_bytes
from ..files.sink import tag_of
from ..formats.format import Encode, Format
from ..formats.text import FormatName, to_format
from ..functions.calling import CallBounds, CallingWriter
from ..functions.loop_thread import in_thread
from ..functions.write_ahead import BUFFER, Epoch, WriteAheadSettings, WriteAheadWriter
from ..messages import check_message_columns
from .client import (
    ANSWER_S_MAX,
    AWAY_S,
    FRAME_BYTES,
    PAUSE_S,
    Broker,
    Connection,
    cannot_use,
    connected,
    failures,
    is_lost,
    is_missing,
    no_stream,
    reason_of,
)
from .envelope import EnvelopeName, wrap
from .source import check_envelope, check_name

FORMATS: Final[tuple[FormatName, ...]] = ("json", "raw")
ROWS: Final = 2_000
"""The number of messages that are sent before their confirmations are waited for."""
_PART_NUMBERS: Final = 1 << 20
"""The numbers of messages that are set aside for a part of an epoch; staged epochs depend on it."""
_FRAME_ROOM: Final = 4096
"""The bytes of a frame that are left for what is not data."""
_PUBLISHER: Final = 1
"""The number of the publisher on its connection."""
_WITHIN_MS: Final = 200


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `rabbitmq_sink`, which documents them."""

    stream: str
    broker: Broker
    format: Format
    envelope: EnvelopeName
    buffer_bytes: int


class RabbitSink(Sink):
    """One stream."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee, origin: Origin) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("rabbitmq", *settings.format.extras)
        self.place = f"{settings.stream} of {settings.broker}"
        self._origin = origin

    def bind(self, schema: pa.Schema | None) -> None:
        check_message_columns(schema, {}, (), self.settings.format, "messages of RabbitMQ")

    def writer(self) -> SinkWriter:
        settings = self.settings
        if self.guarantee is not Guarantee.EXACTLY_ONCE:
            return RabbitWriter(settings)
        staging = WriteAheadSettings(ROWS, settings.buffer_bytes, "arrow")
        return WriteAheadWriter(Publisher(settings), staging, self._origin)

    def check_output(self, run: SinkRun) -> None:
        """Check that the stream exists."""
        in_thread(lambda: _look(self.settings))

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        in_thread(lambda: _look(self.settings))
        return "the stream is there"

    def describe(self) -> str:
        return f"rabbitmq({self.settings.stream})"


async def _look(settings: SinkSettings) -> None:
    """Check that the broker answers, and has the stream."""
    try:
        async with connected(settings.broker, settings.stream, "headgate-check"):
            pass
    except failures() as error:
        raise _unusable(settings, error) from error


def _unusable(settings: SinkSettings, error: BaseException) -> JobError:
    if is_missing(error):
        return no_stream(settings.broker, settings.stream)
    return cannot_use(settings.broker, error)


class RefusedError(Exception):
    """The broker does not take a message."""


class Publisher:
    """Publishes the records of one subtask. It is the function of a write-ahead writer."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings = settings
        self._encode: Encode | None = None
        self._schema: pa.Schema | None = None
        self._opened: contextlib.AsyncExitStack | None = None
        self._connection: Connection | None = None
        self._declared = ""
        """The name of the publisher on this connection."""
        self._unconfirmed: set[int] = set()
        self._refusal: int | None = None
        """The code with which the broker has refused a message."""
        self._progress = asyncio.Event()

    async def open(self, context: OperatorContext) -> None:
        """Connect; called in the event loop of the requests."""
        self._context = context
        self._name = f"headgate-{context.job_name}-{context.operator_name}"
        try:
            await self._connect()
        except failures() as error:
            raise _unusable(self._settings, error) from error

    async def _connect(self) -> Connection:
        from rstream import schema

        await self.close()
        stack = contextlib.AsyncExitStack()
        settings = self._settings
        found = await stack.enter_async_context(
            connected(settings.broker, settings.stream, self._name)
        )
        found.client.add_handler(schema.PublishConfirm, self._confirm, name="headgate")
        found.client.add_handler(schema.PublishError, self._refuse, name="headgate")
        self._opened, self._connection = stack, found
        return found

    async def close(self) -> None:
        """Close the connection."""
        stack, self._opened, self._connection, self._declared = self._opened, None, None, ""
        if stack is not None:
            await stack.aclose()

    def _confirm(self, frame: Any) -> None:
        self._unconfirmed.difference_update(frame.publishing_ids)
        self._progress.set()

    def _refuse(self, frame: Any) -> None:
        self._refusal = int(frame.errors[0].response_code) if frame.errors else 0
        self._progress.set()

    async def __call__(self, data: pa.RecordBatch, epoch: Epoch) -> None:
        """Publish the records that a checkpoint has staged."""
        # All parts of an epoch have one publisher, since a broker remembers a bounded number of them.
        publisher = epoch.id.rpartition("-")[0]
        await self.publish(data, publisher, epoch.part * _PART_NUMBERS + 1)

    async def publish(self, data: pa.RecordBatch, publisher: str, number: int) -> None:
        """Publish records until the broker has confirmed all of them.

        Args:
            data: the records.
            publisher: the name of the publisher.
            number: that of the first message; those of later calls are greater.

        Raises:
            StorageError: the broker does not answer.
            JobError: it does not take messages like these.
        """
        messages = self._messages_of(data)
        clock = self._context.clock
        deadline = clock.monotonic() + AWAY_S
        while True:
            try:
                connection = self._connection or await self._connect()
                work = self._publish_all(connection, messages, publisher, number)
                await connection.until_lost(work)
                return
            except RefusedError as error:
                raise self._refused(str(error)) from error
            except failures() as error:
                if not is_lost(error):
                    raise self._refused(reason_of(error)) from error
                await self.close()
                if clock.monotonic() > deadline:
                    raise StorageError(
                        f"messages are not confirmed broker=`{self._settings.broker}`: {reason_of(error)}",
                        fix="check that the broker can be reached, and has room on its disk",
                    ) from error
                self._context.logger.warning("RabbitMQ is tried again: %s", reason_of(error))
                await asyncio.sleep(PAUSE_S)

    async def _publish_all(
        self, connection: Connection, messages: Sequence[bytes], publisher: str, number: int
    ) -> None:
        """Publish messages, and wait for all confirmations.

        Raises:
            TimeoutError: none comes for some time.
            RefusedError: the broker does not take one of them.
        """
        from rstream import schema

        client = connection.client
        if self._declared != publisher:
            if self._declared:
                await client.delete_publisher(_PUBLISHER)
                self._declared = ""
            await client.declare_publisher(connection.stream, publisher, _PUBLISHER)
            self._declared = publisher
        self._refusal = None
        self._unconfirmed = set(range(number, number + len(messages)))
        for first, part in _frames(messages, client.frame_max - _FRAME_ROOM):
            made = [
                schema.Message(number + first + n, None, message) for n, message in enumerate(part)
            ]
            await client.send_publish_frame(schema.Publish(_PUBLISHER, made))
        while self._unconfirmed:
            self._progress.clear()
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._progress.wait()
            if self._refusal is not None:
                raise RefusedError(f"the broker refuses a message with the code {self._refusal}")

    def _messages_of(self, data: pa.RecordBatch) -> list[bytes]:
        settings = self._settings
        if self._encode is None or data.schema != self._schema:
            self._schema = data.schema
            self._encode = settings.format.encoder(data.schema, settings.stream)
        values = [value or b"" for value in self._encode(data)]
        messages = values if settings.envelope == "none" else [wrap(value) for value in values]
        largest = max(map(len, messages), default=0)
        if largest > FRAME_BYTES - _FRAME_ROOM:
            raise DataError(
                f"a message is too large for a stream of RabbitMQ bytes=`{largest}`",
                fix=f"at most {FRAME_BYTES - _FRAME_ROOM} bytes; divide such records before the sink",
            )
        return messages

    def _refused(self, reason: str) -> JobError:
        settings = self._settings
        return JobError(
            f"messages cannot be published stream=`{settings.stream}` broker=`{settings.broker}`: {reason}",
            fix="check that the stream is still there, the size of messages, and the rights of the user",
        )


def _frames(messages: Sequence[bytes], frame_bytes: int) -> list[tuple[int, Sequence[bytes]]]:
    """Divide messages into frames of a size that the broker takes, with the places of their first ones."""
    frames: list[tuple[int, Sequence[bytes]]] = []
    start, size = 0, 0
    for place, message in enumerate(messages):
        own = len(message) + 12  # its number and its length
        if size + own > frame_bytes and place > start:
            frames.append((start, messages[start:place]))
            start, size = place, 0
        size += own
    if start < len(messages):
        frames.append((start, messages[start:]))
    return frames


class RabbitWriter(CallingWriter):
    """Publishes records as they come, at least once."""

    def __init__(self, settings: SinkSettings) -> None:
        # One call at a time keeps the order.
        super().__init__(CallBounds(ROWS, _WITHIN_MS, 1))
        self._publisher = Publisher(settings)
        self._next = 1

    async def begin(self) -> None:
        await self._publisher.open(self.context)

    async def release(self) -> None:
        await self._publisher.close()

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        context = self.context
        tag = tag_of(context.job_name, context.operator_name)
        number, self._next = self._next, self._next + len(batch)
        await self._publisher.publish(
            batch.data, f"{tag}-{context.run_id}-{context.file_token}", number
        )


def rabbitmq_sink(
    stream: str,
    *,
    url: str,
    user: str = "guest",
    password: str = "guest",
    virtual_host: str = "/",
    format: FormatName | Format = "json",
    envelope: EnvelopeName = "amqp",
    guarantee: GuaranteeLike = "at_least_once",
    buffer: str | int = BUFFER,
    ca: str | None = None,
    certificate: str | None = None,
    key: str | None = None,
) -> RabbitSink:
    """Return a sink that publishes to a stream of RabbitMQ.

    It needs `pip install 'headgate[rabbitmq]'`, and the plugin rabbitmq_stream in the broker.

    Args:
        stream: the name of the stream, which must exist.
        url: the brokers, as for `rabbitmq_source`.
        user: the name of the user.
        password: the password, or where it can be read on each machine: `file:/path` or `env:NAME`.
        virtual_host: the virtual host of the stream.
        format: of the data: `json` (an object of all columns), `raw` (the one column), or what
            `avro_format` and `protobuf_format` return.
        envelope: `amqp`: the data is wrapped in messages of AMQP 1.0, as RabbitMQ's clients do it; `none`:
            it is stored as it is.
        guarantee: `at_least_once`; `exactly_once`, as long as the stream remembers the publishers of an
            interrupted commit; or `none`.
        buffer: with `exactly_once`: the most bytes staged between two checkpoints, as for
            `write_ahead_sink`.
        ca: with TLS: the file of the authorities to trust. None: those of the system.
        certificate: with TLS: the file with the certificate of the client.
        key: with TLS: the file with its key.

    Raises:
        UsageError: an argument is wrong. Whether the stream exists is found out when the job starts.
    """
    check_name(stream)
    check_envelope(envelope)
    broker = Broker(url, user, password, virtual_host, ca, certificate, key)
    broker.check()
    if not isinstance(format, Format) and format not in FORMATS:
        raise UsageError(
            f"no such format of messages format=`{format}`", fix=suggest(format, FORMATS, "formats")
        )
    buffer_bytes = parse_bytes("buffer", buffer)
    settings = SinkSettings(stream, broker, to_format(format), envelope, buffer_bytes)
    return RabbitSink(settings, parse_guarantee(guarantee), capture_origin())
