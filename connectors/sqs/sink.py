"""A queue of Amazon SQS as a sink, at least once.

A request has up to ten messages, and the service may take only some of them. Those that it did not take are
sent again, until all are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
from ...operators.suggestions import suggest
from ..aws import AWAY_S, PAUSE_S, AwsService, is_away, is_throttled, reason_of
from ..formats.format import Encode, Format
from ..formats.text import FormatName, to_format
from ..functions.calling import CallBounds, CallingWriter
from ..functions.loop_thread import in_thread
from ..messages import check_message_columns
from .model import REQUEST_MESSAGES, check_queue, look, url_of

FORMATS: Final[tuple[FormatName, ...]] = ("json", "raw")
_ROWS: Final = 500
"""The most records of a call."""
_REQUEST_BYTES: Final = 250_000
"""A request has fewer bytes, of the 256 KiB that the service takes."""
_BODY_BYTES: Final = 1 << 20
"""The most bytes of a message; a queue may have a lower limit."""
_WITHIN_MS: Final = 200
_IN_FLIGHT: Final = 8
"""The number of requests to a queue without an order that are made at the same time."""


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
        columns = {"MessageGroupId": self.group, "MessageDeduplicationId": self.deduplication_id}
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


class SqsWriter(CallingWriter):
    """Sends the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        super().__init__(CallBounds(_ROWS, _WITHIN_MS, 1))
        self._settings = settings
        self._encode: Encode | None = None
        self._schema: pa.Schema | None = None
        self._stack = contextlib.AsyncExitStack()
        self._client: Any = None
        self._url = ""

    async def begin(self) -> None:
        settings = self._settings
        self._client = await self._stack.enter_async_context(settings.service.client())
        self._url = await url_of(self._client, settings.queue, settings.service)

    async def release(self) -> None:
        await self._stack.aclose()

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        requests = _requests(self._messages_of(batch.data))
        # The order of a FIFO queue is that in which requests come.
        together = 1 if self._settings.group else _IN_FLIGHT
        for start in range(0, len(requests), together):
            part = requests[start : start + together]
            await asyncio.gather(*(self._send(messages) for messages in part))

    def _messages_of(self, data: pa.RecordBatch) -> list[dict[str, str]]:
        """Return the records as requests have them."""
        settings, apart = self._settings, self._settings.apart
        wanted = data.select([name for name in data.schema.names if name not in apart.values()])
        if self._encode is None or wanted.schema != self._schema:
            self._schema = wanted.schema
            self._encode = settings.format.encoder(wanted.schema, settings.queue)
        try:
            messages = [{"MessageBody": (value or b"").decode()} for value in self._encode(wanted)]
        except UnicodeDecodeError as error:
            raise DataError(
                f"a message is no text queue=`{settings.queue}`: {error}",
                fix="SQS takes texts; encode bytes before the sink, such as by base64",
            ) from error
        for name, column in apart.items():
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

    async def _send(self, messages: list[dict[str, str]]) -> None:
        """Send messages until all of them are stored.

        Raises:
            StorageError: none is stored any more for some time.
            JobError: the service does not take messages like these.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        settings, clock = self._settings, self.context.clock
        deadline_s = clock.monotonic() + AWAY_S
        while messages:
            reason = ""
            try:
                entries = [{"Id": str(n), **each} for n, each in enumerate(messages)]
                answer = await self._client.send_message_batch(QueueUrl=self._url, Entries=entries)
                failed = answer.get("Failed", ())
                for each in failed:
                    reason = f"{each.get('Code')}: {each.get('Message', '')}"
                    if each.get("SenderFault"):
                        raise _refused(settings, reason)
                if len(failed) < len(messages):
                    deadline_s = clock.monotonic() + AWAY_S
                messages = [messages[int(each["Id"])] for each in failed]
            except (BotoCoreError, ClientError, OSError, TimeoutError) as error:
                if not (is_away(error) or is_throttled(error)):
                    raise _refused(settings, reason_of(error)) from error
                reason = reason_of(error)
            if not messages:
                return
            if clock.monotonic() > deadline_s:
                raise StorageError(
                    f"messages are not stored queue=`{settings.queue}` at=`{settings.service}`: {reason}",
                    fix="check that the service can be reached",
                )
            self.context.logger.debug("messages are sent to SQS again: %s", reason)
            await asyncio.sleep(PAUSE_S)


def _refused(settings: SinkSettings, reason: str) -> JobError:
    return JobError(
        f"messages cannot be sent queue=`{settings.queue}`: {reason}",
        fix="check that the queue is still there, the size of messages, the right sqs:SendMessage, and for "
        "a FIFO queue group= and deduplication_id=",
    )


def _requests(messages: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Divide messages into requests of a size that the service takes."""
    requests: list[list[dict[str, str]]] = []
    size = _REQUEST_BYTES
    for message in messages:
        own = len(message["MessageBody"].encode())
        if size + own > _REQUEST_BYTES or len(requests[-1]) == REQUEST_MESSAGES:
            requests.append([])
            size = 0
        requests[-1].append(message)
        size += own
    return requests


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
    if format not in FORMATS:
        raise UsageError(
            f"no such format of messages format=`{format}`", fix=suggest(format, FORMATS, "formats")
        )
    settings = SinkSettings(queue, service, to_format(format), group, deduplication_id)
    return SqsSink(settings, parse_guarantee(guarantee))
