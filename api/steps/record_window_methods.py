"""The fluent API of record-at-a-time windows: `reduce`, `aggregate`, `process`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from ...errors import PlanError
from ...operators.graph import Origin
from ...operators.origin import capture_origin
from ...operators.schema import SchemaLike
from ...operators.windows.records.functions import AggregateFunction, WindowProcess
from ...operators.windows.sessions.window import SessionWindow
from ..required_name import named
from .record_windows import Windows, describe

if TYPE_CHECKING:
    from ...operators.windows.records.evictors import Evictor
    from ...operators.windows.records.triggers import Trigger
    from ..stream import Stream
    from .process import KeyedBy

T = TypeVar("T")
Out = TypeVar("Out")
_STATE: Final = "its state is stored under this name"


class RecordWindows(Generic[T]):
    """The operations on windows that take a function of records; subclasses provide the windows."""

    def _windows(self, origin: Origin) -> Windows:
        raise NotImplementedError

    @named("stateful step", _STATE)
    def reduce(
        self,
        function: Callable[[T, T], T],
        process: WindowProcess[Any, T, Any] | None = None,
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Any]:
        """Combine the records of each key and window, two at a time, as they arrive.

        A window keeps one value. Results have the last ms of the window as event time; late records
        are in the result's `.late` stream.

        Args:
            function: `(value so far, record) -> new value`; the first record is the first value.
            process: gets the value of a window, alone in a list, with the key and the window;
                without it the value is the result.
            name: the address of the state.
            into: columns to make of the results of `process`.
        """
        origin = capture_origin()
        return self._windows(origin).reduce(function, process, name, into, origin)

    @named("stateful step", _STATE)
    def aggregate(
        self,
        function: AggregateFunction[T, Any, Out],
        process: WindowProcess[Any, Out, Any] | None = None,
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Any]:
        """Combine the records of each key and window into an accumulator, as they arrive.

        Args:
            function: an instance: `create`, `add`, `result`, and `merge` for windows that merge.
            process: gets the result of a window, alone in a list, with the key and the window;
                without it the result is emitted.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
        """
        origin = capture_origin()
        return self._windows(origin).aggregate(function, process, name, into, origin)

    @named("stateful step", _STATE)
    def process(
        self,
        function: WindowProcess[Any, T, Out],
        *,
        name: str,
        into: SchemaLike | None = None,
    ) -> Stream[Out]:
        """Call a function with all records of a window, which are kept until then, each time it fires.

        Args:
            function: an instance; each subtask works with a copy of it.
            name: the address of the state.
            into: columns to make of the results; without it they stay Python objects.
        """
        origin = capture_origin()
        return self._windows(origin).process(function, name, into, origin)


class RecordWindowedStream(RecordWindows[T]):
    """Windows that only functions of records can use; `why` says for what reason."""

    def __init__(
        self,
        stream: Stream[Any],
        keyed_by: KeyedBy,
        window: Any,
        trigger: Trigger[Any] | None,
        evictor: Evictor[Any] | None,
        why: str,
        origin: Origin,
    ) -> None:
        self._made = Windows(stream, keyed_by, window, trigger, evictor, origin)
        self._shown = f"{stream.name}, {describe(window)}"
        self._why = why

    def __repr__(self) -> str:
        return f"RecordWindowedStream({self._shown})"

    def _windows(self, origin: Origin) -> Windows:
        return self._made

    if not TYPE_CHECKING:  # a type checker shall report that these do not exist

        def agg(self, **arguments: Any) -> NoReturn:
            """Refuse: aggregates of columns do not support triggers, evictors and custom assigners."""
            raise self._refused("agg")

        def join(self, *arguments: Any, **named: Any) -> NoReturn:
            """Refuse, see `agg`."""
            raise self._refused("join")

        def co_group(self, *arguments: Any, **named: Any) -> NoReturn:
            """Refuse, see `agg`."""
            raise self._refused("co_group")

    def _refused(self, what: str) -> PlanError:
        return PlanError(
            f"{what} of windows works on whole columns, and {self._why}",
            where=str(capture_origin()),
            fix="use .reduce(...), .aggregate(...) or .process(...) on the window",
        )


def why_records(
    columns: bool,
    window: object,
    trigger: object,
    evictor: object,
    *,
    keyed_by_columns: bool,
    known: bool,
) -> str:
    """Return why these windows need functions of records; empty if they do not.

    Args:
        columns: whether the stream has columns.
        window: the value that the user gave.
        trigger: None if none was given.
        evictor: None if none was given.
        keyed_by_columns: False if a function gives the keys.
        known: whether `agg` supports this kind of window.
    """
    if not keyed_by_columns:
        return (
            "key_with gives a function, not columns; make the key a column and name it: "
            '.select("*", "lower(url) AS key").key_by("key")'
        )
    if trigger is not None or evictor is not None:
        return "a trigger or an evictor is called for each record"
    if not columns:
        return "these are Python objects"
    if isinstance(window, SessionWindow) and window.processing:
        return "these are sessions in processing time"
    if callable(getattr(window, "gap", None)):
        return "the gap of the session is a function of a record"
    return "" if known else f"{describe(window)} is called for each record"
