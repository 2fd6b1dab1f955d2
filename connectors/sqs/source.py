"""Reads a queue of Amazon SQS, and deletes messages when a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypedDict, Unpack, overload

import msgspec

from ...errors import UsageError
from ...operators.durations import Duration, parse_duration
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..acknowledged import QueueSplit
from ..arguments import check_count
from ..aws import AwsService
from ..bad_records import BadRecordPolicy, parse_policy
from ..formats.text import FormatName, to_format
from ..functions.loop_thread import in_thread
from ..messages import MessageColumns, MessageSource
from .model import METADATA, REJECTED_SCHEMA, SqsSettings, check_queue, look
from .reader import SqsReader

CONSUMERS: Final = 4
VISIBILITY: Final = "2m"
UNACKNOWLEDGED: Final = 10_000
_VISIBILITY_S_MAX: Final = 43_200


class SqsSource(MessageSource[Record_co]):
    """The messages of a queue, each read at least once."""

    rejected_schema = REJECTED_SCHEMA
    needs_checkpoints = True

    def __init__(self, settings: SqsSettings) -> None:
        super().__init__("sqs", settings.columns, METADATA)
        self.settings = settings

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split for each consumer."""
        in_thread(lambda: look(self.settings.service, self.settings.queue))
        numbers = range(self.settings.consumers)
        return [msgspec.msgpack.encode(QueueSplit(number)) for number in numbers]

    def check_connection(self, options: Mapping[str, str]) -> str:
        in_thread(lambda: look(self.settings.service, self.settings.queue))
        return "the queue is there"

    def reader(self) -> SourceReader:
        return SqsReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"sqs({self.settings.queue})"


class SqsOptions(TypedDict, total=False):
    """The keyword arguments of `sqs_source` beside the schema; it documents them."""

    region: str | None
    endpoint: str | None
    format: FormatName
    delimiter: str
    metadata: Mapping[str, str]
    consumers: int
    visibility: Duration
    max_unacknowledged: int
    on_bad_record: BadRecordPolicy


@overload
def sqs_source(
    queue: str, *, schema: type[Record], **options: Unpack[SqsOptions]
) -> SqsSource[Record]: ...
@overload
def sqs_source(
    queue: str, *, schema: ColumnsLike | None = ..., **options: Unpack[SqsOptions]
) -> SqsSource: ...
def sqs_source(
    queue: str,
    *,
    schema: SchemaLike | None = None,
    region: str | None = None,
    endpoint: str | None = None,
    format: FormatName = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    consumers: int = CONSUMERS,
    visibility: Duration = VISIBILITY,
    max_unacknowledged: int = UNACKNOWLEDGED,
    on_bad_record: BadRecordPolicy = "fail",
) -> SqsSource:
    """Return a source of the messages of a queue of Amazon SQS, each read at least once.

    It needs `pip install 'headgate[sqs]'`, and a job with checkpoints: a message is deleted when a
    checkpoint has it. Credentials are found as by `kinesis_source`.

    Args:
        queue: the name of the queue.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        region: the region of the queue. None: that of the environment.
        endpoint: the address of another service with the same requests, such as ElasticMQ. None: that of
            AWS.
        format: of the data: `json` (an object each), `csv` (one line) or `raw`.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `message_id`, `timestamp` (when it was sent),
            `receives` (about how often it was given to a consumer) or `group` (of a FIFO queue), such as
            {"message_id": "id"}.
        consumers: the number of splits, each of which makes one request after the other, for up to 10
            messages.
        visibility: for how long a message is hidden from others after the job has died; while the job has
            it, this time is made longer. From 1 s to 12 h.
        max_unacknowledged: the most messages that a subtask receives before some are deleted, which is at
            the end of a checkpoint.
        on_bad_record: the treatment of unreadable messages: `fail`, `drop` (counted), or `side_output`
            (`rejected`).

    Raises:
        UsageError: an argument is wrong. Whether the queue exists is found out when the job starts.
    """
    check_queue(queue)
    service = AwsService("sqs", region, endpoint)
    service.check()
    columns = MessageColumns.of(
        to_format(format, delimiter), schema, metadata, METADATA, "messages of SQS"
    )
    check_count("consumers", consumers, 1)
    check_count("max_unacknowledged", max_unacknowledged, 1)
    visibility_s = parse_duration(visibility, "visibility") // 1000
    check_count("visibility", visibility_s, 1)
    if visibility_s > _VISIBILITY_S_MAX:
        raise UsageError(f"SQS hides messages for 12 h at most visibility=`{visibility}`")
    settings = SqsSettings(
        queue,
        service,
        columns,
        consumers,
        visibility_s,
        max_unacknowledged,
        parse_policy(on_bad_record),
    )
    return SqsSource(settings)
