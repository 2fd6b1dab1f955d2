"""Writers that hand records to a client as messages, some records at a time.

At least once, records are published as they come. Exactly once, they are staged in checkpoints, and the
publisher is the function of a write-ahead writer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import pyarrow as pa

from ..errors import JobError, StorageError
from ..operators.base import OperatorContext
from ..operators.elements import Batch, ColumnBatch
from ..operators.origin import Origin
from ..operators.sink import Guarantee, SinkWriter
from .files.sink import tag_of
from .formats.format import Encode, Format
from .functions.calling import CallBounds, CallingWriter
from .functions.write_ahead import Epoch, WriteAheadSettings, WriteAheadWriter

AWAY_S: Final = 30.0
"""Messages are published again for this time while the servers are away."""
PAUSE_S: Final = 0.2
"""The pause before messages are published again."""
M = TypeVar("M")
T = TypeVar("T")


class RowEncoder:
    """Makes the data of messages of rows."""

    def __init__(self, format: Format, topic: str, apart: Collection[str] = ()) -> None:
        """Make an encoder.

        Args:
            format: of the data.
            topic: where the messages go.
            apart: the columns that are not a part of the data.
        """
        self._format = format
        self._topic = topic
        self._apart = frozenset(apart)
        self._schema: pa.Schema | None = None
        self._encode: Encode | None = None

    def encode(self, rows: pa.RecordBatch) -> list[bytes]:
        """Return the data of each row, which is empty if the row has no value."""
        wanted = rows.select([name for name in rows.schema.names if name not in self._apart])
        if self._encode is None or wanted.schema != self._schema:
            self._schema = wanted.schema
            self._encode = self._format.encoder(wanted.schema, self._topic)
        return [value or b"" for value in self._encode(wanted)]


def parts_within(
    messages: Sequence[M], sizes: Sequence[int], bytes_max: int, count_max: int | None = None
) -> list[Sequence[M]]:
    """Divide messages into parts that a service takes, each of at least one message.

    Args:
        messages: in order.
        sizes: theirs, in bytes.
        bytes_max: of a part.
        count_max: the most messages of a part; None: any number.
    """
    parts: list[Sequence[M]] = []
    start, size = 0, 0
    for place, own in enumerate(sizes):
        if place > start and (size + own > bytes_max or place - start == count_max):
            parts.append(messages[start:place])
            start, size = place, 0
        size += own
    return [*parts, messages[start:]] if messages else []


class Publisher:
    """Publishes the records of one subtask, in the event loop of its calls."""

    def __init__(self) -> None:
        self._calls = 0

    async def open(self, context: OperatorContext) -> None:
        """Connect; raise if that is impossible."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError

    def check(self, data: pa.RecordBatch) -> None:
        """Raise DataError if the servers will never take some records.

        It is called in the thread of the subtask, for records that are staged, while others are published.
        Once a checkpoint has records, they can no longer be left out.
        """

    async def publish(self, data: pa.RecordBatch, key: str) -> None:
        """Publish records until they are stored for good.

        Args:
            data: the records.
            key: a text that no other records have, and that repeats of these ones have, too.

        Raises:
            StorageError: the servers do not answer.
            JobError: they do not take messages like these.
        """
        raise NotImplementedError

    async def __call__(self, data: pa.RecordBatch, epoch: Epoch) -> None:
        """Publish the records that a checkpoint has staged."""
        await self.publish(data, epoch.id)

    async def publish_new(self, data: pa.RecordBatch, attempt: str) -> None:
        """Publish records that nobody repeats.

        Args:
            data: the records.
            attempt: a text that other attempts and other subtasks do not have.
        """
        self._calls += 1
        await self.publish(data, f"{attempt}-{self._calls}")


class PublishingWriter(CallingWriter):
    """Publishes records as they come, at least once."""

    def __init__(self, publisher: Publisher, bounds: CallBounds) -> None:
        super().__init__(bounds)
        self._publisher = publisher

    async def begin(self) -> None:
        await self._publisher.open(self.context)

    async def release(self) -> None:
        await self._publisher.close()

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        context = self.context
        tag = tag_of(context.job_name, context.operator_name)
        attempt = f"{tag}-{context.run_id}-{context.file_token}"
        await self._publisher.publish_new(batch.data, attempt)


