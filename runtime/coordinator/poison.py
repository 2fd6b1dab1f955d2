"""Failures that come again and again: of one record, or by a bug. The job then fails for good."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ...errors import InternalError, JobError, UserCodeError
from ..protocol.failures import FailureKind
from ..protocol.poison import PoisonCounter, RepeatCounter
from .context import Failure

_OF_THE_PROGRAM: Final = (FailureKind.INTERNAL, FailureKind.JOB)
"""Kinds for which another attempt helps only if the failure depended on timing."""


class PoisonJudge:
    """Looks at the failures that end attempts."""

    def __init__(self, failures_max: int | None, repeats_max: int) -> None:
        self._counter = None if failures_max is None else PoisonCounter(failures_max)
        self._repeats = RepeatCounter(repeats_max)

    def judged(self, failure: Failure, now_ms: int, checkpoint: int) -> Failure:
        """The failure; as one that is not tried again, if the same has failed the job too often.

        Args:
            failure: why the attempt is over.
            now_ms: the time, in ms since 1970.
            checkpoint: the newest completed checkpoint.
        """
        error = failure.error
        if failure.kind in _OF_THE_PROGRAM:
            return self._repeated(failure, checkpoint)
        if self._counter is None or not isinstance(error, UserCodeError):
            return failure
        count = self._counter.failed(error.step, error.record_id, now_ms)
        if count is None:
            return failure
        position = f"; the source had read up to {error.position}" if error.position else ""
        text = f"the same record failed the job {count} times{position}: {failure.text}"
        poison = UserCodeError(
            text,
            where=error.where,
            fix='correct the function, or let the step go on without such records: on_error="side_output"',
            detail=error.detail,
        )
        return replace(failure, text=text, kind=FailureKind.POISON, error=poison)

    def _repeated(self, failure: Failure, checkpoint: int) -> Failure:
        count = self._repeats.failed(failure.where, failure.text, checkpoint)
        if count is None:
            return failure
        text = f"the job failed the same way {count} times, without a checkpoint in between: {failure.text}"
        kind = JobError if failure.kind is FailureKind.JOB else InternalError
        error = kind(text, where=failure.error.where, fix=failure.error.fix)
        error.detail = failure.detail
        return replace(failure, text=text, kind=FailureKind.REPEATED, error=error)
