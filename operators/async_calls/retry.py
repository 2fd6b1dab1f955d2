"""Retries of failed calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import PlanError
from ..durations import Duration, parse_duration
from ..functions.checks import check_plain
from ..origin import Origin

Exceptions: TypeAlias = (
    type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]
)


@dataclass(frozen=True)
class Retry:
    """The rule by which `map_async` calls its function again for the same record.

    Attributes:
        attempts: the most calls of a record, the first one included.
        delay: the pause between the first call and the second.
        factor: the growth of each further delay; 1: all are the same.
        longest: the longest delay.
        on_exception: the exceptions that are retried: classes, or a function of the exception.
        on_result: a function that says of a result whether to retry; the last result is final.
    """

    attempts: int = 3
    delay: Duration = "100ms"
    factor: float = 1.0
    longest: Duration = "1m"
    on_exception: Exceptions = Exception
    on_result: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class RetryRule:
    """A validated `Retry`, with durations in seconds. Picklable."""

    attempts: int = 1
    delay_s: float = 0.0
    factor: float = 1.0
    longest_s: float = 0.0
    on_exception: Exceptions = Exception
    on_result: Callable[[Any], bool] | None = None

    def takes_exception(self, error: BaseException) -> bool:
        """Return True if this failure is retried."""
        wanted = self.on_exception
        if isinstance(wanted, type | tuple):
            return isinstance(error, wanted)
        return bool(wanted(error))

    def takes_result(self, result: Any) -> bool:
        """Return True if this result is retried."""
        return self.on_result is not None and bool(self.on_result(result))

    def delay_after(self, attempt: int) -> float:
        """Return the seconds between call number `attempt`, from 1, and the next."""
        if self.delay_s >= self.longest_s:
            return self.longest_s
        try:
            return min(self.longest_s, self.delay_s * self.factor ** (attempt - 1))
        except OverflowError:
            return self.longest_s


ONCE = RetryRule()


def checked_retry(retry: object, origin: Origin) -> RetryRule:
    """Validate the user's rule; None means no retries.

    Raises:
        PlanError: the rule is invalid.
    """
    if retry is None:
        return ONCE
    where = str(origin)
    if not isinstance(retry, Retry):
        raise PlanError(
            f"retry= needs a Retry, got `{type(retry).__name__}`",
            where=where,
            fix='such as retry=hg.Retry(attempts=3, delay="100ms", factor=2)',
        )
    attempts, factor = retry.attempts, retry.factor
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise PlanError(
            f"attempts of a Retry must be a whole number of at least 1 value=`{attempts}`",
            where=where,
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise PlanError(f"factor of a Retry must be at least 1 value=`{factor}`", where=where)
    if retry.on_result is not None:
        check_plain(retry.on_result, "on_result of a Retry", origin)
    _check_exceptions(retry.on_exception, origin)
    return RetryRule(
        attempts,
        parse_duration(retry.delay, "delay of a Retry", where) / 1000,
        float(factor),
        parse_duration(retry.longest, "longest of a Retry", where) / 1000,
        retry.on_exception,
        retry.on_result,
    )


def _check_exceptions(wanted: object, origin: Origin) -> None:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if isinstance(wanted, tuple | type):
        if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            return
        raise PlanError(
            f"on_exception of a Retry needs classes of exceptions value=`{wanted!r}`",
            where=str(origin),
            fix="such as on_exception=(ConnectionError, TimeoutError)",
        )
    check_plain(wanted, "on_exception of a Retry", origin)
