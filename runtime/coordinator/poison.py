"""Failures of one record again and again: the job fails of it for good (features.md REC-16)."""

from __future__ import annotations

from dataclasses import replace

from ...errors import UserCodeError
from ..protocol.failures import FailureKind
from ..protocol.poison import PoisonCounter
from .context import Failure


class PoisonJudge:
    """Looks at the failures that end attempts."""

    def __init__(self, failures_max: int | None) -> None:
        self._counter = None if failures_max is None else PoisonCounter(failures_max)

    def judged(self, failure: Failure, now_ms: int) -> Failure:
        """The failure; as one that is not to be tried again, if its record has failed the job before."""
        error = failure.error
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
