"""Writers whose records are sent in chunks, by a thread, and staged in the server if they are exactly once.

What a writer stages between two barriers has a name that is never used again, and that the checkpoint gets
when all of it is durable. What no checkpoint can have is deleted: by the writer when it is closed, or by
the next attempt.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

from ..errors import JobError
from ..operators.base import OperatorContext
from ..operators.sink import DISCARDED_COUNTER, SinkWriter

_LOOK_MS: Final = 500
_STAGED: Final = re.compile(r"(\d+)_(\d+)_(\d+)_\d+_[0-9a-f]+")
"""The place of staged records: attempt, checkpoint before, subtask, number of the epoch, a random part."""


@dataclass(slots=True)
class StagedEpoch:
    """The records between two barriers.

    Attributes:
        number: of the epoch, from 1.
        name: of what is staged.
        chunks: the number of chunks that were begun.
        records: in all chunks.
    """

    number: int
    name: str
    chunks: int = 0
    records: int = 0


@dataclass(slots=True)
class Chunk:
    """Records of one epoch that are sent together.

    Attributes:
        epoch: theirs.
        number: of the chunk in the epoch, from 0.
        size_bytes: of all records.
    """

    epoch: StagedEpoch
    number: int
    size_bytes: int = 0


C = TypeVar("C", bound=Chunk)


class StagingWriter(SinkWriter, Generic[C]):
    """Sends the chunks of one subtask."""

    def __init__(self, exactly_once: bool) -> None:
        self._exactly_once = exactly_once
        self._changed = threading.Condition()
        self._queue: deque[C] = deque()
        """Chunks to be sent, in order; `_changed` guards it and the four below."""
        self._waiting_bytes = 0
        self._failure = ""
        self._sending = False
        """A thread sends chunks that are full."""
        self._closed = False
        self._turn = threading.Lock()
        """Held while chunks are sent."""
        self._commit_turn = threading.Lock()
        self._number = 0
        self._epoch: StagedEpoch | None = None
        self._chunk: C | None = None
        self._unprepared: dict[str, StagedEpoch] = {}
        """Epochs with staged records that no checkpoint can have yet."""

    # -- what a subclass has ------------------------------------------------------------------------

    def staged_name(self, place: str) -> str:
        """Return the name of what is staged; `place` ends it, and is never used again."""
        raise NotImplementedError

    def send(self, chunk: C) -> None:
        """Send a chunk, which may have been sent before, if the connection broke; called in a thread."""
        raise NotImplementedError

    def committable(self, epoch: StagedEpoch) -> bytes:
        """Return what any process needs to commit an epoch that is staged."""
        raise NotImplementedError

    def drop_staged(self, name: str) -> None:
        """Delete staged records."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Close the connections."""
        raise NotImplementedError

    def persistently(self, work: Callable[[], Any]) -> Any:
        """Do something with the server, and again if it is away for a moment."""
        raise NotImplementedError

    def about(self) -> AbstractContextManager[Any]:
        """Turn errors of the server in the block into a JobError."""
        raise NotImplementedError

    def is_lost(self, error: BaseException) -> bool:
        """Return True if the connection broke or the server is away, so that trying again may help."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """The place that records are for, as in errors."""
        raise NotImplementedError

    # -- the mailbox --------------------------------------------------------------------------------

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._after = context.restored_checkpoint
        self._nonce = secrets.token_hex(6)
        context.timers.call_later(_LOOK_MS, self._look)

    def _look(self) -> None:
        """Fail the attempt if records cannot be sent, also while none comes."""
        if not self._closed:
            self.check()
            self.context.timers.call_later(_LOOK_MS, self._look)

    def check(self) -> None:
        """Raise JobError if records could not be sent."""
        with self._changed:
            if self._failure:
                raise JobError(self._failure)

    def open_epoch(self) -> StagedEpoch:
        """Return the epoch of the next record."""
        if self._epoch is None:
            self._number += 1
            context = self.context
            place = f"{context.attempt}_{self._after}_{context.subtask_index}_{self._number}"
            name = self.staged_name(f"{place}_{self._nonce}")
            self._epoch = StagedEpoch(self._number, name)
        return self._epoch

    def close_chunk(self) -> None:
        """Let the chunk be sent that was begun, if there is one."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            with self._changed:
                self._queue.append(chunk)
                self._waiting_bytes += chunk.size_bytes

    def send_in_background(self) -> None:
        """Send the full chunks in a thread, unless one does."""
        with self._changed:
            if self._sending:
                return
            self._sending = True
        number = self._number

        def send() -> None:
            try:
                self._send_until(number)
            except Exception as error:
                self._fail(error)
            finally:
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()

        self.context.run_in_thread(send)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or str(error)

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        self._after = checkpoint_id
        self.close_chunk()
        epoch, self._epoch = self._epoch, None
        return None if epoch is None else partial(self._precommit, epoch)

    def _precommit(self, epoch: StagedEpoch) -> list[bytes]:
        """Make the records of an epoch durable, while later ones are written."""
        try:
            self._send_until(epoch.number)
        except JobError as error:
            if error.__cause__ is None or not self.is_lost(error.__cause__):
                # It cannot succeed later either, so the attempt must end.
                self._fail(error)
            raise
        if not self._exactly_once:
            return []
        with self._turn:
            if self._closed:
                raise self._was_closed()  # `close` deletes what is staged
            self._unprepared.pop(epoch.name, None)
        return [self.committable(epoch)]

    def finish(self) -> Callable[[], None] | None:
        if self._exactly_once:
            return None
        self.close_chunk()
        return partial(self._send_until, self._number)

    def close(self) -> None:
        """Delete staged records that no checkpoint has, in a thread, as the server may not answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

        def end() -> None:
            with self._turn, self._commit_turn, suppress(Exception):
                try:
                    # What fails here is done by the next attempt.
                    for name in list(self._unprepared):
                        self.drop_staged(name)
                finally:
                    self.disconnect()

        with suppress(RuntimeError):
            self.context.run_in_thread(end).add_done_callback(_look_at)

    # -- threads ------------------------------------------------------------------------------------

    def drop_dead(self, names: Iterable[str]) -> None:
        """Delete those staged records that older attempts of this subtask left and no checkpoint has.

        Args:
            names: of all that is staged for the sink.
        """
        discarded = self.context.metrics.counter(DISCARDED_COUNTER)
        prefix = self.staged_name("")
        for name in names:
            if _is_dead_place(name.removeprefix(prefix), self.context):
                self.drop_staged(name)
                discarded.inc()

    def _send_until(self, number: int) -> None:
        """Send all chunks of epochs up to this one, in order."""
        with self._turn:
            while True:
                with self._changed:
                    chunk = self._queue[0] if self._queue else None
                    if chunk is None or chunk.epoch.number > number:
                        return
                    if self._closed:
                        raise self._was_closed()
                if self._exactly_once:
                    self._unprepared[chunk.epoch.name] = chunk.epoch
                with self.about():
                    self.persistently(partial(self.send, chunk))
                with self._changed:
                    self._queue.popleft()
                    self._waiting_bytes -= chunk.size_bytes
                    self._changed.notify_all()

    def _was_closed(self) -> JobError:
        return JobError(f"the sink was closed {self.place}")


def _is_dead_place(place: str, context: OperatorContext) -> bool:
    """Return True if `place` of `StagingWriter.staged_name` is that of staged records to be deleted."""
    found = _STAGED.fullmatch(place)
    return found is not None and is_dead(context, *(int(part) for part in found.groups()))


def is_dead(context: OperatorContext, attempt: int, after: int, subtask: int) -> bool:
    """Return True if staged output is of an older attempt, and in no checkpoint.

    What was begun before the restored checkpoint may be in it, and then the restore commits it. Output of
    other subtasks may be alive, as a region of a job restarts without the others; subtask 0 takes that of
    subtasks that no longer exist.

    Args:
        context: that of the new attempt.
        attempt: the attempt that has staged it.
        after: the checkpoint behind which it was begun.
        subtask: the index of the subtask that has staged it.
    """
    orphaned = context.subtask_index == 0 and subtask >= context.parallelism
    ours = subtask == context.subtask_index or orphaned
    return ours and attempt < context.attempt and after >= context.restored_checkpoint


def _look_at(future: Any) -> None:
    """Look at the error, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
