"""A stream of RabbitMQ as a sink. A publisher has a name, and numbers its messages.

The broker stores a message only if its number is greater than all that it has stored of this publisher. At
least once, a publisher is an attempt of a subtask, and numbers tell repeats of requests whose answer was
lost. Exactly once, records are staged in checkpoints, and a publisher is what a subtask has staged for one
checkpoint: the order of these records is fixed, so their numbers are, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError
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
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds
from ..functions.loop_thread import in_thread
from ..functions.write_ahead import BUFFER, Epoch
from ..messages import check_message_columns
from ..publishing import Client, ConnectedPublisher, RowEncoder, parts_within, publishing_writer
from . import client as rabbitmq_client
from .client import (
    ANSWER_S_MAX,
    FRAME_BYTES,
    Broker,
    Connection,
    cannot_use,
    connected,
    failures,
    is_missing,
    no_stream,
)
from .envelope import EnvelopeName, wrap
from .source import check_envelope, check_name

_BOUNDS: Final = CallBounds(rows=2_000, within_ms=200, max_in_flight=1)
"""All messages of a call are sent before confirmations are waited for. One call at a time keeps order."""
_PART_NUMBERS: Final = 1 << 20
"""The numbers of messages that are set aside for a part of an epoch; staged epochs depend on it."""
_FRAME_ROOM: Final = 4096
"""The bytes of a frame that are left for what is not data."""
_MESSAGE_ROOM: Final = 12
"""The bytes of the number and the length of a message."""
_PUBLISHER: Final = 1
"""The number of the publisher on its connection."""


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
        publisher, buffer_bytes = RabbitPublisher(self.settings), self.settings.buffer_bytes
        return publishing_writer(publisher, _BOUNDS, self.guarantee, buffer_bytes, self._origin)

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


class RabbitPublisher(ConnectedPublisher[Connection]):
    """Publishes the records of one subtask."""

    system = "RabbitMQ"
    client: ClassVar[Client] = rabbitmq_client

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__()
        self._settings = settings
        self._encoder = RowEncoder(settings.format, settings.stream)
        self._declared = ""
        """The name of the publisher on this connection."""
        self._next = 1
        """The number of the next message that is not staged."""
        self._unconfirmed: set[int] = set()
        self._refusal: int | None = None
        """The code with which the broker has refused a message."""
        self._progress = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Connection]:
        from rstream import schema

        settings = self._settings
        async with connected(settings.broker, settings.stream, name) as connection:
            connection.client.add_handler(schema.PublishConfirm, self._confirm, name="headgate")
            connection.client.add_handler(schema.PublishError, self._refuse, name="headgate")
            self._declared = ""
            yield connection

    def _confirm(self, frame: Any) -> None:
        self._unconfirmed.difference_update(frame.publishing_ids)
        self._progress.set()

    def _refuse(self, frame: Any) -> None:
        self._refusal = int(frame.errors[0].response_code) if frame.errors else 0
        self._progress.set()

    async def __call__(self, data: pa.RecordBatch, epoch: Epoch) -> None:
        # All parts of an epoch have one publisher, since a broker remembers a bounded number of them.
        publisher = epoch.id.rpartition("-")[0]
        await self.publish(data, publisher, epoch.part * _PART_NUMBERS + 1)

    async def publish_new(self, data: pa.RecordBatch, attempt: str) -> None:
        number, self._next = self._next, self._next + data.num_rows
        await self.publish(data, attempt, number)

    async def publish(self, data: pa.RecordBatch, key: str, number: int = 1) -> None:
        """Publish records until the broker has confirmed all of them.

        Args:
            data: the records.
            key: the name of the publisher.
            number: that of the first message; those of later calls are greater.

        Raises:
            StorageError: the broker does not answer.
            JobError: it does not take messages like these.
        """
        messages = self._messages_of(data)
        await self.insist(lambda connection: self._publish_all(connection, messages, key, number))

    async def _publish_all(
        self, connection: Connection, messages: Sequence[bytes], publisher: str, number: int
    ) -> None:
        """Publish messages, and wait for all confirmations.

        Raises:
            TimeoutError: none comes for some time.
            JobError: the broker does not take one of them.
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
        sizes = [_MESSAGE_ROOM + len(message) for message in messages]
        for part in parts_within(messages, sizes, client.frame_max - _FRAME_ROOM):
            made = [schema.Message(n, None, message) for n, message in enumerate(part, number)]
            number += len(part)
            await client.send_publish_frame(schema.Publish(_PUBLISHER, made))
        while self._unconfirmed:
            self._progress.clear()
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._progress.wait()
            if self._refusal is not None:
                raise self.refused(f"the broker refuses a message with the code {self._refusal}")

    def _messages_of(self, data: pa.RecordBatch) -> list[bytes]:
        values = self._encoder.encode(data)
        messages = values if self._settings.envelope == "none" else list(map(wrap, values))
        largest = max(map(len, messages), default=0)
        if largest > FRAME_BYTES - _FRAME_ROOM:
            raise DataError(
                f"a message is too large for a stream of RabbitMQ bytes=`{largest}`",
                fix=f"at most {FRAME_BYTES - _FRAME_ROOM} bytes; divide such records before the sink",
            )
        return messages

    def unusable(self, error: BaseException) -> JobError:
        return _unusable(self._settings, error)

    def unheard(self, reason: str) -> StorageError:
        return StorageError(
            f"messages are not confirmed broker=`{self._settings.broker}`: {reason}",
            fix="check that the broker can be reached, and has room on its disk",
        )

    def refused(self, reason: str) -> JobError:
        settings = self._settings
        return JobError(
            f"messages cannot be published stream=`{settings.stream}` broker=`{settings.broker}`: {reason}",
            fix="check that the stream is still there, the size of messages, and the rights of the user",
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
    made_format = to_output_format(format)
    buffer_bytes = parse_bytes("buffer", buffer)
    settings = SinkSettings(stream, broker, made_format, envelope, buffer_bytes)
    return RabbitSink(settings, parse_guarantee(guarantee), capture_origin())
