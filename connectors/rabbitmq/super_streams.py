"""Super streams as sinks: the hash of a routing key chooses the partition of a message.

The hash is that of RabbitMQ's clients for Java and Go, so all of them find the messages of a key in
the same partition. Records get the names of their streams before they are staged, and keep them. So a
commit that is repeated after the super stream was given more partitions goes to the streams that it went to
before, which know the numbers of its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...operators.base import OperatorContext
from ...operators.connections import counted
from ...operators.elements import Batch, ColumnBatch
from ...operators.origin import Origin
from ...operators.sink import Guarantee, Sink, SinkRun, SinkWriter
from ..functions.loop_thread import in_thread
from ..functions.write_ahead import Epoch
from ..messages import check_message_columns
from ..publishing import Publisher, PublishingWriter, StagedPublishingWriter
from .client import partitions_of
from .publisher import BOUNDS, MessageEncoder, RabbitPublisher, SinkSettings, publisher_of

_SEED: Final = 104729
"""The clients of RabbitMQ begin the hash with it."""
_STREAM: Final = "stream"
"""The name of the last column of records that have been routed. The user may have one of this name, too."""


def partitions_by_key(keys: pa.Array, partitions: int) -> np.ndarray:
    """Return the number of the partition of each key; null counts as the empty text."""
    import mmh3  # the client needs it as well

    encoded = keys.fill_null("").dictionary_encode()
    numbers = [
        mmh3.hash(key.encode(), _SEED, signed=False) % partitions
        for key in encoded.dictionary.to_pylist()
    ]
    found: np.ndarray = np.array(numbers, np.int64)[encoded.indices.to_numpy()]
    return found


def with_streams(
    data: pa.RecordBatch, routing_key: str, partitions: Sequence[str]
) -> pa.RecordBatch:
    """Return records with the streams that they go to as a further column."""
    numbers = partitions_by_key(data.column(routing_key), len(partitions))
    streams = pc.take(pa.array(partitions, pa.string()), pa.array(numbers))
    schema = data.schema.append(pa.field(_STREAM, pa.string(), nullable=False))
    return pa.RecordBatch.from_arrays([*data.columns, streams], schema=schema)


def without_streams(data: pa.RecordBatch) -> tuple[pa.RecordBatch, list[str]]:
    """Return records as the user gave them, and the streams that they go to."""
    last = data.num_columns - 1
    rows = pa.RecordBatch.from_arrays(data.columns[:last], schema=data.schema.remove(last))
    return rows, data.column(last).to_pylist()


class SuperStreamPublisher(Publisher):
    """Publishes the routed records of one subtask, on a connection for each partition.

    The messages of a partition have the numbers of one publisher, in the order of the records.
    """

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__()
        self._settings = settings
        self._encoder = MessageEncoder(settings)
        self._checking = MessageEncoder(settings)
        self._publishers: dict[str, RabbitPublisher] = {}

    async def open(self, context: OperatorContext) -> None:
        self._context = context
        for stream in await _partitions(self._settings):
            await self._publisher(stream)

    async def close(self) -> None:
        await asyncio.gather(*(publisher.close() for publisher in self._publishers.values()))

    async def _publisher(self, stream: str) -> RabbitPublisher:
        if stream not in self._publishers:
            publisher = RabbitPublisher(self._settings, stream)
            await publisher.open(self._context)
            self._publishers[stream] = publisher
        return self._publishers[stream]

    async def __call__(self, data: pa.RecordBatch, epoch: Epoch) -> None:
        name, number = publisher_of(epoch)
        await self._to_each(
            data, lambda publisher, messages: publisher.publish_messages(messages, name, number)
        )

    def check(self, data: pa.RecordBatch) -> None:
        self._checking.encode(without_streams(data)[0])

    async def publish_new(self, data: pa.RecordBatch, attempt: str) -> None:
        await self._to_each(
            data, lambda publisher, messages: publisher.publish_new_messages(messages, attempt)
        )

    async def _to_each(
        self,
        data: pa.RecordBatch,
        publish: Callable[[RabbitPublisher, Sequence[bytes]], Awaitable[None]],
    ) -> None:
        """Publish the records of each stream, to all streams at the same time."""
        rows, streams = without_streams(data)
        divided: dict[str, list[bytes]] = {}
        for stream, message in zip(streams, self._encoder.encode(rows), strict=True):
            divided.setdefault(stream, []).append(message)
        publishers = [await self._publisher(stream) for stream in divided]
        tasks = [
            asyncio.ensure_future(publish(publisher, messages))
            for publisher, messages in zip(publishers, divided.values(), strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _RoutingWriter(SinkWriter):
    """Routes records before they are published or staged.

    Attributes:
        settings: of the sink.
    """

    settings: SinkSettings

    def prepare(self) -> None:
        self._partitions = in_thread(lambda: _partitions(self.settings))
        super().prepare()

    def write(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        super().write(
            ColumnBatch(with_streams(batch.data, self.settings.routing_key, self._partitions))
        )


class _RoutedPublishingWriter(_RoutingWriter, PublishingWriter):
    """Publishes routed records as they come."""


class _RoutedStagingWriter(_RoutingWriter, StagedPublishingWriter):
    """Stages routed records in checkpoints."""


class RabbitSuperStreamSink(Sink):
    """The partitions of one super stream."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee, origin: Origin) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("rabbitmq", *settings.format.extras)
        self.place = f"{settings.target} of {settings.broker}"
        self._origin = origin

    def bind(self, schema: pa.Schema | None) -> None:
        texts = {"routing_key": self.settings.routing_key}
        check_message_columns(schema, texts, (), self.settings.format, "messages of RabbitMQ")

    def writer(self) -> SinkWriter:
        settings = self.settings
        publisher = SuperStreamPublisher(settings)
        writer: _RoutingWriter
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            writer = _RoutedStagingWriter(publisher, BOUNDS, settings.buffer_bytes, self._origin)
        else:
            writer = _RoutedPublishingWriter(publisher, BOUNDS)
        writer.settings = settings
        return writer

    def check_output(self, run: SinkRun) -> None:
        """Check that the super stream exists."""
        in_thread(lambda: _partitions(self.settings))

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        partitions = in_thread(lambda: _partitions(self.settings))
        return f"{counted(len(partitions), 'partition')} of {self.settings.target}"

    def describe(self) -> str:
        return f"rabbitmq({self.settings.target} by {self.settings.routing_key})"


async def _partitions(settings: SinkSettings) -> list[str]:
    return await partitions_of(settings.broker, settings.target, "headgate-sink")
