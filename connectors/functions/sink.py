"""A function of the user as a sink: for each record, or for some records at a time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ...errors import HeadgateError, JobError, UsageError
from ...operators.async_calls.call import Retry, RetryRule, attempt, checked_retry
from ...operators.async_calls.in_flight import RETRIES_COUNTER
from ...operators.base import OperatorContext
from ...operators.durations import Duration, parse_duration
from ...operators.elements import Batch, ColumnBatch
from ...operators.functions.checks import check_takes, function_name, is_async, is_async_generator
from ...operators.functions.life import check_life, has_life
from ...operators.functions.user_code import (
    Several,
    describe_record,
    is_own_cancellation,
    user_error,
    user_failures,
)
from ...operators.origin import Origin, capture_origin
from ...operators.rows import to_rows
from ...operators.sink import Guarantee, GuaranteeLike, Sink, SinkWriter, parse_guarantee
from ..arguments import check_choice, check_count
from .calling import CallBounds, CallingWriter
from .loop_thread import called

RecordsAs = Literal["list", "arrow"]
FORMS: Final[tuple[RecordsAs, ...]] = ("list", "arrow")
WITHIN: Final = "1s"
TIMEOUT: Final = "1m"


@dataclass(frozen=True)
class CallRules:
    """The calls of a function beside the subtask.

    Attributes:
        bounds: the records of a call, and the calls at the same time.
        one: each call has one record, which is the argument itself.
        records: the form of the argument: a list of records, or a `pyarrow.RecordBatch`.
        timeout_s: the longest time of a call, all its attempts included; None: no limit.
        retry: when a call is repeated.
    """

    bounds: CallBounds
    one: bool
    records: RecordsAs
    timeout_s: float | None
    retry: RetryRule


class FunctionSink(Sink):
    """Calls a function for each record, or for some at a time."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        guarantee: Guarantee,
        origin: Origin,
        rules: CallRules | None,
    ) -> None:
        """Make a sink.

        Args:
            function: the user's.
            guarantee: that the user has chosen.
            origin: the user's line.
            rules: of calls beside the subtask; None: calls in the subtask, one for each record.
        """
        self.function = function
        self.guarantee = guarantee
        self._origin = origin
        self._rules = rules
        self.needs_columns = rules is not None and rules.records == "arrow"

    def writer(self) -> SinkWriter:
        if self._rules is None:
            return FunctionWriter(self.function, self._origin)
        return BatchFunctionWriter(self.function, self._origin, self._rules)

    def describe(self) -> str:
        name = getattr(self.function, "__name__", "function")
        rules = self._rules
        if rules is None or rules.one:
            return f"function({name})"
        return f"function({name}, {rules.bounds.rows} records a call)"


class FunctionWriter(SinkWriter):
    """Calls the function in the subtask. A slow function slows the job down, which is the backpressure."""

    def __init__(self, function: Callable[[Any], Any], origin: Origin) -> None:
        self._origin = origin
        self._has_life = has_life(function)
        self._function: Any = copy.deepcopy(function) if self._has_life else function

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        if self._has_life and hasattr(self._function, "open"):
            self._function.open(context)

    def finish(self) -> None:
        if self._has_life and hasattr(self._function, "finish"):
            self._function.finish()

    def close(self) -> None:
        if self._has_life and hasattr(self._function, "close"):
            self._function.close()

    def write(self, batch: Batch) -> None:
        records = to_rows(batch.data) if isinstance(batch, ColumnBatch) else batch.records
        function = self._function
        done = 0
        try:
            for record in records:
                function(record)
                done += 1
        except HeadgateError:
            raise
        except user_failures() as error:
            step = self.context.operator_name
            raise user_error(step, self._origin, records[done], error) from error


