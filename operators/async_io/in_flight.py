"""An operator with calls under way: begun in the mailbox, awaited beside it, their results sent from it.

A call is begun when there is room for it, and leaves room only once its result was sent: so what waits
for a slow call in front of it counts as well, and the operator is full. The records of all calls that were
not sent are state. After a restore they are called for again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ...state.snapshot import RestoredState, StateInfo, StateSnapshot
from ..base import Operator, OperatorContext
from ..elements import Batch, Watermark, WatermarkStatus
from .call import Call, Status, attempt
from .queues import Mark, OrderedQueue, Queue, UnorderedQueue
from .retry import RetryRule
from .stored import STATE, InFlightState

IN_FLIGHT_GAUGE: Final = "async_records_in_flight"
CALL_SECONDS: Final = "async_call_seconds"
RETRIES_COUNTER: Final = "async_calls_retried"
WAITING_OPTION: Final = "headgate.async.waiting-records"
WAITING_ROWS_MAX: Final = 65_536
"""Records that wait for room are taken in front of a barrier until they are so many, if nothing is said."""
DEADLINES_MIN: Final = 64
"""So many deadlines of calls that have ended are not worth forgetting."""
_SLACK_S: Final = 1e-6
"""Sums of floats: what is due this soon is due."""


@dataclass(frozen=True)
class CallSettings:
    """How calls are made. Picklable.

    Attributes:
        function: a coroutine function of what a call is given.
        max_in_flight: calls that were begun and whose results were not yet sent, per subtask.
        timeout_ms: from the beginning of a call, all its attempts included; None: no limit.
        ordered: results leave in the order of the records.
        retry: when a call is made again.
    """

    function: Callable[[Any], Awaitable[Any]]
    max_in_flight: int
    timeout_ms: int | None
    ordered: bool
    retry: RetryRule


class InFlight(Operator):
    """What operators with calls share; subclasses make calls of batches and batches of results."""

    stores_what_waits = True

    def __init__(self, settings: CallSettings, state: InFlightState, step: str) -> None:
        self._settings = settings
        self._state = state
        self._task_name = f"call of {step}"
        self._queue: Queue = OrderedQueue() if settings.ordered else UnorderedQueue()
        self._calls: dict[Call, None] = {}  # those not sent yet, as they came
        self._waiting: deque[Call] = deque()  # those for which there was no room
        self._occupied = 0
        self._rows = 0
        self._waiting_rows = 0
        self._waiting_rows_max = WAITING_ROWS_MAX
        self._turns: dict[Any, deque[Call]] = {}  # by key: behind the call that is under way
        self._tasks: set[asyncio.Task[Any]] = set()  # also those whose call is over, and that go on
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
        """The calls to make for a batch, in order."""
        raise NotImplementedError

    def _send(self, calls: list[Call]) -> None:
        """Send on what came of calls that are not open any more, in this order."""
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
                # Those behind a call that takes long: else they would be kept as long as it takes.
                still = (each for each in self._deadlines if each[1].status is Status.OPEN)
                self._deadlines = deque(still)

    def _wants(self, call: Call) -> bool:
        return call.status is Status.OPEN and not self._closed

    def _ended(self, call: Call, task: asyncio.Task[Any]) -> None:
        """The task of a call has ended. Runs beside the mailbox: it only takes note."""
        self._tasks.discard(task)
        if not self._wants(call):
            if not task.cancelled():
                task.exception()  # it was looked at: the call was over before
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
        """In the mailbox: calls have ended."""
        self._woken = False
        self._go_on()

    def _go_on(self) -> None:
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

    # deadlines: as all calls have the same time, they fall due in the order in which they began

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
        """In the mailbox: the first deadline may have passed."""
        self._timer_runs = False
        now_s = self.context.clock.monotonic() + _SLACK_S
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, call = self._deadlines.popleft()
            # A task that has ended before counts as in time, though its callback is still to come.
            if call.status is Status.OPEN and call.task is not None and not call.task.done():
                call.status = Status.TIMED_OUT
                call.task.cancel()
                self._complete(call)
        self._go_on()

    # state

    def states(self) -> Sequence[StateInfo]:
        return self._state.infos()

    def pickled_states(self) -> Sequence[str]:
        return [STATE] if self._state.pickled else []

    def snapshot(self, checkpoint_id: int) -> StateSnapshot:
        """The records of all calls that were not sent, in order.

        Results that are ready do not leave now, only when their mail runs: behind a savepoint that stops
        the job no mail does, and the last checkpoint must not commit what the savepoint has as a record.
        """
        return self._state.cut(list(self._calls), self.context.max_parallelism)

    def restore(self, state: RestoredState) -> None:
        for batch in self._state.restored(state):
            self.process(batch, 0)

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
