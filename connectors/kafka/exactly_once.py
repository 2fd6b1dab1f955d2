"""Writes to a topic exactly once, in transactions of Kafka that are open, or from epochs that are staged.

With *open* transactions, each epoch between two barriers is one of them.

At the barrier it is set aside. The subtask goes on, and holds the records behind the barrier until those in
front of it have arrived, so that those of a key stay in order. Then, in the asynchronous part of the
snapshot, the transaction gets a mark, and its identity becomes part of the checkpoint. With that any
process can commit it: this one once the checkpoint is complete, or the one that restores the checkpoint.
The mark is an offset of a consumer group that is written in the transaction itself: so a commit whose
answer was lost can be told from a transaction that was aborted. Readers see the records when they read
committed ones only.

Each transaction has a producer of its own, which gives its transactional id a new epoch. If a producer
began its next transaction in the same epoch, that one could be committed, unfinished, in place of the one
before.

A writer uses few transactional ids, in turn, because brokers keep each of them for a week: an id is free
when its transaction is committed. No other writer ever has its ids, also none of a later attempt. So an id
whose mark has reached a checkpoint proves that its transaction for this checkpoint was committed. Open
transactions that dead attempts have left are aborted at the start, except those that are named by the
restored checkpoint.

*Staged*, the records of an epoch become messages that are part of the checkpoint. They are written when it
is complete, in one short transaction: see `committing.py`. So no transaction is open between checkpoints.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import JobError
from ...operators.elements import Batch
from .client import ErrorListener, Reports
from .committing import CommittingWriter, StagedEpoch, TransactionalProducer
from .transactions import PreparedTransaction
from .writer import FULL_SHARE, Messages, SinkSettings, staged_column

_EPOCH_MAX: Final = 30_000
"""An id is given up near the last epoch that Kafka counts to, where it would get another producer id."""
_READY_MAX_S: Final = 3600.0
"""A producer that has waited for longer is replaced, as brokers forget ids without transactions."""
_PIECE_BYTES: Final = 4_000_000
"""Messages are compressed this many bytes at a time."""
_SIZE_PROPERTY: Final = "message.max.bytes"
_SIZE_MAX: Final = 1_000_000
"""The default of the property in librdkafka, and about that of topics."""
_MESSAGE_BYTES: Final = 100
"""More than a message has beside its key, value and headers."""


@dataclass(slots=True, eq=False)
class _Rolled:
    """An epoch behind its barrier.

    Attributes:
        transaction: its transaction, which has begun once no records are held.
        arrived: set once all its records are acknowledged, or have failed.
        held: its records, if none of them could be sent in front of the barrier, until they are sent.
        reports: those of the records that are held.
        lock: held while they are sent, by the subtask or by the thread that prepares the epoch.
    """

    transaction: TransactionalProducer
    arrived: threading.Event
    held: list[Messages] = field(default_factory=list)
    reports: Reports | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class TransactionalWriter(CommittingWriter):
    """Writes the records of one subtask in transactions."""

    def __init__(self, settings: SinkSettings, values: pa.Schema | None = None) -> None:
        super().__init__(settings, values)
        self._current: TransactionalProducer | None = None
        """The transaction that takes records."""
        self._next: TransactionalProducer | None = None
        """The one that follows, which is being initialised."""
        self._next_since_s = 0.0
        self._rolled: deque[_Rolled] = deque()
        """The epochs before, while their records are on their way."""
        self._held: list[Messages] = []
        """Records that wait for their transaction."""
        self._held_bytes = 0
        self._unprepared: dict[str, TransactionalProducer] = {}
        """Those that have begun, and that no checkpoint can have yet."""
        self._prepared: dict[str, int] = {}
        """The ids of own transactions that wait to be committed, and the checkpoints of these."""
        self._free: deque[str] = deque()
        """Own ids whose last transaction is committed."""
        self._number = 0

    def prepare(self) -> None:
        super().prepare()
        first = self._make_next()
        first.initialise()
        # Without the right to DESCRIBE, the list of open transactions is empty instead of an error. A
        # transaction of our own cannot be initialised then, so this attempt does not go on.
        first.raise_missing_right()

    def _make_next(self) -> TransactionalProducer:
        """Make the transaction that follows, and return it to be initialised."""
        self._next = self._new()
        self._next_since_s = self.context.clock.monotonic()
        return self._next

    def _new(self) -> TransactionalProducer:
        """Return a transaction with an id that no open one has, and no other writer ever uses."""
        if self._free:
            return TransactionalProducer(self._settings, self._free.popleft())
        self._number += 1
        return TransactionalProducer(self._settings, self._own_id(self._number))

    def backlogged(self) -> bool:
        """Return True also while the records that are held take half of the buffer."""
        late = sum(messages.nbytes for rolled in self._rolled for messages in rolled.held)
        full = self._held_bytes + late > self._settings.buffer_bytes * FULL_SHARE
        return full or super().backlogged()

    def _waits(self) -> bool:
        return bool(self._held) or super()._waits()

    def write(self, batch: Batch) -> None:
        if not len(batch):
            return
        messages = self._messages(batch)
        self._held.append(messages)
        self._held_bytes += messages.nbytes
        self._send_held()
        self._look_at_reports()
        self.look_again()

    def _look_at_reports(self) -> None:
        self._look_at_rolled()
        super()._look_at_reports()
        self._send_held()

    def _look_at_rolled(self) -> None:
        """Go on with the epochs before, one after the other."""
        while self._rolled:
            first = self._rolled[0]
            if first.held:
                if not first.transaction.ready.is_set() or first.lock.locked():
                    return
                self._send_late(first)
            first.transaction.producer.poll(0)
            if not first.arrived.is_set():
                return
            self._rolled.popleft()

    def _send_held(self) -> None:
        """Hand over the records that are held, unless they have to wait for their transaction."""
        if self._held and self._current is None and self._may_begin():
            current = self._next
            assert current is not None  # made by `prepare`, and by each `roll`
            current.begin()
            self._unprepared[current.id] = current
            self._current, self._next, self._producer = current, None, current.producer
            self._errors = current.errors
            self._reports = Reports(current.errors)
        if self._reports is not None:
            held, self._held, self._held_bytes = self._held, [], 0
            for messages in held:
                self._send(messages, self._producer, self._reports)

    def _may_begin(self) -> bool:
        """Return True once the next transaction is initialised, and the records before it have arrived.

        Each has a producer of its own, so that records could overtake those in front of the barrier.
        """
        waiting = self._next
        assert waiting is not None
        return not self._rolled and waiting.ready.is_set()

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        complete, transaction = self._complete(), self._current
        if complete is not None:
            assert transaction is not None
            rolled = _Rolled(transaction, complete)
        elif self._held:
            assert self._next is not None
            reports = Reports(self._next.errors)
            rolled = _Rolled(self._next, reports.complete, self._held, reports)
        else:
            self._renew_next()
            return None
        self._rolled.append(rolled)
        self._held, self._held_bytes = [], 0
        self._current, self._producer, self._errors = None, None, ErrorListener()
        self.context.run_in_thread(self._make_next().initialise)
        return partial(self._precommit, rolled, checkpoint_id)

    def _renew_next(self) -> None:
        """Replace the producer of the next transaction if it has failed, or waits for too long."""
        waiting = self._next
        assert waiting is not None
        waited_s = self.context.clock.monotonic() - self._next_since_s
        if waiting.ready.is_set() and (waiting.problem is not None or waited_s > _READY_MAX_S):
            self._free.append(waiting.id)
            self.context.run_in_thread(self._make_next().initialise)

    def _precommit(self, rolled: _Rolled, checkpoint_id: int) -> list[bytes]:
        """Make a transaction ready to be committed, by whatever process."""
        from kafka.errors import KafkaError

        assert self._client is not None
        transaction = rolled.transaction
        try:
            self._send_late(rolled)
            check = partial(self._check_of, transaction)
            self._settle(rolled.arrived, transaction.producer, check)
            prepared = self._client.prepared(transaction.id, self._settings.topic, checkpoint_id)
            self._client.mark(prepared)
        except JobError as error:
            self._fail(error.message)  # the transaction is gone, or its records are
            raise
        except KafkaError as error:
            if not error.retriable:
                # It cannot succeed later either, so the attempt must end.
                self._fail(f"{type(error).__name__}: {error}")
            raise JobError(
                f"a transaction could not be prepared topic=`{self._settings.topic}` "
                f"transaction=`{transaction.id}`: {type(error).__name__}: {error}",
                fix="if it was fenced, a newer attempt of the job has taken over; else check the rights "
                "to WRITE and DESCRIBE transactional ids, and to READ groups, that begin with `hg-`",
            ) from error
        self._prepared[transaction.id] = checkpoint_id
        self._unprepared.pop(transaction.id, None)
        return [msgspec.msgpack.encode(prepared)]

    def _send_late(self, rolled: _Rolled) -> None:
        """Send the records that were still held at their barrier, unless that is done.

        The subtask does so as soon as it can, or the thread that prepares the epoch if it comes first. The
        records of the epoch before have arrived: the subtask looks, and the thread has prepared it.
        """
        transaction = rolled.transaction
        with rolled.lock:
            if rolled.reports is None:
                return
            self._check_open()
            try:
                transaction.begin()
                self._unprepared[transaction.id] = transaction
                for messages in rolled.held:
                    self._send(messages, transaction.producer, rolled.reports)
            except Exception as error:
                # Some may be sent, so that this cannot be repeated.
                self._fail(f"{type(error).__name__}: {error}")
                raise
            rolled.held, rolled.reports = [], None

    def _check_of(self, transaction: TransactionalProducer) -> None:
        errors = transaction.errors
        self._failure = self._failure or errors.undelivered or errors.fatal
        self._check()

    def committed(self, transaction: PreparedTransaction) -> None:
        """Make the id free, if it is one of this writer. A commit may be repeated when it is used again."""
        if self._prepared.get(transaction.id) != transaction.checkpoint_id:
            return
        del self._prepared[transaction.id]
        if transaction.epoch < _EPOCH_MAX:
            self._free.append(transaction.id)

    def close(self) -> None:
        """Abort what no checkpoint has, in a thread, as the brokers may not answer."""
        self._closed = True
        left, client = list(self._unprepared.values()), self._client
        if client is None:
            return

        def end() -> None:
            # A failure here is left to the next attempt, or to the time-out of the transaction.
            for transaction in left:
                with suppress(Exception):
                    transaction.producer.purge()
                    client.abort(transaction.id)
            client.close()

        with suppress(RuntimeError):
            self.context.run_in_thread(end).add_done_callback(_look_at)


def _look_at(future: Any) -> None:
    """Look at the error, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


