"""Reads the shards of one subtask: coroutines in a thread fetch and decode, the mailbox takes pieces.

Each shard has an *iterator*, which the service makes for a position, and replaces with each answer. An
iterator that has expired is made again for the position.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import SourceError
from ..aws import PAUSE_S, Requests, answered_ms, code_of, reason_of
from ..fetched_splits import LoopedReader, Piece, no_stop_any_more
from .model import METADATA, REJECTED_SCHEMA, KinesisSettings, ShardSplit, decoded

_RECORD_BYTES: Final = 500
"""About what a record takes beside its data."""
_LIMIT: Final = 10_000
"""The most records that the service gives at once."""
_HOUR_MS: Final = 3_600_000
_KEEP_MS: Final = 60_000
"""How often the position of a shard without records is noted, so that it does not look too old."""
_SKEW_MS_MAX: Final = 300_000
"""The clock of the coordinator, which sets a start at the latest records, may be ahead by this time."""
_log = logging.getLogger("headgate.connectors.kinesis")


class KinesisReader(LoopedReader[ShardSplit]):
    """Reads some shards."""

    def __init__(self, settings: KinesisSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the data of records.
            schema: the columns to return.
        """
        reading = settings.reading
        super().__init__(
            reading.buffer_bytes,
            reading.on_bad_record,
            "what writes to the stream",
        )
        self._settings = settings
        self._decoder = reading.columns.decoder(values, schema, METADATA)
        self._added: list[ShardSplit] = []
        """Shards for the thread to begin; `_shared.changed` guards them."""
        self._behind_ms: dict[str, int] = {}
        """How far the positions of the thread are behind the end of each shard, as the service says."""
        self._limit = min(_LIMIT, max(reading.batch_rows, 64))
        self._retention_ms = 0
        self._too_late: set[str] = set()
        """The shards whose positions are older than the stream keeps records, of which the user is told."""

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [msgspec.structs.replace(decoded(split), parents=()) for split in splits]
        for split in added:
            if split.stop_ms is not None and self._settings.reading.stop is None:
                raise no_stop_any_more("shard", split.shard, "", "the time")
        with self._shared.changed:
            self._added += [msgspec.structs.replace(split) for split in added]
        self.begin(added, "kinesis")

    def cut(self, piece: Piece[ShardSplit], rows: int) -> ShardSplit:
        after, arrived_ms = piece.marks[rows - 1]
        return msgspec.structs.replace(piece.position, after=after, read_to_ms=arrived_ms)

    def first_bad(self, piece: Piece[ShardSplit]) -> tuple[str, str, bytes]:
        record, reason = piece.bad[0]
        at = piece.position
        where = f"{at.stream} {at.shard} sequence number {record['SequenceNumber']}"
        return where, reason, record["Data"]

    def rejected(self, piece: Piece[ShardSplit]) -> pa.RecordBatch:
        rows = [
            {
                "stream": piece.position.stream,
                "shard": piece.position.shard,
                "sequence_number": record["SequenceNumber"],
                "partition_key": record["PartitionKey"],
                "reason": reason,
                "data": record["Data"],
            }
            for record, reason in piece.bad
        ]
        return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)

    def lag_s(self) -> float | None:
        """Return how far the shard that is behind the most is behind its end."""
        behind_s = max(self._behind_ms.copy().values(), default=0) / 1000
        return max(behind_s, super().lag_s() or 0.0)

    # -- the thread ---------------------------------------------------------------------------------

    async def fetch_all(self) -> None:
        """Read all shards, those that are added later as well, until the reader is closed."""
        service = self._settings.service
        readings: set[asyncio.Task[None]] = set()
        async with service.client() as client:
            self._requests = Requests(service, self.context.clock, self.is_closed)
            self._retention_ms = await self._retention(client)
            try:
                while True:
                    change = self.change()
                    with self._shared.changed:
                        added, self._added = self._added, []
                    if self.is_closed():
                        return
                    readings |= {asyncio.create_task(self._read(client, at)) for at in added}
                    await asyncio.wait({*readings, change}, return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
                    for each in [each for each in readings if each.done()]:
                        readings.discard(each)
                        each.result()
            finally:
                for each in readings:
                    each.cancel()
                await asyncio.gather(*readings, return_exceptions=True)

    async def _retention(self, client: Any) -> int:
        """Return for how many ms the stream keeps records."""
        from botocore.exceptions import ClientError

        stream = self._settings.stream
        try:
            found = await self._requests.ask(client.describe_stream_summary, StreamName=stream)
        except ClientError as error:
            raise cannot_read(stream, error) from error
        return int(found["StreamDescriptionSummary"]["RetentionPeriodHours"]) * _HOUR_MS

    async def _read(self, client: Any, at: ShardSplit) -> None:
        """Read a shard until it ends."""
        from botocore.exceptions import ClientError

        iterator: str | None = None
        pause_s = self._settings.every_ms / 1000
        while not at.ended and await self.has_room(at.name):
            self._check_retention(at)
            try:
                if iterator is None:
                    iterator = await self._iterator(client, at)
                asked_ms = self.context.clock.now_ms()
                answer = await self._requests.ask(
                    client.get_records, ShardIterator=iterator, Limit=self._limit
                )
            except ClientError as error:
                if code_of(error) == "ExpiredIteratorException":
                    iterator = None
                    continue
                if code_of(error) == "ResourceNotFoundException" and self._lose(at, "the shard"):
                    self.put(self._end(at), lost=int(at.name not in self._too_late))
                    return
                raise cannot_read(f"{at.stream} {at.shard}", error) from error
            iterator = answer.get("NextShardIterator")
            self._take(at, answer, asked_ms, iterator is None)
            if iterator is not None and not at.ended:
                await asyncio.sleep(pause_s)
        if at.ended:
            self.put(self._end(at))

    def _end(self, at: ShardSplit) -> Piece[ShardSplit]:
        self._behind_ms.pop(at.name, None)
        return Piece(msgspec.structs.replace(at), ended=True)

    async def _iterator(self, client: Any, at: ShardSplit) -> str:
        """Return an iterator that begins at the position of a shard."""
        from botocore.exceptions import ClientError

        place: dict[str, Any] = {"ShardIteratorType": "TRIM_HORIZON"}
        if at.after:
            place = {
                "ShardIteratorType": "AFTER_SEQUENCE_NUMBER",
                "StartingSequenceNumber": at.after,
            }
        elif at.since_ms:
            place = {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": at.since_ms / 1000}
        while True:
            try:
                found = await self._requests.ask(
                    client.get_shard_iterator, StreamName=at.stream, ShardId=at.shard, **place
                )
                return str(found["ShardIterator"])
            except ClientError as error:
                age_ms = self.context.clock.now_ms() - at.since_ms
                if (
                    code_of(error) != "InvalidArgumentException"
                    or at.after
                    or age_ms > _SKEW_MS_MAX
                ):
                    raise
                # The time is still to come by the clock of the service.
                await asyncio.sleep(PAUSE_S)

    def _check_retention(self, at: ShardSplit) -> None:
        """Note that records may have been deleted before they were read, if the position is that old.

        It stays so for a while if the service gives old records, or none on its way to newer ones. That is
        one loss, and it is counted together with a position that is not too old any more.

        Raises:
            SourceError: some may have been deleted, and the user has not chosen to skip them.
        """
        oldest_ms = self.context.clock.now_ms() - self._retention_ms
        if not at.read_to_ms or at.read_to_ms >= oldest_ms:
            self._too_late.discard(at.name)
            return
        at.read_to_ms = oldest_ms
        if at.name not in self._too_late:
            self._lose(at, "records that arrived before")
            self._too_late.add(at.name)
            self.put(Piece(msgspec.structs.replace(at)), lost=1)

    def _lose(self, at: ShardSplit, what: str) -> bool:
        """Note that something may be gone; return True if the job goes on without."""
        hours = self._retention_ms // _HOUR_MS
        text = (
            f"{what} may have been deleted before the job has read them: the stream keeps {hours} h"
        )
        if self._settings.reading.on_lost == "fail":
            raise SourceError(
                f"a shard was not read in time stream=`{at.stream}` shard=`{at.shard}`: {text}",
                fix="let the stream keep records for longer; on_lost='skip' goes on with what is left",
            )
        _log.warning("the job goes on without records of `%s` `%s`: %s", at.stream, at.shard, text)
        return True

    def _take(self, at: ShardSplit, answer: dict[str, Any], asked_ms: int, closed: bool) -> None:
        """Hand the records of an answer to the mailbox.

        Args:
            at: the position, which moves.
            answer: of the service.
            asked_ms: when it was asked.
            closed: nothing follows in the shard.
        """
        records, behind_ms = answer["Records"], int(answer.get("MillisBehindLatest") or 0)
        kept = [each for each in records if at.stop_ms is None or _arrived(each) < at.stop_ms]
        passed = at.stop_ms is not None and answered_ms(answer, asked_ms) >= at.stop_ms
        at.ended = closed or len(kept) < len(records)
        at.ended = at.ended or (passed and not records and not behind_ms)
        self._behind_ms[at.name] = behind_ms
        sizes = [_RECORD_BYTES + len(each["Data"]) for each in kept]
        if sizes:
            fitting = self._settings.reading.buffer_bytes // 4 // max(sizes)
            self._limit = max(1, min(_LIMIT, fitting, self._limit * 4))
        rows = self._settings.reading.batch_rows
        for start in range(0, len(kept), rows):
            part = kept[start : start + rows]
            at.after, at.read_to_ms = part[-1]["SequenceNumber"], _arrived(part[-1])
            self.put(self._piece(at, part, sum(sizes[start : start + rows])))
        # What comes later is newer than the answer, and the clocks may differ a little.
        read_to_ms = asked_ms - behind_ms - _KEEP_MS
        if not kept and read_to_ms > at.read_to_ms + _KEEP_MS:
            at.read_to_ms = read_to_ms
            self.put(Piece(msgspec.structs.replace(at, ended=False)))

    def _piece(self, at: ShardSplit, records: list[Any], size_bytes: int) -> Piece[ShardSplit]:
        """Decode records of one shard."""
        found = self._decoder.decode(
            records,
            [each["Data"] for each in records],
            lambda record: f"{at.stream} {at.shard} {record['SequenceNumber']}",
            {
                "partition_key": itemgetter("PartitionKey"),
                "sequence_number": itemgetter("SequenceNumber"),
                "shard": lambda record: at.shard,
                "timestamp": itemgetter("ApproximateArrivalTimestamp"),
            },
        )
        return Piece(
            # The end of the shard comes with a piece of its own.
            msgspec.structs.replace(at, ended=False),
            found.batch,
            [(each["SequenceNumber"], _arrived(each)) for each in found.good],
            found.bad,
            size_bytes,
            _arrived(records[0]),
        )


def _arrived(record: Any) -> int:
    """Return when a record arrived, in ms since 1970."""
    return round(float(record["ApproximateArrivalTimestamp"].timestamp()) * 1000)


def cannot_read(what: str, error: BaseException) -> SourceError:
    """Return the error for a stream or a shard that the service refuses to give."""
    return SourceError(
        f"a stream cannot be read stream=`{what}`: {reason_of(error)}",
        fix="check that the stream is still there and was not deleted and created again, and the rights: "
        "DescribeStreamSummary, ListShards, GetShardIterator, GetRecords, and those of the key if it is "
        "encrypted",
    )
