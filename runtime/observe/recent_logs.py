"""The last lines of a job's log, of its coordinator and its workers.

Each level keeps lines of its own, so that many lines of one level do not push out those of another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple, final

import msgspec

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
"""The levels, from the least to the most severe. `ERROR` includes all that is worse."""
MESSAGE_MAX: Final = 2_000
"""A longer message is cut, in characters."""
DETAIL_MAX: Final = 8_000
"""A longer traceback is cut to its end, in characters."""


@final
class LogLine(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        at_ms: the time of the line, in ms since the epoch.
        level: one of `LEVELS`.
        logger: the name of the logger.
        message: the text.
        fields: the parts of the job that the line names, such as `operator` and `subtask`.
        detail: the traceback, if the line has one.
    """

    at_ms: int
    level: str
    logger: str
    message: str
    fields: dict[str, str] = {}
    detail: str = ""


class NumberedLine(NamedTuple):
    """A line, with the process that wrote it. Later lines have larger numbers."""

    number: int
    process: str
    line: LogLine


def shortened(line: LogLine) -> LogLine:
    """Return the line with a message and a detail of bounded lengths."""
    if len(line.message) <= MESSAGE_MAX and len(line.detail) <= DETAIL_MAX:
        return line
    message, detail = line.message, line.detail
    if len(message) > MESSAGE_MAX:
        message = f"{message[: MESSAGE_MAX - 1]}…"
    if len(detail) > DETAIL_MAX:
        detail = f"…{detail[1 - DETAIL_MAX :]}"
    return msgspec.structs.replace(line, message=message, detail=detail)


@final
class RecentLogs:
    """A bounded history of lines. Any thread may add some."""

    def __init__(self, lines_max: int) -> None:
        """`lines_max`: lines that are kept for each level; 0: none."""
        self._lock = threading.Lock()
        self.lines_max = lines_max
        self._numbers = count(1)
        self._kept = {level: deque[NumberedLine](maxlen=lines_max) for level in LEVELS}
        self.skipped = 0
        """Lines that workers wrote faster than they can send them."""

    def add(self, process: str, lines: Iterable[LogLine], skipped: int = 0) -> None:
        """Add lines of a process, and the number of those that it could not send."""
        with self._lock:
            self.skipped += skipped
            for line in lines:
                kept = self._kept.get(line.level, self._kept[LEVELS[-1]])
                kept.append(NumberedLine(next(self._numbers), process, shortened(line)))

    def since(self, number: int, level: str = LEVELS[0]) -> list[NumberedLine]:
        """Return the lines behind this number, of this level and more severe ones, oldest first."""
        with self._lock:
            found = [
                each
                for name in LEVELS[LEVELS.index(level) :]
                for each in self._kept[name]
                if each.number > number
            ]
        return sorted(found, key=attrgetter("number"))


@final
class UnsentLogs:
    """Lines of a worker that wait until they are sent. Any thread may add some."""

    def __init__(self, lines_max: int) -> None:
        """`lines_max`: lines that wait at most; later ones are counted only."""
        self._lines_max = lines_max
        self._lock = threading.Lock()
        self._waiting: list[LogLine] = []
        self._skipped = 0

    def add(self, line: LogLine) -> None:
        """Add a line."""
        with self._lock:
            if len(self._waiting) < self._lines_max:
                self._waiting.append(shortened(line))
            else:
                self._skipped += 1

    def take(self) -> tuple[tuple[LogLine, ...], int]:
        """Return what waits, and the number of lines that found no room, and forget both."""
        with self._lock:
            found, skipped = tuple(self._waiting), self._skipped
            self._waiting, self._skipped = [], 0
        return found, skipped
