"""One call of a coroutine function: of what, how far, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from itertools import count
from typing import Any

from ...errors import HeadgateError
from ..elements import Batch
from ..user_code import FAILURES, is_own_cancellation
from .retry import RetryRule


class Status(Enum):
    """How far a call is."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


class Call:
    """One call, and the records it is of: `rows` of `batch` from `row` on."""

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
        """Not begun yet.

        Args:
            argument: what the function is given.
            batch: where the records came from.
            row: the first of them.
            rows: how many.
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
        """When it began, on the monotonic clock."""

    def records(self) -> Batch:
        """Its records as they came."""
        return self.batch.slice(self.row, self.rows)

    def take(self, task: asyncio.Task[Any]) -> None:
        """Its task has ended: keep what came of it."""
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
    """Call the function, again as the rule says, and return the result or raise what it raised last.

    A function may make something else of its cancellation; what nobody wants any more is not called again.
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
