"""The feedback of a loop that waits to be sent in: in memory up to a limit, on disk beyond it.

It accepts everything at once: a loop whose end waited for its beginning would deadlock. Batches
have positions, counted from 0. Those that open logs need stay after they were sent.

A log says which records in the loop belong to a checkpoint:

    barrier goes into the loop ──> open, from the next position to be sent ──> barrier comes back ──> cut
                                    └── checkpoint aborted ──> forgotten

A barrier that goes in separates what the loop has seen from what it has not. After it come the
records that wait in the queue, and those that come back ahead of the barrier: everything that was
in flight in the loop. They are one range of the queue, so a log is two positions, and overlapping
checkpoints share the records. Barriers are told apart by where they come from: one from outside
opens a log, one from the loop closes it. After algorithm 2 of Carbone et al., State Management in
Apache Flink, VLDB 2017, where a flag is toggled instead.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, final

from ...errors import InternalError, StateError, StorageError, check
from ..elements import Batch, ObjectBatch
from .stored import decode, encode


@final
class Range(NamedTuple):
    """Positions [start, end) of a queue."""

    start: int
    end: int


@final
class FeedbackLog:
    """The open logs of one loop head."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        self._last = 0

    @property
    def is_open(self) -> bool:
        """True while a barrier is in the loop."""
        return bool(self._starts)

    def on_barrier(self, checkpoint_id: int, position: int) -> None:
        """Open a log; `position` is the first that is sent after the barrier."""
        check(checkpoint_id > self._last, "barriers out of order", checkpoint_id=checkpoint_id)
        self._last = checkpoint_id
        self._starts[checkpoint_id] = position

    def on_return(self, checkpoint_id: int, position: int) -> Range | None:
        """Close a log; `position` is the first after the returned barrier. Return None if it was
        aborted."""
        start = self._starts.pop(checkpoint_id, None)
        return None if start is None else Range(start, position)

    def on_abort(self, checkpoint_id: int) -> None:
        """Forget the log of an aborted checkpoint; its barrier may still come back."""
        self._starts.pop(checkpoint_id, None)

    def floor(self, position: int) -> int:
        """Return the oldest position still needed, if `position` is the next to be sent."""
        return min(self._starts.values(), default=position)


FILE_BYTES: Final = 16 * 2**20
"""A file is closed to writes at this size, so that disk space is freed while a loop runs."""