class BatchFunctionWriter(CallingWriter):
    """Calls the function in a thread beside the subtask."""

    def __init__(self, function: Callable[[Any], Any], origin: Origin, rules: CallRules) -> None:
        super().__init__(rules.bounds)
        self._origin = origin
        self._rules = rules
        self._function = OwnCopy(function, origin)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._retried = context.metrics.counter(RETRIES_COUNTER)

    async def begin(self) -> None:
        await self._function.open(self.context)

    async def end(self) -> None:
        await self._function.finish()

    async def release(self) -> None:
        await self._function.close()

    async def call(self, batch: Batch) -> None:
        rules = self._rules

        async def make(_: Batch) -> None:
            argument = argument_of(batch, rules.records)
            await called(self._function.function, argument[0] if rules.one else argument)

        limit = asyncio.timeout(rules.timeout_s)
        try:
            async with limit:
                await attempt(make, batch, rules.retry, self._retried.inc, lambda: True)
        except HeadgateError:
            raise
        except user_failures() as error:
            if is_own_cancellation(error):
                raise
            step = self.context.operator_name
            if limit.expired():
                raise JobError(
                    f"the function of `{step}` took longer than its timeout_s=`{rules.timeout_s:g}`",
                    where=str(self._origin),
                    fix="give function_sink a longer timeout=, or fewer records a call with rows=",
                ) from error
            record = argument_of(batch, "list")[0] if rules.one else several(batch)
            raise user_error(step, self._origin, record, error) from error


class OwnCopy:
    """One subtask's copy of a function object, with its life cycle; any other function as it is."""

    def __init__(self, function: Callable[..., Any], origin: Origin) -> None:
        self._origin = origin
        self._has_life = has_life(function)
        self.function: Any = copy.deepcopy(function) if self._has_life else function
        self._opened = False
        self._step = ""

    async def open(self, context: OperatorContext) -> None:
        """Call its `open(ctx)`, if it has one.

        Raises:
            UserCodeError: it raised.
        """
        self._step = context.operator_name
        await self._call("open", context)
        self._opened = True

    async def finish(self) -> None:
        """Call its `finish()`, if it has one.

        Raises:
            UserCodeError: it raised.
        """
        await self._call("finish")

    async def close(self) -> None:
        """Call its `close()`, if it has one and was opened.

        Raises:
            UserCodeError: it raised.
        """
        if self._opened:
            self._opened = False
            await self._call("close")

    async def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self.function, name, None) if self._has_life else None
        if method is None:
            return
        try:
            await called(method, *arguments)
        except HeadgateError:
            raise
        except user_failures() as error:
            if is_own_cancellation(error):
                raise
            raise user_error(self._step, self._origin, None, error) from error


def argument_of(batch: Batch, records: RecordsAs) -> Any:
    """Return a batch as the function of a user is given it, in a list that the function may change."""
    if not isinstance(batch, ColumnBatch):
        return list(batch.records)
    return batch.data if records == "arrow" else to_rows(batch.data)


def several(batch: Batch) -> Several:
    """Return what stands for the records of a batch in an error."""
    first = to_rows(batch.data.slice(0, 1)) if isinstance(batch, ColumnBatch) else batch.records
    return Several(f"{len(batch)} records, the first of which is {describe_record(first[0])}")


def check_function(
    kind: str, function: object, takes: tuple[str, ...], origin: Origin, *, may_await: bool
) -> None:
    """Check that a sink can call a function of the user, and the methods of its life cycle.

    Args:
        kind: the name of the sink's function, for errors.
        function: the user's.
        takes: the names of its arguments.
        origin: the user's line.
        may_await: whether methods of its life cycle may be coroutine functions.

    Raises:
        UsageError: it cannot.
    """
    if not callable(function):
        raise UsageError(f"{kind} takes a function, got `{type(function).__name__}`")
    if is_async_generator(function):
        raise UsageError(
            f"{kind} takes a function that returns, and this one yields", fix="remove the yield"
        )
    check_takes(function, takes, kind, origin)
    if not has_life(function):
        return
    check_life(function, origin, may_await=may_await)
    told = [n for n in ("on_checkpoint_complete", "on_checkpoint_aborted") if hasattr(function, n)]
    if told:
        raise UsageError(
            f"`{told[0]}` of a {kind} would never be called",
            fix="put a process function before the sink, or write a connector",
        )