class StagedWriter(CommittingWriter):
    """Stages the messages of one subtask."""

    def __init__(self, settings: SinkSettings, values: pa.Schema | None = None) -> None:
        super().__init__(settings, values)
        self._batches: list[pa.RecordBatch] = []
        """Messages that are not encoded yet."""
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._piece_bytes = 0
        self._spare: TransactionalProducer | None = None
        """The producer of the next commit, as it takes up to half a second to initialise one."""
        self._spare_since_s = 0.0
        self._commits = False

    def write(self, batch: Batch) -> None:
        if not len(batch):
            return
        values, given = self._encoded(batch)
        columns = {"value": pa.array(values, pa.large_binary())}
        for kind, name in self._settings.metadata.items():
            columns[kind] = staged_column(kind, given.column(name))
        staged = pa.record_batch(columns)
        self._check_sizes(staged)
        self._batches.append(staged)
        self._bytes += staged.nbytes
        self._piece_bytes += staged.nbytes
        if self._piece_bytes >= _PIECE_BYTES:
            piece = _encoded_piece(self._batches)
            self._bytes += len(piece) - self._piece_bytes
            self._pieces.append(piece)
            self._batches, self._piece_bytes = [], 0
        if self._bytes > self._settings.staged_bytes:
            raise JobError(
                f"sink `{self.context.operator_name}` has more output between two checkpoints than its "
                f"buffer holds buffer_bytes=`{self._settings.staged_bytes}`",
                fix="take checkpoints more often, give kafka_sink a larger buffer=, or use more subtasks",
            )

    def _check_sizes(self, staged: pa.RecordBatch) -> None:
        """Raise if a message is too large, as it could not be written once a checkpoint has it."""
        sizes = pc.fill_null(pc.binary_length(staged.column("value")), 0)
        if "key" in staged.schema.names:
            sizes = pc.add(sizes, pc.fill_null(pc.binary_length(staged.column("key")), 0))
        if "headers" in staged.schema.names:
            headers = staged.column("headers").to_pylist()
            sizes = pc.add(sizes, pa.array(map(_headers_bytes, headers), pa.int64()))
        largest = pc.max(sizes).as_py() + _MESSAGE_BYTES
        limit = int(self._settings.properties.get(_SIZE_PROPERTY, _SIZE_MAX))
        if largest > limit:
            raise JobError(
                f"a record is too large topic=`{self._settings.topic}` size_bytes=`{largest}` "
                f"{_SIZE_PROPERTY}=`{limit}`",
                fix=f'properties={{"{_SIZE_PROPERTY}": "..."}}, and max.message.bytes of the topic',
            )

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        pieces, batches = self._pieces, self._batches
        self._pieces, self._batches, self._bytes, self._piece_bytes = [], [], 0, 0
        if not pieces and not batches:
            return None
        self._commits = True
        id, topic, now_ms = self._own_id(0), self._settings.topic, self.context.clock.now_ms()

        def committables() -> list[bytes]:
            rest = [_encoded_piece(batches)] if batches else []
            epoch = StagedEpoch(id, topic, checkpoint_id, now_ms, [*pieces, *rest])
            return [msgspec.msgpack.encode(epoch)]

        return committables

    def producer_for(self, id: str) -> TransactionalProducer:
        spare = self._spare
        if spare is None or spare.id != id:
            return super().producer_for(id)
        self._spare = None
        return spare

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        now_s = self.context.clock.monotonic()
        stale = self._spare is not None and now_s - self._spare_since_s > _READY_MAX_S
        if self._commits and (self._spare is None or stale):
            self._spare = TransactionalProducer(self._settings, self._own_id(0))
            self._spare_since_s = now_s
            self.context.run_in_thread(partial(self._initialise, self._spare))

    def _initialise(self, spare: TransactionalProducer) -> None:
        """Initialise a producer, unless the writer was closed before a thread came to it.

        The next attempt commits under the same id, and would be fenced in the middle of that.
        """
        if not self._closed:
            spare.initialise()

    def close(self) -> None:
        """Drop what is staged; a commit that runs ends by itself."""
        self._closed = True
        if self._client is not None:
            with suppress(RuntimeError):
                self.context.run_in_thread(self._client.close).add_done_callback(_look_at)


def _headers_bytes(headers: list[dict[str, Any]] | None) -> int:
    """Return about how many bytes headers take in a message, and not fewer."""
    return sum(
        len(each["name"].encode()) + len(each["value"] or b"") + 10 for each in headers or ()
    )


def _encoded_piece(batches: list[pa.RecordBatch]) -> bytes:
    table = pa.Table.from_batches(batches).combine_chunks()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())
