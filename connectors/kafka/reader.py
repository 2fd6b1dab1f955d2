"""Reads the partitions of one subtask: a thread fetches and decodes, the mailbox takes finished pieces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import SourceError
from ...operators.elements import Positions
from ..fetched_splits import CommandedReader, Piece, no_stop_any_more
from ..messages import MessageDecoder
from .client import ErrorListener, make_consumer, patiently
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
        return _place_of(message), reason, message.value() or b""

    def rejected(self, piece: Piece[PartitionSplit]) -> pa.RecordBatch:
        rows = [
            (each.topic(), each.partition(), each.offset(), reason, each.key(), each.value())
            for each, reason in piece.bad
        ]
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
        if first is not None:
            self._take([first, *self._consumer.consume(self._settings.batch_rows - 1, 0.0)])

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

    def _take(self, messages: list[Any]) -> None:
        """Make pieces of messages, and hand them to the mailbox."""
        kind = type(messages[0])
        events: list[Any] = []
        if any(map(kind.error, messages)):
            events = [message for message in messages if message.error() is not None]
            messages = [message for message in messages if message.error() is None]
        groups = {
            name: group for name, group in self._by_partition(messages) if name not in self._ended
        }
        pieces = []
        for message in events:
            name = _name_of(message)
            if name not in self._ended and (end := self._take_error(name, message)) is not None:
                pieces.append(end)
        made = self._made_of(groups)
        # The last record of a partition and the event of its end may come together.
        ended = {piece.position.name for piece in made if piece.ended}
        self.put(*made, *(piece for piece in pieces if piece.position.name not in ended))

    def _by_partition(self, messages: list[Any]) -> Iterable[tuple[str, list[Any]]]:
        """Return the records of each partition. Most often there is only one, so that is seen first."""
        if not messages:
            return ()
        kind = type(messages[0])
        partitions = list(map(kind.partition, messages))
        topic, first = messages[0].topic(), partitions[0]
        if len(self._topics) == 1 and partitions.count(first) == len(messages):
            return [(f"{topic}/{first}", messages)]
        topics = map(kind.topic, messages)
        groups: dict[str, list[Any]] = {}
        for (topic, partition), run in groupby(
            zip(topics, partitions, messages, strict=True), itemgetter(0, 1)
        ):
            groups.setdefault(f"{topic}/{partition}", []).extend(map(itemgetter(2), run))
        return groups.items()

    def _made_of(self, groups: Mapping[str, list[Any]]) -> list[Piece[PartitionSplit]]:
        """Decode the messages of partitions, all of them at once: a few cost nearly as much as many."""
        kept = {name: self._before_stop(name, group) for name, group in groups.items()}
        messages = [message for group in kept.values() for message in group]
        if not groups:
            return []
        kind = type(next(iter(groups.values()))[0])
        found = self._decoder.decode(
            messages, list(map(kind.value, messages)), _place_of, _metadata_of(kind)
        )
        bad: dict[str, list[tuple[Any, str]]] = {}
        for message, reason in found.bad:
            bad.setdefault(_name_of(message), []).append((message, reason))
        pieces, begin = [], 0
        for name, group in kept.items():
            behind = groups[name][-1].offset() + 1
            end = begin + len(group) - len(bad.get(name, ()))
            good = found.good[begin:end]
            batch = None if found.batch is None else found.batch.slice(begin, end - begin)
            begin = end
            at = self._positions[name]
            ended = at.stop is not None and behind >= at.stop
            if ended:
                self._end(name)
            pieces.append(
                Piece(
                    msgspec.structs.replace(at, offset=at.stop if ended else behind),
                    batch,
                    _offsets_of(good),
                    bad.get(name, []),
                    _size_of(batch, bad.get(name, [])),
                    good[0].timestamp()[1] if good else -1,
                    ended,
                )
            )
        return pieces

    def _before_stop(self, name: str, group: list[Any]) -> list[Any]:
        """Return the messages of a partition that lie before the offset at which it stops."""
        stop = self._positions[name].stop
        if stop is None or group[-1].offset() < stop:
            return group
        return [message for message in group if message.offset() < stop]

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


def _offsets_of(group: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return the offsets of records of one partition, which are in order."""
    if not group:
        return np.empty(0, np.int64)
    first, last = group[0].offset(), group[-1].offset()
    if last - first == len(group) - 1:  # none is missing
        return np.arange(first, last + 1)
    return np.fromiter(map(type(group[0]).offset, group), np.int64, len(group))


def _name_of(message: Any) -> str:
    """Return the name of the partition of a record."""
    return f"{message.topic()}/{message.partition()}"


def _place_of(message: Any) -> str:
    """Return where a record is, for errors."""
    return f"{_name_of(message)} offset {message.offset()}"


def _places(partitions: Iterable[PartitionSplit]) -> list[Any]:
    """Return partitions with their positions, as the client takes them."""
    from confluent_kafka import TopicPartition

    return [TopicPartition(each.topic, each.partition, each.offset) for each in partitions]


def _size_of(batch: pa.RecordBatch | None, bad: list[tuple[Any, str]]) -> int:
    """Return about how many bytes a piece keeps in memory."""
    good = 0 if batch is None else batch.nbytes + 8 * batch.num_rows
    return int(good + sum(_BAD_BYTES + len(each.value() or b"") for each, _ in bad) + _BAD_BYTES)


def _time_of(message: Any) -> int | None:
    kind, time_ms = message.timestamp()
    return int(time_ms) if kind else None


def _headers_of(message: Any) -> list[dict[str, Any]] | None:
    headers = message.headers()
    if headers is None:
        return None
    return [{"name": name, "value": value} for name, value in headers]


def _metadata_of(kind: type[Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Return the parts of a record beside its value; methods of the class cost least per record."""
    return {
        "topic": kind.topic,
        "partition": kind.partition,
        "offset": kind.offset,
        "timestamp": _time_of,
        "key": kind.key,
        "headers": _headers_of,
    }
