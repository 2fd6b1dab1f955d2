"""Two streams with one process function: both keyed, or one keyed and one broadcast."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ..operators.functions.dead_letters import OnErrorLike
from ..operators.origin import Origin, capture_origin
from ..operators.process.functions import BroadcastProcess, CoProcess
from ..operators.schema import SchemaLike
from .node_output import NodeOutput
from .required_name import named
from .steps.process import add_broadcast, add_connected, check_connected
from .stream import Stream

T = TypeVar("T")
U = TypeVar("U")
Out = TypeVar("Out")

_STATE = "its state is stored under this name"


class BroadcastStream(Stream[T]):
    """A stream whose records all go to every subtask of the next step.

    It has the name given to `broadcast`, or that of the step that makes the stream.
    """


class ConnectedStreams(Generic[T, U]):
    """Two streams, both keyed by the same keys or both without keys; `process` calls a function."""

    def __init__(self, first: NodeOutput, second: NodeOutput, origin: Origin) -> None:
        check_connected(first, second, origin)
        self._first = first
        self._second = second

    def __repr__(self) -> str:
        return f"ConnectedStreams({self._first.name}, {self._second.name})"

    @named("stateful step", _STATE)
    def process(
        self,
        function: CoProcess[Any, T, U, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Out]:
        """Call a function with shared state for each record of both streams.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
            on_error: the handling of records and timers for which it raises, as for
                `KeyedStream.process`.
        """
        origin = capture_origin()
        return Stream(
            add_connected(self._first, self._second, function, name, into, on_error, origin)
        )


class BroadcastConnected(Generic[T, U]):
    """A stream, keyed or not, and a broadcast one; `process` calls a function."""

    def __init__(self, output: NodeOutput, broadcast: NodeOutput, origin: Origin) -> None:
        check_connected(output, broadcast, origin)
        self._output = output
        self._broadcast = broadcast

    def __repr__(self) -> str:
        return f"BroadcastConnected({self._output.name}, {self._broadcast.name})"

    @named("stateful step", _STATE)
    def process(
        self,
        function: BroadcastProcess[Any, T, U, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
        on_error: OnErrorLike = "fail",
    ) -> Stream[Out]:
        """Call a function for each record, and in every subtask for each broadcast record.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
            on_error: the handling of records and timers for which it raises, as for
                `KeyedStream.process`.
        """
        origin = capture_origin()
        return Stream(
            add_broadcast(self._output, self._broadcast, function, name, into, on_error, origin)
        )
