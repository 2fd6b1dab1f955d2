"""A stream of Kinesis as a sink, at least once.

A request has up to 500 records, and the service may take only some of them. Those that it did not take are
sent again, until all are stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import DataError, JobError, StorageError
from ...operators.elements import Batch, ColumnBatch
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
)
from ..aws import AwsService, AwsWriter, reason_of
from ..formats.format import Format
from ..formats.text import FormatName, to_output_format
from ..functions.calling import CallBounds
from ..functions.loop_thread import in_thread
from ..messages import check_message_columns
from ..publishing import RowEncoder, parts_within
from .source import check_stream

_ROWS: Final = 500
"""The most records of a request."""
_REQUEST_BYTES: Final = 4 << 20
"""A request has fewer bytes, of the 5 MiB that the service takes."""
_KEY_CHARACTERS: Final = 256
_WITHIN_MS: Final = 200
_RETRIED: Final = frozenset({"ProvisionedThroughputExceededException", "InternalFailure"})


@dataclass(frozen=True)
class SinkSettings:
    """The arguments of `kinesis_sink`, which documents them."""

    stream: str
    service: AwsService
    format: Format
    partition_key: str | None


class KinesisSink(Sink):
    """One stream."""

    guarantees = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    needs_columns = True

    def __init__(self, settings: SinkSettings, guarantee: Guarantee) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.extras = ("kinesis", *settings.format.extras)
        self.place = f"{settings.stream} at {settings.service}"

    def bind(self, schema: pa.Schema | None) -> None:
        key = self.settings.partition_key
        texts = {} if key is None else {"partition_key": key}
        check_message_columns(schema, texts, (), self.settings.format, "records of Kinesis")

    def writer(self) -> SinkWriter:
        return KinesisWriter(self.settings)

    def check_output(self, run: SinkRun) -> None:
        """Check that the stream exists."""
        in_thread(lambda: _describe(self.settings))

    def check_connection(self, options: Mapping[str, str]) -> str:
        self.settings.format.check_connection()
        in_thread(lambda: _describe(self.settings))
        return "the stream is there"

    def describe(self) -> str:
        return f"kinesis({self.settings.stream})"


async def _describe(settings: SinkSettings) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    async with settings.service.client() as client:
        try:
            await client.describe_stream_summary(StreamName=settings.stream)
        except ClientError as error:
            raise _refused(settings, reason_of(error)) from error
        except (BotoCoreError, OSError) as error:
            raise settings.service.cannot_use(error) from error


def _refused(settings: SinkSettings, reason: str) -> JobError:
    return JobError(
        f"records cannot be written stream=`{settings.stream}`: {reason}",
        fix="check that the stream exists in this region, the size of records, and the rights: "
        "DescribeStreamSummary, PutRecords, and those of the key if the stream is encrypted",
    )


class KinesisWriter(AwsWriter[dict[str, Any]]):
    """Writes the records of one subtask."""

    def __init__(self, settings: SinkSettings) -> None:
        # One request at a time keeps the order, as far as the service takes all records of it.
        super().__init__(settings.service, CallBounds(_ROWS, _WITHIN_MS, 1))
        self._settings = settings
        self._encoder = RowEncoder(settings.format, settings.stream)

    async def call(self, batch: Batch) -> None:
        assert isinstance(batch, ColumnBatch)  # `needs_columns`
        records = self._records_of(batch.data)
        sizes = [len(each["Data"]) + len(each["PartitionKey"].encode()) for each in records]
        for part in parts_within(records, sizes, _REQUEST_BYTES):
            await self.store(part)

    def _records_of(self, data: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return the records as requests have them."""
        settings = self._settings
        if settings.partition_key is None:
            keys = [secrets.token_hex(8) for _ in range(data.num_rows)]
        else:
            keys = data.column(settings.partition_key).to_pylist()
        for key in keys:
            if not key or len(key) > _KEY_CHARACTERS:
                raise DataError(
                    "a record has no partition key that Kinesis takes "
                    f"partition_key=`{settings.partition_key}`",
                    fix=f"it has 1 to {_KEY_CHARACTERS} characters; correct such records before the sink",
                )
        values = self._encoder.encode(data)
        return [
            {"Data": value, "PartitionKey": key} for value, key in zip(values, keys, strict=True)
        ]

    async def send(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        stream = self._settings.stream
        answer = await self._client.put_records(StreamName=stream, Records=messages)
        left, reason = [], ""
        for record, told in zip(messages, answer["Records"], strict=True):
            if code := told.get("ErrorCode"):
                reason = f"{code}: {told.get('ErrorMessage', '')}"
                if code not in _RETRIED:
                    raise self.refused(reason)
                left.append(record)
        return left, reason

    def refused(self, reason: str) -> JobError:
        return _refused(self._settings, reason)

    def unstored(self, reason: str) -> StorageError:
        settings = self._settings
        return StorageError(
            f"records are not stored stream=`{settings.stream}` at=`{settings.service}`: {reason}",
            fix="check that the service can be reached, and that the stream has enough shards",
        )


def kinesis_sink(
    stream: str,
    *,
    region: str | None = None,
    endpoint: str | None = None,
    format: FormatName | Format = "json",
    partition_key: str | None = None,
    guarantee: GuaranteeLike = "at_least_once",
) -> KinesisSink:
    """Return a sink that writes to a stream of Amazon Kinesis, at least once.

    It needs `pip install 'headgate[kinesis]'`. Credentials are found as by `kinesis_source`.

    Args:
        stream: the name of the stream.
        region: the region of the stream. None: that of the environment.
        endpoint: the address of another service with the same requests. None: that of AWS.
        format: of the data: `json` (an object of all columns), `raw` (the one column), or what
            `avro_format` and `protobuf_format` return.
        partition_key: the column with the key, a string, which decides the shard of a record. None: each
            record has a random key, which spreads them evenly.
        guarantee: `at_least_once`, or `none`.

    Raises:
        UsageError: an argument is wrong. Whether the stream exists is found out when the job starts.
    """
    check_stream(stream)
    service = AwsService("kinesis", region, endpoint)
    service.check()
    made_format = to_output_format(format)
    settings = SinkSettings(stream, service, made_format, partition_key)
    return KinesisSink(settings, parse_guarantee(guarantee))
