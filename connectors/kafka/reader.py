"""Reads the partitions of one subtask: a thread fetches and decodes, the mailbox takes finished pieces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import SourceError, StateError
from ...operators.base import OperatorContext
from ...operators.drops import DropKind
from ...operators.elements import Batch, ColumnBatch, Positions
from ...operators.source import SourceReader
from ..bad_records import BadRecordHandler
from ..formats.format import UndecodableError
from .client import ErrorListener, make_consumer, patiently
from .model import METADATA, REJECTED_SCHEMA, KafkaSettings, PartitionSplit, decoded

_BAD_BYTES: Final = 500
"""About what an unreadable message takes beside its value."""
_SMALL_ROWS: Final = 1_024
"""Pieces with fewer records cost more by themselves than their records do."""
_IDLE_S: Final = 0.1
"""The thread looks at least this often whether the reader was closed."""
_log = logging.getLogger("headgate.connectors.kafka")


@dataclass(slots=True)
class _Piece:
    """Consecutive records of one partition, decoded.

    Attributes:
        name: of the partition.
        batch: the good records; None if there are none.
        offsets: theirs.
        bad: the messages of the others, with the reasons.
        position: the offset behind the last record.
        size_bytes: of what it keeps in memory.
        ready_ms: the time of the first record, in ms since 1970; -1: it has none.
        ended: nothing of the partition follows.
    """

    name: str
    batch: pa.RecordBatch | None
    offsets: npt.NDArray[np.int64]
    bad: list[tuple[Any, str]]
    position: int
    size_bytes: int = 0
    ready_ms: int = -1
    ended: bool = False


@dataclass(slots=True)
class _Shared:
    """The state that the thread and the mailbox share; `changed` guards it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    pieces: deque[_Piece] = field(default_factory=deque)
    waiting_bytes: int = 0
    """The bytes of all pieces."""
    paused: frozenset[str] = frozenset()
    commands: list[Callable[[], None]] = field(default_factory=list)
    """Calls of the consumer for the thread to make: some of them block another thread for good."""
    lost: int = 0
    """Records that were deleted before they were read, and are not yet counted."""
    error: BaseException | None = None
    closed: bool = False


