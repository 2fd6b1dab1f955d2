"""One call of a coroutine function: its records, its status and outcome, and its retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, TypeAlias

import msgspec

from ...errors import HeadgateError, PlanError
from ..durations import Duration, parse_duration
from ..elements import Batch
from ..functions.checks import check_plain
from ..functions.user_code import is_own_cancellation, user_failures
from ..origin import Origin
from ..whole_numbers import check_whole_number

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


class RetryRule(msgspec.Struct, frozen=True):
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
    check_whole_number("attempts of a Retry", attempts, origin)
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


class Status(Enum):
    """The status of a call."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


class Call:
    """One call and its records: `rows` rows of `batch` from `row` on."""

    __slots__ = (
        "argument", "batch", "began_s", "error", "key", "result", "row", "rows", "saved", "segment",
        "status", "task",
    )  # fmt: skip

    def __init__(
        self,
        argument: Any,
        batch: Batch,
        row: int,
        rows: int = 1,
        *,
        key: Any = None,
        saved: bytes | Exception | None = None,
    ) -> None:
        """Create a call that has not begun.

        Args:
            argument: the argument of the function.
            batch: the batch of the records.
            row: the first record.
            rows: the number of records.
            key: a token of the key, in streams where calls of a key wait for each other.
            saved: a record that is a Python object, pickled before the function could change it.
        """
        self.argument = argument
        self.batch = batch
        self.row = row
        self.rows = rows
        self.key = key
        self.saved = saved
        self.status = Status.OPEN
        self.result: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[Any] | None = None
        self.segment: Any = None
        self.began_s = 0.0
        """The time of its beginning, on the monotonic clock."""

    def records(self) -> Batch:
        """The records as they arrived."""
        return self.batch.slice(self.row, self.rows)

    def take(self, task: asyncio.Task[Any]) -> None:
        """Record the outcome of the call's task, which has ended."""
        self.error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self.error is None:
            self.status, self.result = Status.DONE, task.result()
        else:
            self.status = Status.FAILED


async def attempt(
    function: Callable[[Any], Awaitable[Any]],
    argument: Any,
    rule: RetryRule,
    on_retry: Callable[[], None],
    wanted: Callable[[], bool],
) -> Any:
    """Call the function, retrying as the rule says; return the result or raise the last error.

    A function may turn its cancellation into another outcome; a call that is no longer wanted is
    not retried.
    """
    for number in count(1):
        try:
            result = await function(argument)
            if number >= rule.attempts or not wanted() or not rule.takes_result(result):
                return result
        except HeadgateError:
            raise
        except user_failures() as error:
            if is_own_cancellation(error) or number >= rule.attempts or not wanted():
                raise
            if not rule.takes_exception(error):
                raise
        on_retry()
        await asyncio.sleep(rule.delay_after(number))
    raise AssertionError  # `count` does not end