def check_form(records: str) -> None:
    """Raise UsageError unless records can have this form."""
    check_choice("records", records, FORMS, "form", "forms")


def function_sink(
    function: Callable[[Any], Any],
    *,
    guarantee: GuaranteeLike = "at_least_once",
    rows: int | None = None,
    within: Duration | None = None,
    max_in_flight: int | None = None,
    timeout: Duration | None = None,
    retry: Retry | None = None,
    records: RecordsAs = "list",
) -> FunctionSink:
    """Return a sink that calls `function(record)` with each object, or with each row, which has its
    columns as attributes; with `rows`, it calls `function(records)` with a list of them.

    A plain function of one record is called in the subtask, which waits for it. An `async def` function,
    and any function with `rows`, is called in a thread beside the subtask. All calls for records before
    a barrier succeed before its checkpoint completes.

    The call should be idempotent: after a failure records since the last checkpoint come again. A
    function object may have `open(ctx)`, `finish()`, which is called at the end of the input, and
    `close()`. Each subtask calls those of its own copy. Beside the subtask they may be `async def`.

    Args:
        function: a plain or an `async def` function; its result is ignored.
        guarantee: `at_least_once`, or `none` for jobs without checkpoints.
        rows: the most records of a call, in a list. A call has fewer at barriers, at the end, and after
            `within`.
        within: with `rows`: the longest time a record waits for others, 1 s by default.
        max_in_flight: for an `async def` function: the most calls at the same time, per subtask. With 1,
            the default, calls are made in the order of the records, one after the other.
        timeout: for an `async def` function: the longest time of a call, all its attempts included, 1 min
            by default.
        retry: when a call that raised is made again, with the same records, as for `map_async`.
        records: with `rows`: `list`, or `arrow` for a `pyarrow.RecordBatch`.

    Raises:
        UsageError: an argument is wrong, or does not apply to this function.
    """
    origin = capture_origin()
    beside = rows is not None or is_async(function)
    takes = ("the record",) if rows is None else ("the records",)
    check_function("function_sink", function, takes, origin, may_await=beside)
    check_form(records)
    awaits = is_async(function)
    without_rows = {"within": within, "records": None if records == "list" else records}
    without_await = {"max_in_flight": max_in_flight, "timeout": timeout}
    if rows is None and (name := _given(without_rows)):
        raise UsageError(
            f"{name} of function_sink applies to calls with several records", fix="add rows=500"
        )
    if not awaits and (name := _given(without_await)):
        raise UsageError(
            f"{name} of function_sink applies to an `async def` function, and this one is plain "
            f"function=`{function_name(function)}`",
            fix="make it an async def function, or leave the argument out",
        )
    if not beside and retry is not None:
        raise UsageError(
            "a plain function of one record is not retried, because the subtask waits for it",
            fix="make it an async def function, or add rows=1",
        )
    rules = None
    if beside:
        bounds = CallBounds(
            _checked("rows", 1 if rows is None else rows),
            parse_duration(WITHIN if within is None else within, "within"),
            _checked("max_in_flight", 1 if max_in_flight is None else max_in_flight),
        )
        limit_ms = parse_duration(TIMEOUT if timeout is None else timeout, "timeout")
        check_count("timeout", limit_ms, 1)
        rules = CallRules(
            bounds,
            rows is None,
            records,
            limit_ms / 1000 if awaits else None,
            checked_retry(retry, origin),
        )
    return FunctionSink(function, parse_guarantee(guarantee), origin, rules)


def _given(arguments: Mapping[str, object]) -> str:
    """Return the name of an argument that was given, an empty text if none was."""
    return next((name for name, value in arguments.items() if value is not None), "")


def _checked(name: str, value: int) -> int:
    check_count(name, value, 1)
    return value
