"""Reads a stream of Kinesis; the position is the sequence number of the last record of each shard.

A stream is divided into shards. When it is *resharded*, a shard is closed, and others that came of it by
division or by merging take its place: its children. A live source reads them behind their parents, so that
the records of a partition key keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec

from ...errors import UsageError
from ...operators.clock import SystemClock
from ...operators.connections import counted
from ...operators.durations import Duration, parse_duration
from ...operators.schema import ColumnsLike, SchemaLike
from ...operators.source import Record, Record_co, SourceReader
from ..arguments import OnLost, check_count, check_positions
from ..aws import AwsService, answered_ms
from ..bad_records import BadRecordPolicy
from ..formats.format import Format
from ..formats.text import FormatName, to_format
from ..functions.loop_thread import in_thread
from ..messages import MessageColumns, MessageSource, Reading
from .model import (
    METADATA,
    REJECTED_SCHEMA,
    KinesisSettings,
    ShardSplit,
    Start,
    Stop,
    decoded,
)
from .reader import KinesisReader, cannot_read

BUFFER: Final = "32mb"
EVERY: Final = "250ms"
DISCOVER: Final = "10s"
_EVERY_MS_MIN: Final = 10


class KinesisSource(MessageSource[Record_co]):
    """The records of a stream, each read exactly once."""

    rejected_schema = REJECTED_SCHEMA
    discovers = True
    splits_end = True
    splits_have_parents = True

    def __init__(self, settings: KinesisSettings, discover_every_ms: int) -> None:
        super().__init__("kinesis", settings.reading.columns, METADATA)
        self.settings = settings
        self.bounded = settings.reading.stop is not None
        self.discover_every_ms = discover_every_ms

    def splits(self, parallelism: int) -> list[bytes]:
        """Return the shards that are there, without the children of others if those are discovered."""
        settings, now_ms = self.settings, SystemClock().now_ms()
        shards, asked_ms = _shards(settings)
        there = {each["ShardId"] for each in shards}
        latest = settings.reading.start == "latest"
        # What has arrived has done so before the end of the second in which the service answered.
        stop_ms = asked_ms + 1_000 if settings.reading.stop == "latest" else None
        if isinstance(settings.reading.stop, datetime):
            stop_ms = _ms(settings.reading.stop)
        found = []
        for shard in shards:
            parents = _parents(shard)
            closed = "EndingSequenceNumber" in shard["SequenceNumberRange"]
            if not (latest or self.bounded) and there.intersection(parents):
                continue
            split = ShardSplit(settings.stream, shard["ShardId"], stop_ms=stop_ms)
            if latest:
                split.ended, split.since_ms = closed, now_ms
            elif isinstance(settings.reading.start, datetime):
                split.since_ms = _ms(settings.reading.start)
            found.append(split)
        return [msgspec.msgpack.encode(split) for split in found]

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        settings = self.settings
        since_ms = (
            _ms(settings.reading.start) if isinstance(settings.reading.start, datetime) else 0
        )
        # Shards that were there before a start at the latest records are known, and never read from here.
        return [
            msgspec.msgpack.encode(
                ShardSplit(
                    settings.stream, shard["ShardId"], since_ms=since_ms, parents=_parents(shard)
                )
            )
            for shard in _shards(settings)[0]
        ]

    def split_key(self, split: bytes) -> str:
        return decoded(split).shard

    def split_share(self, key: str) -> int:
        """Return the number of the shard, so that those of a reshard go to different subtasks."""
        number = key.rpartition("-")[2]
        return int(number) if number.isdecimal() else super().split_share(key)

    def split_parents(self, split: bytes) -> Sequence[str]:
        return decoded(split).parents

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.reading.columns.format.check_connection()
        return counted(len(_shards(self.settings)[0]), "shard")

    def reader(self) -> SourceReader:
        return KinesisReader(self.settings, self.values, self.schema)

    def describe(self) -> str:
        return f"kinesis({self.settings.stream})"


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def _parents(shard: Mapping[str, Any]) -> tuple[str, ...]:
    found = (shard.get("ParentShardId"), shard.get("AdjacentParentShardId"))
    return tuple(each for each in found if each)


def _shards(settings: KinesisSettings) -> tuple[list[dict[str, Any]], int]:
    """Return all shards whose records have not expired, and the time of the service, in ms since 1970."""
    return in_thread(lambda: _list_shards(settings))


async def _list_shards(settings: KinesisSettings) -> tuple[list[dict[str, Any]], int]:
    from botocore.exceptions import BotoCoreError, ClientError

    found: list[dict[str, Any]] = []
    asked_ms = SystemClock().now_ms()
    async with settings.service.client() as client:
        page: dict[str, Any] = {"StreamName": settings.stream}
        try:
            while page:
                answer = await client.list_shards(**page)
                found += answer["Shards"]
                asked_ms = answered_ms(answer, asked_ms)
                page = {"NextToken": token} if (token := answer.get("NextToken")) else {}
        except ClientError as error:
            raise cannot_read(settings.stream, error) from error
        except (BotoCoreError, OSError) as error:
            raise settings.service.cannot_use(error) from error
    return found, asked_ms


class KinesisOptions(TypedDict, total=False):
    """The keyword arguments of `kinesis_source` beside the schema; it documents them."""

    region: str | None
    endpoint: str | None
    format: FormatName | Format
    delimiter: str
    metadata: Mapping[str, str]
    start: Start
    stop: Stop | None
    every: Duration
    discover_every: Duration
    on_bad_record: BadRecordPolicy
    on_lost: OnLost
    batch_rows: int
    buffer: str | int


@overload
def kinesis_source(
    stream: str, *, schema: type[Record], **options: Unpack[KinesisOptions]
) -> KinesisSource[Record]: ...
@overload
def kinesis_source(
    stream: str, *, schema: ColumnsLike | None = ..., **options: Unpack[KinesisOptions]
) -> KinesisSource: ...
def kinesis_source(
    stream: str,
    *,
    schema: SchemaLike | None = None,
    region: str | None = None,
    endpoint: str | None = None,
    format: FormatName | Format = "json",
    delimiter: str = ",",
    metadata: Mapping[str, str] | None = None,
    start: Start = "trim_horizon",
    stop: Stop | None = None,
    every: Duration = EVERY,
    discover_every: Duration = DISCOVER,
    on_bad_record: BadRecordPolicy = "fail",
    on_lost: OnLost = "fail",
    batch_rows: int = 8192,
    buffer: str | int = BUFFER,
) -> KinesisSource:
    """Return a source of the records in a stream of Amazon Kinesis.

    It needs `pip install 'headgate[kinesis]'`. The credentials are those that AWS clients find by
    themselves: in the environment, in a profile, or by a role.

    Args:
        stream: the name of the stream.
        schema: the columns of the data: a Struct class, a `pyarrow.Schema` or {name: type}. With
            `format="raw"` it is one column, by default `value` of type binary.
        region: the region of the stream. None: that of the environment.
        endpoint: the address of another service with the same requests. None: that of AWS.
        format: of the data: `json` (an object each), `csv` (one line), `raw`, or what `avro_format` and
            `protobuf_format` return.
        delimiter: of CSV.
        metadata: further columns, by what they hold: `partition_key`, `sequence_number`, `shard` or
            `timestamp` (when the record arrived), such as {"timestamp": "sent_at"}.
        start: where a run without state begins: `trim_horizon` (the oldest record that there is),
            `latest`, or a time (a datetime).
        stop: where reading ends, which makes the source bounded: `latest` (all that is there when the job
            starts), or a time: records that arrive at that time or later are not read. None: it never
            ends.
        every: the pause between two requests to a shard. A shard takes 5 requests a second, those of all
            its readers together.
        discover_every: how often it is asked which shards there are.
        on_bad_record: the treatment of unreadable records: `fail`, `drop` (counted), or `side_output`
            (`rejected`).
        on_lost: what happens if records may have been deleted before they were read: `fail`, or `skip` to
            those that are left, with a warning.
        batch_rows: most rows per batch.
        buffer: about the most bytes that wait to be processed, per subtask.

    Raises:
        UsageError: an argument is wrong. Whether the stream exists is found out when the job starts.
    """
    check_stream(stream)
    service = AwsService("kinesis", region, endpoint)
    service.check()
    columns = MessageColumns.of(
        to_format(format, delimiter), schema, metadata, METADATA, "records of Kinesis"
    )
    check_positions(start, stop, ("trim_horizon", "latest"), "or a datetime")
    every_ms = parse_duration(every, "every")
    check_count("every", every_ms, _EVERY_MS_MIN)
    discover_every_ms = parse_duration(discover_every, "discover_every")
    check_count("discover_every", discover_every_ms, 1)
    reading = Reading[Start, Stop].of(
        columns, start, stop, on_bad_record, on_lost, batch_rows, buffer
    )
    settings = KinesisSettings(stream, service, every_ms, reading)
    return KinesisSource(settings, discover_every_ms)


def check_stream(stream: str) -> None:
    """Check the name of a stream.

    Raises:
        UsageError: no stream can have it.
    """
    if not stream or len(stream) > 128 or not stream.translate(_OTHERS).isalnum():
        raise UsageError(
            f"not the name of a stream stream=`{stream}`",
            fix="a stream is given by its name, which has letters, digits, `_`, `-` and `.`",
        )


_OTHERS: Final = str.maketrans("", "", "_-.")
