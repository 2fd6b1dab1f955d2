"""Profiles of subtasks, taken on demand: what the worker's thread runs, and what a subtask waits for.

All subtasks of a worker share the thread of its event loop. Another thread looks at that thread a number of
times per second. If the task that runs is the subtask's, its call stack is one sample of running; otherwise
the chain of coroutines that the subtask waits in is one sample of waiting. So time for which a subtask had
no input, no credit or no answer is told apart from time for which it worked. A profile also counts which
tasks had the thread instead. Nothing is instrumented: a job that nobody profiles pays nothing.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, Final

from ..control.messages import Messages, ProfileAnswer, StackSamples, StateOutcome, TakeProfile
from .deployment import RunningRegions

DEPTH_MAX: Final = 100
"""Deeper calls of a stack are left out."""
STACKS_MAX: Final = 1_000
"""Further different stacks are counted as `STACKS_LEFT_OUT`."""
STACKS_LEFT_OUT: Final = "(other stacks)"
_PACKAGE: Final = str(PurePath(__file__).parents[2])


class Profiler:
    """Takes profiles of the subtasks of a worker, one at a time.

    Args:
        regions: the deployments of the worker.
        send: takes messages to the coordinator.
    """

    def __init__(self, regions: RunningRegions, send: Callable[[Messages], None]) -> None:
        self._regions = regions
        self._send = send
        self._busy = False

    def take(self, asked: TakeProfile) -> None:
        """Begin a profile, or refuse it. It ends early with its subtask."""
        found = [
            (deployment, subtask)
            for deployment in self._regions.of_attempt(asked.attempt)
            for subtask in deployment.subtasks
            if (subtask.env.vertex.id, subtask.env.index) == (asked.vertex, asked.index)
        ]
        task = found[0][1].awaits if found else None
        if task is None:
            self._send(ProfileAnswer(query=asked.query, outcome=StateOutcome.ELSEWHERE))
        elif self._busy:
            self._send(ProfileAnswer(query=asked.query, outcome=StateOutcome.BUSY))
        else:
            self._busy = True
            region = found[0][0].region
            taken = self._regions.spawn([region], _profile(asked, task), "profile")
            # A task that is cancelled before it begins runs no line of its coroutine.
            taken.add_done_callback(partial(self._end, asked.query))

    def _end(self, query: int, taken: asyncio.Task[ProfileAnswer]) -> None:
        """Answer, also if the region of the subtask was stopped meanwhile."""
        self._busy = False
        answer = ProfileAnswer(query=query, outcome=StateOutcome.ELSEWHERE)
        try:
            if not taken.cancelled():
                answer = taken.result()
        finally:
            self._send(answer)


async def _profile(asked: TakeProfile, task: asyncio.Task[Any]) -> ProfileAnswer:
    sampler = Sampler(asyncio.get_running_loop(), threading.get_ident(), task)
    call = partial(sampler.sample, asked.query, asked.milliseconds / 1000, asked.hertz)
    try:
        return await asyncio.to_thread(call)
    finally:
        sampler.stop()


class Sampler:
    """Samples one task of an event loop, from a thread of its own.

    Args:
        loop: the event loop; `sample` is called in another thread than its own.
        thread_id: the thread of the loop.
        task: the task to look at.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, task: asyncio.Task[Any]
    ) -> None:
        self._loop = loop
        self._thread_id = thread_id
        self._task = task
        self._end = threading.Event()
        self._functions: dict[str, int] = {}
        self._stacks: dict[tuple[int, ...], list[int]] = {}
        """The samples of running and of waiting, by the numbers of the functions."""
        self._others: Counter[str] = Counter()
        self._samples = 0
        self._running = 0

    def stop(self) -> None:
        """Let `sample` return at once."""
        self._end.set()

    def sample(self, query: int, seconds: float, hertz: int) -> ProfileAnswer:
        """Look at the task that many times per second, and return what was seen."""
        for _ in range(max(1, round(seconds * hertz))):
            if self._end.wait(1 / hertz) or self._task.done():
                break
            self._look()
        stacks = [
            StackSamples(frames=frames, running=running, waiting=waiting)
            for frames, (running, waiting) in self._stacks.items()
        ]
        return ProfileAnswer(
            query=query,
            outcome=StateOutcome.READ,
            samples=self._samples,
            running=self._running,
            functions=tuple(self._functions),
            stacks=tuple(stacks),
            others=dict(self._others.most_common(20)),
        )

    def _look(self) -> None:
        before = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread_id)
        stack = _calls(frame, self._task) if before is self._task else list(_awaits(self._task))
        if asyncio.current_task(self._loop) is not before:
            return  # the loop went on meanwhile, so the stack may be another task's
        self._samples += 1
        runs = before is self._task
        self._running += runs
        if before is not None and not runs:
            self._others[before.get_name()] += 1
        frames = tuple(self._number(_label(code)) for code in stack[:DEPTH_MAX])
        if frames not in self._stacks and len(self._stacks) >= STACKS_MAX:
            frames = (self._number(STACKS_LEFT_OUT),)
        self._stacks.setdefault(frames, [0, 0])[not runs] += 1

    def _number(self, function: str) -> int:
        return self._functions.setdefault(function, len(self._functions))


def _calls(frame: FrameType | None, task: asyncio.Task[Any]) -> list[CodeType]:
    """The calls of the thread that runs a task, from the task's coroutine inwards."""
    outermost = getattr(task.get_coro(), "cr_code", None)
    codes: list[CodeType] = []
    while frame is not None:
        codes.append(frame.f_code)
        if frame.f_code is outermost:
            break
        frame = frame.f_back
    return codes[::-1]


def _awaits(task: asyncio.Task[Any]) -> Iterator[CodeType]:
    """The coroutines that a task waits in, outermost first."""
    waited: Any = task.get_coro()
    for _ in range(DEPTH_MAX):
        code = getattr(waited, "cr_code", None) or getattr(waited, "gi_code", None)
        if code is None:
            return
        yield code
        waited = getattr(waited, "cr_await", None) or getattr(waited, "gi_yieldfrom", None)


def _label(code: CodeType) -> str:
    """`function (file:line)`, with the files of this package shortened."""
    path = code.co_filename
    if path.startswith(_PACKAGE):
        path = "headgate" + path[len(_PACKAGE) :]
    else:
        path = "/".join(PurePath(path).parts[-2:])
    return f"{code.co_qualname} ({path}:{code.co_firstlineno})"
