"""Receives messages of a queue, keeps them from others, and deletes them when a checkpoint has them.

A message that was received is hidden from other consumers for a time. The reader makes this time longer as
long as it has the message, so that it may be longer than the time between two checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from ...errors import SourceError
from ..acknowledged import AcknowledgingReader, QueueSplit
from ..aws import Requests, reason_of
from ..fetched_splits import LoopedReader, Piece
from .model import METADATA, REJECTED_SCHEMA, REQUEST_MESSAGES, SqsSettings, url_of

_WAIT_S: Final = 1
"""A request waits for messages for this time."""
_MESSAGE_BYTES: Final = 500
"""About what a message takes beside its data."""
_BUFFER_BYTES: Final = 64 << 20
_LOOK_S: Final = 10.0
"""The number of messages in the queue is asked for this often."""
_log = logging.getLogger("headgate.connectors.sqs")


class SqsReader(AcknowledgingReader[str], LoopedReader[QueueSplit]):
    """Has some consumers. The handles of messages are their ids."""

    def __init__(self, settings: SqsSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the data of messages.
            schema: the columns to return.
        """
        super().__init__(_BUFFER_BYTES, settings.on_bad_record, "what sends to the queue")
        self._settings = settings
        self._decoder = settings.columns.decoder(values, schema, METADATA)
        self._receipts: dict[str, str] = {}
        """The receipts of the messages that are not deleted, by id; only the newest one is of use."""
        self._bodies: dict[str, bytes] = {}
        """The data of bad messages, until they are handled."""
        self._pending: int | None = None

    # -- the mailbox --------------------------------------------------------------------------------

    def first_bad(self, piece: Piece[QueueSplit]) -> tuple[str, str, bytes]:
        handle, reason = piece.bad[0]
        return f"{self._settings.queue} message {handle}", reason, self._bodies[handle]

    def rejected(self, piece: Piece[QueueSplit]) -> pa.RecordBatch:
        rows = [
            {
                "queue": self._settings.queue,
                "message_id": handle,
                "reason": reason,
                "data": self._bodies[handle],
            }
            for handle, reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_records(self) -> dict[str, int] | None:
        """Return about how many messages wait in the queue; the first consumer tells it."""
        return None if self._pending is None else {QueueSplit(0).name: self._pending}

    # -- the thread ---------------------------------------------------------------------------------

    async def fetch_all(self) -> None:
        """Receive and delete messages until the reader is closed."""
        settings = self._settings
        self._requests = Requests(settings.service, self.context.clock, self.is_closed)
        async with settings.service.client() as client:
            self._client = client
            self._url = await url_of(client, settings.queue, settings.service)
            consumers = [QueueSplit(position.number) for position in self._positions.values()]
            work = [self._receive(each) for each in consumers]
            work.append(self._keep())
            if any(each.number == 0 for each in consumers):
                work.append(self._count())
            deleting = asyncio.create_task(self._delete())
            tasks = [deleting, *(asyncio.create_task(each) for each in work)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                await deleting
            except asyncio.CancelledError:
                if not self.is_closed():
                    raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, request: Any, **arguments: Any) -> Any:
        from botocore.exceptions import ClientError

        try:
            return await self._requests.ask(request, QueueUrl=self._url, **arguments)
        except ClientError as error:
            raise SourceError(
                f"a queue cannot be read queue=`{self._settings.queue}`: {reason_of(error)}",
                fix="check that the queue is still there, and the rights: sqs:ReceiveMessage, "
                "sqs:DeleteMessage, sqs:ChangeMessageVisibility, sqs:GetQueueAttributes",
            ) from error

    async def _receive(self, consumer: QueueSplit) -> None:
        """Receive messages for one consumer."""
        settings = self._settings
        while await self.has_room(consumer.name):
            if len(self._receipts) >= settings.unacknowledged_max:
                await self.change()  # messages were deleted, or the reader is closed
                continue
            answer = await self._ask(
                self._client.receive_message,
                MaxNumberOfMessages=REQUEST_MESSAGES,
                WaitTimeSeconds=_WAIT_S,
                VisibilityTimeout=settings.visibility_s,
                AttributeNames=["All"],
            )
            messages = []
            for message in answer.get("Messages", ()):
                # A message that comes again is there already, and deleted by its newest receipt.
                if message["MessageId"] not in self._receipts:
                    messages.append(message)
                self._receipts[message["MessageId"]] = message["ReceiptHandle"]
            if messages:
                self.put(self._piece(consumer, messages))

    async def _delete(self) -> None:
        """Delete messages when they are due, until the reader is closed."""
        while True:
            change, closed = self.change(), self.is_closed()
            # A checkpoint may have been completed just before the end.
            await self._delete_due()
            if closed:
                change.cancel()
                return
            await change

    async def _delete_due(self) -> None:
        due = self.due()
        for start in range(0, len(due), REQUEST_MESSAGES):
            part = due[start : start + REQUEST_MESSAGES]
            entries = [
                {"Id": str(n), "ReceiptHandle": self._receipts[each]} for n, each in enumerate(part)
            ]
            answer = await self._ask(self._client.delete_message_batch, Entries=entries)
            for failed in answer.get("Failed", ()):
                _log.warning(
                    "a message is not deleted and may come again queue=`%s` message=`%s`: %s",
                    self._settings.queue,
                    part[int(failed["Id"])],
                    failed.get("Message", failed.get("Code", "")),
                )
            for each in part:
                del self._receipts[each]
                self._bodies.pop(each, None)
        if due:
            self._note_change()

    async def _keep(self) -> None:
        """Keep the messages that the job has from other consumers."""
        visibility_s = self._settings.visibility_s
        while True:
            await asyncio.sleep(visibility_s / 3)
            held = list(self._receipts)
            for start in range(0, len(held), REQUEST_MESSAGES):
                entries = [
                    {
                        "Id": str(n),
                        "ReceiptHandle": self._receipts[each],
                        "VisibilityTimeout": visibility_s,
                    }
                    for n, each in enumerate(held[start : start + REQUEST_MESSAGES])
                    if each in self._receipts
                ]
                if entries:
                    # One that cannot be kept comes again, and is known then.
                    await self._ask(self._client.change_message_visibility_batch, Entries=entries)

    async def _count(self) -> None:
        """Ask for the number of messages now and then."""
        name = "ApproximateNumberOfMessages"
        while True:
            answer = await self._ask(self._client.get_queue_attributes, AttributeNames=[name])
            self._pending = int(answer["Attributes"][name])
            await asyncio.sleep(_LOOK_S)

    def _piece(self, consumer: QueueSplit, messages: Sequence[Any]) -> Piece[QueueSplit]:
        """Decode messages."""
        bodies = [message["Body"].encode() for message in messages]
        found = self._decoder.decode(
            messages,
            bodies,
            lambda message: f"{self._settings.queue} message {message['MessageId']}",
            _METADATA,
        )
        self._bodies.update({each["MessageId"]: each["Body"].encode() for each, _ in found.bad})
        sent_ms = [int(_attribute(each, "SentTimestamp") or -1) for each in found.good]
        return Piece(
            consumer,
            found.batch,
            [each["MessageId"] for each in found.good],
            [(each["MessageId"], reason) for each, reason in found.bad],
            sum(_MESSAGE_BYTES + len(body) for body in bodies),
            min(sent_ms, default=-1),
        )


def _attribute(message: Any, name: str) -> str | None:
    found: str | None = message.get("Attributes", {}).get(name)
    return found


def _time_of(message: Any) -> datetime | None:
    sent = _attribute(message, "SentTimestamp")
    return None if sent is None else datetime.fromtimestamp(int(sent) / 1000, UTC)


_METADATA: Final[Mapping[str, Callable[[Any], Any]]] = {
    "message_id": itemgetter("MessageId"),
    "timestamp": _time_of,
    "receives": lambda message: int(_attribute(message, "ApproximateReceiveCount") or 1),
    "group": lambda message: _attribute(message, "MessageGroupId"),
}
"""The parts of a message beside its data."""