class StagedPublishingWriter(WriteAheadWriter):
    """Publishes records when their checkpoint is complete, exactly once."""

    def __init__(self, publisher: Publisher, bounds: CallBounds, buffer_bytes: int, origin: Origin):
        """Make a writer; the arguments are those of `publishing_writer`."""
        super().__init__(publisher, WriteAheadSettings(bounds.rows, buffer_bytes, "arrow"), origin)

    def check(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        publisher: Publisher = self.function
        publisher.check(batch.data)


def publishing_writer(
    publisher: Publisher,
    bounds: CallBounds,
    guarantee: Guarantee,
    buffer_bytes: int,
    origin: Origin,
) -> SinkWriter:
    """Return a writer of one subtask.

    Args:
        publisher: of the subtask.
        bounds: of its calls.
        guarantee: of the sink.
        buffer_bytes: exactly once: the most bytes that are staged between two checkpoints.
        origin: the user's line that makes the sink.
    """
    if guarantee is not Guarantee.EXACTLY_ONCE:
        return PublishingWriter(publisher, bounds)
    return StagedPublishingWriter(publisher, bounds, buffer_bytes, origin)


class Connection(Protocol):
    """A connection of a client, which leaves requests unanswered when it is lost."""

    async def until_lost(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something, and raise one of the client's failures as soon as the connection is lost."""
        ...


C = TypeVar("C", bound=Connection)


class Client(Protocol):
    """The module of a client."""

    def failures(self) -> tuple[type[BaseException], ...]:
        """Return the errors of the client and of the servers."""
        ...

    def is_lost(self, error: BaseException) -> bool:
        """Return True if trying again may help."""
        ...

    def reason_of(self, error: BaseException) -> str:
        """Return the text of an error, in one line."""
        ...


class ConnectedPublisher(Publisher, Generic[C]):
    """A publisher with one connection, which makes another one when it is lost.

    Attributes:
        system: the name of the servers, for the log.
        client: the module of the client.
    """

    system: ClassVar[str]
    client: ClassVar[Client]

    def __init__(self) -> None:
        super().__init__()
        self._opened: contextlib.AsyncExitStack | None = None
        self._connection: C | None = None

    # -- what a subclass has ------------------------------------------------------------------------

    def connected(self, name: str) -> AbstractAsyncContextManager[C]:
        """Connect under a name that the servers show, for the time of the block."""
        raise NotImplementedError

    def unusable(self, error: BaseException) -> JobError:
        """Return the error for servers that cannot be connected to."""
        raise NotImplementedError

    def refused(self, reason: str) -> JobError:
        """Return the error for messages that the servers do not take."""
        raise NotImplementedError

    def unheard(self, reason: str) -> StorageError:
        """Return the error for servers that stay away."""
        raise NotImplementedError

    # -- the connection -----------------------------------------------------------------------------

    async def open(self, context: OperatorContext) -> None:
        self._context = context
        try:
            await self._connect()
        except self.client.failures() as error:
            raise self.unusable(error) from error

    async def _connect(self) -> C:
        await self.close()
        stack = contextlib.AsyncExitStack()
        name = f"headgate-{self._context.job_name}-{self._context.operator_name}"
        connection = await stack.enter_async_context(self.connected(name))
        self._opened, self._connection = stack, connection
        return connection

    async def close(self) -> None:
        stack, self._opened, self._connection = self._opened, None, None
        if stack is not None:
            await stack.aclose()

    async def insist(self, work: Callable[[C], Coroutine[Any, Any, None]]) -> None:
        """Do something, and again on another connection if this one is lost.

        Raises:
            StorageError: the servers stay away.
            JobError: they refuse it.
        """
        clock = self._context.clock
        deadline_s = clock.monotonic() + AWAY_S
        while True:
            try:
                connection = self._connection or await self._connect()
                await connection.until_lost(work(connection))
                return
            except self.client.failures() as error:
                reason = self.client.reason_of(error)
                if not self.client.is_lost(error):
                    raise self.refused(reason) from error
                await self.close()
                if clock.monotonic() > deadline_s:
                    raise self.unheard(reason) from error
                self._context.logger.warning("%s is tried again: %s", self.system, reason)
                await asyncio.sleep(PAUSE_S)
