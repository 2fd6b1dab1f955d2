"""The order in which results are emitted: that of the records, or of completion within watermarks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol, TypeAlias

from ..elements import Watermark, WatermarkStatus
from .call import Call, Status

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
