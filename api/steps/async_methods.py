"""The stream methods that call functions of batches, and coroutine functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from ...operators.async_calls.map_async import OnTimeout
from ...operators.async_calls.retry import Retry
from ...operators.durations import Duration
from ...operators.functions.dead_letters import OnErrorLike
from ...operators.origin import capture_origin
from ...operators.per_record.base import MAX_IN_FLIGHT
from ...operators.schema import SchemaLike
from ..required_name import named
from ..stream_base import StreamBase
from .async_calls import TIMEOUT, add_map_async

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")


class Calls(StreamBase[T], Generic[T]):
    """Steps whose functions are expensive to call."""

    def map_batches(
        self,
        function: Callable[[pa.RecordBatch], Any],
        *,
        into: SchemaLike | None = None,
        name: str = "",
        rows: int | None = None,
        within: Duration | None = None,
        max_in_flight: int | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Any]:
        """Call a function with whole `pa.RecordBatch`es. Results must not depend on the batch boundaries.

        Args:
            function: returns a RecordBatch; if it has as many rows as the input, they keep their
                event times, in order.
            into: the columns of the result, if they differ from those of the input.
            name: names the step in errors and metrics; with `rows` and an `async def` function it
                is the address of the state.
            rows: call it with this many rows at a time; fewer at barriers, watermarks and the end.
            within: the longest time a row waits for a batch of `rows` to fill; 50 ms by default.
            max_in_flight: for an `async def` function with `rows`, the batches in flight, 4 by
                default.
            on_error: the handling of records for which it raises; the batch is called in ever
                smaller parts until they are found.
        """
        from .batches import add_map_batches  # its steps are made of this package

        return add_map_batches(
            self,
            function,
            into=into,
            name=name,
            rows=rows,
            within=within,
            max_in_flight=max_in_flight,
            on_error=on_error,
            origin=capture_origin(),
        )

    @named("async step", "records with calls in flight are stored under this name")
    def map_async(
        self,
        function: Callable[[T], Awaitable[U]],
        *,
        name: str,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout: Duration = TIMEOUT,
        ordered: bool = True,
        retry: Retry | None = None,
        on_timeout: OnTimeout = "fail",
        on_error: OnErrorLike = "fail",
        into: SchemaLike | None = None,
    ) -> Stream[U]:
        """Call a coroutine function for each record; records with calls in flight are state.

        Args:
            function: from a record to a record.
            name: the address of the state.
            max_in_flight: calls begun whose results were not emitted yet, per subtask.
            timeout: for a record, from its first attempt to the end of its last.
            ordered: results keep the order of the records; otherwise they are emitted as calls
                finish, but none crosses a watermark.
            retry: when the function is called again for the same record.
            on_timeout: the handling of a timed-out record: `fail`, `side_output` (the stream
                `.timed_out`), or a function of the record that gives the result instead.
            on_error: the handling of a record whose last attempt raised.
            into: make columns of the results.
        """
        return add_map_async(
            self,
            None,
            function,
            name=name,
            max_in_flight=max_in_flight,
            timeout=timeout,
            ordered=ordered,
            retry=retry,
            on_timeout=on_timeout,
            on_error=on_error,
            into=into,
            origin=capture_origin(),
        )
