"""The methods of a stream that call functions of batches, and coroutine functions with state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from ..dead_letters import OnErrorLike
from ..durations import Duration
from ..origin import capture_origin
from ..per_record import MAX_IN_FLIGHT
from ..required_name import named
from ..schema import SchemaLike
from ..stream_base import StreamBase
from .map_async import OnTimeout
from .plan import TIMEOUT, add_map_async
from .retry import Retry

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")


class Calls(StreamBase[T], Generic[T]):
    """Steps of functions that are dear to call."""

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
        """Call a function of whole `pa.RecordBatch`es. How records are cut into batches must not matter.

        Args:
            function: returns a RecordBatch; as many rows as it got keep their event times, in order.
            into: the columns it makes, if they differ from those it gets.
            name: names the step in errors and metrics; with `rows` and an `async def` function it is the
                address of the state.
            rows: call it for so many rows at a time; less at barriers, watermarks and the end.
            within: how long a row waits at most for a batch of `rows` to be full; 50 ms by default.
            max_in_flight: of an `async def` function with `rows`, batches under way, 4 by default.
            on_error: what becomes of records for which it raises; it is called for ever smaller parts of
                the batch until they are known.
        """
        from ..batch_plan import add_map_batches  # its steps are made of this package

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

    @named("async step", "the records it has calls under way for are stored under this name")
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
        """Call a coroutine function for each record, with the records under way as state.

        Args:
            function: from a record to a record.
            name: the address of the state.
            max_in_flight: calls begun whose results were not sent yet, per subtask.
            timeout: of a record, from its first attempt to the end of its last.
            ordered: results keep the order of the records; else they leave as they come, but none
                crosses a watermark.
            retry: when the function is called again for the same record.
            on_timeout: what becomes of a record whose time is up: `fail`, `side_output` (the stream
                `.timed_out`), or a function of the record that gives the result instead.
            on_error: what becomes of a record whose last attempt raised.
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
