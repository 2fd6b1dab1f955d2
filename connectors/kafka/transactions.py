"""Requests about transactions that librdkafka has no call for: describe, commit and abort by any process.

A transaction stays open on the broker when its producer dies, until its time-out. Any client that knows its
transactional id, producer id and epoch can end it. So what a dead process had prepared for a checkpoint is
committed by the process that restores the checkpoint, which is the second phase of two-phase commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from ...errors import JobError
from ...operators.clock import SystemClock
from ...operators.sink import DROPPED_FIX
from .client import ErrorListener, no_answer
from .security import for_kafka_python

PATIENCE_S: Final = 60.0
"""Requests are tried again for this time while brokers restart or coordinators move."""
_PAUSE_S: Final = 0.05
_MARK_S: Final = 2.0
"""Brokers show the mark of a transaction within this time after they have committed it."""
_LOG: Final = "__transaction_state"
"""The topic in which brokers keep transactions. The leader of a partition coordinates those in it."""
_OPEN: Final = "Ongoing"
_COMMITTING: Final = "PrepareCommit"
T = TypeVar("T")


class PreparedTransaction(msgspec.Struct, frozen=True, array_like=True):
    """A transaction that is ready to be committed: the committable of a sink.

    Attributes:
        id: the transactional id. The writer that chose it uses it again, but not before the transaction is
            committed; no other writer ever uses it.
        producer_id: given by the broker, as is the epoch.
        topic: the topic that it writes to, under which its mark is kept.
        checkpoint_id: the mark: an offset that the group with the name of the transaction gets in this very
            transaction. So it has been reached exactly if the transaction was committed, as the
            transactions of one id follow each other in the order of checkpoints.
    """

    id: str
    producer_id: int
    epoch: int
    topic: str
    checkpoint_id: int

    @property
    def name(self) -> bytes:
        """The name of exactly this transaction; see `transaction_name`."""
        return transaction_name(self.id, self.producer_id, self.epoch)


def transaction_name(id: str, producer_id: int, epoch: int) -> bytes:
    """Return a text that no other transaction has, also none with the same transactional id."""
    return f"{id}/{producer_id}/{epoch}".encode()


class LostTransaction(JobError):
    """A transaction that a checkpoint needs was aborted, or the brokers have forgotten it."""


class TransactionClient:
    """Describes, commits and aborts transactions. All calls block; they are made in threads."""

    def __init__(self, bootstrap: str, properties: Mapping[str, str]) -> None:
        """Connect.

        Raises:
            SourceError: no broker answers, or it refuses us.
        """
        from kafka.admin import KafkaAdminClient
        from kafka.errors import KafkaError

        self._clock = SystemClock()
        try:
            self._admin = KafkaAdminClient(
                bootstrap_servers=[each.strip() for each in bootstrap.split(",")],
                client_id="headgate-transactions",
                bootstrap_timeout_ms=15_000,
                **for_kafka_python(properties),
            )
        except KafkaError as error:
            raise no_answer(bootstrap, ErrorListener(), error) from error

    def close(self) -> None:
        """Close the connections."""
        self._admin.close()

    def prepared(
        self, id: str, topic: str, checkpoint_id: int, *, begun: bool = True
    ) -> PreparedTransaction:
        """Return an open transaction as a committable. It needs its mark.

        Args:
            id: the transactional id.
            topic: the topic that it writes to.
            checkpoint_id: the mark.
            begun: False: it may have no records yet, so the brokers do not know yet that it is open.

        Raises:
            JobError: it is not open any more.
        """
        found = self._describe(id)
        if found is None or (begun and str(found.state.value) != _OPEN):
            raise JobError(
                "a transaction could not be prepared, as it was aborted, or its producer fenced "
                f"transaction=`{id}`",
                fix="a newer attempt of the job has taken over, or transaction_timeout= is too short",
            )
        return PreparedTransaction(
            id, found.producer_id, found.producer_epoch, topic, checkpoint_id
        )

    def mark(self, prepared: PreparedTransaction) -> None:
        """Write the mark of a transaction, in the transaction itself; a repeat changes nothing.

        The producer's own call for this can wait for ever for a broker that was killed.

        Raises:
            KafkaError: no broker answers, a right is missing, or the producer was fenced.
        """
        from kafka.errors import NoError, for_code
        from kafka.protocol.metadata import CoordinatorType
        from kafka.protocol.producer.transaction import (
            AddOffsetsToTxnRequest,
            TxnOffsetCommitRequest,
        )

        id = prepared.id
        producer = {
            "transactional_id": id,
            "producer_id": prepared.producer_id,
            "producer_epoch": prepared.epoch,
            "group_id": id,
        }
        topics = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
        places = [
            topics.TxnOffsetCommitRequestPartition(
                partition_index=0, committed_offset=prepared.checkpoint_id, committed_metadata=""
            )
        ]
        added = AddOffsetsToTxnRequest(**producer, min_version=3, max_version=3)
        offsets = TxnOffsetCommitRequest(
            **producer,
            topics=[topics(name=prepared.topic, partitions=places)],
            min_version=3,
            max_version=3,
        )

        def write() -> None:
            answer = self._send(id, offsets, CoordinatorType.GROUP)
            for topic in answer.topics:
                for place in topic.partitions:
                    if (error := for_code(place.error_code)) is not NoError:
                        raise error(f"coordinator of the group `{id}`")

        self._again(lambda: self._ask(id, added))
        self._again(write)

    def open_transaction(self, id: str) -> tuple[int, int] | None:
        """Return the producer id and the epoch of an id's open transaction; None: it has none."""
        found = self._describe(id)
        if found is None or str(found.state.value) != _OPEN:
            return None
        return found.producer_id, found.producer_epoch

    def commit(self, prepared: PreparedTransaction) -> None:
        """Commit a transaction, unless that has happened before; return when readers can see it.

        Raises:
            LostTransaction: it was aborted, or nobody knows it any more.
            KafkaError: no broker answers.
        """
        from kafka.errors import (
            InvalidProducerEpochError,
            InvalidProducerIdMappingError,
            InvalidTxnStateError,
            ProducerFencedError,
        )

        ended = (
            InvalidProducerEpochError,
            InvalidProducerIdMappingError,
            InvalidTxnStateError,
            ProducerFencedError,
        )
        try:
            self._again(lambda: self._end(prepared))
        except ended as error:
            if not self._was_committed(prepared):
                raise LostTransaction(
                    "a transaction of a completed checkpoint was aborted, so its records are lost "
                    f"topic=`{prepared.topic}` transaction=`{prepared.id}` "
                    f"checkpoint=`{prepared.checkpoint_id}`: {type(error).__name__}",
                    fix="if the job was down for longer than transaction_timeout=, restore an older "
                    "checkpoint (--from DIR@ID), which writes again what came after it, also what other "
                    "subtasks have committed; if this is an old "
                    "savepoint and brokers have forgotten its transactions (offsets.retention.minutes, 7 "
                    "days), or to go on without the records, say on_lost='skip'; "
                    f"{DROPPED_FIX}",
                ) from error
        deadline = self._clock.monotonic() + PATIENCE_S
        self._forget_coordinators()
        while (found := self._describe(prepared.id)) is not None:
            if found.producer_id != prepared.producer_id or str(found.state.value) != _COMMITTING:
                return
            if self._clock.monotonic() > deadline:
                return  # it is decided; the brokers will show it when they can
            time.sleep(_PAUSE_S)

    def abort(self, id: str) -> None:
        """Abort a transaction if it is open, and fence its producer."""
        from kafka.protocol.producer.transaction import InitProducerIdRequest

        self._again(
            lambda: self._ask(
                id,
                InitProducerIdRequest(
                    transactional_id=id,
                    transaction_timeout_ms=60_000,
                    producer_id=-1,
                    producer_epoch=-1,
                ),
            )
        )

    def open_ids(self, prefix: str) -> list[str]:
        """Return the ids of open transactions that begin with `prefix`.

        Raises:
            KafkaError: no broker answers, or some transactions have no coordinator for `PATIENCE_S`.
        """
        return [
            each.transactional_id
            for listed in self._again(self._list_open).values()
            for each in listed
            if each.transactional_id.startswith(prefix)
        ]

    def _list_open(self) -> dict[int, list[Any]]:
        """Return the open transactions by broker. Each broker lists those that it coordinates.

        Nobody lists those of a partition of the log that has no leader, as when its broker has died, and
        those of one that moves might be missed: this raises a retriable error then.
        """
        from kafka.errors import LeaderNotAvailableError

        leaders = self._leaders()
        brokers = None if leaders is None else sorted({each[1] for each in leaders})
        found: dict[int, list[Any]] = self._admin.list_transactions(brokers, state_filters=[_OPEN])
        if not found or self._leaders() != leaders:
            raise LeaderNotAvailableError("coordinators of transactions are just being chosen")
        return found

    def _leaders(self) -> list[tuple[int, int, int]] | None:
        """Return partition, leader and epoch of the log of transactions; None: we may not see it.

        Raises:
            KafkaError: a partition has no leader.
        """
        from kafka.errors import (
            LeaderNotAvailableError,
            UnknownTopicOrPartitionError,
            for_code,
        )

        (log,) = self._admin.describe_topics([_LOG])
        if log["error_code"]:
            error = for_code(log["error_code"])
            if error.retriable and error is not UnknownTopicOrPartitionError:
                raise error(f"topic `{_LOG}`")
            return None  # it is hidden, or is made by the first transaction
        names = ("partition_index", "leader_id", "leader_epoch")
        leaders = sorted(tuple(each[name] for name in names) for each in log["partitions"])
        if any(leader < 0 for _, leader, _ in leaders):
            raise LeaderNotAvailableError(f"topic `{_LOG}`")
        return leaders

    def may_read_group(self, group: str) -> bool:
        """Return whether the user may write offsets of a group.

        A heartbeat needs the same right, and is refused for another reason as there is no such member.
        """
        from kafka.errors import GroupAuthorizationFailedError, KafkaError
        from kafka.protocol.consumer.group import HeartbeatRequest
        from kafka.protocol.metadata import CoordinatorType

        beat = HeartbeatRequest(group_id=group, generation_id=1, member_id="headgate-check")
        try:
            self._again(lambda: self._ask(group, beat, CoordinatorType.GROUP))
        except GroupAuthorizationFailedError:
            return False
        except KafkaError:
            return True
        return True

    def _end(self, prepared: PreparedTransaction) -> None:
        from kafka.protocol.producer.transaction import EndTxnRequest

        self._ask(
            prepared.id,
            EndTxnRequest(
                transactional_id=prepared.id,
                producer_id=prepared.producer_id,
                producer_epoch=prepared.epoch,
                committed=True,
            ),
        )

    def marked(self, id: str, topic: str) -> int:
        """Return the newest mark of an id that has no open transaction; -1: there is none.

        Brokers may show a mark a moment after its transaction is committed; this waits for it.

        Raises:
            KafkaError: no broker answers, or it refuses us.
        """
        return self._again(lambda: self._mark(id, topic, stable=True))

    def _was_committed(self, prepared: PreparedTransaction) -> bool:
        """Return whether a transaction that is not open any more was committed.

        Its id may have an open one again, so only time tells whether brokers will still show a mark.
        """
        deadline = self._clock.monotonic() + _MARK_S
        while True:
            marked = self._again(lambda: self._mark(prepared.id, prepared.topic, stable=False))
            if marked >= prepared.checkpoint_id:
                return True
            if self._clock.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)

    def _mark(self, id: str, topic: str, *, stable: bool) -> int:
        """Return the newest mark of an id; -1: there is none.

        Args:
            id: the transactional id, which is the name of a group as well.
            topic: the topic whose partition 0 has the mark as its offset.
            stable: raise a retriable error while a mark is under way.
        """
        from kafka.errors import NoError, for_code
        from kafka.protocol.consumer import OffsetFetchRequest
        from kafka.protocol.metadata import CoordinatorType

        kind = OffsetFetchRequest.OffsetFetchRequestGroup
        topics = [kind.OffsetFetchRequestTopics(name=topic, partition_indexes=[0])]
        request = OffsetFetchRequest(
            groups=[kind(group_id=id, topics=topics)],
            require_stable=stable,
            min_version=8,
            max_version=8,
        )
        answer = self._send(id, request, CoordinatorType.GROUP)
        (group,) = answer.groups
        places = [place for each in group.topics for place in each.partitions]
        for code in (group.error_code, *(place.error_code for place in places)):
            if (error := for_code(code)) is not NoError:
                raise error(f"coordinator of the group `{id}`")
        return max((place.committed_offset for place in places), default=-1)

    def _describe(self, id: str) -> Any:
        """Return the description of a transaction; None if the brokers do not know it."""
        from kafka.errors import TransactionalIdNotFoundError

        try:
            return self._again(lambda: self._admin.describe_transactions([id]))[id]
        except TransactionalIdNotFoundError:
            return None

    def _ask(self, id: str, request: Any, kind: Any = None) -> Any:
        """Send a request to the coordinator of a transaction, or of another `kind` of thing.

        Raises:
            KafkaError: that of the answer.
        """
        from kafka.errors import NoError, for_code
        from kafka.protocol.metadata import CoordinatorType

        answer = self._send(id, request, CoordinatorType.TRANSACTION if kind is None else kind)
        error = for_code(answer.error_code)
        if error is not NoError:
            raise error(f"coordinator of `{id}`")
        return answer

    def _send(self, id: str, request: Any, kind: Any) -> Any:
        """Send a request to the coordinator of a transaction or a group, and return the answer."""
        # This client has no public call for such requests; the extra `kafka` allows versions that were
        # tried with it.
        admin: Any = self._admin

        async def ask() -> Any:
            node = await admin._find_coordinator_id(id, kind)
            return await admin._manager.send(request, node_id=node)

        return admin._manager.run(ask)

    def _forget_coordinators(self) -> None:
        """Make the client look coordinators up again: it keeps those of all transactions for good."""
        self._admin._manager.cluster._coordinators.clear()

    def _again(self, call: Callable[[], T]) -> T:
        """Call until it succeeds, or fails for another reason than that brokers are not ready."""
        from kafka.errors import KafkaError

        deadline = self._clock.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except KafkaError as error:
                if not error.retriable or self._clock.monotonic() > deadline:
                    raise
                self._forget_coordinators()
            time.sleep(_PAUSE_S)
