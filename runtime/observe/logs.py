"""Log lines that name job, operator and subtask: plain for people, JSON for machines."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

FIELDS = ("job", "task", "operator", "subtask", "attempt", "worker")
"""The fields that a record may carry in `extra`, besides `detail`: an exception from another process."""
FORMAT_VARIABLE = "HEADGATE_LOG_FORMAT"
"""`plain` (default) or `json`."""


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


def configure_logging(level: int = logging.INFO) -> None:
    """Send the `headgate` loggers to stderr in the wanted format; others are left alone."""
    handler = logging.StreamHandler(sys.stderr)
    wanted = os.environ.get(FORMAT_VARIABLE, "plain")
    handler.setFormatter(JsonFormatter() if wanted == "json" else PlainFormatter())
    logger = logging.getLogger("headgate")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