class SpillFile:
    """A file without a name: its space is freed once this object is no longer referenced."""

    def __init__(self, directory: Path) -> None:
        try:
            self._descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
        except OSError as error:
            raise StorageError(f"a loop cannot spill to disk: {error}") from error
        self.size_bytes = 0
        weakref.finalize(self, os.close, self._descriptor)

    def append(self, data: bytes) -> Spilled:
        """Append data."""
        view, offset = memoryview(data), self.size_bytes
        try:
            while view:
                written = os.pwrite(self._descriptor, view, self.size_bytes)
                self.size_bytes += written
                view = view[written:]
        except OSError as error:
            raise StorageError(
                f"a loop cannot spill to disk: {error}",
                fix="make room in io.tmp.dirs, or give the loop more memory",
            ) from error
        return Spilled(self, offset, len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes that were written; from any thread."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise InternalError(f"a spilled batch is truncated offset=`{offset}` length=`{length}`")
        return data


class Spilled:
    """The place of a batch on disk."""

    __slots__ = ("_file", "_length", "_offset")

    def __init__(self, file: SpillFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length

    def read(self) -> bytes:
        """Return the bytes of the batch."""
        return self._file.read(self._offset, self._length)


class Spill:
    """The files of a queue; they live as long as their contents are needed."""

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._file: SpillFile | None = None

    def write(self, data: bytes) -> Spilled:
        """Write bytes.

        Raises:
            StorageError: the disk refuses them.
        """
        if self._file is None or self._file.size_bytes >= FILE_BYTES:
            self._file = SpillFile(self._directory())
        return self._file.append(data)


MEMORY_BYTES = 64 * 2**20


@final
class Shared:
    """Python objects that both a log and the loop have, whose steps may change them in place.

    So they are pickled once, before the loop gets them or by the thread that writes the log,
    whichever comes first. An object that cannot be pickled fails the checkpoint, not the loop.
    """

    def __init__(self, batch: ObjectBatch, step: str) -> None:
        self._batch, self._step = batch, step
        self._data: bytes | StateError | None = None
        self._lock = Lock()

    def batch(self) -> Batch:
        """Return the batch, for the loop."""
        self._pickle()
        return self._batch

    def encoded(self) -> bytes:
        """Return the batch as it came back, encoded; from any thread."""
        data = self._pickle()
        if isinstance(data, StateError):
            raise data
        return data

    def _pickle(self) -> bytes | StateError:
        with self._lock:
            if self._data is None:
                try:
                    self._data = encode(self._batch, self._step)
                except StateError as error:
                    self._data = error
            return self._data


@final
class QueuedBatch(NamedTuple):
    """One batch in the queue: the batch itself, or its place on disk."""

    content: Batch | Spilled | Shared
    memory_bytes: int
    rows: int

    def batch(self) -> Batch:
        """Return the batch, read from disk if needed."""
        if isinstance(self.content, Spilled):
            return decode(self.content.read())
        return self.content.batch() if isinstance(self.content, Shared) else self.content

    def encoded(self, step: str) -> bytes:
        """Return the batch as bytes; from any thread."""
        if isinstance(self.content, Spilled):
            return self.content.read()
        if isinstance(self.content, Shared):
            return self.content.encoded()
        return encode(self.content, step)


def _no_directory() -> Path:
    raise InternalError("this feedback queue was given no directory")


class FeedbackQueue:
    """The feedback queue of one subtask of a loop's head, and the logs of checkpoints over it.

    Args:
        step: name of the head, for errors.
        memory_bytes_max: batches beyond it go to disk. The size of Python objects is estimated.
        spill: the files for them.
    """

    def __init__(
        self, step: str, memory_bytes_max: int = MEMORY_BYTES, spill: Spill | None = None
    ) -> None:
        self._step = step
        self._memory_bytes_max = memory_bytes_max
        self._spill = spill or Spill(_no_directory)
        self._entries: dict[int, QueuedBatch] = {}
        self._log = FeedbackLog()
        self.next = 0
        """The position of the batch that `take` returns next."""
        self.end = 0
        """The position after the last batch."""
        self.rows = 0
        """The number of records that wait to be taken."""
        self.memory_bytes = 0
        self.spilled_bytes = 0
        """The bytes written to disk so far."""
        self._waiting_on_disk = 0

    @property
    def over_memory(self) -> bool:
        """True while some waiting batches are on disk."""
        return self._waiting_on_disk > 0

    def put(self, batch: Batch) -> None:
        """Append a batch; never blocks.

        Raises:
            StorageError: it must go to disk, and the disk refuses it.
            StateError: it must go to disk, and has records that cannot be pickled.
        """
        size = memory_bytes_of(batch)
        content: Batch | Spilled = batch
        if self.memory_bytes + size > self._memory_bytes_max:
            data = encode(batch, self._step)
            content, size = self._spill.write(data), 0
            self.spilled_bytes += len(data)
            self._waiting_on_disk += 1
        self._entries[self.end] = QueuedBatch(content, size, len(batch))
        self.memory_bytes += size
        self.rows += len(batch)
        self.end += 1

    def take(self) -> Batch:
        """Remove and return the batch at `next`."""
        check(self.next < self.end, "the feedback queue is empty", step=self._step)
        if self._log.is_open:
            self._share(self.next)
        entry = self._entries[self.next]
        batch = entry.batch()
        self._passed(entry)
        return batch

    def drop(self, end: int) -> int:
        """Skip the batches before position `end`; return their number of records."""
        rows = 0
        while self.next < end:
            entry = self._entries[self.next]
            rows += entry.rows
            self._passed(entry)
        return rows

    def _passed(self, entry: QueuedBatch) -> None:
        self.next += 1
        self.rows -= entry.rows
        self._waiting_on_disk -= isinstance(entry.content, Spilled)
        self._forget()

    # -- checkpoints --------------------------------------------------------------------------------

    def barrier(self, checkpoint_id: int) -> None:
        """Begin a log: a barrier goes into the loop."""
        self._log.on_barrier(checkpoint_id, self.next)

    def returned(self, checkpoint_id: int, end: int) -> tuple[Range, list[QueuedBatch]] | None:
        """End a log: return the records in the loop, or None if the checkpoint was aborted. The
        barrier came back after position `end - 1`."""
        found = self._log.on_return(checkpoint_id, end)
        if found is None:
            return None
        for position in range(self.next, found.end):
            self._share(position)
        entries = [self._entries[position] for position in range(found.start, found.end)]
        self._forget()
        return found, entries

    def _share(self, position: int) -> None:
        """Mark the batch as shared by a log and the loop."""
        entry = self._entries[position]
        if isinstance(entry.content, ObjectBatch):
            self._entries[position] = entry._replace(content=Shared(entry.content, self._step))

    def aborted(self, checkpoint_id: int) -> None:
        """Forget the log of an aborted checkpoint."""
        self._log.on_abort(checkpoint_id)
        self._forget()

    def _forget(self) -> None:
        """Drop the front of the queue, as far as no log needs it."""
        floor = self._log.floor(self.next)
        first = self.end - len(self._entries)
        for position in range(first, floor):
            self.memory_bytes -= self._entries.pop(position).memory_bytes

    def validate(self) -> None:
        """Check all invariants; for tests."""
        kept = range(self.end - len(self._entries), self.end)
        check(list(self._entries) == list(kept), "the queue has gaps")
        held = sum(entry.memory_bytes for entry in self._entries.values())
        check(held == self.memory_bytes, "bytes miscounted", held=held)
        waiting = sum(self._entries[each].rows for each in range(self.next, self.end))
        check(waiting == self.rows, "rows miscounted", waiting=waiting)


def memory_bytes_of(batch: Batch) -> int:
    """Return the bytes of a batch in memory; for Python objects an estimate by the middle one."""
    if not isinstance(batch, ObjectBatch):
        return batch.nbytes
    try:
        record = len(pickle.dumps(batch.records[len(batch) // 2], 5))
    except Exception:  # the error is reported when the batch is written
        record = 64
    return len(batch) * max(64, record)
