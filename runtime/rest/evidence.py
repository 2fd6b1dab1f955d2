"""The answers of the REST API about single events in a job: lines of its log, and lost records.

Events of a job travel as server-sent events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import JobError
from ..control.job_client import PublishedEvent
from .answers import Answer, DroppedAnswer


class LogLineAnswer(Answer, frozen=True):
    """A line of the log."""

    number: int
    """Later lines have larger numbers."""
    at_ms: int
    level: str
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    process: str
    """`coordinator`, or the name of a worker."""
    logger: str
    message: str
    fields: dict[str, str]
    """The parts of the job that it names, such as `operator`, `subtask` and `attempt`."""
    detail: str
    """A traceback; empty: there is none."""


class LogsAnswer(Answer, frozen=True):
    """The last lines of the log of the coordinator and of the workers, oldest first."""

    lines: list[LogLineAnswer]
    skipped: int
    """Lines that workers wrote faster than they send them."""
    kept: int
    """The number of lines that are kept for each level."""


class LostRecordAnswer(Answer, frozen=True):
    """A record that a step has dropped."""

    step: str
    kind: str
    at_ms: int
    """When the coordinator heard of it."""
    subtask: int
    event_time: int | None
    """In ms since the epoch; null: it has none."""
    watermark: int | None
    """The watermark of the step at that time; null: there was none, or it is not known."""
    position: str
    """Where the record stood in its source; empty where that is not known any more."""
    error: str
    """The type of the error, and its text if values are shown; empty: there was none."""
    value: str | None
    """The record, up to 500 characters; null: values are not shown."""


class LostAnswer(Answer, frozen=True):
    """The records that steps have dropped, with samples of them."""

    dropped: list[DroppedAnswer]
    records: list[LostRecordAnswer]
    """By step and kind, the newest first."""
    kept: int
    """The number of samples that are kept for each step and kind."""
    values: bool
    """True if samples have the values of records."""


class _EventData(msgspec.Struct):
    text: str
    body: msgspec.Raw = msgspec.Raw(b"null")
    at_ms: int | None = None


def encode_event(event: PublishedEvent) -> bytes:
    """An event as a server-sent event: its kind, and as data an object of its text, body and time."""
    body: Any = msgspec.json.decode(event.body)  # a line break in it would end the data
    data = msgspec.json.encode({"text": event.text, "body": body, "at_ms": event.at_ms})
    return b"event: %s\ndata: %s\n\n" % (event.kind.encode(), data)


def decode_event(kind: str, data: str) -> PublishedEvent:
    """The event of this kind and data.

    Raises:
        JobError: the data is not one of ours.
    """
    try:
        found = msgspec.json.decode(data, type=_EventData)
    except msgspec.DecodeError as error:
        raise JobError(f"this is no event of a REST API of headgate: {error}") from None
    return PublishedEvent(kind=kind, text=found.text, body=bytes(found.body), at_ms=found.at_ms)
