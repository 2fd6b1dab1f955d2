"""Reads the partitions of one subtask: a thread fetches and decodes, the mailbox takes finished pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import SourceError
from ...operators.elements import Positions
from ..bad_records import OnBadRecord
from ..fetched_splits import CommandedReader, Piece, no_stop_any_more
from ..messages import MessageDecoder
from .client import ErrorListener, make_consumer, patiently
from .gathering import (
    AT_ONCE,
    BYTES_MAX,
    BadMessage,
    Gathered,
    Joined,
    PartitionRecords,
    name_of,
    place_of,
)
from .model import METADATA, REJECTED_SCHEMA, KafkaSettings, PartitionSplit, decoded

_BAD_BYTES: Final = 500
"""About what an unreadable message takes beside its value."""
_IDLE_S: Final = 0.1
"""The thread looks at least this often whether the reader was closed."""
_log = logging.getLogger("headgate.connectors.kafka")


class KafkaReader(CommandedReader[PartitionSplit]):
    """Reads some partitions."""

    def __init__(self, settings: KafkaSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the values of records.
            schema: the columns to return.
        """
        super().__init__(
            settings.buffer_bytes,
            settings.on_bad_record,
            "what writes to the topic",
            settings.group,
        )
        self._settings = settings
        self._decoder = MessageDecoder(
            settings.columns.format.decoder(values), schema, settings.columns.metadata, METADATA
        )
        read = settings.columns.metadata.items()
        self._metadata = [kind for kind, column in read if column in schema.names]
        """The parts beside the value of which columns are made."""
        self._kept = set(self._metadata)
        """The parts beside the value that are taken from messages."""
        if settings.on_bad_record is OnBadRecord.SIDE_OUTPUT:
            self._kept.add("key")
        self._topics: set[str] = set()
        self._ended: set[str] = set()
        """The partitions of which the thread has seen the last record."""
        self._ends: dict[str, int] = {}
        """The offsets behind the last records of partitions, where they are known."""
        self._errors = ErrorListener()
        self._consumer: Any = None

    # -- the mailbox --------------------------------------------------------------------------------

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for partition in added:
            if partition.stop is not None and self._settings.stop is None:
                end = f", offset {partition.stop}"
                raise no_stop_any_more("partition", partition.name, end, "the offsets")
            self._topics.add(partition.topic)
        if self._consumer is None and added:
            context = self.context
            client = f"headgate-{context.job_name}-{context.operator_name}"
            self._consumer = make_consumer(self._settings, client, self._errors)
            self._consumer.assign(_places(added))
            self.begin(added, "kafka")
        elif added:  # they were discovered
            self.begin(added, "kafka")
            self.command(partial(self._assign_more, _places(added)))

    def pause_splits(self, splits: frozenset[str]) -> None:
        from confluent_kafka import TopicPartition

        before = self._shared.paused
        super().pause_splits(splits)
        for change, names in (("pause", splits - before), ("resume", before - splits)):
            changed = [self._positions[name] for name in self._going_on if name in names]
            if changed:
                places = [TopicPartition(each.topic, each.partition) for each in changed]
                self.command(partial(self._change, change, places))

    def cut(self, piece: Piece[PartitionSplit], rows: int) -> PartitionSplit:
        return msgspec.structs.replace(piece.position, offset=int(piece.marks[rows]))

    def places(self, piece: Piece[PartitionSplit]) -> Positions:
        offsets: Any = piece.marks
        return Positions(self.context.operator_name, piece.position.name, offsets)

    def first_bad(self, piece: Piece[PartitionSplit]) -> tuple[str, str, bytes]:
        message, reason = piece.bad[0]
        return place_of(message), reason, message.value or b""

    def rejected(self, piece: Piece[PartitionSplit]) -> pa.RecordBatch:
        rows = [(*each[:3], reason, *each[3:]) for each, reason in piece.bad]
        columns = [
            pa.array(values, column.type)
            for values, column in zip(zip(*rows, strict=True), REJECTED_SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=REJECTED_SCHEMA)

    def lag_records(self) -> dict[str, int] | None:
        """Return the records left by partition, as of the call before: the thread looks them up."""
        self.command(self._look_up_ends, once=True)
        ends, lag = self._ends, {}
        for name in list(self._going_on):
            each, end = self._positions[name], ends.get(name, -1)
            if end >= 0:
                end = end if each.stop is None else min(end, each.stop)
                lag[name] = max(0, end - each.offset)
        return lag

    # -- the thread ---------------------------------------------------------------------------------

    def release(self) -> None:
        self._consumer.close()

    def has_room(self) -> bool:
        shared = self._shared
        waiting = any(each.position.name not in shared.paused for each in shared.pieces)
        return not self.should_gather() and not (waiting and self.is_full())

    def fetch(self) -> None:
        """Take what has come."""
        first = self._consumer.poll(_IDLE_S)
        if self._errors.fatal:
            raise SourceError(
                f"topics cannot be read bootstrap=`{self._settings.bootstrap}`: {self._errors.fatal}",
                fix="check that they are still there, the credentials, and the right to READ them",
            )
        if first is None:
            return
        most = self._settings.batch_rows
        gathered = Gathered(
            self._kept,
            one_topic=len(self._topics) == 1,
            lines=self._settings.columns.format.reads_lines,
        )
        asked = min(most, AT_ONCE)
        gathered.add([first, *self._consumer.consume(asked - 1, 0.0)])
        # An event, such as the end of a partition, is handled before anything behind it is taken.
        while gathered.rows == asked < most and gathered.size_bytes < BYTES_MAX:
            more = min(most - asked, AT_ONCE)
            asked += more
            gathered.add(self._consumer.consume(more, 0.0))
        self._take(gathered)

    def _look_up_ends(self) -> None:
        from confluent_kafka import TopicPartition

        ends = {}
        for name in list(self._going_on):
            each = self._positions[name]
            # Cached: as of the last answer to a fetch, so nothing is asked here.
            place = TopicPartition(each.topic, each.partition)
            ends[name] = self._consumer.get_watermark_offsets(place, cached=True)[1]
        self._ends = ends

    def _assign_more(self, places: list[Any]) -> None:
        """Read further partitions."""
        self._consumer.incremental_assign(places)

    def _change(self, change: str, places: list[Any]) -> None:
        """Pause or resume partitions, except those that have ended and stay paused."""
        going_on = [
            place for place in places if f"{place.topic}/{place.partition}" not in self._ended
        ]
        if going_on:
            getattr(self._consumer, change)(going_on)

    def write_group(self, positions: Sequence[PartitionSplit]) -> None:
        """Write offsets to the consumer group. They are information: failures are logged."""
        from confluent_kafka import KafkaException

        try:
            # For the last ones, nothing would wait for the answer.
            self._consumer.commit(offsets=_places(positions), asynchronous=not self._shared.closed)
        except KafkaException as error:
            _log.warning("offsets were not written to the group group=`%s`: %s", self._group, error)

    def _take(self, gathered: Gathered) -> None:
        """Make pieces of what the client had, and hand them to the mailbox."""
        groups = {
            name: records
            for name, records in gathered.partitions.items()
            if name not in self._ended
        }
        pieces = []
        for message in gathered.events:
            name = name_of(message)
            if name not in self._ended and (end := self._take_error(name, message)) is not None:
                pieces.append(end)
        made = self._made_of(groups) if groups else []
        # The last record of a partition and the event of its end may come together.
        ended = {piece.position.name for piece in made if piece.ended}
        self.put(*made, *(piece for piece in pieces if piece.position.name not in ended))

    def _made_of(self, groups: Mapping[str, PartitionRecords]) -> list[Piece[PartitionSplit]]:
        """Decode the records of partitions, all of them at once: a few cost nearly as much as many."""
        behind = {name: int(records.offsets[-1]) + 1 for name, records in groups.items()}
        for name, records in groups.items():
            stop = self._positions[name].stop
            if stop is not None and behind[name] > stop:
                records.cut(stop)
        joined = Joined(list(groups.values()))
        found = self._decoder.decode(
            range(len(joined.values)),
            joined.values,
            lambda index: place_of(joined.bad(index)),
            {kind: joined.metadata(kind) for kind in self._metadata},
        )
        bad: dict[str, list[tuple[int, str]]] = {name: [] for name in groups}
        for index, reason in found.bad:
            message = joined.bad(index)
            bad[f"{message.topic}/{message.partition}"].append((index, reason))
        pieces, row = [], 0
        for start, (name, records) in zip(joined.starts, groups.items(), strict=True):
            offsets = records.offsets
            if bad[name]:
                offsets = np.delete(offsets, [index - start for index, _ in bad[name]])
            batch = None if found.batch is None else found.batch.slice(row, len(offsets))
            row += len(offsets)
            at = self._positions[name]
            ended = at.stop is not None and behind[name] >= at.stop
            if ended:
                self._end(name)
            unreadable = [(joined.bad(index), reason) for index, reason in bad[name]]
            pieces.append(
                Piece(
                    msgspec.structs.replace(at, offset=at.stop if ended else behind[name]),
                    batch,
                    offsets,
                    unreadable,
                    _size_of(batch, unreadable),
                    records.first_ms if len(offsets) else -1,
                    ended,
                )
            )
        return pieces

    def _take_error(self, name: str, message: Any) -> Piece[PartitionSplit] | None:
        """Handle an event of a partition; return a piece if it is its end."""
        from confluent_kafka import KafkaError

        error = message.error()
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            # Behind its last record may lie marks of transactions, which are never returned.
            at = self._positions[name]
            if at.stop is None or message.offset() < at.stop:
                return None
            self._end(name)
            return Piece(msgspec.structs.replace(at, offset=at.stop), ended=True)
        if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._skip_lost(name, message)
            return None
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED and self._settings.group is None:
            return (
                None  # librdkafka looks for the coordinator of a group that nothing is written to
            )
        passing = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)
        if error.retriable() or code in passing:
            return None  # librdkafka goes on by itself
        raise SourceError(
            f"a partition cannot be read partition=`{name}`: {error.str()}",
            fix="check that the topic is still there, and the right to READ it",
        )

    def _end(self, name: str) -> None:
        """Note that a partition has ended, and stop fetching it."""
        from confluent_kafka import TopicPartition

        self._ended.add(name)
        topic, _, number = name.rpartition("/")
        self._consumer.pause([TopicPartition(topic, int(number))])

    def _skip_lost(self, name: str, message: Any) -> None:
        """Handle a position whose records are no longer there.

        Raises:
            SourceError: unless the user has chosen to skip them.
        """
        from confluent_kafka import TopicPartition

        topic, number = message.topic(), message.partition()
        place = TopicPartition(topic, number)
        low, high = patiently(lambda: self._consumer.get_watermark_offsets(place, timeout=15))
        position = max(self._fetched(name), message.offset())
        if position > high or (position < low and self._settings.on_lost == "fail"):
            what = (
                f"records {position} to {low - 1} were deleted before they were read"
                if position < low
                else f"its records end at {high}: was it deleted and created again?"
            )
            raise SourceError(
                f"a partition has no record at the position of the job partition=`{name}` "
                f"position=`{position}`: {what}",
                fix="keep records for longer (retention.ms); on_lost='skip' goes on with the first one "
                "that is left",
            )
        if position < low:
            _log.warning(
                "records were deleted before they were read partition=`%s` from=`%d` to=`%d`",
                *(name, position, low - 1),
            )
            with self._shared.changed:
                self._shared.lost += low - position
        # Seeking is refused after such an error, as librdkafka has stopped the partition.
        self._consumer.incremental_unassign([TopicPartition(topic, number)])
        self._consumer.incremental_assign([TopicPartition(topic, number, max(low, position))])

    def _fetched(self, name: str) -> int:
        """Return the offset of the next record that the thread has not seen."""
        with self._shared.changed:
            waiting = [each.position for each in self._shared.pieces if each.position.name == name]
            at = waiting[-1] if waiting else self._positions[name]
        return at.offset


def _places(partitions: Iterable[PartitionSplit]) -> list[Any]:
    """Return partitions with their positions, as the client takes them."""
    from confluent_kafka import TopicPartition

    return [TopicPartition(each.topic, each.partition, each.offset) for each in partitions]


def _size_of(batch: pa.RecordBatch | None, bad: list[tuple[BadMessage, str]]) -> int:
    """Return about how many bytes a piece keeps in memory."""
    good = 0 if batch is None else batch.nbytes + 8 * batch.num_rows
    return int(good + sum(_BAD_BYTES + len(each.value or b"") for each, _ in bad) + _BAD_BYTES)
