"""An operator with calls in flight: begun in the mailbox, awaited beside it, results emitted from it.

A call begins when there is room for it, and makes room only once its result was emitted. So results
that wait for a slow call in front of them count as well, and the operator fills up. The records of
all calls without an emitted result are state. After a restore their calls are made again.

Results are emitted in the order of the records, or in the order of completion between two watermarks.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ..base import Operator, OperatorContext
from ..elements import Batch, Watermark, WatermarkStatus
from .call import Call, RetryRule, Status, attempt
from .stored import STATE, InFlightState

Mark: TypeAlias = Watermark | WatermarkStatus
"""An element that no result crosses."""


class Queue(Protocol):
    """Calls that were made and not yet emitted, and the marks between them."""

    def add(self, call: Call) -> None:
        """Append a call."""
        ...

    def mark(self, mark: Mark) -> None:
        """Append a mark."""
        ...

    def completed(self, call: Call) -> None:
        """Note that the call is finished."""
        ...

    def ready(self) -> Iterator[Call | Mark]:
        """Remove and yield, in order, what can be emitted now."""
        ...


class OrderedQueue:
    """Emits results in the order of their records: a slow call holds back those after it."""

    def __init__(self) -> None:
        self._entries: deque[Call | Mark] = deque()

    def add(self, call: Call) -> None:
        self._entries.append(call)

    def mark(self, mark: Mark) -> None:
        entries = self._entries
        if entries and _replaces(mark, entries[-1]):
            entries.pop()
        entries.append(mark)

    def completed(self, call: Call) -> None:
        """Do nothing: the status of the call suffices."""

    def ready(self) -> Iterator[Call | Mark]:
        entries = self._entries
        while entries:
            first = entries[0]
            if isinstance(first, Call) and first.status is Status.OPEN:
                return
            yield entries.popleft()


class _Segment:
    """The calls between two marks."""

    __slots__ = ("done", "mark", "open")

    def __init__(self) -> None:
        self.open = 0
        self.done: list[Call] = []
        self.mark: Mark | None = None


class UnorderedQueue:
    """Emits results as calls finish, those of different segments in the order of the segments."""

    def __init__(self) -> None:
        self._segments: deque[_Segment] = deque([_Segment()])

    def add(self, call: Call) -> None:
        call.segment = self._segments[-1]
        call.segment.open += 1

    def mark(self, mark: Mark) -> None:
        last = self._segments[-1]
        if len(self._segments) > 1 and not last.open and not last.done:
            before = self._segments[-2]
            if _replaces(mark, before.mark):
                before.mark = mark
                return
        last.mark = mark
        self._segments.append(_Segment())

    def completed(self, call: Call) -> None:
        call.segment.open -= 1
        call.segment.done.append(call)

    def ready(self) -> Iterator[Call | Mark]:
        while True:
            first = self._segments[0]
            done, first.done = first.done, []
            yield from done
            if first.open or first.mark is None:
                return
            self._segments.popleft()
            yield first.mark


def _replaces(mark: Mark, before: Call | Mark | None) -> bool:
    """Return True if `mark` directly after `before` makes it redundant, so that marks do not pile
    up behind a slow call."""
    return isinstance(mark, Watermark) and isinstance(before, Watermark)


IN_FLIGHT_GAUGE: Final = "async_records_in_flight"
CALL_SECONDS: Final = "async_call_seconds"
RETRIES_COUNTER: Final = "async_calls_retried"
WAITING_OPTION: Final = "headgate.async.waiting-records"
WAITING_ROWS_MAX: Final = 65_536
"""The default number of waiting records up to which more are accepted in front of a barrier."""
DEADLINES_MIN: Final = 64
"""Fewer deadlines of finished calls than this are not worth removing."""
_SLACK_S: Final = 1e-6
"""A deadline this close counts as due, because sums of floats are inexact."""


class CallSettings(msgspec.Struct, frozen=True):
    """The settings of calls. Picklable.

    Attributes:
        function: a coroutine function of the call's argument.
        max_in_flight: calls begun whose results were not yet emitted, per subtask.
        timeout_ms: from the beginning of a call, all its attempts included; None: no limit.
        ordered: results keep the order of the records.
        retry: when a call is retried.
    """

    function: Callable[[Any], Awaitable[Any]]
    max_in_flight: int
    timeout_ms: int | None
    ordered: bool
    retry: RetryRule


class InFlight(Operator):
    """The common part of operators with calls; subclasses turn batches into calls and results into
    batches."""

    stores_what_waits = True
    makes_calls = True

    def __init__(self, settings: CallSettings, state: InFlightState, step: str) -> None:
        self._settings = settings
        self._state = state
        self._task_name = f"call of {step}"
        self._queue: Queue = OrderedQueue() if settings.ordered else UnorderedQueue()
        self._calls: dict[Call, None] = {}  # those not emitted yet, in order of arrival
        self._waiting: deque[Call] = deque()  # those without room so far
        self._occupied = 0
        self._rows = 0
        self._waiting_rows = 0
        self._waiting_rows_max = WAITING_ROWS_MAX
        self._turns: dict[Any, deque[Call]] = {}  # by key: calls behind the one in flight
        self._tasks: set[asyncio.Task[Any]] = set()  # also those of finished calls that still run
        self._completed: list[Call] = []
        self._deadlines: deque[tuple[float, Call]] = deque()
        self._timer_runs = False
        self._woken = False
        self._closed = False

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._waiting_rows_max = int(context.options.get(WAITING_OPTION, WAITING_ROWS_MAX))
        self._note_waiting()
        self._retried = context.metrics.counter(RETRIES_COUNTER)
        self._took = context.metrics.histogram(CALL_SECONDS)
        context.metrics.gauge(IN_FLIGHT_GAUGE, lambda: self._rows)

    def process(self, batch: Batch, input_index: int) -> None:
        for call in self._calls_of(batch):
            self._submit(call)
        self._begin()

    def _calls_of(self, batch: Batch) -> Iterator[Call]:
        """Yield the calls to make for a batch, in order."""
        raise NotImplementedError

    def _send(self, calls: list[Call]) -> None:
        """Emit the outcomes of finished calls, in this order."""
        raise NotImplementedError

    def full(self) -> bool:
        return self._occupied >= self._settings.max_in_flight

    def settled(self) -> bool:
        return not self._calls

    # watermarks keep their places among the records

    def on_watermark(self, timestamp: int) -> None:
        self._mark(Watermark(timestamp))

    def on_idle(self, idle: bool) -> None:
        self._mark(WatermarkStatus(idle))

    def _mark(self, mark: Mark) -> None:
        self._queue.mark(mark)
        self._send_ready()

    # calls

    def _submit(self, call: Call) -> None:
        self._calls[call] = None
        self._rows += call.rows
        self._queue.add(call)
        self._waiting.append(call)
        self._waiting_rows += call.rows

    def _begin(self) -> None:
        """Begin calls while there is room."""
        while self._waiting and not self.full():
            self._occupied += 1
            call = self._waiting.popleft()
            self._waiting_rows -= call.rows
            if call.key is not None:
                line = self._turns.get(call.key)
                if line is not None:
                    line.append(call)
                    continue
                self._turns[call.key] = deque()
            self._begin_call(call)
        self._note_waiting()
        self._watch_deadlines()

    def _note_waiting(self) -> None:
        self.stores_what_waits = self._waiting_rows < self._waiting_rows_max

    def _begin_call(self, call: Call) -> None:
        settings = self._settings
        wanted = partial(self._wants, call)
        call.began_s = self.context.clock.monotonic()
        made = attempt(settings.function, call.argument, settings.retry, self._retried.inc, wanted)
        call.task = asyncio.get_running_loop().create_task(made, name=self._task_name)
        self._tasks.add(call.task)
        call.task.add_done_callback(partial(self._ended, call))
        if settings.timeout_ms is not None:
            due_s = self.context.clock.monotonic() + settings.timeout_ms / 1000
            self._deadlines.append((due_s, call))
            if len(self._deadlines) > DEADLINES_MIN + 2 * self._occupied:
                # Remove deadlines of calls after a slow one; otherwise they would be kept as long
                # as it runs.
                still = (each for each in self._deadlines if each[1].status is Status.OPEN)
                self._deadlines = deque(still)

    def _wants(self, call: Call) -> bool:
        return call.status is Status.OPEN and not self._closed

    def _ended(self, call: Call, task: asyncio.Task[Any]) -> None:
        """Record that the task of a call has ended. Runs outside the mailbox, so it only takes note."""
        self._tasks.discard(task)
        if not self._wants(call):
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved: the call was already over
            return
        call.take(task)
        self._took.observe(self.context.clock.monotonic() - call.began_s)
        self._complete(call)
        if not self._woken:
            self._woken = True
            self.context.timers.call_later(0, self._wake)

    def _complete(self, call: Call) -> None:
        self._queue.completed(call)
        self._completed.append(call)

    def _wake(self) -> None:
        """Handle ended calls, in the mailbox."""
        self._woken = False
        self._handle_completed()

    def _handle_completed(self) -> None:
        completed, self._completed = self._completed, []
        for call in completed:
            if call.key is not None:
                self._pass_turn(call.key)
        self._send_ready()
        self._begin()

    def _pass_turn(self, key: Any) -> None:
        line = self._turns[key]
        if line:
            self._begin_call(line.popleft())
        else:
            del self._turns[key]

    def _send_ready(self) -> None:
        calls: list[Call] = []
        for each in self._queue.ready():
            if isinstance(each, Call):
                calls.append(each)
                continue
            self._leave(calls)
            calls = []
            if isinstance(each, Watermark):
                self.output.emit_watermark(each.timestamp)
            else:
                self.output.emit_idle(each.idle)
        self._leave(calls)

    def _leave(self, calls: list[Call]) -> None:
        if not calls:
            return
        for call in calls:
            del self._calls[call]
            self._rows -= call.rows
        self._occupied -= len(calls)
        self._send(calls)

    # Deadlines: all calls have the same timeout, so they expire in the order in which they began.

    def _watch_deadlines(self) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][1].status is not Status.OPEN:
            deadlines.popleft()
        if self._timer_runs or not deadlines:
            return
        left_s = deadlines[0][0] - self.context.clock.monotonic()
        self._timer_runs = True
        self.context.timers.call_later(max(1, math.ceil((left_s - _SLACK_S) * 1000)), self._expire)

    def _expire(self) -> None:
        """Handle the first deadline, which may have passed; in the mailbox."""
        self._timer_runs = False
        now_s = self.context.clock.monotonic() + _SLACK_S
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, call = self._deadlines.popleft()
            # A task that has ended by now is in time, even if its callback has yet to run.
            if call.status is Status.OPEN and call.task is not None and not call.task.done():
                call.status = Status.TIMED_OUT
                call.task.cancel()
                self._complete(call)
        self._handle_completed()

    # state

    def states(self) -> Sequence[StateInfo]:
        return self._state.infos()

    def pickled_states(self) -> Sequence[str]:
        return [STATE] if self._state.pickled else []

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """Snapshot the records of all calls without an emitted result, in order.

        Results that are ready are not emitted now but when their mail runs: no mail runs after a
        savepoint that stops the job, and the last checkpoint must not commit results whose records
        are in the savepoint.
        """
        return self._state.cut(list(self._calls), self.context.max_parallelism)

    def restore(self, state: RestoredState) -> None:
        for batch in self._state.restored(state):
            self.process(batch, 0)

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
