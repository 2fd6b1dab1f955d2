"""Watches over the subtasks of a worker: which call does not return, and whose attempt does not end.

It is driven by the worker's own thread (`heartbeats.py`), which goes on while user code holds the event
loop; or, in one process with the coordinator and in simulations, by the event loop. The place of a call is
the stack of a thread, or the chain of calls that a task awaits. The code may have moved on when its place
is shown.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Final

from ...operators.clock import Clock
from ...operators.durations import format_duration
from ..control.messages import BusyStep, StepStuck, Watching
from ..task.chain import ChainedOperator
from ..task.subtask import Subtask

SHOWN_AFTER_MS = 1_000
"""Calls shorter than that are ordinary work."""
_log = logging.getLogger("headgate.worker")
FRAMES_MAX: Final = 40
"""Innermost frames of a stack that are shown."""


class StepWatch:
    """The calls that the subtasks of one worker are in."""

    def __init__(self, worker_id: str, clock: Clock) -> None:
        self._clock = clock
        self._fields = {"worker": worker_id}
        self._threads = f"io-{worker_id}"
        self._loop_thread = threading.get_ident()
        self._watching = Watching()
        self._regions: dict[int, Sequence[Subtask]] = {}
        self._warn_ms: dict[tuple[int, int], tuple[float, int]] = {}
        """The beginning of each subtask's call, and the length at which the next warning is due."""
        self._cancelling: tuple[int, float] | None = None
        """The attempt that is to end, and since when."""
        self._cancelled = 0
        self._next_cancel_ms = 0

    def configure(self, job_name: str, watching: Watching) -> None:
        """Take the settings of the coordinator."""
        self._fields["job"] = job_name
        self._watching = watching

    def begin(self, region: int, subtasks: Sequence[Subtask]) -> None:
        """Watch over the subtasks of an attempt of a region; more may be added to them."""
        # Another thread may read it at this moment: it gets the old one or the new one.
        self._regions = {**self._regions, region: subtasks}

    def end(self, regions: Collection[int]) -> None:
        """Note that nothing of the attempts of these regions is left."""
        gone = {(s.env.vertex.id, s.env.index) for r in regions for s in self._regions.get(r, ())}
        self._regions = {r: own for r, own in self._regions.items() if r not in regions}
        self._warn_ms = {place: due for place, due in self._warn_ms.items() if place not in gone}

    @property
    def _subtasks(self) -> tuple[Subtask, ...]:
        return tuple(subtask for subtasks in self._regions.values() for subtask in tuple(subtasks))

    def cancelling(self, attempt: int) -> None:
        """The attempt is to end. Called by the first thread that reads this: the loop may be held."""
        if attempt > self._cancelled and self._cancelling is None:
            self._cancelling = (attempt, self._clock.monotonic())
            self._next_cancel_ms = self._watching.cancellation_interval_ms

    def cancelled(self, attempt: int) -> None:
        """The attempt has ended."""
        self._cancelled = max(attempt, self._cancelled)
        self._cancelling = None

    def steps(self) -> tuple[BusyStep, ...]:
        """The steps that have been in one call for more than a second."""
        return tuple(step for step, _ in self._found(SHOWN_AFTER_MS))

    def look(self) -> list[StepStuck]:
        """Log the calls whose warning is due, and return the reports to the coordinator."""
        stuck = self._stuck()
        for each in stuck:
            step = each.step
            _log.warning(
                "%s has been in one call for %s operator=`%s`",
                step.task_name,
                format_duration(step.busy_ms),
                step.operator,
                extra={**self._fields, "attempt": step.attempt, "detail": each.stack},
            )
        self._look_at_cancellation()
        return stuck

    def _stuck(self) -> list[StepStuck]:
        least = self._watching.stuck_after_ms
        if not least:
            return []
        due = []
        for step, subtask in self._found(least):
            place, since = (step.vertex, step.index), subtask.time.in_call_since
            known_since, warn_ms = self._warn_ms.get(place, (None, least))
            if since is None or (known_since == since and step.busy_ms < warn_ms):
                continue
            warn_ms = least
            while warn_ms <= step.busy_ms:
                warn_ms *= 2
            self._warn_ms[place] = (since, warn_ms)
            stack = self._stack(subtask)
            due.append(StepStuck(step=step, stack=stack))
        return due

    def _found(self, least_ms: int) -> list[tuple[BusyStep, Subtask]]:
        now, found = self._clock.monotonic(), []
        for subtask in self._subtasks:
            since = subtask.time.in_call_since
            busy_ms = 0 if since is None else int(1000 * (now - since))
            if busy_ms < least_ms:
                continue
            env = subtask.env
            operator = self._operator(subtask)
            step = BusyStep(env.vertex.id, env.index, env.task_name, operator, busy_ms, env.attempt)
            found.append((step, subtask))
        return found

    def _operator(self, subtask: Subtask) -> str:
        if (frame := self._held_by(subtask)) is not None:
            return holder_of(frame, self._subtasks)[1]
        return "" if subtask.awaits is None else awaited_by(subtask.awaits)[1]

    def _stack(self, subtask: Subtask) -> str:
        if (frame := self._held_by(subtask)) is not None:
            return text_of(frame)
        awaited = "" if subtask.awaits is None else awaited_by(subtask.awaits)[0]
        return awaited + busy_threads(self._threads)

    def _held_by(self, subtask: Subtask) -> FrameType | None:
        """The frame that the event loop runs, if it is in a call of this subtask."""
        frame = frame_of(self._loop_thread)
        held = frame is not None and holder_of(frame, self._subtasks)[0] is subtask
        return frame if held else None

    # -- attempts that do not end -------------------------------------------------------------------

    def _cancelling_ms(self) -> int:
        cancelling = self._cancelling
        return 0 if cancelling is None else int(1000 * (self._clock.monotonic() - cancelling[1]))

    def _look_at_cancellation(self) -> None:
        cancelling, waited_ms = self._cancelling, self._cancelling_ms()
        interval_ms = self._watching.cancellation_interval_ms
        if cancelling is None or not interval_ms or waited_ms < self._next_cancel_ms:
            return
        self._next_cancel_ms = waited_ms + interval_ms
        frame = frame_of(self._loop_thread)
        stack = "" if frame is None else text_of(frame)
        _log.warning(
            "the attempt was to end %s ago, and has not",
            format_duration(waited_ms),
            extra={
                **self._fields,
                "attempt": cancelling[0],
                "detail": stack + busy_threads(self._threads),
            },
        )


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of another thread; None if there is none, or it is the thread that asks.

    The frame of the thread that asks would hold itself, and with it all that its caller knows.
    """
    if thread_id == threading.get_ident():
        return None
    return sys._current_frames().get(thread_id)


def text_of(frame: FrameType) -> str:
    """The stack of a running frame, as a traceback shows it."""
    return "".join(traceback.format_stack(frame)[-FRAMES_MAX:])


def holder_of(frame: FrameType, subtasks: Sequence[Subtask]) -> tuple[Subtask | None, str]:
    """The subtask in whose call a stack is, and the name of the step."""
    operators = {
        id(chained.operator): chained.name
        for subtask in subtasks
        for chained in subtask.chain.operators
    }
    step = ""
    for own, chained in _selves(frame):
        if isinstance(own, Subtask):
            return own, step
        step = step or operators.get(id(own), "")
        if isinstance(chained, ChainedOperator):
            step = step or chained.name
    return None, step


def _selves(frame: FrameType | None) -> Iterator[tuple[Any, Any]]:
    """Yield `self` and the called operator of each frame, from the innermost outwards."""
    while frame is not None:
        names = frame.f_code.co_varnames
        if "self" in names or "chained" in names:
            local = frame.f_locals
            yield local.get("self"), local.get("chained")
        frame = frame.f_back


def awaited_by(task: asyncio.Task[Any]) -> tuple[str, str]:
    """The calls that a task waits for, outermost first, as in a traceback; and the name of the step."""
    lines: list[str] = []
    step = ""
    awaits: Any = task.get_coro()
    while (frame := getattr(awaits, "cr_frame", None)) is not None:
        summary = traceback.FrameSummary(
            frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        )
        lines += traceback.format_list([summary])
        if "chained" in frame.f_code.co_varnames:
            chained = frame.f_locals.get("chained")
            step = chained.name if isinstance(chained, ChainedOperator) else step
        awaits = awaits.cr_await
    return "".join(lines[-FRAMES_MAX:]), step


def busy_threads(prefix: str) -> str:
    """The stacks of all threads of a pool that are at work."""
    shown = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread_id, frame in sys._current_frames().items():
        name = names.get(thread_id, "")
        idle = frame.f_code.co_name == "_worker"  # as `concurrent.futures` waits for work
        if name.startswith(prefix) and not idle:
            shown.append(f"thread {name}\n{text_of(frame)}")
    return "".join(shown)
