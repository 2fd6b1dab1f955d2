"""The place of code that does not return: the stack of a thread, or the chain that a task awaits.

The functions here look on from another thread or task: the code may have moved on when its place is shown.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

from ..task.chain import ChainedOperator
from ..task.subtask import Subtask

FRAMES_MAX: Final = 40
"""Innermost frames of a stack that are shown."""


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of a thread; None if there is no such thread."""
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
    """From the innermost frame outwards: whose method it is, and the operator it calls."""
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
