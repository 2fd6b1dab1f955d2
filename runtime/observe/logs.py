"""Log lines that name job, operator and subtask: plain for people, JSON for machines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .recent_logs import LEVELS, LogLine

FIELDS = ("job", "task", "operator", "subtask", "attempt", "worker")
"""The fields that a record may carry in `extra`, besides `detail`: an exception from another process."""
FORMAT_VARIABLE = "HEADGATE_LOG_FORMAT"
"""`plain` (default) or `json`."""
PutLine = Callable[[LogLine], None]


class PlainFormatter(logging.Formatter):
    """`12:30:01.250 INFO headgate.job [job=clicks subtask=0] message`."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%H:%M:%S")
        fields = " ".join(f"{key}={value}" for key, value in fields_of(record).items())
        where = f"{record.name} [{fields}]" if fields else record.name
        line = f"{time}.{int(record.msecs):03} {record.levelname} {where} {record.getMessage()}"
        exception = _exception(self, record)
        return f"{line}\n{exception}" if exception else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        exception = _exception(self, record)
        if exception:
            line["exception"] = exception
        return json.dumps(line, default=str)


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info:
        return formatter.formatException(record.exc_info)
    return str(getattr(record, "detail", "")).rstrip()


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of ours that a record carries."""
    found = {key: getattr(record, key, None) for key in FIELDS}
    return {key: value for key, value in found.items() if value is not None}


def configure_logging(level: int = logging.INFO, kept: int | None = None) -> None:
    """Send the `headgate` loggers to stderr in the wanted format; others are left alone.

    Args:
        level: the least level that is printed.
        kept: the least level that other handlers get; None: `level`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    wanted = os.environ.get(FORMAT_VARIABLE, "plain")
    handler.setFormatter(JsonFormatter() if wanted == "json" else PlainFormatter())
    logger = logging.getLogger("headgate")
    logger.handlers[:] = [handler]
    logger.setLevel(level if kept is None else min(level, kept))
    logger.propagate = False


def printed_level() -> int:
    """Return the least level that the `headgate` loggers print."""
    logger = logging.getLogger("headgate")
    handler = next((each for each in logger.handlers if not isinstance(each, LogTap)), None)
    return max(logger.getEffectiveLevel(), logging.NOTSET if handler is None else handler.level)


def line_of(record: logging.LogRecord) -> LogLine:
    """Return a record as a line for the job's recent logs."""
    index = max(0, min(record.levelno // 10 - 1, len(LEVELS) - 1))
    return LogLine(
        at_ms=int(record.created * 1000),
        level=LEVELS[index],
        logger=record.name,
        message=record.getMessage(),
        fields={key: str(value) for key, value in fields_of(record).items()},
        detail=_exception(_PLAIN, record),
    )


_PLAIN = logging.Formatter()


class LogTap(logging.Handler):
    """Passes the lines of our loggers on. What is printed stays as it is without this handler."""

    def __init__(self, put: PutLine) -> None:
        super().__init__()
        self._put = put

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(line_of(record))
        except Exception:
            self.handleError(record)
        # Python prints warnings for which it finds no handler, and it has found the taps.
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._prints(record.name):
            last.handle(record)

    def _prints(self, name: str) -> bool:
        """Return True if a logger has no handlers but taps, and this is the first of them."""
        logger: logging.Logger | None = logging.getLogger(name)
        first: logging.Handler | None = None
        while logger is not None:
            for handler in logger.handlers:
                if not isinstance(handler, LogTap):
                    return False
                first = first or handler
            logger = logger.parent if logger.propagate else None
        return first is self


class _LastTap(logging.Handler):
    """Passes on the lines that no handler takes, such as warnings of a user's function, and prints them."""

    def __init__(self, put: PutLine, printer: logging.Handler) -> None:
        super().__init__(printer.level)
        self._put = put
        self.printer = printer

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_ours(record):  # the other tap has passed it on
            try:
                self._put(line_of(record))
            except Exception:
                self.handleError(record)
        self.printer.handle(record)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name == "headgate" or record.name.startswith("headgate.")


@contextlib.contextmanager
def tapped(put: PutLine) -> Iterator[None]:
    """Pass all lines of our loggers to `put` for the time of the block. `put` is called in any thread."""
    tap, logger = LogTap(put), logging.getLogger("headgate")
    logger.addHandler(tap)
    try:
        yield
    finally:
        logger.removeHandler(tap)


@contextlib.contextmanager
def process_tapped(put: PutLine) -> Iterator[None]:
    """As `tapped`, and also pass on lines of other loggers that no handler takes.

    For processes of our own: it replaces the handler of last resort of the whole process.
    """
    before = logging.lastResort
    if before is not None:
        logging.lastResort = _LastTap(put, before)
    try:
        with tapped(put):
            yield
    finally:
        logging.lastResort = before
