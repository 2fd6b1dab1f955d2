"""The methods of a stream without keys that call process functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ...errors import PlanError
from ...operators.functions.dead_letters import OnErrorLike
from ...operators.origin import capture_origin
from ...operators.process.functions import Process
from ...operators.schema import SchemaLike
from ..required_name import named
from ..stream_base import StreamBase

if TYPE_CHECKING:
    from ..connected import BroadcastConnected, BroadcastStream, ConnectedStreams
    from ..stream import Stream

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")


class Processes(StreamBase[T], Generic[T]):
    """Steps of functions with state of the subtask."""

    @named("stateful step", "its state is stored under this name")
    def process(
        self,
        function: Process[T, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Out]:
        """Call a function with state of the subtask, and side outputs, for each record.

        Records keep their distribution: after `rebalance()` a subtask gets any of them. State per
        key and timers need `key_by` or `key_with` before.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
            on_error: the handling of records for which it raises, as for `KeyedStream.process`.
        """
        from .process import add_keyless  # makes streams

        return add_keyless(self._whole, function, name, into, on_error, capture_origin())

    @overload
    def connect(self, other: BroadcastStream[U]) -> BroadcastConnected[T, U]: ...  # type: ignore[overload-overlap]
    @overload
    def connect(self, other: Stream[U]) -> ConnectedStreams[T, U]: ...
    def connect(
        self, other: Stream[U] | BroadcastStream[U]
    ) -> ConnectedStreams[T, U] | BroadcastConnected[T, U]:
        """Connect this stream and another, both without keys, for one function; follow with
        `.process(...)`.

        Args:
            other: a stream, or `stream.broadcast()`, which every subtask gets.
        """
        from ..connected import BroadcastConnected, BroadcastStream, ConnectedStreams
        from ..stream import Stream

        origin = capture_origin()
        if isinstance(other, BroadcastStream):
            return BroadcastConnected((self._whole, None), other, origin)
        if isinstance(other, Stream):
            return ConnectedStreams((self._whole, None), (other, None), origin)
        raise PlanError(
            f"connect needs a stream without keys here, got `{type(other).__name__}`",
            where=str(origin),
            fix="call .key_by(...) or .key_with(...) on both streams, or on none",
        )

    @property
    def _whole(self) -> Stream[Any]:
        from ..stream import Stream

        assert isinstance(self, Stream)
        return self
