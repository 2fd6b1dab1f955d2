"""What the tasks of an event loop wait for, as text: the first thing to know of a job that hangs."""

from __future__ import annotations

import asyncio
import linecache
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Final

TASKS_SHOWN: Final = 8
"""So many tasks are named; those that wait in the user's code come first."""
_OURS: Final = str(Path(__file__).parent.parent)
_FRAMEWORK: Final = (str(Path(asyncio.__file__).parent),)
_ROOMS: Final = ("operators", "state", "connectors", "runtime", "testing")


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """One line per task that waits: its name, and the line it stands at."""
    found = [_describe(task) for task in asyncio.all_tasks(loop)]
    lines = [text for _, text in sorted(found)]
    more = len(lines) - TASKS_SHOWN
    shown = lines[:TASKS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return "\n  ".join(shown) or "nothing"


def _describe(task: asyncio.Task[Any]) -> tuple[tuple[int, str], str]:
    """The line of the user's code if the task stands in such, else the innermost one of ours."""
    places = list(_places(task.get_coro()))
    users = [place for place in places if _is_users(place[0])]
    own = [place for place in places if not place[0].co_filename.startswith(_FRAMEWORK)]
    name = task.get_name()
    for rank, chosen in enumerate((users, own)):
        if chosen:
            code, line = chosen[-1]
            text = linecache.getline(code.co_filename, line).strip()
            return (rank, name), f"{name}: {code.co_filename}:{line}  {text}".rstrip()
    return (2, name), name


def _places(awaited: Any) -> Iterator[tuple[CodeType, int]]:
    """Code and line of the coroutines, from the outermost to the innermost."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)


def _is_users(code: CodeType) -> bool:
    path = code.co_filename
    if path.startswith(_FRAMEWORK):
        return False
    # By room: tests and examples of this project lie in the same tree and are users.
    rest = Path(path).relative_to(_OURS).parts if path.startswith(_OURS) else ()
    return not rest or rest[0] not in _ROOMS
