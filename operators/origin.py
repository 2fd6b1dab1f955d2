"""The user's line that wrote a step, for error messages and `explain`."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_ROOMS = frozenset({"api", "operators", "state", "connectors", "runtime", "testing", "errors"})
_given: ContextVar[Origin | None] = ContextVar("origin", default=None)


@dataclass(frozen=True, slots=True)
class Origin:
    """The user's line that made a node: `file:line` and its source text."""

    location: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.location}  {self.text}".rstrip()


@contextmanager
def origin_is(origin: Origin) -> Iterator[None]:
    """Attribute the steps made inside to `origin`, not to the Python code that makes them."""
    token = _given.set(origin)
    try:
        yield
    finally:
        _given.reset(token)


def capture_origin() -> Origin:
    """Return the innermost caller outside headgate: its `file:line` and the text of that line."""
    given = _given.get()
    if given is not None:
        return given
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    if frame is None:
        return Origin("<unknown>")
    path, line = frame.f_code.co_filename, frame.f_lineno
    return Origin(f"{shown_path(path)}:{line}", linecache.getline(path, line).strip())


def is_own_module(name: str) -> bool:
    """Return True for modules of headgate itself; its examples and tests count as users."""
    first, _, rest = name.partition(".")
    return first == _PACKAGE and (not rest or rest.partition(".")[0] in _ROOMS)


def _is_ours(frame: FrameType) -> bool:
    return is_own_module(str(frame.f_globals.get("__name__", "")))


def shown_path(path: str) -> str:
    """Return the path, relative to the working directory if it is below it."""
    prefix = os.path.join(os.getcwd(), "")
    return path[len(prefix) :] if path.startswith(prefix) else path
