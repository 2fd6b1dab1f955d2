"""In which order results leave: that of the records, or as they come but never across a watermark."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol, TypeAlias

from ..elements import Watermark, WatermarkStatus
from .call import Call, Status

Mark: TypeAlias = Watermark | WatermarkStatus
"""What no result crosses."""


class Queue(Protocol):
    """Calls that were made and not yet emitted, and the marks between them."""

    def add(self, call: Call) -> None:
        """A call, behind everything that was added before."""
        ...

    def mark(self, mark: Mark) -> None:
        """A mark, behind all calls so far."""
        ...

    def completed(self, call: Call) -> None:
        """The call is not open any more."""
        ...

    def ready(self) -> Iterator[Call | Mark]:
        """Take out what can leave now, in order."""
        ...


class OrderedQueue:
    """Results leave in the order of their records: a slow call holds back those behind it."""

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
        """Nothing to note: its status says it."""

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
    """Results leave as they come, those of different segments in the order of the segments."""

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
    """True if nobody needs `before` with `mark` right behind it: they would pile up behind a slow call."""
    return isinstance(mark, Watermark) and isinstance(before, Watermark)