class KafkaReader(SourceReader):
    """Reads some partitions."""

    can_pause_splits = True

    def __init__(self, settings: KafkaSettings, values: pa.Schema, schema: pa.Schema) -> None:
        """Make a reader.

        Args:
            settings: of the source.
            values: the columns made of the values of records.
            schema: the columns to return.
        """
        self._settings = settings
        self._schema = schema
        self._decode = settings.format.decoder(values)
        self._partitions: dict[str, PartitionSplit] = {}
        """Those that have not ended, with the positions of the mailbox."""
        self._positions: dict[str, PartitionSplit] = {}
        """The positions of all partitions, for the consumer group."""
        self._topics: set[str] = set()
        self._cuts: dict[int, list[PartitionSplit]] = {}
        self._stops: dict[str, int] = {}
        self._ended: set[str] = set()
        """The partitions of which the thread has seen the last record."""
        self._ends: dict[str, int] = {}
        """The offsets behind the last records of partitions, where they are known."""
        self._shared = _Shared()
        self._errors = ErrorListener()
        self._consumer: Any = None
        self._thread: threading.Thread | None = None

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._bad = BadRecordHandler(
            self._settings.on_bad_record, context, reject, "what writes to the topic"
        )
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [decoded(split) for split in splits]
        for partition in added:
            self._partitions[partition.name] = partition
            self._positions[partition.name] = msgspec.structs.replace(partition)
            self._topics.add(partition.topic)
            if partition.stop is not None:
                if self._settings.stop is None:
                    raise _no_stop_any_more(partition)
                self._stops[partition.name] = partition.stop
            self.context.splits.opened(partition.name)
        if self._consumer is None:
            if self._partitions:
                self._start()
        elif added:  # they were discovered
            with self._shared.changed:
                self._shared.commands.append(partial(self._assign_more, _places(added)))
                self._shared.changed.notify_all()

    def _start(self) -> None:
        context = self.context
        client = f"headgate-{context.job_name}-{context.operator_name}"
        self._consumer = make_consumer(self._settings, client, self._errors)
        self._consumer.assign(_places(self._partitions.values()))
        self._thread = threading.Thread(
            target=self._run, name=f"kafka {context.operator_name}", daemon=True
        )
        self._thread.start()

    # -- the mailbox --------------------------------------------------------------------------------

    def poll(self) -> Batch | None:
        while True:
            self._arrived.clear()
            piece = self._next_piece()
            if piece is None:
                return None
            if piece.bad:
                self._handle_bad(piece.bad)
            partition = self._positions[piece.name]
            partition.offset = piece.position
            if piece.ended:
                del self._partitions[piece.name]
                self.context.splits.ended(piece.name)
            else:
                self._partitions[piece.name].offset = piece.position
            if piece.batch is not None and piece.batch.num_rows:
                self.context.splits.reading(piece.name)
                places = Positions(self.context.operator_name, piece.name, piece.offsets)
                return ColumnBatch(piece.batch, positions=places)

    def _next_piece(self) -> _Piece | None:
        """Take the first piece of a partition that is not paused, or only its first rows."""
        shared, wanted = self._shared, self.rows_wanted
        with shared.changed:
            self.context.drops.add(DropKind.DELETED, shared.lost)
            shared.lost = 0
            for place, piece in enumerate(shared.pieces):
                if piece.name in shared.paused:
                    continue
                if wanted and not piece.bad and len(piece.offsets) > wanted:
                    assert piece.batch is not None
                    shared.pieces[place] = rest = _Piece(
                        piece.name,
                        piece.batch.slice(wanted),
                        piece.offsets[wanted:],
                        [],
                        piece.position,
                        piece.size_bytes,
                        piece.ready_ms,
                        piece.ended,
                    )
                    return _Piece(
                        piece.name,
                        piece.batch.slice(0, wanted),
                        piece.offsets[:wanted],
                        [],
                        int(rest.offsets[0]),
                    )
                del shared.pieces[place]
                shared.waiting_bytes -= piece.size_bytes
                shared.changed.notify_all()
                return piece
            if shared.error is not None:
                raise shared.error
        return None

    async def wait(self) -> None:
        await self._arrived.wait()

    @property
    def finished(self) -> bool:
        return not self._partitions

    def pause_splits(self, splits: frozenset[str]) -> None:
        from confluent_kafka import TopicPartition

        shared = self._shared
        with shared.changed:
            before, shared.paused = shared.paused, splits
            for change, names in (("pause", splits - before), ("resume", before - splits)):
                places = [
                    TopicPartition(each.topic, each.partition)
                    for name, each in self._partitions.items()
                    if name in names
                ]
                if places:
                    shared.commands.append(partial(self._change, change, places))
            shared.changed.notify_all()
        self._arrived.set()

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(each) for each in self._partitions.values()]

    def begin_checkpoint(self, checkpoint_id: int) -> None:
        if self._settings.group is not None:
            self._cuts[checkpoint_id] = [
                msgspec.structs.replace(each) for each in self._positions.values()
            ]

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        """Write the offsets of the checkpoint to the group. They are information: failures are logged."""
        from confluent_kafka import TopicPartition

        cut = self._cuts.get(checkpoint_id, [])
        self._cuts = {id_: kept for id_, kept in self._cuts.items() if id_ > checkpoint_id}
        if not cut or self._consumer is None:
            return
        offsets = [TopicPartition(each.topic, each.partition, each.offset) for each in cut]
        with self._shared.changed:
            self._shared.commands.append(partial(self._commit, offsets))
            self._shared.changed.notify_all()

    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self._cuts.pop(checkpoint_id, None)

    def lag_records(self) -> dict[str, int] | None:
        """Return the records left by partition, as of the call before: the thread looks them up."""
        with self._shared.changed:
            if self._look_up_ends not in self._shared.commands and self._shared.error is None:
                self._shared.commands.append(self._look_up_ends)
            self._shared.changed.notify_all()
        ends, lag = self._ends, {}
        for name, each in list(self._partitions.items()):
            end = ends.get(name, -1)
            if end >= 0:
                lag[name] = max(
                    0, (end if each.stop is None else min(end, each.stop)) - each.offset
                )
        return lag

    def lag_s(self) -> float | None:
        with self._shared.changed:
            times = [piece.ready_ms for piece in self._shared.pieces if piece.ready_ms >= 0]
        return max(0.0, (self.context.clock.now_ms() - min(times)) / 1000) if times else 0.0

    def close(self) -> None:
        """Stop the thread, which closes the consumer: that may take longer than the subtask can wait."""
        with self._shared.changed:
            self._shared.closed = True
            self._shared.changed.notify_all()

    def _handle_bad(self, bad: list[tuple[Any, str]]) -> None:
        def first() -> tuple[str, str, bytes]:
            message, reason = bad[0]
            where = f"{message.topic()}/{message.partition()} offset {message.offset()}"
            return where, reason, message.value() or b""

        def rejected() -> pa.RecordBatch:
            rows = [
                (each.topic(), each.partition(), each.offset(), reason, each.key(), each.value())
                for each, reason in bad
            ]
            columns = [
                pa.array(values, column.type)
                for values, column in zip(zip(*rows, strict=True), REJECTED_SCHEMA, strict=True)
            ]
            return pa.RecordBatch.from_arrays(columns, schema=REJECTED_SCHEMA)

        self._bad.handle(len(bad), first, rejected)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        consumer, shared = self._consumer, self._shared
        try:
            while (commands := self._commands_or_room()) is not None:
                for command in commands:
                    command()
                if not commands:
                    self._fetch()
        except BaseException as error:
            with shared.changed:
                shared.error = error
            self._wake()
        finally:
            consumer.close()

    def _commands_or_room(self) -> list[Callable[[], None]] | None:
        """Wait for commands, and return them; return none if pieces fit, None if closed.

        While small pieces wait for the mailbox, no more are made. Records then gather in the client, which
        costs no time, as they would wait in any case, and come in larger pieces, which make less work.
        """
        shared = self._shared

        def goes_on() -> bool:
            if shared.closed or shared.commands:
                return True
            # Pieces of paused partitions must not hold up the others.
            waiting = [
                len(each.offsets) for each in shared.pieces if each.name not in shared.paused
            ]
            if not waiting:
                return True
            small = sum(waiting) < _SMALL_ROWS * len(waiting)
            return not small and shared.waiting_bytes < self._settings.buffer_bytes

        with shared.changed:
            shared.changed.wait_for(goes_on)
            commands, shared.commands = shared.commands, []
            return None if shared.closed and not commands else commands

    def _fetch(self) -> None:
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
        for name, each in list(self._partitions.items()):
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

    def _commit(self, offsets: list[Any]) -> None:
        from confluent_kafka import KafkaException

        try:
            # For the last ones, nothing would wait for the answer.
            self._consumer.commit(offsets=offsets, asynchronous=not self._shared.closed)
        except KafkaException as error:
            _log.warning(
                "offsets were not written to the group group=`%s`: %s", self._settings.group, error
            )

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
            name = f"{message.topic()}/{message.partition()}"
            if name not in self._ended and (end := self._take_error(name, message)) is not None:
                pieces.append(end)
        made = [self._piece(name, group) for name, group in groups.items()]
        # The last record of a partition and the event of its end may come together.
        ended = {piece.name for piece in made if piece.ended}
        made += [piece for piece in pieces if piece.name not in ended]
        shared = self._shared
        with shared.changed:
            for piece in made:
                shared.pieces.append(piece)
                shared.waiting_bytes += piece.size_bytes
        self._wake()

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

    def _piece(self, name: str, group: list[Any]) -> _Piece:
        """Decode messages of one partition."""
        value_of = type(group[0]).value
        position = group[-1].offset() + 1
        stop = self._stops.get(name)
        ended = stop is not None and position >= stop
        if stop is not None and ended:
            group = [message for message in group if message.offset() < stop]
            position = stop
            self._end(name)
        values = list(map(value_of, group))
        try:
            decoded = self._decode(values)
        except UndecodableError as error:
            place = f"{name} offset {group[error.index].offset()}"
            raise SourceError(error.message, where=place, fix=error.fix) from error
        bad = [(group[index], reason) for index, reason in decoded.bad]
        if bad:
            places = {index for index, _ in decoded.bad}
            group = [message for index, message in enumerate(group) if index not in places]
        batch = decoded.batch()
        return _Piece(
            name,
            None if batch is None else self._with_metadata(batch, group),
            _offsets_of(group),
            bad,
            position,
            _size_of(batch, bad),
            group[0].timestamp()[1] if group else -1,
            ended,
        )

    def _with_metadata(self, values: pa.RecordBatch, group: list[Any]) -> pa.RecordBatch:
        """Return the rows with the columns of `metadata`, and only those columns that are read."""
        schema = self._schema
        made = {column: kind for kind, column in self._settings.metadata.items()}
        columns = [
            pa.array(_METADATA[made[column.name]](group), METADATA[made[column.name]])
            if column.name in made
            else values.column(column.name)
            for column in schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _take_error(self, name: str, message: Any) -> _Piece | None:
        """Handle an event of a partition; return a piece if it is its end."""
        from confluent_kafka import KafkaError

        error = message.error()
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            # Behind its last record may lie marks of transactions, which are never returned.
            stop = self._stops.get(name)
            if stop is None or message.offset() < stop:
                return None
            self._end(name)
            return _Piece(name, None, np.empty(0, np.int64), [], stop, ended=True)
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
            waiting = [piece.position for piece in self._shared.pieces if piece.name == name]
            known = self._positions[name].offset
        return waiting[-1] if waiting else known

    def _wake(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop is closed, and there is no one left to wake
            self._loop.call_soon_threadsafe(self._arrived.set)


def _offsets_of(group: list[Any]) -> npt.NDArray[np.int64]:
    """Return the offsets of records of one partition, which are in order."""
    if not group:
        return np.empty(0, np.int64)
    first, last = group[0].offset(), group[-1].offset()
    if last - first == len(group) - 1:  # none is missing
        return np.arange(first, last + 1)
    return np.fromiter(map(type(group[0]).offset, group), np.int64, len(group))


def _places(partitions: Iterable[PartitionSplit]) -> list[Any]:
    """Return partitions with their positions, as the client takes them."""
    from confluent_kafka import TopicPartition

    return [TopicPartition(each.topic, each.partition, each.offset) for each in partitions]


_METADATA: Final[dict[str, Callable[[list[Any]], list[Any]]]] = {
    "topic": lambda group: [message.topic() for message in group],
    "partition": lambda group: [message.partition() for message in group],
    "offset": lambda group: [message.offset() for message in group],
    "timestamp": lambda group: [_time_of(message) for message in group],
    "key": lambda group: [message.key() for message in group],
    "headers": lambda group: [_headers_of(message) for message in group],
}
"""The values of a column of metadata."""


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


def _no_stop_any_more(partition: PartitionSplit) -> StateError:
    return StateError(
        f"partition {partition.name} is restored with an end, offset {partition.stop}, and the source has "
        "no stop= any more: partitions that have ended already would not be read on",
        fix="keep stop=; or give the source another name, with start= at the offsets to go on from",
    )
