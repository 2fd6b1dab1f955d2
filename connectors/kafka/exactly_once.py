"""Writes to a topic exactly once: each epoch between two barriers is one transaction of Kafka.

At the barrier the open transaction is set aside. In the asynchronous part of the snapshot it gets a mark
and is flushed; then its identity, with which any process can commit it, becomes part of the checkpoint. It
is committed once the checkpoint is complete, or by the process that restores the checkpoint. The mark is an
offset of a consumer group that is written in the transaction itself: so a commit whose answer was lost can
be told from a transaction that was aborted. Readers see the records when they read committed ones only.

Each transaction has a producer of its own, which gives its transactional id a new epoch. If a producer
began its next transaction in the same epoch, that one could be committed, unfinished, in place of the one
before.

A writer uses few transactional ids, in turn, because brokers keep each of them for a week: an id is free
when its transaction is committed. No other writer ever has its ids, also none of a later attempt. So an id
whose mark has reached a checkpoint proves that its transaction for this checkpoint was committed. Open
transactions that dead attempts have left are aborted at the start, except those that are named by the
restored checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import JobError, TargetAwayError
from ...operators.base import OperatorContext
from ...operators.elements import Batch
from ...operators.sink import DISCARDED_COUNTER
from ...state.snapshot import CommitPermit
from .client import ErrorListener, make_producer
from .rights import named_right
from .transactions import (
    LostTransaction,
    PreparedTransaction,
    TransactionClient,
    transaction_name,
)
from .writer import FLUSH_S, SERVE_MS, KafkaWriter, SinkSettings

_log = logging.getLogger("headgate.connectors.kafka")
PREFIX: Final = "hg-"
"""All transactional ids, and the groups of their marks, begin with this."""
_ID: Final = re.compile(r"(\d+)-(\d+)-(\d+)-\d+-[0-9a-f]+")
"""The end of a transactional id: attempt, restored checkpoint, subtask, number, and a random part."""
_EPOCH_MAX: Final = 30_000
"""An id is given up near the last epoch that Kafka counts to, where it would get another producer id."""
_READY_MAX_S: Final = 3600.0
"""A producer that has waited for longer is replaced, as brokers forget ids without transactions."""
_READY_S: Final = 60.0
"""The first record of an epoch waits for a producer for at most this time."""


class _Transaction:
    """One transaction and its producer. `prepare` and what follows run in threads."""

    def __init__(self, settings: SinkSettings, id: str) -> None:
        self.id = id
        self.errors = ErrorListener()
        self.ready = threading.Event()
        self.problem: BaseException | None = None
        self.producer: Any = None
        self._settings = settings

    def initialise(self) -> None:
        """Get a producer id from the brokers, which takes some 50 ms."""
        settings = self._settings
        properties = {
            **settings.properties,
            "transactional.id": self.id,
            "transaction.timeout.ms": str(settings.transaction_timeout_ms),
        }
        try:
            self.producer = make_producer(
                settings.bootstrap, properties, self.id, settings.buffer_bytes, self.errors
            )
            self.producer.init_transactions(_READY_S)
        except BaseException as error:
            self.problem = error
        self.ready.set()

    def raise_missing_right(self) -> None:
        """Raise if it could not be initialised because of a missing right.

        Raises:
            UsageError: it names the right.
        """
        from confluent_kafka import KafkaException

        if isinstance(self.problem, KafkaException):
            missing = named_right(self.problem.args[0])
            if missing is not None:
                raise missing from self.problem

    def begin(self) -> None:
        """Begin; the first records may follow. Waits until the producer is initialised.

        Raises:
            JobError: the brokers gave it no producer id.
        """
        if not self.ready.wait(_READY_S) or self.problem is not None:
            raise JobError(
                f"no transaction can be begun topic=`{self._settings.topic}` "
                f"transaction=`{self.id}`: {self.problem or self.errors.last or 'no answer'}",
                fix="check that the brokers can be reached, the rights to WRITE and DESCRIBE the "
                "transactional id, and that transaction_timeout= is not above the brokers' "
                "transaction.max.timeout.ms",
            ) from self.problem
        self.producer.begin_transaction()

    def mark(self, checkpoint_id: int) -> None:
        """Write the offset that shows later whether the transaction was committed."""
        from confluent_kafka import Consumer, TopicPartition

        settings = self._settings
        # Only a consumer knows the group in the form that the call wants; without brokers it connects to
        # nothing, and needs no credentials.
        consumer = Consumer({"group.id": self.id})
        try:
            group = consumer.consumer_group_metadata()
        finally:
            consumer.close()
        offsets = [TopicPartition(settings.topic, 0, checkpoint_id)]
        self.producer.send_offsets_to_transaction(offsets, group, _READY_S)


def check_transactions(settings: SinkSettings) -> None:
    """Try a transaction without records, and abort it: so every right is known before the first record.

    Raises:
        UsageError: a right is missing.
        JobError: the brokers refuse such transactions.
    """
    from confluent_kafka import KafkaException

    transaction = _Transaction(settings, f"{PREFIX}check-{secrets.token_hex(6)}")
    transaction.initialise()
    transaction.raise_missing_right()
    transaction.begin()
    try:
        transaction.mark(0)
        transaction.producer.abort_transaction(_READY_S)
    except KafkaException as error:
        raise named_right(error.args[0]) or JobError(
            f"no transaction is possible topic=`{settings.topic}`: {error.args[0].str()}",
            fix="see the section about security in docs/kafka.md for the rights that are needed",
        ) from error


class TransactionalWriter(KafkaWriter):
    """Writes the records of one subtask in transactions."""

    def __init__(self, settings: SinkSettings, values: pa.Schema | None = None) -> None:
        super().__init__(settings, values)
        self._client: TransactionClient | None = None
        self._current: _Transaction | None = None
        """The transaction that takes records."""
        self._next: _Transaction | None = None
        """The one that follows, which is being initialised."""
        self._next_since_s = 0.0
        self._unprepared: dict[str, _Transaction] = {}
        """Those that have begun, and that no checkpoint can have yet."""
        self._prepared: dict[str, int] = {}
        """The ids of own transactions that wait to be committed, and the checkpoints of these."""
        self._free: deque[str] = deque()
        """Own ids whose last transaction is committed."""
        self._number = 0

    def open(self, context: OperatorContext) -> None:
        self.context = context
        names = f"{context.job_name}\0{context.operator_name}\0{self._settings.topic}".encode()
        self._prefix = f"{PREFIX}{hashlib.blake2s(names, digest_size=8).hexdigest()}-"
        self._random = secrets.token_hex(6)
        context.timers.call_later(SERVE_MS, self._serve)

    def prepare(self) -> None:
        super().prepare()
        settings, context = self._settings, self.context
        self._client = TransactionClient(settings.bootstrap, settings.properties)
        if not context.restored_checkpoint:
            self._abort_dead(None)
        first = self._make_next()
        first.initialise()
        # Without the right to DESCRIBE, the list of open transactions is empty instead of an error. A
        # transaction of our own cannot be initialised then, so this attempt does not go on.
        first.raise_missing_right()

    def name_of(self, committable: bytes) -> bytes:
        return msgspec.msgpack.decode(committable, type=PreparedTransaction).name

    def restored(self, names: frozenset[bytes] | None) -> None:
        self._abort_dead(names)

    def _abort_dead(self, names: frozenset[bytes] | None) -> None:
        """Abort the open transactions that dead attempts have begun and the restored checkpoint lacks.

        Those of other subtasks may be alive, as a region of a job restarts without the others; subtask 0
        takes those of subtasks that no longer exist.

        Args:
            names: of the transactions that the checkpoint has; None: it does not say. In such a checkpoint
                are only transactions that were begun before it, under ids that say so.
        """
        client, context = self._client, self.context
        assert client is not None
        discarded = context.metrics.counter(DISCARDED_COUNTER)
        for id in client.open_ids(self._prefix):
            found = _ID.fullmatch(id.removeprefix(self._prefix))
            if found is None:
                continue
            attempt, after, subtask = (int(part) for part in found.groups())
            orphaned = context.subtask_index == 0 and subtask >= context.parallelism
            if attempt >= context.attempt or not (subtask == context.subtask_index or orphaned):
                continue
            if names is not None:
                open_now = client.open_transaction(id)
                dead = open_now is not None and transaction_name(id, *open_now) not in names
            else:
                dead = after >= context.restored_checkpoint
            if dead:
                client.abort(id)
                discarded.inc()

    def _make_next(self) -> _Transaction:
        """Make the transaction that follows, and return it to be initialised."""
        self._next = self._new()
        self._next_since_s = self.context.clock.monotonic()
        return self._next

    def _new(self) -> _Transaction:
        """Return a transaction with an id that no open one has, and no other writer ever uses."""
        if self._free:
            return _Transaction(self._settings, self._free.popleft())
        self._number += 1
        context = self.context
        numbers = (context.attempt, context.restored_checkpoint, context.subtask_index)
        place = "-".join(map(str, (*numbers, self._number)))
        return _Transaction(self._settings, f"{self._prefix}{place}-{self._random}")

    def write(self, batch: Batch) -> None:
        if len(batch) and self._current is None:
            current = self._next
            assert current is not None  # made by `prepare`, and by each `roll`
            current.begin()
            self._unprepared[current.id] = current
            self._current, self._next, self._producer = current, None, current.producer
            self._errors = current.errors
        super().write(batch)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        current, self._current, self._producer = self._current, None, None
        self._errors = ErrorListener()
        if current is None:
            self._renew_next()
            return None
        self.context.run_in_thread(self._make_next().initialise)
        return lambda: self._precommit(current, checkpoint_id)

    def _renew_next(self) -> None:
        """Replace the producer of the next transaction if it has failed, or waits for too long."""
        waiting = self._next
        assert waiting is not None
        waited_s = self.context.clock.monotonic() - self._next_since_s
        if waiting.ready.is_set() and (waiting.problem is not None or waited_s > _READY_MAX_S):
            self._free.append(waiting.id)
            self.context.run_in_thread(self._make_next().initialise)

    def _precommit(self, transaction: _Transaction, checkpoint_id: int) -> list[bytes]:
        """Make a transaction ready to be committed, by whatever process."""
        from confluent_kafka import KafkaException

        assert self._client is not None
        try:
            transaction.mark(checkpoint_id)
            while transaction.producer.flush(FLUSH_S):
                self._check_open()
                self._check_of(transaction)
            self._check_of(transaction)
            prepared = self._client.prepared(transaction.id, self._settings.topic, checkpoint_id)
        except JobError as error:
            self._fail(error.message)  # the transaction is gone, or its records are
            raise
        except KafkaException as error:
            reason = error.args[0]
            if reason.fatal() or reason.txn_requires_abort() or transaction.errors.fatal:
                # It cannot succeed later either, so the attempt must end.
                self._failure = self._failure or str(reason.str())
            raise JobError(
                f"a transaction could not be prepared topic=`{self._settings.topic}` "
                f"transaction=`{transaction.id}`: {reason.str()}",
                fix="if it was fenced, a newer attempt of the job has taken over; else check the rights "
                "to WRITE and DESCRIBE transactional ids, and to READ groups, that begin with `hg-`",
            ) from error
        self._prepared[transaction.id] = checkpoint_id
        self._unprepared.pop(transaction.id, None)
        return [msgspec.msgpack.encode(prepared)]

    def _check_of(self, transaction: _Transaction) -> None:
        if transaction.errors.fatal:
            self._failure = self._failure or transaction.errors.fatal
        self._check()

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        from kafka.errors import KafkaError

        assert self._client is not None
        for committable in committables:
            prepared = msgspec.msgpack.decode(committable, type=PreparedTransaction)
            try:
                self._client.commit(prepared)
                self._use_again(prepared)
            except LostTransaction as error:
                if self._settings.on_lost == "fail":
                    raise
                _log.warning("the job goes on without records: %s", error.message)
            except KafkaError as error:
                if not error.retriable:
                    raise
                raise TargetAwayError(
                    f"no broker commits topic=`{self._settings.topic}` "
                    f"bootstrap=`{self._settings.bootstrap}`: {error}"
                ) from error

    def _use_again(self, committed: PreparedTransaction) -> None:
        """Make the id of a committed transaction free, if it is an id of this writer.

        A commit may be repeated when the id is in use again.
        """
        if self._prepared.get(committed.id) != committed.checkpoint_id:
            return
        del self._prepared[committed.id]
        if committed.epoch < _EPOCH_MAX:
            self._free.append(committed.id)

    def finish(self) -> Callable[[], None] | None:
        return None

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
