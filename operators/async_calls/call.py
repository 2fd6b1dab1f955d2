"""One call of a coroutine function: its records, its status and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from itertools import count
from typing import Any

from ...errors import HeadgateError
from ..elements import Batch
from ..functions.user_code import FAILURES, is_own_cancellation
from .retry import RetryRule


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
        except FAILURES as error:
            if is_own_cancellation(error) or number >= rule.attempts or not wanted():
                raise
            if not rule.takes_exception(error):
                raise
        on_retry()
        await asyncio.sleep(rule.delay_after(number))
    raise AssertionError  # `count` does not end
