"""The contract of sinks, and the operator that drives one (features.md 3.9, SNK-03..07).

Exactly-once by two-phase commit: what a writer wrote up to a barrier is made durable but invisible
(*pre-commit*) in the asynchronous part of the snapshot; its *committables* are part of the checkpoint;
they are *committed* only with a permit, which exists only once the checkpoint is in the job log. After
a restore everything in the restored snapshot is committed first. So commits must be idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
import pyarrow as pa

from ..errors import check
from ..state.snapshot import CommitPermit, RestoredState, StateSnapshot
from .base import Operator, OperatorContext
from .elements import Batch


class Guarantee(Enum):
    """How often a record can appear outside after failures."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    NONE = "none"


class SinkWriter:
    """Writes the records of one subtask."""

    def open(self, context: OperatorContext) -> None:
        """Called first. `context.restored_checkpoint` and `.attempt` tell which leftovers are dead."""
        self.context = context

    def write(self, batch: Batch) -> None:
        """Write a batch; it may become visible at once, or when committed, as the guarantee says."""
        raise NotImplementedError

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        """At the barrier: close what is open and return the pre-commit, a function run in a thread.

        That function makes everything written since the last roll durable and returns its committables
        (opaque; enough to commit after a crash, by another process). If it raises, the checkpoint is
        declined, and the job fails since the data would be lost otherwise. None: nothing to commit.
        """
        return None

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        """Make pre-committed data visible. Idempotent; runs in a thread. Raising fails the job."""

    def finish(self) -> None:
        """End of data: no write follows (the last roll and commit still do)."""

    def close(self) -> None:
        """Release resources; also called after failures: drop what was never pre-committed."""


class Sink:
    """Description of a sink; picklable.

    Attributes:
        guarantees: what this sink can do.
        guarantee: what the job asks of it.
        input_schema: if not None, the columns that must be there.
    """

    guarantees: frozenset[Guarantee] = frozenset({Guarantee.AT_LEAST_ONCE, Guarantee.NONE})
    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    needs_columns: bool = False
    """True if the sink takes only column batches."""

    def bind(self, schema: pa.Schema | None) -> None:
        """Called at plan time with the schema of the stream; raise PlanError if it does not fit."""

    def writer(self) -> SinkWriter:
        """A new writer for one subtask."""
        raise NotImplementedError

    def describe(self) -> str:
        """A short text for `explain`, such as `parquet(out/)`."""
        return type(self).__name__


class _Pending(msgspec.Struct):
    """Committables of one checkpoint, as stored in a snapshot."""

    checkpoint_id: int
    committables: list[bytes]


_STATE = "committables"


class SinkOperator(Operator):
    """Runs a writer, keeps its committables until a permit arrives, and commits them in order."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: dict[int, list[bytes]] = {}

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._writer = self._sink.writer()
        self._writer.open(context)

    def restore(self, state: RestoredState) -> None:
        """Commit what the restored checkpoint had pre-committed; the permit is the checkpoint itself."""
        for item in state.items.get(_STATE, []):
            pending = msgspec.msgpack.decode(item, type=_Pending)
            self._pending.setdefault(pending.checkpoint_id, []).extend(pending.committables)
        if self._pending:
            restored = self.context.restored_checkpoint
            check(restored > 0, "restored committables without a checkpoint")
            permit = CommitPermit(self.context.job_name, 0, restored)
            self._writer.commit(self._take(restored), permit)

    def process(self, batch: Batch, input_index: int) -> None:
        self._writer.write(batch)

    def snapshot(self, checkpoint_id: int) -> StateSnapshot | None:
        precommit = self._writer.roll(checkpoint_id)
        older = {id_: list(held) for id_, held in self._pending.items()}

        def make_items() -> list[bytes]:
            pending = dict(older)
            if precommit is not None and (fresh := precommit()):
                # Assigned from the I/O thread: the mailbox reads it only once this checkpoint, whose
                # acknowledgement waits for us, is complete.
                self._pending[checkpoint_id] = fresh
                pending[checkpoint_id] = fresh
            return [
                msgspec.msgpack.encode(_Pending(id_, held)) for id_, held in sorted(pending.items())
            ]

        return StateSnapshot(items={_STATE: make_items})

    def on_checkpoint_complete(self, permit: CommitPermit) -> Any:
        """Commit everything up to the permit's checkpoint, in a thread; failures fail the job."""
        due = self._take(permit.checkpoint_id)
        if not due:
            return None
        return self.context.run_in_thread(lambda: self._writer.commit(due, permit))

    def _take(self, checkpoint_id: int) -> list[bytes]:
        """Remove and return the committables of all checkpoints up to `checkpoint_id`, in order."""
        due = sorted(id_ for id_ in self._pending if id_ <= checkpoint_id)
        return [committable for id_ in due for committable in self._pending.pop(id_)]

    def finish(self) -> None:
        self._writer.finish()

    def close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()
