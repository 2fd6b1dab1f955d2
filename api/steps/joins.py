"""Joins of keyed streams: the methods, the checks of their arguments, and the nodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

import pyarrow as pa

from ...errors import PlanError
from ...operators.base import OperatorFactory
from ...operators.durations import Duration, format_duration, parse_duration
from ...operators.functions.checks import check_plain, function_name
from ...operators.graph import Node
from ...operators.joins.as_of import AsOfJoin
from ...operators.joins.co_group import CoGroup, CoGroupFunction, CoGroupStep
from ...operators.joins.columns import JoinColumns, join_columns
from ...operators.joins.interval import IntervalJoin, parse_interval, show_interval
from ...operators.joins.step import AS_OF_HOWS, HOWS, LATE_OTHER, How, JoinStep, outer_sides
from ...operators.joins.windowed import WindowJoin
from ...operators.origin import Origin, capture_origin
from ...operators.partitioning import HashColumns, HashFunction, Partitioning
from ...operators.per_record.base import UserFunction
from ...operators.rows import RowReader
from ...operators.schema import SchemaLike, record_class
from ...operators.suggestions import suggest
from ...operators.windows.late import late_sides
from ..required_name import named
from ..stream_base import into_schema

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")
_STATE = "its state is stored under this name"

_ANY_SUFFIX = " of the other"
Keyed: TypeAlias = "tuple[Stream[Any], HashColumns | HashFunction]"


def add_interval_join(
    left: Keyed,
    right: Keyed,
    within: object,
    how: How,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.join(other, within=...)`."""
    interval = parse_interval(within, origin)
    columns = checked_columns(left, right, how, HOWS, suffix, origin)
    step = JoinStep(name, columns, outer_sides(how))
    detail = f"{show_interval(interval)}, {how}"
    factory = partial(IntervalJoin, step, interval)
    return add_join(left, right, "interval_join", name, factory, columns.result, detail, origin)


