"""Producers of transactions, and the second phase of a commit, for both kinds of exactly-once output.

A committable is either a transaction that is open on the brokers, or an epoch whose records are staged in
the checkpoint. Writers of either kind commit both, because a job may change the kind between two runs.

A staged epoch is written when its checkpoint is complete: all records and a mark, in one transaction under
the transactional id of the writer that staged it. Whoever commits it first initialises a producer with this
id, which aborts what another process had begun there, and lets that one commit nothing any more. Then the
mark tells whether the epoch, or a later one of the same writer, was committed; only if not, it is written.
As no other writer ever has the id, and epochs are committed in their order, each is written exactly once.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa

from ...errors import CorruptError, HeadgateError, JobError, TargetAwayError
from ...operators.base import OperatorContext
from ...operators.sink import DISCARDED_COUNTER
from ...state.snapshot import CommitPermit
from .client import ErrorListener, fatal_errors, make_producer
from .rights import named_right
from .transactions import (
    LostTransaction,
    PreparedTransaction,
    TransactionClient,
    transaction_name,
)
from .writer import FLUSH_S, SERVE_MS, KafkaWriter, SinkSettings, fields_of

_log = logging.getLogger("headgate.connectors.kafka")
PREFIX: Final = "hg-"
"""All transactional ids, and the groups of their marks, begin with this."""
_ID: Final = re.compile(r"(\d+)-(\d+)-(\d+)-\d+-[0-9a-f]+")
"""The end of a transactional id: attempt, restored checkpoint, subtask, number, and a random part."""
READY_S: Final = 60.0
"""The first record of an epoch waits for a producer for at most this time."""
_ABORT_S: Final = 5.0
_MARK_KEPT_MS: Final = int(timedelta(days=6).total_seconds() * 1000)
"""Brokers keep a mark for at least this time, unless `offsets.retention.minutes` is below its default."""


class TransactionalProducer:
    """The producer of one transactional id. `initialise` and what follows run in threads."""

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
            self.producer.init_transactions(READY_S)
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
            missing = named_right(self.problem.args[0].code())
            if missing is not None:
                raise missing from self.problem

    def begin(self) -> None:
        """Begin a transaction; its records may follow. Waits until the producer is initialised.

        Raises:
            JobError: the brokers gave it no producer id.
        """
        if not self.ready.wait(READY_S) or self.problem is not None:
            raise JobError(
                f"no transaction can be begun topic=`{self._settings.topic}` "
                f"transaction=`{self.id}`: {self.problem or self.errors.last or 'no answer'}",
                fix="check that the brokers can be reached, the rights to WRITE and DESCRIBE the "
                "transactional id, and that transaction_timeout= is not above the brokers' "
                "transaction.max.timeout.ms",
            ) from self.problem
        self.producer.begin_transaction()


def check_transactions(settings: SinkSettings) -> None:
    """Try a transaction without records, and abort it: so every right is known before the first record.

    Raises:
        UsageError: a right is missing.
        JobError: the brokers refuse such transactions.
    """
    from kafka.errors import KafkaError

    producer = TransactionalProducer(settings, f"{PREFIX}check-{secrets.token_hex(6)}")
    producer.initialise()
    producer.raise_missing_right()
    producer.begin()
    client = TransactionClient(settings.bootstrap, settings.properties)
    try:
        client.mark(client.prepared(producer.id, settings.topic, 0, begun=False))
        client.abort(producer.id)
    except KafkaError as error:
        raise named_right(error.errno) or JobError(
            f"no transaction is possible topic=`{settings.topic}`: {error}",
            fix="see the section about security in docs/kafka.md for the rights that are needed",
        ) from error
    finally:
        client.close()


class StagedEpoch(msgspec.Struct, frozen=True):
    """A committable: the messages between two barriers. It is a map, and a `PreparedTransaction` an array.

    Attributes:
        id: the transactional id under which they are written, that of the writer that staged them.
        topic: the topic that they are for.
        checkpoint_id: the mark.
        staged_ms: when they were staged, in ms since 1970.
        pieces: streams of Arrow with a row per message.
    """

    id: str
    topic: str
    checkpoint_id: int
    staged_ms: int
    pieces: list[bytes]

    @property
    def name(self) -> bytes:
        """The name of all epochs of a writer."""
        return _staged_name(self.id)


def _staged_name(id: str) -> bytes:
    return f"{id}/staged".encode()


def _decoded(committable: bytes) -> StagedEpoch | PreparedTransaction:
    try:
        return msgspec.msgpack.decode(committable, type=PreparedTransaction)
    except msgspec.ValidationError:
        return msgspec.msgpack.decode(committable, type=StagedEpoch)


class _StagedCommitter:
    """Writes one staged epoch. It is used up by the first failure."""

    def __init__(
        self,
        settings: SinkSettings,
        client: TransactionClient,
        epoch: StagedEpoch,
        producer: TransactionalProducer,
        closed: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._client = client
        self._epoch = epoch
        self._producer = producer
        self._closed = closed

    def commit(self, now_ms: int) -> None:
        """Write the epoch, unless it is written.

        Raises:
            LostTransaction: it cannot be known any more whether it is written.
            TargetAwayError: no broker answers.
            JobError: another process has taken over, or the brokers refuse a record.
        """
        from confluent_kafka import KafkaException
        from kafka.errors import KafkaError

        epoch = self._epoch
        try:
            self._producer.ready.wait(READY_S)
            self._producer.raise_missing_right()
            if self._producer.problem is not None:
                raise self._producer.problem
            marked = self._client.marked(epoch.id, epoch.topic)
            if marked >= epoch.checkpoint_id:
                return
            if marked < 0 and now_ms - epoch.staged_ms > _MARK_KEPT_MS:
                raise LostTransaction(
                    "brokers forget after a week which checkpoints were committed, so it is not known "
                    f"whether these records are there topic=`{epoch.topic}` "
                    f"checkpoint=`{epoch.checkpoint_id}`",
                    fix="if they are there, as after a stop with a savepoint, say on_lost='skip'; else "
                    "restore an older checkpoint (--from DIR@ID)",
                )
            # Looked up before the first message: brokers take messages with an epoch that is not older
            # than this one only. Later, it might be the epoch of another process that writes the same.
            prepared = self._client.prepared(
                epoch.id, epoch.topic, epoch.checkpoint_id, begun=False
            )
            with fatal_errors():
                self._write(prepared)
        except KafkaException as error:
            raise self._as_ours(error) from error
        except KafkaError as error:
            if error.retriable:
                raise
            raise self._taken_over() from error
        try:
            self._client.commit(prepared)
        except LostTransaction as error:  # its records are not lost, as the checkpoint has them
            raise self._taken_over() from error

    def _taken_over(self) -> JobError:
        return JobError(
            "another process has taken over to write what a checkpoint has staged "
            f"topic=`{self._epoch.topic}` checkpoint=`{self._epoch.checkpoint_id}`",
            fix="a newer attempt of the job writes it; or two deployments have the same name",
        )

    def _write(self, prepared: PreparedTransaction) -> None:
        """Write the messages and the mark in a transaction."""
        epoch, client = self._epoch, self._client
        self._producer.begin()
        producer = self._producer.producer
        try:
            for piece in epoch.pieces:
                for batch in _batches_of(piece, epoch):
                    self._produce(batch)
            while producer.flush(FLUSH_S):
                self._check()
            self._check()
            client.mark(prepared)
        except BaseException:
            # A failure to abort is left to the next committer, or to the time-out of the transaction.
            with suppress(Exception):
                producer.purge()
                producer.abort_transaction(_ABORT_S)
            raise

    def _produce(self, batch: pa.RecordBatch) -> None:
        producer, topic = self._producer.producer, self._epoch.topic
        columns = {
            kind: fields_of(kind, batch.column(kind))
            for kind in batch.schema.names
            if kind != _VALUE
        }
        for row, value in enumerate(batch.column(_VALUE).to_pylist()):
            fields = {kind: found[row] for kind, found in columns.items() if found[row] is not None}
            while True:
                try:
                    producer.produce(topic, value=value, **fields)
                    break
                except BufferError:
                    producer.poll(0.1)
                    self._check()
        producer.poll(0)
        self._check()

    def _check(self) -> None:
        if self._closed():
            raise JobError("the sink was closed while it wrote what a checkpoint has staged")
        reason = self._producer.errors.undelivered or self._producer.errors.fatal
        if reason:
            raise JobError(
                f"records of a checkpoint were not delivered topic=`{self._settings.topic}` "
                f"bootstrap=`{self._settings.bootstrap}`: {reason}",
                fix="if a newer attempt of the job has taken over, it writes them; else check the size "
                "limits of the topic (max.message.bytes) and the right to WRITE. They are written when the "
                "job is run again",
            )

    def _as_ours(self, error: Any) -> HeadgateError:
        from confluent_kafka import KafkaError

        epoch, reason = self._epoch, error.args[0]
        text = (
            f"topic=`{epoch.topic}` checkpoint=`{epoch.checkpoint_id}` "
            f"bootstrap=`{self._settings.bootstrap}`: {self._producer.errors.fatal or reason.str()}"
        )
        away = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
        if not reason.fatal() and (reason.retriable() or reason.code() in away):
            return TargetAwayError(f"no broker takes what a checkpoint has staged {text}")
        return JobError(
            f"what a checkpoint has staged could not be written {text}",
            fix="if it was fenced, a newer attempt of the job has taken over; else check the rights "
            "to WRITE transactional ids, and to READ groups, that begin with `hg-`",
        )


_VALUE: Final = "value"


def _batches_of(piece: bytes, epoch: StagedEpoch) -> list[pa.RecordBatch]:
    """Decode a piece. Raises CorruptError if that is impossible."""
    try:
        with pa.ipc.open_stream(piece) as reader:
            return list(reader)
    except pa.ArrowInvalid as error:
        raise CorruptError(
            f"the output that checkpoint {epoch.checkpoint_id} has staged cannot be read: {error}"
        ) from error


class CommittingWriter(KafkaWriter):
    """Aborts what dead attempts have left, and commits; how it writes is up to the subclass."""

    def __init__(self, settings: SinkSettings, values: pa.Schema | None = None) -> None:
        super().__init__(settings, values)
        self._client: TransactionClient | None = None

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

    def _own_id(self, number: int) -> str:
        """Return a transactional id that no other writer has, also none of another attempt."""
        context = self.context
        numbers = (context.attempt, context.restored_checkpoint, context.subtask_index, number)
        return f"{self._prefix}{'-'.join(map(str, numbers))}-{self._random}"

    def name_of(self, committable: bytes) -> bytes:
        return _decoded(committable).name

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
                dead = open_now is not None and names.isdisjoint(
                    # A subtask that commits a staged epoch has a transaction open just now.
                    (transaction_name(id, *open_now), _staged_name(id))
                )
            else:
                dead = after >= context.restored_checkpoint
            if dead:
                client.abort(id)
                discarded.inc()

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        from kafka.errors import KafkaError

        assert self._client is not None
        for committable in committables:
            found = _decoded(committable)
            try:
                if isinstance(found, StagedEpoch):
                    producer = self.producer_for(found.id)
                    committer = _StagedCommitter(
                        self._settings, self._client, found, producer, lambda: self._closed
                    )
                    committer.commit(self.context.clock.now_ms())
                else:
                    self._client.commit(found)
                    self.committed(found)
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

    def producer_for(self, id: str) -> TransactionalProducer:
        """Return a new producer for a staged epoch, which is initialised or will be; in a thread."""
        made = TransactionalProducer(self._settings, id)
        made.initialise()
        return made

    def committed(self, transaction: PreparedTransaction) -> None:
        """Learn that a transaction is committed; in a thread."""

    def finish(self) -> Callable[[], None] | None:
        return None
