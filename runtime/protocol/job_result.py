"""The result of a job as the job log stores it, so that later queries get the same answer and error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import HeadgateError, JobError, ManifestErrors
from ...operators.durations import format_duration
from ...operators.notebook import html_table
from ...state.sealed import Record
from .drops import Dropped

TEXT_MAX = 20_000
"""The most characters of each text that are kept."""
_TYPES: dict[str, type[HeadgateError]] = {
    name: value
    for name, value in vars(sys.modules[HeadgateError.__module__]).items()
    if isinstance(value, type)
    and issubclass(value, HeadgateError)
    and value is not ManifestErrors  # it is made of errors, not of text
}


class JobFailure(Record, frozen=True, kw_only=True):
    """The failure that ended a job, as text only: reading a log must not create objects of user types."""

    kind: str
    """The name of the failure kind, see `protocol/failures.py`."""
    text: str
    vertex: str
    """The part of the job that failed."""
    error: str
    """The nearest of headgate's types that the error is an instance of."""
    message: str
    where: str = ""
    fix: str = ""
    detail: str = ""
    """The end of the traceback, with the user's line."""

    @staticmethod
    def of(kind: str, text: str, vertex: str, error: HeadgateError) -> JobFailure:
        """Return the parts of a failure that are kept."""
        names = (type_.__name__ for type_ in type(error).__mro__ if type_ in _TYPES.values())
        return JobFailure(
            kind=kind,
            text=text[:TEXT_MAX],
            vertex=vertex,
            error=next(names),
            message=error.message[:TEXT_MAX],
            where=error.where[:TEXT_MAX],
            fix=error.fix[:TEXT_MAX],
            detail=str(getattr(error, "detail", ""))[-TEXT_MAX:],
        )

    def as_error(self) -> HeadgateError:
        """Return the error again; one of a newer version's types is a JobError."""
        type_ = _TYPES.get(self.error, JobError)
        error = type_(self.message, where=self.where, fix=self.fix)
        if hasattr(error, "detail"):
            error.detail = self.detail
        return error


class JobOutcome(msgspec.Struct, frozen=True):
    """The outcome of a job.

    Attributes:
        status: `FINISHED`, `SUSPENDED` (it was stopped), `CANCELED` or `FAILED`; `HANDED_OVER` if
            this process had to leave, and the run continues with its next start.
        reason: the reason, as text.
        error: set if it failed.
        checkpoint: the newest completed one; 0: there is none.
        dropped: the drops of each step in this run, by kind. Records that are read again after a
            failure, and dropped again, count again. Empty: nothing was dropped.
        run: the id of the run; a run that is taken over keeps it.
        began_ms: when the run began, in ms since the epoch; 0: not known.
        ended_ms: when it ended, in ms since the epoch; 0: not known.
        restarts: the number of restarts of tasks in this run.
    """

    status: str
    reason: str
    error: HeadgateError | None = None
    checkpoint: int = 0
    dropped: tuple[Dropped, ...] = ()
    run: str = ""
    began_ms: int = 0
    ended_ms: int = 0
    restarts: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return all of it but the error, as JSON values."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {**plain, "dropped": msgspec.to_builtins(self.dropped)}

    def _repr_html_(self) -> str:
        """How the job ended as a table, which notebooks show."""
        rows: list[tuple[str, object]] = [("status", self.status), ("reason", self.reason)]
        if self.error is not None:
            rows.append(("error", self.error))
        rows.append(("newest checkpoint", self.checkpoint or "none"))
        if self.ended_ms and self.began_ms:
            rows.append(("duration", format_duration(self.ended_ms - self.began_ms)))
        rows.append(("restarts", self.restarts))
        rows += [(f"dropped by {d.step}", f"{d.count:,} {d.kind}") for d in self.dropped]
        return html_table(f"Run {self.run}".rstrip(), rows)

    @staticmethod
    def of_json(found: Mapping[str, Any], error: HeadgateError | None) -> JobOutcome:
        """The reverse of `as_json`; fields that are missing have their defaults."""
        dropped = msgspec.convert(found.get("dropped", []), tuple[Dropped, ...])
        known = {name: found[name] for name in _PLAIN if name in found}
        return JobOutcome(**known, error=error, dropped=dropped)


_PLAIN = ("status", "reason", "checkpoint", "run", "began_ms", "ended_ms", "restarts")