def add_as_of_join(
    left: Keyed,
    versions: Keyed,
    how: How,
    valid_for: Duration | None,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.join_as_of(versions)`."""
    columns = checked_columns(left, versions, how, AS_OF_HOWS, suffix, origin)
    valid_for_ms, detail = None, str(how)
    if valid_for is not None:
        valid_for_ms = parse_duration(valid_for, "valid_for", str(origin))
        if valid_for_ms < 1:
            raise PlanError(f"valid_for must be positive value=`{valid_for}`", where=str(origin))
        detail = f"{how}, versions valid for {format_duration(valid_for_ms)}"
    factory = partial(AsOfJoin, JoinStep(name, columns, outer_sides(how)), valid_for_ms)
    return add_join(left, versions, "as_of_join", name, factory, columns.result, detail, origin)


def add_window_join(
    left: Keyed,
    right: Keyed,
    window: Any,
    how: How,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.window(...).join(other)`."""
    check_window(window, "a window join", origin)
    columns = checked_columns(left, right, how, HOWS, suffix, origin)
    factory = partial(WindowJoin, JoinStep(name, columns, outer_sides(how)), window)
    detail = f"{window.describe()}, {how}"
    return add_join(left, right, "window_join", name, factory, columns.result, detail, origin)


def add_co_group(
    left: Keyed,
    right: Keyed,
    window: Any,
    function: CoGroupFunction,
    into: SchemaLike | None,
    name: str,
    origin: Origin,
) -> Stream[Any]:
    """Add the step of `keyed.window(...).co_group(other, function)`."""
    check_window(window, "co_group", origin)
    check_plain(function, "co_group", origin)
    # Both sides stay apart, so names may clash; the suffix only makes the unused result possible.
    columns = checked_columns(left, right, "inner", HOWS, _ANY_SUFFIX, origin)
    schema = None if into is None else into_schema(into, origin)
    whole = RowReader(None, None, function)
    step = CoGroupStep(
        JoinStep(name, columns, outer_sides("inner")),
        function,
        UserFunction(cast(Any, function), name, origin, whole, schema),
        (left[0]._row_type, right[0]._row_type),
    )
    detail = f"{window.describe()}, {function_name(function)}"
    factory = partial(CoGroup, step, window)
    result = add_join(left, right, "co_group", name, factory, schema, detail, origin)
    result._node.row_type = record_class(into)
    return result


def check_window(window: Any, what: str, origin: Origin) -> None:
    """Raise PlanError unless the window is one of event time that joins support."""
    early = getattr(window, "early", None)
    if not hasattr(window, "grid") or early or window.processing:
        raise PlanError(
            f"{what} takes windows of event time without early results window=`{window.describe()}`",
            where=str(origin),
            fix="such as hg.tumbling or hg.sliding, without emit_every= and emit_rows=",
        )


def checked_columns(
    left: Keyed,
    right: Keyed,
    how: How,
    hows: tuple[str, ...],
    suffix: str | None,
    origin: Origin,
) -> JoinColumns:
    """Return the columns of a join of two keyed streams.

    Raises:
        PlanError: they cannot be joined.
    """
    if how not in hows:
        raise PlanError(f"unknown how `{how}`", where=str(origin), fix=suggest(how, hows, "how"))
    if left[0]._job is not right[0]._job:
        raise PlanError(
            f"`{left[0].name}` and `{right[0].name}` are streams of different jobs",
            where=str(origin),
            fix="read both with the same hg.Job",
        )
    schemas = tuple(stream._columns("join", origin) for stream, _ in (left, right))
    keys = tuple(_key_columns(keyed_by, origin) for _, keyed_by in (left, right))
    for stream, _ in (left, right):
        if not stream.has_event_time:
            raise PlanError(
                f"a join needs event time, and `{stream.name}` has none",
                where=str(origin),
                fix='call .event_time("column", max_out_of_order="10s") on both streams before',
            )
    outer = outer_sides(how)
    nullable = (outer[1], outer[0])
    names = (left[0].name, right[0].name)
    return join_columns(
        (schemas[0], schemas[1]), (keys[0], keys[1]), nullable, suffix, names, origin
    )


def add_join(
    left: Keyed,
    right: Keyed,
    kind: str,
    name: str,
    factory: OperatorFactory,
    schema: pa.Schema | None,
    detail: str,
    origin: Origin,
) -> Stream[Any]:
    """Add the node of a join, and the side outputs of late rows."""
    node = Node(
        id=-1,
        name=name,
        kind=kind,
        origin=origin,
        inputs=tuple(stream._input(keyed_by) for stream, keyed_by in (left, right)),
        factory=factory,
        schema=schema,
        stateful=True,
        sides={
            **late_sides(left[0].schema),
            **late_sides(right[0].schema, LATE_OTHER),
        },
        detail=detail,
    )
    return left[0]._like(left[0]._job.add_node(node))


def _key_columns(keyed_by: HashColumns | HashFunction, origin: Origin) -> tuple[str, ...]:
    if isinstance(keyed_by, HashColumns):
        return keyed_by.columns
    raise PlanError(
        "a join needs keys made of columns, and key_with gives a function",
        where=str(origin),
        fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
    )


class KeyedJoins(Generic[T]):
    """The joins of a keyed stream."""

    _stream: Stream[T]
    _keyed_by: HashColumns | HashFunction

    @named("stateful step", _STATE)
    def join(
        self,
        other: KeyedJoins[Any],
        *,
        within: tuple[Duration, Duration],
        how: How = "inner",
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join records of equal keys that are near each other in event time.

        The result has the columns of both, keys of equal names once, and the later of both event
        times. Late records are in `.late`, those of `other` in `.side("late_other")`.

        Args:
            other: the other keyed stream, of the same job.
            within: the bounds of the other record's time relative to this one's, both inclusive.
                `("-10m", "0s")`: it is up to ten minutes older.
            how: `inner`; `left`, `right` or `full` also emit records without a match, with nulls
                for the other side, once event time shows that none will come.
            suffix: appended to columns of `other` whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        left, right = self._as_input(), other_input(other, "join", origin)
        return add_interval_join(left, right, within, how, name, suffix, origin)

    @named("stateful step", _STATE)
    def join_as_of(
        self,
        versions: KeyedJoins[Any],
        *,
        how: Literal["inner", "left"] = "inner",
        valid_for: Duration | None = None,
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join each record with the version of its key that is valid at the record's event time.

        A version is valid from its event time until that of the next one. Records wait for the
        watermark; of the versions before it, the newest of each key is kept while it is valid. Late
        records are in `.late`, versions that came too late to take effect in `.side("late_other")`.

        Args:
            versions: the keyed stream of versions, of the same job.
            how: `inner`; `left` also emits records without a version, with nulls for it.
            valid_for: the longest time a version is valid, in event time; then it is dropped.
                Without it the newest version of each key is kept for ever.
            suffix: appended to columns of the versions whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        left, right = self._as_input(), other_input(versions, "join_as_of", origin)
        return add_as_of_join(left, right, how, valid_for, name, suffix, origin)

    def _as_input(self) -> Keyed:
        return self._stream, self._keyed_by


class WindowedJoins:
    """The joins of a windowed keyed stream."""

    _stream: Stream[Any]
    _partitioning: Partitioning
    _window: Any

    @named("stateful step", _STATE)
    def join(
        self,
        other: KeyedJoins[Any],
        *,
        how: How = "inner",
        suffix: str | None = None,
        name: str,
    ) -> Stream[Any]:
        """Join records of equal keys in the same window; emit the pairs when the window ends.

        The result has the columns of both, keys of equal names once, and the event time of the
        window's last millisecond. Late records are in `.late`, those of `other` in
        `.side("late_other")`. A record within the allowed lateness adds its pairs to the result.

        Args:
            other: the other keyed stream, of the same job.
            how: `inner`; `left`, `right` or `full` also emit records without a match, with nulls
                for the other side.
            suffix: appended to columns of `other` whose names are taken.
            name: the address of the state.
        """
        origin = capture_origin()
        left, right = self._keyed_input("join", origin), other_input(other, "join", origin)
        return add_window_join(left, right, self._window, how, name, suffix, origin)

    @named("stateful step", _STATE)
    def co_group(
        self,
        other: KeyedJoins[Any],
        function: CoGroupFunction,
        *,
        into: SchemaLike | None = None,
        name: str,
    ) -> Stream[Any]:
        """Call a function for each key of a window, with all its records of both streams.

        Args:
            other: the other keyed stream, of the same job.
            function: `(key, records, records of other)`; returns or yields results. The key is a tuple if
                it has several columns.
            into: columns to make of the results; without it they stay Python objects.
            name: the address of the state.
        """
        origin = capture_origin()
        left = self._keyed_input("co_group", origin)
        right = other_input(other, "co_group", origin)
        return add_co_group(left, right, self._window, function, into, name, origin)

    def _keyed_input(self, what: str, origin: Origin) -> Keyed:
        if isinstance(self._partitioning, HashColumns):
            return self._stream, self._partitioning
        raise PlanError(
            f"{what} needs a key", where=str(origin), fix="call .key_by(...) before .window(...)"
        )


def other_input(other: object, what: str, origin: Origin) -> Keyed:
    """Return the second stream of a join.

    Raises:
        PlanError: it is not keyed.
    """
    if isinstance(other, KeyedJoins):
        return other._as_input()
    raise PlanError(
        f"{what} needs a keyed stream, got `{type(other).__name__}`",
        where=str(origin),
        fix="call .key_by(...) on it",
    )
