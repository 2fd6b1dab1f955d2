"""Publishes messages to one stream. A publisher has a name, and numbers its messages.

The broker stores a message only if its number is greater than all that it has stored of this publisher. At
least once, a publisher is an attempt of a subtask, and numbers tell repeats of requests whose answer was
lost. Exactly once, records are staged in checkpoints, and a publisher is what a subtask has staged for one
checkpoint: the order of these records is fixed, so their numbers are, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError
from ..formats.format import Format
from ..functions.calling import CallBounds
from ..functions.write_ahead import Epoch
from ..publishing import Client, ConnectedPublisher, RowEncoder, parts_within
from . import client as rabbitmq_client
from .client import (
    ANSWER_S_MAX,
    FRAME_BYTES,
    Broker,
    Connection,
    cannot_use,
    connected,
    is_missing,
    no_stream,
)
from .envelope import EnvelopeName, wrap

BOUNDS: Final = CallBounds(rows=2_000, within_ms=200, max_in_flight=1)
"""One call at a time keeps order."""
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

    target: str
    """The name of the stream, or of the super stream."""
    routing_key: str
    """The column that chooses the partition of a super stream; empty: the target is a stream."""
    broker: Broker
    format: Format
    envelope: EnvelopeName
    buffer_bytes: int


def unusable(broker: Broker, stream: str, error: BaseException) -> JobError:
    """Return the error for a stream that cannot be connected to."""
    return no_stream(broker, stream) if is_missing(error) else cannot_use(broker, error)


class MessageEncoder:
    """Makes messages of records."""

    def __init__(self, settings: SinkSettings) -> None:
        self._encoder = RowEncoder(settings.format, settings.target)
        self._wrapped = settings.envelope == "amqp"

    def encode(self, data: pa.RecordBatch) -> list[bytes]:
        """Return the message of each record.

        Raises:
            DataError: one is too large.
        """
        values = self._encoder.encode(data)
        messages = list(map(wrap, values)) if self._wrapped else values
        largest = max(map(len, messages), default=0)
        if largest > FRAME_BYTES - _FRAME_ROOM:
            raise DataError(
                f"a message is too large for a stream of RabbitMQ bytes=`{largest}`",
                fix=f"at most {FRAME_BYTES - _FRAME_ROOM} bytes; divide such records before the sink",
            )
        return messages


def publisher_of(epoch: Epoch) -> tuple[str, int]:
    """Return the name of the publisher of staged records, and the number of their first message.

    All parts of an epoch have one publisher, since a broker remembers a bounded number of them.
    """
    return epoch.id.rpartition("-")[0], epoch.part * _PART_NUMBERS + 1


class RabbitPublisher(ConnectedPublisher[Connection]):
    """Publishes records of one subtask to a stream."""

    system = "RabbitMQ"
    client: ClassVar[Client] = rabbitmq_client

    def __init__(self, settings: SinkSettings, stream: str) -> None:
        super().__init__()
        self._settings = settings
        self._stream = stream
        self._encoder = MessageEncoder(settings)
        self._checking = MessageEncoder(settings)
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

        async with connected(self._settings.broker, self._stream, name) as connection:
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
        await self.publish(data, *publisher_of(epoch))

    def check(self, data: pa.RecordBatch) -> None:
        self._checking.encode(data)

    async def publish_new(self, data: pa.RecordBatch, attempt: str) -> None:
        await self.publish_new_messages(self._encoder.encode(data), attempt)

    async def publish_new_messages(self, messages: Sequence[bytes], attempt: str) -> None:
        """Publish messages that nobody repeats, with the next numbers of an attempt."""
        number, self._next = self._next, self._next + len(messages)
        await self.publish_messages(messages, attempt, number)

    async def publish(self, data: pa.RecordBatch, key: str, number: int = 1) -> None:
        """Publish records; see `publish_messages`."""
        await self.publish_messages(self._encoder.encode(data), key, number)

    async def publish_messages(self, messages: Sequence[bytes], key: str, number: int) -> None:
        """Publish messages until the broker has confirmed all of them.

        Args:
            messages: in order.
            key: the name of the publisher.
            number: that of the first message; those of later calls are greater.

        Raises:
            StorageError: the broker does not answer.
            JobError: it does not take messages like these.
        """
        await self.insist(lambda connection: self._publish_all(connection, messages, key, number))

    async def _publish_all(
        self, connection: Connection, messages: Sequence[bytes], publisher: str, number: int
    ) -> None:
        """Publish messages, and wait for all confirmations.

        What is stored is always the beginning of the messages, also if this fails.

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
        sizes = [_MESSAGE_ROOM + len(message) for message in messages]
        for part in parts_within(messages, sizes, client.frame_max - _FRAME_ROOM):
            made = [schema.Message(n, None, message) for n, message in enumerate(part, number)]
            self._unconfirmed = set(range(number, number + len(part)))
            number += len(part)
            await client.send_publish_frame(schema.Publish(_PUBLISHER, made))
            # Not with the next frame: once messages of that are stored, those of a frame that was refused
            # are taken for repeats, and confirmed without being stored.
            await self._wait_for_confirmations()

    async def _wait_for_confirmations(self) -> None:
        """Wait until the broker has confirmed the messages of a frame; raises as `_publish_all`."""
        while self._unconfirmed and self._refusal is None:
            self._progress.clear()
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._progress.wait()
        if self._refusal is not None:
            raise self.refused(f"the broker refuses a message with the code {self._refusal}")

    def unusable(self, error: BaseException) -> JobError:
        return unusable(self._settings.broker, self._stream, error)

    def unheard(self, reason: str) -> StorageError:
        return StorageError(
            f"messages are not confirmed broker=`{self._settings.broker}`: {reason}",
            fix="check that the broker can be reached, and has room on its disk",
        )

    def refused(self, reason: str) -> JobError:
        broker = self._settings.broker
        return JobError(
            f"messages cannot be published stream=`{self._stream}` broker=`{broker}`: {reason}",
            fix="check that the stream is still there, the size of messages, and the rights of the user",
        )
