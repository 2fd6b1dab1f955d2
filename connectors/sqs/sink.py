"""A queue of Amazon SQS as a sink, at least once.

A request has up to ten messages, and the service may take only some of them. Those that it did not take are
sent again, until all are stored. A message of a FIFO queue is sent when those of its group before it are
stored, since it would stay in front of one that has to be sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError, UsageError
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ..aws import AwsService, AwsWriter
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds
from ..functions.loop_thread import in_thread
from ..messages import check_message_columns
from ..publishing import RowEncoder, parts_within
from .model import REQUEST_MESSAGES, check_queue, look, url_of

_ROWS: Final = 500
"""The most records of a call."""
_REQUEST_BYTES: Final = 250_000
"""A request has fewer bytes, of the 256 KiB that the service takes."""
_BODY_BYTES: Final = 1 << 20
"""The most bytes of a message; a queue may have a lower limit."""
_WITHIN_MS: Final = 200
_IN_FLIGHT: Final = 8
"""The number of requests that are made at the same time."""
_GROUP: Final = "MessageGroupId"


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `sqs_sink`, which documents them."""

    queue: str
    service: AwsService
    format: Format
    group: str | None
    deduplication_id: str | None

    @property
    def apart(self) -> dict[str, str]:
        """The columns that are not a part of the data, by the fields of requests that have them."""
        columns = {_GROUP: self.group, "MessageDeduplicationId": self.deduplication_id}
        return {name: column for name, column in columns.items() if column is not None}


class SqsSink(Sink):
    """One queue."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("sqs", *settings.format.extras)
        self.place = f"{settings.queue} at {settings.service}"

    def bind(self, schema: pa.Schema | None) -> None:
        settings = self.settings
        named = {"group": settings.group, "deduplication_id": settings.deduplication_id}
        texts = {name: column for name, column in named.items() if column is not None}
        check_message_columns(
            schema, texts, settings.apart.values(), settings.format, "messages of SQS"
        )

    def writer(self) -> SinkWriter:
        return SqsWriter(self.settings)

    def check_output(self, run: SinkRun) -> None:
        """Check that the queue exists."""
        in_thread(lambda: look(self.settings.service, self.settings.queue))

    def check_connection(self, options: Mapping[str, str]) -> str:
        in_thread(lambda: look(self.settings.service, self.settings.queue))
        return "the queue is there"

    def describe(self) -> str:
        return f"sqs({self.settings.queue})"


class SqsWriter(AwsWriter[dict[str, str]]):
    """Sends the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__(settings.service, CallBounds(_ROWS, _WITHIN_MS, 1))
        self._settings = settings
        self._encoder = RowEncoder(settings.format, settings.queue, settings.apart.values())
        self._url = ""

    async def begin(self) -> None:
        await super().begin()
        self._url = await url_of(self._client, self._settings.queue, self._settings.service)

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        for turn in _turns(self._messages_of(batch.data)):
            sizes = [len(each["MessageBody"].encode()) for each in turn]
            requests = parts_within(turn, sizes, _REQUEST_BYTES, REQUEST_MESSAGES)
            for start in range(0, len(requests), _IN_FLIGHT):
                await asyncio.gather(*map(self.store, requests[start : start + _IN_FLIGHT]))

    def _messages_of(self, data: pa.RecordBatch) -> list[dict[str, str]]:
        """Return the records as requests have them."""
        settings = self._settings
        try:
            messages = [{"MessageBody": value.decode()} for value in self._encoder.encode(data)]
        except UnicodeDecodeError as error:
            raise DataError(
                f"a message is no text queue=`{settings.queue}`: {error}",
                fix="SQS takes texts; encode bytes before the sink, such as by base64",
            ) from error
        for name, column in settings.apart.items():
            for message, text in zip(messages, data.column(column).to_pylist(), strict=True):
                message[name] = text or ""
        for message in messages:
            size = len(message["MessageBody"].encode())
            if size > _BODY_BYTES:
                raise DataError(
                    f"a message is too large for SQS queue=`{settings.queue}` bytes=`{size}`",
                    fix=f"at most {_BODY_BYTES} bytes; divide such records before the sink",
                )
            if not all(message.values()):
                raise DataError(
                    f"a record has no text that SQS takes queue=`{settings.queue}`",
                    fix="the data, the group and the deduplication id must not be empty; correct such "
                    "records before the sink",
                )
        return messages

    async def send(self, messages: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
        entries = [{"Id": str(n), **each} for n, each in enumerate(messages)]
        answer = await self._client.send_message_batch(QueueUrl=self._url, Entries=entries)
        failed, reason = answer.get("Failed", ()), ""
        for each in failed:
            reason = f"{each.get('Code')}: {each.get('Message', '')}"
            if each.get("SenderFault"):
                raise self.refused(reason)
        return [messages[int(each["Id"])] for each in failed], reason

    def refused(self, reason: str) -> JobError:
        return JobError(
            f"messages cannot be sent queue=`{self._settings.queue}`: {reason}",
            fix="check that the queue is still there, the size of messages, the right sqs:SendMessage, and "
            "for a FIFO queue group= and deduplication_id=",
        )

    def unstored(self, reason: str) -> StorageError:
        settings = self._settings
        return StorageError(
            f"messages are not stored queue=`{settings.queue}` at=`{settings.service}`: {reason}",
            fix="check that the service can be reached",
        )


def _turns(messages: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Divide messages into turns, of which each is stored before the next one is sent.

    A turn has at most one message of a group. Messages without a group have no order, and are one turn.
    """
    turns: list[list[dict[str, str]]] = []
    before: Counter[str] = Counter()
    for message in messages:
        group = message.get(_GROUP)
        turn = 0 if group is None else before[group]
        if group is not None:
            before[group] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(message)
    return turns


def sqs_sink(
    queue: str,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    format: FormatName = "json",
    group: str | None = None,
    deduplication_id: str | None = None,
    guarantee: GuaranteeLike = "at_least_once",
) -> SqsSink:
    """Return a sink that sends to a queue of Amazon SQS, at least once.

    It needs `pip install 'headgate[sqs]'`. Credentials are found as by `kinesis_source`.

    Args:
        queue: the name of the queue.
        region: the region of the queue. None: that of the environment.
        endpoint: the address of another service with the same requests. None: that of AWS.
        format: of the data: `json` (an object of the other columns) or `raw` (the one other column).
        group: the column with the message group, a string, which a FIFO queue needs.
        deduplication_id: the column with the id by which a FIFO queue drops repeats within five minutes.
            None: the queue makes it of the data.
        guarantee: `at_least_once`, or `none`.

    Raises:
        UsageError: an argument is wrong. Whether the queue exists is found out when the job starts.
    """
    check_queue(queue)
    if queue.endswith(".fifo") != (group is not None):
        raise UsageError(
            f"FIFO queues have groups, and others have none queue=`{queue}` group=`{group}`",
            fix='sqs_sink("orders.fifo", group="customer", ...)',
        )
    if deduplication_id is not None and group is None:
        raise UsageError("deduplication_id= is for FIFO queues", fix="leave it out")
    service = AwsService("sqs", region, endpoint)
    service.check()
    made_format = to_output_format(format)
    settings = SinkSettings(queue, service, made_format, group, deduplication_id)
    return SqsSink(settings, parse_guarantee(guarantee))
