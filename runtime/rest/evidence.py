"""What the REST API answers about single events in a job: lines of its log."""

from __future__ import annotations

from .answers import Answer


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
    """How many lines are kept for each level."""
