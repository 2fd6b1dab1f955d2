"""A writer whose records go to calls that run beside the subtask, some records at a time.

Each call has at most a set number of records, and a set number of calls run at the same time. While as many
calls wait or run as may, `write` waits, which is the backpressure. Before a checkpoint can complete, all
calls with records up to its barrier have succeeded. A call that fails for good fails the attempt.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...errors import JobError
from ...operators.async_calls.in_flight import CALL_SECONDS, IN_FLIGHT_GAUGE
from ...operators.base import OperatorContext
from ...operators.elements import Batch, ColumnBatch, ObjectBatch, concatenated
from ...operators.sink import SinkWriter
from ...state.snapshot import CommitPermit
from .loop_thread import LoopThread

_CHECK_MS: Final = 200
"""A failed call fails the attempt within this time, also while no record comes."""
_LOOK_S: Final = 1.0


class Pieces:
    """Cuts a stream of batches into batches of a set number of records."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[Batch] = []
        self._count = 0

    def __len__(self) -> int:
        """Return how many records wait for others."""
        return self._count

    def add(self, batch: Batch) -> Iterator[Batch]:
        """Yield the full pieces, and keep what is left."""
        if self._parts and not _alike(self._parts[0], batch):
            yield self.take()
        start = 0
        while start < len(batch):
            length = min(self._rows - self._count, len(batch) - start)
            self._parts.append(batch.slice(start, length))
            self._count += length
            start += length
            if self._count == self._rows:
                yield self.take()

    def take(self) -> Batch:
        """Return the records that wait, which must be some."""
        parts, self._parts, self._count = self._parts, [], 0
        columns = [part for part in parts if isinstance(part, ColumnBatch)]
        if columns:
            return concatenated(columns)
        objects = [part for part in parts if isinstance(part, ObjectBatch)]
        return ObjectBatch([record for part in objects for record in part.records])


def _alike(one: Batch, other: Batch) -> bool:
    """Return True if both have the same columns, or both are of Python objects."""
    if isinstance(one, ColumnBatch) and isinstance(other, ColumnBatch):
        return bool(one.data.schema.equals(other.data.schema))
    return type(one) is type(other)


@dataclass(frozen=True, slots=True)
class CallBounds:
    """The bounds of calls.

    Attributes:
        rows: the most records of a call.
        within_ms: the longest time a record waits for others.
        max_in_flight: the most calls that run at the same time.
    """

    rows: int
    within_ms: int
    max_in_flight: int


class _Epoch:
    """The calls with records between two barriers."""

    __slots__ = ("begun", "open")

    def __init__(self) -> None:
        self.begun = False
        self.open = 0


