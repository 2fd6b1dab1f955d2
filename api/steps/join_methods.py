"""The joins of keyed streams, as methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ...errors import PlanError
from ...operators.durations import Duration
from ...operators.graph import Origin
from ...operators.joins.co_group import CoGroupFunction
from ...operators.joins.step import How
from ...operators.origin import capture_origin
from ...operators.partitioning import HashColumns, HashFunction, Partitioning
from ...operators.schema import SchemaLike
from ..required_name import named
from .joins import Keyed, add_as_of_join, add_co_group, add_interval_join, add_window_join

if TYPE_CHECKING:
    from ..stream import Stream

T = TypeVar("T")

_STATE = "its state is stored under this name"


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