class CallingWriter(SinkWriter):
    """Hands the records of one subtask to `call`."""

    def __init__(self, bounds: CallBounds) -> None:
        self._bounds = bounds
        self._pieces = Pieces(bounds.rows)
        self._turns = asyncio.Semaphore(bounds.max_in_flight)
        self._thread: LoopThread | None = None
        self._changed = threading.Condition()
        """Guards the fields below, which the thread of the calls changes."""
        self._open = 0
        self._rows_open = 0
        self._epoch = _Epoch()
        self._failure: BaseException | None = None
        self._closed = False
        self._stop_waiting: Callable[[], None] | None = None

    async def call(self, batch: Batch) -> None:
        """Write a batch; it runs in the thread of the calls, beside other calls. Raising fails the
        attempt.
        """
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare for calls; it runs in the thread of the calls, before the first one."""

    async def end(self) -> None:
        """End the data; it runs in the thread of the calls, when all of them have succeeded."""

    async def release(self) -> None:
        """Release what `begin` has made, also after failures; it runs in the thread of the calls."""

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._thread = LoopThread(f"calls of {context.operator_name}")
        self._seconds = context.metrics.histogram(CALL_SECONDS)
        context.metrics.gauge(IN_FLIGHT_GAUGE, lambda: self._rows_open)
        context.timers.call_later(_CHECK_MS, self._look)

    @property
    def thread(self) -> LoopThread:
        """The thread of the calls, which exists from `open` on."""
        assert self._thread is not None
        return self._thread

    def prepare(self) -> None:
        self.thread.submit(self.begin()).result()

    def write(self, batch: Batch) -> None:
        self._check()
        for piece in self._pieces.add(batch):
            self._wait_for_room()
            self._submit(piece)
        if not len(self._pieces):
            self._disarm()
        elif self._stop_waiting is None:
            self._submit_rest_after(self._bounds.within_ms)

    def _wait_for_room(self) -> None:
        self._wait_until(self._has_room)

    def _has_room(self) -> bool:
        # One more than may run, so that the next call begins as soon as another has ended.
        return self._open <= self._bounds.max_in_flight

    def _submit_rest_after(self, delay_ms: int) -> None:
        self._stop_waiting = self.context.timers.call_later(delay_ms, self._submit_rest_if_room)

    def _submit_rest_if_room(self) -> None:
        """Begin a call with the records that wait, unless too many calls are under way."""
        if self._has_room():
            self._submit_rest()
        else:
            self._submit_rest_after(_CHECK_MS)

    def _submit_rest(self) -> None:
        """Begin a call with the records that wait for others."""
        self._disarm()
        if len(self._pieces):
            self._submit(self._pieces.take())

    def _disarm(self) -> None:
        if self._stop_waiting is not None:
            self._stop_waiting()
            self._stop_waiting = None

    def _submit(self, batch: Batch) -> None:
        epoch = self._epoch
        with self._changed:
            epoch.begun = True
            epoch.open += 1
            self._open += 1
            self._rows_open += len(batch)
        future = self.thread.submit(self._turn(batch))
        future.add_done_callback(partial(self._ended, epoch, len(batch)))

    async def _turn(self, batch: Batch) -> None:
        """Make a call when fewer than the most are under way, in the order of the batches."""
        async with self._turns:
            if self._failure is None:
                began = self.context.clock.monotonic()
                try:
                    await self.call(batch)
                except BaseException as error:
                    self._failure = self._failure or error  # before the next call has its turn
                    raise
                self._seconds.observe(self.context.clock.monotonic() - began)

    def _ended(self, epoch: _Epoch, rows: int, future: Future[None]) -> None:
        error: BaseException | None
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        with self._changed:
            epoch.open -= 1
            self._open -= 1
            self._rows_open -= rows
            self._failure = self._failure or error
            self._changed.notify_all()

    def _look(self) -> None:
        if not self._closed:
            self._check()
            self.context.timers.call_later(_CHECK_MS, self._look)

    def _check(self) -> None:
        """Raise if a call has failed, or the writer is closed."""
        if self._closed:
            raise JobError("the sink was closed while its calls were under way")
        if self._failure is not None:
            raise self._failure

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        self._submit_rest()
        epoch, self._epoch = self._epoch, _Epoch()
        return partial(self._settle, epoch) if epoch.begun else None

    def _settle(self, epoch: _Epoch) -> list[bytes]:
        """Wait until the calls of an epoch have succeeded, while others are made."""
        self._wait_until(lambda: not epoch.open)
        return []

    def _wait_until(self, over: Callable[[], bool]) -> None:
        """Wait for the calls; raise if one has failed, or the writer was closed before."""
        with self._changed:
            while not over() and self._failure is None and not self._closed:
                self._changed.wait(_LOOK_S)
            if not over() or self._failure is not None:
                self._check()

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        return None

    def finish(self) -> Callable[[], None] | None:
        self._submit_rest()

        def settle() -> None:
            self._wait_until(lambda: not self._open)
            self.thread.submit(self.end()).result()

        return settle

    def close(self) -> None:
        """Cancel the calls: their records are written again if they are needed."""
        self._disarm()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        try:
            self._thread.close(self.release)
        except Exception as error:
            self.context.logger.warning(
                "the sink `%s` was not closed: %s", self.context.operator_name, error
            )
